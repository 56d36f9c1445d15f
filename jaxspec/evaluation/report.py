"""Runs beside one another on one page, which is a file: see `write_report`."""

import base64
import datetime
import io
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

import jaxspec
from jaxspec.decoding import ACCEPTED
from jaxspec.evaluation.compare import compared
from jaxspec.evaluation.compared import RATIOS, compared_table, notes, pooled
from jaxspec.evaluation.results import (
    Place,
)
from jaxspec.evaluation.runs import Shown, shown
from jaxspec.evaluation.scores import Score
from jaxspec.evaluation.tables import Row, Table, interval, table, told, turned
from jaxspec.figures import atomically, labelled_grid, plain_font, save_png
from jaxspec.maps import ORIGINS, SCALE

MEGABYTES = 15  # of a report, at most
PROMPTS = 100  # shown, at most
LEAST_SIDE = 96  # pixels of a picture on a sheet
# Longest side and quality of the pictures in a page, best first; None is as they are.
_FORMS = (
    (None, None),
    (None, 92),
    (768, 88),
    (512, 85),
    (384, 82),
    (256, 78),
    (192, 70),
    (128, 60),
)


def write_report(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    title: str = "Decoding methods side by side",
    prompts: int = PROMPTS,
    megabytes: float = MEGABYTES,
) -> dict[str, Any]:
    """Writes the page: one file that needs no network and no server.

    Runs may be partial and may have different prompts; pictures stand beside one
    another by prompt id and number, and gaps are shown. Pictures are compressed as far
    as `megabytes` asks for, so a page is to look at, not to measure from.

    Args:
      folders: of the runs, the one to compare with first.
      out: the file, replaced in one step.
      title: of the page.
      prompts: shown, at most; tables and maps are of all.
      megabytes: that the file may have.

    Returns:
      What was done: `prompts` and `pictures` shown, `side` of their longest side in
      pixels, `quality` (None is lossless) and `bytes` of the file.

    Raises:
      ValueError: runs cannot be shown together, or `megabytes` is too small.
      OSError: a file cannot be read or written.
    """
    runs = shown(folders)
    chosen = _prompts(runs)
    record = _page(runs, chosen[:prompts], len(chosen), title)
    places = record.pop("places")
    if not places:
        raise ValueError(
            f"the first {prompts} prompts have no picture: show more of them"
        )
    sizes = {run.results.image(place).shape for run, place in places}
    template = _template(title)
    for side, quality in _FORMS:
        if side is not None and side >= max(max(size) for size in sizes):
            continue
        pictures = _encoded(places, side, quality, megabytes)
        if pictures is None:
            continue
        page = template.replace("{{data}}", _embedded(record | {"pictures": pictures}))
        if len(page.encode()) <= megabytes * 1e6:
            break
    else:
        raise ValueError(
            f"{len(places)} pictures do not fit {megabytes:g} MB: show fewer prompts, "
            f"or allow more"
        )
    out = Path(out)
    with atomically(out) as draft:
        draft.write_text(page, encoding="utf8")
    return {
        "prompts": len(record["prompts"]),
        "pictures": len(places),
        "side": side or max(max(size) for size in sizes),
        "quality": quality,
        "bytes": len(page.encode()),
    }


