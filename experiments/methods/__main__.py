"""All decoding methods side by side on the emoji family: see `--help`."""

import datetime
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

import jaxspec
from experiments.bench_ar import machine
from experiments.methods import report
from experiments.methods.contestants import (
    CONTESTANTS,
    for_family,
    joined,
    select,
)
from experiments.methods.emoji import emoji
from experiments.methods.emoji import several as of_several
from experiments.methods.retrained import retrained
from experiments.methods.run import SMOKE, Plan, measure

EXAMPLES = """\b
Examples:
  python -m experiments.methods                      all methods, 300 captions
  python -m experiments.methods --smoke              a minute or two: does it work?
  python -m experiments.methods --methods "SJD*,GSD" --out /somewhere
  python -m experiments.methods --list
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=EXAMPLES)
def main(
    methods: Annotated[
        str,
        typer.Option(help="Names, comma-separated; * fits anything. AR is always on."),
    ] = "*",
    count: Annotated[
        int, typer.Option(help="Captions of test_pair, a picture each; it has 311.")
    ] = Plan.count,
    seeds: Annotated[
        int, typer.Option(help="Of AR: what it differs by from seed to seed is chance.")
    ] = Plan.seeds,
    others: Annotated[
        int,
        typer.Option(
            help="Seeds of the other methods; with two or more, how much pictures of "
            "a caption differ, and whether they have the colours that captions name."
        ),
    ] = Plan.others,
    batch: Annotated[
        int, typer.Option(help="Pictures at once. Times are taken at 1 and at this.")
    ] = Plan.batch,
    rounds: Annotated[int, typer.Option(help="Of timing.")] = Plan.rounds,
    timed: Annotated[
        int, typer.Option(help="Captions of a round at batch 1.")
    ] = Plan.timed,
    family: Annotated[str, typer.Option(help="A packaged one or a folder.")] = "emoji",
    size: Annotated[
        int | None, typer.Option(help="Pixels a side.  [default: the family's]")
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(help="Where rendered drawings are kept, and what is trained."),
    ] = Path("runs/emoji"),
    runs: Annotated[Path, typer.Option(help="Where raw results are kept.")] = Path(
        "runs/methods"
    ),
    out: Annotated[
        Path | None,
        typer.Option(help="Where the report goes.  [default: docs/results]"),
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="Few of everything, to see that it works; numbers mean nothing. The "
            "report goes to runs/methods/smoke.",
        ),
    ] = False,
    names: Annotated[
        bool, typer.Option("--list", help="Print names and stop.")
    ] = False,
) -> None:
    """Measures all decoding methods side by side on the emoji family.

    Draws the same captions with each method, and with plain AR at several seeds, and
    writes methods.json (all numbers), methods.md (the table, and what its columns
    mean) and methods.png (passes against quality).

    Speed: passes a picture, and time with the methods taking turns. Quality: text match
    (R@1, R@5), KID to the real drawings and to AR's pictures, and the target's own
    likelihood of what was drawn. AR's spread over seeds says what is chance: an exact
    method is inside it, a biased one shows its bias.

    Raw results are saved as they come, in a folder of the family, the captions and the
    code: a run that was stopped goes on where it was, and a finished one only writes
    its report anew. Needs `make train-deps` and the extra `figures`. Nothing else
    should run meanwhile, or the times are worth less.
    """
    if names:
        for each in (*CONTESTANTS, *joined(size or 128)):
            print(f"{each.name:17} {each.guarantee:7} {each.method!r}")
        return
    if find_spec("matplotlib") is None:
        raise SystemExit("the picture needs matplotlib: pip install -e '.[figures]'")
    try:
        plan = Plan(count, seeds, batch, rounds, timed, others)
        plan = SMOKE if smoke else plan
        task = emoji(family, folder, plan.count, size)
        there = for_family(task.pipeline) + retrained(task.pipeline, folder)
        chosen = select(methods, there)
        several = of_several(task, folder) if plan.others > 1 else None
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    jaxspec.use_compile_cache()
    with Progress() as bar:
        record = measure(task, chosen, plan, runs, bar, several)
    arguments = shlex.join(sys.argv[1:])
    about = {
        "command": f"python -m experiments.methods {arguments}".strip(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
    }
    if out is None:
        out = runs / "smoke" if smoke else Path("docs/results")
    report.write(about | record, out)
    print(f"wrote {out}/methods.json, methods.md and methods.png")


if __name__ == "__main__":
    app()
