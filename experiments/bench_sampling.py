"""What a vocabulary costs: pieces of sampling and judging beside the network's pass.

    python -m experiments.bench_sampling --out docs/results/bench_sampling.json
    python -m experiments.bench_sampling --codes 65536 --cells 16 --out ...

The pass is that of LlamaGen-B (111M parameters with 16,384 codes), fed so many cells in
the middle of a grid of 32 x 32, up to its logits: batch 1, float32, random weights. The
pieces are what the decoding methods make of as many rows of logits: log-probabilities,
also of what top-k and top-p leave, draws with their noise, residuals, and what rules
read of p for each draft. Sorting, "lax.top_k" and "threefry bits" are for comparison.

All take turns, and the medians count. Rows of `--out` that are not measured again stay;
those of other code are kept apart by `--label`.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from experiments.bench_ar import machine
from experiments.gpu_check import places
from experiments.roofline import random_target
from jaxspec.acceptance import Grouped, at, residual
from jaxspec.decoding import Target
from jaxspec.figures import atomically
from jaxspec.methods.lantern import Pooled
from jaxspec.models import abstract
from jaxspec.models.cache import Cache
from jaxspec.presets import preset
from jaxspec.sampling import (
    Sampling,
    cell_keys,
    draw,
    gumbel,
    image_keys,
    likeliest,
    log_probs,
)

CODES, CELLS = (16384, 65536), (1, 16, 64, 256)
SORTED = 16  # cells at most that are sorted: XLA's CPU backend takes long over it
GSD, LANTERN = Grouped(7, 6, 0.15, 0.5), Pooled(1000, delta=0.1)


def by_sorting(logits: jax.Array, k: jax.Array) -> jax.Array:
    kth = jnp.take(jnp.sort(logits, axis=-1), logits.shape[-1] - k, axis=-1)
    return jnp.where(logits < kth[..., None], -jnp.inf, logits)


def pieces(codes: int, cells: int) -> dict[str, Callable[[], Any]]:
    """What is done with logits [1, cells, codes], compiled."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    logits, log_q = (jax.nn.log_softmax(2 * normal(1, cells, codes)) for _ in range(2))
    log_p, vectors = jax.nn.log_softmax(logits), normal(codes, 8)
    integers = lambda *shape: jnp.asarray(rng.integers(0, codes, shape), jnp.int32)
    drafts, near = integers(1, cells), integers(codes, 1000)
    keys = cell_keys(image_keys(0, [0], [0]), jnp.arange(cells)[None])
    of = partial(Sampling.create, codes)
    certain = log_probs(logits, of(temperature=0))

    def bits(keys):
        return jax.vmap(lambda key: jax.random.bits(key, (codes,)))(keys[0])

    def pool(p, drafts, near):
        return jnp.sum(jnp.exp(at(p, near[drafts][..., :16])), axis=-1)

    made: dict[str, tuple] = {
        "log-probabilities": (log_probs, logits, of()),
        "the same, top-k 100": (log_probs, logits, of(top_k=100)),
        "the same, top-p 0.9": (log_probs, logits, of(top_p=0.9)),
        "top-k 100 by sorting": (by_sorting, logits, jnp.int32(100)),
        "lax.top_k(100)": (lambda x: jax.lax.top_k(x, 100)[0], logits),
        "likeliest": (likeliest, logits),
        "draw": (draw, keys, log_p),
        "draw, temperature 0": (draw, keys, certain),
        "Gumbel noise": (partial(gumbel, size=codes), keys),
        "threefry bits": (bits, keys),
        "residual": (residual, log_p, log_q),
        "GSD's groups": (GSD, log_p, log_q, drafts, vectors),
        "MuLo's 16 nearest": (pool, log_p, drafts, near),
        "LANTERN's 1,000 nearest": (LANTERN, log_p, log_q, drafts, near),
    }
    if cells > SORTED:
        del made["top-k 100 by sorting"]
    return {name: partial(jax.jit(f), *given) for name, (f, *given) in made.items()}


def network(codes: int, cells: int) -> Callable[[], Any]:
    """A pass fed so many cells, up to its logits."""
    config = dict(preset("llamagen-b").decoders)[256]
    config = replace(config, grid=(32, 32), vocab_size=codes)
    target = random_target(config, abstract.transformer(config))
    cache = Cache.empty(config, 1, target.embeddings.dtype)
    fed = jnp.asarray(places(target, cells))[None]
    visible = jnp.arange(config.cells) <= fed[..., None]

    @partial(jax.jit, donate_argnums=1)
    def run(target: Target, cache: Cache) -> tuple[jax.Array, Cache]:
        tokens, write = jnp.zeros_like(fed), jnp.ones(fed.shape, bool)
        features, cache = target.read(cache, tokens, fed, write, visible)
        logits = target.model.apply(target.params, features, method="read_out")
        return logits, cache

    def again() -> jax.Array:
        nonlocal cache
        logits, cache = run(target, cache)
        return logits

    return again


def measure(codes: int, cells: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the pass and of each piece."""
    runs = {"pass": network(codes, cells), **pieces(codes, cells)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):  # the first compiles
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(1e3 * (time.perf_counter() - began))
    # As many digits as mean anything.
    return {k: float(f"{statistics.median(x[1:]):.4g}") for k, x in times.items()}


def show(rows: list[dict]) -> None:
    """A table: milliseconds, and per cent of the pass."""
    names = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    heads = [f"{x['codes']}, {x['cells']} {x['label']}".strip() for x in rows]
    print("| codes, cells | " + " | ".join(heads) + " |")
    print("|---" * (len(rows) + 1) + "|")
    for name in names:
        found = []
        for row in rows:
            ms, whole = row["ms"].get(name), row["ms"]["pass"]
            share = "" if name == "pass" or ms is None else f" ({ms / whole:.1%})"
            found.append("" if ms is None else f"{ms:.3g}{share}")
        print(f"| {name} | " + " | ".join(found) + " |")


def main(
    codes: Annotated[
        list[int] | None, typer.Option(help="Only so many; several times.")
    ] = None,
    cells: Annotated[
        list[int] | None, typer.Option(help="Only so many; several times.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Of timing, all taking turns.")] = 11,
    label: Annotated[str, typer.Option(help="Of the code, such as before.")] = "",
    out: Annotated[Path | None, typer.Option(help="Writes JSON there.")] = None,
) -> None:
    """Times pieces; see the head of the file."""
    key = lambda row: (row["codes"], row["cells"], row["label"])
    rows: dict[tuple, dict] = {}
    if out is not None and out.exists():
        rows = {key(row): row for row in json.loads(out.read_text())["rows"]}
    new = []
    for number in codes or CODES:
        for count in cells or CELLS:
            row = {"codes": number, "cells": count, "label": label, "rounds": rounds}
            new.append(row | {"ms": measure(number, count, rounds)})
    show(new)
    if out is not None:
        rows |= {key(row): row for row in new}
        record = {"command": "python -m experiments.bench_sampling"}
        record |= {"machine": machine(), "rows": [rows[x] for x in sorted(rows)]}
        with atomically(out) as draft:
            draft.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
