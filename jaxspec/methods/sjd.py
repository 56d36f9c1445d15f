"""SJD: speculative Jacobi decoding."""

from dataclasses import dataclass

import jax

from jaxspec.acceptance import Ratio, Rule
from jaxspec.decoding import Decoded, Target, jacobi


@dataclass(frozen=True)
class SJD:
    """Speculative Jacobi decoding (Teng et al. 2024, arXiv 2410.01699, algorithm 1).

    A window of drafts is judged in one pass, each by the target's distribution given
    the drafts before it. Drafts that were not reached are drawn anew from these
    distributions for the next pass.

    Guarantee: exact.

    Attributes:
      window: inputs of a pass: the newest final token and window - 1 drafts.
      initial: how a cell that enters the window gets its draft. "random" is uniform
        over the codes and judged as that; released code judges the same draft as if it
        had been chosen. "repeat" copies the token at the left or above, "sample" draws
        from the distribution there.
    """

    window: int = 16
    initial: jacobi.Initial = "random"

    @property
    def rule(self) -> Rule:
        return Ratio()

    @property
    def refresh(self) -> jacobi.Refresh:
        return "independent"

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"window must be 1 or more, not {self.window}")
        if self.initial not in jacobi.INITIALS:
            known = ", ".join(jacobi.INITIALS)
            raise ValueError(f"initial must be one of {known}, not {self.initial!r}")

    def start(self, target: Target, keys: jax.Array) -> jacobi.JacobiState:
        return jacobi.start(target, keys, window=self.window, initial=self.initial)

    def step(self, target: Target, state: jacobi.JacobiState) -> jacobi.JacobiState:
        return jacobi.step(
            target, state, rule=self.rule, refresh=self.refresh, initial=self.initial
        )

    def finished(self, state: jacobi.JacobiState) -> jax.Array:
        return jacobi.finished(state)

    def decoded(self, state: jacobi.JacobiState) -> Decoded:
        return state.decoded
