"""A whole measurement: every method drawn, timed and compared."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from experiments.methods import compare
from experiments.methods.contestants import OTHER_SEED, REFERENCE, Contestant
from experiments.methods.measure import Drawn, Task, saved_draw, time_methods


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
      count: captions, a picture each.
      seeds: of AR, two or more; the other methods draw with one.
      batch: pictures drawn at once; times are taken at 1 and at this.
      rounds: of timing, the methods taking turns; 0 is no timing.
      timed: captions of a round at batch 1; at `batch` it is one batch.
    """

    count: int = 300
    seeds: int = 5
    batch: int = 16
    rounds: int = 3
    timed: int = 8

    def __post_init__(self):
        least = {"count": 4, "seeds": 2, "batch": 1, "rounds": 0, "timed": 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                found = getattr(self, name)
                raise ValueError(f"{name} must be {number} or more, not {found}")


SMOKE = Plan(count=8, seeds=2, batch=4, rounds=1, timed=1)


def draw_all(
    folder: Path, task: Task, contestants: list[Contestant], plan: Plan, bar: Progress
) -> list[tuple[Contestant, int, Drawn]]:
    """What each contestant drew with each of its seeds."""
    todo = [
        (each, seed)
        for each in contestants
        for seed in (range(plan.seeds) if each.name == REFERENCE else [OTHER_SEED])
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


def measure(
    task: Task, contestants: list[Contestant], plan: Plan, runs: Path, bar: Progress
) -> dict[str, Any]:
    """Everything, as one record for JSON.

    Raw results are kept in `runs`, in a folder of the family, the captions and the
    code: what is there is not measured again.
    """
    folder = runs / task.fingerprint()
    folder.mkdir(parents=True, exist_ok=True)
    # Times first: nothing else should run during them, the rest minds less.
    times = time_all(folder, task, contestants, plan, bar)
    draws = draw_all(folder, task, contestants, plan, bar)
    rows, bands = compare.quality(task, draws)
    speeds = {batch: compare.speed(raw) for batch, raw in times.items()}
    for row in rows:
        row["time"] = {batch: speed[row["name"]] for batch, speed in speeds.items()}
    return {
        "family": task.pipeline.config.name,
        "settings": vars(task.pipeline.config.defaults),
        "fingerprint": folder.name,
        "captions": len(task.captions),
        "ar_seeds": plan.seeds,
        "bands": bands,
        "rows": rows,
        "raw_times": times,
    }
