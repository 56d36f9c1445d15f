"""What a run has drawn, as its folder says: complete, partial or with failures."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxspec.evaluation.records import (
    Prompt,
    Run,
    Sample,
    intact,
    read_prompts,
    read_run,
    read_samples,
    sha256,
)

Place = tuple[str, int]  # prompt id, number of the picture


@dataclass(frozen=True)
class Results:
    """A run and what was drawn of it.

    Attributes:
      folder: of the run.
      run: what was to be drawn.
      prompts: in the run's order.
      samples: the newest line of every picture, failures among them; those of other
        seeds, prompts, settings and weights than the run's are left out.
    """

    folder: Path
    run: Run
    prompts: list[Prompt]
    samples: dict[Place, Sample]

    @cached_property
    def places(self) -> list[Place]:
        """Every picture that the run is to have."""
        return [(p.id, k) for p in self.prompts for k in range(self.run.images)]

    @cached_property
    def drawn(self) -> dict[Place, Sample]:
        """The pictures that are there, in the run's order."""
        return {
            place: sample
            for place in self.places
            if (sample := self.samples.get(place)) is not None
            and sample.error is None
            and sample.file is not None
            and (self.folder / sample.file).is_file()
        }

    @property
    def failed(self) -> dict[Place, Sample]:
        """The pictures that could not be drawn."""
        return {k: s for k, s in self.samples.items() if s.error is not None}

    @property
    def missing(self) -> list[Place]:
        """The pictures that are neither there nor known to have failed."""
        return [k for k in self.places if k not in self.drawn and k not in self.failed]

    def image(self, place: Place) -> np.ndarray:
        """A picture uint8 [H, W, 3], which must be as it was written.

        Raises:
          ValueError: it is not: a file is damaged or gone.
        """
        sample = self.drawn[place]
        if not intact(self.folder, sample):
            raise self._damaged(sample.file)
        with Image.open(self.folder / str(sample.file)) as file:
            return np.asarray(file.convert("RGB"))

    def record(self, place: Place) -> dict[str, np.ndarray] | None:
        """Its "tokens", "final_pass" and "origin" [h, w]; None if none were kept.

        Raises:
          ValueError: the file is damaged.
        """
        sample = self.drawn[place]
        if sample.record is None or not (self.folder / sample.record).is_file():
            return None
        if sha256(self.folder / sample.record) != sample.record_sha256:
            raise self._damaged(sample.record)
        with np.load(self.folder / sample.record) as arrays:
            return dict(arrays)

    def _damaged(self, name: str | None) -> ValueError:
        return ValueError(
            f"{name} in {self.folder} is not as it was written: `jaxspec evaluate run` "
            "with the same settings draws it again"
        )

    @cached_property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of cells; None if no record was kept."""
        for place in self.drawn:
            if (record := self.record(place)) is not None:
                h, w = record["tokens"].shape
                return int(h), int(w)
        return None


def features_of(
    results: Results,
    places: Sequence[Place],
    features: Callable[[np.ndarray], np.ndarray],
    batch: int = 64,
) -> np.ndarray:
    """Features [N, F] of pictures, read `batch` at a time and given as [n, H, W, 3].

    Raises:
      ValueError: a picture is damaged.
    """
    parts = [places[i : i + batch] for i in range(0, len(places), batch)]
    read = lambda part: np.stack([results.image(place) for place in part])
    return np.concatenate([features(read(part)) for part in parts])


def read_results(folder: str | os.PathLike) -> Results:
    """What the folder of a run holds.

    Raises:
      FileNotFoundError: it holds no run.
      ValueError: a file is damaged.
    """
    folder = Path(folder)
    run = read_run(folder)
    prompts = read_prompts(folder, run)
    asked = {prompt.id for prompt in prompts}
    samples = {
        (prompt, image): sample
        for (prompt, image, seed), sample in read_samples(folder, run).items()
        if seed == run.seed and prompt in asked and image < run.images
    }
    return Results(folder, run, prompts, samples)


# What a run is called, and what its method promises.


def method_label(method: dict[str, Any]) -> str:
    """A method as it was described, with the knobs that are not its defaults."""
    defaults = _defaults(method["name"])
    knobs = [
        f"{knob}={_plain(value)}"
        for knob, value in method.items()
        if knob != "name" and value != defaults.get(knob, value)
    ]
    return f"{method['name']}({', '.join(knobs)})" if knobs else method["name"]


def guarantee(method: dict[str, Any]) -> str:
    """What a method promises: "exact", "biased", or "unknown" of one not in here."""
    from jaxspec.methods import catalogue

    entry = catalogue.entries().get(method["name"].lower())
    if entry is None:
        return "unknown"
    rule = method.get("rule")
    if isinstance(rule, dict) and rule.get("name") == "Ratio":
        rule = None
    exact = entry.guarantee.startswith("exact") and rule is None
    return "exact" if exact else "biased"


def labels(runs: Sequence[Results]) -> list[str]:
    """A name for each run, no two the same: its method's, and the folder if need be."""
    names = [method_label(each.run.settings["method"]) for each in runs]
    folders = [each.folder.resolve().name for each in runs]
    if len(set(folders)) < len(folders):
        folders = [str(each.folder) for each in runs]
    return [
        f"{name} · {folder}" if names.count(name) > 1 else name
        for name, folder in zip(names, folders, strict=True)
    ]


def only(values: Iterable[Any]) -> list[str]:
    """The distinct values that are not None, as text, in their order."""
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _defaults(name: str) -> dict[str, Any]:
    from jaxspec.decoding import describe
    from jaxspec.methods import catalogue

    entry = catalogue.entries().get(name.lower())
    needed = entry is not None and any(k.default is MISSING for k in entry.knobs)
    return {} if entry is None or needed else describe(entry.cls())


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return method_label(value)
    return str(value)
