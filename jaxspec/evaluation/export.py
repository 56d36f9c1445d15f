"""A run's pictures as the scorers of benchmarks want them, paired by id.

geneval   <id>/metadata.jsonl and <id>/samples/0000.png ..., 4 pictures of each of 553
prompts (Ghosh et al. 2023, arXiv 2310.11513)
dpg       <id>.png, a 2 x 2 grid of the 4 pictures of each of 1,065 prompts (Hu et
al. 2024, arXiv 2403.05135); its scorer takes every file for a grid
fid       <id>-<k>.png, and nothing else
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from jaxspec.checkpoints.writer import CONFIG, new_folder
from jaxspec.evaluation.records import (
    Prompt,
    Sample,
    intact,
    place,
    read_prompts,
    read_run,
    read_samples,
)
from jaxspec.figures import save_png

_LISTED = 3  # samples that an error names
Pictures = Mapping[int, Path]  # of a prompt, by number
Write = Callable[[Path, Prompt, Pictures], None]  # to a folder


@dataclass(frozen=True)
class Layout:
    """How a scorer wants pictures.

    Attributes:
      write: writes those of a prompt.
      prompts: how many the benchmark has; None is any number.
      images: pictures a prompt.
      grid: whether a prompt can only be written with all of them.
    """

    write: Write
    prompts: int | None = None
    images: int | None = None
    grid: bool = False


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
      prompts, pictures: how many.
      missing: pictures of the run that are not there.
    """

    prompts: int
    pictures: int
    missing: int


def export(
    run: str | os.PathLike,
    out: str | os.PathLike,
    layout: str,
    *,
    partial: bool = False,
) -> Exported:
    """Writes a run's pictures into a new folder, whole or not at all.

    Args:
      run: its folder.
      out: must not exist, or be empty.
      layout: "geneval", "dpg" or "fid".
      partial: write what there is, where pictures are missing or prompts are fewer than
        the benchmark's; scores are then not those of the benchmark.

    Raises:
      ValueError: pictures are missing or damaged, or the run is not of the benchmark's
        prompts; nothing was written.
      OSError: it cannot be written.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be {', '.join(LAYOUTS)}, not {layout!r}")
    chosen, folder, out = LAYOUTS[layout], Path(run), Path(out)
    record = read_run(folder)
    prompts, samples = read_prompts(folder, record), read_samples(folder, record)
    _check_counts(layout, record.images, len(prompts), partial)
    pictures: dict[str, dict[int, Path]] = {}
    missing = []
    for prompt in prompts:
        pictures[prompt.id] = {}
        for number in range(record.images):
            sample = samples.get((prompt.id, number, record.seed))
            if sample is not None and intact(folder, sample):
                pictures[prompt.id][number] = folder / str(sample.file)
            else:
                missing.append(_why(prompt.id, number, sample))
    if missing and not partial:
        wanted, more = len(prompts) * record.images, len(missing) - _LISTED
        rest = f" and {more} more" if more > 0 else ""
        raise ValueError(
            f"{folder} lacks {len(missing)} of {wanted} pictures: "
            f"{', '.join(missing[:_LISTED])}{rest}; `jaxspec evaluate run` draws them"
        )
    least = record.images if chosen.grid else 1
    whole = [p for p in prompts if len(pictures[p.id]) >= least]
    if not whole:
        raise ValueError(f"{folder} has no picture to export yet")
    with new_folder(out) as draft:
        for prompt in whole:
            chosen.write(draft, prompt, pictures[prompt.id])
        (draft / CONFIG).unlink()  # the lock; scorers take every file for a picture
    count = sum(len(pictures[p.id]) for p in whole)
    return Exported(len(whole), count, len(missing))


def _check_counts(layout: str, images: int, prompts: int, partial: bool) -> None:
    """Raises ValueError if the run has another size than the benchmark."""
    want = LAYOUTS[layout]
    if want.grid and images != want.images:
        raise ValueError(
            f"{layout} takes {want.images} pictures a prompt, and the run has {images}"
        )
    wrong = [
        f"{asked} {what}, and the run has {found}"
        for what, asked, found in (
            ("prompts", want.prompts, prompts),
            ("pictures a prompt", want.images, images),
        )
        if asked not in (None, found)
    ]
    if wrong and not partial:
        raise ValueError(
            f"{layout} has {'; '.join(wrong)} (--partial exports it still)"
        )


def _why(prompt: str, number: int, sample: Sample | None) -> str:
    """Which picture is missing, and why."""
    if sample is None:
        return f"image {number} of {prompt} (not drawn)"
    return f"image {number} of {prompt} ({sample.error or 'damaged'})"


def _geneval(folder: Path, prompt: Prompt, pictures: Pictures) -> None:
    if not prompt.id.isdigit() or not {"tag", "include"} <= prompt.extra.keys():
        raise ValueError(
            f"prompt {prompt.id} is not of GenEval's evaluation_metadata.jsonl: draw "
            "that file for this layout"
        )
    own = folder / prompt.id
    (own / "samples").mkdir(parents=True)
    (own / "metadata.jsonl").write_text(json.dumps(prompt.extra), encoding="utf8")
    for number, picture in pictures.items():
        _copy(picture, own / "samples" / f"{number:04d}.png")


def _dpg(folder: Path, prompt: Prompt, pictures: Pictures) -> None:
    if "." in prompt.id or place(prompt.id) != prompt.id:
        raise ValueError(
            f"prompt {prompt.id!r} is not of DPG-Bench's folder of prompts: draw that "
            "folder for this layout"
        )
    four = [_pixels(pictures[number]) for number in range(4)]
    for i, x in enumerate(four):
        for k, y in enumerate(four[:i]):
            if np.array_equal(x, y):
                raise ValueError(
                    f"images {k} and {i} of {prompt.id} are the same picture: the grid "
                    "is of four that were drawn apart (at temperature 0 there is one)"
                )
    rows = [np.concatenate(four[i : i + 2], axis=1) for i in (0, 2)]
    save_png(folder / f"{prompt.id}.png", np.concatenate(rows), {"prompt": prompt.text})


def _fid(folder: Path, prompt: Prompt, pictures: Pictures) -> None:
    for number, picture in pictures.items():
        _copy(picture, folder / f"{place(prompt.id)}-{number}.png")


def _copy(picture: Path, to: Path) -> None:
    """The same pixels as PNG, in the same bytes where it is one."""
    if picture.suffix == to.suffix:
        shutil.copyfile(picture, to)
    else:
        save_png(to, _pixels(picture), {})


def _pixels(picture: Path) -> np.ndarray:
    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB"))


LAYOUTS = {
    "geneval": Layout(_geneval, prompts=553, images=4),
    "dpg": Layout(_dpg, prompts=1065, images=4, grid=True),
    "fid": Layout(_fid),
}

__all__ = ["LAYOUTS", "Exported", "export"]
