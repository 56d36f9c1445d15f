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
    check_fits,
    method_class,
)
from jaxspec.decoding.first import draw_first
from jaxspec.decoding.jacobi import one_hot
from jaxspec.methods.upsampled import Upsampled, with_draft
from jaxspec.models.cache import Cache
from jaxspec.models.ssd import Spatial, SSDHead
from jaxspec.sampling import ACCEPT, DRAW, INITIAL, Sampling, cell_keys, draw, uniform
from jaxspec.sizes import Size

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SSDState:
    """What a pass leaves to the next; W columns, or cells of the rows at hand.

    Attributes:
      cache: the target's.
      keys: [B] image keys.
      tokens: int32 [B, W], of the row at hand: drawn, or drafts.
      log_q: float32 [B, W, V], what drafts were drawn from last.
      kept: bool [B, W], first drafts that no round replaced.
      states: [B * rows, W, C], of the row's cells, before the final norm.
      decoded: the result so far.
      drafts: int32 [B, N], the first drafts of all cells, and what they were drawn from
        [B, N, V], if that is known; None if the head makes them.
    """

    cache: Cache
    keys: jax.Array
    tokens: jax.Array
    log_q: jax.Array
    kept: jax.Array
    states: jax.Array
    decoded: Decoded
    drafts: tuple[jax.Array, jax.Array | None] | None = None


