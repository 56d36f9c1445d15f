"""Attention to the visible part of the cache alone: what it costs, three ways.

    python -m experiments.bench_attention

LlamaGen-B's 12 layers of 12 heads with 1,025 slots each, some of them visible, batch 1,
float32. Beside `attend`, which reads all slots:

- prefix: `lax.switch` among the first eighth, quarter, half and all of the slots. XLA's
  CPU backend copies what is sliced out of a cache before it multiplies by it;
- chunks: a loop over as many chunks of 256 slots as are visible, with running maximum
  and sum (Dao et al. 2022, FlashAttention, section 3.1).

Milliseconds of all layers, medians; compilation is left out.
"""

import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import typer

from jaxspec.models.transformer import attend

LAYERS, HEADS, SLOTS, WIDTH = 12, 12, 1025, 64
CHUNK = 256
ROUNDS = 9


def last_seen(visible: jax.Array) -> jax.Array:
    """How many slots there are up to the last that a query sees."""
    seen = jnp.any(visible, axis=(0, 1))
    return len(seen) - jnp.argmax(seen[::-1])


def prefix(q, key, value, visible):
    sizes = [-(-SLOTS * part // 8) for part in (1, 2, 4, 8)]

    def first(n, q, key, value, visible):
        return attend(q, key[:, :, :n], value[:, :, :n], visible[..., :n])

    which = jnp.sum(last_seen(visible) > jnp.array(sizes[:-1]))
    ways = [partial(first, n) for n in sizes]
    return jax.lax.switch(which, ways, q, key, value, visible)


def chunks(q, key, value, visible):
    take = partial(jax.lax.dynamic_slice_in_dim, slice_size=CHUNK, axis=2)

    def body(i, carry):
        top, total, out = carry
        at = jnp.minimum(i * CHUNK, SLOTS - CHUNK)
        there = take(visible, at) & (at + jnp.arange(CHUNK) >= i * CHUNK)
        scores = jnp.einsum("bktd,bksd->bkts", q, take(key, at)) * WIDTH**-0.5
        scores = jnp.where(there[:, None], scores, -1e30)
        highest = jnp.maximum(top, scores.max(-1))
        weights, kept = jnp.exp(scores - highest[..., None]), jnp.exp(top - highest)
        more = jnp.einsum("bkts,bksd->bktd", weights, take(value, at))
        return highest, total * kept + weights.sum(-1), out * kept[..., None] + more

    none = jnp.zeros(q.shape[:-1])
    count = -(-last_seen(visible) // CHUNK)
    begin = none - 1e30, none, jnp.zeros(q.shape)
    _, total, out = jax.lax.fori_loop(0, count, body, begin)
    return out / total[..., None]


WAYS = {"all": attend, "prefix": prefix, "chunks": chunks}


def milliseconds(run) -> float:
    jax.block_until_ready(run())
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Prints a table; see the head of the file."""
    rng = np.random.default_rng(0)
    make = lambda n: jnp.asarray(
        rng.standard_normal((1, HEADS, n, WIDTH), dtype=np.float32)
    )
    caches = [(make(SLOTS), make(SLOTS)) for _ in range(LAYERS)]
    whole = lambda way: jax.jit(
        lambda q, caches, seen: [way(q, k, v, seen) for k, v in caches]
    )
    ways = {name: whole(way) for name, way in WAYS.items()}
    print(
        f"| queries | visible of {SLOTS} | {' | '.join(ways)} |\n|---|---|---|---|---|"
    )
    for queries in (1, 16, 64):
        q = make(queries)
        for count in (129, 513, SLOTS):
            seen = jnp.broadcast_to(jnp.arange(SLOTS) < count, (1, queries, SLOTS))
            want = ways["all"](q, caches, seen)[0]
            for way in ways.values():
                np.testing.assert_allclose(way(q, caches, seen)[0], want, atol=1e-5)
            times = [
                f"{milliseconds(partial(way, q, caches, seen)):.2f}"
                for way in ways.values()
            ]
            print(f"| {queries} | {count} | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
