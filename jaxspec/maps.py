"""How a picture came about: where its cells came from, when, and as an animation."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

from jaxspec.decoding import ACCEPTED, BONUS, DRAWN, RESAMPLED, Decoded
from jaxspec.decoding.islands import label
from jaxspec.figures import atomically, described, labelled_grid, plain_font

# Name and colour of an origin, from the palette of Okabe and Ito, which people who see
# fewer colours can tell apart.
ORIGINS = {
    DRAWN: ("drawn", (0, 114, 178)),  # blue
    ACCEPTED: ("accepted", (0, 158, 115)),  # green
    RESAMPLED: ("resampled", (213, 94, 0)),  # vermilion
    BONUS: ("bonus", (240, 228, 66)),  # yellow
}
BLANK = (208, 208, 208)  # not there yet

# Nine steps of viridis: dark to light, so that it reads in grey too.
SCALE = np.array(
    [
        (68, 1, 84),
        (71, 45, 123),
        (59, 82, 139),
        (44, 114, 142),
        (33, 145, 140),
        (40, 174, 128),
        (94, 201, 98),
        (173, 220, 48),
        (253, 231, 37),
    ]
)
_LEAST_SIDE = 256  # of a panel, in pixels
_SECONDS = 4.0  # of an animation, where its frames allow it


def origin_colours(origin: np.ndarray, final_pass: np.ndarray) -> np.ndarray:
    """The colour uint8 [h, w, 3] of where each cell [h, w] came from."""
    palette = np.array([colour for _, colour in ORIGINS.values()], np.uint8)
    there = (final_pass >= 0)[..., None]
    return np.where(there, palette[origin], np.array(BLANK, np.uint8))


def pass_colours(final_pass: np.ndarray, last: int) -> np.ndarray:
    """The colour uint8 [h, w, 3] of each cell's pass: dark is 0, light is `last`."""
    place = np.clip(final_pass, 0, last) * (len(SCALE) - 1) / max(last, 1)
    steps = np.arange(len(SCALE))
    channels = [np.interp(place, steps, channel) for channel in SCALE.T]
    colours = np.stack(channels, axis=-1).round().astype(np.uint8)
    return np.where((final_pass >= 0)[..., None], colours, np.array(BLANK, np.uint8))


