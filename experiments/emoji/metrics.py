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
from pathlib import Path

import numpy as np

from experiments.emoji.data import Drawings
from jaxspec.evaluation.intervals import Estimate, bootstrap
from jaxspec.evaluation.measures import (
    SIDE,
    TextMatch,
    features,
    frechet,
    kernel_distance,
    matches,
)

COMPONENTS = 64
STRENGTHS = tuple(10.0 ** (i / 2) for i in range(-4, 4))


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1) of one measure over several seeds."""
    if len(values) < 2:
        raise ValueError(f"a spread needs at least two seeds, not {len(values)}")
    return float(np.mean(values)), float(np.std(values, ddof=1))


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
