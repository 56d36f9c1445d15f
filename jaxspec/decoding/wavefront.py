"""The wavefront engine: cells are drawn as soon as what they need is there.

One rule covers plain AR, ZipAR (He et al. 2024) and MuLo-SD's resampling of islands. A
cell is `pending` until it is drawn. A pending cell (i, j) is ready when no pending cell
lies before it in its own run of row i, and every pending cell of row i-1 in columns
below j + window is done. A pass draws up to `frontier` ready cells of every image.

A cell is drawn by feeding the token of the cell before it, which fills that cell's
cache slot. `fresh` says which slots hold the cell's present token; a cell sees the
fresh slots before it, and no others. A cell whose successor was drawn without it (the
last of a row, where rows overlap) is fed later as a rider, an input that draws nothing.

Rows may start tentatively, as with ZipAR's adaptive window: a cell that is drawn while
the cell before it is pending is only a candidate. Every pass draws it once more,
coupled to the draw before; it is final if it stays the same, or if nothing before it is
pending any more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.acceptance import Ratio, residual
from jaxspec.decoding.decoded import ACCEPTED, DRAWN, RESAMPLED, Decoded
from jaxspec.decoding.first import draw_first
from jaxspec.decoding.target import Target
from jaxspec.sampling import ACCEPT, DRAW, cell_keys, draw, uniform


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Candidate:
    """The first cell of a row that starts tentatively; there is one at most.

    Rows start in order: the row below waits for final cells of this one.

    Attributes:
      cell: int32 [B, 1], which; -1 or a cell that is final stands for none.
      token: int32 [B, 1], what was drawn there last.
      log_q: float32 [B, 1, V], from what.
    """

    cell: jax.Array
    token: jax.Array
    log_q: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WavefrontState:
    """What a wavefront carries from pass to pass.

    Attributes:
      cache: the target's, or whatever is read through.
      keys: [B] image keys.
      pending: bool [B, H, W], cells still to be drawn.
      fresh: bool [B, N], cache slots that hold their cell's present token.
      decoded: the result so far. Of a pending cell it has the origin that the cell will
        have, and the draft that it replaces, if there is one.
      candidate: where rows start tentatively; else None.
    """

    cache: Any
    keys: jax.Array
    pending: jax.Array
    fresh: jax.Array
    decoded: Decoded
    candidate: Candidate | None = None


def start(
    target: Target,
    keys: jax.Array,
    tentative: bool = False,
    prefilled: tuple[jax.Array, Any] | None = None,
) -> WavefrontState:
    """Prefills the target and draws cell 0; all others are pending.

    With `tentative`, rows start tentatively. With `prefilled`, the distribution [B, V]
    of cell 0 and a cache are there already.
    """
    token, log_p, cache, decoded = draw_first(target, keys, prefilled)
    b, (h, w) = target.batch, target.grid
    none = jnp.full((b, 1), -1, jnp.int32)
    free = jnp.broadcast_to(~target.grammar.mask, (b, h, w))
    return WavefrontState(
        cache=cache,
        keys=keys,
        pending=free.at[:, 0, 0].set(False),
        fresh=jnp.zeros((b, h * w), bool),
        decoded=decoded,
        candidate=Candidate(none, token, log_p) if tentative else None,
    )


def ready(
    pending: jax.Array,
    window: int,
    first_row_alone: bool = False,
    islands: jax.Array | None = None,
) -> jax.Array:
    """Which cells [B, H, W] can be drawn now; at least one wherever one is pending.

    With `first_row_alone`, the second row waits for the whole first one. With `islands`
    (see `islands.label`), a cell waits for those of its own island only.
    """
    w = pending.shape[-1]
    before = jnp.pad(pending, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    above = jnp.pad(pending, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    waits = jnp.cumsum(above, axis=-1)  # pending cells of the row above up to here
    if islands is None:
        reach = jnp.minimum(jnp.arange(w) + window, w) - 1
        free = waits[..., reach] == 0
    else:
        labels = jnp.pad(islands, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        own = labels[:, :, None] == islands[..., None]  # [B, H, W, W of the row above]
        place = jnp.arange(w)
        near = place[None, None, None] < place[None, None, :, None] + window
        free = ~jnp.any(above[:, :, None] & own & near, axis=-1)
    if first_row_alone:
        free = free.at[:, 1].set(waits[:, 1, -1:] == 0)
    return pending & ~before & free


def stand_in(pending: jax.Array, width: int) -> jax.Array:
    """The cell [B, N] whose token is fed for each cell: itself, if it is done.

    For a pending cell, the one above it, or the latest done before that; in the first
    row, the latest done before the cell itself.
    """
    raster = jnp.arange(pending.shape[-1])[None]
    latest = jax.lax.cummax(jnp.where(pending, -1, raster), axis=1)
    above = jnp.where(raster < width, latest, jnp.roll(latest, width, axis=1))
    return jnp.where(pending, jnp.maximum(above, 0), raster)


def first_cells(mask: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The first `count` cells of a mask [B, N], and which of them exist."""
    n = mask.shape[-1]
    so_far = jnp.cumsum(mask, axis=-1)[:, None]
    rank = jnp.arange(min(count, n))[None, :, None]
    cells = jnp.sum(so_far <= rank, axis=-1)  # as many as lie before it
    return cells, cells < n


