"""How long programs take to trace and to compile, by model and method.

    python -m experiments.compile_times [--families emoji] [--out compile_times.json]

One program holds the prefill and all passes, at batch 1, as `jaxspec.decode` has it;
`jaxspec.generate` compiles the same in two. It is made from shapes: no weights are
loaded, so that models that do not fit here can be asked for. Wall time, without the
compile cache, and seconds of CPU, which other work on the machine changes less; tracing
includes lowering to StableHLO.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from experiments.bench_ar import machine
from jaxspec.checkpoints.folder import load_config
from jaxspec.decoding import Method, check_fits
from jaxspec.methods import AR, EAGLE2, PJD, SCD, FlashAR, MuLo, ZipAR
from jaxspec.pipeline import Pipeline, PipelineConfig, network_of
from jaxspec.planning import passes
from jaxspec.presets import PRESETS, preset
from jaxspec.sizes import Size, size_label
from jaxspec.weight_shapes import abstract_params

METHODS: tuple[Method, ...] = (
    *(AR(), ZipAR(), SCD(), PJD(), EAGLE2(), FlashAR(), MuLo.paper()),
)
# 111M, 343M, 632M and 7B parameters with 12, 24, 30 and 32 layers beside the emoji's.
FAMILIES = "emoji,llamagen-b,llamagen-l,tar-1.5b,lumina-7b-768"


def shapes(config: PipelineConfig) -> dict[str, Any]:
    """Parameters as they are decoded with."""
    params = abstract_params(config)
    for size, network in config.decoders:
        name = size_label(size)
        prepare = network_of(network).prepared
        if "layers" not in params["decoders"][name]["params"]:
            params["decoders"][name] = jax.eval_shape(prepare, params["decoders"][name])
    return params


def measure(config: PipelineConfig, size: Size, method: Method, params: Any) -> dict:
    """One row."""
    draw, inputs = passes(config, params, method, size=size, batch=1)
    began, worked = time.perf_counter(), time.process_time()
    lowered = jax.jit(draw).lower(*inputs)
    traced = time.perf_counter()
    lowered.compile()
    network = dict(config.decoders)[size]
    return {
        "family": config.name,
        "size": size_label(size),
        "layers": network.depth,
        "method": type(method).__name__,
        "trace_s": traced - began,
        "compile_s": time.perf_counter() - traced,
        "cpu_s": time.process_time() - worked,
    }


def fitting(
    config: PipelineConfig, size: Size, params: Any, names: list[str]
) -> list[Method]:
    """The methods of these names that can draw it, the trained ones among them."""
    out = []
    for method in METHODS:
        if names and type(method).__name__ not in names:
            continue
        try:
            check_fits(method, Pipeline(params, config), size)
        except ValueError:
            continue
        out.append(method)
    return out


def main(
    families: Annotated[str, typer.Option(help="Names or presets.")] = FAMILIES,
    sizes: Annotated[str, typer.Option(help="Only these sizes, pixels.")] = "",
    methods: Annotated[str, typer.Option(help="Only these classes.")] = "",
    out: Annotated[Path | None, typer.Option(help="Writes JSON there.")] = None,
) -> None:
    """Times tracing and compilation; see the head of the file."""
    row = "{:<14} {:>8} {:>6}  {:<8} {:>8} {:>9} {:>8}"
    heads = "family", "size", "layers", "method", "trace s", "compile s", "cpu s"
    print(row.format(*heads))
    rows, names = [], [x for x in methods.split(",") if x]
    for name in families.split(","):
        config = preset(name) if name in PRESETS else load_config(name)
        params = shapes(config)
        wanted = sizes.split(",") if sizes else [size_label(x) for x in config.sizes]
        for size in [x for x in config.sizes if size_label(x) in wanted]:
            for method in fitting(config, size, params, names):
                found = measure(config, size, method, params) | {"family": name}
                rows.append(found)
                *labels, trace, compiled, worked = found.values()
                seconds = (f"{x:.2f}" for x in (trace, compiled, worked))
                print(row.format(*labels, *seconds), flush=True)
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    typer.run(main)
