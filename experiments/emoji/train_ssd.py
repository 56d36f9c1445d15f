"""Training SSD's head on a frozen target of the emoji family.

As SSD trains it (arXiv 2606.20543): on pictures that the target itself drew, from
captions of `train`, the head learns the target's state of the cell below each cell, by
smooth L1; and here a little of what the target's head makes of it too.
"""

import os
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from experiments.emoji import train_ar
from experiments.emoji.data import Drawings
from jaxspec.models.ssd import SSDConfig, SSDHead
from jaxspec.models.transformer import Transformer
from jaxspec.pipeline import Pipeline
from jaxspec.sampling import image_keys
from jaxspec.training import TrainState, fit


@dataclass(frozen=True)
class SSDTraining(train_ar.ARTraining):
    """One head's training; `size` and `depth` are the target's.

    Attributes:
      hidden: of the head's feed-forward layer.
      pictures: that the target draws to train on.
      tokens: weight of the cross-entropy, beside that of the states.
    """

    hidden: int = 512
    pictures: int = 1024
    tokens: float = 0.1

    @property
    def ssd(self) -> SSDConfig:
        return SSDConfig(self.model, self.hidden)


STAGES = {
    "ssd-128": SSDTraining(
        size=128,
        depth=5,
        steps=1200,
        batch=16,
        rate=1e-3,
        corruption=0.0,
        tags=0.0,
        mirror=0.0,
    )
}
AT_ONCE = 64  # pictures drawn


def self_drawn(
    settings: SSDTraining,
    pipeline: Pipeline,
    corpus: train_ar.Corpus,
    drawings: Drawings,
    folder: Path,
) -> train_ar.Corpus:
    """A corpus of what the target draws of captions of `train`, with the defaults.

    It is drawn once, and kept in `folder`.
    """
    index = np.random.default_rng(settings.seed).permutation(drawings.index("train"))
    chosen = index[: settings.pictures]
    path = folder / "drawn.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sampling = pipeline_sampling(pipeline)
        decode, parts = jax.jit(jaxspec.decode), []
        for i in range(0, len(chosen), AT_ONCE):
            some = chosen[i : i + AT_ONCE]
            condition = jnp.asarray(corpus.condition(corpus.pieces[some]))
            target = pipeline.target(condition, sampling, settings.size)
            keys = image_keys(settings.seed, some, np.zeros(len(some)))
            tokens = decode(jaxspec.AR(), target, keys).tokens
            parts.append(np.asarray(tokens).reshape(len(some), -1).astype(np.int16))
        draft = path.with_suffix(".tmp.npz")
        np.savez(draft, tokens=np.concatenate(parts))
        os.replace(draft, path)
    with np.load(path) as file:
        tokens = file["tokens"]
    return replace(
        corpus,
        tokens=np.stack([tokens, tokens]),
        mirrors=np.zeros(len(tokens), bool),
        pieces=corpus.pieces[chosen[: len(tokens)]],
        tags=[[] for _ in tokens],
    )


def pipeline_sampling(pipeline: Pipeline) -> jaxspec.Sampling:
    """A family's default settings."""
    settings = asdict(pipeline.config.defaults)
    del settings["size"]
    return jaxspec.Sampling.create(pipeline.config.vq.codebook_size, **settings)


def compare(config: SSDConfig, target: Any, head: Any, batch) -> dict[str, jax.Array]:
    """Losses of states and of tokens, and the overlap of the distributions."""
    _, tokens, condition = batch
    c, model = config.target, Transformer(config.target)
    ask: Any = lambda *x, method: model.apply(target, *x, method=method)
    states = ask(condition, tokens, method="forced")[:, c.prefix_length - 1 :]
    states = jax.lax.stop_gradient(states)
    above, w = c.cells - c.grid[1], c.grid[1]
    embeddings = target["params"]["token_embedding"][tokens[:, :above]]
    below: Any = SSDHead(config).apply(head, states[:, :above], embeddings)
    read = lambda x: jax.nn.log_softmax(ask(x, method="logits"))
    q, p = read(below), read(states[:, w:])
    return {
        "states": optax.huber_loss(below, states[:, w:]).mean(),
        "tokens": -(jnp.exp(p) * q).sum(-1).mean(),
        "overlap": jnp.minimum(jnp.exp(p), jnp.exp(q)).sum(-1).mean(),
    }


def make_step(settings: SSDTraining, target, optimizer):
    def step(state: TrainState, batch):
        def loss(head):
            found = compare(settings.ssd, target, head, batch)
            return found["states"] + settings.tokens * found["tokens"], found

        (value, found), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = state.update(grads, optimizer, settings.decay)
        return state, {"loss": value, **found}

    return step


def make_evaluate(settings: SSDTraining, target, corpus, drawings, count=64):
    """On drawings of `train` and `val_concept`."""
    score = jax.jit(lambda head, batch: compare(settings.ssd, target, head, batch))

    def evaluate(state: TrainState) -> dict[str, float]:
        return train_ar.on_splits(partial(score, state.ema), corpus, drawings, count)

    return evaluate


def train(
    settings: SSDTraining,
    pipeline: Pipeline,
    corpus: train_ar.Corpus,
    drawings: Drawings,
    folder: Path,
    save_every: int = 300,
) -> TrainState:
    """Trains a head for the family's model of a size into `folder`."""
    target = jax.tree.map(jnp.asarray, pipeline.params["decoders"][str(settings.size)])
    drawn = self_drawn(settings, pipeline, corpus, drawings, folder)
    none = jnp.zeros((1, 1, settings.model.width))
    head = SSDHead(settings.ssd).init(jax.random.key(settings.seed), none, none)
    optimizer = train_ar.make_optimizer(settings)
    index = np.arange(len(drawn.mirrors))
    return fit(
        TrainState.create(head, optimizer),
        make_step(settings, target, optimizer),
        lambda step: train_ar.make_batch(settings, drawn, index, step),
        steps=settings.steps,
        folder=folder,
        settings=asdict(settings),
        evaluate=make_evaluate(settings, target, corpus, drawings),
        save_every=save_every,
    )


__all__ = ["STAGES", "SSDTraining", "train"]
