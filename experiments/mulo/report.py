"""The tables and the picture of a record; see `__main__`."""

import json
from pathlib import Path
from typing import Any

from experiments.methods.contestants import REFERENCE
from experiments.methods.report import (
    NAMES,
    interval,
    kid_text,
    markdown_table,
    page,
    percent,
)
from experiments.plots import save_plot

HEADS = (
    "setting",
    "passes",
    "of drafter",
    "worth",
    "fewer",
    "kept",
    "kept, not white",
    "NLL to AR",
    "not white",
    "off support",
    "R@1",
    "R@5",
    "KID",
    "KID to AR",
    "outside AR's spread",
)
LEGEND = """\
- **passes**: of the target for a picture, prefill included; **of drafter**: of the
  smaller model. **worth**: both together, in passes of the target: those of the
  drafter by what a pass of one cell costs with the next smaller model, measured in the
  same run. **fewer**: AR's passes over that.
- **kept**: share of cells that are drafts; **not white**: of those that are not plain
  background.
- **NLL to AR**: the target's negative log-likelihood of the finished grid, nats a cell,
  less AR's of the same captions, with its 95 % bootstrap interval; **not white**: of
  cells that are not plain background. **off support**: cells whose token the target
  would not have drawn (below its top-k): they are not in the NLL.
- **R@k**: text match. **KID** (x 1000, ± standard error): to the real drawings, and to
  AR's pictures.
- **outside AR's spread**: measures outside of the 95 % prediction interval for one more
  seed of AR.
"""


def worth(row: dict, record: dict) -> float:
    """Passes of target and drafter, in passes of the target."""
    costs, size = record["costs"], record["settings"]["size"]
    smaller = max((int(s) for s in costs if int(s) < size), default=size)
    cost = costs[str(smaller)] / costs[str(size)]
    return row["passes"]["mean"] + cost * row["passes"]["of_drafter"]


def _line(row: dict, record: dict) -> list[str]:
    passes, whole = row["passes"], worth(row, record)
    cells = passes["ratio"] * passes["mean"]
    drafter = f"{passes['of_drafter']:.1f}" if passes["of_drafter"] else ""
    out, off = row["outside"], row["off_support"]
    name = row["name"]
    return [
        f"{name}, seed {row['seed']}" if name == REFERENCE else name,
        f"{passes['mean']:.1f} ± {passes['deviation']:.1f}",
        drafter,
        f"{whole:.1f}",
        f"{cells / whole:.2f}x",
        percent(row["kept"]["all"]),
        percent(row["kept"]["ink"]),
        interval(*row["nll"]["difference"]),
        f"{row['ink_nll']:+.3f}",
        percent(off["cells"], 2) if off["cells"] else "",
        f"{row['r1']['value']:.3f}",
        interval(row["r5"]["value"], *row["r5"]["interval"]),
        kid_text(row["kid"]),
        kid_text(row["kid_ar"]),
        "" if out is None else ", ".join(NAMES[m] for m in out) or "no",
    ]


def tables(record: dict[str, Any]) -> str:
    """The record as Markdown, a table a section."""
    by_name: dict[str, list[dict]] = {}
    for row in record["rows"]:
        by_name.setdefault(row["name"], []).append(row)
    parts = []
    for title, names in record["sections"].items():
        rows = [_line(row, record) for name in names for row in by_name[name]]
        parts.append(f"## {title}\n\n{markdown_table(HEADS, rows)}")
    costs = ", ".join(f"{1e3 * x:.2f} ms at {s} px" for s, x in record["costs"].items())
    base = by_name["MuLo"][0]["made_by"] if "MuLo" in by_name else ""
    note = (
        f" Settings change one knob of MuLo's, which is\n`{base}`.\n"
        f"A pass of one cell takes {costs} (batch 1)."
    )
    return page("MuLo, knob by knob", record, note, "\n\n".join(parts), LEGEND)


def write(record: dict[str, Any], folder: Path) -> None:
    """`mulo-SIZE.json`, `.md` and `.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / f"mulo-{record['settings']['size']}"
    name.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    name.with_suffix(".md").write_text(tables(record))
    plot(record, name.with_suffix(".png"))


def plot(record: dict[str, Any], path: Path) -> None:
    """Worth in passes against the NLL's difference to AR, and against R@5."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained", dpi=110)
    axes = figure.subplots(1, 2)
    colours = matplotlib.colormaps["tab20"].colors
    rows = {row["name"]: row for row in record["rows"]}
    r5, nll = record["bands"]["r5"], record["bands"]["nll"]
    measures = [
        (lambda row: row["nll"]["difference"][0], "NLL to AR (nats a cell)"),
        (lambda row: row["r5"]["value"], "R@5"),
    ]
    shades = [
        (nll["low"] - nll["mean"], nll["high"] - nll["mean"]),
        (r5["low"], r5["high"]),
    ]
    for ax, (value, label), (low, high) in zip(axes, measures, shades, strict=True):
        for k, (title, names) in enumerate(record["sections"].items()):
            x = [worth(rows[name], record) for name in names]
            y = [value(rows[name]) for name in names]
            named = title in ("reference", "MuLo", "others", "beyond")
            ax.plot(
                x,
                y,
                marker="s" if named else ".",
                ls="" if named else "-",
                lw=0.6,
                color=colours[k % 20],
                label=title,
            )
            for name, *at in zip(names, x, y, strict=True) if named else ():
                ax.annotate(name, at, (4, 3), textcoords="offset points", fontsize=7)
        ax.axhspan(low, high, color="#BBBBBB", alpha=0.4, lw=0, zorder=0)
        ax.set_xscale("log")
        ax.set_xlabel("passes a picture, those of the drafter by their cost")
        ax.set_ylabel(label)
        ax.grid(alpha=0.25, which="both")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("symlog", linthresh=0.2, linscale=1.5)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=8
    )
    save_plot(figure, path, record["command"])
