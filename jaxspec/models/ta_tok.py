"""TA-Tok, the semantic tokenizer of Tar: pictures to text-aligned indices, to features.

Tar (Han et al. 2025, "Vision as a Dialect", arXiv 2506.18898). The encoder is a
SigLIP2 vision tower up to the layer before its last, pooled by 1, 2 or 3; a SimVQ
codebook (learned vectors through one linear layer) gives the indices, which the
language model writes; a three-layer SigLIP2 tower turns them into the features that
AR-DTok draws from.

Pictures are float [B, H, W, 3] in [0, 1], channels last. Axis legend: B pictures, n
indices (a square grid in raster order), C width of towers, d width of codes, V codes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.transformer import attend, in_heads
from jaxspec.models.vq import nearest, unit


@dataclass(frozen=True)
class TowerConfig:
    """Static shape of a SigLIP2 vision transformer.

    Attributes:
      width, depth, heads, hidden: of the layers that are run.
      channels: of what comes in.
      patch: side of the pixel blocks that become one token.
      places: side of the learned grid of positions.
      final_norm: whether a norm follows the last layer.
      norm_epsilon: of the layer norms.
    """

    width: int
    depth: int
    heads: int
    hidden: int
    channels: int
    patch: int
    places: int
    final_norm: bool
    norm_epsilon: float = 1e-6


@dataclass(frozen=True)
class TaTokConfig:
    """Static shape of TA-Tok.

    Attributes:
      image: side of the pictures that the encoder takes, in pixels.
      codebook_size, code_width: V, d.
      normalize_codes: use codes and latents L2-normalised.
      encoder, decoder: the towers, of equal width.
    """

    image: int
    codebook_size: int
    code_width: int
    normalize_codes: bool
    encoder: TowerConfig
    decoder: TowerConfig

    def __post_init__(self):
        """Raises ValueError if the parts do not fit each other."""
        encoder, decoder = self.encoder, self.decoder
        fits = {
            "encoder.places": (encoder.places, self.image // encoder.patch),
            "decoder.width": (decoder.width, encoder.width),
            "decoder.channels": (decoder.channels, self.code_width),
        }
        for name, (found, want) in fits.items():
            if found != want:
                raise ValueError(f"{name} is {found}, but the other parts need {want}")

    def indices(self, pool: int = 1) -> int:
        """How many indices a picture has; Tar's scale s is pool s + 1."""
        return (self.encoder.places // pool) ** 2


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float):
    """Layer norm of x [..., C] in float32, cast back."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    y = y * jnp.broadcast_to(scale, x.shape) + jnp.broadcast_to(bias, x.shape)
    return y.astype(x.dtype)


def resize(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Resizes [B, H, W, C], as torch does bilinearly with antialias, in float32."""
    if x.shape[1:3] == shape:
        return x
    out = (x.shape[0], *shape, x.shape[3])
    y = jax.image.resize(x.astype(jnp.float32), out, "linear", antialias=True)
    return y.astype(x.dtype)


def pool_mean(x: jax.Array, size: int) -> jax.Array:
    """Means of size x size blocks of [B, H, W, C]; what is left over is dropped."""
    b, h, w, c = x.shape
    h, w = h // size, w // size
    x = x[:, : h * size, : w * size].reshape(b, h, size, w, size, c)
    return jnp.mean(x, axis=(2, 4))


def tower_shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's parameters."""
    return {
        "norm1_scale": (width,),
        "norm1_bias": (width,),
        "qkv": (width, 3 * width),
        "qkv_bias": (3 * width,),
        "attention_out": (width, width),
        "attention_out_bias": (width,),
        "norm2_scale": (width,),
        "norm2_bias": (width,),
        "fc1": (width, hidden),
        "fc1_bias": (hidden,),
        "fc2": (hidden, width),
        "fc2_bias": (width,),
    }


def tower_init(name: str):
    """How a parameter of that name begins."""
    if name.endswith("bias"):
        return nn.initializers.zeros
    return nn.initializers.ones if "scale" in name else nn.initializers.normal(0.02)


