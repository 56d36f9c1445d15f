"""What int8 weights cost in quality, on the emoji family.

    python -m experiments.int8_quality [--count 300] [--out docs/results/int8.json]

Plain AR draws captions held out in their style, with the family's defaults: with float
weights at two seeds, which says what is chance, and with int8 at the first of them.

- `nll`: nats a cell under the float model, over cells that it could have drawn;
- `r1`, `r5`: the picture finds its text as the first, or among five;
- `same_cells`, `same_pictures`: shares that come out as in float at that seed; a cell
  that differs changes those after it;
- `kl`: how far the int8 model is from the float one, in nats a cell: the mean of what
  the two say of the float model's pictures.

Needs `make train-deps`. Times are those of `experiments.bench_ar`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import jaxspec
from experiments.bench_ar import machine
from experiments.methods.emoji import emoji
from experiments.methods.measure import Drawn, Task, draw, negative_log_likelihood
from jaxspec.memory import size_of

BATCH = 16


def nats(task: Task, tokens: np.ndarray, seed: int) -> np.ndarray:
    """Of each cell [N, H, W] under the task's model."""
    rows = np.arange(len(tokens))
    return np.concatenate(
        [
            negative_log_likelihood(task.target(part, seed)[0], tokens[part])
            for part in (rows[i : i + BATCH] for i in range(0, len(rows), BATCH))
        ]
    )


def finite_mean(x: np.ndarray) -> float:
    """Of cells inside the support."""
    return float(np.mean(x[np.isfinite(x)]))


def compare(task: Task) -> dict:
    small = replace(task, pipeline=jaxspec.quantised(task.pipeline))
    method = jaxspec.AR()
    drawn: dict[str, Drawn] = {
        "float, seed 0": draw(task, method, 0, BATCH),
        "float, seed 1": draw(task, method, 1, BATCH),
        "int8, seed 0": draw(small, method, 0, BATCH),
    }
    rows = {}
    for name, x in drawn.items():
        match = task.match(x.features)
        own = nats(task, x.tokens, 0) if name.startswith("int8") else x.nats
        rows[name] = {"nll": finite_mean(own)}
        rows[name] |= {k: float(np.mean(match[k])) for k in ("r1", "r5")}
    plain, made = drawn["float, seed 0"], drawn["int8, seed 0"]
    same = plain.tokens == made.tokens
    decoders = {
        name: sum(size_of(x) for x in each.pipeline.params["decoders"].values())
        for name, each in (("float", task), ("int8", small))
    }
    return {
        "captions": len(task.captions),
        "decoder_bytes": decoders,
        "rows": rows,
        "same_cells": float(same.mean()),
        "same_pictures": float(same.all(axis=(1, 2)).mean()),
        "kl": finite_mean(nats(small, plain.tokens, 0) - plain.nats),
    }


def main(
    count: Annotated[int, typer.Option(help="Captions, a picture each.")] = 300,
    folder: Annotated[
        Path, typer.Option(help="Where rendered drawings are kept.")
    ] = Path("runs/emoji"),
    out: Annotated[Path | None, typer.Option(help="Writes JSON there.")] = None,
) -> None:
    """Compares int8 weights with float; see the head of the file."""
    jaxspec.use_compile_cache()
    record = compare(emoji("emoji", folder, count))
    print(json.dumps(record, indent=1))
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), **record}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
