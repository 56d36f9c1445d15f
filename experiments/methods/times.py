"""Times of one run in the report of another, which was drawn without any."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.methods import compare, report


def add_times(record: dict[str, Any], times: dict[str, Any]) -> dict[str, Any]:
    """A record of `run.measure` with times that were taken elsewhere.

    Args:
      record: that has none of its own.
      times: `timing`, raw times (see `measure.time_methods`) of each batch size, and
        the `command`, `commit`, `date` and `note` that tell of them.

    Raises:
      ValueError: the record has times.
    """
    if record["raw_times"]:
        raise ValueError("the report has times of its own")
    raw = {str(x["batch"]): x for x in times["timing"].values()}
    speeds = {batch: compare.speed(x) for batch, x in raw.items()}
    rows = [
        row | {"time": {b: speed.get(row["name"]) for b, speed in speeds.items()}}
        for row in record["rows"]
    ]
    about = {key: times[key] for key in ("command", "commit", "date", "note")}
    return record | {"rows": rows, "times_of": about}


def main(
    folder: Annotated[
        Path, typer.Argument(help="Of a report: its methods.json, .md and .png.")
    ],
    times: Annotated[Path, typer.Argument(help="JSON, such as results/times.json.")],
) -> None:
    """Writes a report anew, with times that were taken on a quiet machine."""
    record = json.loads((folder / "methods.json").read_text())
    try:
        report.write(add_times(record, json.loads(times.read_text())), folder)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"wrote {folder}/methods.json, methods.md and methods.png")


if __name__ == "__main__":
    typer.run(main)
