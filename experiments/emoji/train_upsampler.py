"""Training the networks that enlarge code grids and make them small again.

Pairs are the codes of a drawing at two sizes. The ladder of MuLo-SD's ablation (Peruzzo
et al. 2026, arXiv 2601.05149) is weights of the loss, and a stage a step: cross-entropy
of codes; squared error of pixels behind the VQ decoder, with a perceptual term and one
that keeps what is made near to codes ("-pixels"); and a patch discriminator
("-patches").
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.emoji import train_vq
from experiments.emoji.codes import Codes
from experiments.emoji.data import Drawings
from experiments.emoji.train_ar import corrupted
from jaxspec.models.upsampler import Resampler, UpsamplerConfig
from jaxspec.models.vq import VQ, VQConfig, from_uint8, nearest, unit
from jaxspec.neighbours import nearest_codes
from jaxspec.training import TrainState, fit


@dataclass(frozen=True)
class UpsamplerTraining:
    """One network's training.

    Attributes:
      source, wanted: sizes in pixels, before and after.
      batch: drawings a step, divisible by the number of devices.
      corruption: largest share of codes that come in as one of their 8 nearest; each
        drawing draws its own share below it.
      tokens: weight of the cross-entropy of codes, whose logits are squared distances
        to what the network makes, times a trained factor.
      pixels: weight of the squared error of pixels behind the VQ decoder.
      perceptual: weight of the distance of features there.
      features: the VQ's own encoder, or EfficientNet-Lite0 as in the VQ's training.
      commitment: weight of the squared distance to the code that it becomes.
      patches: weight of what a patch discriminator, trained beside, says.
      start: stage whose weights this one starts from; None is from scratch.
    """

    source: int
    wanted: int
    steps: int
    batch: int
    rate: float
    row_causal: bool = True
    decay: float = 0.998
    corruption: float = 0.1
    tokens: float = 1.0
    pixels: float = 0.0
    perceptual: float = 0.0
    features: Literal["vq", "efficientnet"] = "vq"
    commitment: float = 0.0
    patches: float = 0.0
    seed: int = 0
    start: str | None = None

    @property
    def model(self) -> UpsamplerConfig:
        direction = "up" if self.source < self.wanted else "down"
        return UpsamplerConfig(
            train_vq.CONFIG.code_width, direction, row_causal=self.row_causal
        )

    @property
    def sees_pictures(self) -> bool:
        return bool(self.pixels or self.perceptual or self.patches)


codes_alone = partial(UpsamplerTraining, steps=700, batch=64, rate=4e-3)
pictures = partial(
    UpsamplerTraining,
    steps=600,
    batch=12,
    rate=3e-4,
    tokens=0.0,
    pixels=10.0,
    perceptual=1.0,
    commitment=0.25,
)
STAGES = {
    "upsampler-64-128": codes_alone(64, 128),
    "downsampler-128-64": codes_alone(128, 64, steps=400),
    "upsampler-128-256": codes_alone(
        128, 256, steps=300, batch=16, rate=1e-3, start="upsampler-64-128"
    ),
    "upsampler-64-128-pixels": pictures(64, 128, start="upsampler-64-128"),
    "upsampler-64-128-patches": pictures(
        64, 128, patches=0.1, start="upsampler-64-128-pixels"
    ),
}


@dataclass(frozen=True)
class Pairs:
    """Drawings at two sizes, M of them, each with its mirror image.

    Attributes:
      source, wanted: int16 [2, M, rows, columns], codes.
      images: uint8 [M, size, size, 3], of the size wanted; None if nobody looks.
      nearest: int32 [V, 8], each code's nearest others.
    """

    source: np.ndarray
    wanted: np.ndarray
    images: np.ndarray | None
    nearest: np.ndarray

    @staticmethod
    def create(
        settings: UpsamplerTraining,
        codes: tuple[Codes, Codes],
        drawings: Drawings,
        codebook: jax.Array,
    ) -> "Pairs":
        shape = (*codes[0].tokens.shape[:2], -1)
        source, wanted = (
            x.tokens.reshape(*shape, size // train_vq.CONFIG.factor)
            for x, size in zip(codes, (settings.source, settings.wanted), strict=True)
        )
        images = drawings.images[settings.wanted] if settings.sees_pictures else None
        near = np.asarray(nearest_codes(codebook, 9))[:, 1:]
        return Pairs(source, wanted, images, near)


def make_batch(
    settings: UpsamplerTraining, pairs: Pairs, train: np.ndarray, step: int
) -> dict[str, np.ndarray]:
    """Batch of a step: codes `source` and `wanted`, and `images` if anyone looks."""
    rng = np.random.default_rng((settings.seed, step))
    chosen = rng.choice(train, settings.batch, replace=False)
    mirrored = rng.random(settings.batch) < 0.5
    source, wanted = (
        x[mirrored.astype(int), chosen].astype(np.int32)
        for x in (pairs.source, pairs.wanted)
    )
    out = {
        "source": corrupted(source, pairs.nearest, settings.corruption, rng),
        "wanted": wanted,
    }
    if pairs.images is not None:
        images = pairs.images[chosen]
        images[mirrored] = images[mirrored, :, ::-1]
        out["images"] = images
    return out


# The loss.


class Discriminator(nn.Module):
    """PatchGAN (Isola et al. 2017): of overlapping patches, which are of a drawing."""

    widths: tuple[int, ...] = (32, 64, 128)

    @nn.compact
    def __call__(self, x):
        for i, width in enumerate(self.widths):
            x = nn.Conv(width, (4, 4), strides=(2, 2), name=f"conv_{i}")(x)
            x = nn.leaky_relu(x if i == 0 else nn.RMSNorm(name=f"norm_{i}")(x), 0.2)
        return nn.Conv(1, (4, 4), name="out")(x)


@dataclass(frozen=True)
class Tokenizer:
    """The VQ, as the loss needs it; `codes` is its codebook as it is used."""

    config: VQConfig
    params: Any
    codes: jax.Array

    def apply(self, x: jax.Array, method: str) -> jax.Array:
        out: Any = VQ(self.config).apply(self.params, x, method=method)
        return out

    def features(self, images: jax.Array) -> jax.Array:
        return unit(self.apply(images, "latents"))


def logits(params, latents: jax.Array, codes: jax.Array) -> jax.Array:
    """-|z - e|^2 of each code, times the factor; without |z|^2, which all have."""
    distance = jnp.broadcast_to(
        jnp.sum(codes**2, -1), (*latents.shape[:-1], len(codes))
    )
    return jnp.exp(params["log_factor"]) * (2 * latents @ codes.T - distance)


def loss_fn(params, batch, settings: UpsamplerTraining, vq: Tokenizer, discriminator):
    """The loss, its parts, and the pictures made (None if nobody looks)."""
    codes = vq.codes
    latents: Any = Resampler(settings.model).apply(
        params["network"], codes[batch["source"]]
    )
    tokens = jax.lax.stop_gradient(nearest(latents, codes))
    parts = {"right": (tokens == batch["wanted"]).mean()}
    loss, got = jnp.zeros(()), None
    if settings.tokens:
        parts["tokens"] = optax.softmax_cross_entropy_with_integer_labels(
            logits(params, latents, codes), batch["wanted"]
        ).mean()
    if settings.sees_pictures:
        images = from_uint8(batch["images"])
        latents = unit(latents) if vq.config.normalize_codes else latents
        away = jax.lax.stop_gradient(codes[tokens]) - latents
        parts["commitment"] = jnp.square(away).sum(-1).mean()
        straight_through = latents + jax.lax.stop_gradient(away)
        got = vq.apply(straight_through, "decode_latents")
        parts["pixels"] = jnp.square(got - images).mean()
        if settings.perceptual and settings.features == "efficientnet":
            parts["perceptual"] = train_vq.perceptual(got, images)
        elif settings.perceptual:
            gap = vq.features(got) - vq.features(images)
            parts["perceptual"] = jnp.square(gap).sum(-1).mean()
        if settings.patches:
            parts["patches"] = -Discriminator().apply(discriminator, got).mean()
    for name in ("tokens", "pixels", "perceptual", "commitment", "patches"):
        loss += getattr(settings, name) * parts.get(name, 0.0)
    return loss, (parts, got)


def discriminator_loss(params, got: jax.Array, images: jax.Array) -> jax.Array:
    """Hinge: drawings above 1, what was made below -1."""
    real, made = (Discriminator().apply(params, x) for x in (images, got))
    return nn.relu(1 - real).mean() + nn.relu(1 + made).mean()


# Steps.


def make_optimizer(settings: UpsamplerTraining) -> optax.GradientTransformation:
    warmup = max(1, min(50, settings.steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.rate, warmup, settings.steps, 0.02 * settings.rate
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(schedule, b1=0.9, b2=0.99)
    )


def make_step(settings: UpsamplerTraining, vq: Tokenizer, optimizer):
    """`extra` of the state is the discriminator and its optimiser's state, or ()."""

    def step(state: TrainState, batch):
        extra = state.extra
        opponent = extra[0] if settings.patches else None
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (parts, got)), grads = grad(state.params, batch, settings, vq, opponent)
        if settings.patches:
            its_grad = jax.value_and_grad(discriminator_loss)
            images = from_uint8(batch["images"])
            parts["discriminator"], its_grads = its_grad(opponent, got, images)
            updates, opt_state = optimizer.update(its_grads, extra[1], opponent)
            extra = optax.apply_updates(opponent, updates), opt_state
        new = state.update(grads, optimizer, settings.decay, extra)
        return new, {"loss": loss, **parts}

    return step


