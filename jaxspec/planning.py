"""What fits: bytes of weights and the peak of each stage, before anything is loaded.

All is told from shapes (`jaxspec.memory`); nothing is computed or allocated.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints.weights import SEVERAL
from jaxspec.decoding import (
    Method,
    bound,
    check_method,
    decode,
    describe,
    targets_in,
)
from jaxspec.generation import at_once
from jaxspec.memory import peak, size_of
from jaxspec.methods import AR
from jaxspec.models.chameleon import ChameleonGridConfig
from jaxspec.pipeline import Pipeline, PipelineConfig
from jaxspec.pixels import pictures
from jaxspec.quantisation import check_weights, quantised
from jaxspec.reading.lumina import SQUARES, LuminaReader
from jaxspec.sampling import Sampling
from jaxspec.sizes import Size, checked_size, sides_of, size_label
from jaxspec.weight_shapes import abstract_params

GIGABYTE = 10**9
CARDS = (24, 80, 141)  # GB
PROMPT = 64  # tokens, of a family whose prompts have any length


@dataclass(frozen=True)
class Plan:
    """Bytes that a call of `generate` takes.

    Attributes:
      weights: of each part of the family; all of them stay.
      stages: most that each stage needs beside the weights; one runs at a time.
      caches: of these, in "passes", keys and values of the target, and of each model
        that drafts for it.
      settings: what was planned.
    """

    weights: dict[str, int]
    stages: dict[str, int]
    caches: dict[str, int]
    settings: dict[str, Any]

    @property
    def total(self) -> int:
        """The weights, and the largest stage beside them."""
        return sum(self.weights.values()) + max(self.stages.values())

    def fits(self, gigabytes: float) -> bool:
        """Whether a device of so many GB has room, a tenth of it left for XLA."""
        return self.total <= 0.9 * gigabytes * GIGABYTE

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "weights": self.weights,
            "stages": self.stages,
            "caches": self.caches,
            "total": self.total,
            "fits": {str(card): self.fits(card) for card in CARDS},
        }


def plan(
    config: PipelineConfig,
    *,
    size: Size | None = None,
    batch: int = 1,
    method: Method | None = None,
    guidance: float | None = None,
    dtype: Any = jnp.bfloat16,
    weights: str | None = None,
) -> Plan:
    """Plans a call of `jaxspec.generate`.

    Args:
      config: of the family, such as `jaxspec.presets.preset("tar-1.5b")`.
      size: any that the family draws; its default. Of Lumina-mGPT, whose models differ
        by their weights alone, any square that was published.
      batch: pictures at once.
      method: how to decode; plain AR by default.
      guidance: the family's default; 1 is off and has one cache row a picture.
      dtype: of the weights.
      weights: "int8" for the transformers' matrices in int8, as `jaxspec.load` has it.

    Raises:
      ValueError: the family has no such size, the method does not fit it, or `weights`
        is not known.
    """
    check_weights(weights)
    method = AR() if method is None else method
    check_method(method)
    if batch < 1:
        raise ValueError(f"batch must be 1 or more, not {batch}")
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype), abstract_params(config)
    )
    if weights is not None:
        small = lambda x: quantised(Pipeline(x, config)).params
        params = jax.eval_shape(small, params)
    sizes = {name: size_of(x) for name, x in _parts(params)}
    config, trained = _sized(config, size)
    chosen = trained if size is None else checked_size(size)
    decoders = params["decoders"]
    shared = {size_label(chosen): decoders[size_label(trained)]}
    params = {**params, "decoders": {**decoders, **shared}}
    stages = {
        name: peak(function, params, *inputs)
        for name, function, inputs in config.text.programs(batch)
    }
    draw, inputs = passes(
        config, params, method, size=chosen, batch=batch, guidance=guidance
    )
    stages["passes"] = peak(draw, *inputs)
    stages["pictures"] = _pictures(config, params, chosen, batch)
    return Plan(
        weights=sizes,
        stages=stages,
        caches=caches(draw, inputs, config.vq.factor),
        settings={
            "family": config.name,
            "batch": batch,
            "dtype": jnp.dtype(dtype).name,
            **({} if weights is None else {"weights": weights}),
            "method": describe(method),
            "size": chosen,
            "guidance": config.defaults.guidance if guidance is None else guidance,
        },
    )


def _sized(config: PipelineConfig, size: Size | None) -> tuple[PipelineConfig, Size]:
    """The family, able to draw a size, and the size whose model it takes for it."""
    given = None if size is None else checked_size(size)
    text, known = config.text, config.sizes
    if isinstance(text, LuminaReader) and given in SQUARES and given not in known:
        like = config.defaults.size
        return config.with_size(given, like, replace(text, sizes=(*known, given))), like
    return config.sized(given)


def _parts(params: dict[str, Any]):
    for name, part in params.items():
        if name in SEVERAL:
            sizes = sorted(part, key=lambda size: [int(x) for x in size.split("-")])
            yield from ((f"{name}/{size}", part[size]) for size in sizes)
        else:
            yield name, part


def passes(
    config: PipelineConfig,
    params: Any,
    method: Any,
    *,
    size: Size,
    batch: int,
    guidance: float | None = None,
) -> tuple[Callable, tuple[Any, ...]]:
    """The program that draws: prefill, caches, windows, and the drafter's too.

    Returns:
      A function, and shapes and types of its inputs, the family's parameters first.
    """
    settings = dict(vars(config.defaults))
    del settings["size"]
    if guidance is not None:
        settings["guidance"] = guidance
    sampling = Sampling.create(config.vq.codebook_size, **settings)
    decoder = dict(config.decoders)[size]
    condition = _condition(decoder, batch)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))

    def draw(params, condition, keys, table, run=decode):
        pipeline = Pipeline(params, config)
        given = method if table is None else replace(method, table=table)
        decoder = bound(given, pipeline, condition, sampling, size)
        return run(decoder, pipeline.target(condition, sampling, size), keys)

    return draw, (params, condition, keys, _table(method, decoder.vocab_size))


def caches(draw: Callable, inputs: tuple[Any, ...], factor: int) -> dict[str, int]:
    """Bytes of keys and values of each model that draws.

    Args:
      draw, inputs: from `passes`.
      factor: pixels a side of a cell.
    """

    def prefill(method, target, keys):
        return [(x, x.prefill()[1]) for x in (target, *targets_in(method))]

    (_, own), *others = jax.eval_shape(partial(draw, run=prefill), *inputs)
    held = {"target": size_of(own)}
    for drafter, cache in others:
        sides = tuple(factor * cells for cells in drafter.grammar.picture)
        held[f"drafter of {size_label(checked_size(sides))} px"] = size_of(cache)
    return held


def _condition(decoder: Any, batch: int) -> jax.ShapeDtypeStruct:
    """What a picture shows, as its decoder takes it."""
    if isinstance(decoder, ChameleonGridConfig):
        shape = (batch, decoder.prefix_length or PROMPT)
        return jax.ShapeDtypeStruct(shape, jnp.int32)
    if decoder.prefix == "class":
        return jax.ShapeDtypeStruct((batch,), jnp.int32)
    shape = (batch, decoder.prefix_length, decoder.prefix_width)
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _table(method: Any, codes: int) -> Any:
    """The neighbours' shape, for a method that would look them up."""
    if not {"table", "neighbours"} <= {f.name for f in fields(method)}:
        return None
    # What pools among a code's neighbours counts the code itself, or has columns.
    count = min(getattr(method, "columns", method.neighbours), codes)
    return jax.ShapeDtypeStruct((codes, count), jnp.int32)


def _pictures(config: PipelineConfig, params: dict, size: Size, batch: int) -> int:
    (h, w), factor = sides_of(size), config.vq.factor
    shape = (min(batch, at_once(h * w)), h // factor, w // factor)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    make = partial(pictures, config.vq, config.pixels)
    return peak(make, params["vq"], tokens)


__all__ = ["CARDS", "GIGABYTE", "Plan", "plan"]
