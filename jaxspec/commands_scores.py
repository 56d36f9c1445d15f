"""What is made of runs: `evaluate report`, `evaluate score` and `evaluate compare`."""

from pathlib import Path
from typing import Annotated

import typer

from jaxspec.command_options import one_line_errors, one_line_warnings

app = typer.Typer(rich_markup_mode=None)

Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN", help="Folders of `jaxspec evaluate run`."),
]


@app.command(
    epilog="""\b
Examples:
  jaxspec evaluate report ar/ scd/ --out report.html
  jaxspec evaluate report ar/ scd/ --grid sheet.png --prompts 20"""
)
def report(
    runs: Runs,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.html",
            help="The page.  [default: report.html, if no --grid is asked for]",
        ),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.png", help="A sheet of the pictures; gaps are marked."
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="Whose pictures are shown, at most.")
    ] = 100,
    title: Annotated[
        str, typer.Option(help="Of the page.")
    ] = "Decoding methods side by side",
    megabytes: Annotated[
        float, typer.Option(help="Of the page, at most; pictures are made to fit.")
    ] = 15,
) -> None:
    """Show runs beside one another, on a page that is one file.

    It needs no network and no server. Pictures of one prompt and number stand side by
    side and can be stepped through pass by pass; runs that are not finished have gaps.
    """
    with one_line_errors(), one_line_warnings():
        from jaxspec.evaluation.report import write_grid, write_report

        if grid is not None:
            made = write_grid(runs, _named(grid, ".png"), prompts=prompts)
            gaps = f", {made['gaps']} gaps" * (made["gaps"] > 0)
            typer.echo(f"wrote {grid}: {made['pictures']} pictures{gaps}")
        if out is not None or grid is None:
            out = out or "report.html"
            made = write_report(
                runs,
                _named(out, ".html"),
                title=title,
                prompts=prompts,
                megabytes=megabytes,
            )
            form = "lossless" if made["quality"] is None else f"at {made['side']} px"
            typer.echo(
                f"wrote {out}: {made['pictures']} pictures of {made['prompts']} "
                f"prompts, {form}, {made['bytes'] / 1e6:.1f} MB"
            )


def _named(path: str, suffix: str) -> Path:
    """The path, which must have this suffix and a folder that exists."""
    if Path(path).suffix.lower() != suffix:
        raise ValueError(f"{path!r} must be a name that ends in {suffix}")
    if not Path(path).parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {Path(path).parent}")
    return Path(path)


@app.command(
    epilog="""\b
Examples:
  jaxspec evaluate score ar/ scd/
  jaxspec evaluate score ar/ --metric fid --reference val2017/ --weights inception/
  jaxspec evaluate score ar/ --metric geneval --import results.jsonl"""
)
def score(
    runs: Runs,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="emoji, fid, clip, hpsv2, geneval or dpg; may be given several "
            "times.  [default: emoji for that family]",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Of the real pictures, for fid."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FILE_OR_FOLDER",
            help="The network's, already here; nothing is downloaded.",
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose numbers to be comparable with: lantern (clean-fid) or sjd "
            "(pytorch-fid), for fid and clip.  [default: lantern]",
        ),
    ] = None,
    imported: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="What the official scorer wrote, for geneval and dpg.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Score too few pictures, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score the pictures of runs, and keep the scores with them.

    A score carries its network, the hash of its weights, resize filter, reference,
    count and a bootstrap interval. Pictures that are missing are listed and shift
    nothing. The runs' `scores.json` has all of it.
    """
    with one_line_errors(), one_line_warnings():
        import json
        import os

        from jaxspec.evaluation.results import read_results
        from jaxspec.evaluation.scorers import Options, score_run
        from jaxspec.evaluation.scores import scores_table, write_scores
        from jaxspec.evaluation.tables import lines

        if imported is not None and len(runs) > 1:
            raise ValueError("--import is of one run: give its folder alone")
        options = Options(
            reference=reference,
            weights=weights,
            protocol=protocol,
            imported=imported,
            force=force,
        )
        read = [read_results(folder) for folder in runs]
        for folder in runs:  # before what may take hours
            if not os.access(folder, os.W_OK):
                raise OSError(f"cannot write scores into {folder}: it is read-only")
        rows = []
        for folder, results in zip(runs, read, strict=True):
            found = score_run(results, metric or [], options)
            write_scores(results.folder, found)
            rows += [(folder, each) for each in found]
        if as_json:
            record = [{"run": run, **vars(each)} for run, each in rows]
            typer.echo(json.dumps(record, indent=1, ensure_ascii=False))
            return
        for line in lines(scores_table(rows)):
            typer.echo(line)
        for folder in runs:
            missing = {m for run, each in rows if run == folder for m in each.missing}
            if missing:
                some = ", ".join(sorted(missing)[:10]) + ", ..." * (len(missing) > 10)
                typer.echo(f"{folder}: {len(missing)} pictures have no score: {some}")


@app.command(
    epilog="""\b
Examples:
  jaxspec evaluate compare ar/ scd/ zipar/
  jaxspec evaluate compare ar/ scd/ --out compare.json"""
)
def compare(
    runs: Runs,
    out: Annotated[
        str | None, typer.Option(metavar="FILE.json", help="Write all numbers, too.")
    ] = None,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Pair runs of different seeds or prompts by id, too."
        ),
    ] = False,
) -> None:
    """Compare runs with the first, picture by picture, with intervals.

    A speed is only told beside quality: that both methods are exact, or a score that
    both runs have. Pictures of batches in which something compiled are left out of it.
    """
    with one_line_errors(), one_line_warnings():
        from jaxspec.checkpoints.writer import write_json
        from jaxspec.evaluation import compare as comparing
        from jaxspec.evaluation.compared import compared_table, notes
        from jaxspec.evaluation.tables import lines, turned

        record = comparing.compare(runs, anyway=anyway)
        for line in lines(turned(compared_table(record))):
            typer.echo(line)
        typer.echo("")
        for line in notes(record):
            typer.echo(line)
        if out is not None:
            write_json(_named(out, ".json"), record)
            typer.echo(f"wrote {out}")
