"""Acceptance rules: how likely a draft is kept, given where it came from.

A rule is a frozen dataclass (static, hashable) with one pure function,
`accept(log_p, log_q, drafts, codes)`: the probability [B, T] of keeping each draft.

    log_p   [B, T, V]  log-probabilities of the target at the draft's cell, as sampled
                       from (after guidance, temperature, top-k, top-p)
    log_q   [B, T, V]  those that the draft was drawn from: a density, or 0 at the
                       draft and -inf elsewhere where it was chosen without chance
    drafts  [B, T]     int32
    codes   [V, d]     the codes' vectors, for rules that ask what looks alike, or None

A rejected draft is replaced from `residual(log_p, log_q)`. With `Ratio` the result is
distributed as the target (Leviathan et al. 2023, theorem 1); other rules are biased.
"""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


class Rule(Protocol):
    """Anything with this function; hashable, since it is compiled in."""

    def accept(
        self,
        log_p: jax.Array,
        log_q: jax.Array,
        drafts: jax.Array,
        codes: jax.Array | None = None,
    ) -> jax.Array: ...


def at(log_p: jax.Array, tokens: jax.Array) -> jax.Array:
    """log_p [B, T, V] at tokens [B, T] or [B, T, k]."""
    index = tokens if tokens.ndim == log_p.ndim else tokens[..., None]
    out = jnp.take_along_axis(log_p, index, axis=-1)
    return out if tokens.ndim == log_p.ndim else out[..., 0]


def residual(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Log of the normalised positive part of p - q; p itself where that is nothing."""
    rest = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0)
    total = jnp.sum(rest, axis=-1, keepdims=True)
    # Only rounding leaves nothing where a draft can be rejected.
    return jnp.where(total > 0, jnp.log(rest) - jnp.log(total), log_p)


def _ratio(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """The ratio p / q of log-probabilities; 0 where p is 0, whatever q."""
    return jnp.where(jnp.isneginf(log_p), 0.0, jnp.exp(log_p - log_q))


@dataclass(frozen=True)
class Ratio:
    """Keep with min(1, p/q): exact."""

    def accept(self, log_p, log_q, drafts, codes=None):
        return jnp.minimum(1.0, _ratio(at(log_p, drafts), at(log_q, drafts)))


@dataclass(frozen=True)
class Amplified:
    """Keep with min(1, factor p/q): the naive relaxation of GSD's table 1.

    The paper names it "Amplify (k)" and shows no code; this is the natural reading.
    """

    factor: float

    def accept(self, log_p, log_q, drafts, codes=None):
        ratio = _ratio(at(log_p, drafts), at(log_q, drafts))
        return jnp.minimum(1.0, self.factor * ratio)


@dataclass(frozen=True)
class Added:
    """Keep with min(1, p/q + amount): GSD's "Addition (c)", in the natural reading."""

    amount: float

    def accept(self, log_p, log_q, drafts, codes=None):
        ratio = _ratio(at(log_p, drafts), at(log_q, drafts))
        return jnp.minimum(1.0, ratio + self.amount)


@dataclass(frozen=True)
class Grouped:
    """Keep with min(1, p(C)/q(C)) of a group C around the draft (So et al. 2025, GSD).

    C holds the draft, and the codes at the `below` next lower and `above` next higher
    ranks of p, if their probability differs by less than `max_difference` and their
    vector by less than `max_distance` (squared L2). Ranks are clipped at the ends.
    """

    below: int
    above: int
    max_difference: float
    max_distance: float

    def accept(self, log_p, log_q, drafts, codes=None):
        group = jnp.concatenate(
            [self._ranked(log_p, drafts), drafts[..., None]], axis=-1
        )
        p = jnp.exp(at(log_p, group))
        own = p[..., -1:]
        kept = jnp.abs(p - own) < self.max_difference
        if codes is not None:
            gap = codes[group] - codes[drafts][..., None, :]
            kept &= jnp.sum(gap * gap, axis=-1) < self.max_distance
        # Fewer codes than ranks: the same one is not counted twice.
        kept &= jnp.concatenate(
            [group[..., :-1] != drafts[..., None], jnp.ones_like(kept[..., -1:])], -1
        )
        q = jnp.exp(at(log_q, group))
        mass_p = jnp.sum(jnp.where(kept, p, 0), axis=-1)
        mass_q = jnp.sum(jnp.where(kept, q, 0), axis=-1)
        return jnp.where(mass_p > 0, jnp.minimum(1.0, mass_p / mass_q), 0.0)

    def _ranked(self, log_p, drafts):
        """The codes [B, T, below + above] ranked next to the drafts."""
        ids = jnp.arange(log_p.shape[-1])[None, None]
        own = at(log_p, drafts)[..., None]
        # Ties rank by code: a total order, so that no code is on both sides.
        higher = (log_p > own) | ((log_p == own) & (ids > drafts[..., None]))
        lower = ~higher & (ids != drafts[..., None])
        draft = drafts[..., None]

        def nearest(side, score, count):
            if count == 0:
                return jnp.zeros((*drafts.shape, 0), jnp.int32)
            score = jnp.where(side, score, -jnp.inf)
            value, index = jax.lax.top_k(score, min(count, log_p.shape[-1]))
            return jnp.where(jnp.isneginf(value), draft, index)

        return jnp.concatenate(
            [
                nearest(lower, log_p, self.below),
                nearest(higher, -log_p, self.above),
            ],
            axis=-1,
        )
