"""Drawings as code grids, and captions as pieces: what the transformers train on."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from experiments.emoji.data import STYLES, Drawings
from jaxspec.models.vq import VQ, VQConfig, from_uint8
from jaxspec.text import PieceText
from jaxspec.training import data_parallel

SLOTS = 16
# Labels and kinds of drawings that mean something else when mirrored.
DIRECTED = re.compile(r"\b(left|right|clockwise|counterclockwise|o’clock|thirty)", re.I)
WRITTEN = {"alphanum", "keycap", "arrow", "math", "punctuation", "currency", "time"}


@dataclass(frozen=True)
class Codes:
    """All drawings of the set at one size as tokens, M of them, in file order.

    Attributes:
      tokens: int16 [2, M, N], of the drawing and of its mirror image.
      mirrors: bool [M], whether the mirror image shows the same thing.
    """

    tokens: np.ndarray
    mirrors: np.ndarray


def may_mirror(drawings: Drawings) -> np.ndarray:
    return np.array(
        [
            not DIRECTED.search(label) and group not in WRITTEN
            for label, group in zip(drawings.label, drawings.subgroup, strict=True)
        ]
    )


def _batches(images: np.ndarray, count: int) -> Iterator[np.ndarray]:
    for i in range(0, len(images), count):
        batch = images[i : i + count]
        pad = [(0, count - len(batch))] + [(0, 0)] * 3
        yield np.pad(batch, pad)


def encode(config: VQConfig, params, images: np.ndarray) -> np.ndarray:
    """Codes int16 [M, N] of uint8 drawings [M, size, size, 3], on all devices."""
    model, shardings = VQ(config), data_parallel()

    @partial(jax.jit, in_shardings=shardings, out_shardings=shardings[1])
    def run(params, x):
        return model.apply(params, from_uint8(x), method="encode")

    devices = jax.device_count()
    count = devices * max(1, 2**20 // images[0, ..., 0].size // devices)
    rows = [np.asarray(run(params, x)) for x in _batches(images, count)]
    tokens = np.concatenate(rows)[: len(images)]
    return tokens.reshape(len(images), -1).astype(np.int16)


def _origin(params, images: np.ndarray) -> str:
    digest = hashlib.sha256()
    for x in (*jax.tree.leaves(params), images[:: max(1, len(images) // 1000)]):
        digest.update(np.asarray(x).tobytes())
    return digest.hexdigest()


def kept(
    path: Path, origin: str, make: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Arrays that are made once and kept in `path`, anew for another origin."""
    if path.exists():
        with np.load(path) as arrays:
            if "origin" in arrays and arrays["origin"] == origin:
                return {k: arrays[k] for k in arrays if k != "origin"}
    made = make()
    draft = path.with_suffix(".tmp.npz")
    np.savez(draft, origin=origin, **made)
    os.replace(draft, path)
    return made


def load(
    folder: Path, size: int, config: VQConfig, params, drawings: Drawings
) -> Codes:
    """Encodes a size once into `folder/codes-SIZE.npz`, or reads it from there.

    Codes of another tokenizer, or of other drawings, are made anew.
    """
    images = drawings.images[size]
    both = lambda: [encode(config, params, x) for x in (images, images[:, :, ::-1])]
    arrays = kept(
        folder / f"codes-{size}.npz",
        _origin(params, images),
        lambda: {"tokens": np.stack(both())},
    )
    return Codes(arrays["tokens"], may_mirror(drawings))


def reader(folder: Path) -> PieceText:
    """The family's prompt reader, from the tokenizer that `text_table` wrote."""
    spec = (folder / "text" / "tokenizer.json").read_text()
    return PieceText(spec, SLOTS, STYLES, "glossy")


def caption_pieces(
    text: PieceText, drawings: Drawings
) -> tuple[np.ndarray, list[list[list[int]]]]:
    """Pieces of every caption int32 [M, slots], and the pieces of each of its tags."""
    rows = [
        text.pieces(f"{style} {label}")
        for style, label in zip(drawings.style, drawings.label, strict=True)
    ]
    tags = [
        [e.ids for e in text.tokenizer.encode_batch(tag.split(","))] if tag else []
        for tag in drawings.tags
    ]
    return np.stack(rows), tags
