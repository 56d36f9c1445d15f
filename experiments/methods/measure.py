"""Drawing, scoring and timing: raw results, each saved as soon as it is there."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from experiments.methods.contestants import Contestant
from jaxspec.decoding import (
    ACCEPTED,
    Decoded,
    Method,
    Target,
    advance,
    begin,
    bound,
    describe,
)
from jaxspec.decoding.likelihood import log_probs_of
from jaxspec.figures import atomically
from jaxspec.generation import image_keys
from jaxspec.pipeline import Pipeline
from jaxspec.sampling import Sampling

ALL = np.int32(2**31 - 1)  # passes: as many as it takes


def _code() -> bytes:
    """A digest of what draws and scores: the package, JAX, and this file."""
    digest = hashlib.sha256(jax.__version__.encode())
    package = sorted(Path(jaxspec.__file__).parent.rglob("*.py"))
    for path in [*package, Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.digest()


CODE = _code()  # as it was imported, whatever is edited meanwhile


@dataclass(frozen=True)
class Task:
    """What is drawn, and what judges it; N captions.

    Attributes:
      pipeline: the family; its defaults are the settings.
      captions: no two of them read alike.
      real: features [N, F] of the real drawings of these captions.
      features: of pictures uint8 [N, H, W, 3], float32 [N, F].
      match: from features of pictures of these captions to `r1` and `r5`, R@1 and R@5
        of each picture [N].
    """

    pipeline: Pipeline
    captions: list[str]
    real: np.ndarray
    features: Callable[[np.ndarray], np.ndarray]
    match: Callable[[np.ndarray], dict[str, np.ndarray]]

    def target(self, chosen: np.ndarray, seed: int) -> tuple[Target, jax.Array]:
        """The model conditioned on some captions, and the keys of their pictures."""
        config = self.pipeline.config
        settings = asdict(config.defaults)
        del settings["size"]
        sampling = Sampling.create(config.vq.codebook_size, **settings)
        condition, ids = self.pipeline.read([self.captions[i] for i in chosen])
        target = self.pipeline.target(jnp.asarray(condition), sampling)
        return target, image_keys(seed, ids, np.zeros(len(ids)))

    def bound(self, method: Method, target: Target) -> Method:
        """The method, with what else it needs of the family for these captions."""
        size = self.pipeline.config.defaults.size
        return bound(method, self.pipeline, target.condition, target.sampling, size)

    def fingerprint(self) -> str:
        """Of all that a result depends on besides method and seed, code included."""
        digest = hashlib.sha256(CODE)
        for leaf in jax.tree.leaves(self.pipeline.params):
            digest.update(np.asarray(leaf).tobytes())
        digest.update(repr((self.pipeline.config, self.captions)).encode())
        return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Drawn:
    """What a method drew of all captions with one seed.

    Attributes:
      tokens: int32 [N, H, W].
      origin: int8 [N, H, W], where each came from.
      passes, draft_passes: int32 [N], of the target, its prefill included, and of the
        drafter.
      drafted, accepted: int32 [N].
      nats: float32 [N, H, W], the target's negative log-likelihood of each cell.
      nll: float32 [N], its mean over the cells inside the support.
      outside: int32 [N], cells whose token the target would not have drawn there.
      features: float32 [N, F].
    """

    tokens: np.ndarray
    origin: np.ndarray
    passes: np.ndarray
    draft_passes: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    nats: np.ndarray
    nll: np.ndarray
    outside: np.ndarray
    features: np.ndarray


@jax.jit
def negative_log_likelihood(target: Target, tokens: jax.Array) -> jax.Array:
    """Of each token [B, H, W] given those before it.

    Under the distribution that is sampled from: infinite outside its support.
    """
    return -log_probs_of(target, tokens)


def inside(nll: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each grid [N, H, W] over its finite cells, and the count of the others.

    Raises:
      ValueError: a grid has no finite cell, or one that is not a number.
    """
    if np.isnan(nll).any():
        raise ValueError("the target's likelihood is not a number: damaged weights?")
    finite = np.isfinite(nll)
    cells = finite.sum((1, 2))
    if not cells.all():
        i = int(np.argmin(cells))
        raise ValueError(f"picture {i} has no cell inside the target's support")
    total = np.where(finite, nll, 0).sum((1, 2))
    return total / cells, nll[0].size - cells


