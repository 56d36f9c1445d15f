"""Decoding as a program in a file: traced once, called wherever it is read.

A program (StableHLO, by `jax.export`) is one method, one network and one batch. It
takes weights, conditions, settings and keys as inputs, so another training, prompt or
seed needs no other, and it has a few hundred kB. What reads it traces nothing; XLA
compiles it, or finds it in the compile cache.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.decoding import Decoded, Method, Target, check_method, decode, describe

Decode = Callable[[Method, Target, jax.Array], Decoded]

_KEYS = "threefry2x32"
_END = b"\n"  # of the description, a line of JSON


def export_decode(
    method: Method, target: Target, platforms: Sequence[str] | None = None
) -> bytes:
    """`jaxspec.decode` of a method, and of targets like this one, as bytes.

    Needs flatbuffers: `pip install 'jaxspec[export]'`.

    Args:
      method: as `decode` takes it: with its drafter, if it has one.
      target: of the network and the batch.
      platforms: what it is to run on, such as ("cpu", "cuda"); by default what this
        process has.

    Raises:
      ValueError: the method is none, or the target is split over several devices.
      ImportError: flatbuffers is not installed.
    """
    check_method(method)
    if target.mesh is not None:
        raise ValueError("a target that is split over devices cannot be exported")
    structure = jax.tree.structure((method, target))

    def program(inputs: dict[str, jax.Array], key_data: jax.Array) -> dict[str, Any]:
        own = jax.tree.unflatten(structure, [inputs[name] for name in order])
        keys = jax.random.wrap_key_data(key_data, impl=_KEYS)
        decoded = decode(*own, keys)
        return {k: x for k, x in vars(decoded).items() if k != "newline"}

    inputs = _inputs(method, target)
    order = list(inputs)  # a dictionary of JAX's comes back sorted
    key_data = jax.ShapeDtypeStruct((target.batch, 2), jnp.uint32)
    traced = jax.export.export(jax.jit(program), platforms=platforms)(inputs, key_data)
    about = json.dumps(_about(method, target)).encode()
    return about + _END + bytes(traced.serialize())


def load_decode(data: bytes) -> Decode:
    """What `export_decode` made, as a function that is called as `jaxspec.decode` is.

    It refuses another method, network or shape than it was made of with a ValueError
    that names them.

    Raises:
      ValueError: the bytes are no such program.
      ImportError: flatbuffers is not installed.
    """
    about, program = _read(data)
    (shapes, _), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    call = jax.jit(program.call)

    def decode(method: Method, target: Target, keys: jax.Array) -> Decoded:
        check_method(method)
        for name, found in _about(method, target).items():
            if found != about[name]:
                raise ValueError(
                    f"the program has the {name} {about[name]}, and was called with "
                    f"{found}: export it anew"
                )
        inputs = _inputs(method, target)
        _check(shapes, inputs)
        if str(keys.dtype) != "key<fry>" or keys.shape != (target.batch,):
            raise ValueError(
                f"keys must be [{target.batch}] as `jaxspec.image_keys` makes them, "
                f"not {keys.dtype} {list(keys.shape)}"
            )
        out = call(inputs, jax.random.key_data(keys))
        return Decoded(**out, newline=target.grammar.newline)

    return decode


def _inputs(method: Method, target: Target) -> dict[str, jax.Array]:
    """All arrays, by where they stand."""
    leaves = jax.tree.leaves_with_path({"method": method, "target": target})
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): jnp.asarray(x) for path, x in leaves}


def _about(method: Method, target: Target) -> dict[str, Any]:
    """What of the two is no array; it is part of the program."""
    method = json.loads(json.dumps(describe(method)))
    return {"method": method, "network": repr(target.model.config)}


def _check(shapes: dict[str, Any], inputs: dict[str, jax.Array]) -> None:
    """Raises ValueError with all that is there and should not be, or is not."""
    text = lambda x: f"{x.dtype}{list(x.shape)}"
    missing, unexpected = shapes.keys() - inputs.keys(), inputs.keys() - shapes.keys()
    wrong = [
        f"{k} is {text(inputs[k])}, not {text(x)}"
        for k, x in shapes.items()
        if k in inputs and text(inputs[k]) != text(x)
    ]
    if missing or unexpected or wrong:
        raise ValueError(
            f"the program was made of other inputs: missing {sorted(missing)}, "
            f"unexpected {sorted(unexpected)}, misshapen {wrong}"
        )


def _read(data: bytes) -> tuple[dict[str, Any], jax.export.Exported]:
    about, end, program = data.partition(_END)
    try:
        known = json.loads(about)
        if not end or known.keys() != {"method", "network"}:
            raise ValueError("it has no description")
        return known, jax.export.deserialize(bytearray(program))
    except ImportError:
        raise
    except Exception as error:  # of whatever kind JAX's reader raises
        reason = " ".join(str(error).split())
        raise ValueError(f"these bytes are no exported program: {reason}") from error


__all__ = ["Decode", "export_decode", "load_decode"]