@method_class
class SSD:
    """Spatially speculative decoding (SSD, 2026, arXiv 2606.20543).

    A small head guesses, from the target's state of each cell of a row, its state of
    the cell below: so a whole row is drafted at once. Each of `rounds` passes judges
    all drafts, every one on its own: it is kept with min(1, p/q), else drawn from the
    positive part of p - q, and the drafts behind it stay. One more pass reads the row
    as it is then. The first row is drawn cell by cell.

    With `upsampled` the drafts of all rows are another drafter's, and the same rounds
    correct them, of as many rows at once as is asked: all of them, and a round is one
    pass over the picture.

    Guarantee: biased: a cell is judged given drafts before it that change in the same
    round; at temperature 0, with a round for each cell corrected at once, the tokens
    are AR's.
    Passes, prefill included: W + (H - 1) (rounds + 1) - 1; with `upsampled`
    (H / rows) (rounds + 1).

    Attributes:
      head: a `Spatial` that was trained with the target. None is for
        `jaxspec.generate`: the family's own.
      rounds: of correction; 0 takes the drafts as they are.
      upsampled: where drafts come from, if not from a head.
      rows: corrected at once, if drafts are upsampled; divides those of the grid.
    """

    head: Spatial | None = field(default=None, repr=False, metadata={"arrays": True})
    rounds: int = 2
    upsampled: Upsampled | None = field(
        default=None, repr=False, metadata={"arrays": True}
    )
    rows: int = 1

    def __post_init__(self):
        least = 0 if self.upsampled is None else 1  # drafts as they are: its method
        if self.rounds < least:
            raise ValueError(f"rounds must be {least} or more, not {self.rounds}")
        if self.rows < 1:
            raise ValueError(f"rows must be 1 or more, not {self.rows}")
        if self.rows > 1 and self.upsampled is None:
            raise ValueError(
                "a head drafts row by row: rows must be 1, or give upsampled"
            )

    def fits(self, pipeline: "Pipeline", size: Size) -> None:
        """Raises ValueError if the family has newlines, or lacks what drafts."""
        pipeline.grammar(size).refuse("SSD")
        check_fits(self.upsampled, pipeline, size)
        if self.upsampled is None and self.head is None:
            pipeline.trained("ssd", size)

    def bind(
        self, pipeline: "Pipeline", condition: jax.Array, sampling: Sampling, size: int
    ) -> "SSD":
        """With the family's head for that size, or drafter, where none is given."""
        if self.upsampled is not None:
            upsampled = self.upsampled.bind(pipeline, condition, sampling, size)
            return replace(self, upsampled=upsampled)
        if self.head is not None:
            return self
        return replace(self, head=pipeline.spatial(size))

    def start(self, target: Target, keys: jax.Array) -> SSDState:
        """Prefills the target and draws cell 0.

        Raises:
          ValueError: there is no head, or one and `upsampled`; what drafts does not fit
            the target; or the grid has newlines, one column, or other rows.
        """
        self._check(target)
        size = target.grid[1] * self.rows
        x, slots, visible = target.prefix_inputs()
        cache = Cache.empty(target.model.config, x.shape[0], x.dtype)
        states, cache = _run(target, "extend", x, slots, cache, visible)
        last = states[:, -1:]
        first = jnp.zeros((target.batch, 1), jnp.int32)
        log_p = target.log_probs(_run(target, "features", last), first)[:, 0]
        token, log_p, cache, decoded = draw_first(target, keys, (log_p, cache))
        wide = lambda x: jnp.repeat(x, size, axis=1)
        state = SSDState(
            cache=cache,
            keys=keys,
            tokens=wide(token),
            log_q=wide(log_p),
            kept=jnp.zeros((target.batch, size), bool),
            states=wide(last),
            decoded=decoded,
        )
        if self.upsampled is None:
            return state
        tokens, log_q, low = self.upsampled.drawn(target, keys)
        drafts = tokens.at[:, 0, 0].set(token[:, 0]).reshape(target.batch, -1), log_q
        decoded = replace(with_draft(decoded, low), drafts=tokens)
        state = replace(state, drafts=drafts, decoded=decoded)
        cells = jnp.broadcast_to(jnp.arange(size), state.tokens.shape)
        return self._drafted(target, state, cells, jnp.ones_like(cells, bool))

    def _check(self, target: Target) -> None:
        """Raises ValueError as `start` says."""
        target.grammar.refuse("SSD")
        if self.upsampled is not None:
            if self.head is not None:
                raise ValueError("drafts are a head's or upsampled: give one of both")
            if target.grid[0] % self.rows:
                raise ValueError(
                    f"rows must divide the grid's {target.grid[0]}, not {self.rows}"
                )
            return
        if not isinstance(self.head, Spatial):
            raise ValueError(
                f"head must be a Spatial that was trained with the target, not "
                f"{self.head!r}; jaxspec.generate takes the family's own"
            )
        self.head.check(target.model.config)
        if target.grid[1] == 1:
            raise ValueError("SSD drafts rows, and this grid has one column: use AR()")

    def step(self, target: Target, state: SSDState) -> SSDState:
        """A pass: the next cell of the first row, or a round of others."""
        (h, w), b, size = target.grid, target.batch, state.tokens.shape[1]
        place, passes = jnp.arange(size)[None], state.decoded.target_passes[:, None]
        # Where the schedule stands, which is the same for all images.
        alone = w - 1 if self.upsampled is None else 0  # passes of the first row
        part, turn = jnp.divmod(passes - alone, self.rounds + 1)
        first = passes < alone
        part, turn = jnp.where(first, 0, part + (alone > 0)), jnp.where(first, 0, turn)
        active = ~self.finished(state)[:, None]
        cells = part * size + place  # whose distributions the pass finds
        fed = jnp.maximum(cells - 1, 0)
        write = active & (~first | (place == passes + 1)) & (cells > 0)
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
        judged = write & ~first & (turn < self.rounds)
        state = self._judged(state, cells, judged, turn, log_p)
        full = active & jnp.where(first, passes == w - 2, turn == self.rounds)
        full &= part < h * w // size - 1
        return self._drafted(target, state, cells + size, full)

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
        """Drafts the cells [B, W] that follow those at hand, where these are full."""
        cells = jnp.minimum(cells, target.grid[0] * target.grid[1] - 1)
        if state.drafts is None:
            assert self.head is not None
            embeddings = target.rows(target.embeddings[state.tokens])
            head = SSDHead(self.head.config)
            below: Any = head.apply(self.head.params, state.states, embeddings)
            log_q = target.log_probs(_run(target, "features", below), cells)
            drafts = draw(cell_keys(state.keys, cells, INITIAL), log_q)
        else:
            tokens, log_q = state.drafts
            drafts = jnp.take_along_axis(tokens, cells, axis=1)
            if log_q is None:
                log_q = one_hot(drafts, state.log_q.shape[-1])
            else:
                log_q = jnp.take_along_axis(log_q, cells[..., None], axis=1)
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
