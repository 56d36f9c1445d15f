"""From checkpoints to the family's folder: folded, 16-bit, in our own format."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxspec
from experiments.emoji import (
    train_ar,
    train_drafter,
    train_flashar,
    train_lpd,
    train_matcher,
    train_ssd,
    train_upsampler,
)
from jaxspec.models.drafter import eagle_config
from jaxspec.models.vq import VQConfig
from jaxspec.pipeline import Defaults, Pipeline, PipelineConfig
from jaxspec.text import PieceText
from jaxspec.training.loop import PARAMS, load_params

ABOUT = (
    "Drawings: Noto Emoji (Google, Apache-2.0), Fluent Emoji (Microsoft, MIT), "
    "Twemoji by Twitter, Inc and other contributors (CC BY 4.0). Captions: "
    "emojibase-data (MIT). Word vectors: reduced from all-MiniLM-L6-v2 (Apache-2.0)."
)
# Stages; the others are variants, and on the way down a filter does better.
UPSAMPLERS = ("upsampler-64-128", "upsampler-128-256")
DEFAULTS = Defaults(size=128, guidance=2.0, temperature=0.7, top_k=100, top_p=1.0)


def upsamplers(folder: Path) -> tuple[tuple, dict]:
    """Configurations and parameters of those trained in `folder`."""
    configs, params = [], {}
    for stage in UPSAMPLERS:
        if (folder / stage / PARAMS).exists():
            settings = train_upsampler.STAGES[stage]
            configs.append((settings.source, settings.wanted, settings.model))
            way = f"{settings.source}-{settings.wanted}"
            params[way] = load_params(folder / stage)["network"]
    return tuple(configs), {"upsamplers": params} if params else {}


def drafters(folder: Path) -> tuple[tuple, dict]:
    """Configurations and parameters of those trained in `folder`."""
    configs, params = [], {}
    for stage, settings in train_drafter.STAGES.items():
        if (folder / stage / PARAMS).exists():
            configs.append(
                (settings.size, eagle_config(settings.model, settings.hidden))
            )
            params[str(settings.size)] = load_params(folder / stage)
    return tuple(configs), {"drafters": params} if params else {}


def flashar_heads(folder: Path) -> tuple[tuple, dict]:
    """Likewise; those that were trained with their target are not among them."""
    configs, params = [], {}
    for stage, settings in train_flashar.STAGES.items():
        if not settings.backbone and (folder / stage / PARAMS).exists():
            configs.append((settings.size, settings.flash))
            params[str(settings.size)] = load_params(folder / stage)["head"]
    return tuple(configs), {"flashar": params} if params else {}


def ssd_heads(folder: Path) -> tuple[tuple, dict]:
    """Configurations and parameters of those trained in `folder`."""
    configs, params = [], {}
    for stage, settings in train_ssd.STAGES.items():
        if (folder / stage / PARAMS).exists():
            configs.append((settings.size, settings.ssd))
            params[str(settings.size)] = load_params(folder / stage)
    return tuple(configs), {"ssd": params} if params else {}


def lpd_models(folder: Path) -> tuple[tuple, dict]:
    """Configurations and parameters of those trained in `folder`."""
    configs, params = [], {}
    for stage, settings in train_lpd.STAGES.items():
        if (folder / stage / PARAMS).exists():
            configs.append((settings.size, settings.lpd))
            params[str(settings.size)] = load_params(folder / stage)
    return tuple(configs), {"lpd": params} if params else {}


def matchers(folder: Path) -> tuple[tuple, dict]:
    """Configurations and parameters of those trained in `folder`."""
    configs, params = [], {}
    for stage, settings in train_matcher.STAGES.items():
        if (folder / stage / PARAMS).exists():
            configs.append((settings.size, settings.model))
            params[str(settings.size)] = load_params(folder / stage)["network"]
    return tuple(configs), {"matchers": params} if params else {}


def assemble(
    folder: Path,
    vq: VQConfig,
    vq_params: dict,
    codebook: np.ndarray,
    text: PieceText,
    table: np.ndarray,
) -> Pipeline:
    """The pipeline of all trained sizes, each from its last stage in `folder`."""
    decoders, configs = {}, {}
    for stage, settings in train_ar.STAGES.items():
        if (folder / stage / PARAMS).exists():
            params = load_params(folder / stage)
            size, model = settings.size, settings.model
            decoders[str(size)] = train_ar.fold(model, params, codebook)
            configs[size] = model
    size = DEFAULTS.size if DEFAULTS.size in configs else max(configs)
    defaults = replace(DEFAULTS, size=size)
    sizes = tuple(sorted(configs.items()))
    learned, learned_params = upsamplers(folder)
    config = PipelineConfig(
        "emoji", sizes, vq, text, defaults, ABOUT, upsamplers=learned
    )
    params = {"decoders": decoders, "vq": vq_params, "text": {"table": table}}
    params |= learned_params
    networks, trained = drafters(folder)
    heads, trained_heads = flashar_heads(folder)
    models, trained_models = lpd_models(folder)
    spatial, trained_spatial = ssd_heads(folder)
    choosing, trained_choosing = matchers(folder)
    config = replace(config, drafters=networks, flashar=heads, lpd=models, ssd=spatial)
    config = replace(config, matchers=choosing)
    params |= trained | trained_heads | trained_models | trained_spatial
    params |= trained_choosing
    return Pipeline(params, config)


def export(folder: Path, out: Path, *parts) -> None:
    """Writes the family's weights and configuration into `out`, replacing them."""
    pipeline = assemble(folder, *parts)
    fresh = folder / "export"
    shutil.rmtree(fresh, ignore_errors=True)
    jaxspec.save(pipeline, fresh, dtype=jnp.float16)
    out.mkdir(parents=True, exist_ok=True)
    for path in fresh.iterdir():  # cards and metrics in `out` stay
        shutil.move(path, out / path.name)
    fresh.rmdir()
