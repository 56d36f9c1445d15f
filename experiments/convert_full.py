"""Conversion at the published size, from files that are made here.

    python -m experiments.convert_full [--folder runs/convert_full] [--out FILE.json]

Nobody's weights are needed: AR-DTok LP (30 layers, 1280 wide, 632M parameters, 256 px)
and VQ-16 (72M) are filled by the recipe of the parity fixtures and written under the
published names, as `.safetensors` in float32. `jaxspec convert model` converts each,
`jaxspec parity` compares the VQ with what the published code made of the same values,
and one picture of 256 px is drawn on the CPU at guidance 4, from random features: it is
noise, and only its cost means anything.

Every step is a process of its own, whose time and peak memory are measured; peaks are
resident sizes, mapped pages of the files among them. The aim: a conversion's peak is at
most the size of the largest file plus 1 GiB.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from experiments.bench_ar import machine
from jaxspec.checkpoints import ARDTOK, ardtok_config, load_model
from jaxspec.checkpoints.convert import Parameter, torch_shapes
from jaxspec.checkpoints.writer import write_json, write_safetensors
from jaxspec.decoding import Target, advance, begin
from jaxspec.figures import save_png
from jaxspec.methods import AR
from jaxspec.models.transformer import Transformer
from jaxspec.models.vq import VQ, to_uint8_truncated
from jaxspec.sampling import Sampling, image_keys
from tests.converting import manifest, reference
from tests.fixtures.synthetic import tensor

LP = {  # as beside the published weights
    "model_type": "clip_cond",
    "dim": 1280,
    "n_layer": 30,
    "n_head": 20,
    "vocab_size": 16384,
    "max_seq_len": 256,
    "cls_token_num": 729,
    "cond_dim": 1152,
}
HIDDEN, SEED = 3584, 81
VQ16 = "llamagen_vq16_full"  # the fixture
LP_FILE, VQ_FILE = "ar_dtok_lp_256px", "vq_ds16_t2i.safetensors"
MARGIN = 2**30  # that a conversion may need beside the largest file


# The steps, each in a process of its own.


def make(folder: Path) -> None:
    """Writes both published files, a tensor at a time."""
    hidden = np.broadcast_to(np.float32(0), (HIDDEN, LP["dim"]))
    config = ardtok_config(LP, {"layers.0.feed_forward.w1.weight": hidden})
    (folder / LP_FILE).mkdir(parents=True)
    write_json(folder / LP_FILE / "config.json", LP)
    shapes = torch_shapes(ARDTOK.plan(config))
    _write(folder / LP_FILE / "model.safetensors", shapes, SEED)
    about = manifest(VQ16)
    floats = {k: x for k, x in about["tensors"].items() if x["dtype"] == "float32"}
    shapes = {k: tuple(x["shape"]) for k, x in floats.items()}
    _write(folder / VQ_FILE, shapes, about["seed"])


def _write(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    def lazy(key: str, shape: tuple[int, ...]) -> Parameter:
        values = lambda: iter([tensor(key, shape, seed)])
        return Parameter(shape, np.dtype(np.float32), values)

    write_safetensors(path, {key: lazy(key, x) for key, x in shapes.items()})


def draw(folder: Path) -> None:
    """Draws one picture, and prints what it took as JSON."""
    config, params = load_model(folder / "ar-dtok")
    shape = (1, config.prefix_length, config.prefix_width)
    features = np.random.default_rng(0).standard_normal(shape, np.float32)
    sampling = Sampling.create(config.vocab_size, guidance=4.0)
    target = Target.create(Transformer(config), params, features, sampling)
    del params
    clock, seconds = time.perf_counter, {}

    start = clock()
    state = jax.block_until_ready(begin(AR(), target, image_keys(0, [0], [0])))
    seconds["prefill"] = clock() - start
    first = jax.block_until_ready(advance(AR(), target, state, np.int32(1)))
    start = clock()
    passes = config.cells - 2
    state = jax.block_until_ready(advance(AR(), target, first, np.int32(passes)))
    seconds["passes"] = clock() - start
    tokens = AR().decoded(state).tokens
    vq, codes = load_model(folder / "vq")
    start = clock()
    decode = jax.jit(lambda x: VQ(vq).apply(codes, x, method="decode"))
    image = np.asarray(to_uint8_truncated(decode(tokens)))[0]
    seconds["vq"] = clock() - start
    save_png(folder / "picture.png", image, {})
    record = {"seconds": seconds, "timed_passes": passes, "shape": list(image.shape)}
    print(json.dumps(record | {"codes": int(len(np.unique(tokens)))}))


STEPS = {"make": make, "draw": draw}


# Measuring them.


def run(name: str, *command: object) -> tuple[dict[str, Any], str]:
    """Runs a Python process; its seconds and peak in bytes, and what it printed."""
    print(f"{name} ...", flush=True)
    start = time.perf_counter()
    words = [sys.executable, *map(str, command)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{printed}")
    measured = {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_bytes": usage.ru_maxrss * 1024,  # Linux counts kilobytes
    }
    print(f"{name}: {measured}", flush=True)
    return measured, printed


def command(name: str, *arguments: object) -> dict[str, Any]:
    """What a command of jaxspec takes."""
    return run(name, "-c", "from jaxspec.cli import main; main()", *arguments)[0]


def convert(source: Path, out: Path) -> dict[str, Any]:
    return command(f"convert {source.name}", "convert", "model", source, "--out", out)


def step(name: str, folder: Path) -> tuple[dict[str, Any], str]:
    return run(name, "-m", __spec__.name, "--step", name, "--folder", folder)


def sizes(folder: Path) -> dict[str, int]:
    """Of the weights in a folder, in bytes."""
    files = sorted(folder.rglob("*.safetensors"))
    return {str(x.relative_to(folder)): x.stat().st_size for x in files}


def measure(folder: Path) -> dict[str, Any]:
    """All steps in a new folder; a record of them."""
    made, _ = step("make", folder)
    files = sizes(folder)
    record: dict[str, Any] = {
        "published_files": files,
        "make": made,
        # What Python, JAX and the libraries take, without weights.
        "inspect": command("inspect", "inspect", folder / LP_FILE),
        "convert_ar_dtok": convert(folder / LP_FILE, folder / "ar-dtok"),
        "convert_vq": convert(folder / VQ_FILE, folder / "vq"),
        "converted_files": {k: x for k, x in sizes(folder).items() if k not in files},
    }
    peak = max(record[f"convert_{x}"]["peak_bytes"] for x in ("ar_dtok", "vq"))
    record["limit_bytes"] = max(files.values()) + MARGIN
    record["within_limit"] = peak <= record["limit_bytes"]

    recorded, proof = folder / "vq.npz", folder / "parity.json"
    np.savez(recorded, **reference(VQ16))
    compare = ("parity", folder / "vq", "--reference", recorded, "--out", proof)
    record["parity_vq"] = command("parity", *compare)
    record["parity_vq"]["stages"] = json.loads(proof.read_text())["stages"]

    drawn, printed = step("draw", folder)
    record["draw"] = drawn | json.loads(printed.splitlines()[-1])
    return record


def main(
    folder: Annotated[Path, typer.Option(help="New; 6 GB.")] = Path(
        "runs/convert_full"
    ),
    out: Annotated[Path | None, typer.Option(help="Writes JSON there.")] = None,
    step: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Converts at the published size; see the head of the file."""
    if step is not None:
        STEPS[step](folder)
        return
    if folder.exists():
        raise SystemExit(f"{folder} exists: remove it, or name another")
    record = {"machine": machine()} | measure(folder)
    print(json.dumps(record, indent=1))
    if out is not None:
        write_json(out, record)


if __name__ == "__main__":
    typer.run(main)
