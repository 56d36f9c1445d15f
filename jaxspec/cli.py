"""The command line: `generate` draws prompts, `info` and `methods` say with what.

What takes long to import is imported inside the commands, so that `--help` is fast.
"""

import itertools
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from jaxspec import (
    commands_checkpoints,
    commands_evaluate,
    commands_parity,
    commands_plan,
    commands_scores,
)
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

app = typer.Typer(
    name="jaxspec",
    help="Draws pictures from words with autoregressive image generators.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: no second library to import, any terminal
    pretty_exceptions_enable=False,
)
evaluate = typer.Typer(
    name="evaluate",
    help="Draw many prompts, score, compare and look at what was drawn.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
evaluate.add_typer(commands_evaluate.app)
evaluate.add_typer(commands_scores.app)
app.add_typer(commands_checkpoints.app)
app.add_typer(commands_parity.app)
app.add_typer(commands_plan.app)
app.add_typer(evaluate)


class _File(NamedTuple):
    name: str
    image: Any  # uint8 [H, W, 3]
    chunks: dict[str, str]  # of text
    which: int | None  # of the pictures; None is the sheet of all


def main() -> None:
    """The console script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        import jaxspec

        typer.echo(f"jaxspec {jaxspec.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,  # before a missing command is noticed
            help="Print the version and stop.",
        ),
    ] = False,
) -> None:
    pass


@app.command(
    epilog="""\b
Examples:
  jaxspec generate "glossy emoji of a red heart"
  jaxspec generate "red heart" "flat emoji of a tree" --num-images 4
  jaxspec generate "red heart" --size 64 --seed 7 --out heart.png --stats
  jaxspec generate "red heart" --num-images 9 --out hearts/
  jaxspec generate "tweet evergreen tree" --best-of 8
  jaxspec generate "red heart" --method scd --window 16 --map --animate
  jaxspec generate "red heart" --method scd --knob coupling=gumbel --stats"""
)
def generate(
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT",
            help="What to draw, or the number of a class; several are a batch.",
        ),
    ],
    size: Size = None,
    num_images: Annotated[int, typer.Option(help="Pictures of each prompt.")] = 1,
    best_of: Annotated[
        int,
        typer.Option(
            help="Draw so many for each picture, and keep what matches its prompt best."
        ),
    ] = 1,
    seed: Annotated[
        int, typer.Option(help="The same seed draws the same picture again.")
    ] = 0,
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
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE_OR_FOLDER",
            help="A name ending in .png (replaced if it exists), or a folder.  "
            "[default: a new file here, named after prompt and seed]",
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print how many passes it took.")
    ] = False,
    with_map: Annotated[
        bool,
        typer.Option(
            "--map",
            help="Write -map.png beside each picture: where its cells came from, in "
            "which pass, and the draft of the whole, if there was one.",
        ),
    ] = False,
    animate: Annotated[
        bool,
        typer.Option(
            "--animate", help="Write .webp beside each picture: how it filled in."
        ),
    ] = False,
) -> None:
    """Draw prompts as PNG files.

    Prompt, seed and settings are kept in the files' text chunks. Several pictures make
    one labelled sheet; in a folder, a file each and the sheet. What is not set is the
    family's default, which `jaxspec info` shows.
    """
    with one_line_errors(), one_line_warnings():
        _check_writable(out)
        shape = mesh_shape(mesh)
        chosen = chosen_method(method, window, knob)
        with _progress_bar() as progress:
            import jax

            import jaxspec

            joined = devices(shape, cluster, coordinator, processes, process_id)
            alone = jax.process_count() == 1
            if animate and not alone:
                raise ValueError("--animate is for one process: leave it out")
            jaxspec.use_compile_cache()
            params = jaxspec.load(family, **weight_type(dtype, weights), **joined)
            result = jaxspec.generate(
                params,
                prompts,
                method=chosen,
                size=pixels(size),
                num_images=num_images,
                best_of=best_of,
                seed=seed,
                guidance=guidance,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                progress=progress,
                **reading(option),
            )
        if jax.process_index() > 0:
            return  # the first process writes
        for path, file in _write(_files(result), out):
            typer.echo(f"wrote {path}")
            if with_map:
                from jaxspec.figures import save_png

                beside = _unused(path.with_name(f"{path.stem}-map.png"))
                # Drafts are made pictures by all processes, and only one is here.
                sheet = result.map(file.which, params if alone else None)
                save_png(beside, sheet, file.chunks)
                typer.echo(f"wrote {beside}")
            if animate:
                from jaxspec.maps import save_animation

                beside = _unused(path.with_name(f"{path.stem}.webp"))
                frames = result.frames(params, file.which)
                save_animation(beside, frames, file.chunks)
                typer.echo(f"wrote {beside}")
        if stats:
            for line in _lines(result.summary()):
                typer.echo(line)


@app.command(
    epilog="""\b
Examples:
  jaxspec info
  jaxspec info path/to/converted"""
)
def info(
    family: Annotated[
        str, typer.Argument(metavar="FAMILY", help="A name, or a folder.")
    ] = "emoji",
) -> None:
    """Tell what a family can draw, and how well."""
    with one_line_errors(), one_line_warnings():
        import jaxspec

        for line in _lines(jaxspec.load(family).describe()):
            typer.echo(line)


@app.command(
    epilog="""\b
Examples:
  jaxspec methods
  jaxspec methods scd"""
)
def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One of them, in full.")
    ] = None,
) -> None:
    """Tell which decoding methods there are, what they promise and their knobs."""
    with one_line_errors():
        from jaxspec.methods import catalogue

        if name is None:
            table = [("method", "guarantee", "knobs", "source")]
            for entry in catalogue.entries().values():
                knobs = ", ".join(map(_brief, entry.knobs))
                promise = entry.guarantee.partition(" ")[0].strip(",;:")
                table.append((entry.name, promise, knobs, entry.source))
            lines = [*_table(table), "", "`jaxspec methods NAME` tells all of one."]
        else:
            lines = _help(catalogue.named(name))
        for line in lines:
            typer.echo(line)


@contextmanager
def _progress_bar() -> Generator[Callable[[int, int, Any], None] | None]:
    """A `progress` for `jaxspec.generate`; None where no one watches stderr."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("cells"),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)  # loads and compiles

        def update(done: int, total: int, _: Any) -> None:
            bar.update(task, description="drawing", completed=done, total=total)

        yield update


def _is_folder(out: str) -> bool:
    return out.endswith(("/", os.sep)) or Path(out).is_dir() or not Path(out).suffix


def _check_writable(out: str | None) -> None:
    """Before anything is drawn.  Makes no folder, so that a refusal leaves no trace."""
    path = Path("." if out is None else out)
    folder = path if out is None or _is_folder(out) else path.parent
    if out == "" or (folder != path and path.suffix.lower() != ".png"):
        raise ValueError(
            f"--out {out!r} is neither a name ending in .png nor a folder/"
        )
    if path.is_file() and not os.access(path, os.W_OK):
        raise OSError(f"cannot write to {path}: it is read-only")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"cannot write to {path}: {error.strerror}") from error


