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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """What a pass found out about a window.

    Attributes:
      log_p: float32 [B, D + 1, V], the target's distribution of each of its cells.
      kept: bool [B, D], which drafts passed their test, earlier ones or not.
      accepted: int32 [B], drafts before the first that did not.
      token: int32 [B, 1], what was drawn for the cell behind those.
    """

    log_p: jax.Array
    kept: jax.Array
    accepted: jax.Array
    token: jax.Array


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
    none = jnp.zeros((b, window - 1), jnp.int32)
    state = JacobiState(
        cache=cache,
        keys=keys,
        done=jnp.ones(b, jnp.int32),
        drafts=none,
        log_q=jnp.zeros((*none.shape, log_p.shape[-1]), log_p.dtype),
        above=jnp.repeat(log_p, w if initial == "sample-above" else 0, axis=1),
        decoded=decoded,
    )
    if not none.size:
        return state
    entering = none == 0
    log_q = _source(state, state.log_q, entering, log_p, initial)
    drawn = draw(cell_keys(keys, _cells(state), INITIAL), log_q)
    drafts, log_q = _enter(state, drawn, log_q, entering, token, initial)
    return replace(state, drafts=drafts, log_q=log_q)


def judge(
    target: Target,
    state: JacobiState,
    *,
    rule: Rule,
    codes: jax.Array | None = None,
) -> tuple[JacobiState, Verdict]:
    """One pass of the target over the window: settles cells up to the first reject.

    One cell is drawn behind the accepted drafts, in place of the reject or for free.
    The window then begins behind it; the drafts in the state are still the old ones.

    Args:
      target: the model.
      state: with drafts for the cells from `done` on.
      rule: judges drafts (see `jaxspec.acceptance`).
      codes: the codes' vectors, for the rule.
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
    chance = rule(log_p[:, :d], state.log_q, state.drafts, codes)
    keys = cell_keys(state.keys, cells[:, :d], ACCEPT, passes[:, None])
    kept = (jax.vmap(jax.vmap(jax.random.uniform))(keys) < chance) & inside[:, :d]
    accepted = jnp.sum(jnp.cumprod(kept, axis=1), axis=1)

    behind = accepted[:, None]
    source = _pick(log_p, behind)
    if d:
        log_q = _pick(state.log_q, jnp.minimum(behind, d - 1))
        own = getattr(rule, "residual", None)
        rest = own(source, log_q, behind) if own else residual(source, log_q)
        source = jnp.where((behind < d)[..., None], rest, source)
    cell = state.done[:, None] + behind
    token = draw(cell_keys(state.keys, cell, DRAW, passes[:, None]), source)

    order = jnp.arange(d + 1)[None] - behind  # 0 is the first reject
    tokens = jnp.where(order < 0, jnp.pad(state.drafts, ((0, 0), (0, 1))), token)
    origin = jnp.where(behind < d, RESAMPLED, BONUS)
    origin = jnp.where(order < 0, ACCEPTED, origin)
    decoded = replace(
        state.decoded,
        target_passes=passes,
        drafted=state.decoded.drafted + jnp.sum(inside[:, :d], axis=1),
    ).check(log_p, inside)
    decoded = decoded.settle(cells, inside & (order <= 0), tokens, origin)
    done = state.done + accepted + active
    state = replace(state, cache=cache, done=done, decoded=decoded)
    return state, Verdict(log_p, kept, accepted, token)


def step(
    target: Target,
    state: JacobiState,
    *,
    rule: Rule,
    refresh: Refresh,
    initial: Initial,
    codes: jax.Array | None = None,
) -> JacobiState:
    """One pass of the target: at least one more cell of every unfinished image.

    Args:
      target: the model.
      state: from `start` or the step before.
      rule: judges drafts.
      refresh: what becomes of drafts behind the first reject: drawn anew from the new
        distribution p ("independent"), kept with min(1, p/q) and else drawn from the
        residual ("maximal"), or drawn with noise that belongs to the cell ("gumbel").
      initial: as for `start`.
      codes: as for `judge`.
    """
    old = state
    state, verdict = judge(target, state, rule=rule, codes=codes)
    d = state.drafts.shape[1]
    if not d:
        return state
    if initial == "sample-above":
        state = replace(state, above=_seen(old, verdict))
    place = (state.done - old.done)[:, None] + jnp.arange(d)[None]  # in the old window
    entering, before = place > d, jnp.minimum(place, d - 1)
    log_p = _pick(verdict.log_p, jnp.minimum(place, d))
    log_q = _source(state, log_p, entering, verdict.log_p[:, -1:], initial)
    passes = state.decoded.target_passes[:, None]
    if refresh == "gumbel":
        drawn = draw(cell_keys(state.keys, _cells(state), GUMBEL), log_q)
    elif refresh == "independent":
        drawn = draw(cell_keys(state.keys, _cells(state), DRAW, passes), log_q)
    else:  # the same test and residual behind the first reject as at it
        drafted = place < d
        kept = drafted & jnp.take_along_axis(verdict.kept, before, axis=1)
        rest = residual(log_p, _pick(old.log_q, before))
        rest = jnp.where(drafted[..., None], rest, log_q)
        drawn = draw(cell_keys(state.keys, _cells(state), DRAW, passes), rest)
        drawn = jnp.where(kept, jnp.take_along_axis(old.drafts, before, 1), drawn)
    drafts, log_q = _enter(state, drawn, log_q, entering, verdict.token, initial)
    return replace(state, drafts=drafts, log_q=log_q)


def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows [B, T, V] of x [B, D, V] at index [B, T]."""
    return jnp.take_along_axis(x, index[..., None], axis=1)


