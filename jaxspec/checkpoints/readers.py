"""Opening checkpoint files: no weights are loaded, and no code of a file ever runs.

`.safetensors`, PyTorch's zip files (`.pt`, `.pth`, `.bin`, `.ckpt`) through its own
weights-only, memory-mapped loader, index files of either in several shards, Hugging
Face folders, and Meta's of a model in slices. What is opened has the shapes and types
of its tensors; their values are read one by one, when asked for.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from jaxspec.checkpoints.containers import peel
from jaxspec.checkpoints.hub import TORCH, WEIGHTS, local
from jaxspec.checkpoints.slices import check_whole, joined, slices_of

# In the order in which a folder is searched for its weights.
NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
CONFIGS = ("config.json", "params.json")  # Hugging Face's, or Meta's
LISTED = 100  # entries of an argument that are listed
RESAVE = "docs/converting.md says how to save it again safely"
_SAFETENSORS_TYPES = {
    **{f"F{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    "BOOL": np.dtype(bool),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "C64": np.dtype(np.complex64),
}


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor that lies in a file; `np.asarray` reads it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        values = self.read()
        return values if dtype is None else values.astype(dtype, copy=False)


@dataclass(frozen=True)
class Checkpoint:
    """The weights of one model as its file or folder holds them.

    Attributes:
      path: the file or folder that was asked for.
      files: those that hold the weights.
      tensors: by PyTorch's own names, wrappers taken off.
      containers: the wrappers, outermost first, such as ("model", "sd", "module.").
      args: constructor arguments beside the weights (Tar), or a folder's config.json or
        params.json.
      name: of the model's class, where the file tells it.
      left_out: entries beside the weights that were passed over, such as "optimizer".
    """

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, FileTensor]
    containers: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    left_out: tuple[str, ...] = ()

    @property
    def about(self) -> dict[str, Any]:
        """The arguments, for people to read: of a vocabulary among them its length."""
        return {
            key: f"{len(x):,} entries" if isinstance(x, dict) and len(x) > LISTED else x
            for key, x in self.args.items()
        }

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read(path: str | os.PathLike, weights: str | None = None) -> Checkpoint:
    """Opens a checkpoint and takes its wrappers off; loads no weights.

    Args:
      path: a weights file, the index of a sharded one, a folder that holds either or a
        model in slices, or the name of a file or folder on the Hugging Face hub (see
        `hub`).
      weights: which of several sets to take, such as "ema".

    Raises:
      FileNotFoundError: there is no such file or folder, or a shard is missing.
      ModuleNotFoundError: torch is not installed and the file is PyTorch's, or
        huggingface_hub is not and the path is a name there.
      OSError: it could not be fetched.
      ValueError: the file is damaged, would run code, is of a format that is not read,
        holds several sets of weights and none is chosen, or none at all.
    """
    path = local(path)
    told = [path / name for name in CONFIGS if (path / name).is_file()]
    config = read_json(told[0]) if told else {}
    files = _weights_of(path, config) if path.is_dir() else (path,)
    if path.is_file():
        check_whole(path)
    if files[0].name.endswith(".index.json"):
        files, content = _open_sharded(files[0])
    elif slices_of(files):
        parts = [_tensors(file) for file in files]
        with naming(path):
            content = joined(parts)
    else:
        content = _merged({file.name: _open(file) for file in files})
    with naming(path):
        peeled = peel(content, weights)
        tensors = {k: _file_tensor(k, x) for k, x in peeled.tensors.items()}
    return Checkpoint(
        path=path,
        files=files,
        tensors=tensors,
        containers=peeled.containers,
        args=peeled.args or config,
        name=peeled.name,
        left_out=peeled.left_out,
    )


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Errors of whatever kind become ValueErrors of one line that name the file."""
    try:
        yield
    except (OSError, ModuleNotFoundError):
        raise
    except Exception as error:  # torch and safetensors raise many kinds
        raise ValueError(f"{path}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """What an error says, in one line; its kind first where that tells more."""
    plain = isinstance(error, ValueError) or type(error) is Exception
    kind = "" if plain else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a dictionary; a ValueError names one that does not."""
    with naming(path):
        values = json.loads(path.read_text(encoding="utf8"))
        if not isinstance(values, dict):
            raise ValueError(f"holds a {type(values).__name__}, not a dictionary")
    return values


# Which files.


def _weights_of(folder: Path, config: Mapping[str, Any]) -> tuple[Path, ...]:
    for name in NAMES:
        if (folder / name).is_file():
            return (folder / name,)
    found = sorted(p for p in folder.iterdir() if p.suffix in WEIGHTS and p.is_file())
    ours = "decoders" in config  # a family
    if len(found) == 1 or (found and ours) or slices_of(found):
        return tuple(found)
    names = [p.name for p in found]
    if any(re.search(r"-\d+-of-\d+\.", name) for name in names):
        raise FileNotFoundError(f"{folder} holds shards, but not their .index.json")
    if found:
        raise ValueError(f"{folder} holds several weights; name one: {names}")
    raise FileNotFoundError(f"{folder} holds no weights (*{', *'.join(WEIGHTS)})")


def _open_sharded(index: Path) -> tuple[tuple[Path, ...], dict[str, Any]]:
    """The shards that an index names, and their tensors together."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index}: no weight_map, so not the index of a checkpoint")
    names = sorted(set(map(str, placed.values())))
    for name in names:
        if Path(name).name != name or name == "..":
            raise ValueError(f"{index}: {name!r} is not the name of a file beside it")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{index} names shards that are missing: {missing}")
    shards = {name: _open(index.parent / name) for name in names}
    content = _merged(shards)
    lost = [k for k, name in placed.items() if k not in _mapping(shards[str(name)])]
    if lost or content.keys() - placed.keys():
        raise ValueError(
            f"{index} does not tell what its shards hold: they lack {lost}, and it "
            f"lacks {sorted(content.keys() - placed.keys())}"
        )
    return tuple(index.parent / name for name in names), content


def _mapping(content: Any) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"a shard holds a {type(content).__name__}, not tensors")
    return content


def _merged(contents: Mapping[str, Any]) -> Any:
    if len(contents) == 1:
        return next(iter(contents.values()))
    merged: dict[str, Any] = {}
    for name, content in contents.items():
        twice = sorted(merged.keys() & _mapping(content).keys())
        if twice:
            raise ValueError(f"{name} repeats tensors of another shard: {twice}")
        merged |= content
    return merged


# One file.


def _open(path: Path) -> Any:
    """What a weights file holds; its tensors are not read."""
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise ValueError(f"{path} is empty: was the download cut off?")
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer: `git lfs pull` gets the file")
    if start.lstrip().startswith(b"<"):
        raise ValueError(f"{path} is a web page, not weights: the download failed")
    if path.suffix == ".safetensors":
        with naming(path):
            return _open_safetensors(path)
    if path.suffix in TORCH:
        return _open_torch(path, start)
    known = ", ".join((*WEIGHTS, ".index.json"))
    raise ValueError(f"{path}: weights are read from {known}")


def _open_safetensors(path: Path) -> dict[str, FileTensor]:
    file = safe_open(path, framework="numpy")  # checks the header, maps the rest
    tensors = {}
    for key in file.keys():
        about = file.get_slice(key)
        kind, shape = about.get_dtype(), tuple(about.get_shape())
        if kind not in _SAFETENSORS_TYPES:
            raise ValueError(f"{key} is of type {kind}, which is not read")
        tensors[key] = FileTensor(
            shape, _SAFETENSORS_TYPES[kind], lambda key=key: file.get_tensor(key)
        )
    return tensors


def _torch() -> Any:
    return import_module("torch")  # an extra, and slow to import


def _open_torch(path: Path, start: bytes) -> Any:
    try:
        torch = _torch()
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f'{path} is a PyTorch file: pip install "jaxspec[torch]" to read it, or '
            "save it as .safetensors"
        ) from None
    if not start.startswith(b"PK\x03\x04"):
        raise ValueError(
            f"{path} is not in PyTorch's zip format: it is damaged, or saved as before "
            f"PyTorch 1.6, which is not read; {RESAVE}"
        )
    try:
        # Training scripts keep their arguments in a Namespace, which runs nothing.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        what = f" (it asks for {asked[1]})" if asked else ""
        raise ValueError(
            f"{path} was refused: reading it could run code{what}; {RESAVE}"
        ) from None
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read: {str(error).partition('.')[0]}; is it whole?"
        ) from error


def _tensors(path: Path) -> dict[str, FileTensor]:
    """The tensors of one file, its wrappers taken off."""
    content = _open(path)
    with naming(path):
        return {k: _file_tensor(k, x) for k, x in peel(content).tensors.items()}


def _file_tensor(key: str, x: Any) -> FileTensor:
    """A tensor of either library as one that is read later."""
    if isinstance(x, FileTensor):
        return x
    kind = str(x.dtype).removeprefix("torch.")
    if str(x.layout) != "torch.strided" or x.is_quantized or x.is_meta:
        raise ValueError(f"{key} is not a plain tensor ({kind}, {x.layout})")
    try:
        dtype = np.dtype(kind)
    except TypeError:
        raise ValueError(f"{key} is of type {kind}, which is not read") from None
    return FileTensor(tuple(x.shape), dtype, lambda: _to_numpy(x.detach(), dtype))


def _to_numpy(x: Any, dtype: np.dtype) -> np.ndarray:
    """A torch tensor's own memory; what NumPy has no type for by its bits."""
    if dtype.isbuiltin == 1:
        return x.numpy()
    torch = _torch()
    bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    return x.view(bits).numpy().view(dtype)
