"""MuLo-SD, knob by knob, and what it competes with: see `--help`."""

import datetime
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer
from rich.progress import Progress

import jaxspec
from experiments.bench_ar import machine
from experiments.methods.emoji import emoji
from experiments.methods.run import SMOKE, Plan, measure
from experiments.mulo import report
from experiments.mulo.costs import pass_costs
from experiments.mulo.sweep import KNOBS, sections, select

EXAMPLES = """\b
Examples:
  python -m experiments.mulo                          128 px, drafts of 64 px
  python -m experiments.mulo --size 256               256 px, drafts of 128 px
  python -m experiments.mulo --only "threshold;radius;ZipAR-*" --out /somewhere

\b
{sections}
The paper's ablations: raster rejection and its threshold (expansion), rejects
alone (radius), pooling (neighbours), islands one cell after another (order).
Where the time goes: python -m experiments.mulo.stages
""".format(
    sections=fill(f"Sections: MuLo, {', '.join(KNOBS)}, ratio, others, beyond.", 78)
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=EXAMPLES)
def main(
    size: Annotated[int, typer.Option(help="Pixels of the target.")] = 128,
    only: Annotated[
        str,
        typer.Option(help="Sections or settings, by names with ; between; * fits any."),
    ] = "*",
    count: Annotated[int, typer.Option(help="Captions of test_pair.")] = 96,
    seeds: Annotated[int, typer.Option(help="Of AR, for its spread.")] = 3,
    batch: Annotated[int, typer.Option(help="Pictures at once.")] = 16,
    family: Annotated[str, typer.Option(help="A packaged one or a folder.")] = "emoji",
    folder: Annotated[
        Path, typer.Option(help="Where the rendered drawings are kept.")
    ] = Path("runs/emoji"),
    runs: Annotated[Path, typer.Option(help="Where raw results are kept.")] = Path(
        "runs/mulo"
    ),
    out: Annotated[
        Path, typer.Option(help="Where the report goes, as mulo-SIZE.*.")
    ] = Path("docs/results"),
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Few of everything, to see that it works.")
    ] = False,
) -> None:
    """Measures MuLo with one knob changed at a time, beside other methods.

    Draws the same captions with each setting, and with AR at several seeds, and writes
    mulo-SIZE.json (all numbers), mulo-SIZE.md (a table a knob) and mulo-SIZE.png.
    Passes of the drafter count by what they cost, which is measured. Raw results are
    saved as they come: a run that was stopped goes on where it was.
    """
    if find_spec("matplotlib") is None:
        raise SystemExit("the picture needs matplotlib: pip install -e '.[figures]'")
    try:
        plan = Plan(count, seeds, batch, rounds=0)
        plan = replace(SMOKE, rounds=0) if smoke else plan
        task = emoji(family, folder, plan.count, size)
        config = task.pipeline.config
        chosen = select(only, sections(config.sizes, size, tuple(dict(config.flashar))))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    jaxspec.use_compile_cache()
    contestants = [each for section in chosen.values() for each in section]
    with Progress() as bar:
        record = measure(task, contestants, plan, runs, bar)
    about = {
        "command": f"python -m experiments.mulo {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "costs": pass_costs(task.pipeline, runs / record["fingerprint"]),
        "sections": {k: [e.name for e in each] for k, each in chosen.items()},
    }
    out = runs / "smoke" if smoke else out
    report.write(about | record, out)
    print(f"wrote {out}/mulo-{size}.json, .md and .png")


if __name__ == "__main__":
    app()
