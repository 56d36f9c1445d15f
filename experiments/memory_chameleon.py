"""What Lumina-mGPT-7B takes of memory, part by part, from shapes alone.

    python -m experiments.memory_chameleon [--size 768] [--batch 1] [--out FILE.json]

`jaxspec plan --family lumina-7b-768` tells whether it fits; this tells what of. Weights
are bfloat16, as published; the VQ is float32, as in its file. Guidance is on, so that
each image has two rows and two caches. The columns are of one device, and of each of
two that share heads and hidden units; what is in no layer is whole on both.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from jaxspec.decoding import Target
from jaxspec.memory import peak, size_of
from jaxspec.methods import SJD
from jaxspec.models import abstract
from jaxspec.models.cache import Cache
from jaxspec.models.chameleon import ChameleonGrid
from jaxspec.pixels import pictures
from jaxspec.planning import PROMPT
from jaxspec.presets import preset
from jaxspec.sampling import Sampling

# What devices share; norms, embeddings and the head are whole on each.
SHARED = {"query", "key_value", "attention_out", "gate_up", "down"}


def as_bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), tree)


def each(tree: Any, devices: int) -> int:
    """Bytes on each of several devices that share heads and hidden units."""
    leaves = jax.tree.leaves_with_path(tree)
    named = [(jax.tree_util.keystr(path[-1:], simple=True), x) for path, x in leaves]
    shared = size_of([x for name, x in named if name in SHARED])
    return size_of(tree) - shared + shared // devices


def plan(
    size: int, batch: int, prompt: int, window: int, devices: int
) -> dict[str, dict[str, int]]:
    """Bytes by what they are of: what each device holds, and what a stage adds."""
    family = preset(f"lumina-7b-{size}")
    config = replace(dict(family.decoders)[size], prefix_length=prompt)
    model, rows = ChameleonGrid(config), 2 * batch
    loaded = as_bfloat16(abstract.chameleon(config))
    prepared = jax.eval_shape(model.prepared, loaded)["params"]
    copied = {k: prepared[k] for k in ("token_embedding", "head")}
    vq = abstract.vq(family.vq)
    cache = jax.eval_shape(lambda: Cache.empty(config, rows, jnp.bfloat16))
    target, method, state = started(model, {"params": prepared}, batch, window)
    side = size // family.vq.factor
    codes = jax.ShapeDtypeStruct((batch, side, side), jnp.int32)
    logits = jax.ShapeDtypeStruct((rows, window, config.vocab_size), jnp.float32)
    words = (rows, window, config.language.vocab_size)
    pixels = lambda vq, codes: pictures(family.vq, family.pixels, vq, codes)
    return {
        "held": {
            "language model, as loaded": each(loaded, devices),
            "rows and columns of what cells can be": size_of(copied),
            "VQ": size_of(vq),
            "caches of both rows": size_of(cache) // devices,
            "windows": size_of(state) - size_of(cache),
        },
        "beside it, at most": {
            "a pass of SJD": peak(method.step, target, state, donated=(1,))
            - size_of(state),
            "of that, logits": size_of(logits),
            "logits, were all 65,536 tokens read out": size_of(
                jax.ShapeDtypeStruct(words, jnp.float32)
            ),
            "making pixels": peak(pixels, vq, codes),
        },
    }


def started(
    model: ChameleonGrid, params: Any, batch: int, window: int
) -> tuple[Target, SJD, Any]:
    """A target, SJD with a window, and its state before the first pass, as shapes."""
    method, config = SJD(window=window), model.config
    settings = Sampling.create(config.vocab_size, guidance=3.0, top_k=2000)

    def start(params, tokens, keys):
        target = Target.create(model, params, tokens, settings)
        return target, method.start(target, keys)

    tokens = jax.ShapeDtypeStruct((batch, config.prefix_length), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    target, state = jax.eval_shape(start, params, tokens, keys)
    return target, method, state


def main(
    size: Annotated[int, typer.Option(help="Pixels a side: 512, 768, 1024.")] = 768,
    batch: Annotated[int, typer.Option(help="Pictures at once.")] = 1,
    prompt: Annotated[int, typer.Option(help="Slots of the prompt.")] = PROMPT,
    window: Annotated[int, typer.Option(help="Of SJD.")] = 16,
    out: Annotated[Path | None, typer.Option(help="Write the numbers too.")] = None,
) -> None:
    """Prints what one device needs, and each of two, in GB."""
    settings = dict(size=size, batch=batch, prompt=prompt, window=window)
    found = {n: plan(devices=n, **settings) for n in (1, 2)}
    for part in found[1]:
        typer.echo(f"{part:<44} {'1 device':>8} {'2':>8}")
        for name in found[1][part]:
            _row(name, [x[part][name] for x in found.values()])
        if part == "held":
            _row("together", [sum(x[part].values()) for x in found.values()])
    if out is not None:
        record = {"settings": settings, "devices": found}
        out.write_text(json.dumps(record, indent=1) + "\n")


def _row(name: str, sizes: list[int]) -> None:
    numbers = (f"{size / 1e9:8.3f}" for size in sizes)
    typer.echo(f"  {name:<42} {' '.join(numbers)}")


if __name__ == "__main__":
    typer.run(main)
