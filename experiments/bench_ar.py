"""Time of a pass of 1, 8 and 64 cells, beside transformers' Llama of the same size.

    python -m experiments.bench_ar [--pictures 1] [--out bench.json]
    python -m experiments.bench_ar --size 100M --batch 1 --cells 8 --out bench.json
    python -m experiments.bench_ar --first-picture [--family NAME_OR_FOLDER]

All draw cells of a 16 x 16 grid behind 16 prefix slots: float32, random weights, one
row an image (no guidance), sampling at temperature 1 included. Passes of one cell are
plain AR decoding, as `generate` runs it. A pass of more is fed as many cells of the
grid's middle, draws what follows each, and is the next one's input, as a method that
verifies does it. "int8" is jaxspec with int8 weights.

transformers' LlamaForCausalLM has the same width, depth, heads, hidden width and
vocabulary, in inference mode, softmax and multinomial; of one and two threads the
faster counts. "torch" is eager with its `DynamicCache`, "compiled" is `torch.compile`
with its `StaticCache`. A cache is cropped to where it was after a pass of several.

Passes run in chunks, and the contestants take turns chunk by chunk, so that what slows
the machine slows them all. Times are medians over chunks, ratios medians of the chunks'
ratios. Left out: prefill, compilation, a first chunk, and the first passes of each, in
which threads wake up.

Where reading the weights is the limit, a row has its floor: a contestant that sums an
array of as many bytes, on all cores. It takes its turns with the others because the
bandwidth of a shared machine comes and goes.

Rows of `--out` that are not measured again stay as they are. `--first-picture` times
the command line in fresh processes, from start to written file: cold with an empty
compile cache, warm with what the cold one left there. It needs no torch.
"""

import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import typer

from jaxspec.checkpoints.folder import load_config
from jaxspec.decoding import Target, advance, begin
from jaxspec.methods import AR
from jaxspec.models.cache import Cache
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.quantisation import quantised_network
from jaxspec.sampling import Sampling, cell_keys, draw, image_keys

GRID, PREFIX = (16, 16), 16
CONTEXT = 96  # cells before those of a pass of several
LEAD_IN = {1: 3, 8: 1, 64: 1}  # passes of a chunk that are not timed
PASSES = {1: 48, 8: 12, 64: 3}  # and those that are, by cells
CHUNKS = {1: 3, 8: 3, 64: 2}  # of a picture
THREADS = (1, 2)  # of torch; more than the machine has are left out


def config(width: int, depth: int, heads: int, hidden: int, codes: int):
    return TransformerConfig(
        vocab_size=codes,
        width=width,
        depth=depth,
        heads=heads,
        hidden=hidden,
        grid=GRID,
        prefix="features",
        prefix_length=PREFIX,
        prefix_width=64,
        positions="learned",
    )


SIZES = {  # the emoji family's at 128 px; LlamaGen-B's
    "emoji-128": config(width=192, depth=5, heads=3, hidden=512, codes=512),
    "100M": config(width=768, depth=12, heads=12, hidden=2048, codes=16384),
}
BATCHES = (1, 8)


class Contestant(Protocol):
    def begin(self) -> None:
        """Starts a new batch of pictures: the prefix, and what comes before a pass."""
        ...

    def advance(self, passes: int) -> None:
        """Makes so many passes; returns when they are done."""
        ...


class Jaxspec:
    """`AR`, as `jaxspec.generate` runs it."""

    def __init__(self, config: TransformerConfig, batch: int, int8: bool = False):
        model, rng = Transformer(config), np.random.default_rng(0)
        condition = rng.standard_normal((batch, PREFIX, 64), np.float32)
        init = jax.jit(partial(model.init, method="prefix"))
        params = model.prepared(init(jax.random.key(0), condition))
        params = quantised_network(params) if int8 else params
        sampling = Sampling.create(config.vocab_size)
        self.target = Target.create(model, params, condition, sampling)
        self.keys = image_keys(0, np.zeros(batch), np.arange(batch))

    def begin(self) -> None:
        self.state = jax.block_until_ready(begin(AR(), self.target, self.keys))

    def advance(self, passes: int) -> None:
        steps = np.int32(passes)
        self.state = jax.block_until_ready(
            advance(AR(), self.target, self.state, steps)
        )


