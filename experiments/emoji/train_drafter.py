"""Training EAGLE's drafter on a frozen target of the emoji family.

As EAGLE and LANTERN train it: the drafter is shown the target's features of a drawing
and the drawing's tokens, one on, and learns the feature of each (smooth L1) and what
the target's head makes of it (cross-entropy to the target's own distribution). Captions
are left out now and then, so that it drafts the unguided rows too, and features are
disturbed, since later drafts stand on the drafter's own.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from experiments.emoji import train_ar
from experiments.emoji.data import Drawings
from jaxspec.decoding import ACCEPTED, Target
from jaxspec.methods.eagle import EAGLE2
from jaxspec.models.drafter import Eagle, EagleHead, eagle_config
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.pipeline import Pipeline
from jaxspec.sampling import image_keys
from jaxspec.training import TrainState, fit

PROMPTS = ("red heart", "house", "cat", "smiling face", "tree", "pizza", "car", "book")


@dataclass(frozen=True)
class DrafterTraining(train_ar.ARTraining):
    """One drafter's training; `size` is the target's.

    Attributes:
      hidden: of the drafter's feed-forward layer.
      noise: features are disturbed by so much, evenly up and down.
      tokens: weight of the cross-entropy, beside that of the features.
    """

    hidden: int = 512
    noise: float = 0.1
    tokens: float = 1.0


STAGES = {
    "drafter": DrafterTraining(
        size=128,
        depth=5,
        steps=750,
        batch=8,
        rate=2e-3,
        unconditional=0.25,
        corruption=0.0,
    ),
    "drafter-256": DrafterTraining(
        size=256,
        depth=5,
        steps=300,
        batch=4,
        rate=1e-3,
        unconditional=0.25,
        corruption=0.0,
        start="drafter",
    ),
}


def forced(config: TransformerConfig, params, tokens, condition):
    """The target's features [B, P + N - 1, C] of drawings."""
    model = Transformer(config)
    states = model.apply(params, condition, tokens, method="forced")
    return model.apply(params, states, method="features")


def drafted(eagle: Eagle, features, tokens, noise=0.0):
    """The drafter's features [B, N - 1, C] of all cells but the last.

    `features` are the target's of all slots; `noise` is added to those that are shown.
    """
    p = eagle.config.prefix_length
    before = jnp.pad(tokens[:, :-1], ((0, 0), (p, 0)))
    shown = features[:, :-1] + noise
    return EagleHead(eagle.config).apply(eagle.params, shown, before)[:, p:]


def compare(target: TransformerConfig, params, eagle: Eagle, batch, noise=0.0):
    """Losses of the features and of the tokens, and how often the likeliest agree."""
    _, tokens, condition = batch
    features = jax.lax.stop_gradient(forced(target, params, tokens, condition))
    guess = drafted(eagle, features, tokens, noise)
    wanted = features[:, target.prefix_length :]
    read = lambda x: Transformer(target).apply(params, x, method="read_out")
    logits, own = read(wanted), read(guess)
    return {
        "features": optax.huber_loss(guess, wanted).mean(),
        "tokens": optax.softmax_cross_entropy(own, jax.nn.softmax(logits)).mean(),
        "top_1": jnp.mean(jnp.argmax(own, -1) == jnp.argmax(logits, -1)),
    }


def init(settings: DrafterTraining, target: TransformerConfig, params) -> Eagle:
    """A new drafter, with the target's embeddings of the codes."""
    config = eagle_config(target, settings.hidden)
    c = config.width
    new = EagleHead(config).init(
        jax.random.key(settings.seed),
        jnp.zeros((1, 1, c)),
        jnp.zeros((1, 1), jnp.int32),
    )["params"]
    # A copy: what a step is given is donated.
    new |= {"token_embedding": jnp.array(params["params"]["token_embedding"])}
    # At first, what it says of a token is the feature that stands before it.
    new |= {"join": new["join"].at[c:].add(jnp.eye(c))}
    return Eagle({"params": new}, config)


