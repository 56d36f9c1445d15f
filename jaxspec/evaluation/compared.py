"""A comparison as people read it: a table, and what is to be known beside it."""

from collections.abc import Iterator
from typing import Any

from jaxspec.evaluation.intervals import Estimate
from jaxspec.evaluation.tables import Cell, Row, Table, interval, table, told

RATIOS = ("cells a pass", "accepted")
CHECKED = ("divergent cells", "log-probability")
HEADS = ("run", "pairs", "passes", "fewer passes", *RATIOS)


def compared_table(record: dict[str, Any]) -> Table:
    """The record of `compare` as a table, a row a run."""
    names = list(dict.fromkeys(name for run in record["runs"] for name in _scores(run)))
    checked = any(run["counts"]["divergences"] for run in record["runs"])
    heads = [
        *HEADS,
        *[*CHECKED] * checked,
        *[f"{name}, difference" for name in names],
        "quality",
        "times as fast",
    ]
    return table(heads, [_row(run, names, checked) for run in record["runs"]])


def notes(record: dict[str, Any]) -> list[str]:
    """What is to be known beside the table, a line each."""
    first = (
        f"Compared with {record['base']}, picture by picture; 95 % bootstrap intervals "
        "over prompts, of times over batches. Passes have the prefill in them. Cells a "
        "pass and accepted drafts are pooled over pictures; the mean of their ratios "
        "stands beside."
    )
    if any(run["counts"]["divergences"] for run in record["runs"]):
        first += (
            " Divergent cells of a picture hold codes that the target would never draw "
            "there; log-probability is that of the others, a cell."
        )
    told_ = lambda run: [f"{run['name']}: {line}" for line in _notes(run)]
    return [first, *[line for run in record["runs"] for line in told_(run)]]


def _row(run: dict[str, Any], names: list[str], checked: bool) -> Row:
    found, pair = run["counts"], run.get("paired")
    return {
        "cells": [
            [run["name"], run["guarantee"]],
            str(pair["pictures"]) if pair else "",
            [told(found["passes"]), interval(found["passes"])],
            times(pair and pair["fewer_passes"]),
            pooled(found["cells_per_pass"]),
            pooled(found["acceptance"], 100, " %"),
            *[*_said(run)] * checked,
            *[_difference(_scores(run).get(name)) for name in names],
            _quality(run),
            times(pair["speed"]) if pair and pair["speed"] else "withheld" * bool(pair),
        ]
    }


def _said(run: dict[str, Any]) -> tuple[Cell, Cell]:
    """What the target says of a run's pictures, beside the base's."""
    found, change = run["counts"], run.get("paired", {}).get("log_prob_difference")
    under = "" if change is None else f"difference {change.value:+.3f}"
    under += f", {interval(change)}" * bool(interval(change))
    cells = found["divergences"]
    return [told(cells), interval(cells)], [told(found["log_prob"]), under]


def _scores(run: dict[str, Any]) -> dict[str, Any]:
    return run.get("paired", {}).get("scores", {})


def times(x: Estimate | None) -> Cell:
    """A factor and its interval."""
    return "" if x is None else [f"{told(x)}x", interval(x)]


def pooled(
    ratios: dict[str, Estimate] | None, factor: float = 1, unit: str = ""
) -> Cell:
    """A ratio of sums, and the mean of the pictures' own ratios beneath it."""
    if ratios is None:
        return ""
    value, each = (told(ratios[kind].value * factor) for kind in ("pooled", "mean"))
    return [f"{value}{unit}", f"mean {each}{unit}"]


def _difference(score: dict[str, Any] | None) -> Cell:
    if score is None or "not_compared" in score:
        return ""
    if score["difference"] is None:  # of sets: both values, for the reader to compare
        return [f"{told(score['run'])} for {told(score['base'])}", "sets"]
    return [f"{score['difference'].value:+.3f}", interval(score["difference"])]


def _quality(run: dict[str, Any]) -> Cell:
    """The line on exactness, or whether scores stand beside."""
    equal = run.get("paired", {}).get("equal_tokens")
    same = "" if equal is None else f"{100 * equal:.0f} % of pictures equal"
    if run["guarantee"] == "exact":
        return ["the target's distribution", same]
    scored = any("not_compared" not in score for score in _scores(run).values())
    return ["as scored" if scored else "not measured", same]


def _notes(run: dict[str, Any]) -> Iterator[str]:
    found, pair = run["counts"], run.get("paired")
    where = [*found["device"], *[f"batch {b}" for b in found["batch"]], *found["dtype"]]
    timed = f"{found['timed']} pictures timed"
    if found["seconds"] and (pair is None or pair["speed"]):
        span = interval(found["seconds"])
        span = f" ({span})" if span else ", one batch, so without an interval"
        timed = f"{told(found['seconds'])} s a picture{span}, {found['timed']} timed"
    stages = [f"{name} {told(value)} s" for name, value in found["stages"].items()]
    compiled = f"{found['compiled']} left out since something compiled"
    apart = f"; apart from that: {', '.join(stages)}" * bool(stages)
    yield f"{', '.join(where)}: {timed}, {compiled}{apart}"
    if pair is None:
        return
    if pair["withheld"]:
        yield f"no speed is told: {pair['withheld']}"
    if pair["settings"]:
        yield f"also differs in {'; '.join(pair['settings'])}"
    if pair["left_out"]:
        count, some = len(pair["left_out"]), ", ".join(pair["left_out"][:5])
        yield f"{count} pictures have no pair: {some}{', ...' * (count > 5)}"
    for name, score in pair["scores"].items():
        if "not_compared" in score:
            yield f"{name} is not compared: {score['not_compared']}"
