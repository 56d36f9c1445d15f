"""Training the emoji transformers: each size from the one below it.

Tricks of training that fold into a plain AR-DTok on export (`fold`): the token
embedding is a free table plus a linear map of the code vectors, the head likewise, and
a cell's position is a free vector plus one of its row and one of its column.

Growing a size copies everything, interpolates positions, and adds layers that start as
the identity.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.emoji.augment import TOLD, VARIANTS, Variants, name_colour
from experiments.emoji.codes import SLOTS, Codes, caption_pieces
from experiments.emoji.data import Drawings
from jaxspec.models.stacks import restack
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.text import PieceText
from jaxspec.training import TrainState, fit, load_params


def model_config(size: int, depth: int, text_width: int) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=512,
        width=192,
        depth=depth,
        heads=3,
        hidden=512,
        grid=(size // 8, size // 8),
        prefix="features",
        prefix_length=SLOTS,
        prefix_width=text_width,
        positions="learned",
    )


@dataclass(frozen=True)
class ARTraining:
    """One size's training.

    Attributes:
      batch: drawings a step, divisible by the number of devices.
      unconditional: share of captions left out, for guidance.
      dropout: of residual branches; one mask a drawing and channel, shared by all
        positions, which costs next to nothing.
      corruption: largest share of input tokens replaced by one of their 8 nearest
        codes; each drawing draws its own share below it.
      tags: share of captions followed by some of the drawing's tags.
      fall: share of the steps over which the rate falls, at their end.
      start: stage whose weights this one starts from; None is from scratch.
      variants: of the drawings, by kind (see `augment`); those that captions name last.
      told: share of drawings that are one of the others.
      named: share that are one of those named, where the drawing has one.
    """

    size: int
    depth: int
    steps: int
    batch: int
    rate: float
    decay: float = 0.998
    unconditional: float = 0.1
    dropout: float = 0.0
    corruption: float = 0.1
    tags: float = 0.3
    mirror: float = 0.5
    seed: int = 0
    text_width: int = 64
    fall: float = 0.3
    start: str | None = None
    variants: tuple[str, ...] = ()
    told: float = 0.0
    named: float = 0.0

    @property
    def model(self) -> TransformerConfig:
        return model_config(self.size, self.depth, self.text_width)


STAGES = {  # of each size the last is packaged
    "32": ARTraining(size=32, depth=2, steps=1600, batch=32, rate=2e-3),
    "64": ARTraining(size=64, depth=4, steps=4800, batch=16, rate=1.5e-3, start="32"),
    "128": ARTraining(size=128, depth=5, steps=6600, batch=12, rate=1.2e-3, start="64"),
    "128-varied": ARTraining(
        size=128,
        depth=5,
        steps=9000,
        batch=12,
        rate=1e-3,
        tags=0.2,
        mirror=0.0,
        start="128-long",
        variants=VARIANTS,
        told=0.3,
        named=0.3,
    ),
    "128-long": ARTraining(
        size=128,
        depth=5,
        steps=5500,
        batch=12,
        rate=9e-4,
        tags=0.2,
        mirror=0.0,
        fall=0.0,
        start="128",
    ),
    "256": ARTraining(
        size=256, depth=5, steps=2400, batch=12, rate=9e-4, tags=0.2, start="128-long"
    ),
}


@dataclass(frozen=True)
class Corpus:
    """What a batch is made of: drawings as codes, captions as vectors of pieces."""

    tokens: np.ndarray  # int16 [2, M, N]
    mirrors: np.ndarray  # bool [M]
    pieces: np.ndarray  # int32 [M, slots]
    tags: list  # [M] lists of lists of pieces
    table: np.ndarray  # float32 [V, text_width]
    nearest: np.ndarray  # int16 [codes, 8], each code's nearest others
    variants: Variants | None = None
    named: np.ndarray | None = None  # int32 [K, M, slots], pieces of variants named

    @staticmethod
    def create(
        drawings: Drawings,
        codes: Codes,
        text: PieceText,
        table: np.ndarray,
        codebook: np.ndarray,
    ) -> "Corpus":
        pieces, tags = caption_pieces(text, drawings)
        order = np.argsort(-codebook @ codebook.T, axis=1)
        return Corpus(
            codes.tokens,
            codes.mirrors,
            pieces,
            tags,
            table.astype(np.float32),
            order[:, 1:9].astype(np.int16),
        )

    def with_variants(
        self, variants: Variants, text: PieceText, drawings: Drawings
    ) -> "Corpus":
        """With variants of the drawings, and their captions where these name them."""
        named = np.tile(self.pieces, (len(variants.tokens), 1, 1))
        for k, i in np.argwhere(variants.colours != ""):
            label = name_colour(drawings.label[i], variants.colours[k, i])
            named[k, i] = text.pieces(f"{drawings.style[i]} {label}")
        return replace(self, variants=variants, named=named)

    def condition(self, pieces: np.ndarray) -> np.ndarray:
        return self.table[pieces]


def make_batch(settings: ARTraining, corpus: Corpus, train: np.ndarray, step: int):
    """Batch of a step: inputs, targets [B, N] and condition [B, slots, width]."""
    whole = len(train) - len(train) % settings.batch
    epoch, offset = divmod(step * settings.batch, whole)
    order = np.random.default_rng((settings.seed, epoch)).permutation(train)
    chosen = order[offset : offset + settings.batch]
    rng = np.random.default_rng((settings.seed, step, 1))
    mirrored = corpus.mirrors[chosen] & (rng.random(len(chosen)) < settings.mirror)
    targets = corpus.tokens[mirrored.astype(int), chosen].astype(np.int32)
    pieces = corpus.pieces[chosen].copy()
    told = choose_variants(settings, corpus, chosen, step, targets, pieces)
    inputs = corrupted(targets, corpus.nearest, settings.corruption, rng)
    for row, drawing in zip(pieces, chosen, strict=True):
        if rng.random() < settings.tags:
            append_tags(row, corpus.tags[drawing], rng)
    pieces[rng.random(len(chosen)) < settings.unconditional] = 0
    condition = corpus.condition(pieces)
    condition[told.any(-1), -1] = 0
    condition[:, -1, : told.shape[1]] += told
    return inputs.astype(np.int32), targets, condition


def corrupted(
    tokens: np.ndarray, nearest: np.ndarray, most: float, rng: np.random.Generator
) -> np.ndarray:
    """Tokens [B, ...], some of them replaced by one of their 8 nearest codes.

    Each drawing draws its own share below `most`.
    """
    share = rng.random((len(tokens), *[1] * (tokens.ndim - 1))) * most
    other = nearest[tokens, rng.integers(0, 8, tokens.shape)]
    return np.where(rng.random(tokens.shape) < share, other, tokens)


def choose_variants(
    settings: ARTraining, corpus: Corpus, chosen: np.ndarray, step: int, targets, pieces
) -> np.ndarray:
    """Puts variants of some drawings, and their captions, in place of these.

    Returns:
      What the transformer is told, float32 [B, TOLD]; of all but those told, zeros.
    """
    told = np.zeros((len(chosen), TOLD if corpus.variants else 0), np.float32)
    if corpus.variants is None:
        return told
    rng = np.random.default_rng((settings.seed, step, 2))
    named = sum(kind.endswith("named") for kind in settings.variants)
    others = len(settings.variants) - named
    for row, drawing in enumerate(chosen):
        kind = rng.random()
        if kind < settings.told:
            k = rng.integers(others)
        elif kind < settings.told + settings.named:
            k = others + rng.integers(named)
        else:
            continue
        targets[row] = corpus.variants.tokens[k, drawing]
        pieces[row] = corpus.named[k, drawing]
        told[row] = corpus.variants.told[k, drawing]
    return told


def on_splits(
    score: Callable, corpus: Corpus, drawings: Drawings, count: int
) -> dict[str, float]:
    """What `score` finds on drawings of `train` and `val_concept`, by split and name.

    `score` takes a batch as `make_batch` makes it, and returns numbers by name.
    """
    out = {}
    for split in ("train", "val_concept"):
        chosen = np.random.default_rng(0).permutation(drawings.index(split))[:count]
        tokens = corpus.tokens[0, chosen].astype(np.int32)
        condition = corpus.condition(corpus.pieces[chosen])
        found = score((tokens, tokens, condition))
        out |= {f"{split}_{k}": round(float(x), 4) for k, x in found.items()}
    return out


def append_tags(row: np.ndarray, tags: list, rng: np.random.Generator) -> None:
    """Fills free slots of a caption with one to three of its tags, in place."""
    if not tags:
        return
    free = int(np.count_nonzero(row))
    for i in rng.permutation(len(tags))[: rng.integers(1, 4)]:
        ids = tags[i][: len(row) - free]
        row[free : free + len(ids)] = ids
        free += len(ids)


# Parameters as trained, and as exported.


def init(settings: ARTraining, code_width: int) -> dict:
    """Parameters as trained: the transformer's own, and the parts folded into them."""
    config = settings.model
    key = jax.random.key(settings.seed)
    n = config.cells
    model = jax.jit(Transformer(config).init)(
        key,
        jnp.zeros((1, SLOTS, config.prefix_width)),
        jnp.zeros((1, n), jnp.int32),
    )["params"]

    def normal(i, *shape):
        return 0.02 * jax.random.normal(jax.random.fold_in(key, i), shape)

    scale = (2 * config.depth) ** -0.5  # of what is added to the residual stream
    for name in ("attention_out", "down"):
        model[name] = model[name] * scale
    return {
        "model": model,
        "embed_code": normal(1, code_width, config.width),
        "head_code": normal(2, config.width, code_width),
        "row": normal(3, config.grid[0], config.width),
        "column": normal(4, config.grid[1], config.width),
    }


