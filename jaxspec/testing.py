"""Checks of decoding methods, for your tests too: is a method exact, is greedy AR's?

    >>> import jaxspec
    >>> from jaxspec.testing import exact_check
    >>> print(exact_check(jaxspec.SJD(window=3)))

A toy target is so small that every grid of tokens can be listed with its probability;
a method is exact if the grids that it draws come as often.
"""

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxspec.decoding import (
    Decoded,
    Method,
    Target,
    check_method,
    decode,
    describe,
)
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.sampling import Sampling, image_key

MOST_GRIDS = 100_000  # that are enumerated
FALSE_ALARM = 1e-6  # chance that `exact_check` fails an exact method

decode_jitted = jax.jit(decode)


# Toys.


def toy_config(
    grid: tuple[int, int],
    codes: int,
    width: int = 16,
    depth: int = 2,
    newline: bool = False,
) -> TransformerConfig:
    """A transformer small enough to draw from it tens of thousands of times.

    `grid` and `codes` are the picture's: a newline is one more column and code.
    """
    h, w = grid
    return TransformerConfig(
        vocab_size=codes + newline,
        width=width,
        depth=depth,
        heads=2,
        hidden=width * 3 // 2,
        grid=(h, w + newline),
        newline=newline,
        prefix="features",
        prefix_length=4,
        prefix_width=8,
        positions="learned",
    )


def random_weights(shapes: Any, seed: int = 0, dtype=jnp.float32) -> Any:
    """Random weights that keep the scale of what flows through; norms stay near one.

    Each token then moves the distribution of those that follow by much.
    """
    rng = np.random.default_rng(seed)

    def fill(path, x):
        if "norm" in jax.tree_util.keystr(path):
            return jnp.asarray(rng.uniform(0.5, 1.5, x.shape), dtype)
        scale = max(x.shape[-2:-1] + (1,)) ** -0.5
        return jnp.asarray(rng.normal(0, 1.5 * scale, x.shape), dtype)

    return jax.tree.map_with_path(fill, shapes)


def toy_params(config: TransformerConfig, seed: int = 0) -> Any:
    """Random parameters of a `toy_config`."""
    shapes = jax.eval_shape(
        Transformer(config).init,
        jax.random.key(0),
        jnp.zeros((1, config.prefix_length, config.prefix_width)),
        jnp.zeros((1, config.cells), jnp.int32),
    )
    return random_weights(shapes, seed)


def toy_conditions(config: TransformerConfig, batch: int, seed: int = 0) -> jax.Array:
    """Random conditions [B, P, prefix_width] of a `toy_config`."""
    rng = np.random.default_rng(seed)
    shape = (batch, config.prefix_length, config.prefix_width)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def toy_target(
    grid: tuple[int, int],
    codes: int,
    batch: int = 1,
    *,
    seed: int = 0,
    width: int = 16,
    depth: int = 2,
    newline: bool = False,
    **sampling,
) -> Target:
    """A tiny random transformer, conditioned; each image has a condition of its own.

    Args:
      grid: rows and columns of the picture.
      codes: number of its codes V; `codes ** cells` grids can be enumerated if they
        are at most 100,000.
      batch: images.
      seed: of the weights and conditions.
      width, depth: of the transformer.
      newline: rows end with a newline, a column and a code more.
      **sampling: as `Sampling.create` takes them: temperature, guidance, top_k ...
    """
    config = toy_config(grid, codes, width, depth, newline)
    return Target.create(
        Transformer(config),
        toy_params(config, seed),
        toy_conditions(config, batch, seed),
        Sampling.create(codes, **sampling),
        codes=toy_conditions(config, config.vocab_size)[:, 0, :2],
    )


def keys_of(batch: int, seed: int = 0) -> jax.Array:
    """Keys [B] of the first images of a prompt."""
    return jax.vmap(partial(image_key, seed, 0))(jnp.arange(batch))


def one_condition(target: Target, batch: int) -> Target:
    """A target whose images all show what the first one shows."""
    return target.of_images(lambda x: jnp.broadcast_to(x[:1], (batch, *x.shape[1:])))


# Exactness.


@dataclass(frozen=True)
class ExactCheck:
    """What `exact_check` found; prints as one line.

    Attributes:
      method: the method with its knobs.
      images: drawn.
      cells, grids: of an image, and how many different grids there are.
      distance: total variation between how often each grid came and its probability.
      threshold: what an exact method exceeds once in a million checks.
      passes: of the target with its prefill, mean over images; AR takes one a cell.
    """

    method: str
    images: int
    cells: int
    grids: int
    distance: float
    threshold: float
    passes: float

    @property
    def passed(self) -> bool:
        """No bias was seen; one much below the threshold would not be."""
        return self.distance <= self.threshold

    def __str__(self) -> str:
        return (
            f"{self.method}: {'exact' if self.passed else 'biased'}, "
            f"total variation {self.distance:.4f} of at most {self.threshold:.4f} by "
            f"chance, {self.passes:.2f} passes for {self.cells} cells "
            f"({self.images:,} images, {self.grids:,} grids)"
        )


