"""The commands that draw prompts into a folder and hand it on: `run`, `export`."""

import shlex
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from jaxspec.command_options import (
    Cluster,
    Coordinator,
    Family,
    Guidance,
    Knob,
    MeshShape,
    MethodName,
    Processes,
    ProcessId,
    Reading,
    Size,
    Temperature,
    TopK,
    TopP,
    Weights,
    WeightType,
    Window,
    chosen_method,
    devices,
    mesh_shape,
    one_line_errors,
    one_line_warnings,
    pixels,
    reading,
    weight_type,
)

if TYPE_CHECKING:
    from jaxspec.evaluation.run import Status

app = typer.Typer(rich_markup_mode=None)
_PAUSE = 60  # seconds between two lines of progress in a file


@app.command(
    epilog="""\b
Examples:
  jaxspec evaluate run PartiPrompts.tsv --out parti-ar --limit 200
  jaxspec evaluate run evaluation_metadata.jsonl --num-images 4 --out geneval-scd \\
    --family tar --method scd
  jaxspec evaluate run captions_val2017.json --out coco --shard 0/8
  jaxspec evaluate run captions_val2017.json --out coco --mesh 1,16 --cluster"""
)
def run(
    prompts: Annotated[
        str,
        typer.Argument(
            metavar="PROMPTS",
            help="A file: CSV, TSV, JSON lines, COCO captions, or plain text, a prompt "
            "a line; or a folder of .txt files; or emoji, the family's own captions.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option(metavar="RUN", help="The folder; if it exists, the run goes on."),
    ],
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first prompts of the file.")
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Draw every N-th prompt, from number I on (0 to N - 1); other "
            "processes draw the others.",
        ),
    ] = "0/1",
    num_images: Annotated[int, typer.Option(help="Pictures of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Of all pictures.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Pictures drawn at once.")] = 16,
    size: Size = None,
    guidance: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    method: MethodName = None,
    window: Window = None,
    knob: Knob = None,
    family: Family = "emoji",
    option: Reading = None,
    dtype: WeightType = None,
    weights: Weights = None,
    mesh: MeshShape = None,
    cluster: Cluster = False,
    coordinator: Coordinator = None,
    processes: Processes = None,
    process_id: ProcessId = None,
    refill: Annotated[
        bool,
        typer.Option(
            "--refill/--no-refill",
            help="Hand rows of the batch on when their pictures are done, in place of "
            "waiting for the last of them.",
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Have the model read each finished picture, a pass a row: how likely "
            "it finds it, and which cells it would never have drawn so.",
        ),
    ] = False,
    format: Annotated[
        str, typer.Option(help="Of the pictures: png or webp, both lossless.")
    ] = "png",
    keep_records: Annotated[
        bool,
        typer.Option(
            "--keep-records/--no-keep-records",
            help="Keep the tokens, and how they came about, beside each picture.",
        ),
    ] = True,
) -> None:
    """Draw a set of prompts into a folder.

    The same command takes up what was stopped: what is there and whole is not drawn
    again. A picture that cannot be drawn is noted with its error, and the others go on;
    the status is then 1.
    """
    with one_line_errors(), one_line_warnings():
        chosen = chosen_method(method, window, knob)
        loading, options = weight_type(dtype, weights), reading(option)
        shape = mesh_shape(mesh)
        from jaxspec.evaluation.prompts import load_prompts
        from jaxspec.evaluation.prompts import shard as share

        known = load_prompts(prompts)[:limit]
        share(known, shard)
        import jaxspec
        from jaxspec.evaluation.run import draw
        from jaxspec.recipe import Recipe
        from jaxspec.sharding import is_first

        loading |= devices(shape, cluster, coordinator, processes, process_id)
        jaxspec.use_compile_cache()
        first = is_first(loading.get("mesh"))
        recipe = Recipe.create(
            jaxspec.load(family, **loading),
            method=chosen,
            size=pixels(size),
            guidance=guidance,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            **options,
        )
        with _progress(shard, first) as progress:
            status = draw(
                recipe,
                known,
                out,
                source=prompts,
                images=num_images,
                seed=seed,
                batch_size=batch_size,
                refill=refill,
                check=check,
                part=shard,
                format=format,  # ty: ignore[invalid-argument-type]
                keep_records=keep_records,
                command=shlex.join(["jaxspec", *sys.argv[1:]]),
                progress=progress,
            )
    if not first:  # which tells of all of them
        raise typer.Exit(1 if status.failed else 0)
    there = f", {status.there:,} were there" if status.there else ""
    typer.echo(f"drew {status.drawn:,} pictures into {out}{there}")
    if status.warned:
        typer.echo(
            f"{status.warned:,} are of prompts that were not read as they stand: "
            f'"warnings" in {out}/samples says how'
        )
    if status.failed:
        typer.echo(
            f'error: {status.failed:,} pictures failed: "error" in {out}/samples says '
            "why; the same command tries them again",
            err=True,
        )
        raise typer.Exit(1)


@app.command(
    epilog="""\b
Examples:
  jaxspec evaluate export geneval-scd --layout geneval --out geneval-images
  jaxspec evaluate export dpg-scd --layout dpg --out dpg-grids
  jaxspec evaluate export coco --layout fid --out coco-images"""
)
def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A folder of `jaxspec evaluate run`.")
    ],
    layout: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="geneval (a folder a prompt), dpg (2 x 2 grids) or fid (flat).",
        ),
    ],
    out: Annotated[
        str, typer.Option(metavar="FOLDER", help="New; it appears when all is written.")
    ],
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Export what there is, though pictures are missing or prompts fewer "
            "than the benchmark's.",
        ),
    ] = False,
) -> None:
    """Write a run's pictures as the scorer of a benchmark wants them."""
    with one_line_errors():
        from jaxspec.evaluation.export import export as write

        done = write(run, out, layout, partial=partial)
    typer.echo(f"wrote {out}: {done.pictures:,} pictures of {done.prompts:,} prompts")
    if done.missing:
        typer.echo(f"warning: {done.missing:,} pictures are missing", err=True)


@contextmanager
def _progress(shard: str, first: bool) -> Generator[Callable[["Status"], None]]:
    """Shows a status in a line: that of a terminal, or of a file now and then.

    Of processes that draw together only the first does.
    """
    from rich.console import Console

    if not first:
        yield lambda status: None
        return
    console = Console(stderr=True)
    name = "" if shard == "0/1" else f"shard {shard}: "
    if console.is_terminal:
        with console.status(f"{name}loading") as line:
            yield lambda status: line.update(name + _line(status))
        return
    last = time.monotonic()

    def show(status: "Status") -> None:
        nonlocal last
        if time.monotonic() - last >= _PAUSE:
            last = time.monotonic()
            typer.echo(name + _line(status), err=True)

    yield show


def _line(status: "Status") -> str:
    """Images done, rate, passes an image, failures and time left."""
    parts = [f"{status.done:,} of {status.samples:,} images"]
    if status.rate:
        parts.append(f"{status.rate:.3g}/s")
    if status.drawn:
        parts.append(f"{status.passes / status.drawn:.1f} passes an image")
    if status.failed:
        parts.append(f"{status.failed:,} failed")
    if status.left is not None:
        minutes, seconds = divmod(round(status.left), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(f"{hours}:{minutes:02}:{seconds:02} left")
    return ", ".join(parts)
