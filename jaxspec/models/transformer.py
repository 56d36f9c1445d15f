"""The autoregressive image transformer: LlamaGen's and Tar's AR-DTok, by configuration.

A Llama-style decoder over [condition prefix, image tokens in raster order]: pre-norm
RMSNorm, SwiGLU, no biases, untied head. LlamaGen (Sun et al. 2024, section 3.2) takes a
class or caption prefix and 2-D rotary positions; AR-DTok (Han et al. 2025, Tar) takes
projected features and a learned table of absolute positions.

Training has layers stacked along a leading axis, under `lax.scan`; decoding has them
apart (see `unstacked`), one after the other. Axis legend: B images, T tokens fed, P
prefix slots, N cells, S = P + N slots, K heads, D head width, C model width, F SwiGLU
width, L layers, V codes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.cache import Cache, through_cache
from jaxspec.models.int8 import Int8, matmul, parameter
from jaxspec.models.stacks import run, split, unstack


@dataclass(frozen=True)
class TransformerConfig:
    """Static shape of the network.

    Attributes:
      vocab_size: number of codes V.
      width, depth, heads, hidden: C, L, K, F.
      grid: rows and columns of the token grid.
      prefix: what conditions the picture. "class": one label, the last row of the
        table is the null class. "features": P vectors through one linear layer with
        bias; null is zeros. "caption": P vectors, padded on the left, through a
        two-layer MLP; null is a learned set of vectors.
      prefix_length: P.
      prefix_width: width of one condition vector; the number of classes for "class".
      positions: "learned" table of P + N - 1 rows, or LlamaGen's "rotary" by row and
        column, with zero rows for the prefix.
      norm_epsilon: of the RMS norms.
      rotary_base: of the rotary frequencies.
      newline: the grid's last column is newlines, the last code: see
        `jaxspec.decoding.grammar`.
    """

    vocab_size: int
    width: int
    depth: int
    heads: int
    hidden: int
    grid: tuple[int, int]
    prefix: Literal["class", "features", "caption"]
    prefix_length: int
    prefix_width: int
    positions: Literal["learned", "rotary"]
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    newline: bool = False

    @property
    def cells(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def slots(self) -> int:
        return self.prefix_length + self.cells

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        return self.heads


def swiglu_hidden(width: int, multiple_of: int = 256) -> int:
    """Hidden width of a Llama feed-forward layer: 8/3 of the width, rounded up."""
    return -(-int(2 * 4 * width / 3) // multiple_of) * multiple_of


def llama_block(
    config: TransformerConfig,
    layer: dict[str, jax.Array],
    x: jax.Array,
    attention: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    drop: Callable[[int, jax.Array], jax.Array] = lambda branch, h: h,
) -> jax.Array:
    """One layer of `layer_shapes`; a layer without "attention_norm" has no norm there.

    `attention(q, k, v)` maps [B, K, T, D] to the same.
    """
    b, t, _ = x.shape
    with jax.named_scope("attention"):
        h = x
        if "attention_norm" in layer:
            h = rms_norm(h, layer["attention_norm"], config.norm_epsilon)
        h = attention(*in_heads(h, layer["qkv"], 3, config.head_width))
        h = h.swapaxes(1, 2).reshape(b, t, -1)
        x = x + drop(0, matmul(h, layer["attention_out"]))
    with jax.named_scope("feed_forward"):
        h = rms_norm(x, layer["ffn_norm"], config.norm_epsilon)
        x = x + drop(1, gated(h, layer["gate_up"], layer["down"]))
    return x


def in_heads(
    x: jax.Array,
    weight: jax.Array | Int8,
    parts: int,
    head_width: int,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """What so many matrices side by side make of x [B, T, C]: each [B, K, T, D].

    `weight` is [C, parts * K * D], or [C, parts, K * D]; `bias` has no C.
    """
    h = matmul(x, weight)
    if bias is not None:
        h = h + bias.reshape(1, 1, *h.shape[2:])
    h = h.reshape(*x.shape[:2], parts, -1, head_width)
    return tuple(h[:, :, i].swapaxes(1, 2) for i in range(parts))


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """RMS norm as published: in float32, cast back, then scaled."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    return y.astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


