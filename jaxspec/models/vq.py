"""The VQ tokenizer: pictures to grids of codes and back.

One encoder-decoder covers the published tokenizers and the embedded family by
configuration: LlamaGen's VQ-16 (Sun et al. 2024, "Autoregressive Model Beats
Diffusion", section 3.1; GroupNorm, attention at the lowest resolution, a codebook
that is L2-normalised when used), Chameleon's VQGAN (attention in the middle only, raw
codebook), and a small local one (space-to-depth stem, RMS norm at each pixel, no
attention) whose codes depend on nearby pixels only.

Pictures are float32 [B, H, W, 3] in [-1, 1], channels last. Code grids are int32
[B, h, w] with H = h * config.factor.
"""

from dataclasses import dataclass
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class VQConfig:
    """The channel plan of a VQ tokenizer.

    Attributes:
      codebook_size: number of codes V.
      code_width: width of one codebook row.
      normalize_codes: use codes and latents L2-normalised, as LlamaGen does.
      width: channels at the highest resolution.
      multipliers: channel multiplier of each resolution, highest first.
      encoder_blocks, decoder_blocks: residual blocks at each resolution.
      latent_width: channels between the network and the 1x1 quantiser convolutions.
      attention: where attention blocks stand: after every block of the lowest
        resolution and in the middle, in the middle only, or nowhere.
      norm: GroupNorm over the whole picture, or RMS norm over channels at each pixel.
      resample: strided convolution and nearest neighbour (as published), or
        space-to-depth and its inverse.
      patch: side of the pixel blocks folded into channels before the first
        convolution; 1 as published.
      background: the pixel value that zero padding stands for; 1 (white) lets a
        drawing's border look like its inside.
    """

    codebook_size: int = 16384
    code_width: int = 8
    normalize_codes: bool = True
    width: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    encoder_blocks: int = 2
    decoder_blocks: int = 3
    latent_width: int = 256
    attention: Literal["lowest", "middle", "none"] = "lowest"
    norm: Literal["group", "rms"] = "group"
    resample: Literal["conv", "shuffle"] = "conv"
    patch: int = 1
    background: float = 0.0

    @property
    def factor(self) -> int:
        """Pixels along one side of a cell."""
        return self.patch * 2 ** (len(self.multipliers) - 1)


def space_to_depth(x: jax.Array, r: int) -> jax.Array:
    """Folds [B, H, W, C] into [B, H/r, W/r, r*r*C]."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // r, r, w // r, r, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h // r, w // r, r * r * c)


def depth_to_space(x: jax.Array, r: int) -> jax.Array:
    """Unfolds [B, H, W, r*r*C] into [B, H*r, W*r, C]."""
    b, h, w, c = x.shape
    x = x.reshape(b, h, w, r, r, c // (r * r)).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h * r, w * r, c // (r * r))


def conv(features: int, size: int, name: str) -> nn.Conv:
    return nn.Conv(features, (size, size), padding=size // 2, name=name)


def norm(config: VQConfig, name: str) -> nn.Module:
    if config.norm == "group":
        return nn.GroupNorm(num_groups=32, epsilon=1e-6, name=name)
    return nn.RMSNorm(epsilon=1e-6, name=name)


class ResBlock(nn.Module):
    config: VQConfig
    features: int

    @nn.compact
    def __call__(self, x):
        h = nn.silu(norm(self.config, "norm1")(x))
        h = conv(self.features, 3, "conv1")(h)
        h = nn.silu(norm(self.config, "norm2")(h))
        h = conv(self.features, 3, "conv2")(h)
        if x.shape[-1] != self.features:
            x = conv(self.features, 1, "shortcut")(x)
        return x + h


class AttentionBlock(nn.Module):
    config: VQConfig

    @nn.compact
    def __call__(self, x):
        b, h, w, c = x.shape
        y = norm(self.config, "norm")(x)
        q, k, v = (conv(c, 1, n)(y).reshape(b, h * w, c) for n in ("q", "k", "v"))
        weights = nn.softmax(jnp.einsum("bqc,bkc->bqk", q, k) * c**-0.5, axis=-1)
        y = jnp.einsum("bqk,bkc->bqc", weights, v).reshape(b, h, w, c)
        return x + conv(c, 1, "out")(y)


class Middle(nn.Module):
    config: VQConfig

    @nn.compact
    def __call__(self, x):
        x = ResBlock(self.config, x.shape[-1], name="res_0")(x)
        if self.config.attention != "none":
            x = AttentionBlock(self.config, name="attention")(x)
        return ResBlock(self.config, x.shape[-1], name="res_1")(x)


class Level(nn.Module):
    """The residual blocks of one resolution."""

    config: VQConfig
    level: int
    blocks: int

    @nn.compact
    def __call__(self, x):
        config = self.config
        lowest = self.level == len(config.multipliers) - 1
        for i in range(self.blocks):
            features = config.width * config.multipliers[self.level]
            x = ResBlock(config, features, name=f"res_{i}")(x)
            if lowest and config.attention == "lowest":
                x = AttentionBlock(config, name=f"attention_{i}")(x)
        return x


class Downsample(nn.Module):
    """Halves the resolution; padding as published: right and bottom only."""

    config: VQConfig

    @nn.compact
    def __call__(self, x):
        c = x.shape[-1]
        if self.config.resample == "shuffle":
            return conv(c, 1, "conv")(space_to_depth(x, 2))
        pad = ((0, 1), (0, 1))
        return nn.Conv(c, (3, 3), strides=(2, 2), padding=pad, name="conv")(x)


class Upsample(nn.Module):
    config: VQConfig

    @nn.compact
    def __call__(self, x):
        b, h, w, c = x.shape
        if self.config.resample == "shuffle":
            return depth_to_space(conv(4 * c, 1, "conv")(x), 2)
        x = jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest")
        return conv(c, 3, "conv")(x)


class Encoder(nn.Module):
    config: VQConfig

    @nn.compact
    def __call__(self, x):
        config = self.config
        levels = len(config.multipliers)
        x = space_to_depth(x - config.background, config.patch)
        x = conv(config.width, 3, "conv_in")(x)
        for i in range(levels):
            x = Level(config, i, config.encoder_blocks, name=f"level_{i}")(x)
            if i < levels - 1:
                x = Downsample(config, name=f"down_{i}")(x)
        x = Middle(config, name="middle")(x)
        x = nn.silu(norm(config, "norm_out")(x))
        x = conv(config.latent_width, 3, "conv_out")(x)
        return conv(config.code_width, 1, "to_code")(x)


class Decoder(nn.Module):
    config: VQConfig

    @nn.compact
    def __call__(self, z):
        config = self.config
        levels = len(config.multipliers)
        x = conv(config.latent_width, 1, "from_code")(z)
        x = conv(config.width * config.multipliers[-1], 3, "conv_in")(x)
        x = Middle(config, name="middle")(x)
        for i in reversed(range(levels)):
            x = Level(config, i, config.decoder_blocks, name=f"level_{i}")(x)
            if i > 0:
                x = Upsample(config, name=f"up_{i}")(x)
        x = nn.silu(norm(config, "norm_out")(x))
        x = conv(3 * config.patch**2, 3, "conv_out")(x)
        return depth_to_space(x, config.patch) + config.background


def unit(x: jax.Array) -> jax.Array:
    """L2-normalises the last axis with PyTorch's floor of 1e-12 on the norm."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def nearest(latents: jax.Array, codes: jax.Array) -> jax.Array:
    """Index of the nearest of codes [V, d], int32 [...], for latents [..., d]."""
    # |z - e|^2 without |z|^2, which no code can change.
    dot = latents @ codes.T
    distance = jnp.broadcast_to(jnp.sum(codes**2, -1), dot.shape) - 2 * dot
    return jnp.argmin(distance, axis=-1).astype(jnp.int32)


