"""SJD: speculative Jacobi decoding."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax

from jaxspec.acceptance import Ratio, Rule, check_rule
from jaxspec.decoding import Decoded, Target, check_fits, jacobi, method_class
from jaxspec.methods.upsampled import Upsampled, with_draft
from jaxspec.sampling import Sampling
from jaxspec.sizes import Size

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline


@dataclass(frozen=True)
class Jacobi(ABC):
    """What the methods of the SJD family share; they add knobs.

    A method has `window` and `initial` among them, a `rule`, and may change `refresh`.

    Attributes:
      upsampled: where first drafts come from if `initial` is "upsampled".
    """

    upsampled: Upsampled | None = field(
        default=None, kw_only=True, repr=False, metadata={"arrays": True}
    )

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
        if self.initial == "upsampled" and self.upsampled is None:
            object.__setattr__(self, "upsampled", Upsampled())
        if self.initial != "upsampled" and self.upsampled is not None:
            raise ValueError(
                'upsampled says where first drafts come from if initial="upsampled", '
                f"and initial is {self.initial!r}"
            )
        check_rule(self.rule)

    def codes(self, target: Target) -> jax.Array | None:
        """The codes' vectors that the rule is given."""
        return target.codes

    def fits(self, pipeline: "Pipeline", size: Size) -> None:
        """Raises ValueError if first drafts are upsampled and the family cannot."""
        check_fits(self.upsampled, pipeline, size)

    def bind(
        self, pipeline: "Pipeline", condition: Any, sampling: Sampling, size: Size
    ) -> Any:
        """With the family's drafter and tokenizer, if first drafts are upsampled."""
        if self.upsampled is None:
            return self
        upsampled = self.upsampled.bind(pipeline, condition, sampling, size)
        return replace(self, upsampled=upsampled)

    def start(self, target: Target, keys: jax.Array) -> jacobi.JacobiState:
        if self.upsampled is None:
            return self.begin(target, keys)
        tokens, log_q, low = self.upsampled.drawn(target, keys)
        state = self.begin(target, keys, upsampled=tokens, upsampled_log_q=log_q)
        decoded = replace(with_draft(state.decoded, low), drafts=tokens)
        return replace(state, decoded=decoded)

    def begin(
        self, target: Target, keys: jax.Array, **drafts: jax.Array | None
    ) -> jacobi.JacobiState:
        """`start`, with the first drafts (see `jacobi.start`) if `initial` asks."""
        return jacobi.start(
            target, keys, window=self.window, initial=self.initial, **drafts
        )

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
        from the distribution there, "upsampled" takes what a smaller model drew.
      upsampled: that model and how its picture is enlarged; by default the next
        smaller one of the family, through pixels.
      rule: judges drafts; your own is a function (see `jaxspec.acceptance`).
    """

    window: int = 16
    initial: jacobi.Initial = "random"
    rule: Rule = Ratio()