class Several(Jaxspec):
    """Passes that are fed several cells."""

    def __init__(self, config: TransformerConfig, batch: int, int8: bool, cells: int):
        super().__init__(config, batch, int8)
        self.cells = cells

    def begin(self) -> None:
        _, cache = jax.jit(Target.prefill)(self.target)
        tokens = jnp.zeros((self.target.batch, self.cells), jnp.int32)
        self.state = jax.block_until_ready((tokens, cache))

    def advance(self, passes: int) -> None:
        steps = np.int32(passes)
        self.state = jax.block_until_ready(
            draw_again(self.target, self.state, self.keys, steps)
        )


@partial(jax.jit, donate_argnums=1)
def draw_again(
    target: Target, state: tuple[jax.Array, Cache], keys: jax.Array, steps: jax.Array
) -> tuple[jax.Array, Cache]:
    """Passes that each feed what the one before drew, at the same cells."""
    tokens, cache = state
    cells = jnp.broadcast_to(CONTEXT + jnp.arange(tokens.shape[1]), tokens.shape)
    visible = jnp.arange(target.model.config.cells) <= cells[..., None]

    def body(i, carry):
        tokens, cache = carry
        fed = jnp.ones(tokens.shape, bool)
        log_p, cache = target.follow(cache, tokens, cells, fed, visible)
        return draw(cell_keys(keys, cells, attempt=i), log_p), cache

    return jax.lax.fori_loop(0, steps, body, (tokens, cache))


