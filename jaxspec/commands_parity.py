"""The command that proves a conversion: `parity`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.commands_checkpoints import one_line_errors

app = typer.Typer(rich_markup_mode=None)
COLUMNS = {  # of the table: its heading, the field of a stage
    "largest error": "error",
    "of": "scale",
    "mean KL": "kl_mean",
    "largest KL": "kl_max",
    "agreement": "agreement",
}


@app.command(
    epilog="""\b
Examples:
  jaxspec parity ar-dtok-256 --reference ar_dtok_256.npz
  jaxspec parity llm --reference bf16.npz --max-error 0.02 --max-kl 0.01"""
)
def parity(
    folder: Annotated[
        str, typer.Argument(help="A converted model, or a whole family.")
    ],
    reference: Annotated[
        str,
        typer.Option(
            metavar="FILE.npz", help="Inputs and outputs recorded with the original."
        ),
    ],
    max_error: Annotated[
        float,
        typer.Option(help="Of a value, as a part of the largest recorded one."),
    ] = 1e-4,
    max_kl: Annotated[
        float, typer.Option(help="Of the distributions of a position, in nats.")
    ] = 1e-3,
    min_agreement: Annotated[
        float, typer.Option(help="The part of equal codes, or likeliest codes.")
    ] = 0.999,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Of our weights while they run.")
    ] = "float32",
    out: Annotated[
        str | None, typer.Option(metavar="FILE.json", help="Write the record too.")
    ] = None,
) -> None:
    """Compare a converted folder with outputs of the original, stage by stage.

    Ends with status 1 if a stage is outside the limits. docs/converting.md says how to
    record a reference.
    """
    with one_line_errors():
        from jaxspec.checkpoints.parity import Limits, check_parity
        from jaxspec.checkpoints.writer import write_json

        limits = Limits(max_error, max_kl, min_agreement)
        record = check_parity(folder, reference, limits, dtype=dtype)
        if out is not None:
            write_json(Path(out), record)
    for line in _lines(record):
        typer.echo(line)
    if not record["ok"]:
        raise typer.Exit(1)


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    """A line a stage, in columns; then what is wrong."""
    stages = record["stages"]
    rows = [["stage", "shape", *COLUMNS, ""]]
    for stage in stages:
        found = [stage[field] for field in COLUMNS.values()]
        told = ["" if x is None else f"{x:.3g}" for x in found]
        shape = "x".join(map(str, stage["shape"]))
        rows.append(
            [stage["stage"], shape, *told, "WRONG" if stage["problems"] else "ok"]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
    for stage in stages:
        for problem in stage["problems"]:
            yield f"{stage['stage']}: {problem}"
    if record["unchecked"]:
        yield f"nothing is recorded of {', '.join(record['unchecked'])}"
