"""What Lumina-mGPT-7B takes of memory, by shapes alone: nothing is computed.

    python -m experiments.memory_chameleon [--size 768] [--images 1] [--out FILE.json]

Weights are bfloat16, as published; the VQ is float32, as in its file. Guidance is on,
so that each image has two rows and two caches. What is held while a picture is drawn is
counted, and beside it the largest single arrays of a pass of SJD, of the prompt's and
of making pixels: XLA keeps a few of their size at a time.
"""

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

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
CELL, NEWLINE, GB = 16, 8803, 1e9


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
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from intermediates(inner)


def largest(function: Callable, *args: Any) -> int:
    return max(intermediates(jax.make_jaxpr(function)(*args).jaxpr))


def plan(size: int, images: int, prompt: int, window: int) -> dict[str, int]:
    """Bytes by what they are of."""
    side = size // CELL
    config = ChameleonGridConfig(
        LUMINA_7B, (side, side + 1), prefix_length=prompt, newline=NEWLINE
    )
    model = ChameleonGrid(config)
    loaded = as_type(abstract.chameleon(config), jnp.bfloat16)
    prepared = jax.eval_shape(model.prepared, loaded)
    shared = {k: prepared["params"][k] for k in ("word_embedding", "norm")}
    tokens = jax.ShapeDtypeStruct((images, prompt), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), images))
    method = SJD(window=window)
    settings = Sampling.create(config.vocab_size, guidance=3.0, top_k=2000)

    def start(params, tokens, keys):
        target = Target.create(model, params, tokens, settings)
        return target, method.start(target, keys)

    target, state = jax.eval_shape(start, prepared, tokens, keys)
    rows = 2 * images
    cache = jax.eval_shape(lambda: Cache.empty(config, rows, jnp.bfloat16))
    vq = abstract.vq(VQGAN)
    codes = jax.ShapeDtypeStruct((images, side, side), jnp.int32)
    decode = lambda params, x: VQ(VQGAN).apply(params, x, method="decode")
    whole = rows * window * LUMINA_7B.vocab_size * 4
    return {
        "language model": nbytes(loaded),
        "its layers apart, and what cells can be": nbytes(prepared) - nbytes(shared),
        "VQ": nbytes(vq),
        "caches": nbytes(cache),
        "windows": nbytes(state) - nbytes(cache),
        "largest array of a pass": largest(method.step, target, state),
        "largest array of the prompt's pass": largest(
            lambda target: target.prefill()[0], target
        ),
        "largest array of making pixels": largest(decode, vq, codes),
        "logits of a pass": rows * window * config.vocab_size * 4,
        "logits of a pass, of all 65,536 tokens": whole,
    }


def main(
    size: Annotated[int, typer.Option(help="Pixels a side.")] = 768,
    images: Annotated[int, typer.Option(help="Drawn at once.")] = 1,
    prompt: Annotated[int, typer.Option(help="Slots of the prompt.")] = 96,
    window: Annotated[int, typer.Option(help="Of SJD.")] = 16,
    out: Annotated[Path | None, typer.Option(help="Write the numbers too.")] = None,
) -> None:
    """Prints the plan as a table."""
    found = plan(size, images, prompt, window)
    for name, count in found.items():
        typer.echo(f"| {name} | {count / GB:.3f} |")
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
