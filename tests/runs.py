"""Folders of runs that no model drew: pictures of known cells, with known counts."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.decoding import ACCEPTED, BONUS, RESAMPLED, describe
from jaxspec.evaluation import records
from jaxspec.evaluation.prompts import source_of
from jaxspec.evaluation.records import Prompt, Run, Sample
from jaxspec.evaluation.scores import Score
from jaxspec.figures import save_png
from jaxspec.methods import AR

SIDE, CELLS = 32, 4  # of a picture in pixels, of its grid


def prompts(count: int) -> list[Prompt]:
    kinds = ("animal", "thing")
    return [
        Prompt(f"p{i}", f"a {kinds[i % 2]} with number {i}", kinds[i % 2])
        for i in range(count)
    ]


def picture(i: int, k: int) -> np.ndarray:
    """Every cell another colour, every picture too; uint8 [32, 32, 3]."""
    cells = np.arange(CELLS * CELLS).reshape(CELLS, CELLS)
    colours = np.stack([cells * 15, 255 - cells * 15, cells * 0 + 40 * i + 9 * k], -1)
    block = SIDE // CELLS
    return colours.astype(np.uint8).repeat(block, 0).repeat(block, 1)


def raster() -> tuple[np.ndarray, np.ndarray]:
    """Plain AR: the pass and the origin of every cell."""
    return np.arange(16).reshape(4, 4), np.zeros((4, 4), int)


def rows() -> tuple[np.ndarray, np.ndarray]:
    """A row a pass; of each, two accepted, one resampled, one bonus."""
    final = np.arange(4)[:, None].repeat(4, 1)
    return final, np.array([[ACCEPTED, ACCEPTED, RESAMPLED, BONUS]]).repeat(4, 0)


def made(
    folder: Path,
    method: Any = None,
    *,
    of: Sequence[Prompt],
    images: int = 1,
    seed: int = 0,
    cells=raster,
    drafted: int = 0,
    seconds: float = 0.5,
    failed: Mapping[tuple[str, int], str] | None = None,
    missing: Collection[tuple[str, int]] = (),
    compiled: Collection[str] = (),
    settings: Mapping[str, Any] | None = None,
    device: str = "cpu",
    host: str = "here",
    refill: bool = False,
    said: tuple[int, float] | None = None,
) -> Path:
    """Writes a run; `failed` and `missing` are of (prompt id, number).

    What the target `said` are divergences, and a log-probability of the first picture;
    that of each further prompt's is 1 less.
    """
    final, origin = cells()
    own = {"family": "toy", "size": SIDE, "method": describe(method or AR())}
    run = Run(
        settings=own | {"guidance": 2.0} | dict(settings or {}),
        weights="0123456789ab",
        seed=seed,
        images=images,
        prompts=source_of("toy.txt", of),
        dtype="float32",
        version="0.0",
    )
    (folder / records.SAMPLES).mkdir(parents=True)
    records.write_run(folder, run, of)
    samples = []
    for i, prompt in enumerate(of):
        for k in range(images):
            key: dict[str, Any] = {"prompt": prompt.id, "image": k, "seed": seed}
            key |= {"settings": run.settings, "weights": run.weights}
            key["time"] = records.now()
            if (prompt.id, k) in (failed or {}):
                samples.append(Sample(**key, error=(failed or {})[prompt.id, k]))
                continue
            if (prompt.id, k) in missing:
                continue
            place = records.place(prompt.id)
            file, record = f"images/{place}/{k}.png", f"records/{place}/{k}.npz"
            for path in (folder / file, folder / record):
                path.parent.mkdir(parents=True, exist_ok=True)
            save_png(folder / file, picture(i, k), {})
            arrays = {"tokens": final, "final_pass": final, "origin": origin}
            np.savez(folder / record, **arrays)
            count = lambda kind: int((origin == kind).sum())
            sample = Sample(
                **key,
                file=file,
                sha256=records.sha256(folder / file),
                record=record,
                record_sha256=records.sha256(folder / record),
                target_passes=int(final.max()),
                prefill_passes=1,
                draft_passes=0,
                drafted=drafted,
                accepted=count(ACCEPTED),
                resampled=count(RESAMPLED),
                bonus=count(BONUS),
                divergences=None if said is None else said[0],
                log_prob=None if said is None else said[1] - i,
                seconds=seconds * (100 if prompt.id in compiled else 1),
                stages={"pictures": 0.25},
                batch=4,
                refill=refill,
                compiled=prompt.id in compiled,
                device=device,
                dtype="float32",
                host=host,
            )
            samples.append(sample)
    lines = records.sample_lines(samples)
    (folder / records.SAMPLES / "one.jsonl").write_bytes(lines)
    return folder


def score(name: str, values: Mapping[str, float], **about: str) -> Score:
    """A score of pictures, its interval 0.05 to either side."""
    value = float(np.mean(list(values.values())))
    given = dict.fromkeys(("network", "weights", "resize", "reference", "protocol"), "")
    return Score(
        name,
        value,
        value - 0.05,
        value + 0.05,
        "higher",
        len(values),
        **(given | about),
        values=dict(values),
    )
