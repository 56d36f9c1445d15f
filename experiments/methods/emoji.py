"""The emoji family's task: captions held out in their style."""

from dataclasses import replace
from pathlib import Path

import jaxspec
from experiments.emoji import data, metrics
from experiments.methods.measure import Task


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
    ref = metrics.reference(drawings, folder)
    chosen = metrics.evaluation_set(drawings, "test_pair", count)
    labels, texts = drawings.label[chosen], ref.texts[chosen]
    return Task(
        pipeline=pipeline,
        captions=[drawings.caption(i) for i in chosen],
        real=ref.features[chosen],
        features=metrics.features,
        match=lambda x: metrics.matches(ref.match, x, labels, texts),
    )
