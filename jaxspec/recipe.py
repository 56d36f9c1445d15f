"""How pictures are drawn, checked once: then batch after batch of them."""

import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding import (
    Decoded,
    Method,
    Target,
    advance,
    begin,
    bound,
    check_fits,
    check_method,
    describe,
    targets_in,
)
from jaxspec.decoding.likelihood import Likelihood, likelihood
from jaxspec.decoding.refill import decode_refilled
from jaxspec.methods import AR
from jaxspec.models.int8 import has_int8
from jaxspec.pipeline import Pipeline, network_of
from jaxspec.reading import Asked
from jaxspec.sampling import Sampling, image_keys
from jaxspec.sharding import by_image, filled_size, mesh_of, on_host
from jaxspec.sizes import Size, size_label

Progress = Callable[[int, int, np.ndarray], None]
CHUNK = 8  # passes between two calls of `progress`


@dataclass(frozen=True)
class Batch:
    """What was decoded together.

    Attributes:
      stats: numpy arrays [n, ...], not checked (see `faults`).
      stages: what was made on the way, [n, ...].
      seconds: wall time of the models that read prompts and of decoding ("decode"),
        compilation included where something compiled.
      likelihood: numpy arrays [n], what the target says of the pictures; None if it was
        not asked.
    """

    stats: Decoded
    stages: dict[str, np.ndarray]
    seconds: dict[str, float]
    likelihood: Likelihood | None = None


