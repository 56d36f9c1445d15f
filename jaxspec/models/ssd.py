"""SSD's head: from what a model made of one row to what it will make of the next.

Spatially speculative decoding (SSD, arXiv 2606.20543). s of a cell is the state behind
the last layer, before the final norm, that the model's head reads the cell's token
from; e is the input embedding of that token. The head guesses the s of the cell below:

    z = W [s, e],   s below = z + SwiGLU(RMSNorm(z))

The model's own norm and head make a distribution of it. Axis legend as in
`transformer`.
"""

from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.transformer import TransformerConfig, gated, rms_norm


@dataclass(frozen=True)
class SSDConfig:
    """Static shape of a head.

    Attributes:
      target: of the model that it was trained with.
      hidden: of its feed-forward layer.
    """

    target: TransformerConfig
    hidden: int


class SSDHead(nn.Module):
    """The network, for training and for decoding."""

    config: SSDConfig

    @nn.compact
    def __call__(self, states: jax.Array, embeddings: jax.Array) -> jax.Array:
        """States [B, T, C] of the cells below those with these [B, T, C]."""
        width, hidden = self.config.target.width, self.config.hidden
        normal, zeros = nn.initializers.normal(0.02), nn.initializers.zeros
        join = self.param("join", _same_state, (2 * width, width))
        norm = self.param("norm", nn.initializers.ones, (width,))
        gate_up = self.param("gate_up", normal, (width, 2 * hidden))
        down = self.param("down", zeros, (hidden, width))
        z = jnp.concatenate([states, embeddings], axis=-1) @ join
        epsilon = self.config.target.norm_epsilon
        return z + gated(rms_norm(z, norm, epsilon), gate_up, down)


def _same_state(key: jax.Array, shape: tuple[int, int], dtype=jnp.float32):
    """At first, a cell below is as its own."""
    del key
    return jnp.eye(*shape, dtype=dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Spatial:
    """A trained head, for the target that it was trained with.

    Attributes:
      params: of `SSDHead`.
      config: its shape.
    """

    params: Any = field(repr=False)
    config: SSDConfig = field(metadata={"static": True})

    def check(self, target: Any) -> None:
        """Refuses another target than it was made for, as far as shapes tell.

        Raises:
          ValueError: the two do not fit.
        """
        for name in ("vocab_size", "width", "depth", "grid"):
            found, want = getattr(self.config.target, name), getattr(target, name)
            if found != want:
                raise ValueError(
                    f"the head was made for another target: its {name} is {found}, and "
                    f"this target needs {want}"
                )


__all__ = ["SSDConfig", "SSDHead", "Spatial"]
