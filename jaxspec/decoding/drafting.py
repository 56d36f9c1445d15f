"""Trees of drafts: how a drafter grows one.

A tree hangs from the newest final token, its root. A node is a candidate for the cell
behind its parent's, so the nodes of one depth all stand at one cell. The drafter reads
the root and offers C children, reads K of these at once and offers C children of each,
and so on D levels down; of all that were offered, some are kept and judged. Which are
read and which are kept is the shape's to say (see `shapes`).

Axis legend: B images, R network rows (2 B with guidance), M nodes of a tree, N cells, V
codes; D, C, K as above.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxspec.acceptance import at
from jaxspec.decoding.shapes import Shape
from jaxspec.decoding.target import Target
from jaxspec.models.cache import Cache
from jaxspec.models.drafter import ChameleonEagleHead, Eagle, EagleHead
from jaxspec.models.llama import causal
from jaxspec.sampling import INITIAL, cell_keys, gumbel

# Drafters: what grows a tree.


class Drafter(Protocol):
    """What a tree is grown with.

    It may read what the target made of a token, its features; `width` is how many of
    them, 0 for a drafter that stands on its own.
    """

    @property
    def width(self) -> int: ...

    def prefill(self, features: jax.Array, scratch: int) -> Cache:
        """Its cache, with so many slots more than cells, behind the condition.

        `features` [R, P, F] are the target's, of the condition.
        """
        ...

    def follow(
        self,
        cache: Cache,
        features: jax.Array,
        tokens: jax.Array,
        cells: jax.Array,
        write: jax.Array,
        visible: jax.Array,
        slots: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Feeds tokens [B, T], as `Target.read` does, and drafts what follows each.

        `features` [R, T, width] are of what stands before each token.

        Returns:
          Log-probabilities [B, T, V] of the cell after each, features [R, T, width] of
          the tokens, as far as the drafter can tell, and the cache.
        """
        ...


@dataclass(frozen=True)
class Companion:
    """A model of the target's grid, with a condition of its own, as drafter."""

    model: Target

    @property
    def width(self) -> int:
        return 0

    def prefill(self, features: jax.Array, scratch: int) -> Cache:
        return self.model.read_prefix(scratch)[1]

    def follow(self, cache, features, tokens, cells, write, visible, slots):
        read, cache = self.model.read(cache, tokens, cells, write, visible, slots)
        return ranking(self.model).log_probs(read, cells + 1), features, cache


@dataclass(frozen=True)
class Sequel:
    """EAGLE's drafter: goes on from the target's features, read by the target's head.

    Its settings are the target's; with guidance it has an image's two rows too.
    """

    eagle: Eagle
    target: Target

    @property
    def width(self) -> int:
        return self.eagle.config.width

    @property
    def _head(self) -> EagleHead | ChameleonEagleHead:
        return self.eagle.behind(self.target.model.config.prefix_length)

    def _extend(self, cache, features, tokens, slots, visible, places):
        args = features, tokens, slots, cache, visible, places
        read: Any = self._head.apply(self.eagle.params, *args, method="extend")
        return read

    def _prompt(self) -> tuple[jax.Array, jax.Array]:
        return self._head.prompt(*self.target.prefix_rows())

    def prefill(self, features: jax.Array, scratch: int) -> Cache:
        tokens, seen = self._prompt()
        rows, p = tokens.shape
        cache = Cache.empty(self._head.config, rows, features.dtype, scratch)
        if p == 0:
            return cache
        slots = jnp.broadcast_to(jnp.arange(p), (rows, p))
        visible = jnp.pad(causal(seen), ((0, 0), (0, 0), (0, cache.slots - p)))
        return self._extend(cache, features[:, :p], tokens, slots, visible, slots)[1]

    def follow(self, cache, features, tokens, cells, write, visible, slots):
        head, (_, seen) = self._head, self._prompt()
        p = head.config.prefix_length
        slots = jnp.where(write, p + slots, cache.slots)
        inputs = head.words(tokens), slots, visible, p + cells
        tokens, slots, visible, places = map(self.target.rows, inputs)
        seen = jnp.broadcast_to(seen[:, None], (*tokens.shape, p))
        visible = jnp.concatenate([seen, visible], axis=-1)
        features, cache = self._extend(cache, features, tokens, slots, visible, places)
        log_q = ranking(self.target).log_probs(features, cells + 1)
        return log_q, features, cache


def ranking(target: Target) -> Target:
    """The target; where it takes the likeliest code, one that ranks the others too."""
    if target.sampling.temperature is not None:
        return target
    return replace(target, sampling=replace(target.sampling, temperature=1.0))


