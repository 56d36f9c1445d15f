"""The Qwen2 decoder: the language model of Tar-1.5B and Tar-7B.

A Llama-style decoder (Yang et al. 2024, "Qwen2 Technical Report", section 2.2.1):
pre-norm RMSNorm, SwiGLU, rotary positions on half-split pairs, grouped-query attention
and biases on queries, keys and values. Tar (Han et al. 2025) adds image tokens to its
vocabulary and changes nothing else.

Layers are stacked, and taken apart to decode, as in `models.transformer`. Axis legend:
B rows, T tokens fed, S cache slots, K query heads, G key heads (K = G * R), D head
width, C model width, F SwiGLU width, L layers, V tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.cache import Cache, through_cache
from jaxspec.models.transformer import attend, gated, rms_norm, unstack


@dataclass(frozen=True)
class Qwen2Config:
    """Static shape of the network.

    Attributes:
      vocab_size: number of tokens V, those without a meaning among them.
      width, depth, heads, hidden: C, L, K, F.
      key_heads: G; each serves K / G query heads.
      head_width: D.
      tied: the head is the embedding table.
      norm_epsilon: of the RMS norms.
      rotary_base: of the rotary frequencies.
    """

    vocab_size: int
    width: int
    depth: int
    heads: int
    key_heads: int
    head_width: int
    hidden: int
    tied: bool
    norm_epsilon: float = 1e-6
    rotary_base: float = 1e6

    def __post_init__(self):
        """Raises ValueError if the heads cannot be grouped or turned."""
        if self.heads % self.key_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.key_heads} key heads"
            )
        if self.head_width % 2:
            raise ValueError(f"head_width must be even, not {self.head_width}")


def layer_shapes(config: Qwen2Config) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's parameters."""
    c = config
    queries, keys = c.heads * c.head_width, c.key_heads * c.head_width
    return {
        "attention_norm": (c.width,),
        "query": (c.width, queries),
        "query_bias": (queries,),
        "key_value": (c.width, 2 * keys),
        "key_value_bias": (2 * keys,),
        "attention_out": (queries, c.width),
        "ffn_norm": (c.width,),
        "gate_up": (c.width, 2 * c.hidden),
        "down": (c.hidden, c.width),
    }


def unstacked(config: Qwen2Config, params: dict) -> dict:
    """The same parameters with arrays of their own for each layer, to decode with."""
    return unstack(params, layer_shapes(config))


def positions_of(seen: jax.Array) -> jax.Array:
    """Positions int32 [B, T] of tokens, counted from a row's first that is seen.

    `seen` bool [B, T] is False at padding, whose positions mean nothing.
    """
    return jnp.maximum(jnp.cumsum(seen, axis=1, dtype=jnp.int32) - 1, 0)


def causal(seen: jax.Array) -> jax.Array:
    """Which tokens each token sees, bool [B, T, T]: those before it, no padding.

    Each sees itself too: a padding token that saw nothing would be NaN.
    """
    t = seen.shape[1]
    before = jnp.tril(jnp.ones((1, t, t), bool))
    return (before & seen[:, None]) | jnp.eye(t, dtype=bool)[None]


def rotary(positions: jax.Array, width: int, base: float) -> tuple[jax.Array, ...]:
    """Cosines and sines, float32 [B, 1, T, D/2], of positions [B, T]."""
    frequency = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = positions[:, None, :, None] * frequency[None, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + D/2) of x [B, K, T, D]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return out.astype(x.dtype)


