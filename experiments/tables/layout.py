"""Tables of papers, with what they published beside what was measured here.

A table has groups (a model at a size) of rows (methods), the first of which the others
are compared with. A measured number is read from the folder of a `jaxspec evaluate run`
at RUNS/<group>/<prompt set>/<row>, and its scores; what is not there is a dash.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jaxspec
from experiments.methods.report import markdown_table
from jaxspec.decoding import Method
from jaxspec.evaluation.compare import paired
from jaxspec.evaluation.records import RUN
from jaxspec.evaluation.run import draw
from jaxspec.evaluation.runs import Shown, shown
from jaxspec.evaluation.scorers import Options, score_run
from jaxspec.evaluation.scores import write_scores
from jaxspec.evaluation.tables import told
from jaxspec.recipe import Recipe
from jaxspec.sizes import size_label

NOTHING = "–"
SMOKE = 8  # captions


@dataclass(frozen=True)
class Row:
    """A method as a paper calls it, what it published by column, and how it is run."""

    name: str
    method: Method
    published: Mapping[str, str] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        return self.name.lower().replace(" ", "-")


@dataclass(frozen=True)
class Column:
    """A column: the prompt set it is measured on, and how it is read from a run.

    `read` is given the run, and how it compares with the first row's (None of that).
    """

    name: str
    prompts: str
    read: Callable[[Shown, dict[str, Any] | None], str]


@dataclass(frozen=True)
class Group:
    """A model at a size, and how it reads prompts in the paper, where it can be asked.

    `reading` has options of `jaxspec.generate` for that.
    """

    name: str
    size: int
    rows: Sequence[Row]
    columns: Sequence[Column]
    reading: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        return self.name.lower().replace(" ", "-").replace(",", "")

    @property
    def prompts(self) -> list[str]:
        """The prompt sets of its columns."""
        return list(dict.fromkeys(column.prompts for column in self.columns))


# What columns read.


def score(name: str, times: float = 1) -> Callable[[Shown, dict | None], str]:
    """A score that the run has."""

    def read(run: Shown, _: dict | None) -> str:
        if name not in run.scores:
            return NOTHING
        found = run.scores[name]
        value = told(times * found.value)
        if found.low is None or found.high is None:
            return value
        return f"{value} [{told(times * found.low)}, {told(times * found.high)}]"

    return read


def speed(run: Shown, pair: dict[str, Any] | None) -> str:
    """How much faster than the first row, over the same pictures."""
    if pair is None:
        return "1.00"
    return told(pair["speed"]) if pair["speed"] else "withheld"


def latency(run: Shown, _: dict[str, Any] | None) -> str:
    """Seconds a picture, of decoding."""
    if run.counts["seconds"] is None:
        return NOTHING
    return told(run.counts["seconds"]) if run.judged else "withheld"


def passes(run: Shown, _: dict[str, Any] | None) -> str:
    """Of the target a picture, prefill included."""
    return told(run.counts["passes"])


# Drawing and reading.


def folder_of(runs: Path, group: Group, prompts: str, row: Row) -> Path:
    return runs / group.slug / prompts / row.slug


def draw_group(
    group: Group, runs: Path, family: str, name: str, prompts: Sequence, **settings
) -> None:
    """Draws a prompt set with every method of a group; what is there stays.

    Args:
      group: of the table.
      runs: where runs are kept.
      family: a name or a folder.
      name: of the prompt set, as columns call it.
      prompts: of it.
      **settings: of `jaxspec.evaluation.run.draw`.
    """
    params = jaxspec.load(family)
    options = params.config.text.options  # a small family tried here may lack them
    reading = {k: x for k, x in group.reading.items() if k in options}
    for row in group.rows:
        recipe = Recipe.create(params, method=row.method, size=group.size, **reading)
        folder = folder_of(runs, group, name, row)
        draw(recipe, prompts, folder, source=name, **settings)
        print(f"drew {row.name} into {folder}", flush=True)


def score_group(group: Group, runs: Path, prompts: str, metrics, options: Options):
    """Scores every run of a group on a prompt set."""
    for row in group.rows:
        [run] = shown([folder_of(runs, group, prompts, row)])
        write_scores(run.results.folder, score_run(run.results, metrics, options))


def read_group(group: Group, runs: Path) -> dict[str, dict[int, Shown]]:
    """The runs that are there, by prompt set and by number of the row."""
    out = {}
    for prompts in group.prompts:
        folders = [folder_of(runs, group, prompts, row) for row in group.rows]
        there = [i for i, path in enumerate(folders) if (path / RUN).is_file()]
        found = shown([folders[i] for i in there])
        out[prompts] = dict(zip(there, found, strict=True))
    return out


def measured(group: Group, found: Mapping[str, Mapping[int, Shown]]) -> list[list[str]]:
    """What was measured (see `read_group`), a row a method and a cell a column."""
    cells = [[NOTHING] * len(group.columns) for _ in group.rows]
    for prompts, of_rows in found.items():
        for i, run in of_rows.items():
            pair = paired(of_rows[0], run) if i and 0 in of_rows else None
            for k, column in enumerate(group.columns):
                if column.prompts == prompts:
                    cells[i][k] = column.read(run, pair)
    return cells


def measured_on(found: Mapping[str, Mapping[int, Shown]]) -> str:
    """What was drawn, a line a prompt set: a trial is not taken for the real thing."""
    lines = []
    for prompts, of_rows in found.items():
        kinds = {
            f"{run.results.run.settings['family']}, "
            f"{size_label(run.results.run.settings['size'])} px, "
            f"{run.counts['pictures']} pictures"
            for run in of_rows.values()
        }
        if kinds:
            lines.append(f"Measured on {prompts}: {'; '.join(sorted(kinds))}.\n\n")
    return "".join(lines)


def markdown(group: Group, runs: Path) -> str:
    """The group as a table: "published / measured" where a paper has numbers."""
    rows, there = [], read_group(group, runs)
    for row, found in zip(group.rows, measured(group, there), strict=True):
        cells = []
        for column, value in zip(group.columns, found, strict=True):
            own = row.published.get(column.name)
            any_ = any(column.name in other.published for other in group.rows)
            cells.append(f"{own or NOTHING} / {value}" if any_ else value)
        rows.append([row.name, *cells])
    heads = ["method", *[column.name for column in group.columns]]
    table = markdown_table(heads, rows)
    return f"## {group.name}\n\n{measured_on(there)}{table}\n"


def page(title: str, note: str, groups: Sequence[Group], runs: Path) -> str:
    """All groups of a table."""
    parts = [markdown(group, runs) for group in groups]
    return "\n".join([f"# {title}\n", f"{note}\n", *parts])
