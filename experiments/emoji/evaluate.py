"""Measures the emoji family, and draws its contact sheet.

python -m experiments.emoji.evaluate

writes `metrics.json` and `MODEL_CARD.md` beside the weights, and the sheet of forty
fixed prompts to `docs/images/emoji_prompts.png`. Needs `make train-deps`. Definitions
of the measures: `experiments/emoji/metrics.py`. Guidance is chosen on val_concept; the
other numbers are of test_pair, test_concept and train.
"""

import json
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import jaxspec
from experiments.emoji import card, data, metrics
from experiments.emoji.codes import caption_pieces
from experiments.emoji.train_ar import caption_kinds, nats
from experiments.emoji.train_matcher import found
from experiments.emoji.train_vq import psnr
from jaxspec.figures import labelled_grid
from jaxspec.matching import towers

BEST_OF = 8
GUIDANCES = (1.0, 1.5, 2.0, 3.0)
PROMPTS = {
    "train concept": (
        "glossy red heart",
        "flat grinning face",
        "noto sun",
        "tweet pizza",
        "blob smiling face with sunglasses",
        "flat house",
        "noto green book",
        "glossy cat face",
        "tweet evergreen tree",
        "flat red apple",
        "noto soccer ball",
        "glossy yellow heart",
        "tweet pig face",
        "flat police officer",
        "noto strawberry",
        "glossy mushroom",
        "tweet sailboat",
        "flat hamburger",
        "noto key",
        "glossy tulip",
    ),
    "test pair": (  # held out in this style
        "noto fire",
        "flat banana",
        "tweet star",
        "noto umbrella with rain drops",
        "glossy sunglasses",
        "tweet cow face",
        "flat purple square",
        "noto mushroom",
        "tweet closed book",
        "glossy crying cat",
    ),
    "free": (
        "glossy emoji of a red heart",
        "flat emoji of a blue apple",
        "noto emoji of a purple house",
        "tweet emoji of a happy dog",
        "flat emoji of a woman with red hair",
        "glossy emoji of a green car",
        "noto emoji of a yellow flower",
        "blob emoji of an angry face",
        "flat emoji of a smiling cat",
        "tweet emoji of an orange heart",
    ),
}


def rounded(values: dict) -> dict:
    """For JSON: four digits."""
    return json.loads(json.dumps(values), parse_float=lambda x: round(float(x), 4))


def encoded(pipeline, images: np.ndarray) -> np.ndarray:
    """Codes of many pictures, a tenth of them at a time."""
    parts = np.array_split(images, 10)
    return np.concatenate([pipeline.encode(x) for x in parts])


def measure_vq(pipeline, drawings, ref, known: dict) -> dict:
    """PSNR and text match of round trips of test_pair, by size; some are known."""
    chosen = metrics.evaluation_set(drawings, "test_pair")
    out = dict(known)
    for size in drawings.images:
        if str(size) in known:
            continue
        real = drawings.images[size][chosen]
        got = np.concatenate(
            [pipeline.images(pipeline.encode(x)) for x in np.array_split(real, 10)]
        )
        decibels = psnr(got / 127.5 - 1, real / 127.5 - 1)
        out[str(size)] = {"psnr": metrics.bootstrap(decibels)}
        if size >= 64:
            out[str(size)] |= metrics.evaluate(ref, drawings, got, chosen)
    return out


def measure_nats(pipeline, drawings, count: int, known: dict) -> dict:
    """Nats a token, by size, split, and kind of caption; some sizes are known."""
    pieces, _ = caption_pieces(pipeline.config.text, drawings)
    table = np.asarray(pipeline.params["text"]["table"])
    out = dict(known)
    for size, config in pipeline.config.decoders:
        if str(size) in known:
            continue
        params = pipeline.params["decoders"][str(size)]
        score = jax.jit(lambda t, c, p=params, m=config: nats(m, p, t, t, c))
        out[str(size)] = {}
        for split in ("train", "test_pair", "test_concept"):
            chosen = metrics.evaluation_set(drawings, split, count)
            tokens = encoded(pipeline, drawings.images[size][chosen])
            tokens = tokens.reshape(len(chosen), -1)
            out[str(size)][split] = {
                kind: np.mean(
                    [float(score(t[None], table[p][None])[0]) for t, p in pairs]
                )
                for kind, own in caption_kinds(pieces[chosen]).items()
                for pairs in [list(zip(tokens, own, strict=True))]
            }
    return out


def draw(pipeline, drawings, chosen, seed: int, **settings) -> np.ndarray:
    """One picture of each chosen drawing's caption."""
    prompts = [drawings.caption(i) for i in chosen]
    out = jaxspec.generate(pipeline, prompts, seed=seed, **settings)
    return out.images


def choose_guidance(pipeline, drawings, ref, count: int) -> dict:
    """Guidance with the best text match on val_concept, and what each reached.

    Text match alone would favour broken pictures of strong colour, so guidance may
    not cost more than a fifth of the best Frechet distance.
    """
    chosen = metrics.evaluation_set(drawings, "val_concept", count)
    table = {
        g: metrics.evaluate(
            ref, drawings, draw(pipeline, drawings, chosen, 0, guidance=g), chosen
        )
        for g in GUIDANCES
    }
    best_fd = min(row["fd"] for row in table.values())
    allowed = [g for g in GUIDANCES if table[g]["fd"] <= 1.2 * best_fd]
    best = max(allowed, key=lambda g: table[g]["r5"].value)
    rows = {str(g): row for g, row in table.items()}
    return {"chosen": best, "val_concept": rows}