@dataclass(frozen=True)
class Recipe:
    """A family, a method and settings, all checked: what batches share.

    Attributes:
      params: told how to read prompts, and with the layers of `size` taken apart.
      method: not bound to conditions yet.
      size: pixels of a side, or height and width.
      sampling: settings of the transformer.
      settings: all of it, as `Generated.settings` has it.
    """

    params: Pipeline
    method: Method
    size: Size
    sampling: Sampling
    settings: dict[str, Any]

    @staticmethod
    def create(
        params: Pipeline,
        *,
        size: Size | str | None = None,
        method: Method | None = None,
        guidance: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        **options,
    ) -> "Recipe":
        """Takes all as `jaxspec.generate` does; computes nothing.

        Raises:
          ValueError: a setting is not usable, or the method cannot draw that size.
        """
        method = AR() if method is None else method
        check_method(method)
        params = params.reading(**options).sized(size)
        config = params.config
        size = config.check_size(size)
        check_fits(method, params, size)
        chosen: dict[str, Any] = {
            name: getattr(config.defaults, name) if value is None else value
            for name, value in (
                ("guidance", guidance),
                ("temperature", temperature),
                ("top_k", top_k),
                ("top_p", top_p),
            )
        }
        sampling = Sampling.create(config.vq.codebook_size, **chosen)
        # Plain numbers, whatever kind they came as: they are written as JSON.
        chosen = {k: int(v) if k == "top_k" else float(v) for k, v in chosen.items()}
        own = {
            k: np.asarray(getattr(config.text, k)).item() for k in config.text.options
        }
        settings = {
            "family": config.name,
            "size": size if isinstance(size, int) else size_label(size),
            "method": describe(method),
            **chosen,
            **own,
            **({"weights": "int8"} if has_int8(params) else {}),
        }
        return Recipe(params, method, size, sampling, settings)

    def unstacked(self) -> "Recipe":
        """The same with parameters as passes take them, once for all batches."""
        params = self.params.unstacked()
        decoders = dict(params.params["decoders"])
        config = dict(params.config.decoders)[self.size]
        label = size_label(self.size)
        decoders[label] = network_of(config).prepared(decoders[label])
        weights = {**params.params, "decoders": decoders}
        return replace(self, params=replace(params, params=weights))

    def conditioned(self, condition: Any) -> tuple[Method, Target]:
        """Method and target for images that show `condition`."""
        condition = jax.tree.map(jnp.asarray, condition)
        size, sampling = self.size, self.sampling
        target = self.params.target(condition, sampling, size)
        return bound(self.method, self.params, condition, sampling, size), target

    def decode(
        self,
        asked: Asked,
        numbers: np.ndarray,
        seed: int,
        *,
        rows: int | None = None,
        check: bool = False,
        progress: Progress | None = None,
    ) -> Batch:
        """Decodes a batch.

        Args:
          asked: of each image, n of them.
          numbers: of each among the images of its prompt, [n].
          seed: of all.
          rows: of the batch, n or more; those that only fill it repeat the first image
            and are left out of the result. By default the next power of two. Over
            several devices as many more as they need to share them out.
          check: have the target read the pictures (see `Likelihood`).
          progress: as for `jaxspec.generate`, of this batch alone.

        Raises:
          ValueError: a prompt cannot be shown.
          FloatingPointError: a model that reads prompts returned what is no number.
        """
        count, mesh = len(numbers), mesh_of(self.params)
        chosen = filled(np.arange(count), rows)
        chosen = filled(chosen, filled_size(len(chosen), mesh))
        keys = image_keys(seed, asked.ids[chosen], numbers[chosen])
        keys = by_image(mesh, keys)
        shown = self.params.show(asked.take(chosen), keys)
        began = time.perf_counter()
        method, target = self.conditioned(by_image(mesh, shown.condition))
        out = _run(method, target, keys, _cut(progress, count))
        stats = jax.tree.map(lambda x: x[:count], on_host(out))
        seconds = {**shown.seconds, "decode": time.perf_counter() - began}
        stages = {k: x[:count] for k, x in shown.stages.items()}
        found = None
        if check:
            began = time.perf_counter()
            read = on_host(likelihood(target, out.tokens))
            found = jax.tree.map(lambda x: x[:count], read)
            seconds["check"] = time.perf_counter() - began
        return Batch(stats, stages, seconds, found)

    def stream(
        self,
        asked: Asked,
        numbers: np.ndarray,
        seed: int,
        *,
        rows: int,
        group: int | None = None,
        check: bool = False,
    ) -> Iterator[tuple[np.ndarray, Batch]]:
        """Decodes images in so many rows, which are handed on when they are free.

        Where images take different numbers of passes, this takes less time than
        batches that wait for their last (see `decoding.refill`). Tokens are the same.

        Args:
          asked, numbers, seed: as for `decode`, of all images.
          rows: of the batch.
          group: as for `decode_refilled`.
          check: as for `decode`.

        Yields:
          The numbers of images that are finished, int [n], and what was decoded; its
          seconds are those since the last.

        Raises:
          ValueError: as `decode` does; or a drafter has conditions of its own, which
            are of no other images.
          FloatingPointError: as `decode` does.
        """
        if targets_in(self.method):
            raise ValueError(
                "rows are handed on only where the family makes the drafter: its "
                "conditions change with the images"
            )
        mesh = mesh_of(self.params)
        rows = filled_size(rows, mesh)
        group = filled_size(max(1, rows // 4) if group is None else group, mesh)
        conditions: dict[int, Any] = {}
        stages: dict[int, dict[str, np.ndarray]] = {}
        seconds: dict[str, float] = {}

        def show(first: int) -> None:
            """Reads the prompts of as many images as the batch has rows."""
            images = np.arange(first, min(first + rows, len(numbers)))
            chosen = filled(images, rows)
            keys = by_image(mesh, image_keys(seed, asked.ids[chosen], numbers[chosen]))
            shown = self.params.show(asked.take(chosen), keys)
            for stage, passed in shown.seconds.items():
                seconds[stage] = seconds.get(stage, 0.0) + passed
            condition = on_host(jax.tree.map(jnp.asarray, shown.condition))
            for row, image in enumerate(images):
                conditions[image] = jax.tree.map(lambda x, r=row: x[r], condition)
                stages[image] = {k: x[row] for k, x in shown.stages.items()}

        def shown_by(images: np.ndarray) -> tuple[Method, Target]:
            condition = jax.tree.map(
                lambda *x: np.stack(x), *(conditions[image] for image in images)
            )
            return self.conditioned(by_image(mesh, condition))

        def feed(images: np.ndarray) -> tuple[Method, Target, jax.Array]:
            for image in images:
                if image not in conditions:
                    show(image)
            keys = image_keys(seed, asked.ids[images], numbers[images])
            return *shown_by(images), by_image(mesh, keys)

        def checked(images: np.ndarray, tokens: np.ndarray) -> Likelihood:
            own = filled(np.arange(len(images)), rows)
            _, target = shown_by(images[own])
            found = on_host(likelihood(target, by_image(mesh, tokens[own])))
            return jax.tree.map(lambda x: x[: len(images)], found)

        began = time.perf_counter()
        for images, stats in decode_refilled(feed, len(numbers), rows, group):
            passed = time.perf_counter() - began - sum(seconds.values())
            own = [stages.pop(image) for image in images]
            made = {k: np.stack([x[k] for x in own]) for k in own[0]}
            spent, found = {**seconds, "decode": passed}, None
            if check:
                began = time.perf_counter()
                found = checked(images, np.asarray(stats.tokens))
                spent["check"] = time.perf_counter() - began
            yield images, Batch(stats, made, spent, found)
            for image in images:
                del conditions[image]
            seconds.clear()
            began = time.perf_counter()


def whole_number(name: str, value: int, least: int, most: int | None = None) -> int:
    """The whole number that `value` is, of whatever integer type.

    Raises:
      ValueError: it is none, or out of its range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {value!r}") from None
    if number < least or (most is not None and number > most):
        end = "or more" if most is None else f"to {most}"
        raise ValueError(f"{name} must be {least} {end}, not {number}")
    return number


def filled(rows: np.ndarray, size: int | None = None) -> np.ndarray:
    """Repeats the first row up to `size`, so that few shapes compile.

    By default that is the next power of two.
    """
    size = 1 << (len(rows) - 1).bit_length() if size is None else size
    return np.concatenate([rows, np.full(size - len(rows), rows[0])])


def _cut(progress: Progress | None, count: int) -> Progress | None:
    """`progress` without the rows that only fill a batch of `count` images."""
    if progress is None:
        return None

    def report(done: int, cells: int, tokens: np.ndarray) -> None:
        rows = len(tokens)
        progress(done * count // rows, cells // rows * count, tokens[:count])

    return report


def _run(
    method: Method, target: Target, keys: jax.Array, progress: Progress | None
) -> Decoded:
    """Decodes a batch, in chunks of passes if someone wants to see it.

    What comes of it, and what is shown, are the picture's cells, without newlines.
    """
    state = begin(method, target, keys)
    if progress is None:
        state = advance(method, target, state, np.int32(2**31 - 1))
        return method.decoded(state).picture()
    while not np.all(on_host(method.finished(state))):
        state = advance(method, target, state, np.int32(CHUNK))
        decoded = on_host(method.decoded(state).picture())
        final = decoded.final_pass >= 0
        progress(int(final.sum()), final.size, decoded.tokens)
    return method.decoded(state).picture()


def faults(
    stats: Decoded, numbers: np.ndarray, names: list[str]
) -> dict[int, FloatingPointError | RuntimeError]:
    """Which images met a number that is none, or were not filled, and what to say.

    Args:
      stats: of n images.
      numbers: of each among the images of its prompt, [n].
      names: of the prompts, n.
    """
    found: dict[int, FloatingPointError | RuntimeError] = {}
    for i in np.flatnonzero(stats.bad_pass >= 0):
        found[int(i)] = FloatingPointError(
            f"image {numbers[i]} of {names[i]!r} met a log-probability "
            f"that is not finite in pass {stats.bad_pass[i]}: are the weights damaged?"
        )
    for i, row, column in np.argwhere(stats.final_pass < 0):
        bug = RuntimeError(
            f"cell [{row}, {column}] of image {i} was never drawn: the method has a bug"
        )
        found.setdefault(int(i), bug)
    return found


__all__ = ["Batch", "Progress", "Recipe", "faults", "filled", "whole_number"]
