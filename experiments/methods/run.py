"""A whole measurement: every method drawn, timed and compared."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from experiments.methods import compare, variety
from experiments.methods.colours import Examples
from experiments.methods.contestants import OTHER_SEED, REFERENCE, Contestant
from experiments.methods.measure import Drawn, Task, saved_draw, time_methods


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
      count: captions, a picture each.
      seeds: of AR, two or more.
      others: seeds of the other methods. With two or more, and as many of AR, it is
        measured too how much pictures of one caption differ, and whether they have the
        colours that captions name; all else is of the first.
      batch: pictures drawn at once; times are taken at 1 and at this.
      rounds: of timing, the methods taking turns; 0 is no timing.
      timed: captions of a round at batch 1; at `batch` it is one batch.
    """

    count: int = 300
    seeds: int = 5
    batch: int = 16
    rounds: int = 3
    timed: int = 8
    others: int = 1

    def __post_init__(self):
        least = {"count": 4, "seeds": 2, "batch": 1, "rounds": 0, "timed": 1}
        least["others"] = 1
        for name, number in least.items():
            if getattr(self, name) < number:
                found = getattr(self, name)
                raise ValueError(f"{name} must be {number} or more, not {found}")
        if self.others > self.seeds:
            raise ValueError(
                f"others must be at most AR's seeds, {self.seeds}, not {self.others}"
            )


@dataclass(frozen=True)
class Several:
    """What several pictures of a caption are compared by.

    Attributes:
      same: the distance of what is one drawing (see `variety`).
      coloured: captions that name a colour.
      examples: what has which colour.
    """

    same: float
    coloured: Task
    examples: Examples


SMOKE = Plan(count=8, seeds=2, batch=4, rounds=1, timed=1)


def draw_all(
    folder: Path, task: Task, contestants: list[Contestant], plan: Plan, bar: Progress
) -> list[tuple[Contestant, int, Drawn]]:
    """What each contestant drew with each of its seeds."""
    todo = [
        (each, seed)
        for each in contestants
        for seed in (
            range(plan.seeds)
            if each.name == REFERENCE
            else range(OTHER_SEED, OTHER_SEED + plan.others)
        )
    ]
    draws, count = [], len(task.captions)
    line = bar.add_task("", total=len(todo) * count)
    for i, (each, seed) in enumerate(todo):

        def progress(done: int, cells: int, _, i=i) -> None:
            bar.update(line, completed=count * (i + done / cells))

        bar.update(line, description=f"drawing: {each.name}, seed {seed}")
        drawn = saved_draw(folder, task, each, seed, plan.batch, progress)
        draws.append((each, seed, drawn))
        bar.update(line, completed=count * (i + 1))
    return draws


def time_all(
    folder: Path, task: Task, contestants: list[Contestant], plan: Plan, bar: Progress
) -> dict[str, dict]:
    """Raw times (see `time_methods`) by batch size."""
    out = {}
    batches = {plan.batch: 1, 1: plan.timed} if plan.rounds else {}
    for batch, trials in batches.items():
        total = (plan.rounds + 1) * trials * len(contestants)
        line = bar.add_task(f"timing: batch {batch}", total=total)
        tick = lambda line=line: bar.advance(line)
        settings = {"batch": batch, "trials": trials, "rounds": plan.rounds}
        raw = time_methods(
            folder, task, contestants, **settings, seed=OTHER_SEED, tick=tick
        )
        bar.update(line, completed=total)
        out[str(raw["batch"])] = raw
    return dict(sorted(out.items(), key=lambda pair: int(pair[0])))


def compare_several(
    task: Task,
    several: Several,
    draws: list[tuple[Contestant, int, Drawn]],
    coloured: list[tuple[Contestant, int, Drawn]],
    seeds: int,
) -> list[dict[str, Any]]:
    """A row of every method, and of AR's seeds, so many at a time.

    Takes what was drawn of the captions, and of those that name a colour.
    """
    groups = variety.grouped(draws, seeds)
    rows = variety.compared(groups, task.real, several.same)
    asked, known, right = several.coloured, several.examples, []
    for _, drawn in variety.grouped(coloured, seeds):
        pictures = [asked.pipeline.images(one.tokens) for one in drawn]
        each = [known.right(asked.captions, x) for x in pictures]
        right.append(np.mean(each, axis=0))
    first = right[[name for name, _ in groups].index(REFERENCE)]
    return [
        {"name": name, **row, "colour": variety.beside(values, first)}
        for (name, _), row, values in zip(groups, rows, right, strict=True)
    ]


def measure(
    task: Task,
    contestants: list[Contestant],
    plan: Plan,
    runs: Path,
    bar: Progress,
    several: Several | None = None,
) -> dict[str, Any]:
    """Everything, as one record for JSON.

    Raw results are kept in `runs`, in folders of the family, the captions and the
    code: what is there is not measured again. `several` is asked for by a plan with
    several seeds of every method.
    """
    folder = runs / task.fingerprint()
    folder.mkdir(parents=True, exist_ok=True)
    # Times first: nothing else should run during them, the rest minds less.
    times = time_all(folder, task, contestants, plan, bar)
    draws = draw_all(folder, task, contestants, plan, bar)
    once = [x for x in draws if x[0].name == REFERENCE or x[1] == OTHER_SEED]
    rows, bands = compare.quality(task, once)
    speeds = {batch: compare.speed(raw) for batch, raw in times.items()}
    for row in rows:
        row["time"] = {batch: speed[row["name"]] for batch, speed in speeds.items()}
    about_several = {}
    if several is not None:
        other = runs / several.coloured.fingerprint()
        other.mkdir(exist_ok=True)
        coloured = draw_all(other, several.coloured, contestants, plan, bar)
        about_several = {
            "seeds": plan.others,
            "same": several.same,
            "coloured": several.coloured.captions,
            "rows": compare_several(task, several, draws, coloured, plan.others),
        }
    return {
        "family": task.pipeline.config.name,
        "settings": vars(task.pipeline.config.defaults),
        "fingerprint": folder.name,
        "captions": len(task.captions),
        "ar_seeds": plan.seeds,
        "bands": bands,
        "rows": rows,
        "several": about_several,
        "raw_times": times,
    }
