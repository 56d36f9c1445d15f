"""A Llama-style language model: Tar's Qwen2 and Chameleon, by configuration.

Pre-norm RMSNorm, SwiGLU, rotary positions on half-split pairs and grouped-query
attention (Touvron et al. 2023, arXiv 2302.13971, section 2.2; Ainslie et al. 2023,
arXiv 2305.13245), with what some add: biases on queries, keys and values, a LayerNorm
of every query and key head, and norms of what a branch returns in place of what it
takes.

Layers are stacked, and taken apart to decode, as in `models.transformer`. Axis legend:
B rows, T tokens fed, S cache slots, K query heads, G key heads (K = G * R), D head
width, C model width, F SwiGLU width, L layers, V tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.cache import Cache, through_cache
from jaxspec.models.int8 import matmul, parameter
from jaxspec.models.stacks import run, unstack
from jaxspec.models.transformer import attend, gated, in_heads, rms_norm


@dataclass(frozen=True)
class LlamaConfig:
    """Static shape of the network.

    Attributes:
      vocab_size: number of tokens V, those without a meaning among them.
      width, depth, heads, hidden: C, L, K, F.
      key_heads: G; each serves K / G query heads.
      head_width: D.
      tied: the head is the embedding table.
      norm_epsilon: of the RMS norms.
      rotary_base: of the rotary frequencies.
      biases: of queries, keys and values.
      head_norms: queries and keys go through a LayerNorm of each head before they are
        turned; how many (scale, bias) pairs of width D each side has. A pair serves as
        many heads as come on it. None is no such norm.
      output_norms: the RMS norms are of what attention and feed-forward layer return,
        before it is added, as in Swin Transformer V2 (arXiv 2111.09883, section 3.2).
    """

    vocab_size: int
    width: int
    depth: int
    heads: int
    key_heads: int
    head_width: int
    hidden: int
    tied: bool
    norm_epsilon: float = 1e-5
    rotary_base: float = 1e4
    biases: bool = False
    head_norms: tuple[int, int] | None = None
    output_norms: bool = False

    def __post_init__(self):
        """Raises ValueError if the heads cannot be grouped, turned or normalised."""
        if self.heads % self.key_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.key_heads} key heads"
            )
        if self.head_width % 2:
            raise ValueError(f"head_width must be even, not {self.head_width}")
        sides = zip(("query", "key"), (self.heads, self.key_heads), strict=True)
        for (side, heads), norms in zip(sides, self.head_norms or (), strict=False):
            if norms < 1 or heads % norms:
                raise ValueError(f"{heads} {side} heads cannot share {norms} norms")


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's parameters."""
    c = config
    queries, keys = c.heads * c.head_width, c.key_heads * c.head_width
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (c.width,),
        "query": (c.width, queries),
        "key_value": (c.width, 2 * keys),
        "attention_out": (queries, c.width),
        "ffn_norm": (c.width,),
        "gate_up": (c.width, 2 * c.hidden),
        "down": (c.hidden, c.width),
    }
    if c.biases:
        shapes |= {"query_bias": (queries,), "key_value_bias": (2 * keys,)}
    for side, norms in zip(("query", "key"), c.head_norms or (), strict=False):
        for name in (f"{side}_norm", f"{side}_norm_bias"):
            shapes[name] = (norms, c.head_width)
    return shapes


def unstacked(config: LlamaConfig, params: dict) -> dict:
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


def head_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """LayerNorm of every head of x [B, K, T, D], in float32, cast back, then scaled.

    `scale` and `bias` are [n, D], each row for K / n heads that follow each other.
    """
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    each = x.shape[1] // scale.shape[0]
    scale, bias = (jnp.repeat(p, each, axis=0)[None, :, None] for p in (scale, bias))
    return y.astype(x.dtype) * scale + bias


