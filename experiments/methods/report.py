"""The table and the picture of a record; see `__main__`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.methods.compare import MEASURES
from experiments.methods.contestants import REFERENCE
from experiments.plots import save_plot

NAMES = {
    "nll": "NLL",
    "r1": "R@1",
    "r5": "R@5",
    "kid": "KID",
    "kid_ar": "KID to AR",
}
SPEED = ("method", "guarantee", "passes", "fewer")  # then times
QUALITY = (
    "accepted",
    "NLL",
    "NLL to AR",
    "p",
    "off support",
    "R@1",
    "R@5",
    "KID",
    "KID to AR",
    "outside AR's spread",
)
LEGEND = """\
- **passes**: of the target for a picture, prefill included: mean ± standard deviation
  over pictures; the drafter's apart. **fewer**: cells, AR's passes, over that mean.
- **faster at B**: AR's time a picture over the method's with B pictures at once:
  prefill included, compilation not; methods take turns, median of ratios within a
  round. **realised**: the share of the passes saved that became time saved,
  (1 - t/t_AR) / (1 - passes/passes_AR), of the timed pictures; a drafter counts in the
  time only.
- **accepted**: drafts accepted, of those judged.
- **NLL**: the target's negative log-likelihood of the finished grid, nats a cell, in
  one teacher-forced pass, under the distribution that is sampled from (guidance,
  temperature, top-k): mean ± standard deviation over pictures, of cells inside its
  support. **off support**: cells outside it, and pictures with such a cell. **NLL to
  AR**: mean difference to AR's pictures of the same captions (mean of its seeds), with
  its 95 % bootstrap interval. **p**: of that difference, by a two-sided permutation
  test within captions. An exact method has AR's NLL but for chance; a biased one
  shows its bias.
- **R@k**: text match (`experiments/emoji/metrics.py`), with its 95 % bootstrap
  interval.
- **KID** (x 1000, ± standard error): to the real drawings of the captions, and to AR's
  pictures of seed 0.
- **outside AR's spread**: measures outside of the 95 % prediction interval for one more
  seed of AR, below. By chance that happens to each measure of an exact method once in
  twenty. For NLL and R@k the interval comes from what pictures of one caption vary by,
  over all captions; for KID from AR's few seeds alone.
"""


DEPTHS_LEGEND = """\
## Drafts kept by depth

Of the rounds of a tree, those that kept a draft of a depth or a deeper one. A round
ends with a token of the target's own, but for one whose drafts fill the picture.
"""
SEVERAL = ("method", "distance", "to AR", "same", "to AR", "colour", "to AR")
SEVERAL_LEGEND = """\
- **distance**: of pictures of one caption, cosine of features less their mean over real
  drawings: 1 is pictures that have nothing to do with one another, 0 the same twice.
- **same**: pairs of a caption's pictures that are nearer than {same:.3f}, the median
  distance of a real drawing to what the tokenizer makes of it: the same drawing twice.
- **colour**: pictures that have the colour that their caption names, of {captions}
  held-out captions that name one (`experiments/methods/colours.py`, which says of how
  many real drawings it finds it).
- **to AR**: difference to AR's first seeds, a mean over captions with its 95 %
  bootstrap interval; AR's other seeds say what chance does.
"""


def interval(x: float, low: float, high: float) -> str:
    return f"{x:.3f} [{low:.3f}, {high:.3f}]"


def percent(x: float | None, digits: int = 0) -> str:
    return "" if x is None else f"{100 * x:.{digits}f} %"


def kid_text(entry: dict | None) -> str:
    if entry is None:
        return ""
    return f"{1e3 * entry['value']:.1f} ± {1e3 * entry['error']:.1f}"


def _faster(speed: dict | None) -> str:
    if speed is None:
        return ""
    ratio, realised = f"{speed['ratio']:.2f}x", percent(speed["realised"])
    return f"{ratio} ({realised})" if realised else ratio


def label(row: dict) -> str:
    is_ar = row["name"] == REFERENCE
    return f"{row['name']}, seed {row['seed']}" if is_ar else row["name"]


def cells(row: dict, batches: list[str]) -> list[str]:
    """The row of the table."""
    passes, nll, out = row["passes"], row["nll"], row["outside"]
    took = f"{passes['mean']:.1f} ± {passes['deviation']:.1f}"
    if passes["of_drafter"]:
        took += f" (drafter {passes['of_drafter']:.1f})"
    off = row["off_support"]
    beside = f"{percent(off['cells'], 2)}, {percent(off['pictures'])}"
    verdict = "" if out is None else ", ".join(NAMES[m] for m in out) or "no"
    return [
        label(row),
        row["guarantee"],
        took,
        f"{passes['ratio']:.2f}x",
        *[_faster(row["time"][batch]) for batch in batches],
        percent(row["acceptance"], 1),
        f"{nll['value']:.3f} ± {nll['deviation']:.3f}",
        interval(*nll["difference"]),
        f"{nll['p']:.4f}",
        beside if off["cells"] else "",
        f"{row['r1']['value']:.3f}",
        interval(row["r5"]["value"], *row["r5"]["interval"]),
        kid_text(row["kid"]),
        kid_text(row["kid_ar"]),
        verdict,
    ]


def bands(record: dict) -> str:
    """AR's spread, a line a measure."""
    lines = []
    for measure in MEASURES:
        band = record["bands"][measure]
        if band is None:
            lines.append(f"- {NAMES[measure]}: too few seeds")
            continue
        numbers = {k: f"{x:.4f}" for k, x in band.items()}
        lines.append(
            f"- {NAMES[measure]}: {numbers['mean']} ± {numbers['deviation']}, one more "
            f"seed between {numbers['low']} and {numbers['high']}"
        )
    return "\n".join(lines)