def step(
    target: Target,
    state: WavefrontState,
    *,
    window: int,
    frontier: int,
    riders: int = 0,
    first_row_alone: bool = False,
    see_unfilled: bool = False,
    see_drafts: bool = False,
    islands: jax.Array | None = None,
) -> WavefrontState:
    """One pass of the target: draws up to `frontier` ready cells of each image.

    Args:
      target: the model.
      state: from `start` or the step before.
      window: tokens of the row above that a row's start waits for.
      frontier: most cells drawn at once.
      riders: most other cells whose slots are brought up to date at once.
      first_row_alone: the second row waits for the whole first one.
      see_unfilled: a cell sees every slot before it, filled or not, as released ZipAR
        code does; an empty slot takes attention and gives zeros.
      see_drafts: pending cells hold drafts, in their slots too, which are fed and seen
        until the cells are drawn; no token stands in for them.
      islands: int32 [B, H, W], as for `ready`.
    """
    b, n = state.fresh.shape
    rows, raster = jnp.arange(b)[:, None], jnp.arange(n)[None]
    forced = target.grammar.forced(raster)
    pending = state.pending.reshape(b, n)
    open_cells = ready(state.pending, window, first_row_alone, islands).reshape(b, n)
    cells, valid = first_cells(open_cells, frontier)
    fed, write = jnp.clip(cells - 1, 0, n - 1), valid
    if riders:
        # What is drawn, but not in the cache; nothing follows the last cell.
        due = ~state.fresh & (state.decoded.final_pass.reshape(b, n) >= 0)
        # A newline is fed where the cell behind it is drawn.
        due &= (raster < n - 1) & ~forced
        due = due.at[rows, jnp.where(valid, fed, n)].set(False, mode="drop")
        extra, exists = first_cells(due, riders)
        fed = jnp.concatenate([fed, jnp.minimum(extra, n - 1)], axis=1)
        write = jnp.concatenate([valid, exists & jnp.any(valid, axis=1)[:, None]], 1)

    # The slot of a cell that is itself pending is provisional: only its own input
    # sees it.
    source = fed
    if not see_drafts:
        source = stand_in(pending, state.pending.shape[-1])[rows, fed]
    tokens = state.decoded.tokens.reshape(b, n)[rows, source]
    settled = write & ~pending[rows, fed]
    fresh = state.fresh.at[rows, jnp.where(settled, fed, n)].set(True, mode="drop")
    seen = fresh[:, None] | (raster[None] == fed[..., None])
    seen |= see_unfilled or see_drafts
    visible = seen & (raster[None] <= fed[..., None])

    log_p, cache = target.follow(state.cache, tokens, fed, write, visible)
    log_p = log_p[:, : cells.shape[1]]
    drawn = draw(cell_keys(state.keys, cells), log_p)
    passes = state.decoded.target_passes + jnp.any(valid, axis=1)
    decoded = replace(state.decoded, target_passes=passes).check(log_p, valid)
    origin = decoded.origin.reshape(b, n)[rows, jnp.minimum(cells, n - 1)]
    final, candidate = valid, state.candidate
    if candidate is not None:
        # A newline is certain, but not what it says while its row has a gap.
        gap = pending | (forced & jnp.roll(pending, 1, axis=1))
        early = valid & gap[rows, fed[:, : cells.shape[1]]]
        again = valid & (cells == candidate.cell)
        drawn, same, candidate = _once_more(
            candidate, state.keys, passes, cells, log_p, drawn, again, early
        )
        final = valid & (~early | (again & same))
        origin = jnp.where(again, jnp.where(same, ACCEPTED, RESAMPLED), origin)
        drafted = decoded.drafted + jnp.sum(again, axis=1)
        decoded = replace(decoded, drafted=drafted)
    decoded = decoded.settle(cells, final, drawn, origin)
    at = jnp.where(final, cells, n)
    pending = pending.at[rows, at].set(False, mode="drop")
    return WavefrontState(
        cache,
        state.keys,
        pending.reshape(state.pending.shape),
        fresh,
        decoded,
        candidate,
    )


