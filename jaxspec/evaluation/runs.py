"""Runs as they are shown beside one another."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.evaluation.counts import counts
from jaxspec.evaluation.results import Results, guarantee, labels, read_results
from jaxspec.evaluation.scores import Score, read_scores


@dataclass(frozen=True)
class Shown:
    """A run with what is known of it, under the name that it is shown by."""

    name: str
    results: Results
    counts: dict[str, Any]
    scores: dict[str, Score]

    @property
    def method(self) -> dict[str, Any]:
        return self.results.run.settings["method"]

    @property
    def guarantee(self) -> str:
        return guarantee(self.method)

    @property
    def judged(self) -> bool:
        """Whether something is known of its quality, so that its speed may be told."""
        return self.guarantee == "exact" or bool(self.scores)


def shown(folders: Sequence[str | Path]) -> list[Shown]:
    """The runs of some folders, with names that tell them apart.

    Raises:
      ValueError: a folder is given twice, or one is damaged or has no picture.
      FileNotFoundError: one holds no run.
    """
    paths = [Path(folder).resolve() for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path.name} is given twice")
    found = [read_results(folder) for folder in folders]
    return [
        Shown(name, results, counts(results), read_scores(results.folder))
        for name, results in zip(labels(found), found, strict=True)
    ]
