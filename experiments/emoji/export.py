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


def beside(folder: Path, stages: dict, config_of, network_of=lambda trained: trained):
    """Configurations and parameters, by size, of those stages trained in `folder`."""
    there = {k: x for k, x in stages.items() if (folder / k / PARAMS).exists()}
    configs = tuple((settings.size, config_of(settings)) for settings in there.values())
    params = {
        str(settings.size): network_of(load_params(folder / stage))
        for stage, settings in there.items()
    }
    return configs, params


def all_beside(folder: Path) -> dict[str, tuple[tuple, dict]]:
    """What stands beside the decoders, by part of the family's configuration."""
    # Heads that were trained with their target are not among them.
    heads = {k: x for k, x in train_flashar.STAGES.items() if not x.backbone}
    return {
        "drafters": beside(
            folder, train_drafter.STAGES, lambda x: eagle_config(x.model, x.hidden)
        ),
        "flashar": beside(folder, heads, lambda x: x.flash, lambda x: x["head"]),
        "lpd": beside(folder, train_lpd.STAGES, lambda x: x.lpd),
        "ssd": beside(folder, train_ssd.STAGES, lambda x: x.ssd),
        "matchers": beside(
            folder, train_matcher.STAGES, lambda x: x.model, lambda x: x["network"]
        ),
    }


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
            size = settings.size
            decoders[str(size)] = train_ar.load_decoder(folder, stage, codebook)
            configs[size] = settings.model
    size = DEFAULTS.size if DEFAULTS.size in configs else max(configs)
    defaults = replace(DEFAULTS, size=size)
    sizes = tuple(sorted(configs.items()))
    learned, learned_params = upsamplers(folder)
    config = PipelineConfig(
        "emoji", sizes, vq, text, defaults, ABOUT, upsamplers=learned
    )
    params = {"decoders": decoders, "vq": vq_params, "text": {"table": table}}
    params |= learned_params
    for part, (networks, trained) in all_beside(folder).items():
        config = replace(config, **{part: networks})
        params |= {part: trained} if trained else {}
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
