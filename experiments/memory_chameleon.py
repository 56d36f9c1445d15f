"""What Lumina-mGPT-7B takes of memory, by shapes alone: nothing is computed.

    python -m experiments.memory_chameleon [--size 768] [--images 1] [--devices 2]

Weights are bfloat16, as published; the VQ is float32, as in its file. Guidance is on,
so that each image has two rows and two caches. What is held while a picture is drawn is
counted, and beside it the largest single arrays of a pass of SJD, of the prompt's and
of making pixels: XLA keeps a few of their size at a time. Of several devices, each
holds its part of the heads and hidden units, and all that is in no layer.
"""

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax.extend.core import jaxprs_in_params

from jaxspec.decoding import Target
from jaxspec.methods import SJD
from jaxspec.models import abstract
from jaxspec.models.cache import Cache
from jaxspec.models.chameleon import (
    ChameleonConfig,
    ChameleonGrid,
    ChameleonGridConfig,
)
from jaxspec.models.vq import VQ, VQConfig
from jaxspec.sampling import Sampling

LUMINA_7B = ChameleonConfig(
    vocab_size=65536,
    width=4096,
    depth=32,
    heads=32,
    key_heads=32,
    head_width=128,
    hidden=11008,
)
VQGAN = VQConfig(8192, 256, normalize_codes=False, attention="middle")
CELL, NEWLINE = 16, 8803
# What devices share; norms, embeddings and the head are whole on each.
SHARED = {"query", "key_value", "attention_out", "gate_up", "down"}


def as_type(tree: Any, dtype) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree)


def nbytes(tree: Any) -> int:
    """Of all arrays; a key counts as its two words."""
    return sum(prod(x.shape) * max(x.dtype.itemsize, 1) for x in jax.tree.leaves(tree))


def intermediates(jaxpr: Any) -> Iterator[int]:
    """Sizes of the arrays that a program makes, those of its loops among them."""
    for equation in jaxpr.eqns:
        for x in equation.outvars:
            if hasattr(x.aval, "shape") and hasattr(x.aval.dtype, "itemsize"):
                yield prod(x.aval.shape) * x.aval.dtype.itemsize
        for inner in jaxprs_in_params(equation.params):
            yield from intermediates(inner)


def largest(function: Callable, *args: Any) -> int:
    return max(intermediates(jax.make_jaxpr(function)(*args).jaxpr))


def each(tree: Any, devices: int) -> int:
    """Bytes on each of several devices that share heads and hidden units."""
    leaves = jax.tree.leaves_with_path(tree)
    named = [(jax.tree_util.keystr(path[-1:], simple=True), x) for path, x in leaves]
    shared = nbytes([x for name, x in named if name in SHARED])
    return nbytes(tree) - shared + shared // devices


def plan(
    size: int, images: int, prompt: int, window: int, devices: int
) -> dict[str, dict[str, int]]:
    """Bytes on each device, by what they are of: what is held, and largest arrays."""
    side = size // CELL
    config = ChameleonGridConfig(
        LUMINA_7B, (side, side + 1), prefix_length=prompt, newline=NEWLINE
    )
    model, rows = ChameleonGrid(config), 2 * images
    loaded = as_type(abstract.chameleon(config), jnp.bfloat16)
    prepared = jax.eval_shape(model.prepared, loaded)["params"]
    copied = {k: x for k, x in prepared.items() if k not in ("word_embedding", "norm")}
    vq = abstract.vq(VQGAN)
    cache = jax.eval_shape(lambda: Cache.empty(config, rows, jnp.bfloat16))
    target, method, state = started(model, {"params": prepared}, images, window)
    codes = jax.ShapeDtypeStruct((images, side, side), jnp.int32)
    pixels = lambda params, x: VQ(VQGAN).apply(params, x, method="decode")
    logits = jax.ShapeDtypeStruct((rows, window, config.vocab_size), jnp.float32)
    words = jax.ShapeDtypeStruct((rows, window, LUMINA_7B.vocab_size), jnp.float32)
    return {
        "held": {
            "language model, as loaded": each(loaded, devices),
            "its layers apart, and what cells can be": each(copied, devices),
            "VQ": nbytes(vq),
            "caches of both rows": nbytes(cache) // devices,
            "windows": nbytes(state) - nbytes(cache),
        },
        "largest arrays": {
            "a pass of SJD": largest(method.step, target, state),
            "its logits": nbytes(logits),
            "its logits, were all 65,536 tokens read out": nbytes(words),
            "the prompt's pass": largest(lambda x: x.prefill()[0], target),
            "making pixels": largest(pixels, vq, codes),
        },
    }


def started(
    model: ChameleonGrid, params: Any, images: int, window: int
) -> tuple[Target, SJD, Any]:
    """A target, SJD with a window, and its state before the first pass, as shapes."""
    method, config = SJD(window=window), model.config
    settings = Sampling.create(config.vocab_size, guidance=3.0, top_k=2000)

    def start(params, tokens, keys):
        target = Target.create(model, params, tokens, settings)
        return target, method.start(target, keys)

    tokens = jax.ShapeDtypeStruct((images, config.prefix_length), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), images))
    target, state = jax.eval_shape(start, params, tokens, keys)
    return target, method, state


def main(
    size: Annotated[int, typer.Option(help="Pixels a side.")] = 768,
    images: Annotated[int, typer.Option(help="Drawn at once.")] = 1,
    prompt: Annotated[int, typer.Option(help="Slots of the prompt.")] = 96,
    window: Annotated[int, typer.Option(help="Of SJD.")] = 16,
    devices: Annotated[int, typer.Option(help="That share the model.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the numbers too.")] = None,
) -> None:
    """Prints the plan of each device, in GB."""
    found = plan(size, images, prompt, window, devices)
    for part, rows in found.items():
        typer.echo(f"{part}:")
        for name, count in rows.items():
            typer.echo(f"  {name:<45} {count / 1e9:7.3f}")
        if part == "held":
            typer.echo(f"  {'together':<45} {sum(rows.values()) / 1e9:7.3f}")
    if out is not None:
        settings = dict(
            size=size, images=images, prompt=prompt, window=window, devices=devices
        )
        out.write_text(json.dumps({"settings": settings, **found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
