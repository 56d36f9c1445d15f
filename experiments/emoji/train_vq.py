"""Training the emoji VQ: 8x8 pixels a code, 512 codes, one for all sizes.

Loss: L1, L2, L1 of picture gradients, L1 at half and quarter size, and L1 between
EfficientNet-Lite0 features (a perceptual term). Codes are learned by gradient, used
L2-normalised, and reset to encoder outputs when they fall out of use.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.emoji.data import Drawings
from jaxspec.evaluation import efficientnet
from jaxspec.models.vq import VQ, VQConfig, from_uint8, unit
from jaxspec.training import TrainState, fit

CONFIG = VQConfig(
    codebook_size=512,
    code_width=8,
    width=64,
    multipliers=(1, 2),
    encoder_blocks=1,
    decoder_blocks=1,
    latent_width=128,
    attention="none",
    norm="rms",
    resample="shuffle",
    patch=4,
    background=1.0,
)


@dataclass(frozen=True)
class VQTraining:
    model: VQConfig = field(default_factory=lambda: CONFIG)
    steps: int = 3600
    rate: float = 1.5e-3
    decay: float = 0.998
    perceptual: float = 0.04
    perceptual_pixels: int = 12 * 64 * 64  # a batch; the term is half of a step's cost
    seed: int = 0
    # (pixels, crop of 128 px or the whole drawing, batch), taken in turn
    cycle: tuple[tuple[int, bool, int], ...] = (
        (64, True, 32),
        (64, False, 32),
        (128, False, 8),
        (64, False, 32),
        (64, True, 32),
        (32, False, 64),
    )


def make_batch(settings: VQTraining, drawings: Drawings, step: int) -> np.ndarray:
    """uint8 [B, size, size, 3] of training drawings, half of them mirrored."""
    rng = np.random.default_rng((settings.seed, step))
    size, crop, count = settings.cycle[step % len(settings.cycle)]
    chosen = rng.choice(drawings.index("train"), count, replace=False)
    images = drawings.images[128 if crop else size][chosen]
    if crop:
        corner = rng.integers(0, 128 - size + 1, (count, 2))
        images = np.stack(
            [
                x[r : r + size, c : c + size]
                for x, (r, c) in zip(images, corner, strict=True)
            ]
        )
    mirrored = rng.random(count) < 0.5
    images[mirrored] = images[mirrored, :, ::-1]
    return images


def perceptual(got: jax.Array, want: jax.Array) -> jax.Array:
    """L1 between feature maps, each relative to the size of the wanted ones."""

    def scale(x):
        return (x * 127.5 + 0.5) / 128.0  # [-1, 1] to the network's range

    total = jnp.zeros(())
    a, b = (efficientnet.features(scale(x), 5)[1] for x in (got, want))
    for x, y in zip(a, b, strict=True):
        total += jnp.abs(x - y).mean() / (jnp.abs(y).mean() + 1e-3)
    return total


def half(x: jax.Array) -> jax.Array:
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).mean((2, 4))


def loss_fn(params, images, settings: VQTraining):
    model = VQ(settings.model)
    latents = unit(model.apply(params, images, method="latents"))
    tokens = model.apply(params, jax.lax.stop_gradient(latents), method="nearest")
    codes = model.apply(params, method="codes")
    chosen = codes[tokens]
    straight_through = latents + jax.lax.stop_gradient(chosen - latents)
    got = model.apply(params, straight_through, method="decode_latents")
    difference = got - images
    l1 = jnp.abs(difference).mean()
    gradients = [jnp.diff(difference, axis=axis) for axis in (1, 2)]
    commitment = jnp.square(latents - jax.lax.stop_gradient(chosen)).sum(-1).mean()
    codebook = jnp.square(jax.lax.stop_gradient(latents) - chosen).sum(-1).mean()
    loss = (
        l1
        + 0.5 * jnp.square(difference).mean()
        + 0.3 * sum(jnp.abs(g).mean() for g in gradients)
        + 0.5 * jnp.abs(half(difference)).mean()
        + 0.5 * jnp.abs(half(half(difference))).mean()
        + 0.5 * (codebook + 0.25 * commitment)
    )
    metrics = {"l1": l1, "commitment": commitment}
    size = images.shape[1]
    if settings.perceptual and size >= 64:
        count = max(2, settings.perceptual_pixels // size**2)
        term = perceptual(got[:count], images[:count])
        loss += settings.perceptual * term
        metrics["perceptual"] = term
    usage = jnp.zeros(settings.model.codebook_size).at[tokens.ravel()].add(1.0)
    return loss, (metrics, usage, latents)


def make_step(settings: VQTraining, optimizer: optax.GradientTransformation):
    def step(state: TrainState, images: jax.Array):
        images = from_uint8(images)
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (metrics, usage, latents)), grads = grad(state.params, images, settings)
        usage = 0.98 * state.extra + 0.02 * usage
        new = state.update(grads, optimizer, settings.decay, usage)
        return revive(settings, new, latents), {"loss": loss, **metrics}

    return step


def revive(settings: VQTraining, state: TrainState, latents: jax.Array) -> TrainState:
    """Now and then, moves codes that are out of use to random encoder outputs."""
    early = state.step < int(0.6 * settings.steps)
    due = (state.step % 50 == 0) & early
    dead = (state.extra < 0.5) & due
    key = jax.random.fold_in(jax.random.key(settings.seed), state.step)
    pool = latents.reshape(-1, latents.shape[-1])
    fresh = jax.random.choice(key, pool, (settings.model.codebook_size,))

    def move(tree):
        codebook = jnp.where(dead[:, None], fresh, tree["params"]["codebook"])
        return {"params": {**tree["params"], "codebook": codebook}}

    return TrainState(
        state.step,
        move(state.params),
        move(state.ema),
        state.opt_state,
        jnp.where(dead, 2.0, state.extra),
    )


def psnr(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Decibels of each picture, for pictures in [-1, 1]."""
    error = np.square(np.clip(got, -1, 1) - want).mean((1, 2, 3))
    return 10 * np.log10(4 / np.maximum(error, 1e-10))


def make_evaluate(settings: VQTraining, drawings: Drawings, split="val_concept"):
    model = VQ(settings.model)
    round_trip = jax.jit(lambda p, x: model.apply(p, x))

    def evaluate(state: TrainState) -> dict[str, float]:
        out = {}
        for size in (32, 64, 128):
            images = drawings.images[size][drawings.index(split)[:64]] / 127.5 - 1.0
            got = round_trip(state.ema, images.astype(np.float32))
            out[f"psnr_{size}"] = float(psnr(np.asarray(got), images).mean())
        out["codes_in_use"] = int((np.asarray(state.extra) > 0.05).sum())
        return out

    return evaluate


def train(settings: VQTraining, drawings: Drawings, folder: Path) -> TrainState:
    model = VQ(settings.model)
    params = jax.jit(model.init)(
        jax.random.key(settings.seed), jnp.zeros((1, 64, 64, 3))
    )
    warmup = min(50, settings.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.rate, warmup, settings.steps, 0.01 * settings.rate
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(schedule, b1=0.9, b2=0.99)
    )
    usage = jnp.full((settings.model.codebook_size,), 2.0)
    return fit(
        TrainState.create(params, optimizer, usage),
        make_step(settings, optimizer),
        lambda step: make_batch(settings, drawings, step),
        steps=settings.steps,
        folder=folder,
        settings=asdict(settings),
        evaluate=make_evaluate(settings, drawings),
        log_every=60,
        save_every=300,
    )
