"""Where MuLo's time goes: drafting, verifying, drawing again; see `--help`."""

import datetime
import json
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxspec
from experiments.bench_ar import machine
from experiments.methods.measure import decode_batch
from experiments.upsamplers import table
from jaxspec.command_options import chosen_method, one_line_errors
from jaxspec.decoding import (
    ACCEPTED,
    DRAWN,
    RESAMPLED,
    Decoded,
    Target,
    describe,
    targets_in,
)
from jaxspec.memory import size_of
from jaxspec.methods import MuLo
from jaxspec.pipeline import Pipeline
from jaxspec.recipe import Recipe
from jaxspec.sizes import Size, checked_size, size_label

PROMPTS = "red heart; flat house; glossy cat; blue bird"
STAGES = ("prefill", "draft", "verify", "resample")
EXAMPLES = """\b
Examples:
  python -m experiments.mulo.stages
  python -m experiments.mulo.stages --size 256 --batch 1 --batch 8 --knob rows=2
  python -m experiments.mulo.stages --family tar/ --size 1024 --knob radius=3
"""

prefilled = jax.jit(MuLo.prefilled)
drafted = jax.jit(MuLo.drafted, static_argnames="revise", donate_argnums=2)
verified = jax.jit(MuLo.verified, donate_argnums=2)


@partial(jax.jit, donate_argnums=2)
def resampled(method: MuLo, target: Target, state: Any) -> Any:
    """Passes until an image is due for its next rows, or all images are finished."""
    return jax.lax.while_loop(
        lambda s: ~jnp.any(method.due(s)) & ~jnp.all(method.finished(s)),
        lambda s: method.resampled(target, s),
        state,
    )


def staged(
    method: MuLo, target: Target, keys: jax.Array
) -> tuple[Decoded, dict[str, float], np.ndarray]:
    """Decodes a batch as MuLo does, each stage a program of its own.

    Returns:
      The result, the same as that of one program; seconds of each stage, all rounds
      together; and how many of the target's passes verified, [B].
    """
    seconds: dict[str, float] = defaultdict(float)

    def clocked(stage: str, run: Callable, *args: Any, **more: Any) -> Any:
        began = time.perf_counter()
        out = jax.block_until_ready(run(*args, **more))
        seconds[stage] += time.perf_counter() - began
        return out

    passes = lambda state: np.asarray(state.wave.decoded.target_passes)
    images, verifying = jnp.ones(target.batch, bool), np.zeros(target.batch, int)
    state, first = clocked("prefill", prefilled, method, target, keys)
    while jnp.any(images):
        step = partial(clocked, "draft", drafted, method, target)
        state = step(state, images, revise=first is None)
        before = passes(state)
        state = clocked("verify", verified, method, target, state, images, first)
        verifying += passes(state) - before
        state = clocked("resample", resampled, method, target, state)
        images, first = method.due(state), None
    return method.decoded(state), dict(seconds), verifying


def counts(decoded: Decoded, verifying: np.ndarray) -> dict[str, float]:
    """Passes of each stage, and shares of cells; means over the images."""
    decoded = decoded.picture()
    cells = decoded.tokens[0].size
    mean = lambda x: float(np.mean(np.asarray(x)))
    return {
        "draft_passes": mean(decoded.draft_passes),
        "verify_passes": mean(verifying),
        "resample_passes": mean(np.asarray(decoded.target_passes) - verifying),
        "rejected": mean(decoded.count(RESAMPLED)) / cells,
        "expanded": mean(decoded.count(DRAWN)) / cells,
        "kept": mean(decoded.count(ACCEPTED)) / cells,
    }


def memory(target: Target) -> dict[str, int]:
    """Bytes of a model's weights, and of its keys and values of the whole batch."""
    cache = jax.eval_shape(lambda x: x.prefill()[1], target)
    return {"weights": size_of(target.params), "cache": size_of(cache)}


