"""Packs what scores of the emoji family need: `jaxspec/families/emoji/measures.npz`.

python -m experiments.emoji.measures

The held-out drawings of test_pair (features, labels), the regression from features to
text vectors, and the axes of the Frechet distance: see `experiments/emoji/metrics.py`
for how they are made. Half precision. Their captions go to `captions.tsv` beside it, a
prompt set for `jaxspec evaluate run`. Needs `make train-deps`.
"""

from pathlib import Path

import numpy as np
import typer

from experiments.emoji import data, metrics
from jaxspec.figures import atomically

SPLIT = "test_pair"


def main(family: Path = Path("jaxspec/families/emoji")) -> None:
    """Writes both files."""
    folder = Path("runs/emoji")
    drawings = data.load(folder)
    ref = metrics.reference(drawings, folder)
    chosen = drawings.index(SPLIT)
    labels, first = np.unique(drawings.label[chosen], return_index=True)
    half = lambda x: x.astype(np.float16)
    weights = ref.match.weights
    captions = [drawings.caption(i) for i in chosen]
    with atomically(family / "measures.npz") as draft, draft.open("wb") as file:
        np.savez_compressed(
            file,
            captions=np.array(captions),
            label=drawings.label[chosen],
            features=half(ref.features[chosen]),
            labels=labels,
            texts=half(ref.texts[chosen][first]),
            feature_mean=ref.match.feature_mean.astype(np.float32),
            text_mean=ref.match.text_mean.astype(np.float32),
            weights=half(weights / np.abs(weights).max()),  # cosines have no scale
            axes=half(ref.axes),
        )
    rows = [
        f"{SPLIT}-{k:03d}\t{caption}\t{drawings.style[i]}\n"
        for k, (i, caption) in enumerate(zip(chosen, captions, strict=True))
    ]
    with atomically(family / "captions.tsv") as draft:
        draft.write_text("id\tprompt\tcategory\n" + "".join(rows), encoding="utf8")


if __name__ == "__main__":
    typer.run(main)
