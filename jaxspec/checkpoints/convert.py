"""Strict conversion between PyTorch state dicts and our parameters, from one table.

A table says how our parameters are made of PyTorch tensors, by layouts that only move
values. It is read in both directions, so that a conversion and its inverse cannot
drift apart. Arrays are NumPy's on both sides; dtypes are kept unless another is asked
for. Tensors may lie in files: each is read when its parameter is made, and stacked
parameters are made a layer at a time, so that little is in memory at once.
"""

import difflib
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.models.stacks import restack


class Tensor(Protocol):
    """What is asked of a state dict's values; `np.asarray` gives those of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


FLOATS = tuple(map(np.dtype, (np.float32, np.float16, jnp.bfloat16)))
_FLOAT_NAMES = ", ".join(map(str, FLOATS))


@dataclass(frozen=True)
class Layout:
    """How one tensor is laid out on either side; views, where it can be."""

    to_ours: Callable[[np.ndarray], np.ndarray]
    to_torch: Callable[[np.ndarray], np.ndarray]


SAME = Layout(lambda x: x, lambda x: x)
LINEAR = Layout(lambda x: x.T, lambda x: x.T)  # (out, in), (in, out)
CONV = Layout(  # OIHW, HWIO
    lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1)
)
LEADING_ONE = Layout(lambda x: x[0], lambda x: x[None])  # (1, ...), (...)


@dataclass(frozen=True)
class Entry:
    """One line of a table: a parameter of ours and the tensors that it is made of.

    Attributes:
      path: of our parameter, its parts joined by "/".
      keys: of the PyTorch tensors, joined along our last axis in this order. Where they
        hold `{layer}`, layers 0, 1, ... are stacked along our first axis.
      layout: of each tensor; a tuple where they differ, in the order of the keys.
    """

    path: str
    keys: tuple[str, ...]
    layout: Layout | tuple[Layout, ...] = SAME

    @property
    def layouts(self) -> tuple[Layout, ...]:
        if isinstance(self.layout, tuple):
            return self.layout
        return (self.layout,) * len(self.keys)

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.keys[0]

    def sources(self, shape: tuple[int, ...]) -> list[list[str]]:
        """PyTorch keys of a parameter of this shape: a list a layer, or one list."""
        layers = range(shape[0] if self.stacked else 1)
        return [[key.format(layer=i) for key in self.keys] for i in layers]

    def pieces(
        self, state_dict: Mapping[str, Tensor], shape: tuple[int, ...], dtype: np.dtype
    ) -> Iterator[np.ndarray]:
        """Our parameter in pieces that lie behind each other: a layer, or all of it."""
        for keys in self.sources(shape):
            parts = [
                layout.to_ours(np.asarray(state_dict[key]))
                for key, layout in zip(keys, self.layouts, strict=True)
            ]
            with np.errstate(over="ignore"):  # whoever writes them looks for infinities
                parts = [part.astype(dtype, copy=False) for part in parts]
            yield parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def split(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """The PyTorch keys and tensors of our parameter, as views of it."""
        layers = value if self.stacked else [value]
        for keys, layer in zip(self.sources(value.shape), layers, strict=True):
            parts = np.split(layer, len(keys), axis=-1)
            for key, part, layout in zip(keys, parts, self.layouts, strict=True):
                yield key, layout.to_torch(part)


@dataclass(frozen=True)
class Parameter:
    """A parameter of ours that is read piece by piece, when asked for.

    Attributes:
      shape, dtype: of all of it.
      pieces: gives its values in order; pieces may be views of the tensors.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def array(self) -> np.ndarray:
        """All of it, sharing no memory with the tensors."""
        out = np.empty(self.shape, self.dtype)
        flat, at = out.reshape(-1), 0
        for piece in self.pieces():
            flat[at : at + piece.size] = piece.reshape(-1)
            at += piece.size
        return out


@dataclass(frozen=True)
class Table:
    """The key table of one family of checkpoints.

    Attributes:
      entries: `config -> entries`; those for parameters that a model of this
        configuration does not have are passed over.
      init: `config -> variables`, the abstract parameters of the model.
      not_weights: keys that some files hold beside the weights, and that are dropped; a
        `*` stands for anything.
      unused: `config -> keys`, as above, of weights that the model does not run.
      tied: `config -> {key: other}`, keys that hold what the other holds. A file may
        have either or both; if both, they must be equal. `to_torch` gives the other.
    """

    entries: Callable[[Any], Iterable[Entry]]
    init: Callable[[Any], Any]
    not_weights: frozenset[str] = frozenset()
    unused: Callable[[Any], Iterable[str]] = lambda config: ()
    tied: Callable[[Any], Mapping[str, str]] = lambda config: {}

    def drops(self, key: str, config) -> bool:
        """Whether a key of a state dict is passed over."""
        if key in self.tied(config):
            return True
        patterns = (*self.not_weights, *self.unused(config))
        return any(fnmatchcase(key, pattern) for pattern in patterns)

    def untied(self, state_dict: Mapping[str, Tensor], config) -> Mapping[str, Tensor]:
        """The state dict, keys that are missing looked up by those they are tied to."""
        found = {
            other: state_dict[key]
            for key, other in self.tied(config).items()
            if key in state_dict and other not in state_dict
        }
        rest: Any = state_dict  # may read its tensors when asked: not to be copied
        return ChainMap(found, rest) if found else state_dict

    def plan(self, config) -> list[tuple[Entry, tuple[int, ...]]]:
        """The entry and the shape of every parameter of the model."""
        entries = {entry.path: entry for entry in self.entries(config)}
        shapes = flatten_dict(self.init(config)["params"], sep="/")
        unknown = sorted(shapes.keys() - entries.keys())
        if unknown:
            raise ValueError(f"the table has no entry for {unknown}: another family?")
        return [(entries[path], leaf.shape) for path, leaf in shapes.items()]


