"""The cache of keys and values, and layers that run through it.

Axis legend: B rows, T tokens fed, S slots, K heads, D head width, C model width.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxspec.models.chameleon import ChameleonGridConfig
    from jaxspec.models.lpd import LPDConfig
    from jaxspec.models.transformer import TransformerConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of every slot, [B, K, S, D] a layer.

    An array a layer, not one for all: XLA's CPU backend copies a slice before it
    multiplies by it, so every pass would copy the whole cache.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @staticmethod
    def empty(
        config: "TransformerConfig | ChameleonGridConfig | LPDConfig",
        batch: int,
        dtype=jnp.float32,
        scratch: int = 0,
    ) -> "Cache":
        """Of all slots of a network, and `scratch` more behind them."""
        slots = config.slots + scratch
        shape = (batch, config.key_heads, slots, config.head_width)
        return Cache.zeros(config.depth, shape, dtype)

    @staticmethod
    def zeros(depth: int, shape: tuple[int, int, int, int], dtype) -> "Cache":
        """Nothing written yet; `shape` is a layer's, [B, K, S, D]."""

        def layers():
            return tuple(jnp.zeros(shape, dtype) for _ in range(depth))

        return Cache(layers(), layers())

    @property
    def slots(self) -> int:
        """How many slots there are; this one and those after it are not written."""
        return self.keys[0].shape[2]

    def copied(self, source: jax.Array, slots: jax.Array) -> "Cache":
        """With what is in slots `source` [B, T] in `slots` [B, T] too."""

        def copy(x):
            return write_slots(
                x, jnp.take_along_axis(x, source[:, None, :, None], 2), slots
            )

        return jax.tree.map(copy, self)


def write_slots(old: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """`old` [B, K, S, D] with `new` [B, K, T, D] at slots [B, T].

    A slot of S or more is not written.
    """
    if slots.size == 1:
        # XLA makes the write of a single slot a slice update, fuses it into both of
        # its uses, and copies the cache for that: one that is not written goes along.
        slots = jnp.pad(slots, ((0, 0), (0, 1)), constant_values=old.shape[2])
        new = jnp.pad(new, ((0, 0), (0, 0), (0, 1), (0, 0)))

    def write(old, new, slots):  # of a row and head
        return old.at[slots].set(new.astype(old.dtype), mode="drop")

    # By vmap, not by more indices: over several devices each then writes its own part.
    return jax.vmap(jax.vmap(write, (0, 0, None)))(old, new, slots)


def through_cache(
    block: Callable[[dict, jax.Array, Callable], jax.Array],
    layers: Iterable[dict],
    x: jax.Array,
    cache: Cache,
    slots: jax.Array,
    read: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    turn: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, Cache]:
    """Runs layers one after the other; each writes its slots before it reads.

    Args:
      block: one layer, `(layer, x, attention) -> x`.
      layers: their parameters.
      x: inputs [B, T, C].
      cache: of all slots.
      slots: int32 [B, T], where to write.
      read: attention of queries to all keys, as turned, and values.
      turn: the rotary embedding of what is written.
    """
    keys, values = [], []

    def attention(q, k, v):
        i = len(keys)
        keys.append(write_slots(cache.keys[i], turn(k), slots))
        values.append(write_slots(cache.values[i], v, slots))
        return read(q, keys[i], values[i])

    for layer in layers:
        x = block(layer, x, attention)
    return x, Cache(tuple(keys), tuple(values))
