"""Passes per second of plain AR decoding, beside transformers' Llama of the same size.

    python -m experiments.bench_ar [--quick] [--out bench.json]
    python -m experiments.bench_ar --first-picture [--family NAME_OR_FOLDER]

Both draw a 16 x 16 grid after 16 prefix slots: float32, random weights, one row an
image (no guidance), sampling at temperature 1 included. jaxspec runs as `generate` runs
it. transformers' LlamaForCausalLM has the same width, depth, heads, hidden width and
vocabulary; it decodes token by token with its own cache (`DynamicCache`), torch eager
in inference mode, softmax and multinomial; of one and two threads the faster counts.

A picture is drawn in chunks of passes, and the contestants take turns chunk by chunk,
so that what slows the machine slows them all. Medians over chunks. Left out: prefill,
compilation, a first chunk, and the first passes of each, in which threads wake up.

Where reading the weights is the limit, a row has its floor: a contestant that sums an
array of as many bytes, on all cores. It takes its turns with the others because the
bandwidth of a shared machine comes and goes.

`--first-picture` times the command line in fresh processes, from start to written file:
cold with an empty compile cache, warm with what the cold one left there. It needs no
torch.
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

from jaxspec.decoding import Target, advance, begin
from jaxspec.methods import AR
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.sampling import Sampling, image_key

GRID, PREFIX = (16, 16), 16
PASSES = GRID[0] * GRID[1] - 1  # after the prefill, which draws the first cell
CHUNKS = 5  # of a picture
LEAD_IN = 3  # passes of a chunk that are not timed
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
        """Starts a new batch of pictures: the prefix, and the first cell."""
        ...

    def advance(self, passes: int) -> None:
        """Draws so many further cells; returns when they are there."""
        ...


class Jaxspec:
    """`AR`, as `jaxspec.generate` runs it."""

    def __init__(self, config: TransformerConfig, batch: int):
        model, rng = Transformer(config), np.random.default_rng(0)
        condition = rng.standard_normal((batch, PREFIX, 64), np.float32)
        init = jax.jit(partial(model.init, method="prefix"))
        sampling = Sampling.create(config.vocab_size)
        params = init(jax.random.key(0), condition)
        self.target = Target.create(model, params, condition, sampling)
        self.keys = jnp.stack([image_key(0, 0, i) for i in range(batch)])

    def begin(self) -> None:
        self.state = jax.block_until_ready(begin(AR(), self.target, self.keys))

    def advance(self, passes: int) -> None:
        steps = np.int32(passes)
        self.state = jax.block_until_ready(
            advance(AR(), self.target, self.state, steps)
        )


class Torch:
    """transformers' Llama; `model` is shared between thread counts."""

    def __init__(self, model: Any, batch: int, threads: int):
        import torch

        self.model, self.threads = model, threads
        self.prefix = torch.randn(batch, PREFIX, model.config.hidden_size)
        names = inspect.signature(model.forward).parameters
        # transformers renamed it within 5.x.
        self.cache_name = "cache" if "cache" in names else "past_key_values"

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

    def _draw(self, **inputs) -> None:
        import torch

        cache = {self.cache_name: self.cache}
        logits = self.model(**inputs, **cache, use_cache=True).logits[:, -1]
        self.tokens = torch.multinomial(torch.softmax(logits, dim=-1), 1)

    def begin(self) -> None:
        import torch
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        with torch.inference_mode():
            self._draw(inputs_embeds=self.prefix)

    def advance(self, passes: int) -> None:
        import torch

        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            for _ in range(passes):
                self._draw(input_ids=self.tokens)


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
    contestants: dict[str, Contestant], chunks: int, pictures: int
) -> dict[str, list[float]]:
    """Milliseconds a pass of each contestant, chunk by chunk."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for picture in range(1 + pictures):
        for each in contestants.values():
            each.begin()
        for _ in range(chunks if picture else 1):  # the first compiles and warms up
            for name, each in contestants.items():
                each.advance(LEAD_IN)
                passes = PASSES // CHUNKS - LEAD_IN
                began = time.perf_counter()
                each.advance(passes)
                seconds = time.perf_counter() - began
                if picture:
                    times[name].append(seconds / passes * 1e3)
    return times


def weights_read(config: TransformerConfig) -> int:
    """Bytes of weights that a pass needs: all but the embedding tables and prefix."""
    c = config
    layer = c.width * (4 * c.width + 3 * c.hidden + 2)
    return 4 * (c.depth * layer + c.width * (c.vocab_size + 1))


def compare(size: str, batch: int, llama: Any, chunks: int, pictures: int) -> dict:
    """One row of the table."""
    c = SIZES[size]
    contestants: dict[str, Contestant] = {"jaxspec": Jaxspec(c, batch)}
    for threads in THREADS:
        if threads <= (os.cpu_count() or 1):
            contestants[f"torch-{threads}"] = Torch(llama, batch, threads)
    if (size, batch) == ("100M", 1):
        contestants["floor"] = Reading(c)
    times = race(contestants, chunks, pictures)
    ms = {name: statistics.median(each) for name, each in times.items()}
    theirs = min(value for name, value in ms.items() if name.startswith("torch"))
    row = {
        "size": size,
        "batch": batch,
        "ms_per_pass": ms,
        "jaxspec_passes_per_second": 1e3 / ms["jaxspec"],
        "torch_passes_per_second": 1e3 / theirs,
        "ratio": theirs / ms["jaxspec"],
        "chunks_ms_per_pass": times,
    }
    if "floor" in ms:
        row["weight_bytes_per_pass"] = weights_read(c)
        row["jaxspec_over_floor"] = ms["jaxspec"] / ms["floor"]
    return row


TABLE = "{:10} {:>5} {:>9} {:>9} {:>7}   {}"


def show(row: dict) -> None:
    """Prints a row, its floor below it."""
    times = "  ".join(f"{name} {ms:.2f}" for name, ms in row["ms_per_pass"].items())
    ours, theirs = row["jaxspec_passes_per_second"], row["torch_passes_per_second"]
    numbers = f"{ours:.1f}", f"{theirs:.1f}", f"{row['ratio']:.2f}"
    print(TABLE.format(row["size"], row["batch"], *numbers, times), flush=True)
    if "jaxspec_over_floor" in row:
        size, floor = row["weight_bytes_per_pass"] / 1e6, row["ms_per_pass"]["floor"]
        print(
            f"  floor: {size:.0f} MB of weights at {size / floor:.1f} GB/s; jaxspec "
            f"takes {row['jaxspec_over_floor']:.2f} times that",
            flush=True,
        )


def measure(quick: bool) -> list[dict]:
    chunks, pictures = (2, 1) if quick else (CHUNKS, 3)
    print(TABLE.format("passes/s", "batch", "jaxspec", "torch", "ratio", "ms a pass"))
    rows = []
    for size in SIZES:
        llama = Torch.llama(SIZES[size])
        for batch in BATCHES:
            rows.append(compare(size, batch, llama, chunks, pictures))
            show(rows[-1])
    return rows


def first_picture(family: str, prompt: str = "red heart") -> dict[str, float]:
    """Seconds of the command line in a fresh process, cold and warm."""
    start = "from jaxspec.cli import main; main()"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", start, "generate", prompt, "--family", family]
        command += ["--out", str(Path(folder, "picture.png"))]
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


def main(
    quick: Annotated[bool, typer.Option(help="Fewer chunks.")] = False,
    out: Annotated[Path | None, typer.Option(help="Writes JSON there.")] = None,
    first: Annotated[
        bool, typer.Option("--first-picture", help="Time the command line instead.")
    ] = False,
    family: Annotated[str, typer.Option(help="Of --first-picture.")] = "emoji",
) -> None:
    """Times plain AR decoding; see the head of the file."""
    record = {"machine": machine()}
    if first:
        record["first_picture"] = first_picture(family)
        seconds = record["first_picture"]
        print(
            f"first picture of a process: {seconds['cold_s']:.1f} s with an empty "
            f"compile cache, {seconds['warm_s']:.1f} s with a filled one"
        )
    elif find_spec("torch") and find_spec("transformers"):
        record["rows"] = measure(quick)
    else:
        raise SystemExit("this compares with torch: pip install -e '.[torch]'")
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