def write_grid(
    folders: Sequence[str | Path], out: str | Path, *, prompts: int = PROMPTS
) -> dict[str, int]:
    """Writes a sheet of all pictures, a row a prompt and a column a run, as PNG.

    Pictures that are not there are marked as missing or failed, so that the sheet of a
    run that is not finished can be looked at.

    Returns:
      `pictures` on the sheet, and `gaps`.

    Raises:
      ValueError: a folder is damaged or has no picture.
    """
    runs = shown(folders)
    height, width = next(
        r.results.image(p).shape[:2] for r in runs for p in r.results.drawn
    )
    larger = -(-LEAST_SIDE // max(height, width))  # times, so that all can be seen
    size = height * larger, width * larger
    tiles, under, gaps = [], [], 0
    for prompt in _prompts(runs)[:prompts]:
        for k in range(max(run.results.run.images for run in runs)):
            for run in runs:
                place = prompt.id, k
                if place in run.results.drawn:
                    image = run.results.image(place)
                    tiles.append(image.repeat(larger, 0).repeat(larger, 1))
                else:
                    failed = place in run.results.failed
                    tiles.append(_gap(size, "failed" if failed else "missing"))
                    gaps += 1
                under.append(f"{prompt.text or prompt.id} · {run.name}")
    sheet = labelled_grid(tiles, under, _columns(runs, len(tiles)))
    save_png(out, sheet, {"runs": ", ".join(run.name for run in runs)})
    return {"pictures": len(tiles) - gaps, "gaps": gaps}


def _columns(runs: list[Shown], tiles: int) -> int | None:
    """A row a prompt; of one run with one picture each, about a square."""
    together = len(runs) * max(run.results.run.images for run in runs)
    return together if together > 1 else None


def _gap(size: tuple[int, int], text: str) -> np.ndarray:
    """A tile that says why there is no picture."""
    height, width = size
    tile = Image.new("RGB", (width, height), (238, 238, 238))
    pen = ImageDraw.Draw(tile)
    pen.rectangle((0, 0, width - 1, height - 1), outline=(120, 120, 120))
    pen.line((0, 0, width, height), fill=(205, 205, 205))
    pen.line((0, height, width, 0), fill=(205, 205, 205))
    middle = width / 2, height / 2
    font = plain_font(max(11, width // 9))
    pen.text(middle, text, (60, 60, 60), font, "mm", stroke_width=3, stroke_fill="#eee")
    return np.asarray(tile)


# What the page's script is told.


def _prompts(runs: list[Shown]) -> list[Any]:
    """Every prompt of the runs once, in the order of the first that has it.

    Raises:
      ValueError: two runs mean different texts by one id.
    """
    known: dict[str, Any] = {}
    for run in runs:
        for prompt in run.results.prompts:
            other = known.setdefault(prompt.id, prompt)
            if other.text != prompt.text:
                raise ValueError(
                    f"prompt {prompt.id!r} is {other.text!r} in one run and "
                    f"{prompt.text!r} in {run.name}: these runs cannot be paired by id"
                )
    return list(known.values())


def _page(runs: list[Shown], prompts: list[Any], of: int, title: str) -> dict[str, Any]:
    """All but the pictures; "places" says which those are, in their order."""
    images = max(run.results.run.images for run in runs)
    places: list[tuple[Shown, Place]] = []
    cells = [
        [[_sample(run, (p.id, k), places) for run in runs] for k in range(images)]
        for p in prompts
    ]
    pairs, beside = _paired(runs)
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    made = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC")
    return {
        "about": f"{count}, {of} prompt{'s' * (of > 1)}. Written {made} by jaxspec "
        f"{jaxspec.__version__}.",
        "more": f"; {of - len(prompts)} prompts are left out" * (of > len(prompts)),
        "images": images,
        "accepted": ACCEPTED,
        "origins": [
            {"name": name, "colour": colour} for name, colour in ORIGINS.values()
        ],
        "scale": np.asarray(SCALE).tolist(),
        "runs": [_run(run) for run in runs],
        "prompts": [
            {"id": p.id, "text": p.text, "category": p.category} for p in prompts
        ],
        "cells": cells,
        "measures": _measures(runs),
        "tables": {
            "runs": _runs_table(runs),
            "failures": _failures(runs),
            "settings": _settings(runs),
            **pairs,
        },
        "notes": {"runs": _notes(runs), **beside},
        "places": places,
    }


def _run(run: Shown) -> dict[str, Any]:
    return {
        "name": run.name,
        "exact": run.guarantee == "exact",
        # Only MuLo redraws islands; elsewhere what was not accepted is no region.
        "islands": run.method["name"] == "MuLo",
        "grid": run.results.grid,
        "passes": run.counts["passes"],
        "scores": {s.name: [s.value, s.low, s.high] for s in run.scores.values()},
        "maps": _maps(run),
    }


def _sample(
    run: Shown, place: Place, places: list[tuple[Shown, Place]]
) -> dict[str, Any] | None:
    """A picture and how it came about, or its failure; None where it is missing."""
    results = run.results
    if place in results.failed:
        return {"error": results.failed[place].error}
    if place not in results.drawn:
        return None
    record, passes = results.record(place), results.drawn[place].target_passes or 0
    if record is None:  # nothing is known of its cells: all are there from the start
        record = {"final_pass": np.zeros((1, 1)), "origin": np.zeros((1, 1))}
    places.append((run, place))
    return {
        "picture": len(places) - 1,
        "passes": passes,
        "grid": record["origin"].shape,
        "final": _base64(record["final_pass"].clip(0).astype("<u2").tobytes()),
        "origin": _base64(record["origin"].astype(np.uint8).tobytes()),
    }


def _maps(run: Shown) -> dict[str, Any] | None:
    """The means of a run over its grid, as bytes; None if no record was kept."""
    records = [run.results.record(place) for place in run.results.drawn]
    kept = [record for record in records if record is not None]
    if not kept:
        return None
    accepted = np.mean([record["origin"] == ACCEPTED for record in kept], axis=0)
    final = np.mean([record["final_pass"] for record in kept], axis=0)
    most = max(float(final.max()), 1.0)
    rows = len(accepted) // 2 or 1
    share = lambda part: f"{100 * part.mean():.0f} %"
    halves = lambda x, told: f"upper half {told(x[:rows])}, lower {told(x[rows:])}"
    whole = lambda part: f"{part.mean():.0f}"
    return {
        "accepted": run.counts["acceptance"]
        and {
            "cells": _base64(np.round(255 * accepted).astype(np.uint8).tobytes()),
            "told": f"{run.name}: {share(accepted)} of the cells are accepted drafts; "
            f"{halves(accepted, share)}",
        },
        "pass": {
            "cells": _base64(np.round(255 * final / most).astype(np.uint8).tobytes()),
            "told": f"{run.name}: mean pass of a cell {whole(final)}; "
            f"{halves(final, whole)}",
            "most": f"{most:.0f}",
        },
    }


def _measures(runs: list[Shown]) -> list[dict[str, str]]:
    """The scores that can be plotted, those that most runs have first."""
    names = dict.fromkeys(name for run in runs for name in run.scores)
    have = lambda name: [run.scores[name] for run in runs if name in run.scores]
    return [
        {
            "key": name,
            "name": name,
            "better": have(name)[0].better,
            "note": f"{have(name)[0].network}; {have(name)[0].reference}.",
        }
        for name in sorted(names, key=lambda name: -len(have(name)))
    ]


# Tables.


def _runs_table(runs: list[Shown]) -> Table:
    names = [measure["key"] for measure in _measures(runs)]
    columns = [
        "run",
        "pictures",
        "passes",
        "cells a pass",
        "accepted",
        "seconds a picture",
    ]
    rows: list[Row] = []
    for run in runs:
        found = run.counts
        gaps = [f"{found[k]} {k}" for k in ("failed", "missing") if found[k]]
        rows.append(
            {
                "cells": [
                    [run.name, run.guarantee],
                    [told(found["pictures"], 1), ", ".join(gaps)],
                    [told(found["passes"]), interval(found["passes"])],
                    pooled(found["cells_per_pass"]),
                    pooled(found["acceptance"], 100, " %"),
                    _time(run),
                    *[_score(run.scores.get(name), run) for name in names],
                ]
            }
        )
    return table([*columns, *names], rows)


def _paired(runs: list[Shown]) -> tuple[dict[str, Table], dict[str, Any]]:
    """The comparison with the first run; nothing of a single run."""
    if len(runs) < 2:
        return {}, {}
    head = f"Paired with {runs[0].name}"
    try:
        record = compared(runs)
    except ValueError as error:
        return {"paired": table(("",), [])}, {
            "paired_head": head,
            "paired": [str(error)],
        }
    found = turned(compared_table(record))
    # The rest stands in the table of the runs.
    found["rows"] = [
        r for r in found["rows"] if r["cells"][0] not in ("passes", *RATIOS)
    ]
    return {"paired": found}, {"paired_head": head, "paired": notes(record)}


def _time(run: Shown) -> list[str]:
    found = run.counts
    if found["seconds"] is None:
        return ["", "nothing timed without compiling" * bool(found["compiled"])]
    if not run.judged:
        return ["withheld", "biased, and nothing is known of its quality"]
    where = [*found["device"], *[f"batch {b}" for b in found["batch"]], *found["dtype"]]
    return [told(found["seconds"]), ", ".join(where)]


def _score(score: Score | None, run: Shown) -> list[str]:
    """A score; of how many pictures, where those are not all that there are now."""
    if score is None:
        return ["", ""]
    under = [interval((score.value, score.low, score.high))]
    under += [f"of {score.count:,}"] * (score.count != run.counts["pictures"])
    return [told(score.value), ", ".join(filter(None, under))]


def _notes(runs: list[Shown]) -> str:
    skipped = sum(run.counts["compiled"] for run in runs)
    pictures = "1 picture is" if skipped == 1 else f"{skipped} pictures are"
    without = f" {pictures} left out of it, since something compiled." * (skipped > 0)
    return (
        "Passes are the target's for a picture, prefill included, with a 95 % interval "
        "over prompts. Cells a pass and accepted drafts are pooled over pictures, with "
        "the mean of the pictures' ratios beneath. Time is that of decoding, a "
        f"picture's share of its batch.{without}"
    )


def _failures(runs: list[Shown]) -> Table:
    rows: list[Row] = []
    for run in runs:
        texts = {prompt.id: prompt.text for prompt in run.results.prompts}
        failed = run.results.failed
        gaps = dict.fromkeys(run.results.missing, "not drawn, or its file is gone")
        for place in run.results.places:
            if place not in failed and place not in gaps:
                continue
            why = failed[place].error if place in failed else gaps[place]
            cells = [run.name, [texts[place[0]], place[0]], place[1], why]
            rows.append({"cells": cells})
    return table(("run", "prompt", "image", "what happened"), rows, numbers=False)


def _settings(runs: list[Shown]) -> Table:
    each = [_flat(run.results.run) for run in runs]
    names = list(dict.fromkeys(name for values in each for name in values))
    rows: list[Row] = [
        {
            "cells": [name, *[values.get(name, "") for values in each]],
            "differs": len({values.get(name, "") for values in each}) > 1,
        }
        for name in names
    ]
    rows.sort(key=lambda row: not row["differs"])
    return table(["setting", *[run.name for run in runs]], rows, numbers=False)


def _flat(run: Any) -> dict[str, str]:
    """A run's settings as text, nested ones by dotted names."""
    out: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else key, inner)
        else:
            out[name] = str(value)

    add("", run.settings)
    add("seed", run.seed)
    add("images a prompt", run.images)
    add("weights", run.weights)
    add("dtype", run.dtype)
    add("prompts", f"{run.prompts.count} of {Path(run.prompts.source).name}")
    add("jaxspec", run.version)
    return out


# The file.


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _encoded(
    places: list[tuple[Shown, Place]],
    side: int | None,
    quality: int | None,
    megabytes: float,
) -> list[str] | None:
    """Pictures as data addresses; None as soon as they are too large together."""
    room, addresses = megabytes * 1e6, []
    for run, place in places:
        image = Image.fromarray(run.results.image(place))
        if side is not None:
            image.thumbnail((side, side), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        how = {"lossless": True} if quality is None else {"quality": quality}
        image.save(buffer, "WEBP", **how)
        addresses.append(f"data:image/webp;base64,{_base64(buffer.getvalue())}")
        room -= len(addresses[-1])
        if room < 0:
            return None
    return addresses


def _embedded(record: dict[str, Any]) -> str:
    """JSON that no text in it can end early."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _template(title: str) -> str:
    page = files("jaxspec.evaluation") / "page"
    read = lambda name: (page / name).read_text(encoding="utf8")
    escaped = title.replace("&", "&amp;").replace("<", "&lt;")
    return (
        read("page.html")
        .replace("{{style}}", read("style.css"))
        .replace("{{script}}", read("plot.js") + read("script.js"))
        .replace("{{title}}", escaped)
    )