def make_evaluate(settings, pairs: Pairs, vq: Tokenizer, drawings: Drawings, count=128):
    """On drawings of `val_concept`: codes that are right, or next to right."""
    chosen = np.random.default_rng(0).permutation(drawings.index("val_concept"))[:count]
    source, wanted = (
        jnp.asarray(x[0, chosen], jnp.int32) for x in (pairs.source, pairs.wanted)
    )
    near = nearest_codes(vq.codes, 16)

    @jax.jit
    def score(params):
        latents: Any = Resampler(settings.model).apply(
            params["network"], vq.codes[source]
        )
        tokens = nearest(latents, vq.codes)
        agree = near[tokens] == wanted[..., None]
        return agree[..., 0].mean(), agree.any(-1).mean()

    def evaluate(state: TrainState) -> dict[str, float]:
        right, almost = score(state.ema)
        return {"val_right": float(right), "val_within_16": float(almost)}

    return evaluate


def init(settings: UpsamplerTraining) -> dict:
    side = settings.source // train_vq.CONFIG.factor
    shape = (1, side, side, settings.model.code_width)
    network = jax.jit(Resampler(settings.model).init)(
        jax.random.key(settings.seed), jnp.zeros(shape)
    )
    return {"network": network, "log_factor": jnp.log(5.0)}


