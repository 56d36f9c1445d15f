"""What is made of runs: `evaluate report`, `evaluate score` and `evaluate compare`."""

from pathlib import Path
from typing import Annotated

import typer

from jaxspec.command_options import one_line_errors, one_line_warnings

app = typer.Typer(rich_markup_mode=None)

Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN", help="Folders of `jaxspec evaluate run`."),
]


@app.command(
    epilog="""\b
Examples:
  jaxspec evaluate report ar/ scd/ --out report.html
  jaxspec evaluate report ar/ scd/ --grid sheet.png --prompts 20"""
)
def report(
    runs: Runs,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.html",
            help="The page.  [default: report.html, if no --grid is asked for]",
        ),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.png", help="A sheet of the pictures; gaps are marked."
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="Whose pictures are shown, at most.")
    ] = 100,
    title: Annotated[
        str, typer.Option(help="Of the page.")
    ] = "Decoding methods side by side",
    megabytes: Annotated[
        float, typer.Option(help="Of the page, at most; pictures are made to fit.")
    ] = 15,
) -> None:
    """Show runs beside one another, on a page that is one file.

    It needs no network and no server. Pictures of one prompt and number stand side by
    side and can be stepped through pass by pass; runs that are not finished have gaps.
    """
    with one_line_errors(), one_line_warnings():
        from jaxspec.evaluation.report import write_grid, write_report

        if grid is not None:
            made = write_grid(runs, _named(grid, ".png"), prompts=prompts)
            gaps = f", {made['gaps']} gaps" * (made["gaps"] > 0)
            typer.echo(f"wrote {grid}: {made['pictures']} pictures{gaps}")
        if out is not None or grid is None:
            out = out or "report.html"
            made = write_report(
                runs,
                _named(out, ".html"),
                title=title,
                prompts=prompts,
                megabytes=megabytes,
            )
            form = "lossless" if made["quality"] is None else f"at {made['side']} px"
            typer.echo(
                f"wrote {out}: {made['pictures']} pictures of {made['prompts']} "
                f"prompts, {form}, {made['bytes'] / 1e6:.1f} MB"
            )


def _named(path: str, suffix: str) -> Path:
    """The path, which must have this suffix and a folder that exists."""
    if Path(path).suffix.lower() != suffix:
        raise ValueError(f"{path!r} must be a name that ends in {suffix}")
    if not Path(path).parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {Path(path).parent}")
    return Path(path)
