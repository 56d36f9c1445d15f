"""Rows that are handed on: an image that is finished makes room for the next one.

Images of a batch take different numbers of passes where a method's drafts decide how
many. In `decode` those that are finished wait for the last; here their rows are given
to other images, a group of rows at a time. No image's tokens depend on it, since none
depend on the row or on its neighbours, and nothing compiles for it: the state of a
group that was just started is written over rows of a state that runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.decoded import Decoded
from jaxspec.decoding.run import Method, begin, step
from jaxspec.decoding.target import Target, map_targets
from jaxspec.sharding import on_host, placed

# Of images [B], by number: the method and target that show them, and their keys [B].
Feed = Callable[[np.ndarray], tuple[Method, Target, jax.Array]]


def decode_refilled(
    feed: Feed, images: int, batch: int, group: int | None = None
) -> Iterator[tuple[np.ndarray, Decoded]]:
    """Decodes images 0 to `images` - 1 in so many rows, which are handed on.

    Args:
      feed: asked for `batch` images first, and then for `group` at a time. They come in
        order; where too few are left, the first of them repeats.
      images: how many.
      batch: rows.
      group: rows that are handed on together, by default a quarter of the batch. Fewer
        stand idle for a shorter time, more are started at less cost.

    Yields:
      Images that are finished, int [n], and what was decoded of each, numpy arrays
      [n, ...].
    """
    group = max(1, batch // 4) if group is None else min(group, batch)
    first = np.arange(batch)
    method, target, keys = feed(np.where(first < images, first, 0))
    state = begin(method, target, keys)
    owner = np.where(first < images, first, -1)  # the image of each row
    waiting = min(batch, images)  # the next one
    while True:
        finished = on_host(method.finished(state))
        ready = np.flatnonzero(finished & (owner >= 0))
        if len(ready):
            decoded = on_host(method.decoded(state).picture())
            yield owner[ready], jax.tree.map(lambda x, r=ready: x[r], decoded)
            owner[ready] = -1
        left, free = images - waiting, np.flatnonzero(owner < 0)
        if not left and len(free) == batch:
            return
        if left and len(free) >= min(group, left):
            count = min(group, left)
            chosen = waiting + np.arange(group) % count
            rows = np.where(np.arange(group) < count, np.resize(free, group), batch)
            new = feed(chosen)
            method, target, state = _handed_on(method, target, state, new, rows)
            owner[rows[:count]] = chosen[:count]
            waiting += count
        else:
            enough = finished.sum() + group - len(free) if left else batch
            state = _until(method, target, state, np.int32(min(enough, batch)))


def _handed_on(
    method: Method,
    target: Target,
    state: Any,
    new: tuple[Method, Target, jax.Array],
    rows: np.ndarray,
) -> tuple[Method, Target, Any]:
    """Method, target and state with the images of `new` in some rows.

    A row that the batch does not have is not written.
    """
    started = begin(*new)
    if len(rows) == target.batch:
        return new[0], new[1], started
    state, conditions = _written(
        target.mesh,
        target.batch,
        state,
        _conditions((method, target)),
        (started, _conditions(new[:2])),
        rows,
    )
    taken = iter(conditions)
    change = lambda x: replace(x, **dict(zip(_SHOWN, next(taken), strict=True)))
    method, target = map_targets(change, (method, target))
    return method, target, state


_SHOWN = ("condition", "prefix_visible", "null")


def _conditions(tree: Any) -> list[tuple[Any, ...]]:
    """What the targets in a tree show, one after the other."""
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Target))
    targets = [x for x in found if isinstance(x, Target)]
    return [tuple(getattr(x, name) for name in _SHOWN) for x in targets]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _written(
    mesh: Any, batch: int, state: Any, conditions: Any, new: Any, rows: jax.Array
) -> Any:
    """State and conditions with new ones in some rows of what has rows of images."""

    def write(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.shape == y.shape:
            return x  # the same for all images
        each = x.shape[0] // batch  # rows of an image
        by_image = lambda z: z.reshape(len(z) // each, each, *z.shape[1:])
        out = by_image(x).at[rows].set(by_image(y), mode="drop")
        return out.reshape(x.shape)

    return placed(mesh, jax.tree.map(write, (state, conditions), new), batch)


@partial(jax.jit, donate_argnums=2)
def _until(method: Method, target: Target, state: Any, enough: jax.Array) -> Any:
    """Runs a state until so many of its images are finished."""
    return jax.lax.while_loop(
        lambda s: jnp.sum(method.finished(s)) < enough,
        lambda s: step(method, target, s),
        state,
    )
