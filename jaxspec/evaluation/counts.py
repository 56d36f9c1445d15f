"""What a run's pictures took: passes, acceptance and time, each defined here once.

- **passes** of a picture: the target's, its prefill counted as one, as in
  `Decoded.summary`.
- **cells a pass**: cells / passes, with the token that the target itself adds in each
  pass; what papers call accepted length or tokens a step.
- **accepted a pass**: drafts that were kept / passes after the prefill, without that
  token.
- **acceptance**: drafts that were kept / drafts that were judged.
- **divergences** and **log-probability** of a picture: what the target says of it (see
  `jaxspec.decoding.likelihood`), where it was asked; means over pictures.

Each is pooled, a ratio of sums, or a mean of the pictures' ratios: `pooled` and `mean`.

Time is that of decoding, a picture's share of its batch, with an interval over batches.
Batches in which something compiled do not count; prefill and other stages are apart.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxspec.evaluation.intervals import Estimate, Times, bootstrap, ratio, time_each
from jaxspec.evaluation.records import Sample
from jaxspec.evaluation.results import Place, Results, only


def passes(sample: Sample) -> int:
    """Of the target, with its prefill, which draws too."""
    return (sample.target_passes or 0) + 1


def by_prompt(values: dict[Place, float]) -> dict[str, float]:
    """The mean over the pictures of each prompt."""
    groups: dict[str, list[float]] = {}
    for (prompt, _), value in values.items():
        groups.setdefault(prompt, []).append(value)
    return {prompt: float(np.mean(group)) for prompt, group in groups.items()}


def mean(results: Results, value: Callable[[Sample], float | None]) -> Estimate | None:
    """The mean of a value over pictures that have it; None if none has."""
    found = {
        place: float(number)
        for place, sample in results.drawn.items()
        if (number := value(sample)) is not None
    }
    return bootstrap(np.array(list(by_prompt(found).values()))) if found else None


def seconds(sample: Sample) -> float | None:
    """Of decoding; None if something compiled in its batch, or nothing was timed."""
    return None if sample.compiled is not False else sample.seconds


def times(samples: Iterable[Sample]) -> Times | None:
    """Of the batches in which nothing compiled; None of none.

    Pictures of one batch have the very same share of its time, which tells batches
    apart.
    """
    found = Counter(x for sample in samples if (x := seconds(sample)))
    if not found:
        return None
    each, pictures = np.array(list(found)), np.array(list(found.values()), float)
    return Times(each * pictures, pictures)


def counts(results: Results) -> dict[str, Any]:
    """The counts of a run, as JSON takes them; estimates are [value, low, high].

    Raises:
      ValueError: the run has no picture.
    """
    samples = list(results.drawn.values())
    if not samples:
        raise ValueError(f"{results.folder} has no picture yet")
    cells = None if results.grid is None else results.grid[0] * results.grid[1]
    judged = {p: s for p, s in results.drawn.items() if s.drafted}
    stages = {name for sample in samples for name in sample.stages}
    timed = [s for s in samples if seconds(s) is not None]
    took = times(samples)
    return {
        "pictures": len(samples),
        "prompts": len({sample.prompt for sample in samples}),
        "missing": len(results.missing),
        "failed": len(results.failed),
        "cells": cells,
        "passes": mean(results, passes),
        "prefill_passes": mean(results, lambda s: s.prefill_passes),
        "draft_passes": mean(results, lambda s: s.draft_passes),
        "cells_per_pass": None
        if cells is None
        else _ratios(results.drawn, lambda s: cells, passes),
        "accepted_per_pass": _ratios(
            {p: s for p, s in results.drawn.items() if s.target_passes},
            lambda s: s.accepted,
            lambda s: s.target_passes,
        ),
        "acceptance": _ratios(judged, lambda s: s.accepted, lambda s: s.drafted),
        "divergences": mean(results, lambda s: s.divergences),
        "log_prob": mean(results, lambda s: s.log_prob),
        "seconds": None if took is None else time_each(took),
        "stages": {
            name: float(np.mean([s.stages.get(name, 0.0) for s in timed]))
            for name in sorted(stages)
        }
        if timed
        else {},
        "timed": len(timed),
        "compiled": sum(s.compiled is True for s in samples),
        "batch": only(map(_batch, samples)),
        "device": only(s.device for s in samples),
        "dtype": only(s.dtype or results.run.dtype for s in samples),
        "host": only(s.host for s in samples),
    }


def _batch(sample: Sample) -> str | None:
    """Its rows, and whether they were handed on: times are then measured otherwise."""
    if sample.batch is None:
        return None
    return f"{sample.batch}{', rows handed on' * (sample.refill is True)}"


def _ratios(
    samples: dict[Place, Sample],
    above: Callable[[Sample], float | None],
    below: Callable[[Sample], float | None],
) -> dict[str, Estimate] | None:
    """Pooled, and the mean of the pictures' own; None of no picture."""
    if not samples:
        return None
    prompts: dict[str, list[Sample]] = {}
    for (prompt, _), sample in samples.items():
        prompts.setdefault(prompt, []).append(sample)
    total = lambda of, group: sum(of(s) or 0 for s in group)
    each = {p: (above(s) or 0) / (below(s) or 1) for p, s in samples.items()}
    return {
        "pooled": ratio(
            np.array([total(above, g) for g in prompts.values()], float),
            np.array([total(below, g) for g in prompts.values()], float),
        ),
        "mean": bootstrap(np.array(list(by_prompt(each).values()))),
    }