class VQ(nn.Module):
    """Encoder, quantiser and decoder; call its methods through `apply(method=...)`."""

    config: VQConfig

    def setup(self):
        config = self.config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.codebook = self.param(
            "codebook",
            nn.initializers.normal(1.0),
            (config.codebook_size, config.code_width),
        )

    def __call__(self, images):
        """Round trip [B, H, W, 3] -> [B, H, W, 3]; its `init` makes all parameters."""
        return self.decode(self.encode(images))

    def codes(self) -> jax.Array:
        """The codebook as it is used, [V, code_width] (normalised where it is)."""
        return unit(self.codebook) if self.config.normalize_codes else self.codebook

    def latents(self, images: jax.Array) -> jax.Array:
        """Encoder outputs before quantising, [B, h, w, code_width]."""
        return self.encoder(images)

    def nearest(self, latents: jax.Array) -> jax.Array:
        """Index of the nearest code, int32 [...], for latents [..., code_width]."""
        codes = self.codes()
        if self.config.normalize_codes:
            latents = unit(latents)
        return nearest(latents, codes)

    def encode(self, images: jax.Array) -> jax.Array:
        """Codes [B, h, w] of pictures [B, H, W, 3] in [-1, 1]."""
        return self.nearest(self.latents(images))

    def decode(self, tokens: jax.Array) -> jax.Array:
        """Pictures [B, H, W, 3], about [-1, 1], of code grids [B, h, w]."""
        return self.decode_latents(self.codes()[tokens])

    def decode_latents(self, latents: jax.Array) -> jax.Array:
        """Pictures of quantised latents [B, h, w, code_width]."""
        return self.decoder(latents)


def from_uint8(images: jax.Array) -> jax.Array:
    """Maps 0..255 to float32 in [-1, 1], what the encoder takes."""
    return jnp.asarray(images).astype(jnp.float32) / 127.5 - 1


def to_uint8(images: jax.Array) -> jax.Array:
    """Maps [-1, 1] to 0..255 as LlamaGen's evaluation does: 127.5 x + 128, clamped.

    The clamp comes before the cast: a value just outside the range would wrap.
    """
    return jnp.clip(127.5 * images + 128.0, 0.0, 255.0).astype(jnp.uint8)


def to_uint8_truncated(images: jax.Array) -> jax.Array:
    """Maps [-1, 1] to 0..255 as Tar does: 255 (x / 2 + 1/2), clamped, fractions cut."""
    return (jnp.clip(images * 0.5 + 0.5, 0.0, 1.0) * 255.0).astype(jnp.uint8)