def measure_pictures(
    pipeline, drawings, ref, seeds: int, count: int, **settings
) -> dict:
    """Every measure of drawn pictures at every seed, and its spread over seeds."""
    out = {}
    for split in ("test_pair", "train"):
        chosen = metrics.evaluation_set(drawings, split, count)
        rows = [
            metrics.evaluate(
                ref,
                drawings,
                draw(pipeline, drawings, chosen, seed, **settings),
                chosen,
            )
            for seed in range(seeds)
        ]
        value = lambda row, k: row[k].value if k in ("r1", "r5", "cosine") else row[k]
        out[split] = {
            "seeds": rows,
            "spread": {
                k: dict(
                    zip(
                        ("mean", "deviation"),
                        metrics.spread([value(row, k) for row in rows]),
                        strict=True,
                    )
                )
                for k in ("r1", "r5", "cosine", "fd", "kid")
            },
        }
    return out


def measure_matcher(pipeline, drawings, count: int) -> dict:
    """R@1 and R@5 of real drawings by the family's matcher, by split."""
    size = pipeline.config.defaults.size
    out = {}
    for split in ("test_pair", "val_concept", "train"):
        chosen = metrics.evaluation_set(drawings, split, count)
        captions = pipeline.condition([drawings.caption(i) for i in chosen])
        tokens = encoded(pipeline, drawings.images[size][chosen])
        both, labels = towers(pipeline, tokens, captions), drawings.label[chosen]
        out[split] = {f"r{k}": found(*both, labels, k) for k in (1, 5)}
        out[split] |= {"candidates": len(set(labels))}
    return out


def contact_sheet(pipeline, path: Path, guidance: float) -> None:
    """The fixed prompts, of each the best of eight."""
    prompts = [prompt for group in PROMPTS.values() for prompt in group]
    out = jaxspec.generate(
        pipeline, prompts, guidance=guidance, seed=0, best_of=BEST_OF
    )
    sheet = labelled_grid(list(out.images), prompts, columns=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    made_by = PngInfo()
    made_by.add_text("made by", "python -m experiments.emoji.evaluate")
    # 256 colours: a quarter of the bytes.
    Image.fromarray(sheet).quantize().save(path, pnginfo=made_by, optimize=True)


def main(
    family: Annotated[Path, typer.Option(help="Folder of the family.")] = Path(
        "jaxspec/families/emoji"
    ),
    folder: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path(
        "runs/emoji"
    ),
    sheet: Annotated[Path, typer.Option(help="The contact sheet.")] = Path(
        "docs/images/emoji_prompts.png"
    ),
    count: Annotated[int, typer.Option(help="Pictures of each split.")] = 300,
    seeds: Annotated[int, typer.Option(help="Seeds, for the spread.")] = 3,
    sheet_only: Annotated[bool, typer.Option(help="Draw the sheet only.")] = False,
    best_only: Annotated[
        bool,
        typer.Option(
            help="After a matcher was trained: measure the best of eight draws, draw "
            "the sheet, keep the rest."
        ),
    ] = False,
    sizes_only: Annotated[
        bool,
        typer.Option(
            help="After a size was added: measure what is not known, keep the rest."
        ),
    ] = False,
) -> None:
    """Measures the emoji family and draws its contact sheet."""
    pipeline = jaxspec.load(family)
    drawings = data.load(folder, (*data.SIZES, data.LARGE))
    if sheet_only:
        guidance = pipeline.config.defaults.guidance
        contact_sheet(pipeline, sheet, guidance)
        return
    ref = metrics.reference(drawings, folder)
    path = family / "metrics.json"
    wanted = {"vq", "nats", "large"} if sizes_only else set()
    wanted |= {"matcher", "best"} if best_only else set()
    report: dict = json.loads(path.read_text()) if wanted else {}
    command = f"python -m experiments.emoji.evaluate --count {count} --seeds {seeds}"
    report |= {"sizes_command": f"{command} --sizes-only"} if sizes_only else {}
    report |= {"best_command": f"{command} --best-only"} if best_only else {}
    report |= {} if wanted else {"command": command}

    def add(name, measure):
        if wanted and name not in wanted:
            return
        report[name] = rounded(measure())
        print(json.dumps({name: report[name]}), flush=True)
        path.write_text(json.dumps(report, indent=1) + "\n")

    def pictures(**settings):
        guidance = report["guidance"]["chosen"]
        settings |= {"guidance": guidance}
        return measure_pictures(pipeline, drawings, ref, seeds, count, **settings)

    large = [s for s in pipeline.config.sizes if s > pipeline.config.defaults.size]
    known = report.get
    add("vq", lambda: measure_vq(pipeline, drawings, ref, known("vq", {})))
    add("nats", lambda: measure_nats(pipeline, drawings, count, known("nats", {})))
    add("real", lambda: real_drawings(drawings, ref, count))
    add("guidance", lambda: choose_guidance(pipeline, drawings, ref, count))
    add("pictures", pictures)
    add("matcher", lambda: measure_matcher(pipeline, drawings, count))
    add("best", lambda: pictures(best_of=BEST_OF))
    add("large", lambda: {str(size): pictures(size=size) for size in large})
    if not wanted or best_only:
        contact_sheet(pipeline, sheet, report["guidance"]["chosen"])
    (family / "MODEL_CARD.md").write_text(card.write(pipeline, report))


def real_drawings(drawings, ref, count: int) -> dict:
    """The text match of the real drawings: the ceiling."""
    out = {}
    for split in ("test_pair", "train"):
        chosen = metrics.evaluation_set(drawings, split, count)
        out[split] = metrics.text_match(
            ref.match, ref.features[chosen], drawings.label[chosen], ref.texts[chosen]
        )
    return out


if __name__ == "__main__":
    typer.run(main)
