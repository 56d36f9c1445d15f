"""SCD: speculative coupled decoding."""

from dataclasses import dataclass
from typing import Literal

from jaxspec.decoding import jacobi
from jaxspec.methods.sjd import SJD


@dataclass(frozen=True)
class SCD(SJD):
    """Speculative coupled decoding (So et al. 2025, arXiv 2510.24211).

    SJD whose unreached drafts change as little as they may: new and old draft are
    coupled. Later passes then find them still standing.

    Guarantee: exact.

    Attributes:
      coupling: "maximal" keeps an old draft with min(1, p_new/p_old) and else draws
        from the residual (this is also SJD-PAC's adaptive continuation); "gumbel" draws
        with noise that belongs to the cell.
    """

    window: int = 32
    coupling: Literal["maximal", "gumbel"] = "maximal"

    @property
    def refresh(self) -> jacobi.Refresh:
        return self.coupling

    def __post_init__(self):
        super().__post_init__()
        if self.coupling not in ("maximal", "gumbel"):
            raise ValueError(f"coupling must be maximal or gumbel, not {self.coupling}")
