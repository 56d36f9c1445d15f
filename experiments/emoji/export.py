"""From checkpoints to the family's folder: folded, 16-bit, in our own format."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Beside:
    """Networks of single sizes that stand beside the decoders.

    Attributes:
      stages: that trained them, with their settings.
      config: of the network, from a stage's settings.
      part: of what a stage trained that is the network; "" is all of it.
    """

    stages: dict
    config: Callable
    part: str = ""


# By part of the family's configuration. Heads trained with their target are not there.
BESIDE = {
    "drafters": Beside(train_drafter.STAGES, lambda x: eagle_config(x.model, x.hidden)),
    "flashar": Beside(
        {k: x for k, x in train_flashar.STAGES.items() if not x.backbone},
        lambda x: x.flash,
        "head",
    ),
    "lpd": Beside(train_lpd.STAGES, lambda x: x.lpd),
    "ssd": Beside(train_ssd.STAGES, lambda x: x.ssd),
    "matchers": Beside(train_matcher.STAGES, lambda x: x.model, "network"),
}


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


def beside(folder: Path, networks: Beside) -> tuple[tuple, dict]:
    """Configurations and parameters, by size, of those trained in `folder`."""
    configs, params = [], {}
    for stage, settings in networks.stages.items():
        if (folder / stage / PARAMS).exists():
            trained = load_params(folder / stage)
            configs.append((settings.size, networks.config(settings)))
            part = trained[networks.part] if networks.part else trained
            params[str(settings.size)] = part
    return tuple(configs), params


def assemble(
    folder: Path,
    vq: VQConfig,
    vq_params: dict,
    codebook: np.ndarray,
    text: PieceText,
    table: np.ndarray,
) -> Pipeline:
    """The pipeline of all trained sizes, each from its last stage in `folder`."""
    decoders, sized = {}, {}
    for stage, settings in train_ar.STAGES.items():
        if (folder / stage / PARAMS).exists():
            size = settings.size
            decoders[str(size)] = train_ar.load_decoder(folder, stage, codebook)
            sized[size] = settings.model
    size = DEFAULTS.size if DEFAULTS.size in sized else max(sized)
    defaults = replace(DEFAULTS, size=size)
    sizes = tuple(sorted(sized.items()))
    learned, learned_params = upsamplers(folder)
    config = PipelineConfig(
        "emoji", sizes, vq, text, defaults, ABOUT, upsamplers=learned
    )
    params = {"decoders": decoders, "vq": vq_params, "text": {"table": table}}
    params |= learned_params
    for name, networks in BESIDE.items():
        configs, trained = beside(folder, networks)
        config = replace(config, **{name: configs})
        params |= {name: trained} if trained else {}
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
