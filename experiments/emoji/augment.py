"""Variants of the drawings, as codes: more than the set holds.

"moved" moves, turns, scales and stretches a drawing a little. "varied" turns its hues,
too. A transformer is told by how much in the last slot of its prefix, so that it does
not draw such pictures unasked (distribution augmentation: Jun et al., 2020, section 3).
"named" gives a drawing of one colour another one, and its caption says so.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from experiments.emoji.codes import kept

HUES = {  # degrees
    "red": 0,
    "orange": 30,
    "yellow": 50,
    "green": 125,
    "blue": 212,
    "purple": 275,
    "pink": 330,
}
COLOUR = re.compile(rf"\b({'|'.join(HUES)}|brown|black|white)\b", re.I)
TOLD = 9  # numbers that tell a variant, none of them far above 2


@dataclass(frozen=True)
class Variants:
    """K variants of each of M drawings.

    Attributes:
      tokens: int16 [K, M, N].
      told: float32 [K, M, TOLD], what a transformer is told; 0 where that is nothing.
      colours: str [K, M], the colour that a caption is to name; "" where none.
    """

    tokens: np.ndarray
    told: np.ndarray
    colours: np.ndarray


Made = tuple[np.ndarray, Sequence[float], str]  # drawing, what is told, colour named


def moved(image: np.ndarray, rng: np.random.Generator) -> Made:
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
    amounts = 10 * angle, 10 * np.log(scale), 20 * np.log(stretch), *(25 * shift / side)
    return np.asarray(result), (1, *amounts, 0, 0, 0), ""


def varied(image: np.ndarray, rng: np.random.Generator) -> Made:
    """`moved`, and half of them with their hues turned by any angle."""
    result, told, _ = moved(image, rng)
    if rng.random() < 0.5:
        return result, told, ""
    degrees = rng.uniform(0, 360)
    radians = np.radians(degrees)
    hue = 2 * (np.cos(radians) - 1), 2 * np.sin(radians)
    return turn_hue(result, degrees), (*told[:6], *hue, 0), ""


def named(image: np.ndarray, rng: np.random.Generator) -> Made:
    """A drawing of one colour in another, which is named; any other as it is."""
    hue, told = own_hue(image), (0,) * TOLD
    if hue is None:
        return image, told, ""
    others = [n for n, x in HUES.items() if abs((x - hue + 180) % 360 - 180) > 25]
    name = str(rng.choice(others))
    return turn_hue(image, HUES[name] - hue), told, name


def moved_and_named(image: np.ndarray, rng: np.random.Generator) -> Made:
    """`moved`, then `named`."""
    image, told, _ = moved(image, rng)
    image, _, name = named(image, rng)
    return image, told, name


KINDS = {
    "moved": moved,
    "varied": varied,
    "named": named,
    "moved and named": moved_and_named,
}
VARIANTS = ("moved",) * 4 + ("moved and named",) * 6  # those that name come last


def to_hsv(image: np.ndarray) -> np.ndarray:
    return np.array(Image.fromarray(image).convert("HSV"))


def turn_hue(image: np.ndarray, degrees: float) -> np.ndarray:
    """A drawing uint8 [S, S, 3] with every hue turned."""
    hsv = to_hsv(image)
    hsv[..., 0] = (hsv[..., 0].astype(int) + round(degrees / 360 * 256)) % 256
    return np.asarray(Image.fromarray(hsv, "HSV").convert("RGB"))


def own_hue(image: np.ndarray) -> float | None:
    """The hue in degrees of a drawing of one colour; None for any other.

    Of one colour is what is saturated on 40 % of what is not white, with three quarters
    of that within 25 degrees.
    """
    hsv = to_hsv(image).astype(float)
    drawn = (image < 245).any(-1)
    saturated = drawn & (hsv[..., 1] > 90) & (hsv[..., 2] > 60)
    if saturated.sum() < 0.4 * max(1, drawn.sum()):
        return None
    hue = hsv[saturated, 0] / 256 * 2 * np.pi
    centre = np.angle(np.exp(1j * hue).mean())
    near = np.abs(np.angle(np.exp(1j * (hue - centre)))) < np.radians(25)
    return float(np.degrees(centre) % 360) if near.mean() >= 0.75 else None


def name_colour(label: str, colour: str) -> str:
    """A label that names a colour: "blue apple" of "apple" or "red apple"."""
    replaced, count = COLOUR.subn(colour, label)
    return replaced if count else f"{colour} {label}"


def create(
    images: np.ndarray, mirrors: np.ndarray, encode: Callable, kinds: Sequence[str]
) -> Variants:
    """A variant of each kind, of every drawing; `encode` makes codes [M, N] of them.

    Half of the drawings that `mirrors` allows it are mirrored first, and that is told
    where anything is.
    """
    tokens, told, colours = [], [], []
    for k, kind in enumerate(kinds):
        rng = np.random.default_rng(k)
        flips = mirrors & (rng.random(len(images)) < 0.5)
        made = [
            KINDS[kind](image[:, ::-1] if flip else image, rng)
            for image, flip in zip(images, flips, strict=True)
        ]
        tokens.append(encode(np.stack([image for image, _, _ in made])))
        numbers = np.array([numbers for _, numbers, _ in made], np.float32)
        numbers[:, -1] = 2 * (flips & numbers.any(1))
        told.append(numbers)
        colours.append([name for _, _, name in made])
    return Variants(np.stack(tokens), np.stack(told), np.array(colours))


def load(
    path: Path,
    images: np.ndarray,
    mirrors: np.ndarray,
    encode: Callable,
    kinds: Sequence[str],
) -> Variants:
    """`create`, kept in `path`; made anew where drawings, codes or kinds are others."""
    sample = images[:: max(1, len(images) // 64)]
    parts = sample.tobytes(), encode(sample).tobytes(), repr(tuple(kinds)).encode()
    origin = hashlib.sha256(b"".join(parts)).hexdigest()
    make = lambda: vars(create(images, mirrors, encode, kinds))
    return Variants(**kept(path, origin, make))