def markdown_table(heads: Sequence[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (heads, *rows)]
    lines.insert(1, "|" + "---|" * len(heads))
    return "\n".join(lines)


def page(title: str, record: dict[str, Any], note: str, body: str, legend: str) -> str:
    """A report as Markdown: what was run, `note`, `body`, and what it all means."""
    made = {row["name"]: row["made_by"] for row in record["rows"]}
    constructors = "\n".join(f"- {name}: `{made[name]}`" for name in made)
    settings = ", ".join(f"{k} {x}" for k, x in record["settings"].items())
    machine = ", ".join(f"{k} {x}" for k, x in record["machine"].items())
    return (
        f"# {title}\n\n"
        f"`{record['command']}`, {record['date']}; {machine}.\n\n"
        f"Family {record['family']} ({settings}); {record['captions']} captions of "
        f"test_pair, a picture each.{note}\n\n"
        f"{body}\n\n{legend}\n## AR's spread over {record['ar_seeds']} seeds\n\n"
        f"{bands(record)}\n\n## Methods\n\n{constructors}\n"
    )


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    batches = list(record["rows"][0]["time"])
    times = [f"faster at {batch} (realised)" for batch in batches]
    rows = [cells(row, batches) for row in record["rows"]]
    body = markdown_table([*SPEED, *times, *QUALITY], rows)
    more = depth_table(record["rows"])
    if record.get("several"):
        more += several_table(record["several"])
    note = times_note(record["times_of"]) if "times_of" in record else ""
    return page("All methods side by side", record, note, body, LEGEND + more)


def times_note(about: dict[str, str]) -> str:
    """Where times come from that were taken in another run."""
    return (
        f" Times: `{about['command']}` at commit {about['commit']}, {about['date']}. "
        f"{about['note']}"
    )


def depth_table(rows: list[dict[str, Any]]) -> str:
    """How deep rounds of trees went, as Markdown; nothing if there are no trees."""
    trees = {row["name"]: row["depths"] for row in rows if row.get("depths")}
    if not trees:
        return ""
    most = max(map(len, trees.values()))
    heads = ["method", *[f"depth {i + 1}" for i in range(most)], "cells a round"]
    lines = [
        [
            name,
            *[percent(x) for x in shares],
            *[""] * (most - len(shares)),
            f"{1 + sum(shares):.2f}",
        ]
        for name, shares in trees.items()
    ]
    return f"\n{DEPTHS_LEGEND}\n{markdown_table(heads, lines)}\n"


def several_table(several: dict[str, Any]) -> str:
    """What `run.compare_several` found, as Markdown."""
    rows = []
    for row in several["rows"]:
        line = [row["name"]]
        for name in ("distance", "same", "colour"):
            entry = row[name]
            line.append(interval(entry["value"], *entry["interval"]))
            line.append(interval(*entry["difference"]))
        rows.append(line)
    captions = len(several["coloured"])
    legend = SEVERAL_LEGEND.format(same=several["same"], captions=captions)
    return (
        f"\n## {several['seeds']} pictures of each caption\n\n"
        f"{markdown_table(SEVERAL, rows)}\n\n{legend}"
    )


def write(record: dict[str, Any], folder: Path) -> None:
    """`methods.json`, `methods.md` and `methods.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "methods.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "methods.md").write_text(table(record))
    plot(record, folder / "methods.png")


# The picture.

COLOURS = {"exact": "#0072B2", "biased": "#D55E00"}
MARKERS = {"exact": "o", "biased": "s"}
BAND = "#BBBBBB"
NAME_SIZE = 8
LINEAR = 0.2  # nats, below which the likelihood's axis is straight


def place_names(
    points: np.ndarray, named: list[int], sizes: np.ndarray
) -> list[np.ndarray]:
    """Where names go, measured from their points: the nearest free places.

    Args:
      points: [N, 2], none of which a name may cover.
      named: the points that have names, M of them.
      sizes: [M, 2], width and height of the names; no two may overlap.

    Returns:
      Centres of the names, less their points; to the right where that is free.
    """
    turns = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    around = np.stack([np.cos(turns), np.sin(turns)], axis=1)
    reaches = np.arange(10, 100, 6)
    centres: list[np.ndarray] = []
    for i, size in zip(named, sizes, strict=True):
        tried = [around * (reach + size / 2) for reach in reaches]
        offsets = np.concatenate(tried)  # the nearest first
        at = points[i] + offsets
        apart = np.abs(at[:, None] - points[None]) > size / 2 + 5
        free = apart.any(2).all(1)
        for other, other_size in zip(centres, sizes, strict=False):
            free &= (np.abs(at - other) > (size + other_size) / 2).any(1)
        centres.append(at[np.argmax(free)])  # the nearest at all if none is free
    return [centre - points[i] for centre, i in zip(centres, named, strict=True)]


def plot(record: dict[str, Any], path: Path) -> None:
    """Passes against R@5 and against the NLL's difference to AR.

    Bars are 95 % bootstrap intervals over captions.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7), layout="constrained", dpi=100)
    left, right = figure.subplots(1, 2)
    rows = record["rows"]
    recalls = [(row["r5"]["value"], *row["r5"]["interval"]) for row in rows]
    likelihoods = [row["nll"]["difference"] for row in rows]
    _points(left, rows, recalls)
    _points(right, rows, likelihoods)
    # Straight near 0, where exact methods are, and logarithmic beyond.
    right.set_yscale("symlog", linthresh=LINEAR, linscale=1.5)
    limits, ticks = right.get_ylim(), np.array([0.1, 0.2, 0.5, 1, 2, 5])
    right.set_yticks([*-ticks, 0, *ticks])
    right.set_ylim(limits)  # ticks move them
    right.yaxis.set_major_formatter("{x:g}")
    r5, nll = record["bands"]["r5"], record["bands"]["nll"]
    _band(left, r5["low"], r5["high"])
    _band(right, nll["low"] - nll["mean"], nll["high"] - nll["mean"])
    left.set_ylabel("R@5, text match of test_pair captions")
    right.set_ylabel("NLL under the target, difference to AR (nats a cell)")
    for axes in (left, right):
        axes.set_xlabel("passes a picture, prefill included")
        axes.margins(x=0.22)  # names stand there
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, record)
    figure.draw_without_rendering()  # lays it out: names are placed in pixels
    _name(left, rows, [value for value, *_ in recalls])
    _name(right, rows, [value for value, *_ in likelihoods])
    save_plot(figure, path, record["command"])


