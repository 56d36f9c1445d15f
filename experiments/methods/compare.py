"""What the raw results say: each method beside AR, and beside AR's own spread."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.emoji import metrics
from experiments.methods.contestants import REFERENCE, Contestant
from experiments.methods.measure import Drawn, Task
from jaxspec.decoding import describe

MEASURES = ("nll", "r1", "r5", "kid", "kid_ar")


def seed_band(values: Sequence[float]) -> dict[str, float] | None:
    """Where one more seed of AR would be, in 19 of 20 cases; None of a single value.

    Student's prediction interval, mean -+ t s root(1 + 1/n): wide for few seeds.
    """
    n = len(values)
    if n < 2:
        return None
    mean, deviation = metrics.spread(list(values))
    reach = float(stats.t.ppf(0.975, n - 1)) * deviation * (1 + 1 / n) ** 0.5
    return {
        "mean": mean,
        "deviation": deviation,
        "low": mean - reach,
        "high": mean + reach,
    }


def exchange_test(
    values: np.ndarray, others: np.ndarray, rounds: int = 10_000, seed: int = 0
) -> float:
    """How likely values [N] would differ so much from others [S, N] by chance.

    A permutation test within captions. If the method draws from AR's distribution, the
    1 + S values of a caption could stand in any order; so one of them, drawn by lot
    caption by caption, is put in the method's place. Two-sided, of the mean difference
    to the mean of the rest. Captions differ far more than pictures of one do: pairing
    takes that out.
    """
    every = np.concatenate([values[None], others]).astype(np.float64)
    k, n = every.shape
    differences = (every - every.mean(0)) * k / (k - 1)  # to the mean of the rest
    lot = np.random.default_rng(seed).integers(0, k, (rounds, n))
    by_chance = differences[lot, np.arange(n)].mean(1)
    # Ties count, whatever their last digit.
    reached = np.abs(by_chance) >= abs(differences[0].mean()) - 1e-12
    return float((1 + reached.sum()) / (1 + rounds))


def kid(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    value, error = metrics.kernel_distance(a, b, size=min(50, len(a) // 2))
    return {"value": value, "error": error}


def scores(task: Task, drawn: Drawn, others: list[Drawn]) -> dict[str, Any]:
    """One draw's numbers; `others` are AR's draws that it is compared with."""
    drafted = int(drawn.drafted.sum())
    nll = np.stack([other.nll for other in others])
    match = task.match(drawn.features)
    return {
        "passes": {
            "mean": float(drawn.passes.mean()),
            "deviation": float(drawn.passes.std(ddof=1)),
            "ratio": float(others[0].passes.mean() / drawn.passes.mean()),
            "of_drafter": float(drawn.draft_passes.mean()),
        },
        "acceptance": float(drawn.accepted.sum() / drafted) if drafted else None,
        "nll": {
            "value": float(drawn.nll.mean()),
            "deviation": float(drawn.nll.std(ddof=1)),
            "difference": metrics.bootstrap(drawn.nll - nll.mean(0)),
            "p": exchange_test(drawn.nll, nll),
            "outside_cells": float(drawn.outside.sum() / drawn.tokens.size),
            "outside_pictures": float((drawn.outside > 0).mean()),
        },
        "r1": match["r1"],
        "r5": match["r5"],
        "kid": kid(drawn.features, task.real),
    }


def value(row: dict, measure: str) -> float | None:
    """The number of a measure, which its band is about."""
    entry = row[measure]
    return entry["value"] if isinstance(entry, dict) else entry and entry[0]


def quality(
    task: Task, draws: list[tuple[Contestant, int, Drawn]]
) -> tuple[list[dict], dict]:
    """A row of every draw, and AR's band of every measure.

    Args:
      task: what was drawn.
      draws: with the seed of each; two of AR's or more among them.

    Returns:
      The rows. AR's are compared with AR's other seeds; `kid_ar` is the distance to
      AR's first seed, which itself has none; `outside` names the measures in which a
      method is outside AR's band. And the bands (see `seed_band`).
    """
    ar = [one for each, _, one in draws if each.name == REFERENCE]
    rows = [
        {
            "name": each.name,
            "seed": seed,
            "guarantee": each.guarantee,
            "method": describe(each.method),
            "made_by": repr(each.method),
            **scores(task, one, [other for other in ar if other is not one]),
            "kid_ar": None if one is ar[0] else kid(one.features, ar[0].features),
        }
        for each, seed, one in draws
    ]
    bands = {}
    for measure in MEASURES:
        values = [value(row, measure) for row in rows if row["name"] == REFERENCE]
        bands[measure] = seed_band([x for x in values if x is not None])
    for row in rows:
        row["outside"] = outside(row, bands)
    return rows, bands


def outside(row: dict, bands: dict) -> list[str] | None:
    """The measures in which a method is outside AR's bands; None of AR itself."""
    if row["name"] == REFERENCE:
        return None
    found = []
    for measure, band in bands.items():
        x = value(row, measure)
        if band is not None and not band["low"] <= x <= band["high"]:
            found.append(measure)
    return found


def speed(record: dict) -> dict[str, dict[str, float | None]]:
    """Of every method: seconds a picture, and how much faster than AR.

    Args:
      record: of `measure.time_methods`.

    Returns:
      `seconds`: a picture, the median over rounds. `ratio`: AR's time over the
      method's, the median over ratios within a round. `passes_ratio`: of the same
      pictures. `realised`: the share of the passes saved that became time saved,
      (1 - 1/ratio) / (1 - 1/passes_ratio); None where no pass is saved.
    """
    totals = [
        {name: sum(times) for name, times in one.items()} for one in record["rounds"]
    ]
    passes = {name: sum(each) for name, each in record["passes"].items()}
    out = {}
    for name, count in passes.items():
        trials = len(record["passes"][name])
        seconds = statistics.median(one[name] for one in totals)
        ratio = statistics.median(one[REFERENCE] / one[name] for one in totals)
        passes_ratio = passes[REFERENCE] / count
        saves = passes_ratio > 1
        realised = (1 - 1 / ratio) / (1 - 1 / passes_ratio) if saves else None
        out[name] = {
            "seconds": seconds / trials / record["batch"],
            "ratio": ratio,
            "passes_ratio": passes_ratio,
            "realised": realised,
        }
    return out
