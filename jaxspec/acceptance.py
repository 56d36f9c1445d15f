"""Acceptance rules: how likely a draft is kept, given where it came from.

A rule is a pure function `rule(log_p, log_q, drafts, codes)`: the probability [B, T] of
keeping each draft. Those here are frozen dataclasses that are called.

    log_p   [B, T, V]  log-probabilities of the target at the draft's cell, as sampled
                       from (after guidance, temperature, top-k, top-p)
    log_q   [B, T, V]  those that the draft was drawn from: a density, or 0 at the
                       draft and -inf elsewhere where it was chosen without chance
    drafts  [B, T]     int32
    codes   [V, d]     the codes' vectors, for rules that ask what looks alike, or None

A rule that asks `by_place`, an attribute that is true, gets `place` [B, T] too: how
many drafts stand between each and the newest final token.

A rejected draft is replaced from `residual(log_p, log_q)`, or from the rule's own
`residual(log_p, log_q, place)` where it has one. With `Ratio` the result is distributed
as the target (Leviathan et al. 2023, theorem 1); other rules are biased.

A rule is compiled in: another one is another program. Rules that are equal share it, so
one is defined once, with `def` or as a frozen dataclass, outside of loops.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

# (log_p, log_q, drafts, codes) -> chance, as above; hashable.
Rule = Callable[..., jax.Array]


def chance(
    rule: Rule,
    log_p: jax.Array,
    log_q: jax.Array,
    drafts: jax.Array,
    codes: jax.Array | None,
    place: jax.Array,
) -> jax.Array:
    """How likely a rule keeps each draft [B, T]; `place` is for rules that ask."""
    if getattr(rule, "by_place", False):
        return rule(log_p, log_q, drafts, codes, place)
    return rule(log_p, log_q, drafts, codes)


def rest_of(
    rule: Rule, log_p: jax.Array, log_q: jax.Array, place: jax.Array
) -> jax.Array:
    """What a rejected draft is replaced from, log-probabilities [B, T, V]."""
    own = getattr(rule, "residual", None)
    return own(log_p, log_q, place) if own else residual(log_p, log_q)


def check_rule(rule: Rule) -> None:
    """Refuses what is no rule, or one that would be compiled again and again.

    Raises:
      ValueError: it is no function, or a lambda, or it cannot be hashed.
    """
    if isinstance(rule, type) or not callable(rule):
        raise ValueError(f"rule must be a function or a rule such as Ratio(): {rule!r}")
    if getattr(rule, "__name__", "") == "<lambda>":
        raise ValueError(
            "rule must have a name: a lambda is a new rule each time that Python reads "
            "it, and is compiled each time; define it once with def, outside of loops"
        )
    if not isinstance(rule, Hashable):
        raise ValueError(
            f"rule must be hashable, since it is compiled in: make {type(rule)} a "
            "frozen dataclass"
        )


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


def _not_negative(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more, not {value}")


@dataclass(frozen=True)
class Ratio:
    """Keep with min(1, p/q): exact."""

    def __call__(self, log_p, log_q, drafts, codes=None):
        return jnp.minimum(1.0, _ratio(at(log_p, drafts), at(log_q, drafts)))


@dataclass(frozen=True)
class Amplified:
    """Keep with min(1, k p/q): the naive relaxation of GSD's table 1.

    The paper names it "Amplify (k)" and shows no code; this is the natural reading.
    """

    k: float

    def __post_init__(self):
        _not_negative(k=self.k)

    def __call__(self, log_p, log_q, drafts, codes=None):
        ratio = _ratio(at(log_p, drafts), at(log_q, drafts))
        return jnp.minimum(1.0, self.k * ratio)


@dataclass(frozen=True)
class Added:
    """Keep with min(1, p/q + c): GSD's "Addition (c)", in the natural reading."""

    c: float

    def __post_init__(self):
        _not_negative(c=self.c)

    def __call__(self, log_p, log_q, drafts, codes=None):
        ratio = _ratio(at(log_p, drafts), at(log_q, drafts))
        return jnp.minimum(1.0, ratio + self.c)