def fold(config: TransformerConfig, params: dict, codebook: jax.Array) -> dict:
    """The plain transformer's parameters; `codebook` [V, code_width] is unit-norm."""
    model = params["model"]
    cells = params["row"][:, None] + params["column"][None]
    cells = cells.reshape(-1, config.width)[:-1]  # the last cell is never fed
    prefix = jnp.zeros((config.prefix_length, config.width))
    position = jnp.concatenate([prefix, cells])
    folded = {
        "token_embedding": model["token_embedding"] + codebook @ params["embed_code"],
        "head": model["head"] + params["head_code"] @ codebook.T,
        "position_embedding": model["position_embedding"] + position,
    }
    return {"params": {**model, **folded}}


def unfold(config: TransformerConfig, folded: dict, codebook: np.ndarray) -> dict:
    """Parameters as trained, of a plain transformer: `fold` makes the same of them.

    The parts folded in are as large as they can be, by least squares.
    """
    model = {k: np.asarray(x, np.float32) for k, x in restack(folded)["params"].items()}
    p, (h, w), table = config.prefix_length, config.grid, model["position_embedding"]
    cells = np.concatenate([table[p:], table[-1:]]).reshape(h, w, -1)
    row, column = cells.mean(1), cells.mean(0) - cells.mean((0, 1))
    cells = (cells - row[:, None] - column).reshape(h * w, -1)[:-1]
    inverse = np.linalg.pinv(codebook)
    embed, head = inverse @ model["token_embedding"], model["head"] @ inverse.T
    rest = {
        "token_embedding": model["token_embedding"] - codebook @ embed,
        "head": model["head"] - head @ codebook.T,
        "position_embedding": np.concatenate([table[:p], cells]),
    }
    return {
        "model": model | rest,
        "embed_code": embed,
        "head_code": head,
        "row": row,
        "column": column,
    }


