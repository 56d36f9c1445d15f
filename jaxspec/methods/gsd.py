"""GSD: grouped speculative decoding, and the naive relaxations it is compared with."""

from dataclasses import dataclass

from jaxspec.acceptance import Added, Amplified, Grouped, Rule
from jaxspec.methods.sjd import SJD


@dataclass(frozen=True)
class GSD(SJD):
    """Grouped speculative decoding (So et al. 2025, arXiv 2508.07747).

    SJD that judges a draft by the mass of a group of codes around it. The defaults are
    the released code's; `GSD.paper(G)` is the paper's G.

    Guarantee: biased: the group's mass accepts, the token's residual rejects. Never
    accepts less than SJD does where groups are a partition (theorem 1).

    Attributes:
      below, above: ranks of p next to the draft that the group spans.
      max_difference: of probability, between a member and the draft.
      max_distance: squared L2 between their vectors in `Target.codes`; not asked where
        a target has none.
    """

    below: int = 7
    above: int = 6
    max_difference: float = 0.15
    max_distance: float = 0.5

    @staticmethod
    def paper(group: int, **knobs) -> "GSD":
        """The paper's G codes: half of them on either side of the draft."""
        return GSD(below=group // 2, above=group // 2, **knobs)

    @property
    def rule(self) -> Rule:
        return Grouped(self.below, self.above, self.max_difference, self.max_distance)


@dataclass(frozen=True)
class Amplify(SJD):
    """GSD's naive baseline: SJD that keeps a draft with min(1, k p/q).

    Guarantee: biased. The paper shows no formula; this is the natural reading.
    """

    k: float = 3.0

    @property
    def rule(self) -> Rule:
        return Amplified(self.k)


@dataclass(frozen=True)
class Addition(SJD):
    """GSD's naive baseline: SJD that keeps a draft with min(1, p/q + c).

    Guarantee: biased. The paper shows no formula; this is the natural reading.
    """

    c: float = 0.1

    @property
    def rule(self) -> Rule:
        return Added(self.c)
