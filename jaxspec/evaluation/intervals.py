"""Estimates with bootstrap intervals, over prompts.

Pictures of one prompt are alike, so prompts are resampled, each with all its pictures:
values are first averaged over the pictures of a prompt.
"""

from typing import NamedTuple

import numpy as np

RESAMPLES = 2000


class Estimate(NamedTuple):
    """A value, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def bootstrap(
    values: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """The mean of values [N] and its 95 % percentile interval, N resampled."""
    return ratio(values, np.ones(len(values)), resamples, seed)


def ratio(
    above: np.ndarray, below: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """A ratio of sums, `above` [N] over `below` [N], and its 95 % percentile interval.

    Pairs are resampled together; a resample whose `below` is 0 counts for nothing.
    """
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(above), (resamples, len(above)))
    sums = below[rows].sum(1)
    ratios = above[rows].sum(1)[sums != 0] / sums[sums != 0]
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Estimate(float(above.sum() / below.sum()), float(low), float(high))


def normal(value: float, error: float) -> Estimate:
    """A value and its 95 % interval, of a standard error."""
    return Estimate(value, value - 1.96 * error, value + 1.96 * error)
