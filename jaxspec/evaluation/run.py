"""Drawing a set of prompts into a folder: resumable, in shards, batch by batch.

What is in the folder and whole is not drawn again, so a run that was killed at any
moment is taken up by the same command, on another number of processes if need be; only
the batch in flight is lost.
"""

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jaxspec
from jaxspec.checkpoints.trees import flatten
from jaxspec.evaluation.batches import Artist, Drawn, Job
from jaxspec.evaluation.files import SAVE, Files, ImageFormat
from jaxspec.evaluation.prompts import shard, source_of
from jaxspec.evaluation.records import (
    Prompt,
    Run,
    Sample,
    differences,
    intact,
    read_samples,
)
from jaxspec.evaluation.writing import Manifest, clear_errors, opened, remove_drafts
from jaxspec.models.stacks import stack
from jaxspec.recipe import Recipe, whole_number
from jaxspec.sharding import from_first, mesh_of, of_each, pieces


@dataclass(frozen=True)
class Status:
    """How far a shard of a run is.

    Attributes:
      samples: of the shard.
      there: of those, how many were in the folder before.
      drawn, failed: samples since then.
      warned: samples of prompts that were not read as they stand.
      passes: of the target with its prefill, of all that were drawn.
      seconds: wall time of drawing.
      first: what of it the first batch took, which compiles; and `batch`, its samples.
    """

    samples: int
    there: int
    drawn: int = 0
    failed: int = 0
    warned: int = 0
    passes: int = 0
    seconds: float = 0.0
    first: float = 0.0
    batch: int = 0

    @property
    def done(self) -> int:
        return self.there + self.drawn + self.failed

    @property
    def rate(self) -> float | None:
        """Samples a second, without the first batch; None before the second."""
        passed = self.seconds - self.first
        return (self.drawn + self.failed - self.batch) / passed if passed > 0 else None

    @property
    def left(self) -> float | None:
        """Seconds to the end, at that rate."""
        return (self.samples - self.done) / self.rate if self.rate else None


def draw(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    folder: str | Path,
    *,
    source: str = "",
    images: int = 1,
    seed: int = 0,
    batch_size: int = 16,
    refill: bool = False,
    check: bool = False,
    part: str = "0/1",
    format: ImageFormat = "png",
    keep_records: bool = True,
    command: str = "",
    progress: Callable[[Status], None] = lambda status: None,
) -> Status:
    """Draws prompts into the folder of a run, and takes up what is there.

    The tokens of a sample are those of `jaxspec.generate` with its prompt, seed and
    number: prompts that read alike show the same. Every batch has `batch_size` rows;
    rows that only fill it are not written.

    Where the family is split over a mesh of several processes, all of them call this
    alike. The first of them decides what is missing, and it alone reads and writes the
    folder.

    Args:
      recipe: how pictures are drawn.
      prompts: all of the run; ids must differ.
      folder: new, or of a run with the same settings.
      source: where prompts came from, to be noted.
      images: pictures a prompt.
      seed: 0 to 2**32 - 1.
      batch_size: rows of a batch.
      refill: hand rows on when their images are finished (see `Recipe.stream`).
      check: have the target read every picture, for `Sample.divergences`; a pass a row.
      part: "I/N", which share of the prompts; the shares of one folder may be drawn at
        the same time.
      format: of pictures; both are lossless.
      keep_records: write tokens, and how they came about, beside each picture.
      command: to be noted.
      progress: called after every batch.

    Returns:
      How it ended; `failed` samples have their error in the folder.

    Raises:
      ValueError: the folder has other settings, or another process draws this share;
        or a setting or an id is not usable.
      OSError: the folder cannot be written, or a process that draws along was lost;
        what is in it is whole.
      MemoryError: the device has no room for a batch.
    """
    images = whole_number("images", images, 1)
    seed = whole_number("seed", seed, 0, 2**32 - 1)
    batch_size = whole_number("batch_size", batch_size, 1)
    if format not in SAVE:
        raise ValueError(f"format must be {' or '.join(SAVE)}, not {format!r}")
    _check_ids(prompts)
    own, which, shards = shard(prompts, part)
    weights, mesh = recipe.params.params, mesh_of(recipe.params)
    run = Run(
        settings=recipe.settings,
        weights=weights_hash(weights),
        seed=seed,
        images=images,
        prompts=source_of(source, prompts),
        dtype=_types(weights),
        command=command,
        version=jaxspec.__version__,
    )
    _check_told_alike(
        mesh, run, shard=part, batch_size=batch_size, refill=refill, check=check
    )
    files = Files(Path(folder), format, keep_records)
    with ExitStack() as held, clear_losses(mesh):
        manifest: Manifest | None = None

        def take_up() -> list[tuple[int, int]]:
            nonlocal manifest
            inside = opened(files.folder, run, prompts, which, shards)
            manifest = held.enter_context(inside)
            missing = _missing(files.folder, run, own)
            for number in {number for number, _ in missing}:
                remove_drafts(files.folder, own[number])  # no other process draws it
            return missing

        jobs = [Job(own[i], image) for i, image in from_first(mesh, take_up)]
        status = Status(len(own) * images, len(own) * images - len(jobs))
        progress(status)
        artist = Artist(recipe.unstacked() if jobs else recipe, run, batch_size, check)
        began = time.perf_counter()
        for drawn in (artist.stream if refill else artist.batches)(jobs):
            from_first(mesh, partial(_keep, files, manifest, drawn))
            samples = [each.sample for each in drawn]
            status = _counted(status, samples, time.perf_counter() - began)
            progress(status)
            began = time.perf_counter()
    return status


