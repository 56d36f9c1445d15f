"""Meta's files of a model that ran on several devices: slices of every tensor.

A layer that was split by its outputs is joined along the first axis, one that was split
by its inputs along the second, and so are embeddings. Norms of the model's width are
in all files, and were trained apart: their mean is taken. Norms of heads are each
file's own, for its own heads. So does transformers' converter of Chameleon.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxspec.checkpoints.readers import FileTensor


def _mean(slices: Sequence[np.ndarray]) -> np.ndarray:
    return np.mean(slices, axis=0, dtype=np.float32).astype(slices[0].dtype)


_NAME = re.compile(r"consolidated\.(\d\d)\.\w+")
# Names of tensors, and what their slices are made one by.
_JOINS = (
    (r"(.+\.)?(wq|wk|wv|w1|w3|output)\.weight", partial(np.concatenate, axis=0)),
    (r"(.+\.)?(wo|w2|tok_embeddings)\.weight", partial(np.concatenate, axis=1)),
    (r"(.+\.)?[qk]_normalization\.(weight|bias)", np.stack),
    (r"(.+\.)?(attention_norm|ffn_norm|norm)\.weight", _mean),
)


def slices_of(files: Sequence[Path]) -> tuple[Path, ...]:
    """The files of a folder if they are the slices of a model; else none.

    Raises:
      FileNotFoundError: some of the slices are missing.
    """
    numbers = [_NAME.fullmatch(file.name) for file in files]
    if len(files) < 2 or not all(numbers):
        return ()
    there = {int(found[1]) for found in numbers if found}
    missing = sorted(set(range(max(there) + 1)) - there)
    if missing:
        raise FileNotFoundError(
            f"{files[0].parent} lacks slices of its model: consolidated."
            f"{', '.join(f'{number:02d}' for number in missing)}"
        )
    return tuple(sorted(files))


def check_whole(file: Path) -> None:
    """Raises ValueError if a file is one slice of several."""
    found = _NAME.fullmatch(file.name)
    if found is None:
        return
    others = [x for x in file.parent.iterdir() if _NAME.fullmatch(x.name)]
    if len(others) > 1:
        raise ValueError(
            f"{file} is one of {len(others)} slices of a model: give their folder"
        )


def joined(slices: Sequence[Mapping[str, "FileTensor"]]) -> dict[str, "FileTensor"]:
    """The whole tensors, which are read when they are asked for.

    Raises:
      ValueError: the slices do not fit, or hold what is not known to be split somehow.
    """
    first, *rest = slices
    for other in rest:
        if other.keys() != first.keys():
            odd = sorted(other.keys() ^ first.keys())
            raise ValueError(f"not all slices hold {', '.join(odd)}")
    return {key: _whole(key, [x[key] for x in slices]) for key in first}


def _whole(key: str, parts: Sequence["FileTensor"]) -> "FileTensor":
    kinds = {(x.shape, x.dtype) for x in parts}
    if len(kinds) > 1:
        raise ValueError(f"slices of {key} differ: {sorted(map(str, kinds))}")
    join: Any = next((how for name, how in _JOINS if re.fullmatch(name, key)), None)
    if join is None:
        raise ValueError(f"it is not known how {key} is split over the slices")
    shape = list(parts[0].shape)
    if join is np.stack:
        shape.insert(0, len(parts))
    elif join is not _mean:
        shape[join.keywords["axis"]] *= len(parts)
    read = lambda: join([np.asarray(x) for x in parts])
    return replace(parts[0], shape=tuple(shape), read=read)
