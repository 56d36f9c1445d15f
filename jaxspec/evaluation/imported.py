"""Scores that official scorers computed of pictures that `export` laid out."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.evaluation.export import LAYOUTS
from jaxspec.evaluation.intervals import RESAMPLES
from jaxspec.evaluation.records import sha256
from jaxspec.evaluation.results import Place, Results
from jaxspec.evaluation.scores import Score, check_count, not_scored, of_pictures


def geneval(results: Results, path: str | Path, *, force: bool = False) -> list[Score]:
    """GenEval's `results.jsonl` (Ghosh et al. 2023, arXiv 2310.11513).

    Args:
      results: the run whose pictures were exported.
      path: of the file.
      force: takes results of fewer pictures than the benchmark has, too.

    Returns:
      The score, the mean over tasks of the share of pictures that are correct, with
      prompts resampled within tasks; and that of each task.

    Raises:
      ValueError: the file is none of GenEval's, or is of other pictures than the run's,
        or of too few.
      OSError: it cannot be read.
    """
    path = Path(path)
    values: dict[Place, float] = {}
    tasks: dict[str, str] = {}  # of a prompt
    texts = {prompt.id: prompt.text for prompt in results.prompts}
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), 1):
        try:
            row = json.loads(line)
            prompt, _, file = Path(row["filename"]).parts[-3:]
            place = prompt, int(Path(file).stem)
            tasks[prompt], correct = row["tag"], float(row["correct"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is none of GenEval's results.jsonl: {error}"
            ) from None
        where = f"line {number} of {path}"
        _add(results, values, place, correct, where)
        if row.get("prompt", texts[prompt]) != texts[prompt]:
            raise ValueError(
                f"{where} is of {row['prompt']!r}, and prompt {prompt} of "
                f"{results.folder} is {texts[prompt]!r}"
            )
    _some(values, path)
    _check_whole("geneval", "GenEval", results, values, force)
    about: dict[str, Any] = {
        "better": "higher",
        "network": "GenEval's detector and CLIP",
        "weights": "",
        "resize": "GenEval's",
        "reference": f"{path.name} {sha256(path)[:12]}",
        "protocol": "GenEval",
    }
    names = sorted(set(tasks.values()))
    own = {
        name: {p: v for p, v in values.items() if tasks[p[0]] == name} for name in names
    }
    low, high = _over_tasks(list(own.values()))
    missing = not_scored(results, values)
    kinds = {prompt.id: prompt.category for prompt in results.prompts}
    return [
        Score(
            name="GenEval",
            value=float(
                np.mean([np.mean(list(each.values())) for each in own.values()])
            ),
            low=low,
            high=high,
            count=len(values),
            missing=missing,
            **about,
        ),
        *[
            replace(
                of_pictures(results, f"GenEval {name}", each, **about),
                missing=[x for x in missing if kinds[x.rpartition("/")[0]] == name],
            )
            for name, each in own.items()
        ],
    ]


def dpg(results: Results, path: str | Path, *, force: bool = False) -> Score:
    """The results of DPG-Bench's `compute_dpg_bench.py` (Hu et al. 2024, ELLA).

    Args:
      results, path, force: as for `geneval`.

    Raises:
      ValueError: the file is none of its, is of other pictures than the run's or of too
        few, or its mean is not the one that it ends with.
      OSError: it cannot be read.
    """
    path = Path(path)
    values: dict[Place, float] = {}
    said = None
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), 1):
        where = f"line {number} of {path}"
        if found := re.fullmatch(r"(.+)\.png((?:, [\d.e-]+)+)", line):
            prompt = Path(found[1]).name
            *scores, _ = [float(x) for x in found[2].split(", ")[1:]]
            for k, score in enumerate(scores):
                _add(results, values, (prompt, k), 100 * score, where)
        elif found := re.fullmatch(r"DPG-Bench score: ([\d.]+)", line):
            said = float(found[1])
    _some(values, path)
    _check_whole("dpg", "DPG-Bench", results, values, force)
    score = of_pictures(
        results,
        "DPG-Bench",
        values,
        better="higher",
        network="mPLUG-large, as DPG-Bench has it",
        weights="",
        resize="DPG-Bench's",
        reference=f"{path.name} {sha256(path)[:12]}",
        protocol="DPG-Bench",
    )
    if said is not None and abs(said - score.value) > 0.01:
        raise ValueError(
            f"{path} says {said:.2f}, and its lines have a mean of {score.value:.2f}: "
            "is it whole?"
        )
    return score


def _add(
    results: Results, values: dict[Place, float], place: Place, value: float, where: str
) -> None:
    if place not in results.drawn:
        raise ValueError(
            f"{where} is of image {place[1]} of prompt {place[0]}, and "
            f"{results.folder} has no such picture: is it of another run?"
        )
    if place in values:
        raise ValueError(f"{where} is of a picture that was there before")
    values[place] = value


def _some(values: dict[Place, float], path: Path) -> None:
    if not values:
        raise ValueError(f"{path} holds no result of a picture")


def _check_whole(
    layout: str, name: str, results: Results, values: dict[Place, float], force: bool
) -> None:
    """Raises ValueError for fewer pictures than the benchmark has."""
    whole = LAYOUTS[layout]
    least = (whole.prompts or 0) * (whole.images or 0)
    check_count(name, results, len(values), least, force)


def _over_tasks(
    tasks: list[dict[Place, float]],
) -> tuple[float | None, float | None]:
    """The interval of the mean over tasks, prompts resampled within each.

    Where a task has a single prompt there is none.
    """
    rng = np.random.default_rng(0)
    means = np.zeros((len(tasks), RESAMPLES))
    for i, task in enumerate(tasks):
        prompts: dict[str, list[float]] = {}
        for (prompt, _), value in task.items():
            prompts.setdefault(prompt, []).append(value)
        each = np.array([np.mean(group) for group in prompts.values()])
        if len(each) < 2:
            return None, None
        means[i] = each[rng.integers(0, len(each), (RESAMPLES, len(each)))].mean(1)
    low, high = np.quantile(means.mean(0), (0.025, 0.975))
    return float(low), float(high)
