"""GSD: grouped speculative decoding, and the naive relaxations it is compared with."""

from typing import Literal

import jax

from jaxspec.acceptance import Added, Amplified, Grouped, Ranking, Rule
from jaxspec.decoding import Target, jacobi, method_class
from jaxspec.methods.sjd import Jacobi


@method_class
class GSD(Jacobi):
    """Grouped speculative decoding (So et al. 2025, arXiv 2508.07747).

    SJD that judges a draft by the mass of a group of codes around it. The defaults are
    the released code's; `GSD.paper(G)` is the paper's G.

    Guarantee: biased: the group's mass accepts, the token's residual rejects. Never
    accepts less than SJD does where groups are a partition (theorem 1).

    Attributes:
      window, initial, upsampled: as for `SJD`.
      below, above: codes on either side of the draft, in the ranking, that the group
        spans.
      max_difference: of probability, between a member and the draft.
      max_distance: squared L2 between their vectors.
      ranking: of the codes by the target's probability ("target"), or as in the paper's
        ablations by the draft's ("draft") or by distance alone ("distance": the
        `below + above` nearest).
      table: the codes' vectors: `Target.codes`, the tokenizer's ("codebook"), or the
        model's input embeddings, as in released code ("embedding").
    """

    window: int = 16
    initial: jacobi.Initial = "random"
    below: int = 7
    above: int = 6
    max_difference: float = 0.15
    max_distance: float = 0.5
    ranking: Ranking = "target"
    table: Literal["codebook", "embedding"] = "codebook"

    @staticmethod
    def paper(group: int, **knobs) -> "GSD":
        """The paper's G codes: half of them on either side of the draft."""
        return GSD(below=group // 2, above=group // 2, **knobs)

    @staticmethod
    def lumina(**knobs) -> "GSD":
        """As released for Lumina-mGPT: distances between its input embeddings."""
        return GSD(table="embedding", **knobs)

    @property
    def rule(self) -> Rule:
        return Grouped(
            self.below, self.above, self.max_difference, self.max_distance, self.ranking
        )

    def __post_init__(self):
        super().__post_init__()
        if self.table not in ("codebook", "embedding"):
            raise ValueError(f"table must be codebook or embedding, not {self.table!r}")

    def codes(self, target: Target) -> jax.Array:
        codes = target.embeddings if self.table == "embedding" else target.codes
        if codes is None:
            raise ValueError(
                "GSD measures distances between codes, and the target has none: "
                'create it with codes=..., or use table="embedding"'
            )
        return codes


@method_class
class Amplify(Jacobi):
    """GSD's naive baseline: SJD that keeps a draft with min(1, k p/q).

    A row of its table 1 (So et al. 2025, arXiv 2508.07747), which shows no formula:
    this is the natural reading.

    Guarantee: biased.

    Attributes:
      window, initial, upsampled: as for `SJD`.
      k: what the chance of keeping a draft is multiplied by.
    """

    window: int = 16
    initial: jacobi.Initial = "random"
    k: float = 3.0

    @property
    def rule(self) -> Rule:
        return Amplified(self.k)


@method_class
class Addition(Jacobi):
    """GSD's naive baseline: SJD that keeps a draft with min(1, p/q + c).

    A row of its table 1 (So et al. 2025, arXiv 2508.07747), which shows no formula:
    this is the natural reading.

    Guarantee: biased.

    Attributes:
      window, initial, upsampled: as for `SJD`.
      c: what is added to the chance of keeping a draft.
    """

    window: int = 16
    initial: jacobi.Initial = "random"
    c: float = 0.1

    @property
    def rule(self) -> Rule:
        return Added(self.c)