def tower_block(
    layer: dict[str, jax.Array],
    x: jax.Array,
    attention: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    heads: int,
    epsilon: float,
    approximate: bool = True,
) -> jax.Array:
    """One layer of `tower_shapes`: layer norms, biases, and GELU, as tanh or exactly.

    `attention(q, k, v)` maps [B, K, T, D] to the same.
    """
    b, t, c = x.shape

    def norm(x, name):
        scale, bias = layer[f"{name}_scale"], layer[f"{name}_bias"]
        return layer_norm(x, scale, bias, epsilon)

    def linear(x, name):
        return x @ layer[name] + layer[f"{name}_bias"][None, None]

    qkv, bias = layer["qkv"], layer["qkv_bias"]
    y = attention(*in_heads(norm(x, "norm1"), qkv, 3, c // heads, bias))
    y = y.swapaxes(1, 2)
    x = x + linear(y.reshape(b, t, c), "attention_out")
    y = nn.gelu(linear(norm(x, "norm2"), "fc1"), approximate=approximate)
    return x + linear(y, "fc2")


class Tower(nn.Module):
    """A SigLIP2 vision transformer: [B, H, W, channels] to states [B, h, w, C]."""

    config: TowerConfig

    @nn.compact
    def __call__(self, x):
        c = self.config
        patches = nn.Conv(
            c.width, (c.patch, c.patch), c.patch, padding="VALID", name="patch"
        )
        places = self.param(
            "positions", tower_init("positions"), (c.places**2, c.width)
        )
        layers = {
            name: self.param(name, tower_init(name), (c.depth, *shape))
            for name, shape in tower_shapes(c.width, c.hidden).items()
        }

        x = patches(x)
        b, h, w, _ = x.shape
        places = resize(places.reshape(1, c.places, c.places, c.width), (h, w))
        x = (x + places.astype(x.dtype)).reshape(b, h * w, c.width)
        visible = jnp.ones((1, h * w, h * w), bool)

        def attention(q, k, v):
            return attend(q, k, v, visible)

        def body(x, layer):
            return tower_block(layer, x, attention, c.heads, c.norm_epsilon), None

        x, _ = jax.lax.scan(body, x, layers)
        if c.final_norm:
            ends = ("norm_scale", "norm_bias")
            scale, bias = (self.param(x, tower_init(x), (c.width,)) for x in ends)
            x = layer_norm(x, scale, bias, c.norm_epsilon)
        return x.reshape(b, h, w, c.width)


class TaTok(nn.Module):
    """Encoder, codebook and decoder; call its methods through `apply(method=...)`."""

    config: TaTokConfig

    def setup(self):
        c = self.config
        width = c.encoder.width
        # What pixels are shifted and divided by; 0.5 in the published file.
        self.pixel_shift = self.param(
            "pixel_shift", nn.initializers.constant(0.5), (3,)
        )
        self.pixel_scale = self.param(
            "pixel_scale", nn.initializers.constant(0.5), (3,)
        )
        self.encoder = Tower(c.encoder)
        self.encode_task = nn.Dense(width)
        self.to_code = nn.Dense(c.code_width)
        shape = (c.codebook_size, c.code_width)
        self.codebook = self.param("codebook", nn.initializers.normal(1.0), shape)
        # float32 whatever the weights are: the nearest code is a matter of small steps.
        self.code_proj = nn.Dense(c.code_width, dtype=jnp.float32)
        self.from_code = nn.Dense(c.code_width)
        self.decoder = Tower(c.decoder)
        self.decode_task_in = nn.Dense(width)
        self.decode_task_out = nn.Dense(width)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Features of pictures' own indices; its `init` makes all parameters."""
        return self.decode(self.encode(images))

    def codes(self) -> jax.Array:
        """The codebook as it is used, float32 [V, d]: projected, and normalised."""
        codes = self.code_proj(self.codebook)
        return unit(codes) if self.config.normalize_codes else codes

    def encode(self, images: jax.Array, pool: int = 1) -> jax.Array:
        """Indices int32 [B, n] of pictures [B, H, W, 3] in [0, 1].

        Pictures of another side than `config.image` are resized, not cropped. `pool`
        is the side of the blocks whose features are averaged: Tar's scale plus one.
        """
        side = self.config.image
        x = resize(images.astype(self.codebook.dtype), (side, side))
        shift, scale = self.pixel_shift, self.pixel_scale
        x = (x - shift[None, None, None]) / scale[None, None, None]
        x = pool_mean(self.encoder(x), pool)
        latents = self.to_code(nn.tanh(self.encode_task(x))).astype(jnp.float32)
        latents = latents.reshape(len(x), -1, self.config.code_width)
        latents = unit(latents) if self.config.normalize_codes else latents
        return nearest(latents, self.codes())

    def decode(self, indices: jax.Array) -> jax.Array:
        """Features [B, n, C] of indices int32 [B, n].

        Raises:
          ValueError: n is no square number.
        """
        b, n = indices.shape
        side = math.isqrt(n)
        if side * side != n:
            raise ValueError(f"{n} indices are not a square grid")
        codes = self.codes()[indices].astype(self.codebook.dtype)
        x = self.from_code(codes.reshape(b, side, side, -1))
        x = self.decode_task_in(self.decoder(x))
        return self.decode_task_out(nn.tanh(x)).reshape(b, n, -1)