# Growing.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    """Candidates of B images. Node 0 is the root; a node comes after its parent.

    Siblings stand in order: the likeliest first, or the first drawn.

    Attributes:
      tokens: int32 [B, M].
      parent: int32 [B, M], a node; 0 for the root.
      depth: int32 [B, M], cells behind the root's.
      valid: bool [B, M], false for what is past the grid or was not drawn, and so for
        all below it.
      scores: float32 [B, A], log-probabilities of the paths to all that was offered.
      drawn: float32 [B, 1 + (D - 1) K, V], what each node that was read had its
        children drawn from, without replacement; None if they were chosen.
      source: int32 [B, M], the row of `drawn` that a node was drawn from.
    """

    tokens: jax.Array
    parent: jax.Array
    depth: jax.Array
    valid: jax.Array
    scores: jax.Array
    drawn: jax.Array | None
    source: jax.Array


def ancestors(parent: jax.Array, depth: int) -> jax.Array:
    """Which nodes each one sees, bool [B, M, M]: itself and those up to the root."""
    b, m = parent.shape
    own = jnp.broadcast_to(jnp.eye(m, dtype=bool), (b, m, m))
    seen, up = own, parent
    for _ in range(depth.bit_length()):  # twice as many of them each time
        seen |= jnp.take_along_axis(seen, up[..., None], axis=1)
        up = jnp.take_along_axis(up, up, axis=1)
    return seen


@dataclass(frozen=True)
class Growing:
    """How trees grow.

    Attributes:
      drafter, shape: as above.
      draws: children are drawn without replacement; else they are the likeliest.
    """

    drafter: Drafter
    shape: Shape
    draws: bool

    @property
    def scratch(self) -> int:
        """Slots that the drafter's cache has for nodes."""
        return (self.shape.depth - 1) * self.shape.beam


