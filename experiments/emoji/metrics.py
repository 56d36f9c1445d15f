"""How well pictures match their words, and how much they look like real drawings.

All measures use pooled EfficientNet-Lite0 features of pictures of 128 px (smaller ones
are enlarged first). They compare runs of this family with each other, nothing else.

Text match ("emoji-CLIP"): a ridge regression from features of the real *train* drawings
at 128 px to MiniLM's unit vectors of their labels (the label alone, "red heart", no
style, no "emoji of"), both centred on train. Its strength, of half decades, is the one
with the highest mean cosine on val_concept. A picture's score with a label is the
cosine between the predicted and the label's centred vectors. R@k is the chance that a
picture's own label is among its k best, of the distinct labels of the evaluated set;
ties are broken at random, in expectation: a constant score gives k / candidates. Real
drawings: R@1 0.38, R@5 0.63, cosine 0.40 on 300 of test_pair (235 labels); 0.62, 0.87
and 0.52 on 300 of train (278 labels), which the regression has seen.

Frechet distance: between normal distributions fitted to features projected on their
first 64 principal components on train (65 % of the variance), so that 300 pictures
suffice. It is biased upwards, to 36 for two independent sets of 300 train drawings:
compare equal counts only.

Kernel distance (KID): unbiased squared MMD with the kernel (x.y / 1280 + 1)^3.

The VQ's perceptual loss uses stages of the same network, so these measures flatter its
round trips: compare pictures with round trips, and round trips by PSNR and by eye too.

`evaluate` compares pictures with the real drawings of the same captions, so that both
distances are free of differences between the sets of captions.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.emoji import efficientnet
from experiments.emoji.data import Drawings

SIDE = 128
COMPONENTS = 64
STRENGTHS = tuple(10.0 ** (i / 2) for i in range(-4, 4))


class Estimate(NamedTuple):
    """A mean over pictures, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@partial(jax.jit, static_argnames="side")
def _features(images: jax.Array, side: int) -> jax.Array:
    x = images.astype(jnp.float32)
    if x.shape[1] != side:
        x = jax.image.resize(x, (len(x), side, side, 3), "cubic").clip(0, 255)
    return efficientnet.features(efficientnet.normalize(x))[0]


def features(images: np.ndarray, batch: int = 32, side: int = SIDE) -> np.ndarray:
    """Pooled features of pictures: float32 [N, 1280].

    Args:
      images: uint8 [N, H, W, 3], square. Those under `side` are enlarged to it with
        Keys' cubic (a = -0.5) and clipped; larger ones are made smaller in the same
        way, antialiased.
      batch: pictures a compiled call; the last batch is filled up.
      side: pixels.
    """
    if images.dtype != np.uint8:
        raise TypeError(f"pictures must be uint8, not {images.dtype}")
    parts = []
    for i in range(0, len(images), batch):
        part = images[i : i + batch]
        filled = np.pad(part, [(0, batch - len(part)), (0, 0), (0, 0), (0, 0)])
        parts.append(np.asarray(_features(filled, side))[: len(part)])
    return np.concatenate(parts)


