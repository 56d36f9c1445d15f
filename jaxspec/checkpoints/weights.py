"""Reading the weights of our folders: safetensors files, or an orbax checkpoint.

Files have layers stacked. Where they are wanted apart they are read apart, so that they
are never there twice.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from safetensors import safe_open

from jaxspec.checkpoints.readers import reason
from jaxspec.checkpoints.trees import flatten, unflatten
from jaxspec.checkpoints.writer import ORBAX
from jaxspec.models.stacks import stack, taken_apart
from jaxspec.sharding import of_layer

# (name, a layer's weight) -> what is kept of it.
Turn = Callable[[str, jax.Array], Any]
# Of these, each model has a file of its own.
SEVERAL = ("decoders", "upsamplers", "drafters", "flashar", "lpd", "ssd", "matchers")


def to_files(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Weights by the file that holds them: each model of a family has its own."""
    parts: dict[str, dict[str, Any]] = {}
    for key, x in flat.items():
        first, second, *_ = key.split("/")
        name = f"{first}-{second}" if first in SEVERAL else first
        parts.setdefault(f"{name}.safetensors", {})[key] = x
    return parts


@contextmanager
def one_line(path: Path) -> Generator[None]:
    """What a damaged file breaks, of whatever kind, as one line that names the file."""
    try:
        yield
    except Exception as error:  # the tokenizers library raises just that
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error


def as_stored(flat: dict[str, Any]) -> dict[str, Any]:
    """Shapes and types of parameters as files have them: layers stacked."""
    return {
        k: jax.eval_shape(stack, x) if isinstance(x, tuple) else x
        for k, x in flat.items()
    }


def read_weights(
    folder: Path,
    want: dict[str, Any],
    dtype,
    where: Mapping[str, NamedSharding] | None = None,
    turn: Turn = lambda name, x: x,
) -> dict[str, Any]:
    """The weights of a folder, those of `want` and of its shapes, on the device.

    Args:
      folder: that holds them.
      want: flat (see `flatten`); what is a tuple in it is read a layer at a time.
      dtype: of the weights in memory; None keeps the types of the files.
      where: how the tensors of the files are split: each device, and each process,
        reads its own part.
      turn: what becomes of each layer's weights once they are read.

    Raises:
      ValueError: the folder is damaged, or holds other weights.
    """
    read = _read_orbax if (folder / ORBAX).is_dir() else _read_safetensors
    return read(folder, want, dtype, where or {}, turn)


def _check_fit(found: dict[str, Any], want: dict[str, Any]) -> None:
    """Raises ValueError with all differences between shapes, both by name."""
    want = as_stored(want)
    missing, unexpected = want.keys() - found.keys(), found.keys() - want.keys()
    wrong = [
        f"{k} is {list(found[k])}, not {list(want[k].shape)}"
        for k in sorted(found.keys() & want.keys())
        if tuple(found[k]) != tuple(want[k].shape)
    ]
    if missing or unexpected or wrong:
        raise ValueError(
            f"it does not fit config.json: missing {sorted(missing)}, unexpected "
            f"{sorted(unexpected)}, misshapen {wrong}"
        )


def _read_safetensors(
    folder: Path,
    want: dict[str, Any],
    dtype,
    where: Mapping[str, NamedSharding],
    turn: Turn,
) -> dict[str, Any]:
    tensors = {}
    for name, part in to_files(want).items():
        path = folder / name
        with one_line(path), safe_open(path, framework="numpy") as f:
            _check_fit({k: f.get_slice(k).get_shape() for k in f.keys()}, part)
            for k, x in part.items():
                read = partial(_read_tensor, f.get_slice(k), dtype, where.get(k))
                if isinstance(x, tuple):
                    tensors[k] = tuple(
                        turn(k, read(y.shape, i)) for i, y in enumerate(x)
                    )
                else:
                    tensors[k] = read(x.shape)
    return tensors


def _read_tensor(
    file: Any,
    dtype,
    where: NamedSharding | None,
    shape: tuple[int, ...],
    layer: int | None = None,
) -> jax.Array:
    """A tensor of a file or one layer of it, of which devices read their parts."""

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if layer is None:
            x = file[index] if index else file[:]
        elif len(shape) == 3:  # matrices side by side
            x = _read_joined(file, layer, index, shape)
        else:
            x = file[(layer, *index)]
        # Cast by NumPy and put, not `asarray`: JAX would compile both for each shape.
        return x if dtype is None else x.astype(jnp.dtype(dtype))

    if where is None:
        return jax.device_put(read((slice(None),) * len(shape)))
    if layer is not None:
        spec = of_layer(where.spec, joined=len(shape) == 3)
        where = NamedSharding(where.mesh, spec)
    parts: dict[str, np.ndarray] = {}  # devices may have the same

    def part(index: Any) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = read(index)
        return parts[str(index)]

    return jax.make_array_from_callback(shape, where, part)


def _read_joined(
    file: Any, layer: int, index: tuple[slice, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """A part of matrices [C, parts, F] that lie side by side, [L, C, parts * F]."""
    rows, parts, columns = index
    first, last, _ = columns.indices(shape[2])
    if last - first == shape[2]:
        return file[layer, rows].reshape(-1, *shape[1:])[:, parts]
    each = [i * shape[2] for i in range(*parts.indices(shape[1]))]
    return np.stack([file[layer, rows, i + first : i + last] for i in each], axis=1)


def _read_orbax(
    folder: Path,
    want: dict[str, Any],
    dtype,
    where: Mapping[str, NamedSharding],
    turn: Turn,
) -> dict[str, Any]:
    import orbax.checkpoint as ocp  # slow to import

    path = folder / ORBAX
    with one_line(path), ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path.absolute()).item_metadata
        if metadata is None:
            raise ValueError("it is not a whole orbax checkpoint")
        found = metadata.tree
        _check_fit({k: x.shape for k, x in flatten(found).items()}, want)
        abstract = {
            k: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=where.get(k))
            for k, x in flatten(found).items()
        }
        flat = flatten(checkpointer.restore(path.absolute(), unflatten(abstract)))
    for k, x in want.items():
        if isinstance(x, tuple):  # a stack at a time is there twice
            name = k.rpartition("/")[2]
            layers = taken_apart({name: flat.pop(k)})
            flat[k] = tuple(turn(k, layer[name]) for layer in layers)
    return flat


__all__ = ["SEVERAL", "as_stored", "one_line", "read_weights", "to_files"]
