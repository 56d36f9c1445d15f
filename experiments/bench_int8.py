"""Ways to multiply by an int8 matrix, beside float32's: milliseconds a product.

    python -m experiments.bench_int8 [--out docs/results/bench_int8.json]

Chains of products with matrices of 75 MB together in int8, so that they come from
memory as in a pass. "digits" is what a CPU runs (`models.int8.matmul`): inputs as two
int8 digits. "floats" turns the matrix to float32 in the pass. "rounded" takes inputs of
one int8 digit, and two rows at least. The ways take turns; the fastest of their rounds
counts, since other work may run beside them.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from experiments.bench_ar import machine
from jaxspec.models.int8 import Int8, by_floats, matmul

SHAPES = ((768, 2304), (768, 4096), (1280, 3840))
INPUTS = (1, 8, 64)
TOTAL = 75e6  # bytes of matrices
ROUNDS = 15


def rounded(x: jax.Array, weight: Int8) -> jax.Array:
    size = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    digits = jnp.round(x / size).astype(jnp.int8)
    digits = jnp.pad(digits, ((0, max(0, 2 - len(x))), (0, 0)))
    axes = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(
        digits, weight.values, axes, preferred_element_type=jnp.int32
    )
    return y[: len(x)].astype(jnp.float32) * size * weight.scale[None]


def floats(x: jax.Array, weight: Int8) -> jax.Array:
    return by_floats(x, weight.values, weight.scale)


def chain(way: Callable, x: jax.Array, weights: list[Any]) -> jax.Array:
    """Products, each with what the one before leaves."""
    for weight in weights:
        x = x + 0.0 * way(x, weight)[:, : x.shape[1]]
    return x


def milliseconds(ways: dict[str, tuple[Callable, Any]], x: jax.Array) -> dict:
    """Of one product, by way; a way comes with its matrices."""
    run = jax.jit(chain, static_argnums=0)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, (way, weights) in ways.items():
            began = time.perf_counter()
            run(way, x, weights).block_until_ready()
            passed = time.perf_counter() - began
            times[name].append(passed / len(weights) * 1e3)
    return {name: min(each[1:]) for name, each in times.items()}


def main(
    out: Annotated[Path | None, typer.Option(help="Writes JSON there.")] = None,
) -> None:
    """Times products; see the head of the file."""
    rng, rows = np.random.default_rng(0), []
    row = "{:>11} {:>7}" + " {:>9}" * 4
    print(row.format("matrix", "inputs", "float32", "floats", "rounded", "digits"))
    for shape in SHAPES:
        count = int(TOTAL // np.prod(shape))
        plain = [
            jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(count)
        ]
        small = [Int8.of(x) for x in plain]
        for inputs in INPUTS:
            x = jnp.asarray(rng.standard_normal((inputs, shape[0]), np.float32))
            ways = {
                "float32": (matmul, plain),
                "floats": (floats, small),
                "rounded": (rounded, small),
                "digits": (matmul, small),
            }
            ms = milliseconds(ways, x)
            rows.append({"matrix": shape, "inputs": inputs, "ms": ms})
            name = f"{shape[0]}x{shape[1]}"
            print(row.format(name, inputs, *(f"{x:.3f}" for x in ms.values())))
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    typer.run(main)
