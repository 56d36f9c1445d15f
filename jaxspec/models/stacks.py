"""Layers as parameters: stacked along an axis to train and store, apart to decode."""

from collections.abc import Iterable

import jax

from jaxspec import sharding

# Matrices side by side in one parameter: how many.
JOINED = {"qkv": 3, "key_value": 2, "gate_up": 2}


def unstack(params: dict, names: Iterable[str]) -> dict:
    """Moves the stacked parameters of these names to `layers`, a dictionary a layer."""
    inner = dict(params["params"])
    if "layers" not in inner:
        stacks = {name: inner.pop(name) for name in names}
        each = sharding.of_layers(stacks, JOINED)
        take = split if each is None else _split_apart
        inner["layers"] = jax.jit(take, out_shardings=each)(stacks)
    return {"params": inner}


def split(stacks: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], ...]:
    """A dictionary a layer, of stacked parameters."""
    depth = len(next(iter(stacks.values())))
    return tuple({k: x[i] for k, x in stacks.items()} for i in range(depth))


def _split_apart(stacks: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], ...]:
    def apart(name, x):
        return x.reshape(len(x), JOINED[name], -1) if name in JOINED else x

    return tuple({k: apart(k, x) for k, x in layer.items()} for layer in split(stacks))
