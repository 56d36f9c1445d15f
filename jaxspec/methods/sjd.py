"""SJD: speculative Jacobi decoding."""

from abc import ABC, abstractmethod

import jax

from jaxspec.acceptance import Ratio, Rule, check_rule
from jaxspec.decoding import Decoded, Target, jacobi, method_class


class Jacobi(ABC):
    """What the methods of the SJD family share; they add knobs.

    A method has `window` and `initial` among them, a `rule`, and may change `refresh`.
    """

    @property
    @abstractmethod
    def window(self) -> int: ...

    @property
    @abstractmethod
    def initial(self) -> jacobi.Initial: ...

    @property
    @abstractmethod
    def rule(self) -> Rule: ...

    @property
    def refresh(self) -> jacobi.Refresh:
        return "independent"

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"window must be 1 or more, not {self.window}")
        if self.initial not in jacobi.INITIALS:
            known = ", ".join(jacobi.INITIALS)
            raise ValueError(f"initial must be one of {known}, not {self.initial!r}")
        check_rule(self.rule)

    def codes(self, target: Target) -> jax.Array | None:
        """The codes' vectors that the rule is given."""
        return target.codes

    def start(self, target: Target, keys: jax.Array) -> jacobi.JacobiState:
        return jacobi.start(target, keys, window=self.window, initial=self.initial)

    def step(self, target: Target, state: jacobi.JacobiState) -> jacobi.JacobiState:
        return jacobi.step(
            target,
            state,
            rule=self.rule,
            refresh=self.refresh,
            initial=self.initial,
            codes=self.codes(target),
        )

    def finished(self, state: jacobi.JacobiState) -> jax.Array:
        return jacobi.finished(state)

    def decoded(self, state: jacobi.JacobiState) -> Decoded:
        return state.decoded


@method_class
class SJD(Jacobi):
    """Speculative Jacobi decoding (Teng et al. 2024, arXiv 2410.01699, algorithm 1).

    A window of drafts is judged in one pass, each by the target's distribution given
    the drafts before it. Drafts that were not reached are drawn anew from these
    distributions for the next pass.

    Guarantee: exact; with another rule than `Ratio`, that rule's.

    Attributes:
      window: inputs of a pass: the newest final token and window - 1 drafts.
      initial: how a cell that enters the window gets its draft. "random" is uniform
        over the codes and judged as that; released code judges the same draft as if it
        had been chosen. "repeat" copies the token at the left or above, "sample" draws
        from the distribution there.
      rule: judges drafts; your own is a function (see `jaxspec.acceptance`).
    """

    window: int = 16
    initial: jacobi.Initial = "random"
    rule: Rule = Ratio()
