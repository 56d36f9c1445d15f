"""What one big GPU makes of it: one command, under 8 minutes.

    python -m experiments.gpu_check --out gpu_check.json
    python -m experiments.gpu_check --tiny             on a CPU: does it run?

AR-DTok LP's sizes (632M parameters; 256, 512 and 1,024 px) with random weights in
bfloat16 and guidance, so two rows a picture. Measured are

- the floor of a pass: its weights and its whole cache, at the bandwidth with which this
  device copies, measured in the same run;
- passes fed 1 to 1,024 cells, beside that floor;
- AR, ZipAR-16 and MuLo from start to end, with a forced share of rejected drafts, since
  random weights say nothing of acceptance; batch 1 and 8; peak memory;
- attention of a few queries to the cache by what JAX has for it, beside ours;
- the same network's passes in PyTorch, eager and compiled, where torch is installed.

Needs jax, flax and jaxspec's core alone. What does not fit into the time is left out
and named. Medians; compilation is timed apart.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding import RESAMPLED, Method, Target, advance, begin
from jaxspec.memory import size_of
from jaxspec.methods import AR, MuLo, ZipAR
from jaxspec.models import abstract
from jaxspec.models.cache import Cache
from jaxspec.models.transformer import Transformer, TransformerConfig, attend
from jaxspec.sampling import Sampling, image_keys

ALL = np.int32(2**31 - 1)
ROUNDS = 7


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    decoder: TransformerConfig  # of any grid
    grids: tuple[int, ...]
    cells: tuple[int, ...]
    batches: tuple[int, ...]
    window: int
    copied: int  # bytes

    def config(self, side: int) -> TransformerConfig:
        return replace(self.decoder, grid=(side, side))


PUBLISHED = Scale(
    decoder=TransformerConfig(
        vocab_size=16384,
        width=1280,
        depth=30,
        heads=20,
        hidden=3584,
        grid=(16, 16),
        prefix="features",
        prefix_length=729,
        prefix_width=1152,
        positions="learned",
    ),
    grids=(16, 32, 64),
    cells=(1, 16, 64, 256, 1024),
    batches=(1, 8),
    window=16,
    copied=2**31,
)
TINY = Scale(
    decoder=replace(
        PUBLISHED.decoder,
        vocab_size=64,
        width=32,
        depth=2,
        heads=2,
        hidden=64,
        prefix_length=4,
        prefix_width=8,
    ),
    grids=(2, 4),
    cells=(1, 4),
    batches=(2,),
    window=2,
    copied=2**20,
)


@dataclass(frozen=True)
class Forced:
    """Rejects a share of drafts, whatever they are: by their codes and places."""

    share: float

    def __call__(self, log_p, log_q, drafts, codes=None):
        place = jnp.arange(drafts.shape[1], dtype=jnp.uint32)[None]
        mixed = drafts.astype(jnp.uint32) * jnp.uint32(2654435761) + place * 40503
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
        return jnp.float32((mixed >> 8) >= int(self.share * 2**24))


@dataclass
class Clock:
    """The time that is left, and what was left out for want of it."""

    ends: float
    left_out: list[str]

    def allows(self, what: str, seconds: float = 20.0) -> bool:
        """Whether there are so many seconds; else notes it."""
        there = time.monotonic() + seconds < self.ends
        if not there:
            self.left_out.append(what)
        return there


def timed(run: Callable[[], Any], rounds: int = ROUNDS) -> tuple[float, float]:
    """Seconds of a call, the median of several, and of the first, which compiles."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]), times[0]


def copy_bandwidth(size: int) -> float:
    """Bytes a second of copying an array: each is read once and written once."""
    x = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    seconds, _ = timed(lambda: copy(x))
    return 2 * x.nbytes / seconds


