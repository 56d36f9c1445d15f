"""How often a drawing has the colour that its prompt names.

python -m experiments.emoji.named_colours

Prompts name each of seven colours on eight things, in three styles. Which colour a
drawing has: `experiments.methods.colours`. Those of the family, and of a stage that is
not packaged; "own" is how often the colour comes without being named.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

import jaxspec
from experiments.emoji import data
from experiments.emoji.augment import HUES
from experiments.emoji.train_ar import STAGES, load_decoder
from experiments.methods.colours import Examples
from jaxspec.pipeline import Pipeline
from jaxspec.pixels import codebook

THINGS = ("apple", "house", "heart", "book", "car", "balloon", "fish", "hat")
NAMED_STYLES = ("noto", "flat", "glossy")


def share(
    pipeline: Pipeline, known: Examples, named: bool, **settings
) -> dict[str, float]:
    """The share of drawings of each colour's hue, where it is named or is not."""
    cases = list(product(HUES, NAMED_STYLES, THINGS))
    prompts = [f"{s} {c} {t}" if named else f"{s} {t}" for c, s, t in cases]
    images = jaxspec.generate(pipeline, prompts, seed=0, **settings).images
    colours = [colour for colour, _, _ in cases]
    right = (known.names_of(images) == colours).reshape(len(HUES), -1).mean(1)
    return dict(zip(HUES, right.round(3).tolist(), strict=True)) | {
        "all": round(float(right.mean()), 3)
    }


def with_stage(pipeline: Pipeline, folder: Path, stage: str) -> Pipeline:
    """The family with the decoder of another stage."""
    codes = codebook(pipeline.config.vq, pipeline.params["vq"])
    decoder = load_decoder(folder, stage, codes)
    decoders = {**pipeline.params["decoders"], str(STAGES[stage].size): decoder}
    return replace(pipeline, params={**pipeline.params, "decoders": decoders})


def main(
    stage: Annotated[str, typer.Option(help="To compare with.")] = "128-varied",
    folder: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path(
        "runs/emoji"
    ),
    out: Annotated[Path, typer.Option(help="Where the numbers go.")] = Path(
        "docs/results/named_colours.json"
    ),
) -> None:
    """Measures how often drawings have the colour that their prompts name."""
    family, drawings = jaxspec.load("emoji"), data.load(folder, (128,))
    train = drawings.index("train")
    captions = [drawings.caption(i) for i in train]
    known = Examples.create(captions, drawings.images[128][train])
    record: dict = {"command": "python -m experiments.emoji.named_colours"}
    for name in ("packaged", stage):
        drawn_by = with_stage(family, folder, name) if name == stage else family
        record[name] = {
            "own": share(drawn_by, known, named=False),
            "named": share(drawn_by, known, named=True),
            "named, best of 8": share(drawn_by, known, named=True, best_of=8),
        }
        print(json.dumps({name: record[name]}), flush=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
