"""A small network that enlarges a grid of VQ code vectors, and its inverse.

MuLo-SD's learned upsampler and downsampler (Peruzzo et al. 2026, arXiv 2601.05149):
convolutions on VQ latents and pixel shuffle. With `row_causal`, a row of what comes out
depends on no row of what goes in below its own place, so that rows can be enlarged, and
made small again, before those below them are known. Layers and widths are ours: the
paper does not give them.

Grids are float32 [B, h, w, code_width], any h and w. What comes out is not quantised.
"""

from dataclasses import dataclass
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.vq import depth_to_space, space_to_depth


@dataclass(frozen=True)
class UpsamplerConfig:
    """The channel plan of a network.

    Attributes:
      code_width: width of a code vector.
      direction: what the network does to a grid.
      scale: rows and columns of the large grid for each of the small one.
      width: channels on the small grid.
      blocks: residual blocks there.
      large_width: channels on the large grid.
      large_blocks: residual blocks there.
      row_causal: no convolution sees the row below.
    """

    code_width: int
    direction: Literal["up", "down"] = "up"
    scale: int = 2
    width: int = 64
    blocks: int = 3
    large_width: int = 32
    large_blocks: int = 1
    row_causal: bool = True


def conv(config: UpsamplerConfig, features: int, name: str) -> nn.Conv:
    """3 x 3; without its last row where rows are causal."""
    if config.row_causal:
        return nn.Conv(features, (2, 3), padding=((1, 0), (1, 1)), name=name)
    return nn.Conv(features, (3, 3), padding=1, name=name)


class ResBlock(nn.Module):
    config: UpsamplerConfig

    @nn.compact
    def __call__(self, x):
        # Norms are of each cell: one over rows would tell of those below.
        h = nn.silu(nn.RMSNorm(name="norm1")(x))
        h = conv(self.config, x.shape[-1], "conv1")(h)
        h = nn.silu(nn.RMSNorm(name="norm2")(h))
        return x + conv(self.config, x.shape[-1], "conv2")(h)


class Resampler(nn.Module):
    """Adds what it learns to plain copies (up) or means (down) of its inputs."""

    config: UpsamplerConfig

    @nn.compact
    def __call__(self, latents: jax.Array) -> jax.Array:
        """Latents [B, h, w, code_width] to those of the other grid."""
        config, r = self.config, self.config.scale
        small = lambda x: self._blocks(x, config.blocks, "block")
        large = lambda x: self._blocks(x, config.large_blocks, "large_block")
        if config.direction == "up":
            plain = latents.repeat(r, 1).repeat(r, 2)
            x = small(conv(config, config.width, "conv_in")(latents))
            x = nn.Dense(r * r * config.large_width, name="shuffle")(x)
            x = large(depth_to_space(x, r))
        else:
            plain = jnp.stack(jnp.split(space_to_depth(latents, r), r * r, -1)).mean(0)
            x = large(conv(config, config.large_width, "conv_in")(latents))
            x = nn.Dense(config.width, name="shuffle")(space_to_depth(x, r))
            x = small(x)
        x = nn.silu(nn.RMSNorm(name="norm_out")(x))
        zeros = nn.initializers.zeros_init()
        return plain + nn.Dense(config.code_width, kernel_init=zeros, name="out")(x)

    def _blocks(self, x: jax.Array, count: int, name: str) -> jax.Array:
        for i in range(count):
            x = ResBlock(self.config, name=f"{name}_{i}")(x)
        return x
