"""The command that tells what fits before anything is loaded: `plan`."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from jaxspec.command_options import (
    Guidance,
    Knob,
    MethodName,
    Reading,
    Size,
    Weights,
    Window,
    chosen_method,
    one_line_errors,
    pixels,
    reading,
    weight_type,
)

app = typer.Typer(rich_markup_mode=None)
DTYPES = ("bfloat16", "float16", "float32")


@app.command(
    epilog="""\b
Examples:
  jaxspec plan --family tar-1.5b --size 1024 --batch 8
  jaxspec plan --family tar-7b --method mulo --knob rows_at_once=8 --weights int8
  jaxspec plan --family lumina-7b-768 --method sjd --size 576x1024
  jaxspec plan --family path/to/converted --dtype float32 --json"""
)
def plan(
    family: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_FOLDER",
            help="As published (tar-1.5b, tar-7b, llamagen-b, -l, -xl, -xxl, -3b, "
            "llamagen-t2i-xl, lumina-7b-512, -768, -1024, anole-7b), or a family that "
            "`generate` takes.",
        ),
    ] = "emoji",
    size: Size = None,
    batch: Annotated[int, typer.Option(help="Pictures at once.")] = 1,
    method: MethodName = None,
    window: Window = None,
    knob: Knob = None,
    guidance: Guidance = None,
    option: Reading = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help=f"Of weights: {', '.join(DTYPES)}.")
    ] = DTYPES[0],
    weights: Weights = None,
    as_json: Annotated[bool, typer.Option("--json", help="Bytes, as JSON.")] = False,
) -> None:
    """Tell how much memory drawing takes, and on which GPU it fits.

    Weights stay; of the stages one runs at a time. All is told from shapes: nothing is
    loaded or computed, and no GPU is needed. docs/performance.md says how near it is.
    """
    with one_line_errors():
        if dtype not in DTYPES:
            raise ValueError(f"--dtype must be {', '.join(DTYPES)}, not {dtype!r}")
        import json

        from jaxspec.checkpoints.folder import load_config
        from jaxspec.planning import plan
        from jaxspec.presets import PRESETS, preset

        try:
            config = preset(family) if family in PRESETS else load_config(family)
        except FileNotFoundError as error:
            published = ", ".join(PRESETS)
            raise ValueError(f"{error}; as published: {published}") from None
        found = plan(
            config.reading(**reading(option)),
            size=pixels(size),
            batch=batch,
            method=chosen_method(method, window, knob),
            guidance=guidance,
            **weight_type(dtype, weights),
        )
        if as_json:
            typer.echo(json.dumps(found.to_json(), indent=1))
            return
        for line in lines(found):
            typer.echo(line)


def lines(found: Any) -> Iterator[str]:
    """A plan as a table."""
    from jaxspec.planning import CARDS
    from jaxspec.sizes import size_label

    x = found.settings
    unit, name = (1e9, "GB") if found.total >= 1e9 else (1e6, "MB")

    def row(what: str, size: int) -> str:
        return f"  {what:<30}{size / unit:>9.2f} {name}"

    yield (
        f"{x['family']}, {size_label(x['size'])} px, batch {x['batch']}, "
        f"{x['method']['name']}, guidance {x['guidance']:g}, {x['dtype']}"
        + (f", matrices in {x['weights']}" if "weights" in x else "")
    )
    yield "weights, all at once:"
    for part, size in found.weights.items():
        yield row(part, size)
    yield "beside them, one at a time:"
    for stage, size in found.stages.items():
        yield row(stage, size)
        caches = found.caches if stage == "passes" else {}
        for model, held in caches.items():
            yield row(f"  cache, {model}", held)
    yield row("the most at once", found.total)
    for card in CARDS:
        yield f"fits a GPU of {card} GB: {'yes' if found.fits(card) else 'no'}"
