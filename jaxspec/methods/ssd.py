"""SSD: whole rows, drafted from the row above and corrected all at once."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxspec.acceptance import Ratio, residual
from jaxspec.decoding import (
    ACCEPTED,
    DRAWN,
    RESAMPLED,
    Decoded,
    Target,
    method_class,
)
from jaxspec.decoding.first import draw_first
from jaxspec.models.cache import Cache
from jaxspec.models.ssd import Spatial, SSDHead
from jaxspec.sampling import ACCEPT, DRAW, INITIAL, Sampling, cell_keys, draw, uniform
from jaxspec.sizes import Size

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SSDState:
    """What a pass leaves to the next; W columns.

    Attributes:
      cache: the target's.
      keys: [B] image keys.
      tokens: int32 [B, W], of the row at hand: drawn, or drafts.
      log_q: float32 [B, W, V], what drafts were drawn from last.
      kept: bool [B, W], drafts of the head that no round replaced.
      states: [B * rows, W, C], of the row's cells, before the final norm.
      decoded: the result so far.
    """

    cache: Cache
    keys: jax.Array
    tokens: jax.Array
    log_q: jax.Array
    kept: jax.Array
    states: jax.Array
    decoded: Decoded


@method_class
class SSD:
    """Spatially speculative decoding (SSD, 2026, arXiv 2606.20543).

    A small head guesses, from the target's state of each cell of a row, its state of
    the cell below: so a whole row is drafted at once. Each of `rounds` passes judges
    all drafts, every one on its own: it is kept with min(1, p/q), else drawn from the
    positive part of p - q, and the drafts behind it stay. One more pass reads the row
    as it is then. The first row is drawn cell by cell.

    Guarantee: biased: a cell is judged given drafts before it that change in the same
    round; at temperature 0 and with a round for each column, the tokens are AR's.
    Passes, prefill included: W + (H - 1) (rounds + 1) - 1.

    Attributes:
      head: a `Spatial` that was trained with the target. None is for
        `jaxspec.generate`: the family's own.
      rounds: of correction; 0 takes the drafts as they are.
    """

    head: Spatial | None = field(default=None, repr=False, metadata={"arrays": True})
    rounds: int = 2

    def __post_init__(self):
        if self.rounds < 0:
            raise ValueError(f"rounds must be 0 or more, not {self.rounds}")

    def fits(self, pipeline: "Pipeline", size: Size) -> None:
        """Raises ValueError if the family has no head for that size."""
        if self.head is None:
            pipeline.trained("ssd", size)

    def bind(
        self, pipeline: "Pipeline", condition: jax.Array, sampling: Sampling, size: int
    ) -> "SSD":
        """With the family's head for that size, where none is given."""
        if self.head is not None:
            return self
        return replace(self, head=pipeline.spatial(size))

    def start(self, target: Target, keys: jax.Array) -> SSDState:
        """Prefills the target and draws cell 0.

        Raises:
          ValueError: there is no head, it does not fit the target, or the grid has one
            column, or newlines.
        """
        if not isinstance(self.head, Spatial):
            raise ValueError(
                f"head must be a Spatial that was trained with the target, not "
                f"{self.head!r}; jaxspec.generate takes the family's own"
            )
        if target.grammar.newline is not None:
            raise ValueError("SSD draws grids without newlines only")
        self.head.check(target.model.config)
        w = target.grid[1]
        if w == 1:
            raise ValueError("SSD drafts rows, and this grid has one column: use AR()")
        x, slots, visible = target.prefix_inputs()
        cache = Cache.empty(target.model.config, x.shape[0], x.dtype)
        states, cache = _run(target, "extend", x, slots, cache, visible)
        last = states[:, -1:]
        first = jnp.zeros((target.batch, 1), jnp.int32)
        log_p = target.log_probs(_run(target, "features", last), first)[:, 0]
        token, log_p, cache, decoded = draw_first(target, keys, (log_p, cache))
        wide = lambda x: jnp.repeat(x, w, axis=1)
        return SSDState(
            cache=cache,
            keys=keys,
            tokens=wide(token),
            log_q=wide(log_p),
            kept=jnp.zeros((target.batch, w), bool),
            states=wide(last),
            decoded=decoded,
        )

    def step(self, target: Target, state: SSDState) -> SSDState:
        """A pass: the next cell of the first row, or a round of another."""
        (h, w), b = target.grid, target.batch
        column, passes = jnp.arange(w)[None], state.decoded.target_passes[:, None]
        # Where the schedule stands, which is the same for all images.
        row, turn = jnp.divmod(passes - (w - 1), self.rounds + 1)
        first = passes < w - 1
        row, turn = jnp.where(first, 0, row + 1), jnp.where(first, 0, turn)
        active = ~self.finished(state)[:, None]
        cells = row * w + column  # whose distributions the pass finds
        fed = jnp.maximum(cells - 1, 0)
        write = active & (~first | (column == passes + 1))
        before = jnp.take_along_axis(state.decoded.tokens.reshape(b, -1), fed, axis=1)
        tokens = jnp.concatenate([before[:, :1], state.tokens[:, :-1]], axis=1)
        visible = jnp.arange(h * w)[None, None] <= fed[..., None]
        x, slots, visible, places = target.inputs(tokens, fed, write, visible)
        new, cache = _run(target, "extend", x, slots, state.cache, visible, places)
        log_p = target.log_probs(_run(target, "features", new), cells)
        states = jnp.where(target.rows(write)[..., None], new, state.states)
        counted = state.decoded.target_passes + active[:, 0]
        decoded = replace(state.decoded, target_passes=counted).check(log_p, write)
        state = replace(state, cache=cache, states=states, decoded=decoded)

        state = self._drawn(state, cells, write & first, log_p)
        judged = active & ~first & (turn < self.rounds)
        state = self._judged(state, cells, judged, turn, log_p)
        full = active & jnp.where(first, passes == w - 2, turn == self.rounds)
        full &= row < h - 1
        return self._drafted(target, state, cells + w, full)

    def _drawn(self, state, cells, where, log_p) -> SSDState:
        """Draws cells of the first row [B, W] where asked."""
        token = draw(cell_keys(state.keys, cells), log_p)
        decoded = state.decoded.settle(cells, where, token, DRAWN)
        tokens = jnp.where(where, token, state.tokens)
        return replace(state, tokens=tokens, decoded=decoded)

    def _judged(self, state, cells, where, turn, log_p) -> SSDState:
        """Keeps or replaces each draft [B, W] of a row, where it is judged."""
        attempt = state.decoded.target_passes[:, None]
        chance = Ratio()(log_p, state.log_q, state.tokens)
        same = uniform(cell_keys(state.keys, cells, ACCEPT, attempt)) < chance
        rest = residual(log_p, state.log_q)
        other = draw(cell_keys(state.keys, cells, DRAW, attempt), rest)
        tokens = jnp.where(where & ~same, other, state.tokens)
        kept = state.kept & (same | ~where)
        final = where & (turn == self.rounds - 1)
        origin = jnp.where(kept, ACCEPTED, RESAMPLED)
        begun = jnp.broadcast_to(where & (turn == 0), cells.shape)
        drafted = state.decoded.drafted + jnp.sum(begun, axis=1)
        decoded = replace(state.decoded, drafted=drafted)
        return replace(
            state,
            tokens=tokens,
            kept=kept,
            log_q=jnp.where(where[..., None], log_p, state.log_q),
            decoded=decoded.settle(cells, final, tokens, origin),
        )

    def _drafted(self, target: Target, state: SSDState, cells, where) -> SSDState:
        """Drafts the row of cells [B, W] below the one at hand, where that is full."""
        assert self.head is not None
        embeddings = target.rows(target.embeddings[state.tokens])
        head = SSDHead(self.head.config)
        below: Any = head.apply(self.head.params, state.states, embeddings)
        cells = jnp.minimum(cells, target.grid[0] * target.grid[1] - 1)
        log_q = target.log_probs(_run(target, "features", below), cells)
        drafts = draw(cell_keys(state.keys, cells, INITIAL), log_q)
        decoded = state.decoded.check(log_q, where)
        if not self.rounds:
            decoded = decoded.settle(cells, where, drafts, ACCEPTED)
        return replace(
            state,
            tokens=jnp.where(where, drafts, state.tokens),
            log_q=jnp.where(where[..., None], log_q, state.log_q),
            kept=state.kept | where,
            decoded=decoded,
        )

    def finished(self, state: SSDState) -> jax.Array:
        return jnp.all(state.decoded.final_pass >= 0, axis=(1, 2))

    def decoded(self, state: SSDState) -> Decoded:
        return state.decoded


def _run(target: Target, method: str, *args) -> Any:
    return target.model.apply(target.params, *args, method=method)
