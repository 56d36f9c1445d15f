"""LPD's transformer: it draws any cells that it is asked for, in any order.

Locality-aware parallel decoding (LPD, arXiv 2507.01957, section 3.1). Tokens of cells
that are known are context; a cell that is to be drawn is a query, one learned vector
with the cell's position. Queries that are asked together see the context and each
other; what is context never sees a query, so that the keys and values of queries are
dropped once they are answered.

A pre-norm vision transformer: LayerNorms, biases, exact GELU, a learned position for
every slot, and one norm more behind the embeddings. Published models are conditioned on
a class; a prefix of features is ours, for captions. Axis legend as in `transformer`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.cache import Cache, through_cache
from jaxspec.models.stacks import run, unstack
from jaxspec.models.ta_tok import layer_norm, tower_block, tower_init, tower_shapes
from jaxspec.models.transformer import attend


@dataclass(frozen=True)
class LPDConfig:
    """Static shape of the network.

    Attributes:
      vocab_size: number of codes V.
      width, depth, heads, hidden: C, L, K, and of the feed-forward layers.
      grid: rows and columns of the token grid.
      prefix: "class", one label, or "features", P vectors through a linear layer.
      prefix_length: P, 1 for a class.
      prefix_width: number of classes, or width of a vector.
      norm_epsilon: of the layer norms.
    """

    vocab_size: int
    width: int
    depth: int
    heads: int
    hidden: int
    grid: tuple[int, int]
    prefix: Literal["class", "features"]
    prefix_length: int
    prefix_width: int
    norm_epsilon: float = 1e-6

    @property
    def cells(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def slots(self) -> int:
        return self.prefix_length + self.cells

    @property
    def key_heads(self) -> int:
        return self.heads

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def query(self) -> int:
        """The token that asks for a cell in place of holding a code."""
        return self.vocab_size


class LPDNet(nn.Module):
    """The network, with the methods of `Transformer` that a `Target` asks for."""

    config: LPDConfig

    @nn.nowrap
    def prepared(self, params: dict) -> dict:
        """The parameters as decoding takes them: an array of its own for each layer."""
        return unstack(params, tower_shapes(self.config.width, self.config.hidden))

    def setup(self):
        c = self.config
        normal = nn.initializers.normal(0.02)
        param = lambda name, *shape: self.param(name, tower_init(name), shape)
        self.token_embedding = param("token_embedding", c.vocab_size, c.width)
        self.query = param("query", c.width)
        self.positions = param("positions", c.slots, c.width)
        if c.prefix == "class":
            self.class_embedding = param("class_embedding", c.prefix_width, c.width)
            self.null_class = param("null_class", 1, c.width)
        else:
            self.prefix_proj = param("prefix_proj", c.prefix_width, c.width)
            self.prefix_bias = param("prefix_bias", c.width)
        self.input_norm = (
            param("input_norm_scale", c.width),
            param("input_norm_bias", c.width),
        )
        if self.has_variable("params", "layers"):  # `prepared`
            self.layers = self.get_variable("params", "layers")
        else:
            self.layers = {
                name: param(name, c.depth, *shape)
                for name, shape in tower_shapes(c.width, c.hidden).items()
            }
        self.norm = param("norm_scale", c.width), param("norm_bias", c.width)
        self.head = self.param("head", normal, (c.width, c.vocab_size))

    def prefix(self, condition: jax.Array) -> jax.Array:
        """Prefix embeddings [B, P, C] of labels int32 [B], or vectors [B, P, width]."""
        if self.config.prefix == "class":
            table = jnp.concatenate([self.class_embedding, self.null_class])
            x = table[condition][:, None]
        else:
            x = condition @ self.prefix_proj + self.prefix_bias[None, None]
        slots = jnp.arange(self.config.prefix_length)
        return self._place(x, jnp.broadcast_to(slots, x.shape[:2]))

    def null(self, condition: jax.Array) -> jax.Array:
        """The condition that stands for no condition, shaped as `condition`."""
        if self.config.prefix == "class":
            return jnp.full_like(condition, self.config.prefix_width)
        return jnp.zeros_like(condition)

    def embed(self, tokens: jax.Array, cells: jax.Array) -> jax.Array:
        """Input embeddings [B, T, C] of codes, or `config.query`, at cells [B, T]."""
        table = jnp.concatenate([self.token_embedding, self.query[None]])
        return self._place(table[tokens], cells + self.config.prefix_length)

    def _place(self, x: jax.Array, slots: jax.Array) -> jax.Array:
        scale, bias = self.input_norm
        return layer_norm(x + self.positions[slots], scale, bias, 1e-5)

    def extend(
        self,
        x: jax.Array,
        slots: jax.Array,
        cache: Cache,
        visible: jax.Array,
        places: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """As `Transformer.extend`; positions are in the inputs already."""
        del places
        layers: Any = self.layers
        return through_cache(
            self._block,
            layers,
            x,
            cache,
            slots,
            lambda q, k, v: attend(q, k, v, visible),
            lambda x: x,
        )

    def _block(self, layer, x, attention) -> jax.Array:
        c = self.config
        block = partial(tower_block, approximate=False)
        return block(layer, x, attention, c.heads, c.norm_epsilon)

    def features(self, states: jax.Array) -> jax.Array:
        """What the head reads of states [..., C]: the same after the final norm."""
        scale, bias = self.norm
        return layer_norm(states, scale, bias, self.config.norm_epsilon)

    def read_out(self, features: jax.Array) -> jax.Array:
        """float32 logits [..., V] of the cells that queries ask for."""
        return (features @ self.head).astype(jnp.float32)

    def __call__(
        self, condition: jax.Array, tokens: jax.Array, groups: jax.Array
    ) -> jax.Array:
        """Teacher-forced logits [B, N, V]: of every cell, asked for with its group.

        Args:
          condition: as for `prefix`.
          tokens: int32 [B, N], the whole grid in raster order.
          groups: int32 [B, N], the number of the group that each cell is drawn in.
        """
        c = self.config
        cells = jnp.broadcast_to(jnp.arange(c.cells), tokens.shape)
        inputs = (
            self.prefix(condition),
            self.embed(tokens, cells),
            self.embed(jnp.full_like(tokens, c.query), cells),
        )
        visible = seen_by_groups(groups, c.prefix_length)

        def block(layer, x, index):
            del index
            return self._block(layer, x, lambda *qkv: attend(*qkv, visible))

        x = run(block, self.layers, jnp.concatenate(inputs, axis=1))
        return self.read_out(self.features(x[:, c.slots :]))


def seen_by_groups(groups: jax.Array, prefix: int) -> jax.Array:
    """Which inputs see which in training, bool [B, S, S].

    Inputs are `prefix` slots, all cells, and a query for each cell, in raster order;
    S = P + 2 N. The prefix is causal. A cell sees cells of its group and of those
    before; a query sees cells of groups before its own, and the queries of its own.

    Args:
      groups: int32 [B, N], of each cell.
      prefix: P.
    """
    b, n = groups.shape
    mine, other = groups[:, :, None], groups[:, None]
    nothing = jnp.zeros((b, n, n), bool)
    of_cells = jnp.concatenate([other <= mine, nothing], axis=2)
    of_queries = jnp.concatenate([other < mine, other == mine], axis=2)
    seen = jnp.concatenate([of_cells, of_queries], axis=1)
    seen = jnp.pad(seen, ((0, 0), (prefix, 0), (prefix, 0)), constant_values=True)
    before = jnp.tri(prefix, prefix + 2 * n, dtype=bool)
    return seen.at[:, :prefix].set(jnp.broadcast_to(before, (b, *before.shape)))


__all__ = ["LPDConfig", "LPDNet", "seen_by_groups"]
