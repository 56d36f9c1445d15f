"""What the raw results say: each method beside AR, and beside AR's own spread."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.emoji import metrics
from experiments.methods.contestants import REFERENCE, Contestant
from experiments.methods.measure import Drawn, Task
from jaxspec.decoding import ACCEPTED, Method, describe
from jaxspec.methods.eagle import Treed

PICTURES = ("nll", "r1", "r5")  # measures that each picture has
SETS = ("kid", "kid_ar")  # and that only a set has
MEASURES = (*PICTURES, *SETS)


def _band(mean: float, deviation: float, seeds: int, degrees: int) -> dict[str, float]:
    """Where one more seed of AR would be, in 19 of 20 cases.

    Student's prediction interval, mean -+ t s root(1 + 1/seeds), of as many degrees of
    freedom as s was estimated with.
    """
    reach = float(stats.t.ppf(0.975, degrees)) * deviation * (1 + 1 / seeds) ** 0.5
    out = {"mean": mean, "deviation": deviation}
    return out | {"low": mean - reach, "high": mean + reach}


def set_band(values: Sequence[float]) -> dict[str, float] | None:
    """The band (see `_band`) of numbers, one a seed; None of less than two."""
    if len(values) < 2:
        return None
    mean, deviation = metrics.spread(list(values))
    return _band(mean, deviation, len(values), len(values) - 1)


def picture_band(values: np.ndarray) -> dict[str, float]:
    """The band (see `_band`) of a mean over pictures, from values [seeds, captions].

    Captions are the same for every seed: a mean varies by what pictures of one caption
    vary by. All captions tell of that, so it is known well even from two seeds.
    """
    seeds, captions = values.shape
    deviation = float((values.var(0, ddof=1).mean() / captions) ** 0.5)
    return _band(float(values.mean()), deviation, seeds, captions * (seeds - 1))


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


def compared(values: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    """A mean over pictures [N], beside AR's pictures [S, N] of the same captions."""
    value, *interval = metrics.bootstrap(values)
    return {
        "value": value,
        "interval": interval,
        "deviation": float(values.std(ddof=1)),
        "difference": metrics.bootstrap(values - others.mean(0)),
        "p": exchange_test(values, others),
    }


def counts(drawn: Drawn) -> dict[str, Any]:
    """What a method did; AR takes as many passes as there are cells."""
    drafted, cells = int(drawn.drafted.sum()), drawn.tokens[0].size
    return {
        "passes": {
            "mean": float(drawn.passes.mean()),
            "deviation": float(drawn.passes.std(ddof=1)),
            "ratio": float(cells / drawn.passes.mean()),
            "of_drafter": float(drawn.draft_passes.mean()),
        },
        "acceptance": float(drawn.accepted.sum() / drafted) if drafted else None,
        "off_support": {
            "cells": float(drawn.outside.sum() / drawn.tokens.size),
            "pictures": float((drawn.outside > 0).mean()),
        },
    }


def kept_in_rounds(origin: np.ndarray) -> np.ndarray:
    """Drafts that each round of a tree kept, of pictures [N, H, W] in raster order.

    A round is drafts that were kept, and the target's own token behind them; where they
    fill the picture there is none. The first cell is of no round.
    """
    kept = []
    for cells in origin.reshape(len(origin), -1)[:, 1:]:
        ends = np.flatnonzero(cells != ACCEPTED)
        rounds = np.diff(ends, prepend=-1) - 1
        left = len(cells) - 1 - (ends[-1] if len(ends) else -1)
        kept += [*rounds, left] if left else [*rounds]
    return np.array(kept)


def depths(method: Method, drawn: Drawn) -> list[float] | None:
    """The share of rounds that kept a draft of each depth, for methods with trees."""
    if not isinstance(method, Treed):
        return None
    kept = kept_in_rounds(drawn.origin)
    return [float(np.mean(kept > i)) for i in range(method.shape.depth)]


def drawn_on(task: Task, drawn: Drawn) -> np.ndarray:
    """Cells [N, H, W] that are not plain background, which is easy to draft."""
    size = task.pipeline.config.defaults.size
    white = task.pipeline.encode(np.full((1, size, size, 3), 255, np.uint8))
    return ~np.isin(drawn.tokens, white)


def ink(task: Task, drawn: Drawn) -> tuple[float, float]:
    """Of cells that are not plain background: the share that are drafts, and the NLL.

    The latter is in nats a cell, of those inside the support.
    """
    chosen = drawn_on(task, drawn)
    nats = drawn.nats[chosen & np.isfinite(drawn.nats)]
    return float((drawn.origin == ACCEPTED)[chosen].mean()), float(nats.mean())


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
      method is outside AR's band. And the bands.
    """
    pictures = [{"nll": one.nll, **task.match(one.features)} for *_, one in draws]
    ar = [i for i, (each, *_) in enumerate(draws) if each.name == REFERENCE]
    rows, inks = [], [ink(task, one) for *_, one in draws]
    for i, (each, seed, one) in enumerate(draws):
        row: dict[str, Any] = {
            "name": each.name,
            "seed": seed,
            "guarantee": each.guarantee,
            "method": describe(each.method),
            "made_by": repr(each.method),
            **counts(one),
            "depths": depths(each.method, one),
        }
        for name in PICTURES:
            others = np.stack([pictures[k][name] for k in ar if k != i])
            row[name] = compared(pictures[i][name], others)
        row["kept"] = {
            "all": float((one.origin == ACCEPTED).mean()),
            "ink": inks[i][0],
        }
        row["ink_nll"] = inks[i][1] - float(np.mean([inks[k][1] for k in ar if k != i]))
        row["kid"] = kid(one.features, task.real)
        first = draws[ar[0]][2]
        row["kid_ar"] = None if one is first else kid(one.features, first.features)
        rows.append(row)
    bands: dict[str, dict | None] = {
        name: picture_band(np.stack([pictures[i][name] for i in ar]))
        for name in PICTURES
    }
    for name in SETS:
        bands[name] = set_band([rows[i][name]["value"] for i in ar if rows[i][name]])
    for row in rows:
        row["outside"] = outside(row, bands)
    return rows, bands


def outside(row: dict, bands: dict) -> list[str] | None:
    """The measures in which a method is outside AR's bands; None of AR itself."""
    if row["name"] == REFERENCE:
        return None
    return [
        name
        for name, band in bands.items()
        if band and not band["low"] <= row[name]["value"] <= band["high"]
    ]


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