def rotary_table(config: TransformerConfig) -> np.ndarray:
    """LlamaGen's 2-D rotary table: (cos, sin) [S, D/2, 2], zero in the prefix rows.

    The first half of the pairs turns with the row, the second with the column. The
    zeros are LlamaGen's own: they make queries and keys of the prefix exactly zero.
    """
    half = config.head_width // 2
    frequency = config.rotary_base ** (-np.arange(0, half, 2)[: half // 2] / half)
    row, column = np.divmod(np.arange(config.cells), config.grid[1])
    angle = np.concatenate(
        [row[:, None] * frequency, column[:, None] * frequency], axis=1
    )
    table = np.zeros((config.slots, half, 2), np.float32)
    table[config.prefix_length :] = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return table


def rotate(x: jax.Array, table: jax.Array) -> jax.Array:
    """Turns interleaved pairs (2i, 2i+1) of x [B, K, T, D] by table [B, T, D/2, 2]."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    cos, sin = table[:, None, ..., 0], table[:, None, ..., 1]
    a, b = pairs[..., 0], pairs[..., 1]
    out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return out.reshape(x.shape).astype(x.dtype)


def turning(
    config: TransformerConfig, slots: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """The rotary embedding of the given slots [B, T]; identity without one."""
    if config.positions == "learned":
        return lambda x: x
    table = jnp.asarray(rotary_table(config))
    table = table[jnp.clip(slots, 0, config.slots - 1)]
    return lambda x: rotate(x, table)


def attend(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    scale: float | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Attention of q [B, K, T, D] to key and value [B, K, S, D]: [B, K, T, D].

    `visible` [B or 1, T, S] says which slots a query may see; each must see one. Scores
    are multiplied by `scale`, 1 / sqrt(D) by default, and `bias` [B or 1, K, T, S] is
    added to them.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("bktd,bksd->bkts", q, key, preferred_element_type=jnp.float32)
    scores = scores * scale if bias is None else scores * scale + bias
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkts,bksd->bktd", weights, value)


def attend_causal(q, key, value, visible, blocks: int = 4) -> jax.Array:
    """`attend` over a whole causal sequence (S = T), skipping what cannot be seen.

    Queries go in blocks; each meets only the keys up to its own end, which saves
    nearly half of the products.
    """
    edges = np.linspace(0, q.shape[2], blocks + 1).astype(int)
    parts = [
        attend(q[:, :, a:b], key[:, :, :b], value[:, :, :b], visible[:, a:b, :b])
        for a, b in zip(edges[:-1], edges[1:], strict=True)
        if b > a
    ]
    return jnp.concatenate(parts, axis=2)


def gated(
    x: jax.Array,
    gate_up: jax.Array | Int8,
    down: jax.Array | Int8,
    activation=nn.silu,
) -> jax.Array:
    """Gated feed-forward layer (SwiGLU by default) of x [..., C].

    `gate_up` is [C, 2F] or [C, 2, F].
    """
    h = matmul(x, gate_up).reshape(*x.shape[:-1], 2, -1)
    return matmul(activation(h[..., 0, :]) * h[..., 1, :], down)


def layer_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's parameters; there are no biases, so vectors are norms."""
    c = config
    return {
        "attention_norm": (c.width,),
        "qkv": (c.width, 3 * c.width),
        "attention_out": (c.width, c.width),
        "ffn_norm": (c.width,),
        "gate_up": (c.width, 2 * c.hidden),
        "down": (c.hidden, c.width),
    }


def unstacked(config: TransformerConfig, params: dict) -> dict:
    """The same parameters with arrays of their own for each layer, to decode with.

    As with `Cache`, every pass would otherwise copy all layers out of their stack,
    which adds half where reading the weights is the limit. Parameters as
    `jaxspec.load` returns them have such arrays already and stay as they are.
    """
    return unstack(params, layer_shapes(config))


def extend_layers(
    config: TransformerConfig,
    layers: Iterable[dict[str, jax.Array]],
    x: jax.Array,
    slots: jax.Array,
    cache: Cache,
    visible: jax.Array,
    places: jax.Array,
) -> tuple[jax.Array, Cache]:
    """`Transformer.extend` by some `unstacked` layers, with a cache of theirs."""
    turn = turning(config, places)
    return through_cache(
        partial(llama_block, config),
        layers,
        x,
        cache,
        slots,
        lambda q, k, v: attend(turn(q), k, v, visible),
        turn,
    )


def forced_layers(
    config: TransformerConfig,
    layers: Any,
    x: jax.Array,
    visible: jax.Array,
    drop: Callable[[jax.Array, int, jax.Array], jax.Array] | None = None,
    causal: bool = True,
) -> jax.Array:
    """States [B, S, C] that layers make of inputs x in the first S slots.

    Args:
      config: of the network; its depth does not matter.
      layers: stacked along their first axis, or `unstacked`.
      x: [B, S, C].
      visible: bool [B or 1, S, S], which slots each input sees.
      drop: as for `Transformer.__call__`.
      causal: no input sees a slot behind its own, which saves work.
    """
    turn = turning(config, jnp.arange(x.shape[1])[None])
    read = attend_causal if causal else attend

    def attention(q, k, v):
        return read(turn(q), turn(k), v, visible)

    def block(layer, x, index):
        def branch(i, h):
            return h if drop is None else drop(index, i, h)

        return llama_block(config, layer, x, attention, branch)

    return run(block, layers, x)


class Transformer(nn.Module):
    """The network; pure, used through `apply(params, ..., method=...)`.

    A decoder calls `prefix` and `embed` for inputs, `extend` to run them against the
    cache, and `logits` for what follows. Training calls it as a whole.
    """

    config: TransformerConfig

    @nn.nowrap
    def prepared(self, params: dict) -> dict:
        """The parameters as decoding takes them: `unstacked`."""
        return unstacked(self.config, params)

    def setup(self):
        c = self.config
        normal, ones = nn.initializers.normal(0.02), nn.initializers.ones

        self.token_embedding = self.param(
            "token_embedding", normal, (c.vocab_size, c.width)
        )
        if c.positions == "learned":
            self.position_embedding = self.param(
                "position_embedding", normal, (c.slots - 1, c.width)
            )
        if c.prefix == "class":
            self.class_embedding = self.param(
                "class_embedding", normal, (c.prefix_width + 1, c.width)
            )
        elif c.prefix == "features":
            self.prefix_proj = self.param(
                "prefix_proj", normal, (c.prefix_width, c.width)
            )
            self.prefix_bias = self.param(
                "prefix_bias", nn.initializers.zeros, (c.width,)
            )
        else:
            self.prefix_in = self.param("prefix_in", normal, (c.prefix_width, c.width))
            self.prefix_out = self.param("prefix_out", normal, (c.width, c.width))
            self.prefix_null = self.param(
                "prefix_null", normal, (c.prefix_length, c.prefix_width)
            )
        if self.has_variable("params", "layers"):  # `unstacked`
            self.layers = self.get_variable("params", "layers")
        else:
            self.layers = {
                name: self.param(name, normal if shape[1:] else ones, (c.depth, *shape))
                for name, shape in layer_shapes(c).items()
            }
        self.norm = self.param("norm", ones, (c.width,))
        self.head = parameter(self, "head", normal, (c.width, c.vocab_size))

    # Inputs.

    def prefix(self, condition: jax.Array) -> jax.Array:
        """Prefix embeddings [B, P, C] of a condition.

        `condition` is int32 [B] class labels, or float [B, P, prefix_width] vectors.
        """
        kind = self.config.prefix
        if kind == "class":
            x = self.class_embedding[condition][:, None]
        elif kind == "features":
            x = condition @ self.prefix_proj + self.prefix_bias[None, None]
        else:
            x = nn.gelu(condition @ self.prefix_in, approximate=True) @ self.prefix_out
        slots = jnp.arange(self.config.prefix_length)
        return self._place(x, jnp.broadcast_to(slots, x.shape[:2]))

    def null(self, condition: jax.Array) -> jax.Array:
        """The condition that stands for no condition, shaped as `condition`."""
        kind = self.config.prefix
        if kind == "class":
            return jnp.full_like(condition, self.config.prefix_width)
        if kind == "features":
            return jnp.zeros_like(condition)
        return jnp.broadcast_to(self.prefix_null, condition.shape)

    def embed(self, tokens: jax.Array, cells: jax.Array) -> jax.Array:
        """Input embeddings [B, T, C] of tokens [B, T] at grid cells [B, T]."""
        slots = cells + self.config.prefix_length
        return self._place(self.token_embedding[tokens], slots)

    def _place(self, x: jax.Array, slots: jax.Array) -> jax.Array:
        """Adds the position of each slot; the last cell is never fed and has none."""
        if self.config.positions == "rotary":
            return x
        last = self.config.slots - 2
        return x + self.position_embedding[jnp.clip(slots, 0, last)]

    # The trunk.

    def extend(
        self,
        x: jax.Array,
        slots: jax.Array,
        cache: Cache,
        visible: jax.Array,
        places: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Feeds inputs, writes their slots, and reads what follows them.

        Args:
          x: input embeddings [B, T, C], from `prefix` or `embed`.
          slots: int32 [B, T], where to write; a slot of S or more is not written.
          cache: keys and values of all slots; donate it at the jit boundary.
          visible: bool [B, T, S], which slots each input sees, its own among them (all
            inputs are written before any is read).
          places: int32 [B, T], the slots whose rotary positions they have; their own,
            unless they are written to scratch slots.

        Returns:
          States [B, T, C] before the final norm (for `logits`), and the cache.
        """
        layers = self.layers
        if not isinstance(layers, tuple):
            layers = split(layers)
        places = slots if places is None else places
        return extend_layers(self.config, layers, x, slots, cache, visible, places)

    def features(self, states: jax.Array) -> jax.Array:
        """What the head reads of states [..., C]: the same after the final norm."""
        return rms_norm(states, self.norm, self.config.norm_epsilon)

    def read_out(self, features: jax.Array) -> jax.Array:
        """float32 logits [..., V] of the cell after each of `features` [..., C]."""
        return matmul(features, self.head).astype(jnp.float32)

    def logits(self, states: jax.Array) -> jax.Array:
        """float32 logits [..., V] of the cell after each state [..., C]."""
        return self.read_out(self.features(states))

    def __call__(
        self,
        condition: jax.Array,
        tokens: jax.Array,
        prefix_visible: jax.Array | None = None,
        drop: Callable[[jax.Array, int, jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """Teacher-forced logits [B, N, V]; row i predicts tokens[:, i].

        Args:
          condition: as for `prefix`.
          tokens: int32 [B, N], the whole grid in raster order.
          prefix_visible: bool [B, P], which prefix slots are not padding.
          drop: `(layer, branch, [B, T, C]) -> [B, T, C]`, dropout of residual branches
            in training.
        """
        states = self.forced(condition, tokens, prefix_visible, drop)
        return self.logits(states[:, self.config.prefix_length - 1 :])

    def forced(
        self,
        condition: jax.Array,
        tokens: jax.Array,
        prefix_visible: jax.Array | None = None,
        drop: Callable[[jax.Array, int, jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """Teacher-forced states [B, P + N - 1, C] of all slots that are fed."""
        p, n = self.config.prefix_length, self.config.cells
        cells = jnp.broadcast_to(jnp.arange(n - 1), (tokens.shape[0], n - 1))
        x = jnp.concatenate(
            [self.prefix(condition), self.embed(tokens[:, :-1], cells)], axis=1
        )
        slots = jnp.arange(p + n - 1)[None]
        visible = slots[..., None] >= slots[:, None]
        if prefix_visible is not None:
            seen = jnp.pad(prefix_visible, ((0, 0), (0, n - 1)), constant_values=True)
            visible = (visible & seen[:, None]) | jnp.eye(p + n - 1, dtype=bool)[None]
        return forced_layers(self.config, self.layers, x, visible, drop)
