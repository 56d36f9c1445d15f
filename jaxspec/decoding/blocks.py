"""Blocks: rows of a grid that are full of drafts, judged at once, cell by cell.

MuLo-SD's verification (Peruzzo et al. 2026). A block's drafts are fed together, each
seeing those before it. What is kept is final at once; what is not, in raster order or
not, is pending: the wavefront engine draws it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.decoding import wavefront
from jaxspec.decoding.decoded import ACCEPTED, DRAWN, RESAMPLED
from jaxspec.decoding.target import Target
from jaxspec.decoding.wavefront import WavefrontState
from jaxspec.models.cache import Cache

# The first cell's token int32 [B, 1], if it is drawn, and log-probabilities [B, 1, V].
First = tuple[jax.Array, jax.Array]
# (cells [B, T], log_p [B, T, V], drafts [B, T]) -> bool [B, T], which drafts are kept.
Keeps = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Block:
    """Some rows of the grids of some images; not all begin at the same row.

    Attributes:
      images: bool [B], which take part.
      begin: int32 [B], the first cells.
      size: how many cells.
      at_once: how many of them are fed in a pass.
      mask: bool [B, N], the cells; none of an image that does not take part.
      raster: int32 [B, N], the number of every cell of the grid.
    """

    images: jax.Array
    begin: jax.Array
    size: int
    at_once: int
    mask: jax.Array
    raster: jax.Array

    @staticmethod
    def create(
        images: jax.Array,
        row: jax.Array,
        rows: int,
        grid: tuple[int, int],
        rows_at_once: int | None = None,
    ) -> "Block":
        """So many rows from `row` [B] on; those that the grid has."""
        h, w = grid
        raster = jnp.broadcast_to(jnp.arange(h * w)[None], (len(images), h * w))
        place = raster - row[:, None] * w
        mask = (place >= 0) & (place < rows * w) & images[:, None]
        at_once = min(rows_at_once or rows, rows)
        return Block(images, row * w, rows * w, at_once * w, mask, raster)

    @property
    def passes(self) -> int:
        """That feed it."""
        return -(-self.size // self.at_once)

    @property
    def place(self) -> jax.Array:
        """Of every cell of the grid, int32 [B, N]; 0 is the first of the block."""
        return self.raster - self.begin[:, None]


def sweep(
    target: Target,
    cache: Cache,
    tokens: jax.Array,
    seen: jax.Array,
    block: Block,
    *,
    late: tuple[jax.Array, jax.Array] | None = None,
    look: Callable[[jax.Array, jax.Array], Any] = lambda cells, log_p: (),
) -> tuple[Cache, Any]:
    """Feeds a block, and says what follows: of each cell of it, the cell before.

    So the one before the block is fed first, and the last of the block not at all.

    Args:
      target: the model.
      cache: its cache.
      tokens: int32 [B, N], of the whole grid.
      seen: bool [B, N], which cells are fed if their turn comes, and which are visible
        to those behind them.
      block: what is fed.
      late: other cells [B, R], and which of them exist, fed in the first pass too.
      look: `(cells [B, T], log_p [B, T, V])`, asked in each pass about T cells of the
        block; past the grid they are its last cell. Where memory asks for several
        passes, the logits of all cells never exist together.

    Returns:
      The cache, and what `look` returned, arrays [B, T], joined.
    """
    b, n = seen.shape
    rows, size = jnp.arange(b)[:, None], block.at_once
    if late is None:
        late = jnp.zeros((b, 0), jnp.int32), jnp.zeros((b, 0), bool)

    def one(cache, number):
        cells = block.begin[:, None] + number * size + jnp.arange(size)[None]
        fed = jnp.clip(cells - 1, 0, n - 1)
        write = (cells > 0) & (cells < n) & seen[rows, fed]
        fed = jnp.concatenate([fed, jnp.clip(late[0], 0, n - 1)], axis=1)
        write = jnp.concatenate([write, late[1] & (number == 0)], axis=1)
        raster = block.raster[:, None]
        own = raster == fed[..., None]
        visible = (seen[:, None] & (raster < fed[..., None])) | own
        log_p, cache = target.follow(cache, tokens[rows, fed], fed, write, visible)
        return cache, look(jnp.minimum(cells, n - 1), log_p[:, :size])

    cache, out = jax.lax.scan(one, cache, jnp.arange(block.passes))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(b, block.passes * size)
    return cache, jax.tree.map(join, out)


def judge(
    target: Target,
    wave: WavefrontState,
    block: Block,
    keeps: Keeps,
    *,
    first: First | None,
    most_late: int,
    again: bool = False,
) -> tuple[WavefrontState, jax.Array]:
    """Feeds a block's drafts, which are in its tokens, and judges each.

    Cells before the block whose slots do not hold their tokens are fed with it.

    Args:
      target: the model.
      wave: no cell of the images that take part is pending.
      block: of drafts.
      keeps: the rule.
      first: of the first cell; None if it is not in the block.
      most_late: how many cells there can be that are late in this sense.
      again: as many cells before the block as it has are fed again, late or not.

    Returns:
      The state, with the block's passes and drafts counted, and whether each cell of
      the block, bool [B, N], keeps its draft, as newlines do; elsewhere it means
      nothing.
    """
    (b, n), decoded = block.mask.shape, wave.decoded
    tokens, fresh, late = decoded.tokens.reshape(b, n), wave.fresh, None
    if first is None:
        before = (block.place < 0) & block.images[:, None]
        due = before & (block.place < -1)  # the one before the block is fed anyhow
        due &= (block.place >= -block.size) if again else ~fresh
        late = wavefront.first_cells(due, block.size if again else most_late)
        fresh |= due | (before & (block.place == -1))

    def look(cells, log_p):
        if first is not None:
            log_p = jnp.where(cells[..., None] == 0, first[1], log_p)
        drafts = jnp.take_along_axis(tokens, cells, axis=1)
        return keeps(cells, log_p, drafts), jnp.isnan(log_p[..., 0])

    cache, (kept, bad) = sweep(
        target, wave.cache, tokens, block.mask | fresh, block, late=late, look=look
    )
    passes = decoded.target_passes + block.passes * block.images
    decoded = replace(decoded, target_passes=passes).judged(block.raster, block.mask)
    decoded = decoded.check(
        jnp.where(bad, jnp.nan, 0.0)[..., None], block.images[:, None]
    )
    kept = jnp.take_along_axis(kept, jnp.clip(block.place, 0, block.size - 1), axis=1)
    kept |= decoded.grammar.forced(block.raster)
    return replace(wave, cache=cache, fresh=fresh, decoded=decoded), kept


def settle(
    wave: WavefrontState,
    block: Block,
    rejected: jax.Array,
    redrawn: jax.Array,
    first: First | None,
) -> WavefrontState:
    """Makes the drafts final that are kept; what is to be redrawn is pending.

    Kept cells come to be ACCEPTED. When they are drawn, those rejected come to be
    RESAMPLED, and others, whose drafts were dropped for a reject near by, DRAWN.

    Args:
      wave: the state after `judge`.
      block: of drafts.
      rejected, redrawn: bool [B, H, W], within the block; no newlines.
      first: as for `judge`; the first cell needs no pass to be drawn.
    """
    (b, n), decoded = block.mask.shape, wave.decoded
    again = redrawn.reshape(b, n)
    origin = jnp.where(redrawn, DRAWN, ACCEPTED)
    origin = jnp.where(rejected, RESAMPLED, origin).reshape(b, n)
    drafted = block.mask & ~decoded.grammar.forced(block.raster)
    origin = jnp.where(drafted, origin, decoded.origin.reshape(b, n))
    tokens, settled = decoded.tokens.reshape(b, n), block.mask & ~again
    if first is not None:
        is_first = block.raster == 0
        tokens = jnp.where(is_first & again, first[0], tokens)
        settled |= is_first & block.images[:, None]
    pending = (block.mask & ~settled).reshape(redrawn.shape)
    decoded = replace(decoded, origin=origin.reshape(redrawn.shape).astype(jnp.int8))
    return replace(
        wave,
        decoded=decoded.settle(block.raster, settled, tokens, origin),
        pending=wave.pending | pending,
        # The last cell of a block was not fed with it.
        fresh=wave.fresh | (block.mask & ~again & (block.place < block.size - 1)),
    )


def refresh(target: Target, wave: WavefrontState, block: Block) -> WavefrontState:
    """Feeds what is final of a block again, without what is pending in view.

    An image with nothing pending takes no part.
    """
    b, n = block.mask.shape
    images = block.images & ~wavefront.finished(wave)
    kept = block.mask & ~wave.pending.reshape(b, n) & images[:, None]
    fresh = wave.fresh | (kept & (block.place < block.size - 1))
    tokens, seen = wave.decoded.tokens.reshape(b, n), fresh & images[:, None]
    cache, _ = sweep(target, wave.cache, tokens, seen, block)
    passes = wave.decoded.target_passes + block.passes * images
    decoded = replace(wave.decoded, target_passes=passes)
    return replace(wave, cache=cache, fresh=fresh, decoded=decoded)
