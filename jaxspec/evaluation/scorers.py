"""Which scores there are, by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


def _fid(results: Results, options: Options) -> list[Score]:
    from jaxspec.evaluation import published

    weights = _wanted("fid", "weights", options.weights)
    reference = _wanted("fid", "reference", options.reference)
    protocol = _protocol(options)
    network = published.inception(weights, protocol)
    return [
        published.fid(
            results, reference, network, protocol=protocol, force=options.force
        )
    ]


def _clip(results: Results, options: Options) -> list[Score]:
    from jaxspec.evaluation import published

    weights, protocol = _wanted("clip", "weights", options.weights), _protocol(options)
    if protocol == "lantern":
        network = published.clip(weights, "ViT-B-32", "lanczos 256")
        how: dict[str, Any] = {"prefix": "A photo depicts "}
    else:
        network = published.clip(weights, "ViT-B-16", "bilinear 299")
        how = {"scale": 100, "least": 0}
    shared: dict[str, Any] = {
        "name": "CLIP score",
        "protocol": protocol,
        "force": options.force,
    }
    return [published.text_score(results, network, **shared, **how)]


def _hpsv2(results: Results, options: Options) -> list[Score]:
    from jaxspec.evaluation import published

    weights = _wanted("hpsv2", "weights", options.weights)
    network = published.clip(weights, "ViT-H-14", "")
    shared: dict[str, Any] = {
        "name": "HPSv2",
        "protocol": "hpsv2, x 100",
        "force": options.force,
    }
    return [published.text_score(results, network, scale=100, **shared)]


def _geneval(results: Results, options: Options) -> list[Score]:
    from jaxspec.evaluation.imported import geneval

    path = _wanted("geneval", "import", options.imported)
    return geneval(results, path, force=options.force)


def _dpg(results: Results, options: Options) -> list[Score]:
    from jaxspec.evaluation.imported import dpg

    path = _wanted("dpg", "import", options.imported)
    return [dpg(results, path, force=options.force)]


def _wanted(name: str, option: str, value: str | None) -> str:
    if value is None:
        raise ValueError(f"{name} wants --{option}: {WHY[option]}")
    return value


def _protocol(options: Options) -> str:
    from jaxspec.evaluation.published import PROTOCOLS

    protocol = options.protocol or PROTOCOLS[0]
    if protocol not in PROTOCOLS:
        raise ValueError(f"--protocol is {' or '.join(PROTOCOLS)}, not {protocol!r}")
    return protocol


WHY = {
    "weights": "the network's file, since nothing is downloaded",
    "reference": "a folder of real pictures, or their mu and sigma as .npz",
    "import": "the file that the official scorer wrote, of pictures that `jaxspec "
    "evaluate export` laid out",
}
SCORERS: dict[str, Callable[[Results, Options], list[Score]]] = {
    "emoji": _emoji,
    "fid": _fid,
    "clip": _clip,
    "hpsv2": _hpsv2,
    "geneval": _geneval,
    "dpg": _dpg,
}
