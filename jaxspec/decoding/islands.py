"""Islands: parts of a grid that are drawn again, in a sea of cells that are kept."""

from typing import Literal

import jax
import jax.numpy as jnp

Expand = Literal["square", "forward", "raster"]
Clip = Literal["first", "block"]


def expand(rejected: jax.Array, radius: int, how: Expand, clip: Clip) -> jax.Array:
    """Which cells [B, H, W] are drawn again, where some are rejected.

    MuLo-SD's local expansion (Peruzzo et al. 2026, arXiv 2601.05149): cell u, if a
    reject t has |row_u - row_t| <= radius and |col_u - col_t| <= radius, and u is not
    before the first reject.

    Args:
      rejected: bool [B, H, W].
      radius: 0 is the rejects alone.
      how: "square" as above; "forward" is its cells that are not before t; "raster" is
        all cells from the first reject on.
      clip: no cell before the first reject ("first"), or any ("block").
    """
    b, h, w = rejected.shape
    before = jnp.cumsum(rejected.reshape(b, -1), axis=1).reshape(b, h, w) == 0
    if how == "raster":
        return ~before
    if how == "square":
        near = _spread(rejected, radius, radius, radius, radius)
    else:  # at the right in its own row, and in the rows below
        near = _spread(rejected, 0, 0, 0, radius)
        if radius:
            next_row = jnp.pad(rejected, ((0, 0), (1, 0), (0, 0)))[:, :-1]
            near |= _spread(next_row, 0, radius - 1, radius, radius)
    return near & ~before if clip == "first" else near


def _spread(cells: jax.Array, up: int, down: int, left: int, right: int) -> jax.Array:
    """Cells [B, H, W], and all up to so far from one in each direction."""
    return jax.lax.reduce_window(
        cells,
        False,
        jax.lax.bitwise_or,
        (1, up + down + 1, left + right + 1),
        (1, 1, 1),
        ((0, 0), (down, up), (right, left)),
    )


def label(cells: jax.Array) -> jax.Array:
    """A number int32 [B, H, W] for each 8-connected part of cells, -1 outside."""
    _, h, w = cells.shape
    raster = jnp.broadcast_to(jnp.arange(h * w).reshape(1, h, w), cells.shape)

    def spread(state):
        labels, _ = state
        window = (1, 3, 3), (1, 1, 1), "SAME"
        least = jnp.iinfo(labels.dtype).min
        highest = jax.lax.reduce_window(labels, least, jax.lax.max, *window)
        new = jnp.where(cells, highest, -1)
        return new, jnp.any(new != labels)

    labels = jnp.where(cells, raster, -1)
    return jax.lax.while_loop(lambda s: s[1], spread, (labels, jnp.any(cells)))[0]
