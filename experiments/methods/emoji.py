"""The emoji family's task: captions held out in their style."""

from dataclasses import replace
from pathlib import Path

import numpy as np

import jaxspec
from experiments.emoji import data, metrics
from experiments.emoji.data import Drawings
from experiments.methods.colours import Examples, named
from experiments.methods.measure import Task
from experiments.methods.run import Several
from experiments.methods.variety import same_drawing

HELD_OUT = ("val_concept", "test_pair", "test_concept")


def emoji(family: str, folder: Path, count: int, size: int | None = None) -> Task:
    """test_pair of the emoji drawings.

    Args:
      family: a name or a folder.
      folder: where the rendered drawings are kept.
      count: captions, a picture each.
      size: of the pictures in pixels; the family's default for None.

    Raises:
      ValueError: the family has no such size.
    """
    pipeline = jaxspec.load(family)
    size = pipeline.config.check_size(size)
    defaults = replace(pipeline.config.defaults, size=size)
    pipeline = replace(pipeline, config=replace(pipeline.config, defaults=defaults))
    drawings = data.load(folder)
    chosen = metrics.evaluation_set(drawings, "test_pair", count)
    return _task(pipeline, drawings, folder, chosen)


def several(task: Task, folder: Path) -> Several:
    """For pictures of the task's captions, and of all held-out ones with a colour."""
    size = task.pipeline.config.defaults.size
    drawings = data.load(folder, [size])
    chosen = metrics.evaluation_set(drawings, "test_pair", len(task.captions))
    again = task.pipeline.images(task.pipeline.encode(drawings.images[size][chosen]))
    captions = np.array([drawings.caption(i) for i in range(len(drawings.label))])
    has = np.array([named(caption) is not None for caption in captions])
    asked = np.flatnonzero(has & np.isin(drawings.split, HELD_OUT))
    train = np.flatnonzero(has & (drawings.split == "train"))
    images = drawings.images[size][train]
    return Several(
        same=same_drawing(task.real, task.features(again)),
        coloured=_task(task.pipeline, drawings, folder, asked),
        examples=Examples.create(captions[train].tolist(), images),
    )


def _task(
    pipeline: jaxspec.Pipeline, drawings: Drawings, folder: Path, chosen: np.ndarray
) -> Task:
    """Of the captions of some drawings."""
    ref = metrics.reference(drawings, folder)
    labels, texts = drawings.label[chosen], ref.texts[chosen]
    return Task(
        pipeline=pipeline,
        captions=[drawings.caption(i) for i in chosen],
        real=ref.features[chosen],
        features=metrics.features,
        match=lambda x: metrics.matches(ref.match, x, labels, texts),
    )
