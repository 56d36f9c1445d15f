"""What a pass costs: the target's alone, by how many cells it is fed, and the methods'.

python -m experiments.bench_pass --out docs/results/bench_pass.json

A method is faster where it saves more passes than its passes cost more. The target's
part of that is a matter of the hardware: a pass of one cell is bound by reading the
weights, a pass of many by arithmetic. What a method adds to it is ours.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxspec
from experiments.bench_ar import SIZES, Jaxspec, machine
from jaxspec.decoding import Method, Target, advance, begin
from jaxspec.methods import AR, GSD, PJD, SCD, SJD, ZipAR
from jaxspec.sampling import Sampling, image_key

CELLS = (1, 2, 4, 8, 16, 32, 64)
METHODS = {
    "AR": AR(),
    "ZipAR-8": ZipAR(8),
    "SJD-4": SJD(4),
    "SJD-16": SJD(16),
    "GSD-16": GSD(16),
    "SCD-32": SCD(32),
    "PJD-8": PJD(window=8, context=8),
}
PASSES = 8  # timed together, so that the start of a program does not count


def emoji() -> Target:
    """The packaged family at its defaults: 2.5 M parameters, with guidance."""
    pipeline = jaxspec.load("emoji")
    settings = dict(vars(pipeline.config.defaults))
    del settings["size"]
    sampling = Sampling.create(pipeline.config.vq.codebook_size, **settings)
    condition = jnp.asarray(pipeline.condition(["red heart"]))
    return pipeline.target(condition, sampling)


def random_100m() -> Target:
    """LlamaGen-B's size with random weights and codes, without guidance."""
    target = Jaxspec(SIZES["100M"], batch=1).target
    codes = jax.random.normal(jax.random.key(0), (target.model.config.vocab_size, 8))
    return replace(target, codes=codes)


@partial(jax.jit, static_argnums=1)
def follow(target: Target, cells: int) -> jax.Array:
    """`PASSES` passes in a row, each fed so many cells in the middle of the grid."""
    n = target.grid[0] * target.grid[1]
    at = (n // 2 + jnp.arange(cells))[None]
    visible = jnp.arange(n)[None, None] <= at[..., None]

    def body(_, carry):
        tokens, cache = carry
        log_p, cache = target.follow(cache, tokens, at, at < n, visible)
        return jnp.argmax(log_p, axis=-1), cache

    first = jnp.zeros(at.shape, jnp.int32), target.prefill()[1]
    return jax.lax.fori_loop(0, PASSES, body, first)[0]


def prefill(target: Target) -> jax.Array:
    return target.prefill()[0]


def inputs(method: Method, target: Target, keys: jax.Array) -> int:
    """How many cells a pass of the method is fed."""
    fed = []
    real = Target.follow

    def look(self, cache, tokens, *rest):
        fed.append(tokens.shape[1])
        return real(self, cache, tokens, *rest)

    with mock.patch.object(Target, "follow", look):
        state = jax.eval_shape(method.start, target, keys)
        jax.eval_shape(method.step, target, state)
    return fed[-1]


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def measure(target: Target, rounds: int) -> dict:
    """Milliseconds a pass, all taking turns, medians over rounds."""
    keys = jnp.stack([image_key(0, 0, 0)])
    prefilled = jax.jit(prefill)
    times: dict = {"prefill": []} | {c: [] for c in CELLS} | {m: [] for m in METHODS}
    for trial in range(rounds + 1):  # the first compiles
        now = {"prefill": seconds(lambda: prefilled(target))}
        for cells in CELLS:
            now[cells] = seconds(lambda c=cells: follow(target, c))
        for name, method in METHODS.items():
            state = jax.block_until_ready(begin(method, target, keys))
            go = partial(advance, method, target, state, np.int32(PASSES))
            now[name] = seconds(go)
        for name, value in now.items() if trial else ():
            times[name].append(value)
    ms = {name: 1e3 * statistics.median(each) for name, each in times.items()}
    alone = {c: (ms[c] - ms["prefill"]) / PASSES for c in CELLS}
    rows = {}
    for name, method in METHODS.items():
        cells, whole = inputs(method, target, keys), ms[name] / PASSES
        network = float(np.interp(cells, CELLS, [alone[c] for c in CELLS]))
        rows[name] = {"cells": cells, "ms": whole, "network_ms": network}
    return {"follow_ms": alone, "methods": rows}


def show(name: str, result: dict) -> None:
    alone, rows = result["follow_ms"], result["methods"]
    print(f"\n{name}: a pass of the target alone")
    for cells, ms in alone.items():
        print(f"  {cells:3d} cells {ms:8.2f} ms {ms / alone[1]:7.2f} x one cell")
    print(f"{name}: a pass of a method")
    one = rows["AR"]["ms"]
    for method, row in rows.items():
        more = row["ms"] / row["network_ms"]
        print(
            f"  {method:8} {row['cells']:3d} cells {row['ms']:8.2f} ms, the network "
            f"alone {row['network_ms']:.2f} ({more:.2f} x that); {row['ms'] / one:.2f} "
            "x AR's: it must save more passes than that"
        )


def main(
    rounds: Annotated[int, typer.Option(help="Of timing, all taking turns.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Writes JSON there.")] = None,
) -> None:
    """Times passes of the target and of the methods, batch 1."""
    report: dict = {"command": "python -m experiments.bench_pass", "batch": 1}
    report |= {"rounds": rounds, "machine": machine(), "sizes": {}}
    for name, make in {"emoji-128": emoji, "100M": random_100m}.items():
        result = measure(make(), rounds)
        report["sizes"][name] = result
        show(name, result)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
