"""Matrices in int8: a quarter of float32's bytes, which a pass of few cells is made of.

Symmetric, with one scale a column (Dettmers et al. 2022, arXiv 2208.07339, section 2.1,
"vector-wise"). Only weights lose precision. On a CPU the inputs are split into two int8
digits, 16 bits together, since XLA multiplies int8 by int8 without making the matrix
float first; elsewhere the matrix is turned into the inputs' type as it is read.

Axis legend: C inputs, F outputs of a matrix [C, F], or of each of those side by side in
[C, parts, F].
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

_LARGEST = 127
_SECOND = 2 * _LARGEST  # of the second digit in one of the first


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """A matrix [C, ...] whose column j is `values[j] * scale[j]`.

    Attributes:
      values: int8 [..., C]: a column lies in one piece, as the CPU reads it fastest.
      scale: float32 [...].
    """

    values: jax.Array
    scale: jax.Array

    @staticmethod
    @jax.jit
    def of(matrix: jax.Array) -> "Int8":
        """The nearest to a matrix [C, ...]: no number is off by more than scale / 2."""
        columns = jnp.moveaxis(matrix.astype(jnp.float32), 0, -1)
        scale = jnp.max(jnp.abs(columns), axis=-1) / _LARGEST
        divisor = jnp.where(scale > 0, scale, 1.0)
        values = jnp.round(columns / divisor[..., None]).astype(jnp.int8)
        return Int8(values, scale)

    def matrix(self) -> jax.Array:
        """What it stands for, float32 [C, ...]."""
        columns = self.values.astype(jnp.float32) * self.scale[..., None]
        return jnp.moveaxis(columns, -1, 0)


def matmul(x: jax.Array, weight: jax.Array | Int8) -> jax.Array:
    """Products of x [..., C] with a matrix [C, ...] or `Int8`, in the type of x."""
    if not isinstance(weight, Int8):
        return jnp.tensordot(x, weight, 1)
    return lax.platform_dependent(
        x, weight.values, weight.scale, cpu=by_digits, default=by_floats
    )


def has_int8(tree: Any) -> bool:
    """Whether there is an `Int8` in it."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Int8))
    return any(isinstance(x, Int8) for x in leaves)


def parameter(module: nn.Module, name: str, init, shape: tuple[int, ...]):
    """`module.param`, of a matrix that may be `Int8`."""
    found = module.get_variable("params", name)
    return found if isinstance(found, Int8) else module.param(name, init, shape)


def by_floats(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    y = _products(x, values.astype(x.dtype), jnp.float32)
    return (y * _along(scale, y)).astype(x.dtype)


def by_digits(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """By integers, so that no row depends on how many there are.

    An input is off by at most the largest of its row / (4 * 127 ** 2).
    """
    size = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) / _LARGEST
    # Not by zero; whatever is not finite stays so by the product with `size`.
    shares = x.astype(jnp.float32) / jnp.where(size == 0, 1.0, size)
    first = jnp.round(shares)
    second = jnp.round((shares - first) * _SECOND)
    # Together, as rows: one row alone would take XLA's slow path.
    digits = jnp.stack([first, second]).astype(jnp.int8)
    first, second = _products(digits, values, jnp.int32).astype(jnp.float32)
    size = jnp.expand_dims(size, tuple(range(x.ndim, first.ndim)))
    y = (first + second / _SECOND) * size
    return (y * _along(scale, y)).astype(x.dtype)


def _products(x: jax.Array, values: jax.Array, dtype) -> jax.Array:
    """Of rows [..., C] and columns [..., C]: the first's axes, then the second's."""
    axes = (((x.ndim - 1,), (values.ndim - 1,)), ((), ()))
    return lax.dot_general(x, values, axes, preferred_element_type=dtype)


def _along(scale: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.broadcast_to(scale, y.shape)
