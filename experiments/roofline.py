"""What a pass costs beside what the machine must charge for it: its floor.

    python -m experiments.roofline --size 111M --out docs/results/roofline.json

A pass reads its weights and the visible part of the cache once, and multiplies them
with every input. Its floor is the longer of two times, measured in the same run and in
turn with the passes, since what else runs on a machine comes and goes:

- summing an array of as many bytes (a copy, which writes too, is slower);
- as many operations, at the rate of one large matrix product.

Measured are passes of the target alone, fed 1 to 1,024 cells that follow each other in
the middle of a grid of 32 x 32, batch 1, float32, and those of methods. A pass of one
cell is AR's; 1,024 are a whole grid, which MuLo verifies at once. What a method adds to
the target's part is ours, and a method is faster where it saves more passes than its
passes cost more. Medians over rounds; compilation is left out. `--size` and `--cells`
may be given several times; what is in the file already and not measured again stays
there, so that a machine need not be quiet for long:

    python -m experiments.roofline --size 632M --cells 256 --cells 1024 --out ...
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxspec
from experiments.bench_ar import machine
from experiments.gpu_check import follow, places
from experiments.plots import save_plot
from jaxspec.decoding import Method, Target, advance, begin
from jaxspec.figures import atomically
from jaxspec.memory import size_of
from jaxspec.methods import AR, GSD, PJD, SCD, SJD, ZipAR
from jaxspec.models.cache import Cache
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.presets import preset
from jaxspec.sampling import Sampling, image_key
from jaxspec.weight_shapes import abstract_params

CELLS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
METHODS = {
    "AR": AR(),
    "ZipAR-8": ZipAR(8),
    "SCD-32": SCD(32),
    "SJD-4": SJD(4),
    "SJD-16": SJD(16),
    "GSD-16": GSD(16),
    "PJD-8": PJD(window=8, context=8),
}
SHORT = 8  # passes timed together, so that the start of a program does not count
TABLES = ("token_embedding", "position_embedding", "class_embedding", "prefix_proj")


def emoji() -> Target:
    """The packaged family at 256 px and its defaults: 2.8 M parameters, guidance."""
    pipeline = jaxspec.load("emoji")
    settings = dict(vars(pipeline.config.defaults))
    del settings["size"]
    sampling = Sampling.create(pipeline.config.vq.codebook_size, **settings)
    return pipeline.target(pipeline.condition(["red heart"]), sampling, 256)


def published(name: str, size: int, **changes) -> Target:
    """A published network with random weights and codes, without guidance."""
    config = preset(name)
    shapes = abstract_params(config)["decoders"][str(size)]
    return random_target(dict(config.decoders)[size], shapes, **changes)


def random_target(config: TransformerConfig, shapes: Any, **changes) -> Target:
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(0.02 * rng.standard_normal(x.shape, np.float32))
    condition = np.zeros((1, config.prefix_length, config.prefix_width), np.float32)
    if config.prefix == "class":
        condition = np.zeros(1, np.int32)
    return Target.create(
        Transformer(replace(config, **changes)),
        jax.tree.map(draw, shapes),
        condition,
        Sampling.create(config.vocab_size),
        codes=jnp.asarray(rng.standard_normal((config.vocab_size, 8), np.float32)),
    )


def tiny() -> Target:
    """For the tests."""
    config = TransformerConfig(16, 8, 2, 2, 16, (4, 4), "class", 1, 3, "rotary")
    shapes = jax.eval_shape(
        lambda key: Transformer(config).init(key, jnp.zeros((1, 8)), method="logits"),
        jax.random.key(0),
    )
    return random_target(config, shapes)


@dataclass(frozen=True)
class Size:
    target: Callable[[], Target]
    methods: dict[str, Method]
    cells: tuple[int, ...] = CELLS


SIZES = {
    "tiny": Size(tiny, {"AR": AR(), "SCD-2": SCD(2)}),
    "emoji-256": Size(emoji, METHODS),
    "111M": Size(partial(published, "llamagen-b", 256, grid=(32, 32)), METHODS),
    # Large programs compile for long.
    "632M": Size(
        partial(published, "tar-1.5b", 512), {"AR": AR()}, (1, 8, 64, 256, 1024)
    ),
}


# The floor.


def costs(target: Target, cells: int) -> tuple[int, int]:
    """Bytes that a pass reads, and operations, where `follow` feeds it."""
    c: Any = target.model.config
    rows = target.batch * target.sampling.rows
    inner = {k: x for k, x in target.params["params"].items() if k not in TABLES}
    used = {k: x for k, x in inner.items() if not k.startswith("prefix")}
    seen = c.prefix_length + int(places(target, cells)[-1]) + 1
    matrices = sum(x.size for x in jax.tree.leaves(used) if x.ndim > 1)
    keys = 2 * rows * c.depth * c.key_heads * c.head_width * seen
    width = target.params["params"]["token_embedding"].dtype.itemsize
    return size_of(used) + width * keys, 2 * cells * (rows * matrices + keys)


def reading(size: int) -> Callable[[], jax.Array]:
    """Reads so many bytes."""
    array, add = jnp.ones(size // 4, jnp.float32), jax.jit(jnp.sum)
    return lambda: add(array)


def multiplying(side: int = 2048) -> tuple[Callable[[], jax.Array], int]:
    """A matrix product, and how many operations it takes."""
    x, multiply = jnp.ones((side, side), jnp.float32), jax.jit(jnp.matmul)
    return lambda: multiply(x, x), 2 * side**3


# Passes.


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


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def measure(size: Size, rounds: int, only: Sequence[int] = ()) -> dict:
    """All take turns; medians over rounds.

    Of `only` some cells, unless none are given, and of methods that are fed as many.
    """
    target, methods = size.target(), size.methods
    keys = jnp.stack([image_key(0, 0, 0)])
    fed = {name: inputs(method, target, keys) for name, method in methods.items()}
    methods = {k: x for k, x in methods.items() if not only or fed[k] in only}
    rows = target.batch * target.sampling.rows
    cache = Cache.empty(target.model.config, rows, target.embeddings.dtype)
    most = target.grid[0] * target.grid[1]
    counts = [c for c in only or size.cells if c <= most]
    needs = {c: costs(target, c) for c in {1, *counts}}
    read = reading(needs[1][0])
    multiply, operations = multiplying()
    times: dict[Any, list[float]] = {}

    def note(name: Any, run: Callable[[], Any], passes: int = 1) -> None:
        times.setdefault(name, []).append(seconds(run) / passes)

    for _ in range(rounds + 1):  # the first compiles
        note("reading", read)
        note("multiplying", multiply)
        for cells in counts:
            passes = SHORT if cells <= 64 else 1

            def run(cells=cells, passes=passes):
                nonlocal cache
                tokens, cache = follow(target, cache, cells, np.int32(passes))
                return tokens

            note(cells, run, passes)
        for name, method in methods.items():
            state = jax.block_until_ready(begin(method, target, keys))
            run = partial(advance, method, target, state, np.int32(SHORT))
            note(name, run, SHORT)
    found = {name: statistics.median(each[1:]) for name, each in times.items()}
    bandwidth, rate = needs[1][0] / found["reading"], operations / found["multiplying"]
    table = []
    for cells in counts:
        bytes_read, work = needs[cells]
        by_reading, by_work = bytes_read / bandwidth, work / rate
        floor = max(by_reading, by_work)
        row = {"cells": cells, "ms": 1e3 * found[cells], "floor_ms": 1e3 * floor}
        row |= {"bound": "reading" if by_reading >= by_work else "operations"}
        table.append(row | {"bytes": bytes_read, "operations": work})
    known = [row["ms"] for row in table]
    own = {}
    for name in methods:
        cells = fed[name]
        alone = float(np.interp(cells, counts, known))
        own[name] = {"cells": cells, "ms": 1e3 * found[name], "network_ms": alone}
    return {
        "rounds": rounds,
        "gigabytes_a_second": bandwidth / 1e9,
        "gigaflops": rate / 1e9,
        "passes": table,
        "methods": own,
    }


def show(name: str, result: dict) -> None:
    bandwidth, rate = result["gigabytes_a_second"], result["gigaflops"]
    print(f"\n{name}: {bandwidth:.1f} GB/s read, {rate:.0f} GFLOP/s multiplied")
    print("| cells | pass, ms | floor, ms | bound by | pass / floor |")
    print("|---|---|---|---|---|")
    for row in result["passes"]:
        ms, floor, over = row["ms"], row["floor_ms"], row["ms"] / row["floor_ms"]
        numbers = f"{ms:.2f} | {floor:.2f} | {row['bound']} | {over:.2f}"
        print(f"| {row['cells']} | {numbers} |")
    print("\n| method | cells | pass, ms | the network alone | x AR's |")
    print("|---|---|---|---|---|")
    one = result["methods"].get("AR", {}).get("ms", float("nan"))
    for method, row in result["methods"].items():
        numbers = f"{row['ms']:.2f} | {row['network_ms']:.2f} | {row['ms'] / one:.2f}"
        print(f"| {method} | {row['cells']} | {numbers} |")


def joined(old: dict, new: dict) -> dict:
    """A size's result, with what was measured before of other cells and methods."""
    rows = {row["cells"]: row for x in (old, new) for row in x.get("passes", [])}
    methods = old.get("methods", {}) | new["methods"]
    return new | {"passes": [rows[x] for x in sorted(rows)], "methods": methods}


