"""The wavefront engine: cells are drawn as soon as what they need is there.

One rule covers plain AR, ZipAR (He et al. 2024) and MuLo-SD's resampling of islands. A
cell is `pending` until it is drawn. A pending cell (i, j) is ready when no pending cell
lies before it in its own run of row i, and every pending cell of row i-1 in columns
below j + window is done. A pass draws up to `frontier` ready cells of every image.

A cell is drawn by feeding the token of the cell before it, which fills that cell's
cache slot. `fresh` says which slots hold the cell's present token; a cell sees the
fresh slots before it, and no others.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxspec.decoding.decoded import DRAWN, Decoded
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
    """Prefills the target and draws cell 0, which needs no further pass."""
    log_p, cache = target.prefill()
    b, (h, w) = target.batch, target.grid
    first = jnp.zeros((b, 1), jnp.int32)
    valid = jnp.ones((b, 1), bool)
    decoded = Decoded.empty(b, target.grid).check(log_p[:, None], valid)
    token = draw(cell_keys(keys, first), log_p[:, None])
    return WavefrontState(
        cache=cache,
        keys=keys,
        pending=jnp.ones((b, h, w), bool).at[:, 0, 0].set(False),
        fresh=jnp.zeros((b, h * w), bool),
        decoded=decoded.settle(first, valid, token, DRAWN),
    )


def ready(pending: jax.Array, window: int) -> jax.Array:
    """Which cells [B, H, W] can be drawn now; at least one wherever one is pending."""
    w = pending.shape[-1]
    before = jnp.pad(pending, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    above = jnp.pad(pending, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    waits = jnp.cumsum(above, axis=-1)  # pending cells of the row above up to here
    reach = jnp.minimum(jnp.arange(w) + window, w) - 1
    return pending & ~before & (waits[..., reach] == 0)


def first_cells(mask: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The first `count` cells of a mask [B, N], and which of them exist."""
    n = mask.shape[-1]
    index = jnp.where(mask, jnp.arange(n)[None], n)
    cells = -jax.lax.top_k(-index, min(count, n))[0]
    return cells, cells < n


def step(
    target: Target, state: WavefrontState, *, window: int, frontier: int
) -> WavefrontState:
    """One pass of the target: draws up to `frontier` ready cells of each image."""
    b, n = state.fresh.shape
    rows, raster = jnp.arange(b)[:, None], jnp.arange(n)[None]
    pending = state.pending.reshape(b, n)
    cells, valid = first_cells(ready(state.pending, window).reshape(b, n), frontier)
    fed = jnp.clip(cells - 1, 0, n - 1)

    # Where the cell to be fed is itself pending, the latest token before it stands in;
    # its slot is then provisional, seen by this input alone.
    latest = jax.lax.cummax(jnp.where(pending, -1, raster), axis=1)
    tokens = state.decoded.tokens.reshape(b, n)[rows, latest[rows, fed]]
    settled = valid & ~pending[rows, fed]
    fresh = state.fresh.at[rows, jnp.where(settled, fed, n)].set(True, mode="drop")
    own = raster[None] == fed[..., None]
    visible = (fresh[:, None] & (raster[None] <= fed[..., None])) | own

    log_p, cache = target.follow(state.cache, tokens, fed, valid, visible)
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
