"""The Jacobi engine: a window of drafts, judged together, kept up to the first reject.

One step covers SJD (Teng et al. 2024), SCD (So et al. 2025) and GSD: they differ in the
rule that judges a draft and in how the drafts behind the first reject are renewed. A
step feeds the newest final token and the drafts behind it, which gives the target's
distribution of every cell of the window. Rolling back is not moving the cursor: slots
behind it are written again before they are seen. A newline is a draft that no rule
rejects.

`judge` and `step` decode the grid as one line. `verify`, `outcome` and `renew` are what
becomes of a single window; `rows` has several of them in one pass.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxspec.acceptance import Ratio, Rule, chance, residual, rest_of
from jaxspec.decoding.decoded import ACCEPTED, BONUS, RESAMPLED, Decoded
from jaxspec.decoding.first import draw_first
from jaxspec.decoding.target import Target
from jaxspec.models.cache import Cache
from jaxspec.sampling import (
    ACCEPT,
    DRAW,
    GUMBEL,
    INITIAL,
    cell_keys,
    draw,
    uniform,
)

Refresh = Literal["independent", "maximal", "gumbel"]
Initial = Literal[
    "random", "repeat-left", "repeat-above", "sample-left", "sample-above", "upsampled"
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
      upsampled: int32 [B, N], first drafts of all cells, where they are there before;
        else empty.
      upsampled_log_q: float32 [B, N, V], what those were drawn from; None if nothing
        tells, and they are judged as chosen.
      decoded: the result so far.
    """

    cache: Cache
    keys: jax.Array
    done: jax.Array
    drafts: jax.Array
    log_q: jax.Array
    above: jax.Array
    upsampled: jax.Array
    decoded: Decoded
    upsampled_log_q: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """What a pass found out about a window.

    Attributes:
      log_p: float32 [B, D + 1, V], the target's distribution of each of its cells.
      kept: bool [B, D], which drafts min(1, p/q) keeps, earlier ones or not: those that
        the maximal coupling leaves, whatever the rule.
      accepted: int32 [B], drafts before the first that did not.
      token: int32 [B, 1], what was drawn for the cell behind those.
      judged: int32 [B], how many of the window's cells the pass was about.
    """

    log_p: jax.Array
    kept: jax.Array
    accepted: jax.Array
    token: jax.Array
    judged: jax.Array


def one_hot(tokens: jax.Array, size: int) -> jax.Array:
    """The log-distribution of a token that was chosen."""
    return jnp.where(jax.nn.one_hot(tokens, size, dtype=bool), 0.0, -jnp.inf)


