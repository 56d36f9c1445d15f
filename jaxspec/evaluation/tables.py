"""Numbers and tables as people read them, on a page and in a terminal."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

from jaxspec.evaluation.intervals import Estimate

Cell = Any  # text, or a pair of it and of what stands beneath it


class Row(TypedDict, total=False):
    """A line of a table; `differs` marks one that is to be seen."""

    cells: list[Cell]
    differs: bool


class Table(TypedDict):
    """Columns by name, and whether numbers stand in them; the first has the heads."""

    columns: list[dict[str, Any]]
    rows: list[Row]


def table(names: Sequence[str], rows: Sequence[Row], numbers: bool = True) -> Table:
    """A table whose columns, but for the first, are of numbers or of text."""
    columns = [
        {"name": name, "number": numbers and k > 0} for k, name in enumerate(names)
    ]
    return {"columns": columns, "rows": list(rows)}


def turned(content: Table) -> Table:
    """The table with its columns as rows, which is narrower where rows are few."""
    _, *rest = (column["name"] for column in content["columns"])
    columns = zip(*[row["cells"] for row in content["rows"]], strict=True)
    first, *others = [list(column) for column in columns]
    names = [_beside(cell) for cell in first]
    rows: list[Row] = [
        {"cells": [name, *cells]} for name, cells in zip(rest, others, strict=True)
    ]
    return table(["", *names], rows, numbers=False)


def told(x: Estimate | Sequence | float | None, digits: int = 3) -> str:
    """A number, or the value of an estimate, with about as many digits; "" for None."""
    if x is None:
        return ""
    value = float(x[0] if isinstance(x, Sequence) else x)
    if not math.isfinite(value):
        return str(value)
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, digits - whole)}f}"


def interval(x: Estimate | Sequence | None, digits: int = 3) -> str:
    """The interval of an estimate, "" if it has none."""
    if x is None or x[1] is None:
        return ""
    return f"{told(x[1], digits)} to {told(x[2], digits)}"


def lines(content: Table) -> Iterator[str]:
    """A table as text: what stands beneath a cell on the page stands behind it."""
    flat = [[column["name"] for column in content["columns"]]]
    for row in content["rows"]:
        flat.append([_beside(cell) for cell in row["cells"]])
    widths = [max(map(len, column)) for column in zip(*flat, strict=True)]
    right = [column.get("number") for column in content["columns"]]
    for row in flat:
        cells = zip(row, widths, right, strict=True)
        yield "  ".join(
            c.rjust(w) if number else c.ljust(w) for c, w, number in cells
        ).rstrip()


def _beside(cell: Cell) -> str:
    if isinstance(cell, list | tuple):
        main, under = cell
        return f"{main} ({under})" if main and under else str(main or under or "")
    return str(cell)
