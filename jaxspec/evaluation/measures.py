"""Measures of pictures on features of a network: distances of sets, and text match.

The network here is EfficientNet-Lite0, for the emoji family; the distances take any
features.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.evaluation import efficientnet
from jaxspec.evaluation.intervals import Estimate, normal

SIDE = 128  # pixels, of what the network is given


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
    moments = [(x.mean(0), np.cov(x.T).reshape(dims, dims)) for x in (a, b)]
    return frechet_of_moments(*moments[0], *moments[1])


def frechet_of_moments(
    mean: np.ndarray, cov: np.ndarray, other_mean: np.ndarray, other_cov: np.ndarray
) -> float:
    """The same of means [D] and covariances [D, D]."""
    root = _root(cov)
    cross = np.linalg.eigvalsh(root @ other_cov @ root)
    shift = np.square(mean - other_mean).sum()
    traces = np.trace(cov) + np.trace(other_cov)
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


def frechet_estimate(
    a: np.ndarray, b: np.ndarray, resamples: int, seed: int = 0
) -> Estimate:
    """The distance (see `frechet`), and an interval of its bootstrap standard error.

    Rows of `a` are resampled, with those of `b` where they are as many, which are then
    taken for pairs. Resampled sets are further apart than the sets: their mean says
    nothing, so only their deviation is used.

    Raises:
      ValueError: too few rows, as for `frechet`.
    """
    rng = np.random.default_rng(seed)
    paired, found = len(a) == len(b), []
    value = frechet(a, b)
    for _ in range(resamples):
        rows = rng.integers(0, len(a), len(a))
        found.append(frechet(a[rows], b[rows] if paired else b))
    return normal(value, float(np.std(found, ddof=1)))