def measured(
    method: MuLo, target: Target, keys: jax.Array, rounds: int
) -> dict[str, Any]:
    """Of one batch: counts, and medians of so many rounds after one that compiles."""
    decoded, _, verifying = staged(method, target, keys)
    decode_batch(method, target, keys)
    clocks, whole = [], []
    for _ in range(rounds):
        clocks.append(staged(method, target, keys)[1])
        began = time.perf_counter()
        decode_batch(method, target, keys)
        whole.append(time.perf_counter() - began)
    median = lambda stage: statistics.median(clock[stage] for clock in clocks)
    return {
        **counts(decoded, verifying),
        "seconds": {stage: median(stage) for stage in STAGES},
        "one_program_s": statistics.median(whole),
        "target": memory(target),
        "drafter": memory(targets_in(method)[0]),
    }


def measure(
    family: Pipeline, method: MuLo, size: Size, prompts: list[str], batch: int, n: int
) -> dict[str, Any]:
    """A row: means over batches of the prompts in turn, of `n` rounds each."""
    recipe = Recipe.create(family, size=size, method=method).unstacked()
    # The last batch is full, too: then it begins again with the first prompts.
    order = np.arange(-(-len(prompts) // batch) * batch)
    found = []
    for rows in order.reshape(-1, batch):
        asked = recipe.params.ask([prompts[i % len(prompts)] for i in rows])
        keys = jaxspec.image_keys(0, asked.ids, rows // len(prompts))
        shown = recipe.params.show(asked, keys)
        bound, target = recipe.conditioned(shown.condition)
        assert isinstance(bound, MuLo)
        found.append(measured(bound, target, keys, n))
    mean: Any = jax.tree.map(lambda *x: statistics.fmean(x), *found)
    about = {"size": size_label(size), "batch": batch, "method": describe(method)}
    return {**about, "pictures": len(order), **mean}


# The table.

HEADS = (
    "size",
    "batch",
    *(f"passes: {stage}" for stage in STAGES[1:]),
    "rejected",
    "expanded",
    "kept",
    *(f"{stage}, ms" for stage in STAGES),
    "one program, ms",
    "target, MB",
    "its cache",
    "drafter",
    "its cache",
)


def line(row: dict[str, Any]) -> list[str]:
    held = [
        row[x][part] for x in ("target", "drafter") for part in ("weights", "cache")
    ]
    clocked = [*(row["seconds"][stage] for stage in STAGES), row["one_program_s"]]
    return [
        row["size"],
        str(row["batch"]),
        *(f"{row[f'{stage}_passes']:.1f}" for stage in STAGES[1:]),
        *(f"{row[share]:.0%}" for share in ("rejected", "expanded", "kept")),
        *(f"{1e3 * x:.0f}" for x in clocked),
        *(f"{x / 1e6:.1f}" for x in held),
    ]


def main(
    family: Annotated[str, typer.Option(help="A packaged one or a folder.")] = "emoji",
    size: Annotated[
        list[str] | None,
        typer.Option(help="Pixels of the target; several may be given.  [128, 256]"),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Pictures at once; several may be given.  [1]", min=1),
    ] = None,
    knob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Of MuLo, as `jaxspec generate` takes it."
        ),
    ] = None,
    prompts: Annotated[str, typer.Option(help="With ; between.")] = PROMPTS,
    rounds: Annotated[int, typer.Option(help="Timed; the median counts.", min=1)] = 5,
    out: Annotated[Path | None, typer.Option(help="Writes JSON there.")] = None,
) -> None:
    """Clocks MuLo's stages, counts their passes, and tells what both models hold.

    A compiled loop cannot be clocked inside. Here every stage is a program of its own,
    which draws the same picture: prefill of the target, drafting (with the drafter's
    prefill), upsampling with verification, and the passes that draw again. "One
    program" is what `generate` runs; it lacks the steps between, and may be faster.
    """
    with one_line_errors():
        loaded = jaxspec.load(family)
        method = chosen_method("mulo", None, knob)
        jaxspec.use_compile_cache()
        texts = [text.strip() for text in prompts.split(";")]
        rows = [
            measure(loaded, method, chosen, texts, count, rounds)
            for chosen in map(checked_size, size or ["128", "256"])
            for count in batch or [1]
        ]
        print(table([*HEADS], [line(row) for row in rows]), end="")
        if out is not None:
            command = f"python -m experiments.mulo.stages {shlex.join(sys.argv[1:])}"
            record = {
                "command": command.strip(),
                "date": datetime.date.today().isoformat(),
                "machine": machine(),
                "family": loaded.config.name,
                "rows": rows,
            }
            out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=EXAMPLES)(main)
    app()
