"""Training FlashAR's head on a target of the emoji family.

As FlashAR trains it (arXiv 2605.09430), in two stages: first the vertical branch and
the gate alone, on a frozen target; then all of it, the target at a fifth of the rate.
The loss is the cross-entropy of what the gate makes of both branches, and a little of
each branch alone. Captions are left out now and then, for guidance.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.emoji import train_ar
from experiments.emoji.data import Drawings
from jaxspec.models.flashar import Context, FlashConfig, forced_logits, new_head
from jaxspec.models.transformer import Transformer
from jaxspec.training import TrainState, fit


@dataclass(frozen=True)
class FlashTraining(train_ar.ARTraining):
    """One head's training; `size` and `depth` are the target's, `start` its stage.

    Attributes:
      branch: layers of the vertical branch.
      context: what a cell sees (see `FlashConfig`).
      alone: weight of each branch's own cross-entropy.
      backbone: the target's rate, as a share of the head's; 0 leaves it frozen.
    """

    branch: int = 2
    context: Context = "earlier"
    alone: float = 0.05
    backbone: float = 0.0

    @property
    def flash(self) -> FlashConfig:
        return FlashConfig(self.model, self.branch, self.context)


STAGES = {
    "flashar-128": FlashTraining(
        size=128, depth=5, steps=2500, batch=12, rate=1e-3, tags=0.2
    ),
    "flashar-128-unfrozen": FlashTraining(
        size=128,
        depth=5,
        steps=1000,
        batch=12,
        rate=5e-4,
        tags=0.2,
        backbone=0.2,
        start="flashar-128",
    ),
    "flashar-256": FlashTraining(
        size=256,
        depth=5,
        steps=500,
        batch=12,
        rate=5e-4,
        tags=0.2,
        start="flashar-128",
    ),
    "flashar-256-unfrozen": FlashTraining(
        size=256,
        depth=5,
        steps=400,
        batch=12,
        rate=5e-4,
        tags=0.2,
        backbone=0.2,
        start="flashar-256",
    ),
}


def asked(grid: tuple[int, int]) -> dict[str, np.ndarray]:
    """Which cells [N] each branch is asked about, and which both are."""
    row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    down, right = row > 0, (column > 0) | (row == 0)
    return {"joint": np.ones_like(down), "right": right, "down": down}


def nats(config: FlashConfig, target, head, batch) -> dict[str, jax.Array]:
    """Mean negative log-likelihood in nats a cell, by both branches and by each."""
    inputs, tokens, condition = batch
    found = forced_logits(config, target, head, condition, inputs)
    out = {}
    for name, cells in asked(config.target.grid).items():
        some = np.flatnonzero(cells)
        out[name] = optax.softmax_cross_entropy_with_integer_labels(
            found[name][:, some], tokens[:, some]
        ).mean()
    return out


def make_optimizer(settings: FlashTraining) -> optax.GradientTransformation:
    """`train_ar`'s, with the target slower where it is trained too."""
    optimizer = train_ar.make_optimizer(settings)
    if not settings.backbone:
        return optimizer
    mask = {"head": False, "target": True}
    return optax.chain(
        optimizer, optax.masked(optax.scale(settings.backbone), lambda _: mask)
    )


def make_step(settings: FlashTraining, target, optimizer):
    def step(state: TrainState, batch):
        def loss(params):
            own = params.get("target", target)
            found = nats(settings.flash, own, params["head"], batch)
            alone = found["down"] + (found["right"] if "target" in params else 0.0)
            return found["joint"] + settings.alone * alone, found

        (value, found), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = state.update(grads, optimizer, settings.decay)
        return state, {"loss": value, **found}

    return step


def make_evaluate(settings: FlashTraining, target, corpus, drawings, count=64):
    """Nats a cell on drawings of `train` and `val_concept`, beside plain AR's."""
    config = settings.model

    @jax.jit
    def score(target, params, batch):
        _, tokens, condition = batch
        logits = Transformer(config).apply(target, condition, tokens)
        plain = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        own = params.get("target", target)
        found = nats(settings.flash, own, params["head"], batch)
        return {"ar": plain.mean(), **found}

    def evaluate(state: TrainState) -> dict[str, float]:
        on = partial(score, target, state.ema)
        return train_ar.on_splits(on, corpus, drawings, count)

    return evaluate


def train(
    settings: FlashTraining,
    target: dict,
    corpus: train_ar.Corpus,
    drawings: Drawings,
    folder: Path,
    start: dict | None = None,
    save_every: int = 250,
) -> TrainState:
    """Trains a head for a target's parameters into `folder`.

    `start` is what the stage before left, if there was one.
    """
    target = jax.tree.map(jnp.asarray, target)
    params = start or {"head": new_head(settings.flash, target, settings.seed)}
    if settings.backbone:
        params = {"target": jax.tree.map(jnp.array, target), **params}
    optimizer = make_optimizer(settings)
    index = drawings.index("train")
    return fit(
        TrainState.create(params, optimizer),
        make_step(settings, target, optimizer),
        lambda step: train_ar.make_batch(settings, corpus, index, step),
        steps=settings.steps,
        folder=folder,
        settings=asdict(settings),
        evaluate=make_evaluate(settings, target, corpus, drawings),
        save_every=save_every,
    )


__all__ = ["STAGES", "FlashTraining", "train"]
