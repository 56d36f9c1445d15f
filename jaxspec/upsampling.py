"""Grids of codes at another resolution: what turns a small draft into a large one.

An upsampler is a pure function `upsampler(tokens, grid)` of codes int32 [B, h, w] that
returns codes [B, H, W] for a `grid` (H, W). Those here take any grid, also a smaller.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxspec.models.vq import VQ, VQConfig

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline

# (tokens, grid) -> tokens, as above.
Upsampler = Callable[[jax.Array, tuple[int, int]], jax.Array]
Filter = Literal["bicubic", "lanczos3", "lanczos5", "bilinear", "nearest"]


def resized(
    upsampler: Upsampler, tokens: jax.Array, grid: tuple[int, int]
) -> jax.Array:
    """What an upsampler makes of tokens [B, h, w], int32 [B, H, W].

    Raises:
      ValueError: it does not keep its promise.
    """
    out, shape = upsampler(tokens, grid), (len(tokens), *grid)
    if out.shape != shape or not jnp.issubdtype(out.dtype, jnp.integer):
        raise ValueError(
            f"the upsampler must return whole numbers {list(shape)}, not "
            f"{out.dtype} {list(out.shape)}"
        )
    return out.astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nearest:
    """Each code copied over the cells that its own covers: the floor of upsamplers."""

    def __call__(self, tokens: jax.Array, grid: tuple[int, int]) -> jax.Array:
        rows, columns = (
            jnp.arange(large) * small // large
            for large, small in zip(grid, tokens.shape[1:], strict=True)
        )
        return tokens[:, rows][:, :, columns]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pixels:
    """Through pixels: codes to a picture, the picture resized, and back to codes.

    MuLo-SD's training-free upsampler (Peruzzo et al. 2026, arXiv 2601.05149v2), with a
    filter in place of a super-resolution network. Downwards it is antialiased.

    Attributes:
      filter: of the resize, as `jax.image.resize` knows it; "bicubic" is Keys' with
        a = -0.5, as Pillow's.
      params: of the VQ tokenizer. `generate` fills it in where it is None.
      vq: its configuration.
    """

    filter: Filter = field(default="bicubic", metadata={"static": True})
    params: Any = field(default=None, repr=False)
    vq: VQConfig | None = field(default=None, repr=False, metadata={"static": True})

    def __post_init__(self):
        if self.filter not in get_args(Filter):
            known = ", ".join(get_args(Filter))
            raise ValueError(f"filter must be one of {known}, not {self.filter!r}")

    def bind(self, pipeline: "Pipeline") -> "Pixels":
        """With the tokenizer of a family, unless it has one."""
        if self.vq is not None:
            return self
        return replace(self, params=pipeline.params["vq"], vq=pipeline.config.vq)

    def __call__(self, tokens: jax.Array, grid: tuple[int, int]) -> jax.Array:
        if self.vq is None:
            raise ValueError(
                "Pixels needs a VQ tokenizer: Pixels().bind(pipeline), or give params "
                "and vq"
            )
        vq, factor = VQ(self.vq), self.vq.factor
        images: Any = vq.apply(self.params, tokens, method="decode")
        shape = (len(tokens), grid[0] * factor, grid[1] * factor, 3)
        # A filter overshoots at edges: no picture goes beyond black and white.
        images = jax.image.resize(jnp.clip(images, -1, 1), shape, self.filter)
        codes: Any = vq.apply(self.params, jnp.clip(images, -1, 1), method="encode")
        return codes


__all__ = ["Filter", "Nearest", "Pixels", "Upsampler", "resized"]