def check_dtype(dtype: Any) -> None:
    """Raises ValueError for a type, or a name of one, that weights do not have."""
    if dtype not in (*FLOATS, *map(str, FLOATS)):
        raise ValueError(f"dtype must be one of {_FLOAT_NAMES}, not {dtype!r}")


def parameters(
    state_dict: Mapping[str, Tensor], config: Any, table: Table, dtype=None
) -> dict[str, Parameter]:
    """The model's parameters by their paths, checked but not read.

    Args:
      state_dict: may hold tensors that lie in files.
      config: of the model.
      table: of its family.
      dtype: cast to it; None keeps what the tensors have.

    Raises:
      ValueError: tensors are missing, unexpected, of another shape or of a type that
        weights do not have; the message lists all of them.
    """
    if dtype is not None:
        check_dtype(dtype)
    plan = table.plan(config)
    state_dict = table.untied(state_dict, config)
    problems = list(_problems(state_dict, plan, table, config, dtype is None))
    if problems:
        count = f"{len(problems)} problem" + "s" * (len(problems) > 1)
        raise ValueError(
            f"{count} in the state dict; nothing was converted:\n  "
            + "\n  ".join(problems)
        )

    def parameter(entry: Entry, shape: tuple[int, ...]) -> Parameter:
        first = state_dict[entry.sources(shape)[0][0]]
        kept = np.dtype(first.dtype if dtype is None else dtype)
        return Parameter(shape, kept, partial(entry.pieces, state_dict, shape, kept))

    return {entry.path: parameter(entry, shape) for entry, shape in plan}


def convert(
    state_dict: Mapping[str, Tensor], config: Any, table: Table
) -> dict[str, Any]:
    """Parameters, as the model's `init` gives them, from a PyTorch state dict.

    Raises:
      ValueError: as `parameters` does.
    """
    found = parameters(state_dict, config, table)
    flat = {path: parameter.array() for path, parameter in found.items()}
    return {"params": unflatten_dict(flat, sep="/")}


def to_torch(params: Any, config: Any, table: Table) -> dict[str, np.ndarray]:
    """The PyTorch state dict of parameters: the inverse of `convert`.

    Layers may be stacked or apart.

    Raises:
      ValueError: the parameters are not those of a model of this configuration.
    """
    flat = jax.tree.map(np.asarray, restack(params)["params"])
    flat = flatten_dict(flat, sep="/")
    plan = table.plan(config)
    want = {entry.path: shape for entry, shape in plan}
    found = {path: value.shape for path, value in flat.items()}
    if want != found:
        wrong = sorted({path for path, _ in want.items() ^ found.items()})
        raise ValueError(f"parameters do not fit the configuration: {wrong}")
    return {
        key: np.ascontiguousarray(tensor)
        for entry, _ in plan
        for key, tensor in entry.split(flat[entry.path])
    }


def torch_shapes(
    plan: Iterable[tuple[Entry, tuple[int, ...]]],
) -> dict[str, tuple[int, ...]]:
    """The tensors that `Table.plan` asks for: their names and shapes."""
    # Splitting stand-ins, which take no memory, gives what PyTorch should have.
    return {
        key: tensor.shape
        for entry, shape in plan
        for key, tensor in entry.split(np.broadcast_to(np.float32(0), shape))
    }


def _problems(
    state_dict: Mapping[str, Tensor],
    plan: list[tuple[Entry, tuple[int, ...]]],
    table: Table,
    config: Any,
    same_types: bool,
) -> Iterator[str]:
    """Everything that keeps a state dict from fitting, a line each."""
    want = torch_shapes(plan)
    missing = [key for key in want if key not in state_dict]
    unexpected = [k for k in state_dict if k not in want and not table.drops(k, config)]
    for key in missing:
        yield f"missing {key} {list(want[key])}" + _nearest(key, unexpected)
    for key in unexpected:
        yield f"unexpected {key} {list(np.shape(state_dict[key]))}" + _nearest(
            key, missing
        )
    for key in want:
        shape = np.shape(state_dict[key]) if key in state_dict else want[key]
        if shape != want[key]:
            yield f"shape of {key} is {list(shape)}, not {list(want[key])}"
    for key, other in table.tied(config).items():
        if key in state_dict and other in state_dict:
            one, two = np.asarray(state_dict[key]), np.asarray(state_dict[other])
            if not np.array_equal(one, two):
                yield f"{key} differs from {other}, which it is tied to"
    for entry, shape in plan:
        keys = [key for keys in entry.sources(shape) for key in keys]
        types = {k: state_dict[k].dtype for k in keys if k in state_dict}
        yield from _mistyped(types, same_types)


def _mistyped(types: Mapping[str, np.dtype], same: bool) -> Iterator[str]:
    """Types that weights do not have; differing types of the tensors of one entry."""
    for key, dtype in types.items():
        if dtype not in FLOATS:
            yield f"type of {key} is {dtype}, not one of {_FLOAT_NAMES}"
    floats = {dtype: key for key, dtype in types.items() if dtype in FLOATS}
    if same and len(floats) > 1:  # joining would convert some without a word
        found = ", ".join(f"{dtype} in {key}" for dtype, key in floats.items())
        yield f"types differ in what becomes one array: {found}"


def _nearest(key: str, candidates: list[str]) -> str:
    found = difflib.get_close_matches(key, candidates, n=1, cutoff=0.75)
    return f" (nearest: {found[0]})" if found else ""