def judge(settings: UpsamplerTraining, optimizer: optax.GradientTransformation) -> Any:
    """The discriminator's parameters and its optimiser's state, or ()."""
    if not settings.patches:
        return ()
    picture = jnp.zeros((1, settings.wanted, settings.wanted, 3))
    params = jax.jit(Discriminator().init)(jax.random.key(settings.seed), picture)
    return params, optimizer.init(params)


def train(
    settings: UpsamplerTraining,
    codes: tuple[Codes, Codes],
    drawings: Drawings,
    vq: VQConfig,
    vq_params: Any,
    folder: Path,
    start: dict | None = None,
) -> TrainState:
    """Trains one network into `folder`, from another's parameters if given.

    Args:
      settings: of the run.
      codes: of the drawings, at the size `source` and at the size `wanted`.
      drawings: at both sizes.
      vq: the tokenizer's configuration.
      vq_params: its parameters.
      folder: see `fit`.
      start: what an earlier run's `load_params` gives.
    """
    codebook = jnp.asarray(VQ(vq).apply(vq_params, method="codes"))
    tokenizer = Tokenizer(vq, vq_params, codebook)
    pairs = Pairs.create(settings, codes, drawings, codebook)
    optimizer = make_optimizer(settings)
    extra = judge(settings, optimizer)
    params = init(settings) if start is None else start
    index = drawings.index("train")
    return fit(
        TrainState.create(jax.tree.map(jnp.asarray, params), optimizer, extra),
        make_step(settings, tokenizer, optimizer),
        lambda step: make_batch(settings, pairs, index, step),
        steps=settings.steps,
        folder=folder,
        settings=asdict(settings),
        evaluate=make_evaluate(settings, pairs, tokenizer, drawings),
        save_every=100,
    )


__all__ = ["STAGES", "UpsamplerTraining", "train"]
