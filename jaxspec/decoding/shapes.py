"""Shapes of trees of drafts: which nodes a drafter reads on, and which are judged.

Candidates are numbered as they are offered (see `drafting`): C of the root, then K C a
level.

- `Dynamic`: those whose path is likeliest by the drafter (EAGLE-2, Li et al. 2024,
  arXiv 2406.16858, section 4).
- `Static`: those of given ranks, always (EAGLE, Li et al. 2024, arXiv 2401.15077).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np


class Shape(Protocol):
    """How a tree grows: `depth` D, `width` C, `beam` K; `nodes` without the root."""

    @property
    def depth(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def beam(self) -> int: ...
    @property
    def nodes(self) -> int: ...

    def read(self, depth: jax.Array, scores: jax.Array) -> jax.Array:
        """Which candidates [B, K] of a depth to read, of scores [B, C or K C]."""
        ...

    def kept(self, scores: jax.Array) -> jax.Array:
        """Which of all candidates [B, nodes] to judge, ascending, by their scores."""
        ...


@dataclass(frozen=True)
class Dynamic:
    """The `width` likeliest of a depth are read, the `nodes` likeliest of all judged.

    A path is never likelier than its beginning, so that what is judged is a tree.
    """

    depth: int
    width: int
    nodes: int

    @property
    def beam(self) -> int:
        return self.width

    def fitting(self, codes: int) -> "Dynamic":
        """The same where there are fewer codes, or fewer candidates, than it asks."""
        width = min(self.width, codes)
        most = width + (self.depth - 1) * width * width
        return Dynamic(self.depth, width, min(self.nodes, most))

    def read(self, depth: jax.Array, scores: jax.Array) -> jax.Array:
        return jax.lax.top_k(scores, self.beam)[1]

    def kept(self, scores: jax.Array) -> jax.Array:
        # Of equals the first are taken: a parent before its children.
        return jnp.sort(jax.lax.top_k(scores, self.nodes)[1], axis=-1)


@dataclass(frozen=True)
class Static:
    """Given nodes, each as its path from the root.

    (0, 2) is the third child of the first child.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        """Raises ValueError if a path is twice there, or without its beginning."""
        paths = self.paths
        lists = isinstance(paths, tuple) and all(isinstance(p, tuple) for p in paths)
        if not lists or not paths:
            raise ValueError(
                f"a tree must be a tuple of paths such as ((0,), (0, 1)), not {paths}"
            )
        known = {(), *paths}
        for path in paths:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise ValueError(
                    f"path {path} of a tree must be ranks from 0 on, and {path[:-1]} "
                    "be in the tree too"
                )
        if len(known) != len(paths) + 1:
            raise ValueError("a path is twice in the tree")

    @property
    def depth(self) -> int:
        return max(map(len, self.paths))

    @property
    def width(self) -> int:
        return 1 + max(max(path) for path in self.paths)

    @property
    def beam(self) -> int:
        return _layout(self.paths, self.width)[0].shape[1]

    @property
    def nodes(self) -> int:
        return len(self.paths)

    def fitting(self, codes: int) -> "Static":
        """Itself, if there are as many codes as a node has children."""
        if self.width > codes:
            raise ValueError(
                f"the tree has {self.width} children of a node, and there are {codes} "
                "codes"
            )
        return self

    def read(self, depth: jax.Array, scores: jax.Array) -> jax.Array:
        row = jnp.asarray(_layout(self.paths, self.width)[0])[depth - 1]
        return jnp.broadcast_to(row, (len(scores), self.beam))

    def kept(self, scores: jax.Array) -> jax.Array:
        numbers = jnp.asarray(_layout(self.paths, self.width)[1])
        return jnp.broadcast_to(numbers, (len(scores), self.nodes))


@lru_cache
def _layout(
    paths: tuple[tuple[int, ...], ...], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Candidates that a static tree reads [D, K], and those it judges [nodes].

    Those read are numbered within their depth; where a depth has fewer than K with
    children, its first candidate fills up.
    """
    depth = max(map(len, paths))
    inner = [sorted({p[:d] for p in paths if len(p) > d}) for d in range(1, depth + 1)]
    beam = max(1, *map(len, inner))
    places = [{(): 0}, *({p: i for i, p in enumerate(level)} for level in inner)]

    def number(path):
        return places[len(path) - 1][path[:-1]] * width + path[-1]

    read = np.zeros((depth, beam), np.int32)
    for row, level in zip(read, inner, strict=True):
        row[: len(level)] = [number(path) for path in level]
    first = [0, *(width + np.arange(depth - 1) * beam * width)]
    kept = sorted(int(first[len(p) - 1]) + number(p) for p in paths)
    return read, np.array(kept, np.int32)