def exact_check(
    method: Method,
    target: Target | None = None,
    *,
    images: int = 20_000,
    seed: int = 0,
) -> ExactCheck:
    """Whether a method draws every grid as often as the target's distribution says.

    All images are decoded as one batch, with keys of their own. The frequencies of the
    grids differ from the probabilities by chance: the mean of that total variation is
    at most half the sum of the standard deviations sqrt(p (1 - p) / images), and since
    one image moves it by 1 / images at most, it exceeds its mean by t with probability
    exp(-2 images t**2) (McDiarmid 1989). The threshold is where that is one in a
    million.

    Args:
      method: any; a drafter within, as in `Speculative`, has a batch of 1 too.
      target: with one condition and few grids; by default 3 codes on 2 by 3 cells.
      images: how many are drawn.
      seed: of the draws.

    Raises:
      ValueError: the target has more images than one or too many grids, or so few
        images are drawn that the check could not fail.
      RuntimeError: the method met a NaN, or left a cell undrawn.
    """
    check_method(method)
    target = toy_target((2, 3), 3) if target is None else target
    want = enumerate_grids(target)
    threshold = _noise(want, images)
    if threshold >= 1:
        raise ValueError(
            f"{images} images are too few to tell {len(want)} grids apart: take more"
        )

    def widen(x):
        return one_condition(x, images) if isinstance(x, Target) else x

    wide = jax.tree.map(widen, method, is_leaf=lambda x: isinstance(x, Target))
    out = decode_jitted(wide, widen(target), keys_of(images, seed))
    if (np.asarray(out.bad_pass) >= 0).any() or (np.asarray(out.final_pass) < 0).any():
        raise RuntimeError(f"{type(method).__name__} met a NaN, or left a cell undrawn")
    tokens = np.asarray(out.picture().tokens).reshape(images, -1)
    codes = target.grammar.codes(target.model.config.vocab_size)
    places = codes ** np.arange(tokens.shape[1])[::-1]
    got = np.bincount(tokens @ places, minlength=len(want)) / images
    return ExactCheck(
        method=_written(describe(method)),
        images=images,
        cells=tokens.shape[1],
        grids=len(want),
        distance=float(0.5 * np.abs(got - want).sum()),
        threshold=threshold,
        passes=float(np.mean(out.target_passes) + 1),
    )


def _written(x: Any) -> str:
    """A method as Python would make it, from what `describe` says."""
    if not isinstance(x, dict):
        return str(x)
    knobs = ", ".join(f"{k}={_written(v)}" for k, v in x.items() if k != "name")
    return f"{x['name']}({knobs})"


def _noise(p: np.ndarray, count: int) -> float:
    """What chance alone explains of the total variation (see `exact_check`)."""
    mean = 0.5 * np.sqrt(p * (1 - p) / count).sum()
    return float(mean + np.sqrt(np.log(1 / FALSE_ALARM) / (2 * count)))


def enumerate_grids(target: Target) -> np.ndarray:
    """The probability float64 [V**N] of every grid, as the settings make it.

    By teacher forcing, and guidance, temperature, top-k and top-p in plain numpy:
    nothing of how images are decoded is used. A grid's number has its tokens, in raster
    order, as digits to the base V. Newlines, and their code, are left out.

    Raises:
      ValueError: the target has more images than one, or more than 100,000 grids.
    """
    grammar, (h, w) = target.grammar, target.grammar.picture
    codes = grammar.codes(target.model.config.vocab_size)
    if target.batch != 1:
        raise ValueError(
            f"grids are enumerated for one condition, and the target has {target.batch}"
        )
    count = codes ** (h * w)
    if count > MOST_GRIDS:
        raise ValueError(
            f"{codes} codes on {h} by {w} cells make {count:,} grids; at "
            f"most {MOST_GRIDS:,} can be enumerated: take fewer codes or cells"
        )
    grids = np.array(list(product(range(codes), repeat=h * w)))
    if grammar.newline is not None:
        ends = np.full((count, h, 1), grammar.newline)
        grids = np.concatenate([grids.reshape(count, h, w), ends], axis=-1)
        grids = grids.reshape(count, -1)
    logits = _guided_logits(one_condition(target, count), grids)
    p = _probabilities(logits, target.sampling)
    return np.take_along_axis(p, grids[..., None], -1)[..., 0].prod(-1)