def grown(smaller: dict, new: Eagle) -> Eagle:
    """`new`, with what a drafter of a smaller grid has learned; all but embeddings."""
    kept = ("token_embedding", "position_embedding")
    learned = {k: x for k, x in smaller["params"].items() if k not in kept}
    return Eagle({"params": new.params["params"] | learned}, new.config)


def make_step(settings: DrafterTraining, target, params, config, optimizer):
    def step(state: TrainState, batch):
        key = jax.random.fold_in(jax.random.key(settings.seed + 1), state.step)
        p, n = target.prefix_length, target.cells
        shape = (len(batch[1]), p + n - 2, target.width)
        noise = jax.random.uniform(key, shape, minval=-1, maxval=1) * settings.noise

        def loss(eagle):
            found = compare(target, params, Eagle(eagle, config), batch, noise)
            return found["features"] + settings.tokens * found["tokens"], found

        (value, found), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = state.update(grads, optimizer, settings.decay)
        return state, {"loss": value, **found}

    return step


def on_prompts(pipeline: Pipeline, size: int) -> tuple[Target, jax.Array]:
    """The family's target for `PROMPTS`, with its default settings, and their keys."""
    defaults = pipeline.config.defaults
    sampling = jaxspec.Sampling.create(
        pipeline.config.vq.codebook_size,
        guidance=defaults.guidance,
        temperature=defaults.temperature,
        top_k=defaults.top_k,
        top_p=defaults.top_p,
    )
    condition = jnp.asarray(pipeline.condition(list(PROMPTS)))
    keys = image_keys(0, np.arange(len(PROMPTS)), np.zeros(len(PROMPTS)))
    return pipeline.target(condition, sampling, size), keys


def make_evaluate(settings: DrafterTraining, pipeline, corpus, drawings, config):
    """On drawings of `train` and `val_concept`, and in decoding `PROMPTS`."""
    target, keys = on_prompts(pipeline, settings.size)
    score = jax.jit(
        lambda params, eagle, batch: compare(
            target.model.config, params, Eagle(eagle, config), batch
        )
    )
    decode = jax.jit(jaxspec.decode)

    def evaluate(state: TrainState) -> dict[str, float]:
        eagle = jax.device_get(state.ema)
        on = partial(score, target.params, eagle)
        out = train_ar.on_splits(on, corpus, drawings, count=32)
        for name, method in {
            "chain": EAGLE2(Eagle(eagle, config), 5, 1, 5),
            "tree": EAGLE2(Eagle(eagle, config), 4, 8, 24),
        }.items():
            made = decode(method, target, keys)
            kept = float(made.count(ACCEPTED).sum() / made.target_passes.sum())
            out[f"{name}_kept_a_pass"] = round(kept, 4)
        return out

    return evaluate


def train(
    settings: DrafterTraining,
    pipeline: Pipeline,
    corpus: train_ar.Corpus,
    drawings: Drawings,
    folder: Path,
    smaller: dict | None = None,
    save_every: int = 125,
) -> TrainState:
    """Trains a drafter of the family's model of a size into `folder`.

    With `smaller`, parameters of a drafter of a smaller size, it goes on from these.
    """
    target = dict(pipeline.config.decoders)[settings.size]
    params = jax.tree.map(jnp.asarray, pipeline.params["decoders"][str(settings.size)])
    eagle = init(settings, target, params)
    if smaller is not None:
        eagle = grown(smaller, eagle)
    optimizer = train_ar.make_optimizer(settings)
    index = drawings.index("train")
    return fit(
        TrainState.create(eagle.params, optimizer),
        make_step(settings, target, params, eagle.config, optimizer),
        lambda step: train_ar.make_batch(settings, corpus, index, step),
        steps=settings.steps,
        folder=folder,
        settings=asdict(settings),
        evaluate=make_evaluate(settings, pipeline, corpus, drawings, eagle.config),
        save_every=save_every,
    )


__all__ = ["STAGES", "DrafterTraining", "train"]
