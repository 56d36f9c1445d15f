"""How much pictures of one caption differ from one another."""

from itertools import combinations
from typing import Any

import numpy as np

from experiments.emoji import metrics
from experiments.methods.contestants import REFERENCE, Contestant
from experiments.methods.measure import Drawn


def distances(features: np.ndarray, centre: np.ndarray | float = 0.0) -> np.ndarray:
    """Of all pairs of pictures of a caption, from features [S, N, F]: [pairs, N].

    Cosine distance of what features have beyond `centre`, their mean over captions: 1
    is two pictures that have nothing to do with one another, 0 is the same twice.
    """
    x = features - centre
    x = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-9)
    pairs = combinations(range(len(x)), 2)
    return np.stack([1 - (x[i] * x[j]).sum(-1) for i, j in pairs])


def same_drawing(real: np.ndarray, again: np.ndarray) -> float:
    """Below this distance, two pictures are as one drawing.

    The median distance of a real drawing [N, F] to what the tokenizer makes of it.
    """
    return float(np.median(distances(np.stack([real, again]), real.mean(0))))


def grouped(
    draws: list[tuple[Contestant, int, Drawn]], seeds: int
) -> list[tuple[str, list[Drawn]]]:
    """Draws of each method, so many seeds a group; AR has several groups.

    A group that is not full is left out.
    """
    by_name: dict[str, list[Drawn]] = {}
    for each, _, drawn in draws:
        by_name.setdefault(each.name, []).append(drawn)
    return [
        (name, some[i : i + seeds])
        for name, some in by_name.items()
        for i in range(0, len(some) - seeds + 1, seeds)
    ]


def beside(values: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """A mean over captions [N], and its difference to AR's, with 95 % intervals."""
    value, *interval = metrics.bootstrap(values)
    difference = metrics.bootstrap(values - reference)
    return {"value": value, "interval": interval, "difference": list(difference)}


def compared(
    groups: list[tuple[str, list[Drawn]]], real: np.ndarray, same: float
) -> list[dict[str, Any]]:
    """Of each group (see `grouped`) beside AR's first.

    Args:
      groups: AR's first among them.
      real: features [N, F] of real drawings of the captions.
      same: distance of what is one drawing (see `same_drawing`).

    Returns:
      For each: `distance`, of a caption's pictures, and `same`, the share of pairs that
      are as one drawing.
    """
    found = []
    for _, drawn in groups:
        features = np.stack([one.features for one in drawn])
        found.append(distances(features, real.mean(0)))
    first = found[[name for name, _ in groups].index(REFERENCE)]
    return [
        {
            "distance": beside(each.mean(0), first.mean(0)),
            "same": beside((each < same).mean(0), (first < same).mean(0)),
        }
        for each in found
    ]