def block(
    config: LlamaConfig,
    layer: dict[str, jax.Array],
    x: jax.Array,
    attention: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """One layer; `attention(q, k, v)` maps [B, K or G, T, D] to [B, K, T, D]."""
    b, t, _ = x.shape

    def heads(h, name, parts=1):
        bias = layer[f"{name}_bias"] if config.biases else None
        return in_heads(h, layer[name], parts, config.head_width, bias)

    def normed(h, name):
        if config.head_norms is None:
            return h
        return head_norm(h, layer[f"{name}_norm"], layer[f"{name}_norm_bias"])

    def attended(h):
        (query,), (key, value) = heads(h, "query"), heads(h, "key_value", 2)
        h = attention(normed(query, "query"), normed(key, "key"), value)
        h = h.swapaxes(1, 2).reshape(b, t, -1)
        return matmul(h, layer["attention_out"])

    def branch(run, norm):
        scaled = lambda h: rms_norm(h, layer[norm], config.norm_epsilon)
        return scaled(run(x)) if config.output_norms else run(scaled(x))

    with jax.named_scope("attention"):
        x = x + branch(attended, "attention_norm")
    with jax.named_scope("feed_forward"):
        return x + branch(
            lambda h: gated(h, layer["gate_up"], layer["down"]), "ffn_norm"
        )


def turning(
    config: LlamaConfig, positions: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """The rotary embedding of positions [B, T]."""
    cos, sin = rotary(positions, config.head_width, config.rotary_base)
    return lambda x: rotate_halves(x, cos, sin)


def extend(
    config: LlamaConfig,
    layers: Iterable[dict[str, jax.Array]],
    x: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    cache: Cache,
    visible: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Feeds inputs to `unstacked` layers, writes their slots, reads what follows.

    Args:
      config: of the network.
      layers: parameters of each.
      x: input embeddings [B, T, C].
      positions: int32 [B, T], of each row's own text.
      slots: int32 [B, T], where to write; a slot of S or more is not written.
      cache: keys and values [B, G, S, D] of all slots.
      visible: bool [B, T, S], which slots each input sees, its own among them.

    Returns:
      States [B, T, C] before the final norm, and the cache.
    """
    turn = turning(config, positions)
    return through_cache(
        partial(block, config),
        layers,
        x,
        cache,
        slots,
        lambda q, k, v: attend_grouped(turn(q), k, v, visible),
        turn,
    )


def uncached(
    config: LlamaConfig, positions: jax.Array, visible: jax.Array
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Attention of whole rows [B, T] to themselves, where `visible` [B, T, T]."""
    turn = turning(config, positions)
    return lambda q, k, v: attend_grouped(turn(q), turn(k), v, visible)


class Llama(nn.Module):
    """The network; pure, used through `apply(params, ..., method=...)`.

    A decoder calls `embed`, `extend` against the cache, and `logits` for what follows;
    a call of the whole is teacher-forced.
    """

    config: LlamaConfig

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
            self.head = parameter(self, "head", normal, (c.width, c.vocab_size))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Input embeddings [B, T, C] of tokens [B, T]."""
        return self.token_embedding[tokens]

    def extend(
        self,
        x: jax.Array,
        positions: jax.Array,
        slots: jax.Array,
        cache: Cache,
        visible: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """The function `extend` with this network's layers, which are `unstacked`."""
        layers = cast(tuple, self.layers)
        return extend(self.config, layers, x, positions, slots, cache, visible)

    def logits(self, states: jax.Array) -> jax.Array:
        """float32 logits [..., V] of the token after each state [..., C]."""
        h = rms_norm(states, self.norm, self.config.norm_epsilon)
        head = self.token_embedding.T if self.config.tied else self.head
        return matmul(h, head).astype(jnp.float32)

    def __call__(self, tokens: jax.Array, seen: jax.Array | None = None) -> jax.Array:
        """Teacher-forced logits [B, T, V] of the tokens after tokens [B, T].

        `seen` bool [B, T] is False at padding, on either side.
        """
        return self.logits(self.states(tokens, seen))

    def states(self, tokens: jax.Array, seen: jax.Array | None = None) -> jax.Array:
        """Teacher-forced states [B, T, C] before the final norm; arguments as above."""
        if seen is None:
            seen = jnp.ones(tokens.shape, bool)
        attention = uncached(self.config, positions_of(seen), causal(seen))

        def each(layer, x, index):
            del index
            return block(self.config, layer, x, attention)

        return run(each, self.layers, self.embed(tokens))


def empty_cache(config: LlamaConfig, batch: int, slots: int, dtype) -> Cache:
    """A cache of this many slots for `extend`."""
    shape = (batch, config.key_heads, slots, config.head_width)
    return Cache.zeros(config.depth, shape, dtype)
