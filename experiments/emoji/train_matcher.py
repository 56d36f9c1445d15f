"""Training the matcher: code grids and captions that belong together meet.

Contrastive, as CLIP (Radford et al., 2021, section 2.3): each picture of a batch is to
find its caption among all of the batch, and each caption its picture. Drawings of one
label in several styles count as belonging together. Seen are moved and turned drawings
as well as their own codes, some of them replaced by near ones.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.emoji.codes import Codes
from experiments.emoji.data import Drawings
from experiments.emoji.metrics import evaluation_set
from experiments.emoji.train_ar import corrupted
from jaxspec.evaluation.measures import recall
from jaxspec.models.matcher import Matcher, MatcherConfig
from jaxspec.training import TrainState, fit


@dataclass(frozen=True)
class MatcherTraining:
    """One size's training.

    Attributes:
      batch: pairs a step, divisible by the number of devices.
      moved: share of pictures that are moved drawings (`augment.moved`).
      corruption: largest share of codes replaced by one of their 8 nearest; each
        picture draws its own share below it.
      dropout: of the pooled channels.
    """

    size: int = 128
    steps: int = 1600
    batch: int = 192
    rate: float = 1.5e-3
    decay: float = 0.99
    moved: float = 0.7
    corruption: float = 0.3
    dropout: float = 0.2
    width: int = 20
    text_width: int = 64
    seed: int = 0

    @property
    def model(self) -> MatcherConfig:
        return MatcherConfig(8, self.text_width, width=self.width)


STAGES = {"matcher-128": MatcherTraining()}


@dataclass(frozen=True)
class Pairs:
    """What a batch is made of, M drawings."""

    tokens: np.ndarray  # int16 [K, M, N]: as drawn, mirrored, then moved
    mirrors: np.ndarray  # bool [M]
    captions: np.ndarray  # float32 [M, slots, text_width]
    labels: np.ndarray  # int [M], equal where pictures show the same
    codebook: np.ndarray  # float32 [V, code_width]
    nearest: np.ndarray  # int16 [V, 8], each code's nearest others

    @staticmethod
    def create(
        codes: Codes, moved: np.ndarray, drawings: Drawings, corpus, codebook
    ) -> "Pairs":
        return Pairs(
            np.concatenate([codes.tokens, moved]),
            codes.mirrors,
            corpus.condition(corpus.pieces),
            np.unique(drawings.label, return_inverse=True)[1],
            codebook,
            corpus.nearest,
        )

    def latents(self, tokens: np.ndarray) -> np.ndarray:
        """Code vectors [B, h, w, code_width] of square grids [B, N]."""
        side = round(tokens.shape[1] ** 0.5)
        return self.codebook[tokens].reshape(len(tokens), side, side, -1)


def make_batch(settings: MatcherTraining, pairs: Pairs, train: np.ndarray, step: int):
    """Latents, captions, labels, and what dropout keeps of a step."""
    rng = np.random.default_rng((settings.seed, step))
    chosen = rng.choice(train, settings.batch, replace=len(train) < settings.batch)
    n = len(chosen)
    kind = (pairs.mirrors[chosen] & (rng.random(n) < 0.5)).astype(int)
    moved = rng.integers(2, len(pairs.tokens), n)
    kind = np.where(rng.random(n) < settings.moved, moved, kind)
    tokens = pairs.tokens[kind, chosen].astype(int)
    tokens = corrupted(tokens, pairs.nearest, settings.corruption, rng)
    channels = settings.width * 2 ** (len(settings.model.blocks) - 1)
    kept = rng.random((n, channels)) >= settings.dropout
    return (
        pairs.latents(tokens),
        pairs.captions[chosen],
        pairs.labels[chosen],
        (kept / (1 - settings.dropout)).astype(np.float32),
    )


def contrast(pictures, captions, labels, scale) -> jax.Array:
    """Mean cross-entropy of who belongs to whom, both ways; towers' vectors [B, D]."""
    cosines = scale * pictures @ captions.T
    same = labels[:, None] == labels[None]
    wanted = same / same.sum(1, keepdims=True)
    loss = optax.softmax_cross_entropy
    return (loss(cosines, wanted) + loss(cosines.T, wanted)).mean() / 2


def make_step(settings: MatcherTraining, optimizer):
    model = Matcher(settings.model)

    def step(state: TrainState, batch):
        latents, captions, labels, kept = batch

        def loss(params):
            towers = model.apply(params["network"], latents, captions, kept)
            return contrast(*towers, labels, jnp.exp(params["log_scale"]))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.update(grads, optimizer, settings.decay), {"loss": value}

    return step


def found(pictures, captions, labels: np.ndarray, k: int) -> float:
    """Share of pictures whose label is among the k that match best (R@k)."""
    _, first, own = np.unique(labels, return_index=True, return_inverse=True)
    return float(recall(np.asarray(pictures @ captions[first].T), own, k).mean())


def make_evaluate(settings: MatcherTraining, pairs: Pairs, drawings, count=300):
    """R@1 and R@5 of real drawings of `train` and `val_concept`."""
    score = jax.jit(Matcher(settings.model).apply)

    def evaluate(state: TrainState) -> dict[str, float]:
        out = {}
        for split in ("train", "val_concept"):
            chosen = evaluation_set(drawings, split, count)
            latents = pairs.latents(pairs.tokens[0, chosen])
            towers = score(state.ema["network"], latents, pairs.captions[chosen])
            for k in (1, 5):
                share = found(*towers, pairs.labels[chosen], k)
                out[f"{split}_r{k}"] = round(share, 4)
        return out

    return evaluate


def train(
    settings: MatcherTraining,
    pairs: Pairs,
    drawings: Drawings,
    folder: Path,
    save_every: int = 400,
) -> TrainState:
    """Trains the matcher of a size into `folder`."""
    index = drawings.index("train")
    batch = lambda step: make_batch(settings, pairs, index, step)
    latents, captions, *_ = batch(0)
    key = jax.random.key(settings.seed)
    network = jax.jit(Matcher(settings.model).init)(key, latents[:1], captions[:1])
    warm = min(50, settings.steps // 4)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.warmup_cosine_decay_schedule(
                0.0, settings.rate, warm, settings.steps, settings.rate / 100
            ),
            weight_decay=0.1,
        ),
    )
    params = {"network": network, "log_scale": jnp.log(10.0)}
    return fit(
        TrainState.create(params, optimizer),
        make_step(settings, optimizer),
        batch,
        steps=settings.steps,
        folder=folder,
        settings=asdict(settings),
        evaluate=make_evaluate(settings, pairs, drawings),
        save_every=save_every,
    )


__all__ = ["STAGES", "MatcherTraining", "Pairs", "train"]