def load_decoder(folder: Path, stage: str, codebook) -> dict:
    """The plain transformer that a stage trained in `folder` (see `fold`)."""
    return fold(STAGES[stage].model, load_params(folder / stage), codebook)


def grow(small: dict, config: TransformerConfig, start: dict) -> dict:
    """Parameters of a larger grid and more layers, from a smaller model's."""

    def resize(x, shape):
        return jax.image.resize(x, (*shape, x.shape[-1]), "linear")

    model = {k: v for k, v in small["model"].items()}
    p, (h, w) = config.prefix_length, config.grid
    old = small["row"].shape[0], small["column"].shape[0]
    table = model["position_embedding"]
    cells = jnp.concatenate([table[p:], table[-1:]]).reshape(*old, -1)
    cells = resize(cells, (h, w)).reshape(h * w, -1)[:-1]
    model["position_embedding"] = jnp.concatenate([table[:p], cells])
    extra = config.depth - len(model["qkv"])
    for name in ("attention_norm", "qkv", "ffn_norm", "gate_up"):
        model[name] = jnp.concatenate([model[name], model[name][-1:].repeat(extra, 0)])
    for name in ("attention_out", "down"):  # a new layer adds nothing at first
        zero = jnp.zeros((extra, *model[name].shape[1:]))
        model[name] = jnp.concatenate([model[name], zero])
    grown = {
        **small,
        "model": model,
        "row": resize(small["row"], (h,)),
        "column": resize(small["column"], (w,)),
    }
    same = jax.tree.map(lambda a, b: a.shape == b.shape, grown, start)
    assert all(jax.tree.leaves(same)), "a grown model has the shapes of a new one"
    return grown


