"""The wavefront engine: cells are drawn as soon as what they need is there.

One rule covers plain AR, ZipAR (He et al. 2024) and MuLo-SD's resampling of islands. A
cell is `pending` until it is drawn. A pending cell (i, j) is ready when no pending cell
lies before it in its own run of row i, and every pending cell of row i-1 in columns
below j + window is done. A pass draws up to `frontier` ready cells of every image.

A cell is drawn by feeding the token of the cell before it, which fills that cell's
cache slot. `fresh` says which slots hold the cell's present token; a cell sees the
fresh slots before it, and no others. A cell whose successor was drawn without it (the
last of a row, where rows overlap) is fed later as a rider, an input that draws nothing.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxspec.decoding.decoded import DRAWN, Decoded
from jaxspec.decoding.first import draw_first
from jaxspec.decoding.target import Target
from jaxspec.models.transformer import Cache
from jaxspec.sampling import cell_keys, draw


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WavefrontState:
    """What a wavefront carries from pass to pass.

    Attributes:
      cache: the target's.
      keys: [B] image keys.
      pending: bool [B, H, W], cells still to be drawn.
      fresh: bool [B, N], cache slots that hold their cell's present token.
      decoded: the result so far.
    """

    cache: Cache
    keys: jax.Array
    pending: jax.Array
    fresh: jax.Array
    decoded: Decoded


def start(target: Target, keys: jax.Array) -> WavefrontState:
    """Prefills the target and draws cell 0; all others are pending."""
    _, _, cache, decoded = draw_first(target, keys)
    b, (h, w) = target.batch, target.grid
    return WavefrontState(
        cache=cache,
        keys=keys,
        pending=jnp.ones((b, h, w), bool).at[:, 0, 0].set(False),
        fresh=jnp.zeros((b, h * w), bool),
        decoded=decoded,
    )


def ready(pending: jax.Array, window: int, first_row_alone: bool = False) -> jax.Array:
    """Which cells [B, H, W] can be drawn now; at least one wherever one is pending.

    With `first_row_alone`, the second row waits for the whole first one.
    """
    w = pending.shape[-1]
    before = jnp.pad(pending, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    above = jnp.pad(pending, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    waits = jnp.cumsum(above, axis=-1)  # pending cells of the row above up to here
    reach = jnp.minimum(jnp.arange(w) + window, w) - 1
    free = waits[..., reach] == 0
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
    """
    b, n = state.fresh.shape
    rows, raster = jnp.arange(b)[:, None], jnp.arange(n)[None]
    pending = state.pending.reshape(b, n)
    open_cells = ready(state.pending, window, first_row_alone).reshape(b, n)
    cells, valid = first_cells(open_cells, frontier)
    fed, write = jnp.clip(cells - 1, 0, n - 1), valid
    if riders:
        due = ~state.fresh & ~pending  # what is drawn, but not in the cache
        due = due.at[rows, jnp.where(valid, fed, n)].set(False, mode="drop")
        extra, exists = first_cells(due, riders)
        fed = jnp.concatenate([fed, jnp.minimum(extra, n - 1)], axis=1)
        write = jnp.concatenate([valid, exists & jnp.any(valid, axis=1)[:, None]], 1)

    # The slot of a cell that is itself pending is provisional: only its own input
    # sees it.
    source = stand_in(pending, state.pending.shape[-1])[rows, fed]
    tokens = state.decoded.tokens.reshape(b, n)[rows, source]
    settled = write & ~pending[rows, fed]
    fresh = state.fresh.at[rows, jnp.where(settled, fed, n)].set(True, mode="drop")
    seen = fresh[:, None] | (raster[None] == fed[..., None]) | see_unfilled
    visible = seen & (raster[None] <= fed[..., None])

    log_p, cache = target.follow(state.cache, tokens, fed, write, visible)
    log_p = log_p[:, : cells.shape[1]]
    drawn = draw(cell_keys(state.keys, cells), log_p)
    passes = state.decoded.target_passes + jnp.any(valid, axis=1)
    decoded = replace(state.decoded, target_passes=passes).check(log_p, valid)
    decoded = decoded.settle(cells, valid, drawn, DRAWN)
    at = jnp.where(valid, cells, n)
    pending = pending.at[rows, at].set(False, mode="drop")
    return WavefrontState(
        cache, state.keys, pending.reshape(state.pending.shape), fresh, decoded
    )


def finished(state: WavefrontState) -> jax.Array:
    """Which images [B] have no pending cell."""
    return ~jnp.any(state.pending, axis=(1, 2))
