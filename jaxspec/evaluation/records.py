"""What the folder of a run holds, and how it is read and written.

    run.json                  what is drawn, and how: a `Run`
    prompts.jsonl             the chosen prompts, a `Prompt` a line
    samples/<writer>.jsonl    what was drawn, a `Sample` a line; only ever appended to
    images/<id>/<k>.png       picture k of a prompt
    records/<id>/<k>.npz      its tokens, and where each came from

A sample is (prompt id, image, seed). Several writers, each with a file of its own, may
have lines of one sample: the newest counts. A line that a killed writer left half
written is no line.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxspec.figures import atomically

FORMAT = 1
RUN, PROMPTS, SAMPLES = "run.json", "prompts.jsonl", "samples"
IMAGES, RECORDS = "images", "records"
_LONGEST_NAME = 120  # of a prompt's folder; file systems take 255 bytes

Key = tuple[str, int, int]  # prompt id, image, seed


@dataclass(frozen=True)
class Source:
    """Where prompts came from.

    Attributes:
      source: the file or folder that was read.
      sha256: of what was chosen of it: ids and texts, in order.
      count: how many were chosen.
    """

    source: str
    sha256: str
    count: int


@dataclass(frozen=True)
class Run:
    """What is drawn, and how: all that two runs must share to be one.

    Attributes:
      settings: as `Generated.settings` has them: family, size, method, guidance ...
      weights: a hash of the weights.
      seed: of every sample.
      images: pictures a prompt.
      prompts: where they came from.
      dtype: of the weights in memory.
      command: what was typed; a note, as is `version`.
      version: of jaxspec.
      format: of the folder.
    """

    settings: dict[str, Any]
    weights: str
    seed: int
    images: int
    prompts: Source
    dtype: str
    command: str = ""
    version: str = ""
    format: int = FORMAT

    def differences(self, other: "Run") -> list[str]:
        """What another run of the folder would do otherwise (see `differences`)."""
        return differences(self.binding(), other.binding())

    def binding(self) -> dict[str, Any]:
        """What two runs must share to be one, as JSON has it."""
        own = dataclasses.asdict(self)
        del own["command"], own["version"], own["format"]
        del own["prompts"]["source"]  # a copy of the file is as good
        return json.loads(json.dumps(own))  # a tuple comes back as a list


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set.

    Attributes:
      id: stays the same whatever is chosen of the set.
      text: what is drawn.
      category: the set's own kind of prompt; None if it has none.
      extra: what else the set says of it.
    """

    id: str
    text: str
    category: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One picture that was drawn, or why it was not; paths are relative to the run.

    It stands alone: what it says needs no other file.

    Attributes:
      prompt, image, seed: which it is.
      error: why there is no picture; None if there is one.
      settings, weights: as `Run` has them: the method with all its knobs, and so on.
      file, sha256: the picture, and the hash of the file.
      record, record_sha256: npz of "tokens", "final_pass" and "origin" [h, w] as
        `Decoded` has them, and of what was made on the way, such as Tar's
        "semantic_tokens"; None if it was not kept.
      target_passes, prefill_passes, draft_passes, drafted: as `Decoded` counts them.
      accepted, resampled, bonus: its cells of that origin.
      divergences, log_prob: cells that the target would never draw so, and the mean
        log-probability of the others (see `decoding.likelihood`); None if it was not
        asked.
      seconds: the decoding time of its batch by the batch's rows, with those that only
        fill it: what a picture takes in a full batch.
      stages: other times, divided likewise: of the models that read prompts, of making
        pictures ("pictures") and of asking the target ("check").
      batch: rows of the batch.
      refill: whether rows were handed on (see `Recipe.stream`).
      compiled: whether something compiled in the batch, or was read from the compile
        cache; its times are then no measure of decoding.
      device, dtype, host: what drew it; of a mesh with its shape, "cpu, 1 x 2".
      jaxspec, jax: versions.
      time: when it was written, ISO 8601, UTC.
      warnings: what was said of the prompt, such as words that were left out.
    """

    prompt: str
    image: int
    seed: int
    error: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    file: str | None = None
    sha256: str | None = None
    record: str | None = None
    record_sha256: str | None = None
    target_passes: int | None = None
    prefill_passes: int | None = None
    draft_passes: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    resampled: int | None = None
    bonus: int | None = None
    divergences: int | None = None
    log_prob: float | None = None
    seconds: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    batch: int | None = None
    refill: bool | None = None
    compiled: bool | None = None
    device: str | None = None
    dtype: str | None = None
    host: str | None = None
    jaxspec: str | None = None
    jax: str | None = None
    time: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.prompt, self.image, self.seed


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between nested dictionaries, "name: old -> new"."""
    old, new = _flat(old), _flat(new)
    return [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with names such as "settings.method.window"."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[above + name] = value
    return flat


# The run.


def write_run(folder: Path, run: Run, prompts: Sequence[Prompt]) -> None:
    """Writes `prompts.jsonl`, then `run.json`: a folder that has it is whole.

    Raises:
      OSError: they cannot be written; neither is left in parts.
    """
    lines = "".join(_line(dataclasses.asdict(prompt)) for prompt in prompts)
    with atomically(folder / PROMPTS) as draft:
        draft.write_text(lines, encoding="utf8")
    with atomically(folder / RUN) as draft:
        text = json.dumps(dataclasses.asdict(run), indent=1, ensure_ascii=False)
        draft.write_text(text + "\n", encoding="utf8")


def read_run(folder: str | os.PathLike) -> Run:
    """The `Run` of a folder.

    Raises:
      FileNotFoundError: the folder holds no run.
      ValueError: its `run.json` cannot be read, or has another format.
    """
    path = Path(folder) / RUN
    try:
        values = json.loads(path.read_text(encoding="utf8"))
    except (FileNotFoundError, NotADirectoryError):
        if not Path(folder).exists():
            raise FileNotFoundError(f"there is no folder {folder}") from None
        raise FileNotFoundError(
            f"{folder} holds no {RUN}: it is no folder of `jaxspec evaluate run`"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else None
        raise ValueError(f"{path} must have format {FORMAT}, and has {found}")
    try:
        source = Source(**values.pop("prompts"))
        run = Run(prompts=source, **values)
        if not isinstance(run.settings["method"]["name"], str):
            raise TypeError("its method has no name")
        return run
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def read_prompts(folder: str | os.PathLike, run: Run | None = None) -> list[Prompt]:
    """The prompts of a run, in the order of their file.

    Args:
      folder: of the run.
      run: as its `run.json` has it; prompts must then be those that it tells of.

    Raises:
      ValueError: a line is damaged, or prompts are other ones.
      OSError: there is no such file.
    """
    path = Path(folder) / PROMPTS
    prompts = []
    with path.open(encoding="utf8") as file:
        for number, line in enumerate(file, 1):
            try:
                prompts.append(Prompt(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {path} is damaged: {error}"
                ) from None
    if run is not None and prompts_hash(prompts) != run.prompts.sha256:
        raise ValueError(
            f"{path} does not hold the prompts of {RUN}: `jaxspec evaluate run` with "
            "the same settings writes it again"
        )
    return prompts


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """A hash of ids and texts, in order."""
    content = json.dumps([(prompt.id, prompt.text) for prompt in prompts])
    return hashlib.sha256(content.encode()).hexdigest()


# Samples.


def read_samples(
    folder: str | os.PathLike, run: Run | None = None
) -> dict[Key, Sample]:
    """The newest line of every sample of a run, errors among them.

    Whether the files are still as the lines say is not looked at, see `intact`.

    Args:
      folder: of the run.
      run: as its `run.json` has it; lines of other settings or weights, which came from
        another run's folder, are then none of it.
    """
    newest: dict[Key, Sample] = {}
    own = None if run is None else run.binding()
    for path in sorted((Path(folder) / SAMPLES).glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            sample = _sample(line)
            if sample is None:
                continue
            if own and (sample.settings, sample.weights) != (
                own["settings"],
                own["weights"],
            ):
                continue
            before = newest.get(sample.key)
            if before is None or before.time <= sample.time:
                newest[sample.key] = sample
    return newest


def _sample(line: bytes) -> Sample | None:
    """The sample of a line; None if it is empty, damaged or not written to its end."""
    try:
        values = json.loads(line)
        # A later version may say more.
        known = {k: values[k] for k in values.keys() & _SAMPLE_FIELDS}
        sample = Sample(**known)
        told = (sample.prompt, str), (sample.image, int), (sample.seed, int)
        whole = all(isinstance(x, kind) for x, kind in (*told, (sample.time, str)))
        return sample if whole else None
    except (ValueError, TypeError, AttributeError):
        return None


_SAMPLE_FIELDS = {f.name for f in fields(Sample)}


def sample_lines(samples: Iterable[Sample]) -> bytes:
    """Lines for a file of `samples/`, which takes them in one write."""
    return "".join(_line(dataclasses.asdict(s)) for s in samples).encode()


def intact(folder: str | os.PathLike, sample: Sample) -> bool:
    """Whether a sample has a picture, and its files are as they were written."""
    if sample.error is not None or sample.file is None:
        return False
    files = [(sample.file, sample.sha256)]
    if sample.record is not None:
        files.append((sample.record, sample.record_sha256))
    try:
        return all(sha256(Path(folder) / name) == digest for name, digest in files)
    except OSError:
        return False


def sha256(path: Path) -> str:
    """The hash of a file.

    Raises:
      OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def place(prompt: str) -> str:
    """The name of a prompt's folder: its id, with what file systems mind replaced."""
    name = quote(prompt, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(prompt.encode()).hexdigest()[:16]
        name = f"{name[: _LONGEST_NAME - 17]}-{digest}"
    return name


def now() -> str:
    """The time as `Sample.time` has it; later times sort behind earlier ones."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"
