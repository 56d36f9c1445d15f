"""The batches of a run: prompts are read and drawn together; nothing is written yet."""

import socket
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.compile_cache import compilations
from jaxspec.decoding import ACCEPTED, BONUS, RESAMPLED
from jaxspec.evaluation.records import Prompt, Run, Sample
from jaxspec.generation import decode_tokens
from jaxspec.reading import Asked
from jaxspec.recipe import Batch, Recipe, faults, filled
from jaxspec.sharding import mesh_of


@dataclass(frozen=True)
class Job:
    """A sample that is to be drawn.

    Attributes:
      prompt: what of.
      image: its number among the prompt's.
      error: why the prompt cannot be read; None if it can.
      warnings: what was said of it.
    """

    prompt: Prompt
    image: int
    error: str | None = None
    warnings: tuple[str, ...] = ()


def readable(recipe: Recipe, jobs: Sequence[Job]) -> Iterator[Job]:
    """The jobs, with what the family's reader says of their prompts."""
    last = None
    for job in jobs:
        if last is None or last.prompt.id != job.prompt.id:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                error = None
                try:
                    recipe.params.ask([job.prompt.text])
                except ValueError as refused:
                    error = _one_line(refused)
            last = replace(job, error=error, warnings=_said(caught))
        yield replace(last, image=job.image)


