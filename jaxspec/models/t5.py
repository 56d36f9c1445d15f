"""The T5 encoder: what LlamaGen's text-to-image models read captions with (flan-t5-xl).

T5 v1.1 (Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer", section 2.1; gated GELU after Shazeer 2020): pre-norm
RMSNorm, no biases, a learned bias for each bucket of relative positions that all layers
share, and attention scores that are not scaled.

Scores and norms are float32 whatever the weights are, so bfloat16 is safe; float16 is
not, for states may grow past its range.
Axis legend: B captions, T tokens, K heads, D head width, C width, F hidden, L layers.
"""

import math
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.transformer import attend, gated, in_heads, rms_norm


@dataclass(frozen=True)
class T5Config:
    """Static shape of the encoder.

    Attributes:
      vocab_size: number of tokens.
      width, depth, heads, head_width, hidden: C, L, K, D, F; K * D need not be C.
      buckets: of relative positions, half of them for those that come later.
      max_distance: from which on all positions share the last bucket.
      norm_epsilon: of the RMS norms.
    """

    vocab_size: int
    width: int
    depth: int
    heads: int
    head_width: int
    hidden: int
    buckets: int = 32
    max_distance: int = 128
    norm_epsilon: float = 1e-6


def layer_shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's parameters; vectors are norms."""
    c = config
    inner = c.heads * c.head_width
    return {
        "attention_norm": (c.width,),
        "qkv": (c.width, 3 * inner),
        "attention_out": (inner, c.width),
        "ffn_norm": (c.width,),
        "gate_up": (c.width, 2 * c.hidden),
        "down": (c.hidden, c.width),
    }


def relative_buckets(config: T5Config, length: int) -> np.ndarray:
    """The bucket int32 [T, T] of the position of each key (column) from each query.

    Of either direction's buckets half are for one distance each, and half for ranges
    that grow with its logarithm up to `max_distance`.
    """
    place = np.arange(length)
    offset = place[None] - place[:, None]
    side = config.buckets // 2
    exact = side // 2
    distance = np.abs(offset)
    # float32, as published: rounding decides at the ranges' ends.
    far = np.log(np.maximum(distance, 1).astype(np.float32) / exact)
    far = far / math.log(config.max_distance / exact) * (side - exact)
    far = np.minimum(exact + far.astype(np.int32), side - 1)
    return np.where(offset > 0, side, 0) + np.where(distance < exact, distance, far)


class T5Encoder(nn.Module):
    """Maps tokens [B, T] to states [B, T, C]; pure, used through `apply`."""

    config: T5Config

    @nn.compact
    def __call__(self, tokens: jax.Array, seen: jax.Array) -> jax.Array:
        """Encodes captions.

        Args:
          tokens: int32 [B, T].
          seen: bool [B, T], False at padding; a caption has one token at least.

        Returns:
          States [B, T, C]; those of padding mean nothing.
        """
        c = self.config
        t = tokens.shape[1]
        normal, ones = nn.initializers.normal(0.02), nn.initializers.ones
        table = self.param("token_embedding", normal, (c.vocab_size, c.width))
        buckets = self.param("position_bias", normal, (c.buckets, c.heads))
        layers = {
            name: self.param(name, normal if shape[1:] else ones, (c.depth, *shape))
            for name, shape in layer_shapes(c).items()
        }
        norm = self.param("norm", ones, (c.width,))

        bias = buckets[relative_buckets(c, t)].astype(jnp.float32)
        bias = bias.transpose(2, 0, 1)[None]
        visible = jnp.broadcast_to(seen[:, None], (*tokens.shape, t))

        def body(x, layer):
            h = rms_norm(x, layer["attention_norm"], c.norm_epsilon)
            q, k, v = in_heads(h, layer["qkv"], 3, c.head_width)
            h = attend(q, k, v, visible, scale=1.0, bias=bias)
            h = h.swapaxes(1, 2).reshape(*x.shape[:2], -1)
            x = x + h @ layer["attention_out"]
            h = rms_norm(x, layer["ffn_norm"], c.norm_epsilon)
            # By tanh, which is what "gelu_new" stands for in published settings.
            return x + gated(h, layer["gate_up"], layer["down"], nn.gelu), None

        x, _ = jax.lax.scan(body, table[tokens], layers)
        return rms_norm(x, norm, c.norm_epsilon)