def _cells(state: JacobiState) -> jax.Array:
    """The cells [B, D] that the drafts are for; those past the grid do not matter."""
    return state.done[:, None] + jnp.arange(state.drafts.shape[1])[None]


def _seen(old: JacobiState, verdict: Verdict) -> jax.Array:
    """`above`, with the distributions of the cells that became final."""
    (b, w, _), size = old.above.shape, verdict.log_p.shape[1]
    offset = jnp.arange(size)[None]
    column = (old.done[:, None] + offset) % w
    column = jnp.where(offset <= verdict.accepted[:, None], column, w)
    rows = jnp.arange(b)[:, None]
    return old.above.at[rows, column].set(verdict.log_p, mode="drop")


def _source(
    state: JacobiState,
    log_p: jax.Array,
    entering: jax.Array,
    left: jax.Array,
    initial: Initial,
) -> jax.Array:
    """What each draft [B, D, V] is drawn from: `log_p`, if it was in the window before.

    `left` [B, 1, V] is the distribution of the last cell that was.
    """
    if initial == "sample-left":
        return jnp.where(entering[..., None], left, log_p)
    if initial == "sample-above":
        column = _cells(state) % state.above.shape[1]
        return jnp.where(entering[..., None], _pick(state.above, column), log_p)
    return log_p


def _enter(
    state: JacobiState,
    drafts: jax.Array,
    log_q: jax.Array,
    entering: jax.Array,
    newest: jax.Array,
    initial: Initial,
) -> tuple[jax.Array, jax.Array]:
    """Drafts and what they came from, where entering ones are not drawn by the model.

    `newest` [B, 1] is the last final token.
    """
    v, (_, h, w) = log_q.shape[-1], state.decoded.tokens.shape
    if initial == "repeat-left":
        tokens = jnp.concatenate([newest, drafts], axis=1)
        last = jnp.sum(~entering, axis=1, keepdims=True)
        new = jnp.take_along_axis(tokens, last, axis=1)
    elif initial == "repeat-above":
        up = jnp.clip(_cells(state) - w, 0, h * w - 1)
        new = jnp.take_along_axis(state.decoded.tokens.reshape(-1, h * w), up, axis=1)
    elif initial == "random":
        keys = cell_keys(state.keys, _cells(state), INITIAL)
        new = jax.vmap(jax.vmap(lambda k: jax.random.randint(k, (), 0, v)))(keys)
    else:
        return drafts, log_q
    new = jnp.broadcast_to(new, drafts.shape)
    even = jnp.full_like(log_q, -jnp.log(v))
    new_q = even if initial == "random" else one_hot(new, v)
    drafts = jnp.where(entering, new, drafts)
    return drafts, jnp.where(entering[..., None], new_q, log_q)


def finished(state: JacobiState) -> jax.Array:
    """Which images [B] have all their cells."""
    return state.done >= state.decoded.tokens[0].size
