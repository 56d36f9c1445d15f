"""Peak memory: what `jaxspec plan` predicts beside what XLA allocates.

    python -m experiments.memory [--out FILE.json]

Compiles programs at the published size, AR-DTok LP (632M parameters) and VQ-16 in
float32, from shapes alone: no weights are made and nothing runs. XLA's numbers are
those of the compiled program: its temporaries and its results.
"""

import json
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import typer

import jaxspec
from experiments.bench_ar import machine
from jaxspec.figures import atomically
from jaxspec.generation import at_once
from jaxspec.memory import peak
from jaxspec.methods import AR, SCD, ZipAR
from jaxspec.pixels import pictures
from jaxspec.planning import passes
from jaxspec.presets import preset
from jaxspec.weight_shapes import abstract_params


def allocated(function, *args) -> tuple[int, float]:
    """Bytes of temporaries and results of the compiled program, and seconds it took."""
    began = time.perf_counter()
    program = jax.jit(function).lower(*args).compile()
    found = program.memory_analysis()
    seconds = time.perf_counter() - began
    return found.temp_size_in_bytes + found.output_size_in_bytes, seconds


def programs():
    """Name, function and inputs of each."""
    config = preset("tar-1.5b")
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), abstract_params(config)
    )
    for method in (AR(), ZipAR(window=4), SCD(window=16)):
        for batch in (1, 4):
            name = f"AR-DTok LP 256 px, {type(method).__name__}, batch {batch}"
            yield name, *passes(config, params, method, size=256, batch=batch)
    for size in (256, 1024):
        side = size // config.vq.factor
        shape = (at_once(size * size), side, side)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        make = partial(pictures, config.vq, config.pixels)
        yield f"VQ-16, {shape[0]} of {size} px", make, (params["vq"], tokens)


def main(
    out: Annotated[Path, typer.Option(help="Writes JSON there.")] = Path(
        "docs/results/memory.json"
    ),
) -> None:
    """Predicts, compiles and compares; see the head of the file."""
    rows = []
    for name, function, inputs in programs():
        predicted = peak(function, *inputs)
        found, seconds = allocated(function, *inputs)
        row = {
            "program": name,
            "predicted": predicted,
            "allocated": found,
            "ratio": round(predicted / found, 3),
            "compile_seconds": round(seconds, 1),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    record = {
        "command": "python -m experiments.memory",
        "machine": machine(),
        "version": jaxspec.__version__,
        "rows": rows,
    }
    with atomically(out) as draft:
        draft.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
