"""EAGLE's drafter: one layer that goes on from what a target made of the tokens so far.

Li et al. 2024 (EAGLE, arXiv 2401.15077, section 4.1), in the form that LANTERN's
released drafters for LlamaGen have (arXiv 2410.03355): a linear layer with bias joins
the embedding of a token and the target's feature of the slot before it, one Llama layer
without an input norm follows, and no final norm. Its output stands for the target's
feature of the token, which the target's own head reads.

Slot s of the drafter holds the token of the target's slot s + 1: behind P - 1 slots of
the prefix, cell 0 comes first. Axis legend as in `transformer`.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.cache import Cache, through_cache
from jaxspec.models.transformer import (
    TransformerConfig,
    attend,
    attend_causal,
    layer_shapes,
    llama_block,
    turning,
)


def eagle_config(
    target: TransformerConfig, hidden: int | None = None, norm_epsilon: float = 1e-6
) -> TransformerConfig:
    """The drafter's shape for a target's; `hidden` and `norm_epsilon` are its own."""
    return replace(
        target,
        depth=1,
        hidden=target.hidden if hidden is None else hidden,
        prefix_length=target.prefix_length - 1,
        norm_epsilon=norm_epsilon,
    )


class EagleHead(nn.Module):
    """The network; `config` is from `eagle_config`."""

    config: TransformerConfig

    def setup(self):
        c = self.config
        normal, zeros = nn.initializers.normal(0.02), nn.initializers.zeros
        self.token_embedding = self.param(
            "token_embedding", normal, (c.vocab_size, c.width)
        )
        self.join = self.param("join", normal, (2 * c.width, c.width))
        self.join_bias = self.param("join_bias", zeros, (c.width,))
        if c.positions == "learned":
            self.position_embedding = self.param(
                "position_embedding", zeros, (c.slots, c.width)
            )
        self.layer = {
            name: self.param(name, normal if shape[1:] else nn.initializers.ones, shape)
            for name, shape in layer_shapes(c).items()
            if name != "attention_norm"
        }

    def _embed(self, features: jax.Array, tokens: jax.Array, slots: jax.Array):
        x = jnp.concatenate([self.token_embedding[tokens], features], axis=-1)
        x = x @ self.join + jnp.broadcast_to(self.join_bias, features.shape)
        if self.config.positions == "rotary":
            return x
        return x + self.position_embedding[jnp.clip(slots, 0, self.config.slots - 1)]

    def extend(
        self,
        features: jax.Array,
        tokens: jax.Array,
        slots: jax.Array,
        cache: Cache,
        visible: jax.Array,
        places: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Feeds tokens [B, T] behind features [B, T, C]: their features, and the cache.

        The other arguments are those of `Transformer.extend`.
        """
        turn = turning(self.config, places)
        return through_cache(
            lambda layer, x, attention: llama_block(self.config, layer, x, attention),
            [self.layer],
            self._embed(features, tokens, places),
            cache,
            slots,
            lambda q, k, v: attend(turn(q), k, v, visible),
            turn,
        )

    def __call__(self, features: jax.Array, tokens: jax.Array) -> jax.Array:
        """Teacher-forced features [B, T, C] of tokens [B, T] in the first T slots."""
        t = tokens.shape[1]
        slots = jnp.arange(t)[None]
        turn = turning(self.config, slots)
        visible = jnp.tri(t, dtype=bool)[None]
        return llama_block(
            self.config,
            self.layer,
            self._embed(features, tokens, slots),
            lambda q, k, v: attend_causal(turn(q), turn(k), v, visible),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle:
    """A trained drafter, for the target that it was trained with.

    Attributes:
      params: of `EagleHead`.
      config: its shape, from `eagle_config`.
    """

    params: Any = field(repr=False)
    config: TransformerConfig = field(metadata={"static": True})

    def check(self, target: Any) -> None:
        """Refuses another target than it was made for, as far as shapes tell.

        Raises:
          ValueError: the two do not fit.
        """
        if not isinstance(target, TransformerConfig):
            raise ValueError("this drafter was made for another kind of target")
        own, wanted = self.config, eagle_config(target)
        for name in ("vocab_size", "width", "grid", "prefix_length", "positions"):
            found, want = getattr(own, name), getattr(wanted, name)
            if found != want:
                raise ValueError(
                    f"the drafter was made for another target: its {name} is {found}, "
                    f"and this target needs {want}"
                )


__all__ = ["Eagle", "EagleHead", "eagle_config"]