def plot(sizes: dict[str, dict], path: Path) -> None:
    """Passes and floors by cells fed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, result) in enumerate(sizes.items()):
        rows = result["passes"]
        cells, colour = [row["cells"] for row in rows], f"C{number}"
        axes.plot(cells, [x["ms"] for x in rows], "o-", color=colour, label=name)
        floor = [x["floor_ms"] for x in rows]
        axes.plot(cells, floor, "--", color=colour, label=f"{name}, floor")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="cells fed in a pass",
        ylabel="milliseconds",
        title="A pass beside its floor, batch 1",
    )
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    save_plot(figure, path, "python -m experiments.roofline", dpi=75)


def main(
    size: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(SIZES)}; all but tiny.")
    ] = None,
    cells: Annotated[
        list[int] | None, typer.Option(help="Only passes of so many.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Of timing, all taking turns.")] = 7,
    out: Annotated[
        Path | None, typer.Option(help="Writes JSON there, and a plot beside it.")
    ] = None,
) -> None:
    """Times passes beside their floor; see the head of the file."""
    names: Sequence[str] = size or [name for name in SIZES if name != "tiny"]
    for name in names:
        if name not in SIZES:
            raise typer.BadParameter(f"{name} is none of {', '.join(SIZES)}")
    if out is not None and find_spec("matplotlib") is None:
        raise SystemExit("the plot needs matplotlib: pip install -e '.[figures]'")
    report: dict = {"command": "python -m experiments.roofline", "batch": 1}
    report |= {"machine": machine(), "sizes": {}}
    if out is not None and out.exists():
        report["sizes"] = json.loads(out.read_text())["sizes"]
    for name in names:
        result = measure(SIZES[name], rounds, cells or ())
        if cells:
            result = joined(report["sizes"].get(name, {}), result)
        report["sizes"][name] = result
        show(name, result)
    if out is not None:
        with atomically(out) as draft:
            draft.write_text(json.dumps(report, indent=1) + "\n")
        plot(report["sizes"], out.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
