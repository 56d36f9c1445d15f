"""Drafts of a whole picture, by a model of a smaller grid, enlarged to the target's."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxspec.decoding import Decoded, Method, Target, bound, check_fits, decode
from jaxspec.methods.zipar import ZipAR
from jaxspec.sampling import DRAFT, Sampling, cell_keys
from jaxspec.sizes import Size, sides_of, size_label
from jaxspec.upsampling import Name, Nearest, Pixels, Upsampler, resized

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Upsampled:
    """What a drafter of a smaller grid draws, on the target's grid.

    The multi-scale half of MuLo-SD (Peruzzo et al. 2026, arXiv 2601.05149), for methods
    that judge drafts in their own way.

    A drafter of the target's own grid whose method tells what it drew from (`FlashAR`)
    lends that too where nothing changes its codes, as `Nearest` does not: then drafts
    are judged by min(1, p/q), and not as chosen.

    Attributes:
      draft: the drafter: a `Target` of its own, conditioned on the same images, with
        the same codes and a grid that divides the target's, or a smaller one of its
        shape; or for `generate` the size in pixels of a model of the family, by default
        the next smaller one.
      upsampler: `(codes [B, h, w], grid) -> codes [B, H, W]`; by default through pixels
        (see `jaxspec.upsampling`).
      method: how the drafter decodes.
    """

    draft: Target | int | None = field(default=None, repr=False)
    upsampler: Upsampler = field(default=Pixels())
    method: Method = field(default=ZipAR())

    def fits(self, pipeline: "Pipeline", size: Size) -> None:
        """Raises ValueError if the family has no drafter or upsampler for that size."""
        check_drafts(self.draft, self.method, pipeline, size)
        check_fits(self.upsampler, pipeline, size)

    def bind(
        self, pipeline: "Pipeline", condition: Any, sampling: Sampling, size: Size
    ) -> "Upsampled":
        """With the family's drafter and tokenizer, where none is given."""
        draft, method = bound_drafter(
            self.draft, self.method, pipeline, condition, sampling, size
        )
        upsampler = bound_upsampler(self.upsampler, pipeline)
        return replace(self, draft=draft, method=method, upsampler=upsampler)

    def drawn(
        self, target: Target, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array | None, Decoded]:
        """The drafts int32 [B, H, W], what they were drawn from, and their counts.

        The second is log-probabilities [B, N, V] of each cell given drafts before it in
        raster order, which take the drafter one pass more; None if nothing tells them.

        Raises:
          ValueError: the drafter does not fit the target.
        """
        draft = check_drafter(target, self.draft)
        low = decode(self.method, draft, draft_keys(keys))
        log_q, tell = None, getattr(self.method, "log_q", None)
        if tell and draft.grid == target.grid and isinstance(self.upsampler, Nearest):
            log_q = tell(draft, low.tokens)
        if log_q is not None:
            low = replace(low, target_passes=low.target_passes + 1)
        return rescaled(self.upsampler, low.tokens, draft, target), log_q, low


def rescaled(
    upsampler: Upsampler | Name,
    tokens: jax.Array,
    source: Target,
    to: Target,
    known: jax.Array | None = None,
) -> jax.Array:
    """Tokens of one target's grids on the grids of another, int32 [B, H, W].

    Pictures are enlarged, or made smaller; newlines stay at the ends of rows. Where so
    many rows [B] are `known`, the last of them stands for those below.
    """
    if known is not None:
        row = jnp.minimum(jnp.arange(tokens.shape[1])[None], known[:, None] - 1)
        tokens = jnp.take_along_axis(tokens, row[..., None], axis=1)
    pictures = source.grammar.without(tokens)
    return to.grammar.written(resized(upsampler, pictures, to.grammar.picture))


def check_drafts(draft: Any, method: Method, pipeline: "Pipeline", size: Size) -> None:
    """Raises ValueError if `bound_drafter` would, or its method does not fit."""
    if not isinstance(draft, Target):
        check_fits(method, pipeline, _draft_size(pipeline, draft, size))


def bound_drafter(
    draft: Any,
    method: Method,
    pipeline: "Pipeline",
    condition: jax.Array,
    sampling: Sampling,
    size: Size,
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
    if not (_divides((low_h, low_w), (h, w)) or _shaped((low_h, low_w), (h, w))):
        raise ValueError(
            f"the drafter's grid must divide the target's, {h} x {w}, or be a smaller "
            f"one of its shape, and is {low_h} x {low_w}"
        )
    return draft


def _divides(small: tuple[int, int], large: tuple[int, int]) -> bool:
    return not (large[0] % small[0] or large[1] % small[1])


def _shaped(small: tuple[int, int], large: tuple[int, int]) -> bool:
    """Whether it is smaller, of the same ratio of sides."""
    return small[0] < large[0] and small[0] * large[1] == small[1] * large[0]


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


def _draft_size(pipeline: "Pipeline", draft: Size | None, size: Size) -> Size:
    """The drafter's size in pixels, by default the next smaller one.

    That is the largest that divides the target's, or else the largest of its shape.

    Raises:
      ValueError: it is not trained, or cannot be enlarged to `size`.
    """
    config, sides = pipeline.config, sides_of(size)
    if draft is None:
        others = [x for x in config.sizes if x != size]
        smaller = [x for x in others if _divides(sides_of(x), sides)]
        smaller = smaller or [x for x in others if _shaped(sides_of(x), sides)]
        if not smaller:
            raise ValueError(
                f"{config.name} has no model to draft for {size_label(size)} px: no "
                "smaller size divides it, or has its shape"
            )
        return max(smaller, key=sides_of)
    draft = config.check_size(draft)
    if not (_divides(sides_of(draft), sides) or _shaped(sides_of(draft), sides)):
        raise ValueError(
            f"a draft of {size_label(draft)} px cannot be enlarged to "
            f"{size_label(size)} px"
        )
    return draft