@dataclass(frozen=True)
class Growth(Growing):
    """How trees grow, and what from.

    Attributes:
      cells: N of the grid.
      end: how many of them are drawn, up to the last.
      keys: [B] image keys.
      attempt: int32 [B], the number of this round.
      done: int32 [B], final cells; the root is the last of them.
      tokens: int32 [B, D + 1], the final tokens that the drafter has not read, ...
      fresh: int32 [B], ... so many of them, the root at their end.
      features: [R, D + 1, F], the target's, of what stands before each.
    """

    cells: int
    end: int
    keys: jax.Array
    attempt: jax.Array
    done: jax.Array
    tokens: jax.Array
    fresh: jax.Array
    features: jax.Array

    def grow(self, cache: Cache) -> tuple[Tree, Cache]:
        """The tree, and the drafter's cache; D passes of the drafter."""
        b, c, d = len(self.done), self.shape.width, self.shape.depth
        log_q, features, cache = self._read_root(cache)
        tokens, scores = self._offer(0, log_q, jnp.zeros((b, 1)))
        found = [(tokens[:, 0], jnp.zeros((b, c), jnp.int32), scores[:, 0], log_q)]

        def level(carry, depth):
            cache, beam = carry
            log_q, features, cache = self._read_beam(cache, beam, depth)
            tokens, scores = self._offer(depth, log_q, beam.scores)
            parents = jnp.repeat(beam.numbers, c, axis=1)
            flat = (tokens.reshape(b, -1), parents, scores.reshape(b, -1))
            beam = self._onward(depth + 1, tokens, scores, features, beam.seen)
            return (cache, beam), (*flat, log_q if self.draws else log_q[..., :0])

        if d > 1:
            unseen = jnp.zeros((b, 1, self.scratch), bool)
            beam = self._onward(jnp.int32(1), tokens, scores, features, unseen)
            (cache, _), more = jax.lax.scan(level, (cache, beam), jnp.arange(1, d))
            # Depth by depth to one after the other.
            found.append(tuple(jnp.concatenate(list(x), axis=1) for x in more))
        tokens, parents, scores, log_q = zip(*found, strict=True)
        tree = self._kept(*(jnp.concatenate(x, 1) for x in (tokens, parents, scores)))
        if self.draws:
            tree = replace(tree, drawn=jnp.concatenate(log_q, axis=1))
        return tree, cache

    def _read_root(self, cache: Cache) -> tuple[jax.Array, jax.Array, Cache]:
        """Feeds what became final: what follows it, [B, 1, V], [R, 1, F]."""
        n, done, fresh = self.cells, self.done[:, None], self.fresh[:, None]
        place = jnp.arange(self.tokens.shape[1])[None]
        cells = jnp.clip(done - fresh + place, 0, n - 1)
        write = (place < fresh) & (done < self.end)
        visible = jnp.arange(n)[None, None] <= cells[..., None]
        visible = jnp.pad(visible, ((0, 0), (0, 0), (0, self.scratch)))
        log_q, features, cache = self.drafter.follow(
            cache, self.features, self.tokens, cells, write, visible, cells
        )
        return take(log_q, fresh - 1), self._take_rows(features, fresh - 1), cache

    def _read_beam(
        self, cache: Cache, beam: "_Beam", depth: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Feeds the nodes of a depth: what follows them, [B, K, V], [R, K, F]."""
        n, (b, k) = self.cells, beam.tokens.shape
        cells = jnp.broadcast_to(self.done[:, None] - 1 + depth, (b, k))
        before = jnp.arange(n)[None, None] < self.done[:, None, None]
        before = jnp.broadcast_to(before, (b, k, n))
        slots = n + (depth - 1) * k + jnp.broadcast_to(jnp.arange(k)[None], (b, k))
        return self.drafter.follow(
            cache,
            beam.features,
            beam.tokens,
            jnp.minimum(cells, n - 1),
            cells < self.end,
            jnp.concatenate([before, beam.seen], axis=-1),
            slots,
        )

    def _offer(
        self, depth: int | jax.Array, log_q: jax.Array, scores: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Children [B, K, C] of nodes of a depth, and the scores of their paths."""
        ranked, (b, k, v) = log_q, log_q.shape
        cells = jnp.broadcast_to(self.done[:, None] + depth, (b, k))
        if self.draws:
            # The order of log-probabilities with Gumbel noise is that of draws without
            # replacement.
            place = jnp.arange(k)[None]
            attempt = self.attempt[:, None] * self.shape.beam + place
            keys = cell_keys(self.keys, cells, INITIAL, attempt)
            ranked = log_q + gumbel(keys, v)
        tokens = jax.lax.top_k(ranked, self.shape.width)[1]
        # Rounding can leave a log-probability of a little more than 0.
        scores = scores[..., None] + jnp.minimum(at(log_q, tokens), 0.0)
        return tokens, jnp.where((cells < self.end)[..., None], scores, -jnp.inf)

    def _onward(self, depth, tokens, scores, features, seen) -> "_Beam":
        """The beam of a depth, of what the one above it offered [B, K, C]."""
        b, k, c = len(tokens), self.shape.beam, self.shape.width
        flat = scores.reshape(b, -1)
        chosen = self.shape.read(depth, flat)
        above = chosen // c  # its parent in that beam
        first = jnp.where(depth == 1, 1, 1 + c + (depth - 2) * k * c)
        slots = jnp.arange(k)[:, None] + (depth - 1) * k
        own = (jnp.arange(seen.shape[-1])[None] == slots)[None]
        return _Beam(
            tokens=take(tokens.reshape(b, -1), chosen),
            numbers=first + chosen,
            scores=take(flat, chosen),
            features=self._take_rows(features, above),
            seen=take(seen, above) | own,
        )

    def _kept(self, tokens: jax.Array, parents: jax.Array, scores: jax.Array) -> Tree:
        """The tree of all candidates [B, A] and their parents' numbers."""
        k, c, done = self.shape.beam, self.shape.width, self.done[:, None]
        first = ((0, 0), (1, 0))  # the root is number 0
        numbers = jnp.pad(self.shape.kept(scores) + 1, first)
        root = take(self.tokens, self.fresh[:, None] - 1)
        up = take(jnp.pad(parents, first), numbers)
        deeper = numbers - 1 - c  # among the candidates of depth 2 and more
        depth = jnp.where(numbers > 0, jnp.maximum(2 + deeper // (k * c), 1), 0)
        possible = take(jnp.pad(scores, first), numbers) > -jnp.inf
        return Tree(
            tokens=take(jnp.concatenate([root, tokens], axis=1), numbers),
            parent=jnp.argmax(numbers[:, None] == up[..., None], axis=-1),
            depth=depth,
            valid=(done - 1 + depth < self.end) & (possible | (not self.draws)),
            scores=scores,
            drawn=None,
            source=jnp.maximum(1 + deeper // c, 0),
        )

    def _take_rows(self, features: jax.Array, index: jax.Array) -> jax.Array:
        """`take` of each image's index from its network rows."""
        return take(features, jnp.repeat(index, len(features) // len(index), axis=0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Beam:
    """The nodes of a depth that are read next.

    Attributes:
      tokens, numbers: int32 [B, K]; `numbers` among all candidates, from 1 on.
      scores: float32 [B, K], log-probabilities of their paths.
      features: [R, K, F], of what stands before them.
      seen: bool [B, K, (D - 1) K], which scratch slots hold their path, themselves too.
    """

    tokens: jax.Array
    numbers: jax.Array
    scores: jax.Array
    features: jax.Array
    seen: jax.Array


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Entries of x [B, M, ...] at index [B, T]: [B, T, ...]."""
    index = index.reshape(*index.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)
