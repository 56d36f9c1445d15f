"""Training a model of LPD's kind on the emoji drawings, with captions for classes.

As LPD trains it (arXiv 2507.01957): cells in an order by lot, in groups as decoding
has them, with a number of steps by lot; every cell is asked for with its group, and the
loss is the mean over all. What goes in and out of the network begins as it is in the
family's model of that size, which has the same width.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.emoji import train_ar
from experiments.emoji.codes import SLOTS
from experiments.emoji.data import Drawings
from jaxspec.decoding.orders import group_sizes
from jaxspec.models.lpd import LPDConfig, LPDNet
from jaxspec.training import TrainState, fit

# Of the family's model: those parameters that LPD's has too.
SHARED = ("token_embedding", "head", "prefix_proj", "prefix_bias")


@dataclass(frozen=True)
class LPDTraining(train_ar.ARTraining):
    """One size's training.

    Attributes:
      groups: steps of decoding, of which each drawing is trained for one.
      evaluated: that whose likelihood is logged.
    """

    groups: tuple[int, ...] = (6, 8, 10, 12, 16, 24)
    evaluated: int = 10

    @property
    def lpd(self) -> LPDConfig:
        model = self.model
        return LPDConfig(
            vocab_size=model.vocab_size,
            width=model.width,
            depth=model.depth,
            heads=model.heads,
            hidden=model.hidden,
            grid=model.grid,
            prefix="features",
            prefix_length=SLOTS,
            prefix_width=model.prefix_width,
        )


STAGES = {
    "lpd-64": LPDTraining(size=64, depth=4, steps=5600, batch=16, rate=1.5e-3),
    "lpd-128": LPDTraining(
        size=128,
        depth=5,
        steps=4000,
        batch=12,
        rate=1e-3,
        groups=(12, 16, 20, 24, 32, 48),
        evaluated=20,
    ),
}


def groups_by_lot(
    rng: np.random.Generator, cells: int, steps: list[int] | np.ndarray
) -> np.ndarray:
    """The group int32 [B, N] of every cell, in an order by lot, for steps [B]."""
    each = [np.repeat(np.arange(k), group_sizes(cells, int(k))) for k in steps]
    return rng.permuted(np.stack(each), axis=1).astype(np.int32)


def make_batch(settings: LPDTraining, corpus, train: np.ndarray, step: int):
    """Batch of a step: `train_ar.make_batch`'s, and groups [B, N]."""
    inputs, targets, condition = train_ar.make_batch(settings, corpus, train, step)
    rng = np.random.default_rng((settings.seed, step, 2))
    steps = rng.choice(settings.groups, len(targets))
    return inputs, targets, condition, groups_by_lot(rng, targets.shape[1], steps)


def nats(config: LPDConfig, params, batch) -> jax.Array:
    """Mean negative log-likelihood of each drawing [B], in nats a cell."""
    inputs, targets, condition, groups = batch
    logits = LPDNet(config).apply(params, condition, inputs, groups)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return loss.mean(-1)


def init(settings: LPDTraining, target: dict) -> dict:
    """A new model; `target` is the family's."""
    config, start = settings.lpd, target["params"]
    none = jnp.zeros((1, config.cells), jnp.int32)
    condition = jnp.zeros((1, SLOTS, config.prefix_width))
    params = jax.jit(LPDNet(config).init)(
        jax.random.key(settings.seed), condition, none, none
    )["params"]
    scale = (2 * config.depth) ** -0.5  # of what is added to the residual stream
    for name in ("attention_out", "fc2"):
        params[name] = params[name] * scale
    return {"params": params | {name: jnp.array(start[name]) for name in SHARED}}


def make_step(settings: LPDTraining, optimizer):
    def step(state: TrainState, batch):
        loss = lambda params: nats(settings.lpd, params, batch).mean()
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.update(grads, optimizer, settings.decay), {"loss": value}

    return step


def make_evaluate(settings: LPDTraining, corpus, drawings, count=64):
    """Nats a cell on drawings of `train` and `val_concept`, with their captions."""
    score = jax.jit(lambda params, batch: nats(settings.lpd, params, batch))

    def evaluate(state: TrainState) -> dict[str, float]:
        out = {}
        for split in ("train", "val_concept"):
            rng = np.random.default_rng(0)
            chosen = rng.permutation(drawings.index(split))[:count]
            tokens = corpus.tokens[0, chosen].astype(np.int32)
            steps = np.full(len(chosen), settings.evaluated)
            groups = groups_by_lot(rng, tokens.shape[1], steps)
            condition = corpus.condition(corpus.pieces[chosen])
            value = score(state.ema, (tokens, tokens, condition, groups)).mean()
            out[split] = round(float(value), 4)
        return out

    return evaluate


def train(
    settings: LPDTraining,
    target: dict,
    corpus: train_ar.Corpus,
    drawings: Drawings,
    folder: Path,
    save_every: int = 400,
) -> TrainState:
    """Trains a model into `folder`, beginning with parts of the family's `target`."""
    optimizer = train_ar.make_optimizer(settings)
    index = drawings.index("train")
    return fit(
        TrainState.create(init(settings, target), optimizer),
        make_step(settings, optimizer),
        lambda step: make_batch(settings, corpus, index, step),
        steps=settings.steps,
        folder=folder,
        settings=asdict(settings),
        evaluate=make_evaluate(settings, corpus, drawings),
        save_every=save_every,
    )


__all__ = ["STAGES", "LPDTraining", "train"]
