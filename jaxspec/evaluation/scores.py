"""Scores of a run, each with all that it takes to compare it with another.

`scores.json` in the run's folder holds them by name; a score that is made again takes
the place of the old one.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.evaluation.counts import by_prompt
from jaxspec.evaluation.intervals import bootstrap
from jaxspec.evaluation.results import Place, Results
from jaxspec.evaluation.tables import Row, Table, interval, table, told
from jaxspec.evaluation.writing import taken
from jaxspec.figures import atomically

SCORES = "scores.json"
FORMAT = 1


@dataclass(frozen=True)
class Score:
    """One number about a run's pictures, and where it comes from.

    Attributes:
      name: of the measure, such as "FID".
      value: of all pictures that were scored.
      low, high: its 95 % interval; None if there is none.
      better: which values are.
      count: pictures that were scored.
      network: that looked at them.
      weights: the hash of its weights.
      resize: how pictures were brought to its size, with which filter.
      reference: what they were compared with.
      protocol: whose numbers it is comparable with.
      missing: pictures of the run that are not there and so not scored, "id/number".
      values: of each picture, by "id/number"; empty for a measure of a set.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    better: Literal["higher", "lower"]
    count: int
    network: str
    weights: str
    resize: str
    reference: str
    protocol: str
    missing: list[str] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)

    def about(self) -> dict[str, Any]:
        """All but the pictures' own values: what two scores must share to compare."""
        return {
            name: getattr(self, name)
            for name in ("network", "weights", "resize", "reference", "protocol")
        }


def picture(place: Place) -> str:
    """How scores call a picture."""
    return f"{place[0]}/{place[1]}"


def of_pictures(
    results: Results, name: str, values: dict[Place, float], **about: Any
) -> Score:
    """The mean of values of pictures, with an interval over prompts."""
    value, low, high = bootstrap(np.array(list(by_prompt(values).values())))
    return Score(
        name=name,
        value=value,
        low=low,
        high=high,
        count=len(values),
        missing=not_scored(results, values),
        values={picture(place): number for place, number in values.items()},
        **about,
    )


def not_scored(results: Results, scored: Collection[Place]) -> list[str]:
    """The pictures that a run should have and that have no score."""
    return [picture(place) for place in results.places if place not in scored]


def check_count(
    what: str, results: Results, count: int, least: int, force: bool, forced: int = 1
):
    """Refuses a score of too few pictures.

    Raises:
      ValueError: there are fewer than `least`, and `force` is not set; or fewer than
        `forced`, of which it is no number.
    """
    if count < forced:
        raise ValueError(
            f"{what} needs {forced} pictures at the very least, and {results.folder} "
            f"has {count}"
        )
    if count < least and not force:
        raise ValueError(
            f"{what} needs {least:,} pictures or more, and {results.folder} has "
            f"{count:,}: draw more, or force it, though the number will say little"
        )


def read_scores(folder: Path) -> dict[str, Score]:
    """The scores of a run by name; none if it has not been scored.

    Raises:
      ValueError: the file is damaged or of another format.
    """
    path = folder / SCORES
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf8"))
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']}, not {FORMAT}")
        return {name: Score(**each) for name, each in record["scores"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def write_scores(folder: Path, scores: Iterable[Score]) -> dict[str, Score]:
    """Adds scores to those of a run, in one step; returns all.

    Processes that score one run at the same time take turns.

    Raises:
      ValueError: a score is no number, or the file is damaged.
      OSError: it cannot be written.
    """
    new = {score.name: score for score in scores}
    for name, score in new.items():
        if not np.isfinite(
            [x for x in (score.value, score.low, score.high) if x is not None]
        ).all():
            raise ValueError(
                f"{name} of {folder} is {score.value} ({score.low} to {score.high}): "
                "are the network's weights damaged?"
            )
    with taken(folder):
        known = read_scores(folder) | new
        record = {
            "format": FORMAT,
            "scores": {name: dataclasses.asdict(each) for name, each in known.items()},
        }
        with atomically(folder / SCORES) as draft:
            text = json.dumps(record, indent=1, ensure_ascii=False)
            draft.write_text(text + "\n", encoding="utf8")
    return known


def scores_table(rows: Iterable[tuple[str, Score]]) -> Table:
    """Scores of runs as a table, by the run's name."""
    cells: list[Row] = [
        {
            "cells": [
                run,
                each.name,
                [told(each.value), interval((each.value, each.low, each.high))],
                each.better,
                f"{each.count:,}",
                each.protocol,
                f"{each.network} {each.weights[:12]}".strip(),
                each.reference,
            ]
        }
        for run, each in rows
    ]
    heads = ("run", "score", "value", "better", "pictures", "protocol")
    return table([*heads, "network", "reference"], cells, numbers=False)