def random_target(config: TransformerConfig, batch: int, guidance: float) -> Target:
    shapes = abstract.transformer(config)

    @jax.jit
    def weights(key):
        leaves, tree = jax.tree.flatten(shapes)
        keys = jax.random.split(key, len(leaves))
        made = [
            0.02 * jax.random.normal(k, x.shape, jnp.bfloat16)
            for k, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, made)

    shape = (batch, config.prefix_length, config.prefix_width)
    condition = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    sampling = Sampling.create(config.vocab_size, guidance=guidance)
    params = weights(jax.random.key(0))
    return Target.create(Transformer(config), params, condition, sampling)


def with_batch(target: Target, batch: int) -> Target:
    """The same weights, for as many images."""
    shape = (batch, *target.condition.shape[1:])
    condition = jax.random.normal(jax.random.key(1), shape, target.condition.dtype)
    visible = jnp.ones((batch, target.prefix_visible.shape[1]), bool)
    return replace(target, condition=condition, prefix_visible=visible)


def bytes_of_pass(target: Target) -> tuple[int, int]:
    """Weights that a pass reads, and the keys and values of all slots."""
    c = target.model.config
    rows = target.batch * target.sampling.rows
    inner = target.params["params"]
    tables = ("token_embedding", "position_embedding", "prefix_proj", "prefix_bias")
    weights = size_of({k: x for k, x in inner.items() if k not in tables})
    cache = jax.eval_shape(lambda: Cache.empty(c, rows, target.condition.dtype))
    return weights, size_of(cache)


def places(target: Target, cells: int) -> np.ndarray:
    """So many cells in the middle of the grid."""
    return (target.model.config.cells - cells) // 2 + np.arange(cells)


@partial(jax.jit, static_argnums=2, donate_argnums=1)
def follow(target: Target, cache: Cache, cells: int, passes: int | jax.Array):
    """Passes in a row, each fed so many cells in the middle of the grid."""
    n = target.model.config.cells
    at = jnp.broadcast_to(places(target, cells), (target.batch, cells))
    visible = jnp.arange(n)[None, None] <= at[..., None]

    def body(_, carry):
        tokens, cache = carry
        log_p, cache = target.follow(cache, tokens, at, at < n, visible)
        return jnp.argmax(log_p, axis=-1), cache

    return jax.lax.fori_loop(0, passes, body, (jnp.zeros_like(at), cache))


def passes(target: Target, cells: tuple[int, ...], bandwidth: float) -> list[dict]:
    """Milliseconds of passes by how many cells they are fed, beside the floor."""
    weights, cache_bytes = bytes_of_pass(target)
    floor = (weights + cache_bytes) / bandwidth
    rows, several = [], 8
    for count in cells:
        if count >= target.model.config.cells:
            continue
        cache = Cache.empty(
            target.model.config,
            target.batch * target.sampling.rows,
            target.condition.dtype,
        )
        state = [cache]

        def run(count=count, state=state):
            tokens, state[0] = follow(target, state[0], count, several)
            return tokens

        seconds, first = timed(run)
        rows.append(
            {
                "batch": target.batch,
                "grid": target.grid[0],
                "cells": count,
                "ms": 1e3 * seconds / several,
                "floor_ms": 1e3 * floor,
                "over_floor": seconds / several / floor,
                "first_s": first,
            }
        )
    return rows


