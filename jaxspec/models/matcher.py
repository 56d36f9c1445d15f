"""A small network that tells how well a code grid matches a caption.

Two towers trained to agree on pairs that belong together (CLIP: Radford et al., 2021,
section 2.3), to choose among several pictures of a prompt as DALL-E does (Ramesh et
al., 2021, section 2.6). It looks at codes, not at pixels, so that a choice needs no
picture. Layers and widths are ours.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.vq import space_to_depth, unit


@dataclass(frozen=True)
class MatcherConfig:
    """The plan of both towers.

    Attributes:
      code_width: width of a code vector.
      text_width: width of a caption's vectors.
      width: channels at the grid's own resolution; they double where it halves.
      blocks: residual blocks at each resolution.
      shared: width of the space where pictures and captions meet.
    """

    code_width: int
    text_width: int
    width: int = 24
    blocks: tuple[int, ...] = (1, 2, 2)
    shared: int = 64


class Block(nn.Module):
    """Depthwise 5 x 5, then two products at each cell, as in ConvNeXt."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = x.shape[-1]
        h = nn.Conv(c, (5, 5), feature_group_count=c, use_bias=False, name="around")(x)
        h = nn.Dense(2 * c, name="up")(nn.RMSNorm(name="norm")(h))
        return x + nn.Dense(c, name="down")(nn.gelu(h))


class Matcher(nn.Module):
    config: MatcherConfig

    @nn.compact
    def __call__(
        self, latents: jax.Array, caption: jax.Array, kept: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Both towers' unit vectors [B, shared]; their product is how well they match.

        Args:
          latents: code vectors float32 [B, h, w, code_width], h and w multiples of 2 to
            the number of halvings.
          caption: vectors [B, P, text_width]; those of zeros are no words.
          kept: factors of the pooled channels, for dropout.
        """
        x = nn.Conv(self.config.width, (3, 3), name="stem")(latents)
        for i, blocks in enumerate(self.config.blocks):
            if i:
                x = nn.Dense(2 * x.shape[-1], name=f"halve_{i}")(space_to_depth(x, 2))
            for j in range(blocks):
                x = Block(name=f"block_{i}_{j}")(x)
        x = nn.RMSNorm(name="norm_picture")(x).mean((1, 2))
        x = nn.Dense(self.config.shared, name="picture")(
            x if kept is None else x * kept
        )
        words = (caption != 0).any(-1).sum(-1, keepdims=True)
        mean = caption.sum(1) / jnp.maximum(words, 1)
        h = nn.gelu(nn.Dense(2 * self.config.shared, name="caption_up")(mean))
        text = nn.Dense(self.config.shared, name="caption_plain")(mean)
        text = text + nn.Dense(self.config.shared, name="caption")(h)
        return unit(x), unit(text)