def _band(axes, low: float, high: float) -> None:
    axes.set_ylim(axes.get_ylim())  # those of the points: a band may be wide
    axes.axhspan(low, high, color=BAND, alpha=0.4, lw=0, zorder=0)


def _points(axes, rows: list[dict], estimates: list) -> None:
    for row, (x, low, high) in zip(rows, estimates, strict=True):
        kind = row["guarantee"]
        axes.errorbar(
            row["passes"]["mean"],
            x,
            yerr=[[x - low], [high - x]],
            color=COLOURS[kind],
            marker=MARKERS[kind],
            markersize=5,
            elinewidth=0.8,
        )


def _name(axes, rows: list[dict], heights: list[float]) -> None:
    """Names beside the points, AR's once."""
    from matplotlib.patheffects import withStroke

    first = {row["name"]: i for i, row in reversed(list(enumerate(rows)))}
    passes = [row["passes"]["mean"] for row in rows]
    ends = axes.transData.transform(np.stack([passes, heights], axis=1))
    sizes = np.array([[NAME_SIZE * 0.9 * len(name), 16] for name in first])
    places = place_names(ends, list(first.values()), sizes)
    for (name, i), place in zip(first.items(), places, strict=True):
        axes.annotate(
            name,
            (passes[i], heights[i]),
            place,
            textcoords="offset pixels",
            fontsize=NAME_SIZE,
            ha="center",
            va="center",
            color=COLOURS[rows[i]["guarantee"]],
            path_effects=[withStroke(linewidth=2, foreground="white")],
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#777777"},
        )


def _legend(figure, record: dict) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    spread = f"AR's spread: one more seed, from {record['ar_seeds']}"
    handles = [
        *[
            Line2D([], [], color=COLOURS[k], marker=MARKERS[k], ls="", label=k)
            for k in COLOURS
        ],
        Patch(color=BAND, alpha=0.4, lw=0, label=spread),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
