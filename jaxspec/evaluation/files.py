"""The files of a run's samples: pictures, and what is recorded of them."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from jaxspec.evaluation.batches import Drawn
from jaxspec.evaluation.records import (
    IMAGES,
    RECORDS,
    Sample,
    now,
    place,
    sha256,
)
from jaxspec.figures import atomically, save_png, save_webp

ImageFormat = Literal["png", "webp"]
SAVE = {"png": save_png, "webp": save_webp}


@dataclass(frozen=True)
class Files:
    """Where files are written, and which."""

    folder: Path
    format: ImageFormat
    keep_records: bool

    def write(self, drawn: Drawn) -> Sample:
        """Writes what was drawn, each file in one step; the sample with their hashes.

        Raises:
          OSError: they cannot be written.
        """
        sample, picture = drawn.sample, drawn.picture
        if picture is None:
            return replace(sample, time=now())
        name = f"{place(sample.prompt)}/{sample.image}"
        path = self.folder / IMAGES / f"{name}.{self.format}"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "id": sample.prompt,
            "prompt": drawn.prompt.text,
            "seed": str(sample.seed),
            "image": str(sample.image),
            "settings": json.dumps(sample.settings),
        }
        SAVE[self.format](path, picture, about)
        files = {"file": self._relative(path), "sha256": sha256(path)}
        if self.keep_records:
            path = self.folder / RECORDS / f"{name}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomically(path) as draft, draft.open("wb") as file:
                np.savez_compressed(file, **drawn.arrays)
            files |= {"record": self._relative(path), "record_sha256": sha256(path)}
        return replace(sample, time=now(), **files)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()
