"""The emoji drawings: rendered once, cached, with captions and splits.

`data/` holds the vector drawings and their licences (`data/NOTICE`). Rendering takes
about a minute; the arrays are kept in `runs/emoji/drawings.npz`, those of 256 px, which
few need, in `drawings-256.npy`.
"""

import csv
import hashlib
import io
import json
import lzma
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
SIZES = (32, 64, 128)
LARGE = 256
STYLES = ("noto", "blob", "flat", "glossy", "tweet")


@dataclass(frozen=True)
class Drawings:
    """All drawings of the set, M of them, in file order."""

    images: dict[int, np.ndarray]  # size -> uint8 [M, size, size, 3]
    split: np.ndarray  # [M] str
    style: np.ndarray  # [M] str
    label: np.ndarray  # [M] str
    tags: np.ndarray  # [M] str, comma separated
    subgroup: np.ndarray  # [M] str, Unicode's kind of thing

    def index(self, split: str) -> np.ndarray:
        return np.flatnonzero(self.split == split)

    def every(self, step: int) -> "Drawings":
        """A sample of the set, for trial runs."""
        rest = {f.name: getattr(self, f.name)[::step] for f in fields(self)[1:]}
        return Drawings({s: x[::step] for s, x in self.images.items()}, **rest)

    def caption(self, i: int) -> str:
        return f"{self.style[i]} emoji of {self.label[i]}"


def metadata() -> list[dict[str, str]]:
    with lzma.open(DATA / "emoji_meta.tsv.xz", "rt", encoding="utf8") as f:
        return list(csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE))


def render(box: tuple, size: int = 128) -> np.ndarray:
    """Draws one svg body over white; uint8 [size, size, 3]."""
    import resvg_py
    from PIL import Image

    left, top, side, body = box
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {side} {side}" width="{size}" height="{size}">'
        f"{body}</svg>"
    )
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg))
    drawing = Image.open(io.BytesIO(png)).convert("RGBA")
    canvas = Image.new("RGBA", drawing.size, (255, 255, 255, 255))
    canvas.alpha_composite(drawing)
    return np.asarray(canvas.convert("RGB"))


def box_average(images: np.ndarray, factor: int) -> np.ndarray:
    """Reduces by averaging whole blocks, so that the sizes form an exact pyramid."""
    n, h, w, c = images.shape
    blocks = images.reshape(n, h // factor, factor, w // factor, factor, c)
    return blocks.mean((2, 4)).round().astype(np.uint8)


def check_renderer(rows: list[dict[str, str]], images: np.ndarray) -> None:
    """Raises if the renderer draws other pixels than the recorded ones."""
    want = json.loads((DATA / "render128.sha256.json").read_text())
    for name in sorted({row["set"] for row in rows}):
        chosen = [i for i, row in enumerate(rows) if row["set"] == name]
        if hashlib.sha256(images[chosen].tobytes()).hexdigest() != want[name]:
            raise ValueError(
                f"the drawings of {name!r} differ from the recorded hash: "
                f"install resvg-py=={want['resvg-py']}, another version draws other "
                "pixels"
            )


def render_all(size: int) -> np.ndarray:
    """All drawings, uint8 [M, size, size, 3]."""
    with lzma.open(DATA / "emoji_svg.json.xz") as f:
        boxes = json.load(f)
    todo = [boxes[r["set"]][r["hex"]] for r in metadata()]
    with Pool() as pool:
        return np.stack(pool.map(partial(render, size=size), todo, chunksize=64))


def prepare(path: Path) -> None:
    """Renders all drawings at all sizes into `path` (npz), atomically."""
    images = render_all(128)
    check_renderer(metadata(), images)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        f"x{s}": images if s == 128 else box_average(images, 128 // s) for s in SIZES
    }
    draft = path.with_suffix(".tmp.npz")
    np.savez(draft, **arrays)
    os.replace(draft, path)


def prepare_large(path: Path) -> None:
    """Renders all drawings at the largest size into `path` (npy), atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp.npy")
    np.save(draft, render_all(LARGE))
    os.replace(draft, path)


def load(folder: Path, sizes: Sequence[int] = SIZES) -> Drawings:
    """Loads the drawings, rendering them into `folder` the first time."""
    path, large = folder / "drawings.npz", folder / f"drawings-{LARGE}.npy"
    if not path.exists():
        prepare(path)
    with np.load(path) as arrays:
        images = {s: arrays[f"x{s}"] for s in sizes if s != LARGE}
    if LARGE in sizes:
        if not large.exists():
            prepare_large(large)
        images[LARGE] = np.load(large, mmap_mode="r")
    rows = metadata()
    column = {k: np.array([r[k] for r in rows]) for k in rows[0]}
    names = [f.name for f in fields(Drawings)[1:]]
    return Drawings(images, **{name: column[name] for name in names})