# (cache, tokens, fed, write, fresh) -> log_p [B, F, V] of the cells to be drawn, cache;
# the others as for `Target.follow`, and `fresh` as it is once these are fed.
Read = Callable[..., tuple[jax.Array, Any]]


def step_at(
    state: WavefrontState, cells: jax.Array, valid: jax.Array, read: Read, most: int
) -> WavefrontState:
    """One pass that draws given cells, whatever is fed for them.

    For models that draw several cells at once: `step` feeds the token before each cell
    that it draws; here every token is fed in the pass after it was drawn, once, and
    `read` says what follows of all that is there.

    Args:
      state: from `start` or the step before.
      cells: int32 [B, F], which are drawn.
      valid: bool [B, F], which of them exist. An image with none is finished.
      read: one pass of the model.
      most: tokens that were drawn in a pass, at most.
    """
    b, n = state.fresh.shape
    rows = jnp.arange(b)[:, None]
    due = ~state.fresh & (state.decoded.final_pass.reshape(b, n) >= 0)
    fed, exists = first_cells(due, most)
    fed, write = jnp.minimum(fed, n - 1), exists & jnp.any(valid, axis=1)[:, None]
    tokens = state.decoded.tokens.reshape(b, n)[rows, fed]
    fresh = state.fresh.at[rows, jnp.where(write, fed, n)].set(True, mode="drop")

    log_p, cache = read(state.cache, tokens, fed, write, fresh)
    drawn = draw(cell_keys(state.keys, cells), log_p)
    passes = state.decoded.target_passes + jnp.any(valid, axis=1)
    decoded = replace(state.decoded, target_passes=passes).check(log_p, valid)
    decoded = decoded.settle(cells, valid, drawn, DRAWN)
    at = jnp.where(valid, cells, n)
    pending = state.pending.reshape(b, n).at[rows, at].set(False, mode="drop")
    pending = pending.reshape(state.pending.shape)
    return replace(state, cache=cache, pending=pending, fresh=fresh, decoded=decoded)


def _once_more(
    old: Candidate,
    keys: jax.Array,
    passes: jax.Array,
    cells: jax.Array,
    log_p: jax.Array,
    drawn: jax.Array,
    again: jax.Array,
    early: jax.Array,
) -> tuple[jax.Array, jax.Array, Candidate]:
    """Draws the candidate from its new distribution, the same if it may be.

    It stays with probability min(1, p/q), and else comes from the positive part of
    p - q: drawn from q, it is then distributed as p.

    Args:
      old: the candidate.
      keys, passes: [B].
      cells, log_p, drawn: [B, F] and [B, F, V], what this pass draws, and draws from.
      again: bool [B, F], where the candidate is.
      early: bool [B, F], what is drawn while the cell before it is pending.

    Returns:
      The draws [B, F], whether the candidate is the same [B, 1], and the next one.
    """
    place = jnp.argmax(again | early, axis=1)[:, None]
    cell = jnp.take_along_axis(cells, place, axis=1)
    log_p = jnp.take_along_axis(log_p, place[..., None], axis=1)
    coin = uniform(cell_keys(keys, cell, ACCEPT, passes[:, None]))
    same = coin < Ratio()(log_p, old.log_q, old.token)
    rest = residual(log_p, old.log_q)
    other = draw(cell_keys(keys, cell, DRAW, passes[:, None]), rest)
    drawn = jnp.where(again, jnp.where(same, old.token, other), drawn)
    token = jnp.take_along_axis(drawn, place, axis=1)
    return drawn, same, Candidate(cell, token, log_p)


def finished(state: WavefrontState) -> jax.Array:
    """Which images [B] have no pending cell."""
    return ~jnp.any(state.pending, axis=(1, 2))
