"""EAGLE's drafter: one layer that goes on from what a target made of the tokens so far.

Li et al. 2024 (EAGLE, arXiv 2401.15077, section 4.1), in the form that LANTERN's
released drafters for LlamaGen have (arXiv 2410.03355): a linear layer with bias joins
the embedding of a token and the target's feature of the slot before it, one Llama layer
without an input norm follows, and no final norm. Its output stands for the target's
feature of the token, which the target's own head reads. For Chameleon the layer is one
of its own, input norm and all.

Slot s of the drafter holds the token of the target's slot s + 1: behind P - 1 slots of
the prefix, cell 0 comes first. Axis legend as in `transformer`.
"""

from dataclasses import dataclass, field, replace
from typing import Any, overload

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models import llama
from jaxspec.models.cache import Cache, through_cache
from jaxspec.models.chameleon import ChameleonGridConfig, rotary_positions
from jaxspec.models.transformer import (
    TransformerConfig,
    attend,
    attend_causal,
    layer_shapes,
    llama_block,
    turning,
)

EagleConfig = TransformerConfig | ChameleonGridConfig


@overload
def eagle_config(
    target: TransformerConfig,
    hidden: int | None = ...,
    norm_epsilon: float | None = ...,
) -> TransformerConfig: ...
@overload
def eagle_config(
    target: ChameleonGridConfig,
    hidden: int | None = ...,
    norm_epsilon: float | None = ...,
) -> ChameleonGridConfig: ...
def eagle_config(
    target: EagleConfig, hidden: int | None = None, norm_epsilon: float | None = None
) -> EagleConfig:
    """The drafter's shape for a target's; `hidden` and `norm_epsilon` are its own.

    By default a Chameleon's has the target's `norm_epsilon`, and another has 1e-6, as
    released. Of a Chameleon's prompt, which has any length, `Eagle.behind` tells slots.
    """
    if isinstance(target, ChameleonGridConfig):
        own = target.language
        hidden = own.hidden if hidden is None else hidden
        epsilon = own.norm_epsilon if norm_epsilon is None else norm_epsilon
        own = replace(own, depth=1, hidden=hidden, norm_epsilon=epsilon)
        return replace(target, language=own, prefix_length=0)
    return replace(
        target,
        depth=1,
        hidden=target.hidden if hidden is None else hidden,
        prefix_length=target.prefix_length - 1,
        norm_epsilon=1e-6 if norm_epsilon is None else norm_epsilon,
    )


class EagleHead(nn.Module):
    """The network; `config` is from `eagle_config`."""

    config: TransformerConfig

    @nn.nowrap
    def prompt(
        self, condition: jax.Array, seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens of the prefix's slots and which are seen, int32 and bool [R, P - 1].

        As released, the tokens are code 0, and all of them are seen.
        """
        del condition
        shape = (len(seen), self.config.prefix_length)
        return jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool)

    @nn.nowrap
    def words(self, codes: jax.Array) -> jax.Array:
        """What codes are called here."""
        return codes

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
        x = joined(self.token_embedding[tokens], features, self.join, self.join_bias)
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


def joined(
    tokens: jax.Array, features: jax.Array, weights: jax.Array, bias: jax.Array
) -> jax.Array:
    """What the layer reads of embeddings and features [B, T, C]."""
    x = jnp.concatenate([tokens, features], axis=-1)
    return x @ weights + jnp.broadcast_to(bias, features.shape)


class ChameleonEagleHead(nn.Module):
    """The network for a Chameleon, as LANTERN's released drafter for Anole.

    Its layer is Chameleon's, with the norm of what it reads and norms of the heads. Its
    tokens are the language model's, since it reads the prompt's words too; padding is
    not seen, and positions count from a row's first word.
    """

    config: ChameleonGridConfig

    @nn.nowrap
    def prompt(
        self, condition: jax.Array, seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """As `EagleHead.prompt`: the prompt's words after the first of each row."""
        return condition[:, 1:], seen[:, :-1]

    @nn.nowrap
    def words(self, codes: jax.Array) -> jax.Array:
        """Tokens of codes, which may be newlines."""
        return self.config.words(codes)

    def setup(self):
        c = self.config.language
        normal, zeros = nn.initializers.normal(0.02), nn.initializers.zeros
        self.token_embedding = self.param(
            "token_embedding", normal, (c.vocab_size, c.width)
        )
        self.join = self.param("join", normal, (2 * c.width, c.width))
        self.join_bias = self.param("join_bias", zeros, (c.width,))

        def init(name):
            if name.endswith("bias"):
                return zeros
            return nn.initializers.ones if name.endswith("norm") else normal

        self.layer = {
            name: self.param(name, init(name), shape)
            for name, shape in llama.layer_shapes(c).items()
        }

    def _embed(self, features: jax.Array, tokens: jax.Array) -> jax.Array:
        return joined(self.token_embedding[tokens], features, self.join, self.join_bias)

    def extend(
        self,
        features: jax.Array,
        tokens: jax.Array,
        slots: jax.Array,
        cache: Cache,
        visible: jax.Array,
        places: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """As `EagleHead.extend`."""
        positions = rotary_positions(self.config, places, visible)
        x, language = self._embed(features, tokens), self.config.language
        return llama.extend(language, [self.layer], x, positions, slots, cache, visible)

    def __call__(
        self, features: jax.Array, tokens: jax.Array, seen: jax.Array | None = None
    ) -> jax.Array:
        """As `EagleHead.__call__`; `seen` bool [B, T] is False at padding."""
        seen = jnp.ones(tokens.shape, bool) if seen is None else seen
        language, positions = self.config.language, llama.positions_of(seen)
        attention = llama.uncached(language, positions, llama.causal(seen))
        return llama.block(
            language, self.layer, self._embed(features, tokens), attention
        )


def head_of(config: EagleConfig) -> EagleHead | ChameleonEagleHead:
    """The network of a drafter's configuration."""
    if isinstance(config, ChameleonGridConfig):
        return ChameleonEagleHead(config)
    return EagleHead(config)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle:
    """A trained drafter, for the target that it was trained with.

    Attributes:
      params: of its network.
      config: its shape, from `eagle_config`.
    """

    params: Any = field(repr=False)
    config: EagleConfig = field(metadata={"static": True})

    def behind(self, slots: int) -> EagleHead | ChameleonEagleHead:
        """Its network, for images whose prefix has this many slots."""
        if isinstance(self.config, ChameleonGridConfig):
            return ChameleonEagleHead(replace(self.config, prefix_length=slots - 1))
        return EagleHead(self.config)

    def check(self, target: Any) -> None:
        """Refuses another target than it was made for, as far as shapes tell.

        Raises:
          ValueError: the two do not fit.
        """
        own: Any = self.config
        if type(target) is not type(own):
            raise ValueError("this drafter was made for another kind of target")
        wanted, names = eagle_config(target), _KINDS[type(own)]
        for name in ("vocab_size", "width", "grid", *names):
            found, want = getattr(own, name), getattr(wanted, name)
            if found != want:
                raise ValueError(
                    f"the drafter was made for another target: its {name} is {found}, "
                    f"and this target needs {want}"
                )


# What else of a target its drafter must know.
_KINDS: dict[type, tuple[str, ...]] = {
    TransformerConfig: ("prefix_length", "positions"),
    ChameleonGridConfig: ("first", "newline"),
}

__all__ = ["ChameleonEagleHead", "Eagle", "EagleConfig", "EagleHead"]
__all__ += ["eagle_config", "head_of"]
