"""Drafts of a whole picture, by a model of a smaller grid, enlarged to the target's."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxspec.decoding import Decoded, Method, Target, bound, decode
from jaxspec.methods.zipar import ZipAR
from jaxspec.sampling import DRAFT, Sampling, cell_keys
from jaxspec.upsampling import Pixels, Upsampler, resized

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Upsampled:
    """What a drafter of a smaller grid draws, on the target's grid.

    The multi-scale half of MuLo-SD (Peruzzo et al. 2026, arXiv 2601.05149), for methods
    that judge drafts in their own way.

    Attributes:
      draft: the drafter: a `Target` of its own, conditioned on the same images, with
        the same codes and a grid that divides the target's; or for `generate` the size
        in pixels of a model of the family, by default the next smaller one.
      upsampler: `(codes [B, h, w], grid) -> codes [B, H, W]`; by default through pixels
        (see `jaxspec.upsampling`).
      method: how the drafter decodes.
    """

    draft: Target | int | None = field(default=None, repr=False)
    upsampler: Upsampler = field(default=Pixels())
    method: Method = field(default=ZipAR())

    def bind(
        self, pipeline: "Pipeline", condition: jax.Array, sampling: Sampling, size: int
    ) -> "Upsampled":
        """With the family's drafter and tokenizer, where none is given."""
        draft, method = bound_drafter(
            self.draft, self.method, pipeline, condition, sampling, size
        )
        upsampler = bound_upsampler(self.upsampler, pipeline)
        return replace(self, draft=draft, method=method, upsampler=upsampler)

    def drawn(self, target: Target, keys: jax.Array) -> tuple[jax.Array, Decoded]:
        """The drafts int32 [B, H, W], and what the drafter decoded.

        Raises:
          ValueError: the drafter does not fit the target.
        """
        draft = check_drafter(target, self.draft)
        low = decode(self.method, draft, draft_keys(keys))
        return rescaled(self.upsampler, low.tokens, draft, target), low


def rescaled(
    upsampler: Upsampler, tokens: jax.Array, source: Target, to: Target
) -> jax.Array:
    """Tokens of one target's grids on the grids of another, int32 [B, H, W].

    Pictures are enlarged, or made smaller; newlines stay at the ends of rows.
    """
    pictures = source.grammar.without(tokens)
    return to.grammar.written(resized(upsampler, pictures, to.grammar.picture))


def bound_drafter(
    draft: Any,
    method: Method,
    pipeline: "Pipeline",
    condition: jax.Array,
    sampling: Sampling,
    size: int,
) -> tuple[Target, Method]:
    """A drafter, and its method, with the conditions and settings of the target.

    Args:
      draft: a `Target`, which stays as it is; a size; or None for the next smaller one.
      method: of the drafter.
      pipeline, condition, sampling, size: of the target, as for `bind`.
    """
    if isinstance(draft, Target):
        return draft, method
    low = _draft_size(pipeline, draft, size)
    draft = pipeline.target(condition, sampling, low)
    return draft, bound(method, pipeline, condition, sampling, low)


def bound_upsampler(upsampler: Any, pipeline: "Pipeline") -> Any:
    """The upsampler with what it needs of a family, if it says that it needs any."""
    return upsampler.bind(pipeline) if hasattr(upsampler, "bind") else upsampler


def check_drafter(target: Target, draft: Any) -> Target:
    """The drafter, if it fits the target.

    Raises:
      ValueError: it does not, or is not there.
    """
    if draft is None or isinstance(draft, int):
        raise ValueError(
            "draft must be a Target, with its condition; a size, or none, is for "
            "jaxspec.generate"
        )
    target.check_draft(draft)
    (h, w), (low_h, low_w) = target.grammar.picture, draft.grammar.picture
    if h % low_h or w % low_w:
        raise ValueError(
            f"the drafter's grid must divide the target's, {h} x {w}, and is "
            f"{low_h} x {low_w}"
        )
    return draft


def draft_keys(keys: jax.Array) -> jax.Array:
    """The drafter's image keys [B]: its draws do not depend on the target's."""
    return cell_keys(keys, jnp.zeros((len(keys), 1), jnp.int32), DRAFT)[:, 0]


def with_draft(decoded: Decoded, low: Decoded) -> Decoded:
    """A result, with the passes of the drafter behind it so far."""
    bad = (low.bad_pass >= 0) & (decoded.bad_pass < 0)
    return replace(
        decoded,
        draft_passes=low.target_passes + low.draft_passes,
        prefill_passes=1 + low.prefill_passes,
        bad_pass=jnp.where(bad, decoded.target_passes, decoded.bad_pass),
    )


def _draft_size(pipeline: "Pipeline", draft: int | None, size: int) -> int:
    """The drafter's size in pixels, by default the next smaller one.

    Raises:
      ValueError: it is not trained, or does not divide `size`.
    """
    config = pipeline.config
    if draft is None:
        smaller = [s for s in config.sizes if s < size and size % s == 0]
        if not smaller:
            raise ValueError(
                f"{config.name} has no model to draft for {size} px: no smaller size "
                "divides it"
            )
        return max(smaller)
    draft = config.check_size(draft)
    if size % draft:
        raise ValueError(f"a draft of {draft} px cannot be enlarged to {size} px")
    return draft
