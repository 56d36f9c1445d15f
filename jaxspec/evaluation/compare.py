"""Runs paired picture by picture: what one takes less, and what that costs in quality.

Every run is compared with the first. Pictures are paired by prompt id and number, and
only pairs count. Differences are means over prompts, ratios are ratios of sums, both
with 95 % bootstrap intervals over prompts.

A speed is told only beside what is known of quality: both methods are exact and draw
from the same target, or a score was measured of both runs in the same way. It is also
told only of equal devices, batch sizes and types, over pictures in whose batches
nothing compiled.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.evaluation.counts import by_prompt, passes, seconds, times
from jaxspec.evaluation.intervals import Estimate, bootstrap, ratio, times_as_fast
from jaxspec.evaluation.records import Sample, differences
from jaxspec.evaluation.results import Place, Results
from jaxspec.evaluation.runs import Shown, shown
from jaxspec.evaluation.scores import Score, picture

# Settings that two runs must share to be paired, and to be told apart only by method.
_MUST = ("seed", "prompts.sha256", "images")


def compare(folders: Sequence[str | Path], *, anyway: bool = False) -> dict[str, Any]:
    """Compares runs with the first of them.

    Args:
      folders: of two runs or more.
      anyway: pairs runs of different seeds, prompts or numbers of pictures, too.

    Returns:
      As JSON takes it: `base`, the first run's name; `runs`, of each its `name`,
      `guarantee`, `counts` (see `jaxspec.evaluation.counts`) and, but for the first,
      `paired` (see `paired`).

    Raises:
      ValueError: there is one run only; runs are not to be paired; nothing pairs.
      FileNotFoundError: a folder holds no run.
    """
    return compared(shown(folders), anyway=anyway)


def compared(runs: Sequence[Shown], *, anyway: bool = False) -> dict[str, Any]:
    """`compare` of runs that have been read."""
    if len(runs) < 2:
        raise ValueError("comparing takes two runs or more")
    base, *others = runs
    for other in others:
        _check_pairable(base, other, anyway)
    return {
        "base": base.name,
        "runs": [
            _about(base),
            *[_about(other) | {"paired": paired(base, other)} for other in others],
        ],
    }


def paired(base: Shown, other: Shown) -> dict[str, Any]:
    """A run beside the base, over the pictures that both have.

    Returns:
      `pictures` and `prompts` that pair, `left_out` that only one run has; `settings`
      that differ besides the method; `passes_difference` and `fewer_passes`, the base's
      passes over the run's; `equal_tokens`, the share of pictures that are the same,
      code by code; `log_prob_difference`, the run's log-probability less the base's,
      None if a target was not asked; `scores`, of each that both have; `speed`, the
      base's time over the run's, or None, and then `withheld` says why. Estimates are
      [value, low, high].

    Raises:
      ValueError: no picture pairs.
    """
    ours, theirs = base.results, other.results
    places = [place for place in ours.drawn if place in theirs.drawn]
    if not places:
        raise ValueError(f"{base.name} and {other.name} have no picture in common")
    scores = _scores(base, other, places)
    withheld = _withheld(base, other, scores)
    timed = [
        place
        for place in places
        if seconds(ours.drawn[place]) and seconds(theirs.drawn[place])
    ]
    if withheld is None and not timed:
        withheld = "no pair was timed in batches in which nothing compiled"
    speed = None if withheld else _speed(ours, theirs, timed)
    took = lambda results, of, over: _by_prompt(results, of, over)
    return {
        "pictures": len(places),
        "prompts": len({prompt for prompt, _ in places}),
        "left_out": sorted(
            picture(place) for place in set(ours.drawn) ^ set(theirs.drawn)
        ),
        "settings": _differing(ours, theirs),
        "passes_difference": bootstrap(
            took(theirs, passes, places) - took(ours, passes, places)
        ),
        "fewer_passes": ratio(took(ours, passes, places), took(theirs, passes, places)),
        "equal_tokens": _equal_tokens(ours, theirs, places),
        "log_prob_difference": _log_prob_difference(ours, theirs, places),
        "scores": scores,
        "speed": speed,
        "timed": len(timed),
        "withheld": withheld,
    }


def _about(run: Shown) -> dict[str, Any]:
    return {"name": run.name, "guarantee": run.guarantee, "counts": run.counts}


def _check_pairable(base: Shown, other: Shown, anyway: bool) -> None:
    known = {p.id: p.text for p in base.results.prompts}
    for prompt in other.results.prompts:
        if known.get(prompt.id, prompt.text) != prompt.text:
            raise ValueError(
                f"prompt {prompt.id!r} is {known[prompt.id]!r} in {base.name} and "
                f"{prompt.text!r} in {other.name}: they cannot be paired"
            )
    ours, theirs = _settings(base.results), _settings(other.results)
    for name in _MUST:
        if ours[name] != theirs[name] and not anyway:
            what = {"prompts.sha256": "prompts", "images": "pictures a prompt"}
            raise ValueError(
                f"{base.name} and {other.name} have other {what.get(name, name + 's')}"
                + f" ({ours[name]} and {theirs[name]})" * (name != "prompts.sha256")
                + ": what is left would be paired anyway, if told so with --anyway"
            )


def _settings(results: Results) -> dict[str, Any]:
    run = dataclasses.asdict(results.run)
    own = {f"settings.{k}": v for k, v in run["settings"].items() if k != "method"}
    rest = {k: run[k] for k in ("seed", "images", "weights", "dtype")}
    return own | rest | {"prompts.sha256": run["prompts"]["sha256"]}


def _differing(ours: Results, theirs: Results) -> list[str]:
    a, b = _settings(ours), _settings(theirs)
    return [
        f"{name.removeprefix('settings.')}: {a.get(name)} -> {b.get(name)}"
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name)
    ]


def _other_target(ours: Results, theirs: Results) -> list[str]:
    """What makes the distributions differ that exact methods draw from."""
    target = lambda run: {**run.settings, "method": None, "weights": run.weights}
    return differences(target(ours.run), target(theirs.run))


def _by_prompt(
    results: Results, of: Callable[[Sample], float | None], places: Collection[Place]
) -> np.ndarray:
    """The mean of each prompt's pictures, in the order of the places."""
    values = {place: float(of(results.drawn[place]) or 0) for place in places}
    return np.array(list(by_prompt(values).values()))