def start(
    target: Target,
    keys: jax.Array,
    *,
    window: int,
    initial: Initial,
    upsampled: jax.Array | None = None,
    upsampled_log_q: jax.Array | None = None,
) -> JacobiState:
    """Prefills the target, draws cell 0, and makes the first drafts.

    Args:
      target: the model.
      keys: [B] image keys.
      window: inputs of a pass: the newest final token and `window - 1` drafts.
      initial: how a cell that enters the window gets its draft.
      upsampled: int32 [B, H, W], that draft, if `initial` is "upsampled".
      upsampled_log_q: float32 [B, N, V], what it was drawn from, if that is known: of
        each cell given only drafts that come before it in raster order.
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
        upsampled=none[:, :0] if upsampled is None else upsampled.reshape(b, -1),
        decoded=decoded,
        upsampled_log_q=upsampled_log_q,
    )
    return first_drafts(state, log_p, token, initial)


def first_drafts(
    state: JacobiState, left: jax.Array, newest: jax.Array, initial: Initial
) -> JacobiState:
    """A window of new drafts.

    Args:
      state: of which the drafts do not matter.
      left: float32 [B, 1, V], the distribution of the cell before the window.
      newest: int32 [B, 1], its token.
      initial: as for `start`.
    """
    if not state.drafts.size:
        return state
    entering = jnp.ones(state.drafts.shape, bool)
    log_q = _source(state, state.log_q, entering, left, initial)
    drawn = draw(cell_keys(state.keys, _cells(state), INITIAL), log_q)
    drafts, log_q = _enter(state, drawn, log_q, entering, newest, initial)
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
    raster = jnp.arange(n)[None]
    cells = state.done[:, None] + jnp.arange(d + 1)[None]  # the window's
    inside = cells < target.grammar.end
    fed = jnp.minimum(cells - 1, n - 1)
    newest = jnp.take_along_axis(state.decoded.tokens.reshape(b, n), fed[:, :1], 1)
    tokens = jnp.concatenate([newest, state.drafts], axis=1)
    visible = raster[None] <= fed[..., None]
    log_p, cache = target.follow(state.cache, tokens, fed, inside, visible)

    active = inside[:, 0]
    passes = state.decoded.target_passes + active
    judged = jnp.sum(inside, axis=1)
    verdict = verify(state, log_p, judged, passes, rule=rule, codes=codes)
    tokens, origin, order = outcome(state, verdict)
    decoded = replace(state.decoded, target_passes=passes).check(log_p, inside)
    decoded = decoded.judged(cells[:, :d], inside[:, :d])
    decoded = decoded.settle(cells, inside & (order <= 0), tokens, origin)
    done = state.done + verdict.accepted + active
    return replace(state, cache=cache, done=done, decoded=decoded), verdict


def verify(
    state: JacobiState,
    log_p: jax.Array,
    judged: jax.Array,
    passes: jax.Array,
    *,
    rule: Rule,
    codes: jax.Array | None = None,
) -> Verdict:
    """Tests drafts, and draws for the cell behind those before the first reject.

    Args:
      state: of which the window matters: keys, `done`, drafts and `log_q`.
      log_p: float32 [B, D + 1, V], the target's distribution of the window's cells.
      judged: int32 [B], how many of these count.
      passes: int32 [B], the number of this pass.
      rule, codes: as for `judge`.
    """
    d = state.drafts.shape[1]
    place = jnp.arange(d)[None]
    cells = state.done[:, None] + place
    given = log_p[:, :d], state.log_q, state.drafts, codes
    likely = chance(rule, *given, jnp.broadcast_to(place, state.drafts.shape))
    coins = uniform(cell_keys(state.keys, cells, ACCEPT, passes[:, None]))
    inside = place < judged[:, None]
    passed = ((coins < likely) | state.decoded.grammar.forced(cells)) & inside
    accepted = jnp.sum(jnp.cumprod(passed, axis=1), axis=1)
    coupled = Ratio()(log_p[:, :d], state.log_q, state.drafts)
    kept = (coins < coupled) & inside

    behind = accepted[:, None]
    source = _pick(log_p, behind)
    if d:
        log_q = _pick(state.log_q, jnp.minimum(behind, d - 1))
        rest = rest_of(rule, source, log_q, behind)
        source = jnp.where((behind < d)[..., None], rest, source)
    cell = state.done[:, None] + behind
    token = draw(cell_keys(state.keys, cell, DRAW, passes[:, None]), source)
    return Verdict(log_p, kept, accepted, token, judged)


def outcome(
    state: JacobiState, verdict: Verdict
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens and origins [B, D + 1] of a judged window's cells, and their order.

    Order 0 is the cell that was drawn; those before it were accepted.
    """
    d = state.drafts.shape[1]
    behind = verdict.accepted[:, None]
    order = jnp.arange(d + 1)[None] - behind
    drafts = jnp.pad(state.drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(order < 0, drafts, verdict.token)
    origin = jnp.where(behind < d, RESAMPLED, BONUS)
    return tokens, jnp.where(order < 0, ACCEPTED, origin), order


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
    if initial == "sample-above":
        place = jnp.arange(verdict.log_p.shape[1])[None]
        accepted, w = verdict.accepted[:, None], state.above.shape[1]
        newest = (place <= accepted) & (place > accepted - w)  # of its column
        cells = old.done[:, None] + place
        state = replace(state, above=seen(state.above, cells, newest, verdict.log_p))
    moved = state.done - old.done
    return renew(state, verdict, moved, verdict.token, refresh=refresh, initial=initial)


def renew(
    state: JacobiState,
    verdict: Verdict,
    moved: jax.Array,
    newest: jax.Array,
    *,
    refresh: Refresh,
    initial: Initial,
) -> JacobiState:
    """New drafts, where the window has moved to.

    A draft that was judged is renewed from the new distribution. If the first reject
    was not settled, what was drawn in its place is its new draft: with what was kept,
    it is distributed as p, which drawing once more would not be. Others are new.

    Args:
      state: with `done` moved, and the drafts that were judged.
      verdict: on these.
      moved: int32 [B], by how many cells.
      newest: int32 [B, 1], the token before the window.
      refresh, initial: as for `step`.
    """
    d = state.drafts.shape[1]
    if not d:
        return state
    place = moved[:, None] + jnp.arange(d)[None]  # in the window that was judged
    entering = place >= verdict.judged[:, None]
    before = jnp.minimum(place, d - 1)
    log_p = _pick(verdict.log_p, jnp.minimum(place, d))
    last = verdict.judged[:, None] - 1
    # A newline says nothing of what follows it.
    last -= state.decoded.grammar.forced((state.done - moved)[:, None] + last)
    left = _pick(verdict.log_p, jnp.maximum(last, 0))
    log_q = _source(state, log_p, entering, left, initial)
    passes = state.decoded.target_passes[:, None]
    if refresh == "gumbel":
        drawn = draw(cell_keys(state.keys, _cells(state), GUMBEL), log_q)
    elif refresh == "independent":
        drawn = draw(cell_keys(state.keys, _cells(state), DRAW, passes), log_q)
    else:  # the coupling that keeps a draft as often as can be
        drafted = place < d
        kept = drafted & jnp.take_along_axis(verdict.kept, before, axis=1)
        rest = residual(log_p, _pick(state.log_q, before))
        rest = jnp.where(drafted[..., None], rest, log_q)
        drawn = draw(cell_keys(state.keys, _cells(state), DRAW, passes), rest)
        drawn = jnp.where(kept, jnp.take_along_axis(state.drafts, before, 1), drawn)
    postponed = (place == verdict.accepted[:, None]) & ~entering
    drawn = jnp.where(postponed, verdict.token, drawn)
    drafts, log_q = _enter(state, drawn, log_q, entering, newest, initial)
    return replace(state, drafts=drafts, log_q=log_q)


def seen(
    above: jax.Array, cells: jax.Array, newest: jax.Array, log_p: jax.Array
) -> jax.Array:
    """`above`, with the distributions [B, T, V] of cells [B, T] where `newest`."""
    b, w, _ = above.shape
    column = jnp.where(newest, cells % w, w)
    return above.at[jnp.arange(b)[:, None], column].set(log_p, mode="drop")


def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows [B, T, V] of x [B, D, V] at index [B, T]."""
    return jnp.take_along_axis(x, index[..., None], axis=1)


def _cells(state: JacobiState) -> jax.Array:
    """The cells [B, D] that the drafts are for; those past the grid do not matter."""
    return state.done[:, None] + jnp.arange(state.drafts.shape[1])[None]


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

    `newest` [B, 1] is the last final token. Newlines are what they are.
    """
    cells, grammar, v = _cells(state), state.decoded.grammar, log_q.shape[-1]
    if initial not in ("sample-left", "sample-above"):
        new = _chosen(state, drafts, entering, newest, initial, grammar.codes(v))
        new = jnp.broadcast_to(new, drafts.shape)
        even = jnp.where(jnp.arange(v) < grammar.codes(v), 0.0, -jnp.inf)
        even = jnp.broadcast_to(even - jnp.log(grammar.codes(v)), log_q.shape)
        new_q = even if initial == "random" else one_hot(new, v)
        if state.upsampled_log_q is not None:
            last = state.upsampled_log_q.shape[1] - 1
            new_q = _pick(state.upsampled_log_q, jnp.minimum(cells, last))
        drafts = jnp.where(entering, new, drafts)
        log_q = jnp.where(entering[..., None], new_q, log_q)
    if grammar.newline is not None:
        forced = grammar.forced(cells)
        drafts = jnp.where(forced, grammar.newline, drafts)
        log_q = jnp.where(forced[..., None], one_hot(drafts, v), log_q)
    return drafts, log_q


def _chosen(
    state: JacobiState,
    drafts: jax.Array,
    entering: jax.Array,
    newest: jax.Array,
    initial: Initial,
    codes: int,
) -> jax.Array:
    """First drafts, [B, D] or the same for all [B, 1], that no model draws."""
    cells, n = _cells(state), state.decoded.tokens[0].size

    def above(cells):
        up = jnp.clip(cells - state.decoded.tokens.shape[2], 0, n - 1)
        return jnp.take_along_axis(state.decoded.tokens.reshape(-1, n), up, axis=1)

    if initial == "repeat-left":
        tokens = jnp.concatenate([newest, drafts], axis=1)
        last = jnp.sum(~entering, axis=1, keepdims=True)
        left, first = jnp.take_along_axis(tokens, last, axis=1), cells[:, :1] + last
        return jnp.where(state.decoded.grammar.forced(first - 1), above(first), left)
    if initial == "repeat-above":
        return above(cells)
    if initial == "upsampled":
        return jnp.take_along_axis(state.upsampled, jnp.minimum(cells, n - 1), axis=1)
    keys = cell_keys(state.keys, cells, INITIAL)
    return jax.vmap(jax.vmap(lambda k: jax.random.randint(k, (), 0, codes)))(keys)


def finished(state: JacobiState) -> jax.Array:
    """Which images [B] have all their cells."""
    return state.done >= state.decoded.grammar.end
