"""Rows of drafts: a Jacobi window in each of several rows of the grid at once.

Parallel Jacobi decoding (Liao et al. 2026). The topmost row that is not full decodes as
in the Jacobi engine. A row below is open as soon as the row above holds `context` final
tokens, and never gets ahead of it. Its reject is not settled but stays a draft: the
next pass judges it with more of the rows above in view.

A cell sees all final cells before it, and the drafts before it in its own row. Every
final token of the rows in question is in the cache: accepted drafts were fed as such, a
row's newest token is fed in each pass, and so is the last one of the row that was
filled. A row's first cell is drawn before the cell that precedes it in raster order is
final: a stand-in is fed, in a slot that only this input sees. Where rows end with a
newline, that is fed, and all behind it see it; windows have none.

The state is a `JacobiState` whose window has an axis of S segments: `done` [B, S], the
first cell of each that is not final; drafts [B, S, D]; `log_q` [B, S, D, V]. Rows take
turns: a segment whose row is full moves on to the row S below.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec.acceptance import Rule
from jaxspec.decoding import jacobi
from jaxspec.decoding.decoded import Decoded
from jaxspec.decoding.grammar import ImageGrammar
from jaxspec.decoding.jacobi import BONUS, Initial, JacobiState, Refresh
from jaxspec.decoding.target import Target
from jaxspec.decoding.wavefront import stand_in


def start(
    target: Target,
    keys: jax.Array,
    *,
    window: int,
    rows: int,
    initial: Initial,
    upsampled: jax.Array | None = None,
    upsampled_log_q: jax.Array | None = None,
) -> JacobiState:
    """Prefills the target, draws cell 0, and makes the first drafts.

    Args:
      target: the model.
      keys: [B] image keys.
      window: inputs of a row in a pass: a final token and `window - 1` drafts.
      rows: most rows in a pass, S.
      initial: how a cell that enters a window gets its draft; not "sample-left", since
        a row that waits has no distribution at its left.
      upsampled, upsampled_log_q: as for `jacobi.start`.
    """
    state = jacobi.start(
        target,
        keys,
        window=window,
        initial=initial,
        upsampled=upsampled,
        upsampled_log_q=upsampled_log_q,
    )
    first = jnp.arange(rows) * target.grid[1]
    done = jnp.broadcast_to(first.at[0].set(1), (target.batch, rows))
    newest = state.decoded.tokens[:, 0, :1]

    def one(done):
        new = replace(state, done=done)
        new = jacobi.first_drafts(new, state.log_q[:, :1], newest, initial)
        return new.drafts, new.log_q

    drafts, log_q = _each(one)(done)
    return replace(state, done=done, drafts=drafts, log_q=log_q)


def lengths(
    done: jax.Array, grammar: ImageGrammar, window: int, context: int
) -> jax.Array:
    """How many cells of each segment [B, S] a pass judges; 0 for a row that waits."""
    (h, w), (_, free) = grammar.grid, grammar.picture
    row, column = done // w, done % w
    above = jnp.where(_is_top(done, w), free, jnp.roll(column, 1, axis=1))
    is_open = (row < h) & (above >= min(context, free))
    return jnp.where(is_open, jnp.minimum(window, above - column), 0)


def _is_top(done: jax.Array, width: int) -> jax.Array:
    """Whether each segment [B, S] is of the topmost row that is not full."""
    row = done // width
    return row == jnp.min(row, axis=1, keepdims=True)


def step(
    target: Target,
    state: JacobiState,
    *,
    rule: Rule,
    refresh: Refresh,
    initial: Initial,
    context: int,
    codes: jax.Array | None = None,
) -> JacobiState:
    """One pass of the target: at least one more cell of every unfinished image.

    Args:
      target: the model.
      state: from `start` or the step before.
      context: final tokens of the row above that a row waits for.
      rule, refresh, initial, codes: as for `jacobi.step`.
    """
    (b, s, d), w = state.drafts.shape, target.grid[1]
    place = jnp.arange(d + 1)[None, None]
    cells = state.done[..., None] + place
    judged = lengths(state.done, target.grammar, d + 1, context)
    inside = place < judged[..., None]
    log_p, cache = target.follow(state.cache, *_inputs(state, cells, inside))
    log_p = log_p[:, : s * (d + 1)]

    passes = state.decoded.target_passes + jnp.any(judged > 0, axis=1)

    def verified(done, drafts, log_q, log_p, judged):
        old = replace(state, done=done, drafts=drafts, log_q=log_q)
        verdict = jacobi.verify(old, log_p, judged, passes, rule=rule, codes=codes)
        return verdict, jacobi.outcome(old, verdict)

    verdict, (tokens, origin, order) = _each(verified)(
        state.done, state.drafts, state.log_q, log_p.reshape(b, s, d + 1, -1), judged
    )
    settled = _is_top(state.done, w)[..., None] | (origin == BONUS)
    settled = inside & ((order < 0) | ((order == 0) & settled))
    moved = jnp.sum(settled, axis=-1)
    done = state.done + moved
    done += target.grammar.forced(done)
    done += jnp.where((moved > 0) & (done % w == 0), (s - 1) * w, 0)

    flat = lambda x: x.reshape(b, -1)
    decoded = replace(state.decoded, target_passes=passes).check(log_p, flat(inside))
    decoded = decoded.judged(flat(cells[..., :d]), flat(inside[..., :d]))
    decoded = decoded.settle(flat(cells), flat(settled), flat(tokens), flat(origin))
    state = replace(state, cache=cache, decoded=decoded)
    if initial == "sample-above":
        above = jacobi.seen(state.above, flat(cells), flat(settled), log_p)
        state = replace(state, above=above)

    def renewed(drafts, log_q, verdict, before, done, newest):
        new = replace(state, done=done, drafts=drafts, log_q=log_q)
        moved = done - before
        new = jacobi.renew(
            new, verdict, moved, newest, refresh=refresh, initial=initial
        )
        return new.drafts, new.log_q

    newest = _newest(decoded, done)[..., None]
    drafts, log_q = _each(renewed)(
        state.drafts, state.log_q, verdict, state.done, done, newest
    )
    return replace(state, done=done, drafts=drafts, log_q=log_q)


def _each(function):
    """Applies a function of one window to every segment, axis 1."""
    return jax.vmap(function, in_axes=1, out_axes=1)


def _newest(decoded: Decoded, done: jax.Array) -> jax.Array:
    """The tokens [B, S] to feed before cells [B, S], stand-ins where they are none."""
    (b, h, w), rows = decoded.tokens.shape, jnp.arange(done.shape[0])[:, None]
    source = stand_in(decoded.final_pass.reshape(b, -1) < 0, w)
    fed = jnp.clip(done - 1, 0, h * w - 1)
    return decoded.tokens.reshape(b, -1)[rows, source[rows, fed]]


def _inputs(
    state: JacobiState, cells: jax.Array, inside: jax.Array
) -> tuple[jax.Array, ...]:
    """What a pass feeds: tokens, cells, which are written, and what they see.

    Takes the cells [B, S, D + 1] of the segments, and which are judged. Flat, with one
    more at the end if there are several segments, or newlines: the last cell of the row
    above the topmost, if no segment feeds it.
    """
    (b, s, size), (_, h, w) = cells.shape, state.decoded.tokens.shape
    n, raster = h * w, jnp.arange(h * w)[None, None, None]
    fed = jnp.clip(cells - 1, 0, n - 1)
    # The newest token of a row that waits is not in the cache yet either.
    begun = (state.done % w > 0) & (state.done < n)
    write = inside | (begun[..., None] & (jnp.arange(size)[None, None] == 0))
    tokens = jnp.concatenate(
        [_newest(state.decoded, state.done)[..., None], state.drafts], axis=-1
    )
    final = (state.decoded.final_pass >= 0).reshape(b, 1, 1, n)
    own = (raster >= state.done[..., None, None]) | (raster == fed[..., None])
    visible = (final | own) & (raster <= fed[..., None])
    flat = [x.reshape(b, s * size, *x.shape[3:]) for x in (tokens, fed, write, visible)]
    newline = state.decoded.newline is not None
    if s == 1 and not newline:
        return tuple(flat)
    top = jnp.min(state.done, axis=1)
    last = jnp.clip(top // w * w - 1 - newline, 0, n - 1)
    due = (top >= w) & ((top % w > 0) | newline) & (top < n)
    token = state.decoded.tokens.reshape(b, n)[jnp.arange(b), last]
    seen = final[:, 0] & (raster[0] <= last[:, None, None])
    rider = (token[:, None], last[:, None], due[:, None], seen)
    return tuple(
        jnp.concatenate(pair, axis=1) for pair in zip(flat, rider, strict=True)
    )


def finished(state: JacobiState) -> jax.Array:
    """Which images [B] have all their cells."""
    return jnp.all(state.done >= state.decoded.tokens[0].size, axis=1)
