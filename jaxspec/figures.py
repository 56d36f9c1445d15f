"""Pictures as files and as labelled sheets."""

import json
import os
import unicodedata
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
from PIL import ExifTags, Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

DRAFT = ".tmp"  # how names of files end that are not whole yet
_GAP = 8  # pixels between cells and around the sheet
_LEAST_WIDTH = 96  # of a cell, so that the label of a small picture can be read
_MOST_LINES = 3  # of a label


def labelled_grid(
    images: Sequence[np.ndarray], labels: Sequence[str], columns: int | None = None
) -> np.ndarray:
    """Lays pictures out on a white sheet, each over its label.

    Pictures of different sizes are centred in cells of one size, never stretched. A
    label is wrapped to the width of its cell and shortened after three lines.

    Args:
      images: n pictures, uint8 [H, W, 3], sizes may differ.
      labels: n texts.
      columns: cells in a row; None makes the sheet about square.

    Returns:
      The sheet, uint8 [height, width, 3].

    Raises:
      ValueError: no picture, a picture of another shape or type, a number of labels
        that is not the number of pictures, or fewer than one column.
    """
    _check(images, labels, columns)
    columns = min(columns or int(np.ceil(np.sqrt(len(images)))), len(images))
    height = max(image.shape[0] for image in images)
    width = max(_LEAST_WIDTH, max(image.shape[1] for image in images))
    font = plain_font(min(20, max(11, width // 12)))
    texts = [_wrap(_plain(label), font, width) for label in labels]
    line = sum(font.getmetrics()) + 1
    room = height + 4 + line * max(len(text) for text in texts)  # of a cell
    rows = -(-len(images) // columns)
    size = (columns * (width + _GAP) + _GAP, rows * (room + _GAP) + _GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
        left = _GAP + (i % columns) * (width + _GAP)
        top = _GAP + (i // columns) * (room + _GAP)
        dx, dy = (width - image.shape[1]) // 2, (height - image.shape[0]) // 2
        sheet.paste(Image.fromarray(image), (left + dx, top + dy))
        for k, words in enumerate(text):
            where = (left + width / 2, top + height + 4 + k * line)
            draw.text(where, words, fill="black", font=font, anchor="ma")
    return np.asarray(sheet)


def save_png(
    path: str | os.PathLike, image: np.ndarray, metadata: Mapping[str, str]
) -> None:
    """Writes a PNG whole or not at all.

    Args:
      path: the file, replaced if it exists; its folder must exist.
      image: uint8 [H, W, 3].
      metadata: text chunks, keyword (1 to 79 Latin-1 characters) to text.

    Raises:
      ValueError: a picture of another shape or type.
      OSError: the folder is missing or cannot be written to.
    """
    _check([image], [""], None)
    path, chunks = Path(path), PngInfo()
    for key, text in metadata.items():
        chunks.add_text(key, text)
    with atomically(path) as draft:
        Image.fromarray(image).save(draft, format="PNG", pnginfo=chunks)


def save_webp(
    path: str | os.PathLike, image: np.ndarray, metadata: Mapping[str, str]
) -> None:
    """Writes a lossless WebP whole or not at all; as `save_png`, with `described`."""
    _check([image], [""], None)
    with atomically(Path(path)) as draft:
        Image.fromarray(image).save(
            draft, format="WEBP", lossless=True, exif=described(metadata)
        )


def described(metadata: Mapping[str, str]) -> Image.Exif:
    """What a WebP file says of itself: JSON in EXIF's image description."""
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription] = json.dumps(dict(metadata))
    return exif


@contextmanager
def atomically(path: Path) -> Generator[Path]:
    """Where to write a file that then takes its place in one step, or not at all."""
    # In the same folder, so that the replacement is one step of the file system.
    draft = path.with_name(f".{uuid.uuid4().hex}{DRAFT}")
    try:
        yield draft
        os.replace(draft, path)
    except OSError as error:
        if error.filename == str(draft):
            error.filename = str(path)  # which is what was asked for
        raise
    finally:
        draft.unlink(missing_ok=True)


def plain_font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font, the same on every machine."""
    font = ImageFont.load_default(size=size)
    return cast(ImageFont.FreeTypeFont, font)  # always, where a size is given


def _check(images: Sequence[np.ndarray], labels: Sequence[str], columns: int | None):
    if len(images) == 0:
        raise ValueError("there is no picture to draw")
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} pictures, but {len(labels)} labels")
    if columns is not None and columns < 1:
        raise ValueError(f"columns must be 1 or more, and is {columns}")
    for image in images:
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            found = f"{image.dtype} {list(image.shape)}"
            raise ValueError(f"a picture must be uint8 [H, W, 3], and is {found}")


def _plain(text: str) -> str:
    """Without accents: Pillow's own font, the same on every machine, has none."""
    parts = unicodedata.normalize("NFKD", text)
    return "".join(c for c in parts if not unicodedata.combining(c))


def _wrap(label: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """The lines of a label, each at most `width` pixels, `_MOST_LINES` at most."""
    lines, words = [""], label.split()
    for i, word in enumerate(words):
        joined = f"{lines[-1]} {word}".strip()
        if font.getlength(joined) <= width or not lines[-1]:
            lines[-1] = joined
        elif len(lines) < _MOST_LINES:
            lines.append(word)
        else:
            lines[-1] = " ".join([lines[-1], *words[i:]])
            break
    return [_shorten(text, font, width) for text in lines]


def _shorten(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    kept = text[:width]  # a character takes a pixel at least
    if font.getlength(kept) <= width:
        return kept
    while font.getlength(kept + "…") > width:
        kept = kept[:-1]
    return kept.rstrip() + "…"
