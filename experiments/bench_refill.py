"""What handing rows on is worth: pictures a second, beside batches that wait.

python -m experiments.bench_refill --out docs/results/bench_refill.json

The same captions are drawn both ways in turn, decoding alone (reading prompts, making
pixels and compiling are not counted); every picture is the same in both. `expected` is
what counts alone say: the passes of the slowest image of each batch, over the mean.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import jaxspec
from experiments.bench_ar import machine
from jaxspec.methods import AR, SCD, MuLo
from jaxspec.recipe import Recipe

METHODS = {"AR": AR(), "SCD": SCD(), "MuLo": MuLo.paper()}
BATCH = 16
THINGS = ("red heart", "house", "cat face", "tree", "blue car", "apple", "sun", "clock")
STYLES = ("noto", "blob", "flat", "glossy", "tweet")


def measure(method: jaxspec.Method, size: int, images: int, rounds: int) -> dict:
    """Seconds of both ways, round by round, and what they decoded."""
    params = jaxspec.load("emoji")
    recipe = Recipe.create(params, method=method, size=size).unstacked()
    prompts = [f"{style} emoji of a {thing}" for thing in THINGS for style in STYLES]
    asked = params.ask(prompts).take(np.arange(images) % len(prompts))
    numbers = np.arange(images) // len(prompts)

    def batches():
        for first in range(0, images, BATCH):
            rows = np.arange(first, min(first + BATCH, images))
            batch = recipe.decode(asked.take(rows), numbers[rows], 0, rows=BATCH)
            yield rows, batch

    def refilled():
        yield from recipe.stream(asked, numbers, 0, rows=BATCH)

    seconds = {"batches": [], "refilled": []}
    tokens, passes = {}, np.zeros(images, int)
    for number in range(rounds + 1):
        for name, way in (("batches", batches), ("refilled", refilled)):
            began, found = time.perf_counter(), {}
            for rows, batch in way():
                found |= dict(zip(rows.tolist(), batch.stats.tokens, strict=True))
                passes[rows] = batch.stats.target_passes + 1
            passed = time.perf_counter() - began
            if number:  # the first compiles
                seconds[name].append(passed)
            tokens[name] = np.stack([found[i] for i in range(images)])
    np.testing.assert_array_equal(*tokens.values())
    slowest = [passes[i : i + BATCH].max() for i in range(0, images, BATCH)]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    return {
        "pictures_per_second": {k: round(images / x, 3) for k, x in medians.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(x, 3) for x in ratios],
        "passes": {
            "mean": round(float(passes.mean()), 1),
            "most": int(passes.max()),
            "expected": round(float(np.mean(slowest) / passes.mean()), 3),
        },
    }


def main(
    out: Annotated[Path, typer.Option(help="Where to write the numbers.")],
    size: Annotated[int, typer.Option(help="Pixels a side.")] = 64,
    images: Annotated[int, typer.Option(help="Pictures of each way.")] = 80,
    rounds: Annotated[int, typer.Option(help="Of both ways in turn.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option("--method", help="Some of AR, SCD and MuLo.")
    ] = None,
) -> None:
    """Measures AR, SCD and MuLo at batch 16."""
    record = {"size": size, "images": images, "batch": BATCH, "machine": machine()}
    for name in only or METHODS:
        record[name] = measure(METHODS[name], size, images, rounds)
        print(name, record[name], flush=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
