"""SCD: speculative coupled decoding."""

from typing import Literal

from jaxspec.acceptance import Ratio, Rule
from jaxspec.decoding import jacobi, method_class
from jaxspec.methods.sjd import Jacobi


@method_class
class SCD(Jacobi):
    """Speculative coupled decoding (So et al. 2025, arXiv 2510.24211).

    SJD whose unreached drafts change as little as they may: new and old draft are
    coupled. Later passes then find them still standing.

    Guarantee: exact; with another rule than `Ratio`, that rule's.

    Attributes:
      window, initial, upsampled, rule: as for `SJD`.
      coupling: "maximal" keeps an old draft with min(1, p_new/p_old) and else draws
        from the residual (this is also SJD-PAC's adaptive continuation); "gumbel" draws
        with noise that belongs to the cell.
    """

    window: int = 32
    initial: jacobi.Initial = "random"
    coupling: Literal["maximal", "gumbel"] = "maximal"
    rule: Rule = Ratio()

    @property
    def refresh(self) -> jacobi.Refresh:
        return self.coupling

    def __post_init__(self):
        super().__post_init__()
        if self.coupling not in ("maximal", "gumbel"):
            raise ValueError(f"coupling must be maximal or gumbel, not {self.coupling}")