def whole(method: Method, target: Target, what: dict) -> dict:
    """A batch from start to end: the second of two, and what the first took more."""
    keys = image_keys(0, np.arange(target.batch), np.zeros(target.batch))

    def run():
        state = begin(method, target, keys)
        return method.decoded(advance(method, target, state, ALL))

    seconds, first = timed(run, rounds=1)
    decoded = run()
    made = int(np.mean(np.asarray(decoded.target_passes)))
    return what | {
        "seconds": seconds,
        "first_s": first,
        "target_passes": made,
        "draft_passes": int(np.mean(np.asarray(decoded.draft_passes))),
        "pictures_a_second": target.batch / seconds,
        "resampled": float(np.mean(np.asarray(decoded.count(RESAMPLED)))),
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int | None:
    """Most bytes in use on the device so far, where it tells."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def attentions(scale: Scale, rows: int) -> list[dict]:
    """Attention of 1, 16 and 256 queries to the cache of the largest grid."""
    config = scale.config(scale.grids[-1])
    heads, width, slots = config.heads, config.head_width, config.slots
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    found = []
    for queries in (c for c in (1, 16, 256) if c <= scale.cells[-1]):
        key = jax.random.key(queries)
        q = normal(key, (rows, heads, queries, width))
        k = normal(key, (rows, heads, slots, width))
        visible = jnp.tri(queries, slots, slots - queries, dtype=bool)[None]
        visible = jnp.broadcast_to(visible, (rows, queries, slots))

        def theirs(q, k, visible, implementation):
            swap = lambda x: x.swapaxes(1, 2)
            out = jax.nn.dot_product_attention(
                swap(q),
                swap(k),
                swap(k),
                mask=visible[:, None],
                implementation=implementation,
            )
            return swap(out)

        ways = {
            "ours": lambda q, k, m: attend(q, k, k, m),
            "xla": partial(theirs, implementation="xla"),
            "cudnn": partial(theirs, implementation="cudnn"),
        }
        for name, way in ways.items():
            row = {"queries": queries, "slots": slots, "rows": rows, "by": name}
            try:
                run = jax.jit(way)
                seconds, _ = timed(lambda run=run, q=q, k=k, m=visible: run(q, k, m))
                found.append(row | {"ms": 1e3 * seconds})
            except Exception as error:  # what a backend cannot do is a result
                found.append(row | {"refused": str(error).split("\n")[0][:200]})
    return found


def torch_passes(scale: Scale, batch: int, compiled: bool) -> dict:
    """A pass of one cell of the same network in PyTorch, with a static cache."""
    import torch
    from torch.nn import functional as F

    c = scale.config(scale.grids[-1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = 2 * batch
    make = lambda *shape: (
        0.02 * torch.randn(*shape, dtype=torch.bfloat16, device=device)
    )
    layers = [
        {
            "qkv": make(3 * c.width, c.width),
            "out": make(c.width, c.width),
            "gate_up": make(2 * c.hidden, c.width),
            "down": make(c.width, c.hidden),
            "norms": make(2, c.width),
            "k": make(rows, c.heads, c.slots, c.head_width),
            "v": make(rows, c.heads, c.slots, c.head_width),
        }
        for _ in range(c.depth)
    ]
    embedding, head = make(c.vocab_size, c.width), make(c.vocab_size, c.width)
    norm = lambda x, scale: F.rms_norm(x, (c.width,), scale, 1e-5)
    last = c.slots - 1

    def step(tokens):
        x = embedding[tokens][:, None]
        for layer in layers:
            h = F.linear(norm(x, layer["norms"][0]), layer["qkv"])
            q, k, v = h.view(rows, 1, 3, c.heads, c.head_width).unbind(2)
            layer["k"][:, :, last] = k[:, 0]
            layer["v"][:, :, last] = v[:, 0]
            h = F.scaled_dot_product_attention(
                q.transpose(1, 2), layer["k"], layer["v"]
            )
            x = x + F.linear(h.transpose(1, 2).reshape(rows, 1, c.width), layer["out"])
            gate, up = F.linear(norm(x, layer["norms"][1]), layer["gate_up"]).chunk(
                2, -1
            )
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        logits = F.linear(x[:, 0], head).float()
        plain, free = logits.chunk(2)
        p = torch.softmax(free + 4.0 * (plain - free), dim=-1)
        return torch.multinomial(p, 1)[:, 0].repeat(2)

    run = torch.compile(step, mode="reduce-overhead") if compiled else step
    tokens, times = torch.zeros(rows, dtype=torch.long, device=device), []
    with torch.inference_mode():
        for _ in range(ROUNDS + 3):
            began = time.perf_counter()
            for _ in range(8):
                tokens = run(tokens).clone()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - began) / 8)
    return {
        "batch": batch,
        "grid": c.grid[0],
        "torch": torch.__version__,
        "compiled": compiled,
        "ms": 1e3 * statistics.median(times[3:]),
    }


def check(scale: Scale, minutes: float) -> dict:
    """All of it, what matters most first."""
    clock = Clock(time.monotonic() + 60 * minutes, [])
    device = jax.devices()[0]
    bandwidth = copy_bandwidth(scale.copied)
    record: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "copied_gb_a_second": bandwidth / 1e9,
        "passes": [],
        "pictures": [],
        "attention": [],
        "torch": [],
    }
    models = {
        side: random_target(scale.config(side), 1, guidance=4.0) for side in scale.grids
    }
    record["weights_bytes"] = bytes_of_pass(models[scale.grids[-1]])[0]
    for batch in scale.batches:
        for side in reversed(scale.grids):
            target = with_batch(models[side], batch)
            what = {"grid": side, "batch": batch}
            if clock.allows(f"passes {what}", 40):
                record["passes"] += passes(target, scale.cells, bandwidth)
            contests: dict[str, Any] = {
                "AR": AR(),
                f"ZipAR-{scale.window}": ZipAR(scale.window),
            }
            if side != scale.grids[0]:
                draft = with_batch(models[scale.grids[0]], batch)
                contests["MuLo"] = MuLo(
                    draft=draft,
                    upsampler="nearest",
                    rule=Forced(0.4),
                    threshold=0.5,
                    radius=1,
                    window=4,
                    rows_at_once=None if side < 64 else 16,
                )
            for name, method in contests.items():
                if clock.allows(f"{name} {what}", 60):
                    record["pictures"].append(
                        whole(method, target, what | {"method": name})
                    )
    if clock.allows("attention"):
        record["attention"] = attentions(scale, 2)
    if find_spec("torch") is None:
        clock.left_out.append("torch is not installed")
    else:
        for batch in scale.batches:
            for compiled in (False, True):
                name = f"torch batch {batch}, {'compiled' if compiled else 'eager'}"
                if not clock.allows(name, 45):
                    continue
                try:
                    record["torch"].append(torch_passes(scale, batch, compiled))
                except Exception as error:  # such as no compiler: a result too
                    clock.left_out.append(f"{name}: {str(error).split(chr(10))[0]}")
    record["left_out"] = clock.left_out
    return record


def table(record: dict) -> str:
    """The numbers that matter, as text."""
    lines = [
        f"{record['device']}, jax {record['jax']}; copies "
        f"{record['copied_gb_a_second']:.0f} GB/s",
        "\npasses: grid, batch, cells, ms, times the floor",
    ]
    lines += [
        f"  {x['grid']:>4} {x['batch']:>3} {x['cells']:>5} {x['ms']:>9.3f} "
        f"{x['over_floor']:>7.2f}"
        for x in record["passes"]
    ]
    lines.append("\npictures: grid, batch, method, seconds, passes, of the drafter")
    lines += [
        f"  {x['grid']:>4} {x['batch']:>3} {x['method']:<9} {x['seconds']:>8.3f} "
        f"{x['target_passes']:>6} {x['draft_passes']:>6}"
        for x in record["pictures"]
    ]
    lines.append("\nattention: queries, by, ms")
    lines += [
        f"  {x['queries']:>4} {x['by']:<6} {x.get('ms', x.get('refused'))}"
        for x in record["attention"]
    ]
    lines += [
        f"\ntorch {x['torch']}, {'compiled' if x['compiled'] else 'eager'}, batch "
        f"{x['batch']}: {x['ms']:.3f} ms a pass of one cell"
        for x in record["torch"]
    ]
    lines += [f"left out: {what}" for what in record["left_out"]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Runs the check; see the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write JSON there")
    parser.add_argument("--minutes", type=float, default=7.5, help="at most, about")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    given = parser.parse_args(arguments)
    record = check(TINY if given.tiny else PUBLISHED, given.minutes)
    record["command"] = "python -m experiments.gpu_check"
    print(table(record))
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
