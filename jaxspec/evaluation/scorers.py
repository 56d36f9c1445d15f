"""Which scores there are, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxspec.evaluation.results import Results
from jaxspec.evaluation.scores import Score


@dataclass(frozen=True)
class Options:
    """What scores ask for; see `jaxspec evaluate score --help`."""

    reference: str | None = None
    weights: str | None = None
    protocol: str | None = None
    imported: str | None = None
    force: bool = False


def score_run(results: Results, names: Sequence[str], options: Options) -> list[Score]:
    """The scores of those names; of none, those of the run's own family.

    Raises:
      ValueError: a name is not known, an option is missing, or the run cannot be scored
        so.
      ModuleNotFoundError: a library is not installed.
    """
    if not names:
        family = results.run.settings["family"]
        if family != "emoji":
            raise ValueError(
                f"choose with --metric what to score {results.folder} by: "
                f"{', '.join(SCORERS)}"
            )
        names = [family]
    for name in names:
        if name not in SCORERS:
            raise ValueError(f"no score is called {name!r}: {', '.join(SCORERS)}")
    return [each for name in names for each in SCORERS[name](results, options)]


def _emoji(results: Results, options: Options) -> list[Score]:
    from jaxspec.evaluation.emoji import emoji_scores

    return emoji_scores(results, force=options.force)


SCORERS: dict[str, Callable[[Results, Options], list[Score]]] = {"emoji": _emoji}
