"""Who may write to the folder of a run, and how lines are added to it.

Each shard has a file of samples, which is also its lock: whoever has it open and locked
draws the shard, and lets go of it when it ends, however it ends.
"""

import errno
import os
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jaxspec.checkpoints.writer import lock
from jaxspec.evaluation.records import (
    IMAGES,
    PROMPTS,
    RECORDS,
    RUN,
    SAMPLES,
    Prompt,
    Run,
    Sample,
    place,
    read_prompts,
    read_run,
    read_samples,
    sample_lines,
    write_run,
)
from jaxspec.figures import DRAFT

_SETUP = ".lock"  # held for a moment, see `taken`


@dataclass(frozen=True)
class Manifest:
    """The open file of a shard's samples."""

    file: IO[bytes]

    def append(self, samples: Sequence[Sample]) -> None:
        """Adds a line for each sample: all of them, or where that fails, none.

        Raises:
          OSError: they cannot be written.
        """
        end = self.file.seek(0, os.SEEK_END)
        left = memoryview(sample_lines(samples))
        try:
            while left:
                left = left[self.file.write(left) :]
        except OSError:
            self.file.truncate(end)
            raise


@contextmanager
def opened(
    folder: Path, run: Run, prompts: Sequence[Prompt], which: int, shards: int
) -> Generator[Manifest]:
    """The manifest of a shard, in the folder of a run that is made or taken up.

    Raises:
      ValueError: the folder has another run, or another process draws this shard.
      OSError: it cannot be written to.
    """
    with clear_errors(folder):
        _check_free(folder)
        (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
        with taken(folder):
            manifest = _locked(folder, which, shards)
            try:
                _set_up(folder, run, prompts)
                _end_line(manifest)
            except BaseException:
                manifest.close()
                raise
    with manifest:
        yield Manifest(manifest)


@contextmanager
def taken(folder: Path) -> Generator[None]:
    """For a moment, in which no other process opens or scores the run."""
    with (folder / _SETUP).open("ab") as setup:
        lock(setup, wait=True)
        yield


def _check_free(folder: Path) -> None:
    """Raises ValueError for a folder that holds other things; leaves no trace in it."""
    if not folder.exists() or (folder / RUN).exists():
        return
    others = {path.name for path in folder.iterdir() if not path.match(f".*{DRAFT}")}
    if others - {_SETUP, SAMPLES, PROMPTS}:
        raise ValueError(f"{folder} is not empty and holds no {RUN}: give a new folder")


@contextmanager
def clear_errors(folder: Path) -> Generator[None]:
    """What the file system refuses, with the folder's name and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                f"no space left for {folder}: what is there is whole; make room and "
                "run the same command again"
            ) from error
        reason = error.strerror or error
        raise OSError(f"cannot write to {folder}: {reason}") from error


def _locked(folder: Path, which: int, shards: int) -> IO[bytes]:
    """The file of a shard's samples, locked; raises ValueError where it cannot be."""
    path = folder / SAMPLES / f"shard-{which}-of-{shards}.jsonl"
    # Not buffered: a line is in the file, or it is not.
    file = path.open("ab", buffering=0)
    if not lock(file):
        file.close()
        raise ValueError(
            f"another process is drawing shard {which}/{shards} of {folder}"
        )
    for other in _held(folder):
        if not other.endswith(f"-of-{shards}"):
            file.close()
            raise ValueError(
                f"another process is drawing {folder} in other shares ({other}): wait, "
                f"or draw in as many"
            )
    return file


def _held(folder: Path) -> list[str]:
    """Names of the shards that other processes draw."""
    held = []
    for path in sorted((folder / SAMPLES).glob("shard-*.jsonl")):
        with path.open("ab") as file:
            if not lock(file):
                held.append(path.stem)
    return held


def _set_up(folder: Path, run: Run, prompts: Sequence[Prompt]) -> None:
    """Makes the folder that of the run; raises ValueError if it is another's."""
    _remove_drafts(folder)
    try:
        there = read_run(folder)
    except FileNotFoundError:
        write_run(folder, run, prompts)
        return
    differences = there.differences(run)
    if differences and not read_samples(folder) and len(_held(folder)) == 1:
        write_run(folder, run, prompts)  # nothing was drawn with those settings
        return
    if differences:
        raise ValueError(
            f"{folder} was drawn with other settings ({'; '.join(differences)}): give "
            "the same ones, or a new folder"
        )
    if there.version != run.version:
        warnings.warn(
            f"{folder} was begun with jaxspec {there.version}, and this is "
            f"{run.version}: its pictures may differ",
            stacklevel=2,
        )
    try:
        read_prompts(folder, there)
    except (OSError, ValueError):  # lost or damaged
        write_run(folder, there, prompts)


def _end_line(file: IO[bytes]) -> None:
    """Ends the line that a killed process left half written."""
    with open(file.name, "rb") as whole:
        size = whole.seek(0, os.SEEK_END)
        whole.seek(max(0, size - 1))
        if size and whole.read(1) != b"\n":
            file.write(b"\n")


def remove_drafts(folder: Path, prompt: Prompt) -> None:
    """Removes what a killed process left of a prompt's files."""
    for kind in (IMAGES, RECORDS):
        _remove_drafts(folder / kind / place(prompt.id))


def _remove_drafts(folder: Path) -> None:
    for draft in folder.glob(f".*{DRAFT}"):
        draft.unlink(missing_ok=True)