def attend_grouped(
    q: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array
) -> jax.Array:
    """`attend` of q [B, K, T, D] to key and value [B, G, S, D]: [B, K, T, D].

    The R queries of a group stand one after the other along T, so that no key is
    copied. `visible` is [B, T, S].
    """
    b, k, t, d = q.shape
    g = key.shape[1]
    q = q.reshape(b, g, k // g * t, d)
    out = attend(q, key, value, jnp.tile(visible, (1, k // g, 1)))
    return out.reshape(b, k, t, d)


class Qwen2(nn.Module):
    """The network; pure, used through `apply(params, ..., method=...)`.

    A decoder calls `embed`, `extend` against the cache, and `logits` for what follows;
    a call of the whole is teacher-forced.
    """

    config: Qwen2Config

    def setup(self):
        c = self.config
        normal = nn.initializers.normal(0.02)

        def init(name):
            if name.endswith("bias"):
                return nn.initializers.zeros
            return nn.initializers.ones if name.endswith("norm") else normal

        self.token_embedding = self.param(
            "token_embedding", normal, (c.vocab_size, c.width)
        )
        if self.has_variable("params", "layers"):  # `unstacked`
            self.layers = self.get_variable("params", "layers")
        else:
            self.layers = {
                name: self.param(name, init(name), (c.depth, *shape))
                for name, shape in layer_shapes(c).items()
            }
        self.norm = self.param("norm", nn.initializers.ones, (c.width,))
        if not c.tied:
            self.head = self.param("head", normal, (c.width, c.vocab_size))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Input embeddings [B, T, C] of tokens [B, T]."""
        return self.token_embedding[tokens]

    def _block(self, layer: dict[str, jax.Array], x: jax.Array, attention: Callable):
        """One layer; `attention(q, k, v)` maps [B, K or G, T, D] to [B, K, T, D]."""
        c = self.config
        b, t, _ = x.shape

        def project(h, name):
            h = h @ layer[name] + layer[f"{name}_bias"][None, None]
            return h.reshape(b, t, -1, c.head_width).swapaxes(1, 2)

        with jax.named_scope("attention"):
            h = rms_norm(x, layer["attention_norm"], c.norm_epsilon)
            key, value = jnp.split(project(h, "key_value"), 2, axis=1)
            h = attention(project(h, "query"), key, value)
            h = h.swapaxes(1, 2).reshape(b, t, -1)
            x = x + h @ layer["attention_out"]
        with jax.named_scope("feed_forward"):
            h = rms_norm(x, layer["ffn_norm"], c.norm_epsilon)
            return x + gated(h, layer["gate_up"], layer["down"])

    def _turn(self, positions: jax.Array) -> Callable[[jax.Array], jax.Array]:
        cos, sin = rotary(positions, self.config.head_width, self.config.rotary_base)
        return lambda x: rotate_halves(x, cos, sin)

    def extend(
        self,
        x: jax.Array,
        positions: jax.Array,
        slots: jax.Array,
        cache: Cache,
        visible: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Feeds inputs to `unstacked` layers, writes their slots, reads what follows.

        Args:
          x: input embeddings [B, T, C].
          positions: int32 [B, T], of each row's own text.
          slots: int32 [B, T], where to write; a slot of S or more is not written.
          cache: keys and values [B, G, S, D] of all slots.
          visible: bool [B, T, S], which slots each input sees, its own among them.

        Returns:
          States [B, T, C] before the final norm (for `logits`), and the cache.
        """
        turn, layers = self._turn(positions), self.layers
        return through_cache(
            self._block,
            cast(tuple, layers),
            x,
            cache,
            slots,
            lambda q, k, v: attend_grouped(turn(q), k, v, visible),
            turn,
        )

    def logits(self, states: jax.Array) -> jax.Array:
        """float32 logits [..., V] of the token after each state [..., C]."""
        h = rms_norm(states, self.norm, self.config.norm_epsilon)
        head = self.token_embedding.T if self.config.tied else self.head
        return (h @ head).astype(jnp.float32)

    def __call__(self, tokens: jax.Array, seen: jax.Array | None = None) -> jax.Array:
        """Teacher-forced logits [B, T, V] of the tokens after tokens [B, T].

        `seen` bool [B, T] is False at padding, on either side.
        """
        return self.logits(self.states(tokens, seen))

    def states(self, tokens: jax.Array, seen: jax.Array | None = None) -> jax.Array:
        """Teacher-forced states [B, T, C] before the final norm; arguments as above."""
        if seen is None:
            seen = jnp.ones(tokens.shape, bool)
        turn, visible = self._turn(positions_of(seen)), causal(seen)

        def attention(q, k, v):
            return attend_grouped(turn(q), turn(k), v, visible)

        def body(x, layer):
            return self._block(layer, x, attention), None

        return jax.lax.scan(body, self.embed(tokens), self.layers)[0]


def empty_cache(config: Qwen2Config, batch: int, slots: int, dtype) -> Cache:
    """A cache of this many slots for `Qwen2.extend`."""
    shape = (batch, config.key_heads, slots, config.head_width)
    return Cache.zeros(config.depth, shape, dtype)