def _speed(ours: Results, theirs: Results, timed: Sequence[Place]) -> Estimate | None:
    """The base's time over the other's, of pictures that are timed in both."""
    slow, fast = (times(run.drawn[place] for place in timed) for run in (ours, theirs))
    return None if slow is None or fast is None else times_as_fast(slow, fast)


def _equal_tokens(
    ours: Results, theirs: Results, places: Sequence[Place]
) -> float | None:
    """The share of pictures with the same codes; None if they were not kept."""
    equal = []
    for place in places:
        a, b = ours.record(place), theirs.record(place)
        if a is None or b is None or a["tokens"].shape != b["tokens"].shape:
            return None
        equal.append(np.array_equal(a["tokens"], b["tokens"]))
    return float(np.mean(equal))


def _log_prob_difference(
    ours: Results, theirs: Results, places: Sequence[Place]
) -> Estimate | None:
    """Of the pictures of which both targets said something; None if there are none."""
    found = {}
    for place in places:
        a, b = ours.drawn[place].log_prob, theirs.drawn[place].log_prob
        if a is not None and b is not None:
            found[place] = b - a
    return bootstrap(np.array(list(by_prompt(found).values()))) if found else None


def _scores(
    base: Shown, other: Shown, places: Sequence[Place]
) -> dict[str, dict[str, Any]]:
    """Both values of each score that both runs have, and the paired difference."""
    return {
        name: _score(score, other.scores[name], places)
        for name, score in base.scores.items()
        if name in other.scores
    }


def _score(ours: Score, theirs: Score, places: Sequence[Place]) -> dict[str, Any]:
    """Set measures have no difference of pictures; other protocols are not compared."""
    differing = [k for k, v in ours.about().items() if theirs.about()[k] != v]
    if differing:
        return {"not_compared": f"measured with another {' and '.join(differing)}"}
    # A distance of sets depends on how many there are.
    if not ours.values and ours.count != theirs.count:
        counts = f"{ours.count:,} and of {theirs.count:,}"
        return {"not_compared": f"measured of {counts} pictures"}
    out: dict[str, Any] = {
        "better": ours.better,
        "base": (ours.value, ours.low, ours.high),
        "run": (theirs.value, theirs.low, theirs.high),
        "difference": None,
    }
    common = [
        place
        for place in places
        if picture(place) in ours.values and picture(place) in theirs.values
    ]
    if common:
        difference = {
            place: theirs.values[picture(place)] - ours.values[picture(place)]
            for place in common
        }
        out["difference"] = bootstrap(np.array(list(by_prompt(difference).values())))
    return out


def _withheld(base: Shown, other: Shown, scores: dict[str, Any]) -> str | None:
    """Why no speed is told; None if it may be."""
    exact = base.guarantee == other.guarantee == "exact"
    others = _other_target(base.results, other.results)
    if all("not_compared" in score for score in scores.values()):
        ask = "`jaxspec evaluate score` both runs in the same way"
        if not exact:
            return f"a biased method's speed says nothing without its quality: {ask}"
        if others:
            return f"the runs draw from other targets ({'; '.join(others)}): {ask}"
    # All processors are called "cpu": there only the host tells them apart.
    host = ["host"] * any("cpu" in device for device in base.counts["device"])
    for what in ("device", *host, "batch", "dtype"):
        ours, theirs = sorted(base.counts[what]), sorted(other.counts[what])
        if ours != theirs:
            told_ = ", ".join(ours) or "unknown", ", ".join(theirs) or "unknown"
            return f"not the same {what}: {told_[0]} and {told_[1]}"
    return None
