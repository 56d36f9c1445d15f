"""Training the matcher: code grids and captions that belong together meet.

Contrastive, as CLIP (Radford et al., 2021, section 2.3): each picture of a batch is to
find its caption among all of the batch, and each caption its picture. Drawings of one
label in several styles count as belonging together. Seen are moved and turned drawings
as well as their own codes, some of them replaced by near ones. So that the colours that
prompts name count, some drawings are in a batch twice, in two colours.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.emoji.augment import VARIANTS, name_colour
from experiments.emoji.data import Drawings
from experiments.emoji.metrics import evaluation_set
from experiments.emoji.train_ar import Corpus, corrupted
from jaxspec.evaluation.measures import recall
from jaxspec.models.matcher import Matcher, MatcherConfig
from jaxspec.training import TrainState, fit


@dataclass(frozen=True)
class MatcherTraining:
    """One size's training.

    Attributes:
      batch: pairs a step, divisible by the number of devices.
      variants: of the drawings, by kind (see `augment`).
      moved: share of pictures that are moved drawings.
      named: share that are drawings in two colours, which captions name.
      corruption: largest share of codes replaced by one of their 8 nearest; each
        picture draws its own share below it.
      dropout: of the pooled channels.
    """

    size: int = 128
    steps: int = 2000
    batch: int = 192
    rate: float = 1.5e-3
    decay: float = 0.99
    variants: tuple[str, ...] = VARIANTS
    moved: float = 0.7
    named: float = 0.4
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
    """What a batch is made of, M drawings and K pictures of each."""

    tokens: np.ndarray  # int16 [K, M, N]: as drawn, mirrored, then variants
    captions: np.ndarray  # int32 [K, M, slots], pieces
    labels: np.ndarray  # int [K, M], equal where pictures show the same
    named: np.ndarray  # bool [K, M], whether the caption names a variant's colour
    mirrors: np.ndarray  # bool [M]
    table: np.ndarray  # float32 [P, text_width], vectors of pieces
    codebook: np.ndarray  # float32 [V, code_width]
    nearest: np.ndarray  # int16 [V, 8], each code's nearest others

    @staticmethod
    def create(corpus: Corpus, drawings: Drawings, codebook: np.ndarray) -> "Pairs":
        """From a corpus with variants."""
        assert corpus.variants is not None and corpus.named is not None
        names = drawings.label
        own = np.full((2, len(names)), "")
        colours = np.concatenate([own, corpus.variants.colours])
        show = [
            [name_colour(x, c) if c else x for x, c in zip(names, row, strict=True)]
            for row in colours
        ]
        return Pairs(
            np.concatenate([corpus.tokens, corpus.variants.tokens]),
            np.concatenate([corpus.pieces[None]] * 2 + [corpus.named]),
            np.unique(show, return_inverse=True)[1].reshape(colours.shape),
            colours != "",
            corpus.mirrors,
            corpus.table,
            codebook,
            corpus.nearest,
        )

    def latents(self, tokens: np.ndarray) -> np.ndarray:
        """Code vectors [..., h, w, code_width] of square grids [..., N]."""
        side = round(tokens.shape[-1] ** 0.5)
        return self.codebook[tokens].reshape(*tokens.shape[:-1], side, side, -1)

    def condition(self, kind: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return self.table[self.captions[kind, chosen]]


def choose(settings: MatcherTraining, pairs: Pairs, train: np.ndarray, rng):
    """Kinds and drawings of a batch; first those that are there in two colours."""
    n = settings.batch
    chosen = rng.choice(train, n, replace=len(train) < n)
    kind = (pairs.mirrors[chosen] & (rng.random(n) < 0.5)).astype(int)
    names = pairs.named.any(1)
    moved = rng.choice(np.flatnonzero(~names)[2:], n)
    kind = np.where(rng.random(n) < settings.moved, moved, kind)
    twice = int(settings.named * n) // 2
    of_one_colour = train[pairs.named[:, train].any(0)]
    chosen[: 2 * twice] = rng.choice(of_one_colour, twice).repeat(2)
    colours = [0, *np.flatnonzero(names)]  # its own is one of them
    kind[: 2 * twice] = rng.choice(colours, 2 * twice)
    return kind, chosen


def make_batch(settings: MatcherTraining, pairs: Pairs, train: np.ndarray, step: int):
    """Latents, captions, labels, and what dropout keeps of a step."""
    rng = np.random.default_rng((settings.seed, step))
    kind, chosen = choose(settings, pairs, train, rng)
    tokens = pairs.tokens[kind, chosen].astype(int)
    tokens = corrupted(tokens, pairs.nearest, settings.corruption, rng)
    channels = settings.width * 2 ** (len(settings.model.blocks) - 1)
    kept = rng.random((len(chosen), channels)) >= settings.dropout
    return (
        pairs.latents(tokens),
        pairs.condition(kind, chosen),
        pairs.labels[kind, chosen],
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


def colour_found(pictures, captions, labels: np.ndarray) -> float:
    """Share of pictures [M, K, D] that match their caption best of their drawing's."""
    first = np.asarray(jnp.einsum("mkd,mcd->mkc", pictures, captions)).argmax(-1)
    return float((np.take_along_axis(labels, first, axis=1) == labels).mean())


def make_evaluate(settings: MatcherTraining, pairs: Pairs, drawings, count=300):
    """R@1 and R@5 of real drawings of `train` and `val_concept`, and of colours.

    "colour" is how often a drawing in another colour matches the caption that names it
    best, of those of the same drawing.
    """
    score = jax.jit(Matcher(settings.model).apply)

    def evaluate(state: TrainState) -> dict[str, float]:
        out = {}

        def both(kind, chosen):
            latents = pairs.latents(pairs.tokens[kind, chosen])
            condition = pairs.condition(kind, chosen)
            return score(state.ema["network"], latents, condition)

        kinds = np.flatnonzero(pairs.named.any(1))
        for split in ("train", "val_concept"):
            chosen = evaluation_set(drawings, split, count)
            shown = both(0, chosen)
            for k in (1, 5):
                share = found(*shown, pairs.labels[0, chosen], k)
                out[f"{split}_r{k}"] = round(share, 4)
            some = chosen[pairs.named[:, chosen].any(0)]
            if not len(some):
                continue
            grid = np.tile(kinds, len(some)), some.repeat(len(kinds))
            towers = [x.reshape(len(some), len(kinds), -1) for x in both(*grid)]
            labels = pairs.labels[grid].reshape(len(some), -1)
            out[f"{split}_colour"] = round(colour_found(*towers, labels), 4)
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
