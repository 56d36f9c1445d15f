"""Estimates with bootstrap intervals: over prompts, and of times over batches.

Pictures of one prompt are alike, so prompts are resampled, each with all its pictures:
values are first averaged over the pictures of a prompt. Pictures of one batch share one
time, so batches are resampled.
"""

from typing import NamedTuple

import numpy as np

RESAMPLES = 2000


class Estimate(NamedTuple):
    """A value, and its 95 % bootstrap interval; None where it has none."""

    value: float
    low: float | None
    high: float | None


class Times(NamedTuple):
    """What batches took: their seconds [N], and how many pictures each had [N]."""

    seconds: np.ndarray
    pictures: np.ndarray


def bootstrap(
    values: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """The mean of values [N] and its 95 % percentile interval, N resampled."""
    return ratio(values, np.ones(len(values)), resamples, seed)


def ratio(
    above: np.ndarray, below: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """A ratio of sums, `above` [N] over `below` [N], and its 95 % percentile interval.

    Pairs are resampled together; a resample whose `below` is 0 counts for nothing. One
    pair alone tells nothing of how they vary: no interval.
    """
    value = float(above.sum() / below.sum())
    if len(above) < 2:
        return Estimate(value, None, None)
    sums, totals = _resampled(above, below, resamples, seed)
    ratios = sums[totals != 0] / totals[totals != 0]
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def _resampled(
    above: np.ndarray, below: np.ndarray, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of both [resamples], over the same rows."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(above), (resamples, len(above)))
    return above[rows].sum(1), below[rows].sum(1)


def time_each(times: Times) -> Estimate:
    """Seconds a picture; of a single batch there is no interval."""
    return times_as_fast(times, Times(np.ones(2), np.ones(2)))


def times_as_fast(slow: Times, fast: Times, resamples: int = RESAMPLES) -> Estimate:
    """Seconds a picture of one run over another's, whose batches are resampled apart.

    Where a run has a single batch, nothing tells how its times vary: no interval.
    """
    each = [float(x.seconds.sum() / x.pictures.sum()) for x in (slow, fast)]
    value = each[0] / each[1]
    if min(len(slow.seconds), len(fast.seconds)) < 2:
        return Estimate(value, None, None)
    took, pictures = _resampled(*slow, resamples, seed=0)
    took_fast, pictures_fast = _resampled(*fast, resamples, seed=1)
    ratios = took / pictures * pictures_fast / took_fast
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def normal(value: float, error: float) -> Estimate:
    """A value and its 95 % interval, of a standard error."""
    return Estimate(value, value - 1.96 * error, value + 1.96 * error)