class Torch:
    """transformers' Llama; `model` is shared between thread counts."""

    def __init__(self, model: Any, batch: int, cells: int, threads: int):
        import torch

        self.model, self.cells, self.threads = model, cells, threads
        # One cell goes on through the picture; several are in the middle of it.
        slots = PREFIX if cells == 1 else PREFIX + CONTEXT
        self.before = torch.randn(batch, slots, model.config.hidden_size)
        self.first = torch.zeros(batch, cells, dtype=torch.long)
        names = inspect.signature(model.forward).parameters
        # transformers renamed it within 5.x.
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.forward = model.forward

    @staticmethod
    def llama(config: TransformerConfig) -> Any:
        import torch
        import transformers

        torch.manual_seed(0)
        llama = transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.depth,
            num_attention_heads=config.heads,
            max_position_embeddings=config.slots,
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        return transformers.LlamaForCausalLM(llama).eval()

    def begin(self) -> None:
        import torch

        with torch.inference_mode():
            self.cache = self._empty()
            cache = {self.cache_name: self.cache}
            self.model(inputs_embeds=self.before, **cache, use_cache=True)
        self.tokens = self.first

    def advance(self, passes: int) -> None:
        import torch

        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            for _ in range(passes):
                self._draw()

    def _empty(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _draw(self) -> None:
        import torch

        cache = {self.cache_name: self.cache}
        out = self.forward(input_ids=self.tokens, **cache, use_cache=True)
        p = torch.softmax(out.logits.flatten(0, 1), dim=-1)
        self.tokens = torch.multinomial(p, 1).view_as(self.tokens)
        if self.cells > 1:
            self.cache.crop(-self.cells)


class Compiled(Torch):
    """The same by `torch.compile`, for which the cache has all slots from the start."""

    def __init__(self, *settings: Any):
        import torch

        super().__init__(*settings)
        # Of all threads and shapes; beyond it torch runs eagerly, with a warning.
        torch._dynamo.config.recompile_limit = 64
        torch.set_num_threads(self.threads)  # which the program is made for
        self.forward = torch.compile(self.model.forward, dynamic=False)
        self.static: Any = None

    def _empty(self) -> Any:
        from transformers import StaticCache

        if self.static is None:  # one for all pictures: another would compile again
            slots = PREFIX + GRID[0] * GRID[1]
            self.static = StaticCache(self.model.config, max_cache_len=slots)
        self.static.reset()
        return self.static


class Reading:
    """Sums an array of as many bytes as a pass reads of weights: no pass is faster."""

    def __init__(self, config: TransformerConfig):
        self.array = jnp.ones(weights_read(config) // 4, jnp.float32)
        self.sum = jax.jit(jnp.sum)

    def begin(self) -> None: ...

    def advance(self, passes: int) -> None:
        for _ in range(passes):
            self.sum(self.array).block_until_ready()


def race(
    contestants: dict[str, Contestant], cells: int, pictures: int
) -> dict[str, list[float]]:
    """Milliseconds a pass of each contestant, chunk by chunk."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for picture in range(1 + pictures):
        for each in contestants.values():
            each.begin()
        # The first compiles and warms up.
        for _ in range(CHUNKS[cells] if picture else 1):
            for name, each in contestants.items():
                each.advance(LEAD_IN[cells])
                began = time.perf_counter()
                each.advance(PASSES[cells])
                seconds = time.perf_counter() - began
                if picture:
                    times[name].append(seconds / PASSES[cells] * 1e3)
    return times


def weights_read(config: TransformerConfig) -> int:
    """Bytes of weights that a pass needs: all but the embedding tables and prefix."""
    c = config
    layer = c.width * (4 * c.width + 3 * c.hidden + 2)
    return 4 * (c.depth * layer + c.width * (c.vocab_size + 1))


def enter(size: str, batch: int, cells: int, llama: Any) -> dict[str, Contestant]:
    """Who takes part in a row."""
    c, contestants = SIZES[size], {}
    for name, int8 in (("jaxspec", False), ("int8", True)):
        settings = c, batch, int8
        one = cells == 1
        contestants[name] = Jaxspec(*settings) if one else Several(*settings, cells)
    for name, kind in (("torch", Torch), ("compiled", Compiled)):
        for threads in THREADS:
            if threads <= (os.cpu_count() or 1):
                contestants[f"{name}-{threads}"] = kind(llama, batch, cells, threads)
    if (size, batch, cells) == ("100M", 1, 1):
        contestants["floor"] = Reading(c)
    return contestants


def compare(size: str, batch: int, cells: int, llama: Any, pictures: int) -> dict:
    """One row of the table."""
    times = race(enter(size, batch, cells, llama), cells, pictures)

    def ahead(ours: str, kind: str) -> float:
        """How much longer the fastest of that kind takes."""
        ratios = [
            statistics.median(np.divide(theirs, times[ours]))
            for name, theirs in times.items()
            if name.startswith(kind)
        ]
        return min(ratios)

    row = {
        "size": size,
        "batch": batch,
        "cells": cells,
        "ms_per_pass": {name: statistics.median(each) for name, each in times.items()},
        "ratios": {
            ours: {kind: ahead(ours, kind) for kind in ("torch", "compiled")}
            for ours in ("jaxspec", "int8")
        },
        "chunks_ms_per_pass": times,
    }
    if "floor" in times:
        row["weight_bytes_per_pass"] = weights_read(SIZES[size])
        row["jaxspec_over_floor"] = 1 / ahead("jaxspec", "floor")
    return row


TABLE = "{:10} {:>5} {:>5} {:>8} {:>8} {:>8} {:>8}   {}"


def show(row: dict) -> None:
    """Prints a row, its floor below it."""
    times = "  ".join(f"{name} {ms:.2f}" for name, ms in row["ms_per_pass"].items())
    ratios = [f"{x:.2f}" for each in row["ratios"].values() for x in each.values()]
    cell = row["size"], row["batch"], row["cells"]
    print(TABLE.format(*cell, *ratios, times), flush=True)
    if "jaxspec_over_floor" in row:
        size, floor = row["weight_bytes_per_pass"] / 1e6, row["ms_per_pass"]["floor"]
        print(
            f"  floor: {size:.0f} MB of weights at {size / floor:.1f} GB/s; jaxspec "
            f"takes {row['jaxspec_over_floor']:.2f} times that",
            flush=True,
        )


def measure(sizes: list[str], batches: list[int], cells: list[int], pictures: int):
    """Rows of the table, one after the other."""
    print("torch's time over jaxspec's (eager, compiled), and over int8's:")
    heads = ("eager", "compiled") * 2
    print(TABLE.format("size", "batch", "cells", *heads, "ms a pass"), flush=True)
    for size in sizes:
        llama = Torch.llama(SIZES[size])
        for batch in batches:
            for count in cells:
                row = compare(size, batch, count, llama, pictures)
                show(row)
                yield row


def first_picture(
    family: str, best_of: int, prompt: str = "red heart"
) -> dict[str, float]:
    """Seconds of the command line in a fresh process, cold and warm."""
    start = "from jaxspec.cli import main; main()"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", start, "generate", prompt, "--family", family]
        command += ["--out", str(Path(folder, "picture.png"))]
        command += ["--best-of", str(best_of)]
        # Where the compile cache is, unless told otherwise.
        env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMP")}
        env["XDG_CACHE_HOME"] = folder

        def run() -> float:
            began = time.perf_counter()
            subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
            return time.perf_counter() - began

        cold = run()
        warm = [run() for _ in range(3)]
    return {"cold_s": cold, "warm_s": statistics.median(warm)}


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    packages = ("jax", "jaxlib", "torch", "transformers")
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages if find_spec(name)},
    }


def read(path: Path | None) -> list[dict]:
    """Rows that are there."""
    if path is None or not path.exists():
        return []
    return json.loads(path.read_text()).get("rows", [])


def main(
    pictures: Annotated[
        int, typer.Option(help="So many are drawn, of 2 or 3 chunks that are timed.")
    ] = 3,
    size: Annotated[str | None, typer.Option(help="Only this one.")] = None,
    batch: Annotated[int | None, typer.Option(help="Only this one.")] = None,
    cells: Annotated[int | None, typer.Option(help="Only passes of so many.")] = None,
    out: Annotated[Path | None, typer.Option(help="Writes JSON there.")] = None,
    first: Annotated[
        bool, typer.Option("--first-picture", help="Time the command line instead.")
    ] = False,
    family: Annotated[str, typer.Option(help="Of --first-picture.")] = "emoji",
) -> None:
    """Times passes; see the head of the file."""
    for name, value, known in (
        ("size", size, SIZES),
        ("batch", batch, BATCHES),
        ("cells", cells, PASSES),
    ):
        if value not in (None, *known):
            listed = ", ".join(map(str, known))
            raise SystemExit(f"error: --{name} must be one of {listed}, not {value}")
    record: dict[str, Any] = {"machine": machine()}
    if first:
        record["command"] = "python -m experiments.bench_ar --first-picture"
        config = load_config(family)
        draws = {"first_picture": 1}
        if config.defaults.size in dict(config.matchers):
            draws["best_of_8"] = 8  # as `make demo`
        for name, best_of in draws.items():
            seconds = record[name] = first_picture(family, best_of)
            print(
                f"first picture of a process, the best of {best_of}: "
                f"{seconds['cold_s']:.1f} s with an empty compile cache, "
                f"{seconds['warm_s']:.1f} s with a filled one",
                flush=True,
            )
    elif find_spec("torch") and find_spec("transformers"):
        rows = {(x["size"], x["batch"], x["cells"]): x for x in read(out)}
        for row in measure(
            list(SIZES) if size is None else [size],
            list(BATCHES) if batch is None else [batch],
            list(PASSES) if cells is None else [cells],
            pictures,
        ):
            rows[row["size"], row["batch"], row["cells"]] = row
        record["rows"] = [rows[key] for key in sorted(rows, key=_order)]
    else:
        raise SystemExit("this compares with torch: pip install -e '.[torch]'")
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n")


def _order(key: tuple[str, int, int]) -> tuple[int, int, int]:
    return list(SIZES).index(key[0]), key[1], key[2]


if __name__ == "__main__":
    typer.run(main)