def _said(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    return tuple(str(warning.message) for warning in caught)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def batches(jobs: Iterator[Job], size: int) -> Iterator[list[Job]]:
    """Jobs in order, at most `size` at a time that can be drawn."""
    batch: list[Job] = []
    good = 0
    for job in jobs:
        batch.append(job)
        good += job.error is None
        if good == size:
            yield batch
            batch, good = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class Drawn:
    """What came of a job.

    Attributes:
      prompt: what was drawn.
      sample: its line, without the files.
      picture: uint8 [H, W, 3]; None if there is none.
      arrays: what is recorded of it, cell by cell.
    """

    prompt: Prompt
    sample: Sample
    picture: np.ndarray | None = None
    arrays: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artist:
    """Draws batches; what all batches of a run share."""

    recipe: Recipe
    run: Run
    batch_size: int
    check: bool = False

    def batches(self, jobs: Sequence[Job]) -> Iterator[list[Drawn]]:
        """Draws jobs batch by batch."""
        for batch in batches(readable(self.recipe, jobs), self.batch_size):
            yield self.draw(batch)

    def stream(self, jobs: Sequence[Job]) -> Iterator[list[Drawn]]:
        """Draws jobs in rows that are handed on, and returns them as they are done."""
        read = list(readable(self.recipe, jobs))
        bad = [self._failed(job, job.error) for job in read if job.error]
        if bad:
            yield bad
        left = dict(enumerate(job for job in read if job.error is None))
        if not left:
            return
        asked = self._ask(list(left.values()))
        numbers = np.array([job.image for job in left.values()])
        how: dict[str, Any] = {"rows": self.batch_size, "check": self.check}
        stream = self.recipe.stream(asked, numbers, self.run.seed, **how)
        try:
            while left:
                with compilations() as compiled, _clear_memory_errors(self.batch_size):
                    images, batch = next(stream)
                    pictures, seconds = self._pictures(batch, len(images))
                own = [left.pop(image) for image in images]
                yield self._kept(own, batch, pictures, seconds, bool(compiled), True)
        except FloatingPointError:
            # A prompt has spoilt those that were read with it: batches find out which.
            for batch in batches(iter(left.values()), self.batch_size):
                yield self.draw(batch)

    def draw(self, jobs: Sequence[Job]) -> list[Drawn]:
        """Draws jobs together; of what fails, the sample says why."""
        good = [job for job in jobs if job.error is None]
        bad = [self._failed(job, job.error) for job in jobs if job.error]
        return bad + (self._drawn(good) if good else [])

    def _drawn(self, jobs: Sequence[Job]) -> list[Drawn]:
        numbers = np.array([job.image for job in jobs])
        try:
            with compilations() as compiled, _clear_memory_errors(self.batch_size):
                how: dict[str, Any] = {"rows": self.batch_size, "check": self.check}
                batch = self.recipe.decode(
                    self._ask(jobs), numbers, self.run.seed, **how
                )
                pictures, seconds = self._pictures(batch, self.batch_size)
        except FloatingPointError as error:
            if len(jobs) == 1:
                return [self._failed(jobs[0], _one_line(error))]
            # One of them has spoilt the batch: which, they show alone.
            return [drawn for job in jobs for drawn in self._drawn([job])]
        return self._kept(jobs, batch, pictures, seconds, bool(compiled))

    def _kept(
        self,
        jobs: Sequence[Job],
        batch: Batch,
        pictures: np.ndarray,
        seconds: dict[str, float],
        compiled: bool,
        refill: bool = False,
    ) -> list[Drawn]:
        """What was drawn of each job; `seconds` are of each."""
        names = [job.prompt.text for job in jobs]
        wrong = faults(batch.stats, np.array([job.image for job in jobs]), names)
        times = dict(seconds)
        about = {
            "batch": self.batch_size,
            "refill": refill,
            "compiled": compiled,
            "seconds": times.pop("decode"),
            "stages": times,
        }

        def kept(i: int, job: Job) -> Drawn:
            if i in wrong:
                return self._failed(job, _one_line(wrong[i]))
            sample = self._sample(job, **_counts(batch, i), **about)
            return Drawn(job.prompt, sample, pictures[i], _row(batch, i))

        return [kept(i, job) for i, job in enumerate(jobs)]

    def _ask(self, jobs: Sequence[Job]) -> Asked:
        """What the prompts of jobs ask for; what is said of them is known."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.recipe.params.ask([job.prompt.text for job in jobs])

    def _pictures(self, batch: Batch, rows: int) -> tuple[np.ndarray, dict[str, float]]:
        """The pictures of a batch, made in so many rows, and the times of each row."""
        began, count = time.perf_counter(), len(batch.stats.tokens)
        chosen = filled(np.arange(count), rows)
        tokens = batch.stats.tokens[chosen]
        pictures = decode_tokens(self.recipe.params, tokens)[:count]
        seconds = {**batch.seconds, "pictures": time.perf_counter() - began}
        return pictures, {k: x / rows for k, x in seconds.items()}

    def _failed(self, job: Job, error: str | None) -> Drawn:
        return Drawn(job.prompt, self._sample(job, error=error))

    def _sample(self, job: Job, **about) -> Sample:
        return Sample(
            prompt=job.prompt.id,
            image=job.image,
            seed=self.run.seed,
            settings=self.run.settings,
            weights=self.run.weights,
            jaxspec=jaxspec.__version__,
            jax=jax.__version__,
            device=self._device(),
            dtype=self.run.dtype,
            host=socket.gethostname(),
            warnings=list(job.warnings),
            **about,
        )

    def _device(self) -> str:
        """The kind of device, and of several the shape of their mesh."""
        mesh, kind = mesh_of(self.recipe.params), jax.devices()[0].device_kind
        if mesh is None or mesh.size == 1:
            return kind
        return f"{kind}, {' x '.join(map(str, mesh.devices.shape))}"


def _row(batch: Batch, i: int) -> dict[str, Any]:
    """What is recorded of image i, cell by cell."""
    stats = batch.stats
    own: dict[str, Any] = {"tokens": stats.tokens, "final_pass": stats.final_pass}
    own |= {"origin": stats.origin, **batch.stages}
    return {name: np.asarray(x[i]) for name, x in own.items()}


def _counts(batch: Batch, i: int) -> dict[str, Any]:
    """The counts of image i, and what the target says of it."""
    stats, said = batch.stats, batch.likelihood
    counts: dict[str, Any] = {
        "target_passes": stats.target_passes,
        "prefill_passes": stats.prefill_passes,
        "draft_passes": stats.draft_passes,
        "drafted": stats.drafted,
    }
    origins = {"accepted": ACCEPTED, "resampled": RESAMPLED, "bonus": BONUS}
    counts = {name: int(x[i]) for name, x in counts.items()} | {
        name: int(np.sum(np.asarray(stats.origin[i]) == origin))
        for name, origin in origins.items()
    }
    if said is None:
        return counts
    counts["divergences"] = int(said.divergences[i])
    return counts | {"log_prob": float(said.log_prob[i])}


@contextmanager
def _clear_memory_errors(batch_size: int) -> Generator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"the device has no room for a batch of {batch_size}: take a smaller one"
        ) from error


__all__ = ["Artist", "Drawn", "Job", "batches", "readable"]