@dataclass(frozen=True)
class Cooled:
    """Keep with min(1, w p/q), w falling along the drafts (Cool-SD, 2601.09212).

    w of the i-th draft, from 0, is `delta exp(-nu i - mu)`. A reject is replaced from
    the residual that keeps the error least: the positive part of p - min(q, w p).
    """

    by_place: ClassVar[bool] = True
    delta: float = 1.1
    nu: float = 0.7
    mu: float = 0.0

    def __post_init__(self):
        _not_negative(delta=self.delta)

    def weight(self, place):
        return self.delta * jnp.exp(-self.nu * place - self.mu)

    def __call__(self, log_p, log_q, drafts, codes, place):
        ratio = _ratio(at(log_p, drafts), at(log_q, drafts))
        return jnp.minimum(1.0, self.weight(place) * ratio)

    def residual(self, log_p, log_q, place):
        weighted = log_p + jnp.log(self.weight(place))[..., None]
        return residual(log_p, jnp.minimum(log_q, weighted))


Ranking = Literal["target", "draft", "distance"]


@dataclass(frozen=True)
class Grouped:
    """Keep with min(1, p(C)/q(C)) of a group C around the draft (So et al. 2025, GSD).

    C holds the draft, and the codes at the `below` next lower and `above` next higher
    ranks of p, if their probability differs by less than `max_difference` and their
    vector by less than `max_distance` (squared L2). Ranks are clipped at the ends.
    `ranking` makes them ranks of q instead, or takes the `below + above` nearest codes.
    """

    below: int
    above: int
    max_difference: float
    max_distance: float
    ranking: Ranking = "target"

    def __post_init__(self):
        _not_negative(
            below=self.below,
            above=self.above,
            max_difference=self.max_difference,
            max_distance=self.max_distance,
        )
        if self.ranking not in get_args(Ranking):
            known = ", ".join(get_args(Ranking))
            raise ValueError(f"ranking must be one of {known}, not {self.ranking!r}")

    def __call__(self, log_p, log_q, drafts, codes=None):
        others = self._others(log_p, log_q, drafts, codes)
        group = jnp.concatenate([others, drafts[..., None]], axis=-1)
        p = jnp.exp(at(log_p, group))
        kept = jnp.abs(p - p[..., -1:]) < self.max_difference
        if codes is not None:
            gap = codes[group] - codes[drafts][..., None, :]
            kept &= jnp.sum(gap * gap, axis=-1) < self.max_distance
        # Fewer codes than ranks: the same one is not counted twice.
        own = jnp.ones_like(kept[..., -1:])
        kept &= jnp.concatenate([others != drafts[..., None], own], axis=-1)
        q = jnp.exp(at(log_q, group))
        mass_p = jnp.sum(jnp.where(kept, p, 0), axis=-1)
        mass_q = jnp.sum(jnp.where(kept, q, 0), axis=-1)
        return jnp.where(mass_p > 0, jnp.minimum(1.0, mass_p / mass_q), 0.0)

    def _others(self, log_p, log_q, drafts, codes):
        """The codes [B, T, below + above] ranked next to the drafts."""
        ids, draft = jnp.arange(log_p.shape[-1])[None, None], drafts[..., None]
        if self.ranking == "distance":
            square = jnp.sum(codes * codes, axis=-1)
            near = 2 * codes[drafts] @ codes.T - square[None, None]
            return _highest(ids != draft, near, self.below + self.above, draft)
        log = log_p if self.ranking == "target" else log_q
        own = at(log, draft)
        # Ties rank by code: a total order, so that no code is on both sides.
        higher = (log > own) | ((log == own) & (ids > draft))
        below = _highest(~higher & (ids != draft), log, self.below, draft)
        above = _highest(higher, -log, self.above, draft)
        return jnp.concatenate([below, above], axis=-1)


def _highest(allowed, score, count, otherwise):
    """The `count` allowed codes of highest score, `otherwise` where there are too few.

    Takes [B, T, V] and returns [B, T, count].
    """
    if count == 0:
        return otherwise[..., :0]
    # A code that cannot be drawn has a rank too.
    score = jnp.maximum(score, jnp.finfo(score.dtype).min)
    score = jnp.where(allowed, score, -jnp.inf)
    value, index = jax.lax.top_k(score, min(count, score.shape[-1]))
    return jnp.where(jnp.isneginf(value), otherwise, index)
