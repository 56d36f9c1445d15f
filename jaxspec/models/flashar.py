"""FlashAR's second head: what comes below a cell, beside what comes at its right.

FlashAR (arXiv 2605.09430) turns a model that draws in raster order into one that draws
whole anti-diagonals. A copy of its last layers, the vertical branch, goes on from the
states before these and says what comes one row down; the layers themselves, the
horizontal branch, say as ever what comes at the right. A cell has a neighbour above and
one at its left, and a gate mixes what the two say of it.

    z[p, q] = g zH[p, q-1] + (1 - g) zV[p-1, q]
    g       = sigmoid(MLP([h^H[p, q-1], h^V[p-1, q]]))

h are features, states after the branch's own norm. Row 0 has zH alone, column 0 zV
alone. Axis legend as in `transformer`; M rows of logits.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.cache import Cache
from jaxspec.models.stacks import restack
from jaxspec.models.transformer import (
    Transformer,
    TransformerConfig,
    extend_layers,
    forced_layers,
    layer_shapes,
    rms_norm,
    unstacked,
)

Context = Literal["diagonal", "earlier"]


@dataclass(frozen=True)
class FlashConfig:
    """Static shape of a vertical branch, and how pictures are seen with it.

    Attributes:
      target: of the model that it was trained with.
      depth: layers of the branch, copies of the target's last ones.
      context: what a cell sees. "diagonal" is all cells up to its own anti-diagonal, as
        in the paper; "earlier" those of them that are not behind it in raster order
        either, which a target that was not trained for more has seen before.
    """

    target: TransformerConfig
    depth: int
    context: Context = "diagonal"

    def __post_init__(self):
        if not 1 <= self.depth <= self.target.depth:
            raise ValueError(
                f"depth must be from 1 to the target's {self.target.depth} layers, not "
                f"{self.depth}"
            )
        if self.context not in get_args(Context):
            known = " or ".join(get_args(Context))
            raise ValueError(f"context must be {known}, not {self.context!r}")

    @property
    def shared(self) -> int:
        """Layers of the target below the branch."""
        return self.target.depth - self.depth

    @property
    def causal(self) -> bool:
        """No cell sees one behind it in raster order."""
        return self.context == "earlier"

    @property
    def gate(self) -> int:
        """Hidden width of the gate."""
        return max(64, self.target.width // 8)


class FlashHead(nn.Module):
    """The vertical branch and the gate."""

    config: FlashConfig

    def setup(self):
        flash, c = self.config, self.config.target
        normal, ones = nn.initializers.normal(0.02), nn.initializers.ones
        zeros = nn.initializers.zeros
        if self.has_variable("params", "layers"):  # `unstacked`
            self.layers = self.get_variable("params", "layers")
        else:
            self.layers = {
                name: self.param(
                    name, normal if shape[1:] else ones, (flash.depth, *shape)
                )
                for name, shape in layer_shapes(c).items()
            }
        self.norm = self.param("norm", ones, (c.width,))
        self.head = self.param("head", normal, (c.width, c.vocab_size))
        self.gate_in = self.param("gate_in", normal, (2 * c.width, flash.gate))
        self.gate_in_bias = self.param("gate_in_bias", zeros, (flash.gate,))
        # Zero at first: both branches count alike.
        self.gate_out = self.param("gate_out", zeros, (flash.gate, 1))
        self.gate_out_bias = self.param("gate_out_bias", zeros, (1,))

    def extend(
        self,
        config: TransformerConfig,
        x: jax.Array,
        slots: jax.Array,
        cache: Cache,
        visible: jax.Array,
        places: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """The branch's features [B, T, C] of the states below it, and its cache.

        `config` is of the target in use, whose prefix may be shorter than in training;
        the other arguments are those of `Transformer.extend`.
        """
        layers: Any = self.layers
        x, cache = extend_layers(config, layers, x, slots, cache, visible, places)
        return self._features(x), cache

    def forced(self, x: jax.Array, visible: jax.Array) -> jax.Array:
        """Teacher-forced features [B, S, C] of the states [B, S, C] below the branch.

        `visible` [1, S, S] says which slots each sees.
        """
        c, causal = self.config.target, self.config.causal
        return self._features(forced_layers(c, self.layers, x, visible, causal=causal))

    def _features(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.norm, self.config.target.norm_epsilon)

    def logits(
        self, right: jax.Array, right_logits: jax.Array, down: jax.Array, cells
    ) -> jax.Array:
        """float32 logits [B, M, V] of cells [B, M].

        Args:
          right: the horizontal branch's features [B, M, C] of the cells at their left.
          right_logits: what the target's head reads of these, [B, M, V].
          down: this branch's features [B, M, C] of the cells above them.
          cells: int32 [B, M], in raster order.
        """
        down_logits = self.below(down)
        h = jnp.concatenate([right, down], axis=-1) @ self.gate_in
        h = nn.silu(h + jnp.broadcast_to(self.gate_in_bias, h.shape)) @ self.gate_out
        share = nn.sigmoid(h + jnp.broadcast_to(self.gate_out_bias, h.shape))
        row, column = jnp.divmod(cells[..., None], self.config.target.grid[1])
        share = jnp.where(row == 0, 1.0, jnp.where(column == 0, 0.0, share))
        return share * right_logits + (1 - share) * down_logits

    def below(self, down: jax.Array) -> jax.Array:
        """The branch's own float32 logits [..., V] of the cell below each feature."""
        return (down @ self.head).astype(jnp.float32)


