"""Layers as parameters: stacked along an axis to train and store, apart to decode.

A stack is a parameter of all layers, [L, ...]. Apart, `layers` is a tuple of
dictionaries, one a layer, and matrices side by side in one parameter, [C, parts * F],
have an axis more, [C, parts, F], so that each can be split over devices by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import sharding

LAYERS = "layers"
# Matrices side by side in one parameter: how many.
JOINED = {"qkv": 3, "key_value": 2, "gate_up": 2}


def unstack(params: dict, names: Iterable[str]) -> dict:
    """Takes the stacks of these names apart; parameters without them stay as they are.

    That copies them: `jaxspec.load` reads layers apart to begin with.
    """
    inner = dict(params["params"])
    if LAYERS in inner:
        return params
    inner[LAYERS] = taken_apart({name: inner.pop(name) for name in names})
    return {"params": inner}


def restack(params: dict) -> dict:
    """The inverse of `unstack`, to train with; stacks stay as they are."""
    inner = dict(params["params"])
    layers = inner.pop(LAYERS, None)
    if layers is None:
        return params
    return {"params": inner | {k: stack([x[k] for x in layers]) for k in layers[0]}}


def taken_apart(stacks: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], ...]:
    """`split`, compiled: every device takes its own part of each layer."""
    where = sharding.of_layers({k: (x, k in JOINED) for k, x in stacks.items()})
    return jax.jit(split, out_shardings=where)(stacks)


def split(stacks: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], ...]:
    """A dictionary a layer, of stacked parameters."""

    def layer(name: str, x: jax.Array) -> jax.Array:
        return x.reshape(len(x), JOINED[name], -1) if name in JOINED else x

    depth = len(next(iter(stacks.values())))
    return tuple({k: layer(k, x[i]) for k, x in stacks.items()} for i in range(depth))


def stack(layers: Sequence[Any], numpy: Any = jnp) -> Any:
    """The stack [L, ...] of one parameter of all layers: the inverse of `split`."""
    # Only matrices side by side have three axes.
    return numpy.stack([x.reshape(len(x), -1) if x.ndim == 3 else x for x in layers])


def run(
    block: Callable[[dict[str, jax.Array], jax.Array, Any], jax.Array],
    layers: Any,
    x: jax.Array,
) -> jax.Array:
    """Runs x through `block(layer, x, index)` of layers one after the other.

    Stacked layers run under `lax.scan`, and few of them unrolled: XLA's CPU backend
    then trains them a sixth faster. More would take too long to compile.
    """
    if isinstance(layers, tuple):
        for index, layer in enumerate(layers):
            x = block(layer, x, index)
        return x
    depth = len(next(iter(layers.values())))
    body = lambda x, each: (block(each[0], x, each[1]), None)
    each = layers, jnp.arange(depth)
    return jax.lax.scan(body, x, each, unroll=depth <= 8)[0]
