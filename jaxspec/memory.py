"""Peak memory of a function, told from its program: nothing is computed.

The program (a jaxpr) is walked in order. What an operation makes is allocated, and what
no later one reads is freed; an operation that goes element by element, or writes into
an array, takes over an operand that is not read again; a broadcast that only such
operations read is never made. XLA fuses more than that and orders operations itself, so
this is an estimate, from above more often than from below.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

# Operations that are another program, run once: it is put in their place.
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")
# What writes into its first operand.
_UPDATES = ("scatter", "scatter-add", "scatter_add", "dynamic_update_slice")
_BROADCASTS = ("broadcast_in_dim", "iota")
# What looks at other places than its own, though shapes may be alike.
_ACROSS = (
    *("dot_general", "conv_general_dilated", "gather", "dynamic_slice", "transpose"),
    *("sort", "rev", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
    *("while", "scan", "cond", "concatenate", "pad", *_UPDATES),
)


@dataclass(frozen=True, eq=False)
class Value:
    """An array of a program, the same wherever it goes."""

    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Operation:
    """One of a program without calls; `inputs` has no literals."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    equation: Any

    @property
    def elementwise(self) -> bool:
        """It can be fused: every number comes from those at its own place."""
        if self.name in _ACROSS or len(self.outputs) != 1:
            return False
        return {x.shape for x in self.inputs if x.shape} <= {self.outputs[0].shape}

    @property
    def in_place(self) -> bool:
        """It may write over an operand."""
        return self.elementwise or self.name in (*_UPDATES, "while", "scan")


def size_of(tree: Any) -> int:
    """Bytes of arrays, or of what stands for them (`jax.ShapeDtypeStruct`)."""
    return sum(_bytes(x) for x in jax.tree.leaves(tree))


def _bytes(x: Any) -> int:
    dtype = x.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return int(np.prod(x.shape)) * 8
    return int(np.prod(x.shape)) * jnp.dtype(dtype).itemsize


def peak(function: Callable, *args: Any, donated: Sequence[int] = ()) -> int:
    """Most bytes that are there at once beside the inputs that are not donated.

    Args:
      function: of pytrees of arrays; it is traced, not run.
      *args: arrays or `jax.ShapeDtypeStruct`s.
      donated: numbers of the arguments that may be written over.
    """
    program = jax.make_jaxpr(function)(*args)
    counts = [len(jax.tree.leaves(x)) for x in args]
    owned = [i in donated for i, count in enumerate(counts) for _ in range(count)]
    return _peak(program.jaxpr, owned)


def _peak(program: Any, owned: Sequence[bool]) -> int:
    """Most bytes at once, `owned` inputs among them: those may be written over."""
    inputs = [_value(x) for x in program.invars]
    operations: list[Operation] = []
    results = set(_flatten(program, inputs, operations))
    readers: dict[Value, list[Operation]] = {}
    for op in operations:
        for x in set(op.inputs):
            readers.setdefault(x, []).append(op)
    alive = {x: x.size for x, own in zip(inputs, owned, strict=True) if own}
    live = most = sum(alive.values())
    for op in operations:
        dying = [
            x
            for x in set(op.inputs)
            if x in alive and x not in results and readers[x][-1] is op
        ]
        freed = sum(alive.pop(x) for x in dying)
        made = {x: x.size for x in op.outputs}
        if op.name in _BROADCASTS:
            (x,) = made
            if x not in results and all(r.elementwise for r in readers.get(x, [])):
                made[x] = 0  # its numbers are made where they are read
        new = sum(made.values())
        taken = min(freed, new) if op.in_place else 0
        most = max(most, live + new - taken + _inside(op))
        live += new - freed
        alive |= made
    return most


def _value(x: Any) -> Value:
    return Value(tuple(x.aval.shape), _bytes(x.aval))


def _flatten(
    program: Any, inputs: Sequence[Value | None], operations: list[Operation]
) -> list[Value]:
    """Adds a program's operations, those of programs that it calls in their places.

    Returns:
      Its results. A program that is called twice has other values each time.
    """
    values = {x: v for x, v in zip(program.invars, inputs, strict=True) if v}

    def read(x: Any) -> Value | None:
        if isinstance(x, Literal):
            return None
        if x not in values:  # a constant of the program
            values[x] = _value(x)
        return values[x]

    for eqn in program.eqns:
        given = [read(x) for x in eqn.invars]
        called = eqn.params.get("jaxpr") if eqn.primitive.name in _CALLS else None
        called = called or eqn.params.get("call_jaxpr")
        if called is not None:
            made = _flatten(_open(called), given, operations)
        else:
            made = [_value(x) for x in eqn.outvars]
            there = tuple(x for x in given if x is not None)
            operations.append(Operation(eqn.primitive.name, there, tuple(made), eqn))
        values |= dict(zip(eqn.outvars, made, strict=True))
    return [read(x) or _value(x) for x in program.outvars]


def _inside(op: Operation) -> int:
    """Bytes that an operation needs while it runs, beside inputs and outputs."""
    params = op.equation.params
    if op.name == "while":
        body, fixed = _open(params["body_jaxpr"]), params["body_nconsts"]
        return _beside(body, [i >= fixed for i in range(len(body.invars))])
    if op.name == "scan":
        body = _open(params["jaxpr"])
        # What is stacked has an axis more outside; what is carried has not. How else it
        # is told differs between versions of JAX.
        whole = lambda outer, inner: outer.aval.ndim == inner.aval.ndim
        ins = [*map(whole, op.equation.invars, body.invars)]
        carried = sum(map(whole, op.equation.outvars, body.outvars))
        first = sum(ins) - carried  # behind the constants
        owned = [first <= i < first + carried for i in range(len(ins))]
        return _beside(body, owned)
    if op.name == "cond":
        branches = [_open(x) for x in params["branches"]]
        return max(_peak(x, [False] * len(x.invars)) for x in branches)
    return 0


def _open(program: Any) -> Any:
    """The jaxpr, closed over constants or not."""
    return getattr(program, "jaxpr", program)


def _beside(body: Any, owned: Sequence[bool]) -> int:
    """What a loop's body needs beside what it carries."""
    carried = sum(
        _bytes(x.aval) for x, own in zip(body.invars, owned, strict=True) if own
    )
    return _peak(body, owned) - carried