def draw(
    task: Task,
    method: Method,
    seed: int,
    batch: int,
    progress: Callable[[int, int, np.ndarray], None] | None = None,
) -> Drawn:
    """One picture of each caption, and its scores."""
    out = jaxspec.generate(
        task.pipeline,
        task.captions,
        method=method,
        seed=seed,
        batch_size=batch,
        progress=progress,
    )
    rows = np.arange(len(out))
    parts = [rows[i : i + batch] for i in range(0, len(rows), batch)]
    scores = [
        negative_log_likelihood(task.target(part, seed)[0], out.tokens[part])
        for part in parts
    ]
    nats = np.concatenate(scores)
    nll, outside = inside(nats)
    return Drawn(
        tokens=out.tokens,
        origin=np.asarray(out.stats.origin),
        passes=np.asarray(out.stats.target_passes) + 1,
        draft_passes=np.asarray(out.stats.draft_passes),
        drafted=np.asarray(out.stats.drafted),
        accepted=np.asarray(out.stats.count(ACCEPTED)),
        nats=nats,
        nll=nll,
        outside=outside,
        features=task.features(out.images),
    )


def _digest(value) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def saved_draw(folder: Path, task: Task, each: Contestant, seed: int, *rest) -> Drawn:
    """`draw`, or what an earlier run of it left in `folder`."""
    knobs = _digest(describe(each.method))
    path = folder / f"{each.name}-seed{seed}-{knobs}.npz"
    if path.exists():
        with np.load(path) as arrays:
            return Drawn(**{f.name: arrays[f.name] for f in fields(Drawn)})
    drawn = draw(task, each.method, seed, *rest)
    with atomically(path) as draft, draft.open("wb") as file:
        np.savez(file, **vars(drawn))
    return drawn


# Time.


def decode_batch(method: Method, target: Target, keys: jax.Array) -> Decoded:
    """As `generate` decodes a batch; returns when it is done."""
    state = begin(method, target, keys)
    return method.decoded(jax.block_until_ready(advance(method, target, state, ALL)))


def time_methods(
    folder: Path,
    task: Task,
    contestants: Sequence[Contestant],
    batch: int,
    trials: int,
    rounds: int,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> dict:
    """Seconds of each method, the methods taking turns batch by batch.

    Prefill included, compilation not: each has drawn every batch once before.

    Args:
      folder: rounds are saved there as they end, and found there.
      task: the captions.
      contestants: the methods.
      batch: pictures drawn at once.
      trials: batches of captions, the same ones in each round.
      rounds: how often.
      seed: of the pictures.
      tick: called after each batch of each method, warm-up included.

    Returns:
      `batch`, `passes`: {name: mean passes of each of the batches}, and `rounds`: a
      list of {name: seconds of each of the batches}.
    """
    count = len(task.captions)
    batch = min(batch, count)
    trials = min(trials, count // batch)
    # From all over the set, which is sorted by style.
    spaced = np.linspace(0, count - 1, trials * batch).astype(int)
    parts = spaced.reshape(trials, batch)
    settings = [(each.name, describe(each.method)) for each in contestants]
    about = _digest([settings, parts.tolist(), seed])
    path = folder / f"time-batch{batch}-{about}.json"
    record: dict[str, Any] = {"batch": batch, "passes": {}, "rounds": []}
    if path.exists():
        record = json.loads(path.read_text())
    if len(record["rounds"]) >= rounds:
        return record
    batches = [task.target(part, seed) for part in parts]
    methods = {
        each.name: [task.bound(each.method, target) for target, _ in batches]
        for each in contestants
    }
    for name, bound_methods in methods.items():
        record["passes"][name] = []
        for method, (target, keys) in zip(bound_methods, batches, strict=True):
            passes = np.asarray(decode_batch(method, target, keys).target_passes)
            record["passes"][name].append(float(passes.mean() + 1))
            tick()
    while len(record["rounds"]) < rounds:
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        for i, (target, keys) in enumerate(batches):
            for name, bound_methods in methods.items():
                began = time.perf_counter()
                decode_batch(bound_methods[i], target, keys)
                seconds[name].append(time.perf_counter() - began)
                tick()
        record["rounds"].append(seconds)
        with atomically(path) as draft:
            draft.write_text(json.dumps(record))
    return record
