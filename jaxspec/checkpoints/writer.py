"""Writing our folders: streamed, and whole or not at all.

Parameters are written as they are read, a layer at a time. A folder is filled under
another name and renamed once it is whole; what a killed run left is removed by the next
that writes the same folder.
"""

import errno
import glob
import json
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.convert import Parameter

CONFIG = "config.json"
ORBAX = "orbax"
FORMATS = ("safetensors", ORBAX)
_SAFETENSORS_NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(jnp.bfloat16): "BF16",
}


@contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """A folder to fill, which takes its name when all went well.

    Raises:
      ValueError: the folder exists and is not empty, or another run is writing it.
      OSError: it cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder")
    others = f".{glob.escape(folder.name)}.{'[0-9a-f]' * 32}.partial"
    for stale in folder.parent.glob(others):
        if not _abandoned(stale / CONFIG):
            raise ValueError(f"{folder} is being written by another run")
        shutil.rmtree(stale, ignore_errors=True)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise OSError(f"cannot write {folder}: {error.strerror}") from error
        with (partial / CONFIG).open("w") as held:
            lock(held)
            yield partial
            if folder.exists():
                folder.rmdir()
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def lock(file: IO, *, wait: bool = False) -> bool:
    """Takes an open file that no one else holds, until it is closed or its holder dies.

    Returns whether it did; with `wait`, it does when it can.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _abandoned(config: Path) -> bool:
    try:
        with config.open("a") as file:
            return lock(file)
    except OSError:  # killed before it was made
        return True


def write_safetensors(
    path: Path,
    parameters: Mapping[str, Parameter],
    wrote: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes parameters one after the other; `wrote` is told the bytes of each piece.

    Raises:
      OSError: the disk is full, or another fault of writing.
      ValueError: values are not finite.
    """
    # The widest first: then each begins at a multiple of its width.
    order = sorted(parameters, key=lambda key: -parameters[key].dtype.itemsize)
    header, at = {}, 0
    for key in order:
        x = parameters[key]
        header[key] = {
            "dtype": _SAFETENSORS_NAMES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [at, at + x.nbytes],
        }
        at += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _writing(path), path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key in order:
            for piece in parameters[key].pieces():
                if not np.isfinite(piece).all():
                    raise ValueError(f"{key} is not finite as {piece.dtype}")
                # By bytes: bfloat16 is no type of Python's buffers.
                values = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                file.write(values.data)
                wrote(values.nbytes)
        file.flush()
        os.fsync(file.fileno())


def map_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file of `write_safetensors`, mapped: read where they are used."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, mode="r", offset=8 + length)
    types = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}
    return {
        key: data[slice(*x["data_offsets"])].view(types[x["dtype"]]).reshape(x["shape"])
        for key, x in header.items()
    }


def write_orbax(folder: Path, weights: Any) -> None:
    """Writes a tree of arrays as the orbax checkpoint of a folder."""
    import orbax.checkpoint as ocp  # slow to import

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / ORBAX, weights)


def check_format(format: str) -> None:
    """Raises ValueError for a format that weights are not written in."""
    if format not in FORMATS:
        raise ValueError(f"format must be {' or '.join(FORMATS)}, not {format!r}")


@contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(f"no space left for {path.name}; nothing was kept") from error
        raise


def check_space(folder: Path, needed: int) -> None:
    """Raises OSError where the disk that will hold a folder has too little room."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{needed:,} bytes are needed, and {folder} has {free:,} left")


def to_json(values: Any) -> str:
    """Readable JSON; of what JSON has no form for, the type."""
    return json.dumps(
        values, indent=1, skipkeys=True, default=lambda x: f"<{type(x).__name__}>"
    )


def write_json(path: Path, values: Any) -> None:
    """Writes a file of `to_json`."""
    path.write_text(to_json(values) + "\n", encoding="utf8")