def visible_slots(config: FlashConfig) -> jax.Array:
    """Which slots each slot sees in training, bool [1, P + N - 1, P + N - 1]."""
    (h, w), p = config.target.grid, config.target.prefix_length
    cell = jnp.arange(h * w - 1)
    diagonal = cell // w + cell % w
    seen = diagonal[None] <= diagonal[:, None]
    if config.causal:
        seen &= cell[None] <= cell[:, None]
    seen = jnp.pad(seen, ((p, 0), (p, 0)), constant_values=True)
    prefix = jnp.tri(p, p + h * w - 1, dtype=bool)
    return seen.at[:p].set(prefix)[None]


def forced_logits(
    config: FlashConfig,
    target: Any,
    head: Any,
    condition: jax.Array,
    tokens: jax.Array,
) -> dict[str, jax.Array]:
    """Teacher-forced logits [B, N, V]: "joint", and those of "right" and "down" alone.

    Row i is about tokens[:, i]; what a branch says of cells that it is not asked about
    means nothing.

    Args:
      config: of the branch.
      target: parameters of the transformer.
      head: parameters of `FlashHead`.
      condition: as for `Transformer.prefix`.
      tokens: int32 [B, N].
    """
    c, target = config.target, restack(target)
    b, p, n, w = tokens.shape[0], c.prefix_length, c.cells, c.grid[1]
    model, branch = Transformer(c), FlashHead(config)
    cells = jnp.broadcast_to(jnp.arange(n), (b, n))
    ask: Any = lambda *x, method: model.apply(target, *x, method=method)
    prefix = ask(condition, method="prefix")
    x = ask(tokens[:, :-1], cells[:, :-1], method="embed")
    x = jnp.concatenate([prefix, x], axis=1)
    visible = visible_slots(config)
    layers = {name: target["params"][name] for name in layer_shapes(c)}
    part = lambda some: jax.tree.map(lambda y: y[some], layers)
    if config.shared:
        low = part(slice(config.shared))
        x = forced_layers(c, low, x, visible, causal=config.causal)
    own = part(slice(config.shared, None))
    right = forced_layers(c, own, x, visible, causal=config.causal)
    right = ask(right, method="features")
    down: Any = branch.apply(head, x, visible, method="forced")
    right = right[:, p - 1 :]
    down = jnp.pad(down[:, p:], ((0, 0), (w, 0), (0, 0)))[:, :n]  # from the row above
    right_logits = ask(right, method="read_out")
    both = right, right_logits, down, cells
    joint: Any = branch.apply(head, *both, method="logits")
    below: Any = branch.apply(head, down, method="below")
    return {"joint": joint, "right": right_logits, "down": below}


def new_head(config: FlashConfig, target: Any, seed: int = 0) -> Any:
    """Parameters that training starts from: the target's, and an even gate."""
    c, theirs = config.target, restack(target)["params"]
    shape = jnp.zeros((1, 1, c.width))
    cells = jnp.zeros((1, 1), jnp.int32)
    logits = jnp.zeros((1, 1, c.vocab_size))
    new = FlashHead(config).init(
        jax.random.key(seed), shape, logits, shape, cells, method="logits"
    )["params"]
    copies = {name: theirs[name][config.shared :] for name in layer_shapes(c)}
    # Copies: what a training step is given is donated.
    copies |= {name: jnp.array(theirs[name]) for name in ("norm", "head")}
    return {"params": new | copies}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Flash:
    """A trained vertical branch, for the target that it was trained with.

    Attributes:
      params: of `FlashHead`.
      config: its shape.
      target: the target's own parameters, where they were trained with the branch; None
        if they stayed as they were.
    """

    params: Any = field(repr=False)
    config: FlashConfig = field(metadata={"static": True})
    target: Any = field(default=None, repr=False)

    def check(self, target: Any) -> None:
        """Refuses another target than it was made for, as far as shapes tell.

        Raises:
          ValueError: the two do not fit.
        """
        own = self.config.target
        if not isinstance(target, TransformerConfig):
            raise ValueError(
                f"FlashAR is for LlamaGen's and AR-DTok's transformers, not for one of "
                f"{type(target).__name__}"
            )
        for name in ("vocab_size", "width", "depth", "heads", "grid", "positions"):
            found, want = getattr(own, name), getattr(target, name)
            if found != want:
                raise ValueError(
                    f"the head was made for another target: its {name} is {found}, and "
                    f"this target needs {want}"
                )

    def unstacked(self) -> "Flash":
        """With arrays of their own for each layer, to decode with."""
        apart = lambda params: unstacked(self.config.target, params)
        target = None if self.target is None else apart(self.target)
        return replace(self, params=apart(self.params), target=target)


__all__ = ["Flash", "FlashConfig", "FlashHead", "forced_logits", "new_head"]