# Loss and steps.


def nats(config: TransformerConfig, params, inputs, targets, condition, drop=None):
    """Mean negative log-likelihood of each drawing [B], in nats a token."""
    logits = Transformer(config).apply(params, condition, inputs, drop=drop)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return loss.mean(-1)


def make_drop(key: jax.Array, rate: float):
    """Dropout of residual branches, one mask for all positions of a drawing."""
    if rate == 0:
        return None

    def drop(layer, branch, h):
        k = jax.random.fold_in(jax.random.fold_in(key, layer), branch)
        kept = jax.random.bernoulli(k, 1 - rate, (h.shape[0], 1, h.shape[-1]))
        return h * kept / (1 - rate)

    return drop


def make_step(settings: ARTraining, codebook, optimizer):
    config = settings.model

    def step(state: TrainState, batch):
        inputs, targets, condition = batch
        key = jax.random.fold_in(jax.random.key(settings.seed + 1), state.step)

        def loss(params):
            folded = fold(config, params, codebook)
            drop = make_drop(key, settings.dropout)
            return nats(config, folded, inputs, targets, condition, drop).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.update(grads, optimizer, settings.decay), {"loss": value}

    return step


def make_optimizer(settings: ARTraining) -> optax.GradientTransformation:
    """AdamW under warm-up, a constant rate, and a linear fall at the end.

    Until the fall begins, a run does not depend on its number of steps: it can be made
    longer or shorter.
    """
    warm = max(1, min(100, settings.steps // 16))
    fall = settings.fall * settings.steps

    def schedule(step):
        left = jnp.minimum(1.0, (settings.steps - step) / max(fall, 1.0))
        return settings.rate * jnp.minimum(1.0, step / warm) * (0.02 + 0.98 * left)

    def matrices(params):
        return jax.tree.map_with_path(
            lambda path, x: x.ndim >= 2 and "norm" not in jax.tree_util.keystr(path),
            params,
        )

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.05, mask=matrices),
    )


def caption_kinds(pieces: np.ndarray) -> dict[str, np.ndarray]:
    """Pieces [n, slots] of drawings' captions: their own, another's, and none."""
    return {
        "true": pieces,
        "shuffled": np.roll(pieces, len(pieces) // 2, axis=0),
        "null": np.zeros_like(pieces),
    }


def make_evaluate(settings: ARTraining, corpus: Corpus, drawings, codebook, count=64):
    """Nats a token on drawings of `train` and `val_concept`, by kind of caption."""
    config = settings.model
    score = jax.jit(lambda p, t, c: nats(config, fold(config, p, codebook), t, t, c))

    def evaluate(state: TrainState) -> dict[str, float]:
        out = {}
        for split in ("train", "val_concept"):
            index = drawings.index(split)
            chosen = np.random.default_rng(0).permutation(index)[:count]
            tokens = corpus.tokens[0, chosen].astype(np.int32)
            for kind, pieces in caption_kinds(corpus.pieces[chosen]).items():
                value = score(state.ema, tokens, corpus.condition(pieces)).mean()
                out[f"{split}_{kind}"] = round(float(value), 4)
        return out

    return evaluate


def train(
    settings: ARTraining,
    corpus: Corpus,
    drawings: Drawings,
    codebook: np.ndarray,
    folder: Path,
    smaller: dict | None = None,
    save_every: int = 500,
) -> TrainState:
    """Trains one size into `folder`, from a smaller one's parameters if given."""
    params = init(settings, codebook.shape[1])
    if smaller is not None:
        params = grow(smaller, settings.model, params)
    optimizer = make_optimizer(settings)
    index = drawings.index("train")
    return fit(
        TrainState.create(params, optimizer),
        make_step(settings, jnp.asarray(codebook), optimizer),
        lambda step: make_batch(settings, corpus, index, step),
        steps=settings.steps,
        folder=folder,
        settings=asdict(settings),
        evaluate=make_evaluate(settings, corpus, drawings, codebook),
        save_every=save_every,
    )


__all__ = ["STAGES", "ARTraining", "Corpus", "fold", "grow", "train"]
