"""Scores of the emoji family: on its held-out captions, without a download.

How well pictures match their words (R@1, R@5), and how near they are as a set to the
real drawings of the same captions (FD, KID), all on EfficientNet-Lite0's features at
128 px. They compare runs of this family with each other, and with nothing else. How
they were made and what real drawings reach: `experiments/emoji/metrics.py`.

The family carries what they need (`measures.npz`), and its captions as a prompt set
(`captions.tsv`): `jaxspec evaluate run emoji` draws those.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoints.folder import FAMILIES
from jaxspec.evaluation import efficientnet, measures
from jaxspec.evaluation.intervals import normal
from jaxspec.evaluation.measures import TextMatch
from jaxspec.evaluation.results import Place, Results, features_of
from jaxspec.evaluation.scores import Score, check_count, not_scored, of_pictures

LEAST_MATCHED = 20  # pictures, for R@k
LEAST_SET = 128  # for FD and KID: twice the axes of FD
PROTOCOL = "emoji family, 128 px"
RESAMPLES = 200  # of FD


@dataclass(frozen=True)
class Measures:
    """What the held-out drawings say, N of them, of C labels.

    Attributes:
      captions: one a drawing, str [N].
      label: of each drawing, str [N].
      features: of each drawing at 128 px, [N, 1280].
      texts: the vector of each label, by label.
      match: from features to vectors.
      axes: that FD looks along, [1280, 64].
    """

    captions: np.ndarray
    label: np.ndarray
    features: np.ndarray
    texts: dict[str, np.ndarray]
    match: TextMatch
    axes: np.ndarray


def load_measures(path: Path = FAMILIES / "emoji" / "measures.npz") -> Measures:
    """What the family carries for its scores."""
    with np.load(path) as arrays:
        a = {name: arrays[name] for name in arrays}
    single = lambda name: a[name].astype(np.float32)
    return Measures(
        captions=a["captions"],
        label=a["label"],
        features=single("features"),
        texts=dict(zip(a["labels"].tolist(), single("texts"), strict=True)),
        match=TextMatch(a["feature_mean"], a["text_mean"], single("weights")),
        axes=single("axes"),
    )


def emoji_scores(
    results: Results,
    *,
    force: bool = False,
    features: Callable[[np.ndarray], np.ndarray] = measures.features,
    weights: str | None = None,
) -> list[Score]:
    """R@1 and R@5 of all pictures, FD and KID of the first picture of each caption.

    Args:
      results: a run whose prompts are the family's held-out captions.
      force: scores too few pictures, too.
      features: of pictures uint8 [n, H, W, 3], float32 [n, 1280].
      weights: the hash of the network's weights; by default EfficientNet-Lite0's.

    Raises:
      ValueError: a prompt is none of the captions, pictures are smaller than 128 px or
        too few, or one is damaged.
      ModuleNotFoundError: the network's package is not installed.
    """
    known = load_measures()
    row = _rows(results, known)
    places = list(results.drawn)
    firsts = list({prompt: (prompt, k) for prompt, k in reversed(places)}.values())
    check_count("R@k", results, len(places), LEAST_MATCHED, force)
    check_count("emoji FD", results, len(firsts), LEAST_SET, force, forced=4)
    size = results.run.settings["size"]
    if np.min(size) < measures.SIDE:
        raise ValueError(
            f"these scores are of pictures of {measures.SIDE} px or more, and "
            f"{results.folder} has {size} px"
        )
    x = dict(zip(places, features_of(results, places, features), strict=True))
    about: dict[str, Any] = {
        "network": "EfficientNet-Lite0, pooled",
        "weights": weights or _network_hash(),
        "resize": "cubic to 128 px, antialiased",
        "protocol": PROTOCOL,
    }
    return [
        *_matched(results, known, places, x, row, about),
        *_sets(results, known, firsts, x, row, about),
    ]


def _rows(results: Results, known: Measures) -> dict[str, int]:
    """Of each prompt id, the drawing whose caption it is."""
    number = {caption: i for i, caption in enumerate(known.captions.tolist())}
    texts = {prompt.id: " ".join(prompt.text.split()) for prompt in results.prompts}
    others = [text for text in texts.values() if text not in number]
    if others:
        raise ValueError(
            f"{len(others)} of {len(texts)} prompts are no captions of the emoji "
            f"family's held-out drawings, such as {others[0]!r}: draw those with "
            "`jaxspec evaluate run emoji`"
        )
    return {prompt: number[text] for prompt, text in texts.items()}


def _matched(results, known, places, x, row, about) -> list[Score]:
    """Among the labels of all prompts, so that a gap changes no picture's score."""
    own = {prompt: str(known.label[i]) for prompt, i in row.items()}
    labels = sorted(set(own.values()))
    texts = np.stack([known.texts[label] for label in labels])
    drawn = np.stack([x[place] for place in places])
    similarity = known.match.similarity(drawn, texts)
    target = np.array([labels.index(own[prompt]) for prompt, _ in places])
    scores = []
    for k in (1, 5):
        values = measures.recall(similarity, target, k)
        chance = min(1, k / len(labels))
        score = of_pictures(
            results,
            f"emoji R@{k}",
            dict(zip(places, map(float, values), strict=True)),
            better="higher",
            reference=f"{len(labels)} labels, chance {chance:.3f}",
            **about,
        )
        scores.append(score)
    return scores


def _sets(results, known, firsts: list[Place], x, row, about) -> list[Score]:
    drawn = np.stack([x[place] for place in firsts])
    real = known.features[[row[prompt] for prompt, _ in firsts]]
    axes = known.axes[:, : min(known.axes.shape[1], max(1, len(firsts) // 2))]
    kid, error = measures.kernel_distance(drawn, real, size=min(50, len(firsts) // 2))
    fd = measures.frechet_estimate(drawn @ axes, real @ axes, RESAMPLES)
    shared: dict[str, Any] = {
        "better": "lower",
        "count": len(firsts),
        "reference": "held-out drawings of the same captions",
        "missing": not_scored(results, firsts),
        **about,
    }
    return [
        Score("emoji FD", *fd, **shared),
        Score("emoji KID", *normal(kid, error), **shared),
    ]


def _network_hash() -> str:
    digest = hashlib.sha256()
    for name, value in sorted(efficientnet.weights().items()):
        digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