@contextmanager
def clear_losses(mesh: Mesh | None) -> Generator[None]:
    """Of processes that draw together, what those say who have lost one.

    Raises:
      ConnectionError: in place of what JAX says.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # Where a result is awaited it is a ValueError, which begins with XLA's code.
        from_xla = re.match("[A-Z_]+: ", str(error))
        if mesh is None or not mesh.is_multi_process or not from_xla:
            raise
        raise ConnectionError(
            "a process that draws along was lost, or failed: what is in the folder is "
            f"whole, and the same command in all processes goes on ({error})"
        ) from error


def _missing(
    folder: Path, run: Run, prompts: Sequence[Prompt]
) -> list[tuple[int, int]]:
    """The samples that are not in the folder, or not whole: number of prompt, image."""
    there, missing = read_samples(folder, run), []
    for number, prompt in enumerate(prompts):
        for image in range(run.images):
            known = there.get((prompt.id, image, run.seed))
            if known is None or not intact(folder, known):
                missing.append((number, image))
    return missing


def _keep(files: Files, manifest: Manifest | None, drawn: Sequence[Drawn]) -> None:
    """Writes what was drawn: files first, then their lines."""
    assert manifest is not None, "it is open where this runs"
    with clear_errors(files.folder), ThreadPoolExecutor() as pool:
        # Compressing takes time.
        manifest.append(list(pool.map(files.write, drawn)))


def _check_told_alike(mesh: Mesh | None, run: Run, **how: Any) -> None:
    """Raises ValueError where processes that draw together would draw other things."""
    told = of_each(mesh, {**run.binding(), **how})
    for number, other in enumerate(told):
        if found := differences(told[0], other):
            raise ValueError(
                f"process {number} was told otherwise than the first "
                f"({'; '.join(found)}): give all the same"
            )


def _check_ids(prompts: Sequence[Prompt]) -> None:
    """Raises ValueError for prompts whose files could not be told apart."""
    for name, count in Counter(prompt.id for prompt in prompts).items():
        if not name or count > 1:
            raise ValueError(
                f"every prompt must have its own id: {count} have {name!r}"
            )


def weights_hash(weights: Any) -> str:
    """A hash of all weights: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, x in sorted(flatten(weights).items()):
        # The bytes of a stack are those of its layers, one after the other.
        whole, layers = x, [x]
        if isinstance(x, tuple):
            whole, layers = jax.eval_shape(stack, x), x
        digest.update(f"{name} {whole.dtype} {whole.shape}\n".encode())
        for piece in chain.from_iterable(map(pieces, layers)):
            digest.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _types(weights: Any) -> str:
    return ", ".join(sorted({str(x.dtype) for x in jax.tree.leaves(weights)}))


def _counted(status: Status, samples: Sequence[Sample], seconds: float) -> Status:
    """The status behind a batch."""
    good = [s for s in samples if s.error is None]
    passes = sum((s.target_passes or 0) + 1 for s in good)
    first = status.seconds == 0
    return replace(
        status,
        drawn=status.drawn + len(good),
        failed=status.failed + len(samples) - len(good),
        warned=status.warned + sum(bool(s.warnings) for s in samples),
        passes=status.passes + passes,
        seconds=status.seconds + seconds,
        first=seconds if first else status.first,
        batch=len(samples) if first else status.batch,
    )


__all__ = ["Status", "draw", "weights_hash"]
