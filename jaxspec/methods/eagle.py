"""EAGLE and EAGLE-2: trees of drafts, judged in one pass."""

from abc import ABC, abstractmethod
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import jax

from jaxspec.acceptance import Ratio, Rule, check_rule
from jaxspec.decoding import Decoded, Target, drafting, method_class, tree
from jaxspec.decoding.shapes import Dynamic, Static
from jaxspec.models.drafter import Eagle
from jaxspec.sampling import Sampling
from jaxspec.sizes import Size

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline

# EAGLE's own tree (its code's `mc_sim_7b_63`): 4, 8, 8, 3 and 2 nodes of depth 1 to 5.
EAGLE_TREE = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)),
    *((1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


class Treed(ABC):
    """What the methods that judge a tree of drafts share; they add knobs.

    A method has `draft` among them, a `shape`, and may change the rest.
    """

    @property
    @abstractmethod
    def draft(self) -> Target | Eagle | None: ...

    @property
    @abstractmethod
    def shape(self) -> Dynamic | Static:
        """Of the trees, before it is known how many codes there are."""

    @property
    def drawn(self) -> bool:
        """Children are drawn by the drafter, not its likeliest codes.

        Where it takes the likeliest code, they are not drawn either.
        """
        return False

    @property
    def rule(self) -> Rule:
        """Judges children, as in `tree.judge_along`."""
        return Ratio()

    def codes(self, target: Target) -> jax.Array | None:
        """What the rule is given."""
        return None

    def start(self, target: Target, keys: jax.Array) -> tree.TreeState:
        """Prefills both models and draws cell 0.

        Raises:
          ValueError: the drafter, or the tree, does not fit the target.
        """
        return tree.start(target, self._growing(target), keys, self.codes(target))

    def step(self, target: Target, state: tree.TreeState) -> tree.TreeState:
        return tree.step(target, self._growing(target), state, self.rule)

    def fits(self, pipeline: "Pipeline", size: Size) -> None:
        """Raises ValueError if the family has no drafter, or another one is given."""
        target = dict(pipeline.config.decoders)[size]
        if self.draft is None:
            pipeline.trained("drafters", size)
        elif isinstance(self.draft, Eagle):
            self.draft.check(target)
        self.shape.fitting(target.vocab_size)

    def bind(
        self, pipeline: "Pipeline", condition: Any, sampling: Sampling, size: Size
    ) -> Any:
        """With the family's drafter for that size, where none is given."""
        if self.draft is not None:
            return self
        method: Any = self
        return replace(method, draft=pipeline.drafter(size))

    def _growing(self, target: Target) -> drafting.Growing:
        """How trees grow here; raises ValueError if the drafter cannot."""
        draft = self.draft
        if isinstance(draft, Eagle):
            draft.check(target.model.config)
            drafter, settings = drafting.Sequel(draft, target), target.sampling
        elif isinstance(draft, Target):
            target.check_companion(draft)
            drafter, settings = drafting.Companion(draft), draft.sampling
        else:
            raise ValueError(
                "draft must be a Target of the same grid, with its condition, or an "
                f"Eagle, not {draft!r}; jaxspec.generate takes the family's own"
            )
        return drafting.Growing(
            drafter=drafter,
            shape=self.shape.fitting(target.model.config.vocab_size),
            draws=self.drawn and settings.temperature is not None,
        )

    def finished(self, state: tree.TreeState) -> jax.Array:
        return tree.finished(state)

    def decoded(self, state: tree.TreeState) -> Decoded:
        return state.decoded


@method_class
class EAGLE2(Treed):
    """EAGLE-2's dynamic trees (Li et al. 2024, arXiv 2406.16858).

    The drafter's `top_k` likeliest codes of a node are its children; of each depth, the
    `top_k` nodes with the likeliest paths are read on; of all, the `total` likeliest
    are judged by the target in one pass. The target draws a token behind the root, and
    while a child has it, behind that child.

    Guarantee: exact, whatever the drafter: what is drawn is the target's. Tokens are
    those of plain AR at the same seed, but for rounding.

    Attributes:
      draft: the drafter: an `Eagle` that was trained with the target, or a `Target` of
        the same grid, codes and batch, of any size and settings. None is for
        `jaxspec.generate`: the family's own.
      depth: of the tree: drafts that can be kept in a round.
      top_k: children of a node, and nodes of a depth that are read on.
      total: drafts that are judged in a round.
    """

    draft: Target | Eagle | None = field(
        default=None, repr=False, metadata={"arrays": True}
    )
    depth: int = 5
    top_k: int = 10
    total: int = 58

    def __post_init__(self):
        check_counts(depth=self.depth, top_k=self.top_k, total=self.total)

    @property
    def shape(self) -> Dynamic:
        return Dynamic(self.depth, self.top_k, self.total)


@method_class
class EAGLE(Treed):
    """EAGLE's static tree (Li et al. 2024, arXiv 2401.15077).

    Every round the tree has the same nodes, by their ranks. Children are drawn by the
    drafter, without replacement, and tested one after the other: each is kept with
    min(1, p/q), and a reject leaves norm([p - q]+) as p, and q without it as q.

    Guarantee: exact, whatever the drafter; with another `rule`, that rule's.

    Attributes:
      draft: as for `EAGLE2`.
      tree: its nodes, each as its path from the root, (0, 2) being the third child of
        the first child; by default EAGLE's own of 25 nodes.
      drawn: children are drawn; else they are the likeliest codes, judged as by
        `EAGLE2`.
      rule: judges children. `Cooled()` makes this Cool-SD (arXiv 2601.09212).
    """

    draft: Target | Eagle | None = field(
        default=None, repr=False, metadata={"arrays": True}
    )
    tree: tuple[tuple[int, ...], ...] = field(default=EAGLE_TREE, repr=False)
    drawn: bool = True
    rule: Rule = Ratio()

    def __post_init__(self):
        Static(self.tree)
        check_rule(self.rule)

    @property
    def shape(self) -> Static:
        return Static(self.tree)


def check_counts(**counts: int) -> None:
    """Raises ValueError if one is less than 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be 1 or more, not {count}")