def map_sheet(
    images: np.ndarray,
    stats: Decoded,
    labels: Sequence[str],
    columns: int = 1,
    drafts: np.ndarray | None = None,
    islands: bool = False,
) -> np.ndarray:
    """Each picture beside the origin of its cells and the pass that made them final.

    The colours of the passes are the same for all pictures of a sheet.

    Args:
      images: uint8 [n, H, W, 3].
      stats: of the same n pictures; newlines are left out.
      labels: a line for each.
      columns: pictures in a row.
      drafts: uint8 [n, H, W, 3], what they were drafted as, to stand before them.
      islands: says in how many 8-connected parts cells were drawn again, of a method
        that judges a draft of the whole picture.

    Returns:
      The sheet, uint8 [height, width, 3].
    """
    stats = stats.picture()
    final, origin = np.asarray(stats.final_pass), np.asarray(stats.origin)
    last = int(final.max())
    parts = np.asarray(label(jnp.asarray(origin != ACCEPTED))) if islands else None
    panels, under = [], []
    for i, image in enumerate(images):
        scale = -(-_LEAST_SIDE // min(image.shape[:2]))
        sides = image.shape[0] * scale, image.shape[1] * scale
        counts = [np.sum((origin[i] == o) & (final[i] >= 0)) for o in ORIGINS]
        came, when = origin_colours(origin[i], final[i]), pass_colours(final[i], last)
        no_legend = np.full((_room(sides[1]), sides[1], 3), 255, np.uint8)
        where = "where each cell came from"
        if parts is not None:
            count = len(np.unique(parts[i][parts[i] >= 0]))
            where += f": {count} island{'s' * (count != 1)}"
        shown = [
            (image, no_legend, labels[i]),
            (came, _origin_legend(sides[1], counts), where),
            (when, _pass_legend(sides[1], last), "pass that made it final"),
        ]
        if drafts is not None:
            shown.insert(0, (drafts[i], no_legend, "what it was drafted as"))
        for cells, legend, text in shown:
            panels.append(np.concatenate([_enlarged(cells, sides), legend]))
            under.append(text)
    return labelled_grid(panels, under, len(panels) // len(images) * columns)


def _enlarged(cells: np.ndarray, sides: tuple[int, int]) -> np.ndarray:
    """Cells [h, w, 3] as blocks of one colour on a picture of these sides."""
    rows, columns = (
        np.arange(side) * count // side
        for side, count in zip(sides, cells.shape, strict=False)
    )
    return cells[rows][:, columns]


def _legend_font(width: int):
    return plain_font(min(20, max(11, width // 18)))


def _room(width: int) -> int:
    """Height of a legend: two lines."""
    return 2 * (sum(_legend_font(width).getmetrics()) + 2) + 6


def _origin_legend(width: int, counts: Sequence[int]) -> np.ndarray:
    font, room = _legend_font(width), _room(width)
    legend = Image.new("RGB", (width, room), "white")
    draw, line = ImageDraw.Draw(legend), (room - 6) // 2
    entries = zip(ORIGINS.values(), counts, strict=True)
    there = [(name, colour, count) for (name, colour), count in entries if count]
    for k, (name, colour, count) in enumerate(there):
        left, top = k % 2 * (width // 2), 6 + k // 2 * line
        draw.rectangle((left, top + 1, left + line - 4, top + line - 3), fill=colour)
        draw.text((left + line + 1, top), f"{name} {count}", "black", font)
    return np.asarray(legend)


def _pass_legend(width: int, last: int) -> np.ndarray:
    font, room = _legend_font(width), _room(width)
    legend = Image.new("RGB", (width, room), "white")
    draw, line = ImageDraw.Draw(legend), (room - 6) // 2
    # One pixel a column, as many steps as there are passes.
    passes = np.arange(width) * (last + 1) // width
    bar = pass_colours(np.tile(passes, (line - 4, 1)), last)
    legend.paste(Image.fromarray(bar), (0, 7))
    draw.text((0, 6 + line), "0 (prefill)", "black", font)
    draw.text((width, 6 + line), str(last), "black", font, anchor="ra")
    return np.asarray(legend)


def moments(final_pass: np.ndarray, most: int) -> np.ndarray:
    """Passes [F] to show, the last of them last, and before them -1: nothing there.

    They are all the passes in which a cell of [n, h, w] became final, or `most - 1` of
    them at equal steps.

    Raises:
      ValueError: `most` is less than 2.
    """
    if most < 2:
        raise ValueError(f"an animation has 2 frames or more, not {most}")
    passes = np.unique(final_pass)
    if len(passes) > most - 1:
        steps = np.linspace(len(passes) - 1, 0, most - 1).round().astype(int)
        passes = passes[steps[::-1]]
    return np.concatenate([[-1], passes])


def blanked(images: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Pictures uint8 [n, H, W, 3] with grey in place of cells not `there` [n, h, w]."""
    factor = images.shape[1] // there.shape[1]
    pixels = there.repeat(factor, axis=1).repeat(factor, axis=2)[..., None]
    return np.where(pixels, images, np.array(BLANK, np.uint8))


def save_animation(
    path: str | os.PathLike, frames: Iterable[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes an endless animation as WebP, whole or not at all.

    WebP, since GIF has 256 colours a frame and is larger; browsers and notebooks show
    both. The last frame stays for two seconds.

    Args:
      path: the file, replaced if it exists; its folder must exist.
      frames: uint8 [H, W, 3] each, all of one size.
      metadata: what the file says of itself, as JSON in EXIF's image description.
    """
    first, *others = (Image.fromarray(frame) for frame in frames)
    pace = int(np.clip(1000 * _SECONDS / (len(others) + 1), 50, 250))
    with atomically(Path(path)) as draft:
        first.save(
            draft,
            format="WEBP",
            save_all=True,
            append_images=others,
            duration=[pace] * len(others) + [2000],
            loop=0,
            quality=90,
            method=6,
            exif=described(metadata),
        )
