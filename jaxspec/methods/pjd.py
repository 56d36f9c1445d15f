"""PJD: parallel Jacobi decoding."""

from typing import get_args

import jax

from jaxspec.acceptance import Ratio, Rule
from jaxspec.decoding import Target, jacobi, method_class, rows
from jaxspec.methods.sjd import Jacobi


@method_class
class PJD(Jacobi):
    """Parallel Jacobi decoding (Liao et al. 2026, arXiv 2606.05703).

    SJD in several rows at once. A row is open as soon as the row above holds `context`
    final tokens, and never gets ahead of it. A pass judges up to `window` cells of each
    open row, given all final cells before them and the drafts before them in their own
    row.

    The topmost row that is not full goes on as in SJD. Of a row below, what it accepted
    becomes final, and the cell behind it if that was the whole window. Its first reject
    is replaced as in SJD, but stays a draft: the next pass judges it with more context.

    Guarantee: biased where rows overlap; with `context` of a whole row, exact. With
    another rule than `Ratio`, that rule's.
    Passes after the prefill: ceil(W / window) + (H - 1) ceil(context / window) where
    every draft is kept, H W - 1 where none is.

    Released code draws the first reject of a lower row once more from p, not from the
    residual: that favours codes which p and q share, even where the context stays the
    same. It also keeps drafts behind a reject where p/q is above 0.5, with their old q,
    and does not settle the cell behind a window of a lower row.

    Attributes:
      window: inputs of a row in a pass: a final token and window - 1 drafts.
      context: final tokens of the row above that a row waits for.
      coupling: how drafts behind a reject are renewed: "independent" as in SJD,
        "maximal" or "gumbel" as in SCD.
      initial: how a cell that enters a window gets its draft, as for `SJD`; not
        "sample-left", since rows that wait have no distribution at their left.
      upsampled, rule: as for `SJD`.
      rows: most rows in a pass; those over wait. By default ceil(W / context), which
        is as many as are open where rows keep their distance.
    """

    window: int = 8
    context: int = 8
    coupling: jacobi.Refresh = "independent"
    initial: jacobi.Initial = "random"
    rule: Rule = Ratio()
    rows: int | None = None

    @property
    def refresh(self) -> jacobi.Refresh:
        return self.coupling

    def __post_init__(self):
        super().__post_init__()
        if self.context < 1:
            raise ValueError(f"context must be 1 or more, not {self.context}")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows must be 1 or more, or None, not {self.rows}")
        couplings = get_args(jacobi.Refresh)
        if self.coupling not in couplings:
            known = ", ".join(couplings)
            raise ValueError(f"coupling must be one of {known}, not {self.coupling!r}")
        if self.initial == "sample-left":
            raise ValueError(
                "initial cannot be sample-left: a row that waits has no distribution "
                "at its left; take sample-above"
            )

    def begin(
        self, target: Target, keys: jax.Array, **drafts: jax.Array | None
    ) -> jacobi.JacobiState:
        h, w = target.grammar.picture
        most = -(-w // self.context) if self.rows is None else self.rows
        if self.context >= w:
            most = 1  # one row after the other
        return rows.start(
            target,
            keys,
            window=min(self.window, w),
            rows=min(h, most),
            initial=self.initial,
            **drafts,
        )

    def step(self, target: Target, state: jacobi.JacobiState) -> jacobi.JacobiState:
        return rows.step(
            target,
            state,
            rule=self.rule,
            refresh=self.refresh,
            initial=self.initial,
            context=self.context,
            codes=self.codes(target),
        )

    def finished(self, state: jacobi.JacobiState) -> jax.Array:
        return rows.finished(state)
