"""Time to cut a distribution to its top k, by bits as in `jaxspec.sampling`, or sorted.

python -m experiments.bench_sampling
"""

import statistics
import time

import jax
import jax.numpy as jnp

from jaxspec.sampling import keep_top_k


def by_sorting(logits: jax.Array, k: int | jax.Array) -> jax.Array:
    kth = jnp.take(jnp.sort(logits, axis=-1), logits.shape[-1] - k, axis=-1)
    return jnp.where(logits < kth[..., None], -jnp.inf, logits)


def microseconds(keep, logits: jax.Array, k: jax.Array) -> float:
    """Median time of one cut among twenty in a compiled loop."""
    again = lambda _, x: jnp.where(jnp.isneginf(keep(x, k)), x * 0.999, x)
    run = jax.jit(lambda x: jax.lax.fori_loop(0, 20, again, x))
    jax.block_until_ready(run(logits))
    times = []
    for _ in range(11):
        began = time.perf_counter()
        jax.block_until_ready(run(logits))
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times) / 20


def main() -> None:
    print("codes  cells    sorted   by bits  (microseconds)")
    for codes in (512, 16384):
        for cells in (1, 16):
            logits = jax.random.normal(jax.random.key(0), (1, cells, codes))
            k = jnp.int32(100)
            a, b = (microseconds(f, logits, k) for f in (by_sorting, keep_top_k))
            print(f"{codes:5d} {cells:6d} {a:9.1f} {b:9.1f}")


if __name__ == "__main__":
    main()