def bootstrap(values: np.ndarray, resamples: int = 2000, seed: int = 0) -> Estimate:
    """The mean of values [N] and its 95 % percentile interval, pictures resampled."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (resamples, len(values)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(values.mean()), float(low), float(high))


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1) of one measure over several seeds."""
    if len(values) < 2:
        raise ValueError(f"a spread needs at least two seeds, not {len(values)}")
    return float(np.mean(values)), float(np.std(values, ddof=1))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine of each row of a [N, D] with each of b [C, D]: [N, C]."""
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return a @ b.T


@dataclass(frozen=True)
class TextMatch:
    """The regression from picture features to text vectors."""

    feature_mean: np.ndarray  # [F]
    text_mean: np.ndarray  # [D]
    weights: np.ndarray  # [F, D]

    def similarity(self, x: np.ndarray, texts: np.ndarray) -> np.ndarray:
        """Cosine of each picture [N, F] with each text vector [C, D]: [N, C]."""
        return cosines((x - self.feature_mean) @ self.weights, texts - self.text_mean)


def fit_text_match(
    x: np.ndarray,
    texts: np.ndarray,
    val_x: np.ndarray,
    val_texts: np.ndarray,
    strengths: tuple[float, ...] = STRENGTHS,
) -> tuple[TextMatch, float]:
    """Fits the regression at the best of several strengths.

    Args:
      x, texts: features [N, F] and text vectors [N, D] to fit.
      val_x, val_texts: those that choose the strength, by mean cosine.
      strengths: of the ridge, in units of the mean eigenvalue of the features' scatter.

    Returns:
      The regression and its strength.
    """
    x, texts = x.astype(np.float64), texts.astype(np.float64)
    feature_mean, text_mean = x.mean(0), texts.mean(0)
    x, texts = x - feature_mean, texts - text_mean
    scatter, axes = np.linalg.eigh(x.T @ x)
    on_axes = axes.T @ (x.T @ texts)

    def fit(strength):
        ridge = scatter + strength * scatter.mean()
        return TextMatch(feature_mean, text_mean, axes @ (on_axes / ridge[:, None]))

    def quality(strength):
        return np.diag(fit(strength).similarity(val_x, val_texts)).mean()

    best = max(strengths, key=quality)
    return fit(best), best


def recall(similarity: np.ndarray, target: np.ndarray, k: int) -> np.ndarray:
    """Chance of each row's target being among its k best: [N] in [0, 1].

    Args:
      similarity: [N, C].
      target: the right column of each row, int [N].
      k: at least 1.
    """
    own = np.take_along_axis(similarity, target[:, None], 1)
    above, level = (similarity > own).sum(1), (similarity == own).sum(1)
    return np.clip((k - above) / level, 0, 1)


def matches(
    match: TextMatch, x: np.ndarray, labels: np.ndarray, texts: np.ndarray
) -> dict[str, np.ndarray]:
    """R@1, R@5 and cosine of each picture with the label it was drawn from: [N].

    Args:
      match: the regression.
      x: the pictures' features [N, F].
      labels: their labels, str [N]; the distinct ones are the candidates.
      texts: the labels' text vectors [N, D].
    """
    _, first, target = np.unique(labels, return_index=True, return_inverse=True)
    similarity = match.similarity(x, texts[first])
    own = np.take_along_axis(similarity, target[:, None], 1)[:, 0]
    return {
        "r1": recall(similarity, target, 1),
        "r5": recall(similarity, target, 5),
        "cosine": own,
    }


def text_match(
    match: TextMatch, x: np.ndarray, labels: np.ndarray, texts: np.ndarray
) -> dict[str, Estimate]:
    """`matches`, as means with their intervals."""
    values = matches(match, x, labels, texts)
    return {name: bootstrap(each) for name, each in values.items()}


def principal_axes(x: np.ndarray, count: int = COMPONENTS) -> np.ndarray:
    """The first principal axes of features [N, F]: [F, count], orthonormal."""
    x = x.astype(np.float64) - x.mean(0, dtype=np.float64)
    return np.linalg.eigh(x.T @ x)[1][:, ::-1][:, :count]


def _root(matrix: np.ndarray) -> np.ndarray:
    """The square root of a symmetric, positive semidefinite matrix."""
    values, axes = np.linalg.eigh(matrix)
    return (axes * np.sqrt(np.maximum(values, 0))) @ axes.T


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Squared Frechet distance of normal distributions fitted to [N, D] and [M, D].

    Raises:
      ValueError: a set has no more rows than dimensions: its covariance is singular,
        so the distance is mostly bias.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    rows, dims = min(len(a), len(b)), a.shape[1]
    if rows <= dims:
        raise ValueError(
            f"{rows} pictures are too few for a Frechet distance in {dims} "
            "dimensions; project the features on fewer principal axes"
        )
    root, other = _root(np.cov(a.T).reshape(dims, dims)), np.cov(b.T)
    cross = np.linalg.eigvalsh(root @ other.reshape(dims, dims) @ root)
    traces = a.var(0, ddof=1).sum() + b.var(0, ddof=1).sum()
    shift = np.square(a.mean(0) - b.mean(0)).sum()
    return float(shift + traces - 2 * np.sqrt(np.maximum(cross, 0)).sum())


def _mean_off_diagonal(matrix: np.ndarray) -> float:
    rows = len(matrix)
    return float((matrix.sum() - np.trace(matrix)) / (rows * (rows - 1)))


def kernel_distance(
    a: np.ndarray, b: np.ndarray, size: int = 50, rounds: int = 20, seed: int = 0
) -> tuple[float, float]:
    """KID of two sets of features, and its standard error.

    Row i of one set is never compared with row i of the other, so that the estimate
    is unbiased for pairs (pictures of the same captions) as for independent sets. It
    can be negative.

    Args:
      a, b: [N, F].
      size: of the subsets that give the error.
      rounds: of random division into subsets.
      seed: of these divisions.

    Returns:
      The distance over all rows, and the standard error of the mean over disjoint
      subsets of `size`, their variance pooled over `rounds` divisions. For nearly equal
      distributions that error errs on the large side.
    """
    if a.shape != b.shape or len(a) < 2 * size:
        raise ValueError(
            f"KID needs two sets of one shape and at least {2 * size} rows, not "
            f"{a.shape} and {b.shape}"
        )

    def kernel(x, y):
        return (x @ y.T / x.shape[1] + 1) ** 3

    a, b = a.astype(np.float64), b.astype(np.float64)
    across = kernel(a, b)
    terms = kernel(a, a) + kernel(b, b) - across - across.T
    subsets = len(a) // size
    rng = np.random.default_rng(seed)
    variances = []
    for _ in range(rounds):
        parts = rng.permutation(len(a))[: subsets * size].reshape(subsets, size)
        values = [_mean_off_diagonal(terms[np.ix_(i, i)]) for i in parts]
        variances.append(np.var(values, ddof=1))
    error = np.sqrt(np.mean(variances) / subsets)
    return _mean_off_diagonal(terms), float(error)


@dataclass(frozen=True)
class Reference:
    """What the real drawings, M of them, say; made once by `reference`."""

    features: np.ndarray  # [M, 1280] at 128 px
    texts: np.ndarray  # [M, 384] of the labels
    match: TextMatch
    strength: float  # of the ridge
    axes: np.ndarray  # [1280, COMPONENTS] of train


def reference(drawings: Drawings, folder: Path) -> Reference:
    """Fits the measures on the real drawings.

    The first time, the features of all drawings take a few minutes on one core;
    they are kept in `folder/features.npz`.
    """
    path = folder / "features.npz"
    if not path.exists():
        from experiments.emoji import minilm  # not needed where the cache exists

        labels, inverse = np.unique(drawings.label, return_inverse=True)
        texts = minilm.encode(labels.tolist())[1][inverse]
        partial_path = path.with_suffix(".tmp.npz")
        np.savez(partial_path, x=features(drawings.images[SIDE]), texts=texts)
        os.replace(partial_path, path)
    with np.load(path) as arrays:
        x, texts = arrays["x"], arrays["texts"]
    if len(x) != len(drawings.label):
        raise ValueError(
            f"{path} has features of {len(x)} drawings, not of these "
            f"{len(drawings.label)}; remove it, or choose another folder"
        )
    train, val = drawings.index("train"), drawings.index("val_concept")
    match, strength = fit_text_match(x[train], texts[train], x[val], texts[val])
    return Reference(x, texts, match, strength, principal_axes(x[train]))


def evaluate(
    ref: Reference, drawings: Drawings, images: np.ndarray, chosen: np.ndarray
) -> dict:
    """All measures of pictures drawn from the captions of drawings.

    Args:
      ref: the reference.
      drawings: the drawings.
      images: uint8 [N, S, S, 3], S one of the drawings' sizes.
      chosen: the drawings whose captions were used, int [N]; their real pictures at
        size S are what FD and KID compare with.

    Returns:
      A dictionary for JSON: `r1`, `r5` and `cosine` as [value, low, high], their
      chance levels, `fd`, `kid`, `kid_error`, and the counts.
    """
    size = images.shape[1]
    x = features(images)
    real = (
        ref.features[chosen]
        if size == SIDE
        else features(drawings.images[size][chosen])
    )
    labels = drawings.label[chosen]
    candidates = len(set(labels))
    kid, error = kernel_distance(x, real)
    return {
        "pictures": len(images),
        "candidates": candidates,
        **text_match(ref.match, x, labels, ref.texts[chosen]),
        "r1_chance": 1 / candidates,
        "r5_chance": min(1, 5 / candidates),
        "fd": frechet(x @ ref.axes, real @ ref.axes),
        "kid": kid,
        "kid_error": error,
    }


def evaluation_set(
    drawings: Drawings, split: str, count: int = 300, seed: int = 0
) -> np.ndarray:
    """Indices of `count` drawings of a split, always the same ones, in file order."""
    index = drawings.index(split)
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(index, min(count, len(index)), replace=False))
