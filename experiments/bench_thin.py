"""Ways to multiply few rows by a matrix: times over that of reading the matrix.

    python -m experiments.bench_thin
    XLA_FLAGS=--xla_cpu_use_onednn=true python -m experiments.bench_thin

Chains of products with matrices of LlamaGen-B's queries, keys and values, 170 MB
together in float32, so that they come from memory as in a pass. "now" is what passes
run. "first" has the matrix on the left, "transposed" holds it as [outputs, inputs],
"vectors" multiplies row by row, and "sums" adds up products, fused, for each output.
The ways take turns with a sum over as many bytes; the fastest of their rounds counts.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import typer

INPUTS, OUTPUTS, MATRICES, ROUNDS = 768, 2304, 24, 15
ROWS = (1, 2, 4, 8, 16, 32)


def transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def first(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(weight, x, (((0,), (1,)), ((), ()))).T


def vectors(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.stack([row @ weight for row in x])


def sums(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.sum(weight[:, None] * x[None], axis=-1).T


# Whether each takes the matrix as [outputs, inputs].
WAYS: dict[str, tuple[Callable, bool]] = {
    "now": (jnp.matmul, False),
    "first": (first, False),
    "transposed": (transposed, True),
    "vectors": (vectors, False),
    "sums": (sums, True),
}


def chain(way: Callable, x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    """Products, each with what the one before leaves."""
    for weight in weights:
        x = x + 1e-9 * way(x, weight)[:, :INPUTS]
    return x


def main() -> None:
    """Times products; see the head of the file."""
    rng = np.random.default_rng(0)
    shape = MATRICES, INPUTS, OUTPUTS
    plain = [jnp.asarray(x) for x in rng.standard_normal(shape, np.float32)]
    turned = [jnp.asarray(np.ascontiguousarray(np.asarray(x).T)) for x in plain]
    read, array = jax.jit(jnp.sum), jnp.ones(shape, jnp.float32)
    run = jax.jit(chain, static_argnums=0)
    print("| rows | reading, ms | " + " | ".join(WAYS) + " |")
    print("|---" * (len(WAYS) + 2) + "|")
    for rows in ROWS:
        x = jnp.asarray(rng.standard_normal((rows, INPUTS), np.float32))
        times: dict[str, list[float]] = {name: [] for name in ("reading", *WAYS)}
        for _ in range(ROUNDS + 1):  # the first compiles
            began = time.perf_counter()
            read(array).block_until_ready()
            times["reading"].append(time.perf_counter() - began)
            for name, (way, is_turned) in WAYS.items():
                if name == "sums" and rows == 1:
                    continue  # takes hundreds of times as long
                began = time.perf_counter()
                run(way, x, turned if is_turned else plain).block_until_ready()
                times[name].append(time.perf_counter() - began)
        best = {name: min(each[1:]) for name, each in times.items() if each}
        floor = best.pop("reading")
        over = [f"{best[name] / floor:.2f}" if name in best else "" for name in WAYS]
        print(f"| {rows} | {1e3 * floor:.2f} | " + " | ".join(over) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
