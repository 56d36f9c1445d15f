"""Drawings moved, turned and stretched a little, as codes: more than the set holds."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image


def moved(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A drawing uint8 [S, S, 3] moved, turned, scaled and stretched over white."""
    side = len(image)
    angle = np.radians(rng.uniform(-12, 12))
    scale = np.exp(rng.uniform(-0.2, 0.08))
    stretch = np.exp(rng.uniform(-0.1, 0.1))
    shift = rng.uniform(-0.08, 0.08, 2) * side
    c, s = np.cos(angle), np.sin(angle)
    # From a pixel of the result to one of the drawing, about the centre.
    inverse = np.array([[c, s], [-s, c]]) / scale * [[stretch], [1 / stretch]]
    centre = np.full(2, (side - 1) / 2)
    offset = centre - inverse @ (centre + shift)
    result = Image.fromarray(image).transform(
        (side, side),
        Image.Transform.AFFINE,
        (*inverse[0], offset[0], *inverse[1], offset[1]),
        Image.Resampling.BICUBIC,
        fillcolor=(255, 255, 255),
    )
    return np.asarray(result)


def codes_of_moved(
    path: Path, images: np.ndarray, mirrors: np.ndarray, encode: Callable, count: int
) -> np.ndarray:
    """Codes int16 [count, M, N] of drawings that are each moved so many times.

    Half of those that `mirrors` allows it are mirrored. Kept in `path`; made anew where
    the drawings, or their codes, are other ones.
    """
    sample = images[:: max(1, len(images) // 64)]
    origin = hashlib.sha256(sample.tobytes() + encode(sample).tobytes()).hexdigest()
    if path.exists():
        with np.load(path) as kept:
            if kept["origin"] == origin and len(kept["tokens"]) == count:
                return kept["tokens"]
    tokens = []
    for k in range(count):
        rng = np.random.default_rng(k)
        flips = mirrors & (rng.random(len(images)) < 0.5)
        tokens.append(
            encode(
                np.stack(
                    [
                        moved(image[:, ::-1] if flip else image, rng)
                        for image, flip in zip(images, flips, strict=True)
                    ]
                )
            )
        )
    draft = path.with_suffix(".tmp.npz")
    np.savez(draft, origin=origin, tokens=np.stack(tokens))
    os.replace(draft, path)
    return np.stack(tokens)
