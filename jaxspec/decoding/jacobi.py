"""The Jacobi engine: a window of drafts, judged together, kept up to the first reject.

One step covers SJD (Teng et al. 2024), SCD (So et al. 2025) and GSD: they differ in the
rule that judges a draft and in how the drafts behind the first reject are renewed. A
step feeds the newest final token and the drafts behind it, which gives the target's
distribution of every cell of the window. Rolling back is not moving the cursor: slots
behind it are written again before they are seen.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxspec.acceptance import Rule, residual
from jaxspec.decoding.decoded import ACCEPTED, BONUS, RESAMPLED, Decoded
from jaxspec.decoding.first import draw_first
from jaxspec.decoding.target import Target
from jaxspec.models.transformer import Cache
from jaxspec.sampling import DRAW, cell_keys, draw

ACCEPT, GUMBEL, INITIAL = 1, 2, 3  # purposes of keys, beside DRAW

Refresh = Literal["independent", "maximal", "gumbel"]
Initial = Literal[
    "random", "repeat-left", "repeat-above", "sample-left", "sample-above"
]
INITIALS = get_args(Initial)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class JacobiState:
    """What the window carries from pass to pass; D drafts.

    Attributes:
      cache: the target's.
      keys: [B] image keys.
      done: int32 [B], final cells: the window begins there.
      drafts: int32 [B, D], of the cells from `done` on.
      log_q: float32 [B, D, V], what each was drawn from; one-hot if it was chosen.
      above: float32 [B, W, V], the newest distribution seen in each column, where new
        drafts are drawn from those above them; else empty.
      decoded: the result so far.
    """

    cache: Cache
    keys: jax.Array
    done: jax.Array
    drafts: jax.Array
    log_q: jax.Array
    above: jax.Array
    decoded: Decoded


def one_hot(tokens: jax.Array, size: int) -> jax.Array:
    """The log-distribution of a token that was chosen."""
    return jnp.where(jax.nn.one_hot(tokens, size, dtype=bool), 0.0, -jnp.inf)


def start(
    target: Target, keys: jax.Array, *, window: int, initial: Initial
) -> JacobiState:
    """Prefills the target, draws cell 0, and makes the first drafts.

    Args:
      target: the model.
      keys: [B] image keys.
      window: inputs of a pass: the newest final token and `window - 1` drafts.
      initial: how a cell that enters the window gets its draft.
    """
    token, log_p, cache, decoded = draw_first(target, keys)
    b, (_, w) = target.batch, target.grid
    state = JacobiState(
        cache=cache,
        keys=keys,
        done=jnp.zeros(b, jnp.int32),
        drafts=token[:, :0],
        log_q=log_p[:, :0],
        above=jnp.repeat(log_p, w if initial == "sample-above" else 0, axis=1),
        decoded=decoded,
    )
    return _advance(state, jnp.ones(b, jnp.int32), token, log_p, window - 1, initial)


def step(
    target: Target,
    state: JacobiState,
    *,
    rule: Rule,
    refresh: Refresh,
    initial: Initial,
) -> JacobiState:
    """One pass of the target: at least one more cell of every unfinished image.

    Args:
      target: the model.
      state: from `start` or the step before.
      rule: judges drafts (see `jaxspec.acceptance`).
      refresh: what becomes of drafts behind the first reject: drawn anew from the new
        distribution p ("independent"), kept with min(1, p/q) and else drawn from the
        residual ("maximal"), or drawn with noise that belongs to the cell ("gumbel").
      initial: as for `start`.
    """
    (b, d), n = state.drafts.shape, state.decoded.tokens[0].size
    rows, raster = jnp.arange(b)[:, None], jnp.arange(n)[None]
    cells = state.done[:, None] + jnp.arange(d + 1)[None]  # the window's
    inside = cells < n
    fed = jnp.minimum(cells - 1, n - 1)
    newest = state.decoded.tokens.reshape(b, n)[rows, fed[:, :1]]
    tokens = jnp.concatenate([newest, state.drafts], axis=1)
    visible = raster[None] <= fed[..., None]
    log_p, cache = target.follow(state.cache, tokens, fed, inside, visible)

    active = inside[:, 0]
    passes = state.decoded.target_passes + active
    key = lambda purpose: cell_keys(state.keys, cells, purpose, passes[:, None])
    chance = rule.accept(log_p[:, :d], state.log_q, state.drafts, target.codes)
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(key(ACCEPT)[:, :d])
    kept = (uniform < chance) & inside[:, :d]
    accepted = jnp.sum(jnp.cumprod(kept, axis=1), axis=1)

    rest = residual(log_p[:, :d], state.log_q)
    rest = jnp.concatenate([rest, log_p[:, d:]], axis=1)
    order = jnp.arange(d + 1)[None] - accepted[:, None]  # 0 is the first reject
    held, source = order < 0, jnp.where((order == 0)[..., None], rest, log_p)
    if refresh == "maximal":  # the same test and residual behind the reject as at it
        held, source = _padded(kept), rest
    tokens = draw(key(DRAW), source)
    if refresh == "gumbel":
        noisy = draw(cell_keys(state.keys, cells, GUMBEL), log_p)
        tokens = jnp.where(order == 0, tokens, noisy)
    tokens = jnp.where(held, _padded(state.drafts), tokens)

    origin = jnp.where(accepted[:, None] < d, RESAMPLED, BONUS)
    origin = jnp.where(order < 0, ACCEPTED, origin)
    decoded = replace(
        state.decoded,
        target_passes=passes,
        drafted=state.decoded.drafted + jnp.sum(inside[:, :d], axis=1),
    ).check(log_p, inside)
    decoded = decoded.settle(cells, inside & (order <= 0), tokens, origin)
    state = replace(state, cache=cache, decoded=decoded)
    return _advance(state, accepted + active, tokens, log_p, d, initial)


def _padded(x: jax.Array) -> jax.Array:
    """Values of the drafts [B, D] over the whole window [B, D + 1]."""
    return jnp.pad(x, ((0, 0), (0, 1)))


def _advance(
    state: JacobiState,
    count: jax.Array,
    tokens: jax.Array,
    log_p: jax.Array,
    drafts: int,
    initial: Initial,
) -> JacobiState:
    """Moves the window on by `count` [B] cells, and fills its end with new drafts.

    `tokens` [B, T] and `log_p` [B, T, V] are of the cells from `done` on; those behind
    the first `count` become drafts, drawn from `log_p`.
    """
    last = tokens.shape[1] - 1
    place = count[:, None] + jnp.arange(drafts)[None]  # in the window as it was
    carried = place <= last
    at = jnp.minimum(place, last)
    done = state.done + count
    above = state.above
    if initial == "sample-above":
        b, w, _ = above.shape
        column = (state.done[:, None] + jnp.arange(last + 1)[None]) % w
        column = jnp.where(jnp.arange(last + 1)[None] < count[:, None], column, w)
        above = above.at[jnp.arange(b)[:, None], column].set(log_p, mode="drop")
    state = replace(state, done=done, above=above)
    cells = done[:, None] + jnp.arange(drafts)[None]
    new, new_q = _initial(state, cells, tokens[:, -1:], log_p[:, -1:], initial)
    old = jnp.take_along_axis(tokens, at, axis=1)
    old_q = jnp.take_along_axis(log_p, at[..., None], axis=1)
    return replace(
        state,
        drafts=jnp.where(carried, old, new),
        log_q=jnp.where(carried[..., None], old_q, new_q),
    )


def _initial(
    state: JacobiState,
    cells: jax.Array,
    left: jax.Array,
    left_p: jax.Array,
    initial: Initial,
) -> tuple[jax.Array, jax.Array]:
    """Drafts [B, D] of cells new to the window, and what they were drawn from.

    `left` [B, 1] and `left_p` [B, 1, V] are of the last cell before them.
    """
    (b, d), v = cells.shape, left_p.shape[-1]
    _, h, w = state.decoded.tokens.shape
    if initial == "repeat-left":
        tokens = jnp.broadcast_to(left, (b, d))
        return tokens, one_hot(tokens, v)
    if initial == "repeat-above":
        up = jnp.clip(cells - w, 0, h * w - 1)
        tokens = state.decoded.tokens.reshape(b, -1)[jnp.arange(b)[:, None], up]
        return tokens, one_hot(tokens, v)
    if initial == "sample-left":
        log_q = jnp.broadcast_to(left_p, (b, d, v))
    elif initial == "sample-above":
        log_q = jnp.take_along_axis(state.above, (cells % w)[..., None], axis=1)
    else:
        log_q = jnp.full((b, d, v), -jnp.log(v), left_p.dtype)
    return draw(cell_keys(state.keys, cells, INITIAL), log_q), log_q


def finished(state: JacobiState) -> jax.Array:
    """Which images [B] have all their cells."""
    return state.done >= state.decoded.tokens[0].size
