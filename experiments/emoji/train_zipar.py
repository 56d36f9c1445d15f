"""Training a target of the emoji family for ZipAR's windows.

ZipAR (arXiv 2412.04062) takes a model as it is: a cell is drawn without the right part
of the rows above, and a row's first cell after a stand-in, which the model has never
seen. Here it sees them: every batch has a window, and every cell in it exactly what
`jaxspec.ZipAR` with that window would show it. A window of a whole row is plain
training, so that one set of weights serves AR and every window.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.emoji import train_ar
from experiments.emoji.data import Drawings
from jaxspec.models.transformer import (
    Transformer,
    TransformerConfig,
    forced_layers,
    layer_shapes,
)
from jaxspec.training import TrainState, fit


@dataclass(frozen=True)
class WindowTraining(train_ar.ARTraining):
    """One target's further training.

    Attributes:
      windows: what batches have in turn, drawn evenly; one of more than a row's length
        counts as that.
    """

    windows: tuple[int, ...] = (1, 2, 4, 1024)


STAGES = {
    "zipar-128": WindowTraining(
        size=128, depth=5, steps=1500, batch=12, rate=3e-4, tags=0.2
    ),
    "zipar-256": WindowTraining(
        size=256, depth=5, steps=300, batch=12, rate=3e-4, tags=0.2
    ),
}


def drawn_in(grid: tuple[int, int], window: jax.Array) -> jax.Array:
    """The pass [N] in which `ZipAR(window)` draws each cell."""
    row, column = jnp.divmod(jnp.arange(grid[0] * grid[1]), grid[1])
    return column + row * jnp.minimum(window, grid[1])


def stand_ins(grid: tuple[int, int], window: jax.Array) -> jax.Array:
    """Whose tokens stand before the first cells [H - 1] of all rows but the first.

    The cell before, if it is there in time; else the latest in the row above that one,
    or in the first row itself.
    """
    (h, w), window = grid, jnp.minimum(window, grid[1])
    row = jnp.arange(1, h)
    behind = jnp.where(row == 1, window, jnp.minimum(2 * window, w))
    other = jnp.maximum(row - 2, 0) * w + behind - 1
    return jnp.where(window == w, row * w - 1, other)


def seen_by(grid: tuple[int, int], asked: np.ndarray, window: jax.Array) -> jax.Array:
    """Which cells but the last [M, N - 1] are there when cells `asked` [M] are drawn.

    The cell right before each is not among them: it is what is fed.
    """
    when, place = drawn_in(grid, window), jnp.arange(grid[0] * grid[1] - 1)
    there = when[None, :-1] < when[asked][:, None]
    return there & (place[None] < asked[:, None] - 1)


def forced_logits(
    config: TransformerConfig,
    params: Any,
    condition: jax.Array,
    tokens: jax.Array,
    window: jax.Array,
) -> jax.Array:
    """Logits [B, N, V] of each cell, given what `ZipAR(window)` has when it draws it.

    Args:
      config, params: of the transformer, its layers stacked; positions learned.
      condition: as for `Transformer.prefix`.
      tokens: int32 [B, N].
      window: int32 [B].
    """
    assert config.positions == "learned", "some inputs stand at other slots than theirs"
    p, n, grid = config.prefix_length, config.cells, config.grid
    ask: Any = lambda *x, method: Transformer(config).apply(params, *x, method=method)
    # An input for every cell but the first: the token before it. Rows' first cells have
    # another, with what stands in, that only they see.
    firsts = np.arange(1, grid[0]) * grid[1]
    asked = np.concatenate([np.arange(1, n), firsts])
    sources = jax.vmap(partial(stand_ins, grid))(window)
    before = jnp.take_along_axis(tokens, sources, axis=1)
    fed = jnp.concatenate([tokens[:, :-1], before], axis=1)
    fed = ask(fed, jnp.broadcast_to(asked - 1, fed.shape), method="embed")
    x = jnp.concatenate([ask(condition, method="prefix"), fed], axis=1)

    seen = jax.vmap(partial(seen_by, grid, asked))(window)
    seen = jnp.pad(seen, ((0, 0), (0, 0), (0, len(firsts))))
    seen |= jnp.eye(len(asked), dtype=bool)[None]
    seen = jnp.pad(seen, ((0, 0), (p, 0), (p, 0)), constant_values=True)
    seen = seen.at[:, :p].set(jnp.tri(p, seen.shape[2], dtype=bool))
    layers = {name: params["params"][name] for name in layer_shapes(config)}
    states = forced_layers(config, layers, x, seen, causal=False)[:, p - 1 :]
    where = np.arange(n)
    where[firsts] = n + np.arange(len(firsts))
    return ask(states[:, where], method="logits")


def make_batch(settings: WindowTraining, corpus, train: np.ndarray, step: int):
    """`train_ar`'s, and a window [B] for each drawing."""
    batch = train_ar.make_batch(settings, corpus, train, step)
    rng = np.random.default_rng((settings.seed, step, 2))
    return *batch, rng.choice(settings.windows, settings.batch).astype(np.int32)


def nats(config: TransformerConfig, params, batch) -> jax.Array:
    inputs, targets, condition, window = batch
    logits = forced_logits(config, params, condition, inputs, window)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_step(settings: WindowTraining, optimizer):
    def step(state: TrainState, batch):
        loss = partial(nats, settings.model, batch=batch)
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.update(grads, optimizer, settings.decay), {"loss": value}

    return step


def make_evaluate(settings: WindowTraining, target, corpus, drawings, count=64):
    """Nats a cell by window, and those of the target as it was, by AR's."""
    w = settings.model.grid[1]
    score = jax.jit(partial(nats, settings.model))
    many = lambda batch, window: np.full(len(batch[0]), window, np.int32)

    def evaluate(state: TrainState) -> dict[str, float]:
        def on(batch):
            found = {
                f"window_{x}": score(state.ema, (*batch, many(batch, x)))
                for x in sorted({min(x, w) for x in settings.windows})
            }
            return {"ar": score(target, (*batch, many(batch, w))), **found}

        return train_ar.on_splits(on, corpus, drawings, count)

    return evaluate


def train(
    settings: WindowTraining,
    target: dict,
    corpus: train_ar.Corpus,
    drawings: Drawings,
    folder: Path,
    save_every: int = 250,
) -> TrainState:
    """Trains a target's parameters further, into `folder`."""
    target = jax.tree.map(jnp.asarray, target)
    optimizer = train_ar.make_optimizer(settings)
    index = drawings.index("train")
    return fit(
        TrainState.create(jax.tree.map(jnp.array, target), optimizer),
        make_step(settings, optimizer),
        lambda step: make_batch(settings, corpus, index, step),
        steps=settings.steps,
        folder=folder,
        settings=asdict(settings),
        evaluate=make_evaluate(settings, target, corpus, drawings),
        save_every=save_every,
    )


__all__ = ["STAGES", "WindowTraining", "train"]
