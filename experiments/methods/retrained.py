"""Methods on targets that were trained further: what `runs/emoji` has of those."""

from dataclasses import field, replace
from pathlib import Path
from typing import Any

import jax

from experiments.emoji.train_ar import load_decoder
from experiments.methods.contestants import Contestant
from jaxspec.decoding import Decoded, Method, Target, method_class
from jaxspec.methods import AR, FlashAR, ZipAR
from jaxspec.models.flashar import Flash
from jaxspec.models.transformer import unstacked
from jaxspec.pipeline import Pipeline
from jaxspec.pixels import codebook
from jaxspec.training.loop import PARAMS, load_params


@method_class
class Retrained:
    """A method on other weights of the target that it is given.

    What judges the pictures is the target as it was.
    """

    method: Method = field(metadata={"arrays": True})
    params: Any = field(repr=False, metadata={"arrays": True})

    def start(self, target: Target, keys: jax.Array) -> Any:
        return self.method.start(self._on(target), keys)

    def step(self, target: Target, state: Any) -> Any:
        return self.method.step(self._on(target), state)

    def finished(self, state: Any) -> jax.Array:
        return self.method.finished(state)

    def decoded(self, state: Any) -> Decoded:
        return self.method.decoded(state)

    def _on(self, target: Target) -> Target:
        return replace(target, params=self.params)


def retrained(pipeline: Pipeline, folder: Path) -> list[Contestant]:
    """Methods with targets that were trained in another way, where `folder` has those.

    FlashAR and ZipAR with targets trained for them, and AR with one that was trained on
    variants of the drawings.
    """
    size, made = pipeline.config.defaults.size, (_flashar, _zipar, _varied)
    return [each for make in made for each in make(pipeline, folder, size)]


def _flashar(pipeline: Pipeline, folder: Path, size: int) -> list[Contestant]:
    stage = folder / f"flashar-{size}-unfrozen"
    config = dict(pipeline.config.flashar).get(size)
    if config is None or not (stage / PARAMS).exists():
        return []
    trained = load_params(stage)
    head = Flash(trained["head"], config, trained["target"]).unstacked()
    return [Contestant("FlashAR-unfrozen", FlashAR(head), "biased")]


def _zipar(pipeline: Pipeline, folder: Path, size: int) -> list[Contestant]:
    stage = folder / f"zipar-{size}"
    if not (stage / PARAMS).exists():
        return []
    params = unstacked(dict(pipeline.config.decoders)[size], load_params(stage))
    methods: dict[str, Method] = {"AR": AR()}
    methods |= {f"ZipAR-{window}": ZipAR(window) for window in (4, 2, 1)}
    # AR too: it draws what these weights have learned, not what the target has.
    return [
        Contestant(f"{name}-trained", Retrained(method, params), "biased")
        for name, method in methods.items()
    ]


def _varied(pipeline: Pipeline, folder: Path, size: int) -> list[Contestant]:
    stage = f"{size}-varied"
    if not (folder / stage / PARAMS).exists():
        return []
    config = dict(pipeline.config.decoders)[size]
    codes = codebook(pipeline.config.vq, pipeline.params["vq"])
    params = unstacked(config, load_decoder(folder, stage, codes))
    return [Contestant("AR-varied", Retrained(AR(), params), "biased")]
