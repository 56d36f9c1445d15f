"""The family's model card, written from its measurements."""

from typing import Any

from jaxspec.pipeline import Pipeline

CARD = """# The emoji family

Small autoregressive models that draw emoji from words: one VQ tokenizer ({codes} codes,
{factor} x {factor} pixels a code) and a transformer for each of {sizes} px, of the
architecture of Tar's AR-DTok. They carry jaxspec's demonstrations, tests and
measurements, offline, in seconds on a laptop.

## Data and licences

6,633 training drawings of the emoji set in `experiments/emoji/data` (its `NOTICE` has
the full texts):

| drawings | copyright | licence |
|---|---|---|
| Noto Emoji, styles `noto` and `blob` | Google Inc. | Apache-2.0 |
| Fluent Emoji, styles `glossy` and `flat` | Microsoft Corporation | MIT |
| Twemoji, style `tweet` | Twitter, Inc and other contributors | CC BY 4.0 |
| labels and tags: emojibase-data | Miles Johnson | MIT |

Pictures of the style `tweet`, and works made with these models, should carry: "Twemoji
by Twitter, Inc and other contributors, CC BY 4.0". Word vectors are reduced from
all-MiniLM-L6-v2 (Apache-2.0). The weights are under Apache-2.0, as jaxspec.

The splits `test_concept` (concepts seen in no style) and `test_pair` (drawings whose
concept was seen in another style) were never trained on, by the tokenizer either.

## Training

    make train-deps
    python -m experiments.emoji.train --stage all
    python -m experiments.emoji.evaluate

The first takes about two hours on two CPU cores. What was tried, and what
limits the family: `docs/emoji.md`.

## Measurements

By {command};
definitions in `experiments/emoji/metrics.py`, all numbers with intervals in
`metrics.json`.
Guidance {guidance} (chosen on val_concept), temperature {temperature}, top-k {top_k}.

Round trips of the tokenizer on test_pair:

{vq}

Negative log-likelihood in nats a token, with the true, another's, and no caption:

{nats}

Pictures of 128 px drawn from captions, mean over {seeds} seeds (and standard deviation
from seed to seed); `real` are the true drawings:

{pictures}
{best}{large}
## Other networks

For faster decoding the folder holds, by the sizes that they were trained for: EAGLE's
drafters ({drafters}), FlashAR's heads ({flashar}), SSD's heads ({ssd}), models for LPD
({lpd}), and networks that change the size of code grids ({upsamplers}). What they are
worth: `docs/methods.md`. A matcher ({matchers}) chooses among several draws.

## Limits

{limits}
"""


def _table(head: list[str], rows: list[list[Any]]) -> str:
    line = lambda cells: "| " + " | ".join(map(str, cells)) + " |"
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


def _sizes(networks: tuple) -> str:
    return ", ".join(f"{size} px" for size, *_ in networks) or "none"


def _vq(report: dict) -> str:
    rows = [
        [
            size,
            f"{row['psnr'][0]:.1f}",
            *(f"{row[k][0]:.2f}" if k in row else "" for k in ("r1", "r5")),
        ]
        for size, row in report["vq"].items()
    ]
    return _table(["px", "PSNR, dB", "R@1", "R@5"], rows)


def _nats(report: dict) -> str:
    splits = ("train", "test_pair", "test_concept")
    kinds = ("true", "shuffled", "null")
    rows = [
        [size, *(" / ".join(f"{row[s][k]:.2f}" for k in kinds) for s in splits)]
        for size, row in report["nats"].items()
    ]
    return _table(["px", *splits], rows)


def _large(report: dict) -> str:
    """What sizes above the default draw, if there are any."""
    parts = [
        f"\nPictures of {size} px, made small for the measures:\n\n"
        f"{_pictures({'pictures': pictures, 'real': report['real']})}\n"
        for size, pictures in report.get("large", {}).items()
    ]
    return "".join(parts)


def _best(report: dict) -> str:
    """What the best of several draws are, if that was measured."""
    if "best" not in report:
        return ""
    real = report["matcher"]
    shares = ", ".join(f"{real[s]['r5']:.2f} of {s}" for s in ("test_pair", "train"))
    pictures = {"pictures": report["best"], "real": report["real"]}
    return (
        "\nOf eight draws each, the one that the family's matcher chose "
        "(`--best-of 8`). The matcher\n(a small network on codes, trained on `train`; "
        "it shares nothing with the measures but\nthe words' vectors) finds the label "
        f"among its five best for {shares}\nreal drawings:\n\n{_pictures(pictures)}\n"
    )


def _commands(report: dict) -> str:
    command = f"`{report['command']}`"
    if "sizes_command" in report:
        command += f", and the sizes by `{report['sizes_command']}`"
    if "best_command" in report:
        command += f", the best of eight by `{report['best_command']}`"
    return command


def _pictures(report: dict) -> str:
    rows = []
    for split, values in report["pictures"].items():
        real = report["real"][split]
        rows.append(
            [f"{split}, real", *(f"{real[k][0]:.2f}" for k in ("r1", "r5")), "", ""]
        )
        cells = [
            f"{s['mean']:.{digits}f} ({s['deviation']:.{digits}f})"
            for k, digits in (("r1", 3), ("r5", 3), ("fd", 1), ("kid", 4))
            for s in [values["spread"][k]]
        ]
        rows.append([f"{split}, drawn", *cells])
    return _table(["captions", "R@1", "R@5", "FD", "KID"], rows)


LIMITS = """The models draw single things on white. At 128 px hearts, faces, people,
books and food often come out as what was asked for; most other things do not.
Composition, counting, text, and colours that contradict the thing mostly fail, and so
do words far from any emoji. At 64 px more prompts are followed. The transformer of 128
px is under-trained: 12 epochs."""


def write(pipeline: Pipeline, report: dict) -> str:
    """The card as Markdown."""
    config = pipeline.config
    seeds = len(report["pictures"]["train"]["seeds"])
    return CARD.format(
        command=_commands(report),
        codes=config.vq.codebook_size,
        factor=config.vq.factor,
        sizes=", ".join(map(str, config.sizes)),
        guidance=report["guidance"]["chosen"],
        temperature=config.defaults.temperature,
        top_k=config.defaults.top_k,
        vq=_vq(report),
        nats=_nats(report),
        pictures=_pictures(report),
        best=_best(report),
        large=_large(report),
        drafters=_sizes(config.drafters),
        flashar=_sizes(config.flashar),
        lpd=_sizes(config.lpd),
        ssd=_sizes(config.ssd),
        matchers=_sizes(config.matchers),
        upsamplers=", ".join(f"{a} to {b} px" for a, b, _ in config.upsamplers),
        seeds=seeds,
        limits=LIMITS,
    )
