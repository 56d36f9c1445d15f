"""One published model at a time: converted into a folder of ours, and loaded from it.

The folder holds the weights as a family's folder does (`vq.safetensors`,
`decoders-256.safetensors`), `config.json` with the configuration of the model, and
`provenance.json` with where it came from.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import jaxspec
from jaxspec.checkpoints.convert import Parameter, parameters
from jaxspec.checkpoints.folder import from_dict
from jaxspec.checkpoints.published import (
    CELL,
    DECODERS,
    DRAFTERS,
    FAMILIES,
    LPDS,
    Family,
    identify,
)
from jaxspec.checkpoints.readers import Checkpoint, read, read_json
from jaxspec.checkpoints.trees import flatten, unflatten
from jaxspec.checkpoints.weights import read_weights, to_files
from jaxspec.checkpoints.writer import (
    CONFIG,
    ORBAX,
    check_format,
    check_space,
    map_safetensors,
    new_folder,
    write_json,
    write_orbax,
    write_safetensors,
)

PROVENANCE = "provenance.json"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Part:
    """One model of a folder: what it is made of.

    Attributes:
      checkpoint: where it comes from.
      family: that it is of.
      config: of the model.
      place: in the tree of a folder's parameters, such as "vq" or "decoders/256".
      parameters: ours, by their paths in that tree, not read yet.
      dtype: that they are cast to, or None.
      told: what the caller said of it, for its provenance.
    """

    checkpoint: Checkpoint
    family: Family
    config: Any
    place: str
    parameters: dict[str, Parameter]
    dtype: str | None
    told: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.parameters.values())


def open_model(
    path: str | os.PathLike,
    *,
    part: str | None = None,
    size: int | None = None,
    heads: int | None = None,
    weights: str | None = None,
    dtype=None,
) -> Part:
    """Opens a published model and checks that all of it converts; reads no weights.

    Args:
      path: as for `read`.
      part: what it must be in a family, such as `DRAFTERS`; None is anything.
      size, heads: as for `Family.configure`.
      weights: as for `read`.
      dtype: cast to it, such as "bfloat16"; None keeps what the file has.

    Raises:
      FileNotFoundError, ModuleNotFoundError: as `read` does.
      ValueError: as `read` and `Family.configure` do; it is of no known family, or
        another part; or its tensors do not fit, with all that is wrong.
    """
    checkpoint = read(path, weights)
    try:
        family = identify(checkpoint.tensors)
        if family is None:
            names = ", ".join(family.name for family in FAMILIES)
            first = ", ".join(list(checkpoint.tensors)[:3])
            raise ValueError(f"of none of the families {names}: it has {first}, ...")
        if part not in (None, family.part):
            kinds = " or ".join(x.name for x in FAMILIES if x.part == part)
            raise ValueError(f"it is of {family.name}, not of {kinds}")
        config = family.configure(checkpoint, size, heads)
        found = parameters(checkpoint.tensors, config, family.table, dtype)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from None
    place = family.part
    if place in (DECODERS, DRAFTERS, LPDS):
        place = f"{place}/{CELL * config.grid[0]}"
    ours = {f"{place}/params/{path}": x for path, x in found.items()}
    return Part(checkpoint, family, config, place, ours, dtype and str(np.dtype(dtype)))


def write_parts(
    folder: Path,
    parts: list[Part],
    progress: Progress | None = None,
    format: str = "safetensors",
) -> dict[str, Any]:
    """Streams the weights of parts into a folder; returns their provenance.

    Args:
      folder: that exists.
      parts: each of another place.
      progress: called with bytes done and bytes in all, of hashing and of writing.
      format: as for `convert_model`.
    """
    sources = {part.place: part.checkpoint.files for part in parts}
    total = sum(part.nbytes for part in parts)
    total += sum(f.stat().st_size for files in sources.values() for f in files)
    done = 0

    def more(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    found = {part.place: _provenance(part, more) for part in parts}
    ours = {key: x for part in parts for key, x in part.parameters.items()}
    files = {folder / name: values for name, values in to_files(ours).items()}
    for file, values in files.items():
        write_safetensors(file, values, more)
    if format == ORBAX:  # which takes whole arrays: from the disk, not from memory
        mapped = [map_safetensors(file) for file in files]
        write_orbax(folder, unflatten({k: x for m in mapped for k, x in m.items()}))
        for file in files:
            file.unlink()
    return {"jaxspec": jaxspec.__version__, "parts": found}


def _provenance(part: Part, more: Callable[[int], None]) -> dict[str, Any]:
    checkpoint = part.checkpoint
    return {
        "family": part.family.name,
        "size": part.family.size(checkpoint.tensors),
        "files": [
            {
                "name": file.name,
                "bytes": file.stat().st_size,
                "sha256": _sha256(file, more),
            }
            for file in checkpoint.files
        ],
        "containers": list(checkpoint.containers),
        "arguments": checkpoint.about,
        "left_out": list(checkpoint.left_out),
        "dropped": [
            k for k in checkpoint.tensors if part.family.table.drops(k, part.config)
        ],
        "types": sorted({str(x.dtype) for x in checkpoint.tensors.values()}),
        "cast_to": part.dtype,
        **({"told": dict(part.told)} if part.told else {}),
    }


def _sha256(path: Path, more: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            more(len(block))
    return digest.hexdigest()


def convert_model(
    path: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    part: str | None = None,
    progress: Progress | None = None,
    format: str = "safetensors",
    **how,
) -> dict[str, Any]:
    """Converts one published model into a new folder, which `load_model` opens.

    Args:
      path: as for `read`.
      folder: must not exist or be empty; it appears when all of it is written.
      part: what it must be in a family, such as `DRAFTERS`; None is anything.
      progress: called with bytes done and bytes in all.
      format: "safetensors" (a file for each model), or "orbax", which needs twice the
        space while it is written.
      **how: size, heads, weights and dtype, as for `open_model`.

    Returns:
      What `provenance.json` holds.

    Raises:
      FileNotFoundError, ModuleNotFoundError, ValueError: as `open_model` does; the
        folder is not empty; weights are not finite; the format is not known.
      OSError: it cannot be written.
    """
    model = open_model(path, part=part, **how)

    def write(partial: Path) -> None:
        values = {
            "family": model.family.name,
            "part": model.place,
            "config": dataclasses.asdict(model.config),
        }
        write_json(partial / CONFIG, values)

    return write_folder(Path(folder), [model], write, progress, format)


def write_folder(
    folder: Path,
    parts: list[Part],
    write: Callable[[Path], None],
    progress: Progress | None,
    format: str,
) -> dict[str, Any]:
    """Converts parts into a new folder; returns what `provenance.json` holds.

    Args:
      folder, progress, format: as for `convert_model`.
      parts: each of another place.
      write: writes `config.json`, and whatever else there is, into a folder.
    """
    check_format(format)
    needed = sum(part.nbytes for part in parts)
    check_space(folder.absolute(), needed * (2 if format == ORBAX else 1))
    with new_folder(folder) as partial:
        provenance = write_parts(partial, parts, progress, format)
        write(partial)
        write_json(partial / PROVENANCE, provenance)
    return provenance


def load_model(folder: str | os.PathLike, *, dtype=None) -> tuple[Any, dict[str, Any]]:
    """The configuration and the parameters of a model that `convert_model` wrote.

    Args:
      folder: that it wrote.
      dtype: of the weights in memory; None keeps the file's.

    Raises:
      FileNotFoundError: it holds no config.json.
      ValueError: it is of another kind, or damaged.
    """
    folder = Path(folder)
    values = read_json(folder / CONFIG)
    families = {family.name: family for family in FAMILIES}
    family, place = families.get(values.get("family", "")), values.get("part")
    if family is None or place is None:
        raise ValueError(f"{folder} is not a folder that `convert_model` wrote")
    config = from_dict(family.kind, values["config"])
    want = unflatten({place: family.table.init(config)})
    params = unflatten(read_weights(folder, flatten(want), dtype))
    for name in place.split("/"):
        params = params[name]
    return config, params
