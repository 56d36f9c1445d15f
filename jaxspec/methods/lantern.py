"""LANTERN and LANTERN++: trees of drafts, judged by the mass of what looks alike."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from jaxspec.acceptance import Ratio, Rule, at, residual
from jaxspec.decoding import Target, method_class, tree
from jaxspec.decoding.shapes import Dynamic, Static
from jaxspec.methods.eagle import EAGLE_TREE, Treed, check_counts
from jaxspec.models.drafter import Eagle
from jaxspec.neighbours import check_table, nearest_codes, neighbour_table
from jaxspec.sampling import Sampling
from jaxspec.sizes import Size

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline

Residual = Literal["plain", "pooled", "optimal", "released", "released-static"]


@dataclass(frozen=True)
class Pooled:
    """Keep x with min(1, p~(x) / q(x)), p~(x) being p of x and of codes near to it.

    Of the `neighbours` nearest codes, from the nearest on, those are pooled whose sum
    is at most `delta` (LANTERN, section 4.2), or with `times` at most (times - 1) p(x)
    (LANTERN++). What the rule gets as codes is int32 [V, neighbours or more], the
    nearest others of each code.

    Attributes:
      neighbours, delta, times: as above.
      residual: what a reject leaves of p. "plain" is norm([p - q]+), "pooled" the same
        without the pooled codes, "optimal" norm([p - min(q, p~)]+) as in Cool-SD (arXiv
        2601.09212). If any code was pooled, "released" is plain without the neighbours
        and one more, all codes alike if that is nothing, and "released-static" plain
        with a q that has none of these.
    """

    neighbours: int
    delta: float = 0.0
    times: float | None = None
    residual: Residual = "plain"

    def __call__(self, log_p, log_q, drafts, codes):
        mass, _ = self.pool(log_p, drafts, codes)
        return jnp.minimum(1.0, mass / jnp.exp(at(log_q, drafts)))

    def pool(self, log_p, drafts, codes):
        """The mass p~ of drafts [B, T], and which neighbours [B, T, k] are pooled."""
        own = jnp.exp(at(log_p, drafts))
        near = jnp.exp(at(log_p, codes[drafts][..., : self.neighbours]))
        most = self.delta if self.times is None else (self.times - 1) * own[..., None]
        within = jnp.cumsum(near, axis=-1) <= most
        return own + jnp.sum(jnp.where(within, near, 0), axis=-1), within

    def rejected(self, log_p, log_q, drafts, codes):
        """What a reject of drafts [B, 1] leaves of p [B, 1, V]."""
        if self.residual in ("plain", "optimal"):
            # p~ is p or more: where q is above it, both are nothing.
            return residual(log_p, log_q)
        _, within = self.pool(log_p, drafts, codes)
        if self.residual == "pooled":
            near = codes[drafts][..., : self.neighbours]
            gone = _marked(near, within, log_p.shape[-1])
            return residual(jnp.where(gone, -jnp.inf, log_p), log_q)
        near = codes[drafts][..., : self.neighbours + 1]
        some = jnp.any(within, axis=-1, keepdims=True)
        gone = _marked(near, jnp.broadcast_to(some, near.shape), log_p.shape[-1])
        if self.residual == "released-static":
            return residual(log_p, jnp.where(gone, -jnp.inf, log_q))
        left = jnp.where(gone, -jnp.inf, residual(log_p, log_q))
        left = jnp.where(jnp.any(left > -jnp.inf, axis=-1, keepdims=True), left, 0.0)
        return jax.nn.log_softmax(left, axis=-1)


@dataclass(frozen=True)
class Likeliest:
    """The greedy mode: like x where nothing is likelier than it is with its neighbours.

    Attributes:
      rule: says which are pooled with it.
    """

    rule: Pooled

    def likes(self, log_p, drafts, codes):
        mass, _ = self.rule.pool(log_p, drafts, codes)
        own = jax.nn.one_hot(drafts, log_p.shape[-1], dtype=bool)
        return mass >= jnp.exp(jnp.max(jnp.where(own, -jnp.inf, log_p), axis=-1))


def _marked(codes: jax.Array, chosen: jax.Array, size: int) -> jax.Array:
    """Which of all codes [B, 1, V] are among codes [B, 1, k], where chosen."""
    none = jnp.zeros((len(codes), size), bool)
    index = jnp.where(chosen, codes, size)[:, 0]
    rows = jnp.arange(len(codes))[:, None]
    return none.at[rows, index].set(True, mode="drop")[:, None]


def others(target: Target, table: jax.Array | None, count: int) -> jax.Array:
    """The `count` nearest others of each code, of a table or of the target's codes.

    Raises:
      ValueError: there is neither, or the table has another shape.
    """
    codes = target.model.config.vocab_size
    if table is not None:
        return given(table, codes, count)
    if target.codes is None:
        raise ValueError(
            "LANTERN pools the nearest codes, and the target has no codes: create it "
            "with codes=..., or give a table"
        )
    return nearest_codes(target.codes, min(count, codes - 1) + 1)[:, 1:]


def given(table: jax.Array, codes: int, count: int) -> jax.Array:
    """The first `count` columns of a table, or as many as there are other codes.

    Raises:
      ValueError: it has another shape.
    """
    count = min(count, codes - 1)
    if table.ndim != 2 or len(table) != codes or table.shape[1] < count:
        raise ValueError(
            f"table must be [{codes}, {count} or more], the nearest others of each "
            f"code, not {list(table.shape)}"
        )
    return table[:, :count]


class Lenient(Treed):
    """What the two share: a table of neighbours."""

    @property
    @abstractmethod
    def neighbours(self) -> int: ...

    @property
    @abstractmethod
    def table(self) -> jax.Array | None: ...

    @property
    @abstractmethod
    def residual(self) -> str: ...

    @property
    @abstractmethod
    def greedy(self) -> str: ...

    @property
    @abstractmethod
    def pooled(self) -> Pooled: ...

    @property
    def rule(self) -> Rule:
        return self.pooled

    @property
    def columns(self) -> int:
        """How many neighbours the rule needs: one more than it pools, as released."""
        return self.neighbours + (self.residual == "released")

    def step(self, target: Target, state: tree.TreeState) -> tree.TreeState:
        if target.sampling.temperature is not None:
            return super().step(target, state)
        if self.greedy == "exact":
            # p is all on one code, which "released" would drop with the neighbours of a
            # reject, and draw any code in its place.
            return tree.step(target, self._growing(target), state, Ratio())
        # There would be nothing to pool: p is that of temperature 1, unfiltered.
        plain = replace(target.sampling, temperature=1.0, top_k=None, top_p=None)
        target, rule = replace(target, sampling=plain), Likeliest(self.pooled)
        how = replace(self._growing(target), draws=False)
        return tree.step(target, how, state, rule)

    def codes(self, target: Target) -> jax.Array:
        return others(target, self.table, self.columns)

    def fits(self, pipeline: "Pipeline", size: Size) -> None:
        """Raises ValueError if there is no drafter, or one or a table of another."""
        super().fits(pipeline, size)
        if self.table is not None:
            codes = dict(pipeline.config.decoders)[size].vocab_size
            table = given(self.table, codes, self.columns)
            check_table(table, codes, own=False)

    def bind(
        self, pipeline: "Pipeline", condition: Any, sampling: Sampling, size: Size
    ) -> Any:
        """With the family's drafter and its codes' neighbours, where none are given."""
        method: Any = super().bind(pipeline, condition, sampling, size)
        codes = pipeline.target(condition, sampling, size).codes
        if self.table is not None or codes is None:
            return method
        count = min(self.columns + 1, len(codes))  # each code is nearest to itself
        return replace(method, table=neighbour_table(codes, count)[:, 1:])


@method_class
class LANTERN(Lenient):
    """LANTERN (Jang et al. 2024, arXiv 2410.03355): EAGLE-2's trees, judged leniently.

    Codes that look alike stand in for one another: a child x is kept with p of x and of
    its nearest codes, as many as together have `delta` at most.

    Guarantee: biased; with `delta` 0 and the residual "pooled", or at temperature 0
    with `greedy` "exact", exact.

    Attributes:
      draft, depth, top_k, total: as for `EAGLE2`.
      neighbours: nearest codes that may be pooled; all, if there are fewer.
      delta: of probability that may be moved to a child at most, 0 to 1.
      residual: what is left of p behind a reject: "pooled" is without it and what was
        pooled with it; "released" is as in the authors' code, without all of the
        neighbours, and one more, if any was pooled.
      greedy: what temperature 0 is: "exact", AR's tokens, or "pooled", the published
        greedy mode. Then p is that of temperature 1 without top-k and top-p, a child
        counts if no other code is likelier than it is with what is pooled, and the
        longest path of such children is kept.
      table: int32 [V, neighbours or more], the nearest others of each code, from the
        nearest on; by default by distance of `Target.codes`. It needs one column more
        than `neighbours` for "released".
    """

    draft: Target | Eagle | None = field(
        default=None, repr=False, metadata={"arrays": True}
    )
    depth: int = 5
    top_k: int = 10
    total: int = 58
    neighbours: int = 1000
    delta: float = 0.1
    residual: Literal["pooled", "released"] = "pooled"
    greedy: Literal["exact", "pooled"] = "exact"
    table: jax.Array | None = field(default=None, repr=False, metadata={"arrays": True})

    def __post_init__(self):
        check_counts(
            depth=self.depth,
            top_k=self.top_k,
            total=self.total,
            neighbours=self.neighbours,
        )
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta must be 0 to 1, not {self.delta}")
        check_choice("residual", self.residual, ("pooled", "released"))
        check_choice("greedy", self.greedy, ("exact", "pooled"))

    @property
    def shape(self) -> Dynamic:
        return Dynamic(self.depth, self.top_k, self.total)

    @property
    def pooled(self) -> Pooled:
        return Pooled(self.neighbours, delta=self.delta, residual=self.residual)


@method_class
class LANTERNPP(Lenient):
    """LANTERN++ (Park et al. 2025, arXiv 2502.06352): a static tree, a bound by ratio.

    A child x is kept with p~(x) / q(x), p~(x) being p of x and of its nearest codes, as
    many as together have (ratio - 1) p(x) at most: where p spreads over many codes, a
    bound that all share, LANTERN's, pools either nothing or too much.

    Guarantee: biased; with `ratio` 1 and the residual "plain" or "optimal", or at
    temperature 0 with `greedy` "exact", exact.

    Attributes:
      draft, tree, drawn: as for `EAGLE`.
      neighbours, table: as for `LANTERN`.
      ratio: the paper's lambda, 1 or more: how many times p(x) p~(x) may be.
      residual: what is left of p behind a reject: "plain" is norm([p - q]+), as for
        `EAGLE`; "optimal" is norm([p - min(q, p~)]+), which makes the error least;
        "released" is as in the authors' code: plain, of a q without the neighbours, and
        one more, if any was pooled.
      greedy: as for `LANTERN`.
    """

    draft: Target | Eagle | None = field(
        default=None, repr=False, metadata={"arrays": True}
    )
    tree: tuple[tuple[int, ...], ...] = field(default=EAGLE_TREE, repr=False)
    drawn: bool = True
    neighbours: int = 10
    ratio: float = 5.0
    residual: Literal["plain", "optimal", "released"] = "plain"
    greedy: Literal["exact", "pooled"] = "exact"
    table: jax.Array | None = field(default=None, repr=False, metadata={"arrays": True})

    def __post_init__(self):
        Static(self.tree)
        check_counts(neighbours=self.neighbours)
        if not self.ratio >= 1:
            raise ValueError(f"ratio must be 1 or more, not {self.ratio}")
        check_choice("residual", self.residual, ("plain", "optimal", "released"))
        check_choice("greedy", self.greedy, ("exact", "pooled"))

    @property
    def shape(self) -> Static:
        return Static(self.tree)

    @property
    def pooled(self) -> Pooled:
        kind = "released-static" if self.residual == "released" else self.residual
        return Pooled(self.neighbours, times=self.ratio, residual=kind)


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ValueError if the value is not known."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


__all__ = ["LANTERN", "LANTERNPP", "Pooled"]
