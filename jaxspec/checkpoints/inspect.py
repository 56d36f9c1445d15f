"""What a checkpoint holds, told without loading it."""

import os
from collections import Counter
from math import prod
from typing import Any

from jaxspec.checkpoints.convert import parameters
from jaxspec.checkpoints.published import identify
from jaxspec.checkpoints.readers import Checkpoint, read


def inspect_checkpoint(
    path: str | os.PathLike,
    *,
    weights: str | None = None,
    size: int | None = None,
    heads: int | None = None,
) -> dict[str, Any]:
    """A record of a checkpoint, fit for JSON; reads shapes and types alone.

    Args:
      path: as for `read`.
      weights: as for `read`.
      size, heads: as for `Family.configure`.

    Returns:
      "path", "files" (name, bytes), "containers", "name", "arguments", "left_out",
      "tensors" (name, shape, type, bytes), "values", "bytes", "types" (type, tensors),
      "family" and "size" (None where unknown), "converts", and "problems": why not.

    Raises:
      FileNotFoundError, ModuleNotFoundError, ValueError: as `read` does.
    """
    checkpoint = read(path, weights)
    tensors = checkpoint.tensors
    return {
        "path": str(path),
        "files": [
            {"name": file.name, "bytes": file.stat().st_size}
            for file in checkpoint.files
        ],
        "containers": list(checkpoint.containers),
        "name": checkpoint.name,
        "arguments": checkpoint.about,
        "left_out": list(checkpoint.left_out),
        "tensors": [
            {
                "name": key,
                "shape": list(x.shape),
                "type": str(x.dtype),
                "bytes": x.nbytes,
            }
            for key, x in tensors.items()
        ],
        "values": sum(prod(x.shape) for x in tensors.values()),
        "bytes": checkpoint.nbytes,
        "types": dict(Counter(str(x.dtype) for x in tensors.values())),
        **_family(checkpoint, size, heads),
    }


def _family(
    checkpoint: Checkpoint, size: int | None, heads: int | None
) -> dict[str, Any]:
    found: dict[str, Any] = {"family": None, "size": None, "converts": False}
    problems = ["of no family that is known here"]
    try:
        family = identify(checkpoint.tensors)
        if family is not None:
            found |= {"family": family.name, "size": family.size(checkpoint.tensors)}
            config = family.configure(checkpoint, size, heads)
            parameters(checkpoint.tensors, config, family.table)
            found["converts"], problems = True, []
    except ValueError as error:
        problems = [line.strip() for line in str(error).splitlines()]
    return found | {"problems": problems}