@jax.jit
def _forced(target: Target, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Teacher-forced logits [B, N, V] of grids [B, N], with the condition and null."""
    apply: Any = partial(target.model.apply, target.params)
    seen = target.prefix_visible
    null = target.null or (apply(target.condition, method="null"), seen)
    return apply(target.condition, tokens, seen), apply(null[0], tokens, null[1])


def _guided_logits(target: Target, tokens: np.ndarray) -> np.ndarray:
    """Teacher-forced logits [B, N, V] after guidance and grammar, float64."""
    forced = _forced(target, jnp.asarray(tokens))
    logits, null = (np.array(x, np.float64) for x in forced)
    scale, first = target.sampling.guidance, target.sampling.guided_cells
    guided = logits
    if scale is not None:
        each = np.full(logits.shape[1], float(scale))
        if target.sampling.ramp_cells is not None:
            risen = np.arange(len(each)) / float(target.sampling.ramp_cells)
            each = 1 + (each - 1) * np.minimum(risen, 1)
        guided = null + each[None, :, None] * (logits - null)
        if first is not None:
            guided[:, int(first) :] = logits[:, int(first) :]
    if target.grammar.newline is not None:
        h, w = target.grid
        rows = guided.reshape(-1, h, w, guided.shape[-1])  # a view
        rows[:, :, :-1, -1] = -np.inf
        rows[:, :, -1, :-1] = -np.inf
    return guided


def _probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What is drawn from, by the words of `Sampling` and not by its code."""
    if sampling.temperature is None:
        return np.eye(logits.shape[-1])[logits.argmax(-1)]
    logits = logits / float(sampling.temperature)
    if sampling.top_k is not None:
        least = np.sort(logits, -1)[..., -int(sampling.top_k), None]
        logits = np.where(logits < least, -np.inf, logits)
    if sampling.top_p is not None:
        down = -np.sort(-_softmax(logits), -1)
        kept = (down.cumsum(-1) - down <= float(sampling.top_p)).sum(-1, keepdims=True)
        least = np.take_along_axis(-np.sort(-logits, -1), np.maximum(kept, 1) - 1, -1)
        logits = np.where(logits < least, -np.inf, logits)
    return _softmax(logits)


def _softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


# Greedy decoding.


@dataclass(frozen=True)
class Divergence:
    """Where two greedy results part, and how close a call it was.

    Attributes:
      cell: int [B], the first cell in raster order with two codes; -1 if there is none.
      margin: float [B], how far the guided logit of either code lies below the highest
        one there, the larger of the two; 0 where nothing differs. If they are the two
        likeliest codes, it is the margin between those.
    """

    cell: np.ndarray
    margin: np.ndarray

    def explained(self, tolerance: float) -> bool:
        """Each image is equal, or differs first where both codes are as good as best.

        Rounding explains a difference of `tolerance` between logits; cells behind the
        first one have other contexts and tell nothing.
        """
        return bool(np.all(self.margin <= tolerance))

    def __str__(self) -> str:
        rows = np.flatnonzero(self.cell >= 0)
        if not rows.size:
            return f"all {len(self.cell)} images are equal"
        worst = rows[np.argmax(self.margin[rows])]
        return (
            f"{rows.size} of {len(self.cell)} images differ; image {worst} from cell "
            f"{self.cell[worst]} on, by a margin of {self.margin[worst]:.3g}"
        )


def divergence(
    a: Decoded | ArrayLike, b: Decoded | ArrayLike, target: Target
) -> Divergence:
    """Compares two greedy results of one target, image by image.

    Passes of different width round differently, so that equal methods may choose
    another code where two are nearly tied. The margin is found by teacher forcing with
    the tokens before the first difference.

    Args:
      a, b: tokens [B, H, W], or results with them.
      target: what both were decoded from, with its B conditions.

    Raises:
      ValueError: the shapes do not fit, or a token is no code.
    """
    shape, v = (target.batch, *target.grid), target.model.config.vocab_size
    flat = []
    for x in (a, b):
        tokens = np.asarray(x.tokens if isinstance(x, Decoded) else x)
        if tokens.shape != shape:
            raise ValueError(f"tokens must be {list(shape)}, not {list(tokens.shape)}")
        if tokens.min() < 0 or tokens.max() >= v:
            raise ValueError(f"tokens must be from 0 to {v - 1}")
        flat.append(tokens.reshape(len(tokens), -1))
    differs = flat[0] != flat[1]
    first, rows = differs.argmax(-1), np.arange(len(differs))
    logits = _guided_logits(target, flat[0])[rows, first]
    chosen = [logits[rows, tokens[rows, first]] for tokens in flat]
    margin = logits.max(-1) - np.minimum(*chosen)
    some = differs.any(-1)
    return Divergence(np.where(some, first, -1), np.where(some, margin, 0.0))


__all__ = [
    "Divergence",
    "ExactCheck",
    "divergence",
    "enumerate_grids",
    "exact_check",
    "keys_of",
    "one_condition",
    "toy_target",
]