def _write(files: Iterator[_File], out: str | None) -> Iterator[tuple[Path, _File]]:
    """Writes all files to a folder, or the last alone; yields each once it is there."""
    from jaxspec.figures import save_png

    folder = Path(out) if out is not None and _is_folder(out) else None
    for file in files if folder else list(files)[-1:]:
        new = Path(folder or "", file.name)
        path = Path(out) if out and not folder else _unused(new)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_png(path, file.image, file.chunks)
        yield path, file


def _files(result: Any) -> Iterator[_File]:
    """Every picture, and last, where there are several, the sheet of them."""
    for i, number in enumerate(result.numbers):
        which = f"-image{number}" if any(result.numbers) else ""
        name = f"{_slug(result.prompts[i])}-seed{result.seeds[i]}{which}.png"
        yield _File(name, result.images[i], result.metadata(i), i)
    if len(result) > 1:
        first, *others = dict.fromkeys(result.prompts)
        more = f"-and-{len(others)}-more" if others else ""
        chunks = result.metadata(0) | {"prompt": "\n".join([first, *others])}
        del chunks["image"]  # it shows several
        name = f"{_slug(first)}{more}-seed{result.seeds[0]}-sheet.png"
        yield _File(name, result.grid(), chunks, None)


def _slug(prompt: str) -> str:
    return re.sub(r"\W+", "-", prompt.lower())[:48].strip("-") or "picture"


def _unused(path: Path) -> Path:
    """The path, or with the first number that makes it new: no picture is lost."""
    numbered = (path.with_stem(f"{path.stem}-{k}") for k in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())


def _lines(record: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A record as `name: value` lines, a record within it indented."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, Integral) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Real) and not isinstance(value, bool):
        value = float(value)
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)


def _width() -> int:
    """Of the terminal; 100 where there is none."""
    return max(60, shutil.get_terminal_size((100, 0)).columns)


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Rows of name, guarantee, knobs and source as lines; long cells are wrapped."""
    left = _width() - 20 - 6
    widths = 11, 9, left * 5 // 9, left * 4 // 9
    for row in rows:
        cells = [textwrap.wrap(c, w) for c, w in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            padded = (c.ljust(w) for c, w in zip(line, widths, strict=True))
            yield "  ".join(padded).rstrip()


def _brief(knob: Any) -> str:
    """A knob and its default, where that is short."""
    text = str(knob)
    return text if len(text) <= 40 else f"{knob.name}=..."


def _help(entry: Any) -> Iterator[str]:
    """All that a method's class says, as lines."""
    yield entry.name
    for paragraph in entry.about.split("\n\n"):
        yield ""
        yield from textwrap.wrap(" ".join(paragraph.split()), _width())
    if entry.knobs:
        yield from ("", "Knobs:")
    for knob in entry.knobs:
        yield f"  {knob}  ({knob.wants or 'in Python only'})"
        indent = " " * 6
        text = textwrap.fill(knob.meaning, _width() - 6)
        yield from textwrap.indent(text, indent).splitlines()
