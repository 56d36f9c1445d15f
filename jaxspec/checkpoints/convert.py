"""Strict conversion between PyTorch state dicts and our parameters, from one table.

A table says how our parameters are made of PyTorch tensors, by layouts that only move
values. It is read in both directions, so that a conversion and its inverse cannot
drift apart. Arrays are NumPy's on both sides; dtypes are kept.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

FLOATS = tuple(map(np.dtype, (np.float32, np.float16, jnp.bfloat16)))


@dataclass(frozen=True)
class Layout:
    """How one tensor is laid out on either side; both functions return views."""

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
      layout: of each tensor.
    """

    path: str
    keys: tuple[str, ...]
    layout: Layout = SAME

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.keys[0]

    def sources(self, shape: tuple[int, ...]) -> list[list[str]]:
        """PyTorch keys of a parameter of this shape: a list a layer, or one list."""
        layers = range(shape[0] if self.stacked else 1)
        return [[key.format(layer=i) for key in self.keys] for i in layers]

    def join(self, state_dict: Mapping[str, np.ndarray], shape: tuple[int, ...]):
        """Our parameter, contiguous and sharing no memory with the tensors."""
        layers = [
            np.concatenate([self.layout.to_ours(state_dict[k]) for k in keys], axis=-1)
            for keys in self.sources(shape)
        ]
        return np.ascontiguousarray(np.stack(layers) if self.stacked else layers[0])

    def split(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """The PyTorch keys and tensors of our parameter, as views of it."""
        layers = value if self.stacked else [value]
        for keys, layer in zip(self.sources(value.shape), layers, strict=True):
            parts = np.split(layer, len(keys), axis=-1)
            for key, part in zip(keys, parts, strict=True):
                yield key, self.layout.to_torch(part)


@dataclass(frozen=True)
class Table:
    """The key table of one family of checkpoints.

    Attributes:
      entries: `config -> entries`; those for parameters that a model of this
        configuration does not have are passed over.
      init: `config -> variables`, the abstract parameters of the model.
      not_weights: keys that some files hold beside the weights, and that are dropped.
    """

    entries: Callable[[Any], Iterable[Entry]]
    init: Callable[[Any], Any]
    not_weights: frozenset[str] = frozenset()

    def plan(self, config) -> list[tuple[Entry, tuple[int, ...]]]:
        """The entry and the shape of every parameter of the model."""
        entries = {entry.path: entry for entry in self.entries(config)}
        shapes = flatten_dict(self.init(config)["params"], sep="/")
        unknown = sorted(shapes.keys() - entries.keys())
        if unknown:
            raise ValueError(f"the table has no entry for {unknown}: another family?")
        return [(entries[path], leaf.shape) for path, leaf in shapes.items()]


def convert(
    state_dict: Mapping[str, np.ndarray], config: Any, table: Table
) -> dict[str, Any]:
    """Parameters, as the model's `init` gives them, from a PyTorch state dict.

    Raises:
      ValueError: tensors are missing, unexpected, of another shape or of a type that
        weights do not have; the message lists all of them.
    """
    plan = table.plan(config)
    problems = list(_problems(state_dict, plan, table.not_weights))
    if problems:
        count = f"{len(problems)} problem" + "s" * (len(problems) > 1)
        raise ValueError(
            f"{count} in the state dict; nothing was converted:\n  "
            + "\n  ".join(problems)
        )
    flat = {entry.path: entry.join(state_dict, shape) for entry, shape in plan}
    return {"params": unflatten_dict(flat, sep="/")}


def to_torch(params: Any, config: Any, table: Table) -> dict[str, np.ndarray]:
    """The PyTorch state dict of parameters: the inverse of `convert`.

    Raises:
      ValueError: the parameters are not those of a model of this configuration.
    """
    flat = flatten_dict(jax.tree.map(np.asarray, params["params"]), sep="/")
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


def _problems(
    state_dict: Mapping[str, np.ndarray],
    plan: list[tuple[Entry, tuple[int, ...]]],
    not_weights: frozenset[str],
) -> Iterator[str]:
    """Everything that keeps a state dict from fitting, a line each."""
    # Splitting stand-ins, which take no memory, gives the shapes PyTorch should have.
    want = {
        key: tensor.shape
        for entry, shape in plan
        for key, tensor in entry.split(np.broadcast_to(np.float32(0), shape))
    }
    missing = [key for key in want if key not in state_dict]
    unexpected = [k for k in state_dict if k not in want and k not in not_weights]
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
    for entry, shape in plan:
        keys = [key for keys in entry.sources(shape) for key in keys]
        yield from _mistyped({k: state_dict[k].dtype for k in keys if k in state_dict})


def _mistyped(types: Mapping[str, np.dtype]) -> Iterator[str]:
    """Types that weights do not have; differing types of the tensors of one entry."""
    for key, dtype in types.items():
        if dtype not in FLOATS:
            yield f"type of {key} is {dtype}, not one of {', '.join(map(str, FLOATS))}"
    floats = {dtype: key for key, dtype in types.items() if dtype in FLOATS}
    if len(floats) > 1:  # joining would convert some without a word
        found = ", ".join(f"{dtype} in {key}" for dtype, key in floats.items())
        yield f"types differ in what becomes one array: {found}"


def _nearest(key: str, candidates: list[str]) -> str:
    found = difflib.get_close_matches(key, candidates, n=1, cutoff=0.75)
    return f" (nearest: {found[0]})" if found else ""
