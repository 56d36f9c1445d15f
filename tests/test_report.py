"""The page and the sheet of runs whose cells and counts are known."""

import base64
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from jaxspec.evaluation.records import Prompt
from jaxspec.evaluation.report import write_grid, write_report
from jaxspec.methods import SCD, MuLo
from tests import runs

HOSTILE = "</script><b>\u2028 & \"'` ♥"


def embedded(path):
    text = path.read_text(encoding="utf8")
    found = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', text
    )
    assert len(found) == 1
    return json.loads(found[0])


def decoded(address):
    head, data = address.split(",")
    assert head == "data:image/webp;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    of = [*runs.prompts(4), Prompt("p4", HOSTILE, "thing")]
    first = runs.made(folder / "ar", of=of, compiled=["p0"])
    second = runs.made(
        folder / "mulo",
        MuLo(radius=2),
        of=of,
        cells=runs.rows,
        drafted=10,
        failed={("p1", 0): "FloatingPointError: pass 3"},
        missing=[("p3", 0)],
        settings={"guidance": 3.0},
    )
    return first, second


@pytest.fixture(scope="module")
def page(two, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    made = write_report(two, path)
    assert (made["prompts"], made["pictures"], made["quality"]) == (5, 8, None)
    assert made["bytes"] == path.stat().st_size
    return path


def test_pictures_and_cells_are_those_of_the_run(page):
    data = embedded(page)
    assert [run["name"] for run in data["runs"]] == ["AR", "MuLo(radius=2)"]
    ar, mulo = data["cells"][2][0]
    for sample in (ar, mulo):
        found = decoded(data["pictures"][sample["picture"]])
        np.testing.assert_array_equal(found, runs.picture(2, 0))
    for sample, cells in ((ar, runs.raster), (mulo, runs.rows)):
        final, origin = cells()
        assert sample["grid"] == [4, 4] and sample["passes"] == final.max()
        got = np.frombuffer(base64.b64decode(sample["final"]), "<u2")
        np.testing.assert_array_equal(got.reshape(4, 4), final)
        got = np.frombuffer(base64.b64decode(sample["origin"]), np.uint8)
        np.testing.assert_array_equal(got.reshape(4, 4), origin)
    assert [run["islands"] for run in data["runs"]] == [False, True]


def test_gaps_stay_gaps_and_are_listed(page):
    data = embedded(page)
    assert data["cells"][1][0][1] == {"error": "FloatingPointError: pass 3"}
    assert data["cells"][3][0][1] is None
    rows = [row["cells"] for row in data["tables"]["failures"]["rows"]]
    assert [(row[1][1], row[3]) for row in rows] == [
        ("p1", "FloatingPointError: pass 3"),
        ("p3", "not drawn, or its file is gone"),
    ]


def test_numbers_of_the_table_by_hand(page):
    data = embedded(page)
    ar, mulo = (row["cells"] for row in data["tables"]["runs"]["rows"])
    assert ar[0] == ["AR", "exact"] and mulo[0] == ["MuLo(radius=2)", "biased"]
    assert ar[1:4] == [["5", ""], ["16.0", "16.0 to 16.0"], ["1.00", "mean 1.00"]]
    assert mulo[1] == ["3", "1 failed, 1 missing"]
    # 16 cells in 3 passes and the prefill; 8 of 10 drafts were kept.
    assert mulo[2:5] == [
        ["4.00", "4.00 to 4.00"],
        ["4.00", "mean 4.00"],
        ["80.0 %", "mean 80.0 %"],
    ]
    # The picture of the batch that compiled took a hundred times as long.
    assert ar[5] == ["0.500", "cpu, batch 4, float32"]
    assert mulo[5][0] == "withheld"  # biased, and nothing is known of its quality
    assert "1 picture is left out" in data["notes"]["runs"]
    differing = [
        r["cells"][0] for r in data["tables"]["settings"]["rows"] if r["differs"]
    ]
    assert {"guidance", "method.name"} <= set(differing)
    assert "seed" not in differing


def test_maps_are_means_over_pictures(page):
    ar, mulo = (run["maps"] for run in embedded(page)["runs"])
    assert ar["accepted"] is None  # there were no drafts
    accepted = np.frombuffer(base64.b64decode(mulo["accepted"]["cells"]), np.uint8)
    assert accepted.reshape(4, 4).tolist() == [[255, 255, 0, 0]] * 4
    final = np.frombuffer(base64.b64decode(mulo["pass"]["cells"]), np.uint8)
    assert final.reshape(4, 4)[:, 0].tolist() == [0, 85, 170, 255]
    assert "50 % of the cells are accepted" in mulo["accepted"]["told"]


def test_page_asks_nothing_of_a_network(page):
    text = page.read_text(encoding="utf8")
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {
        "http://www.w3.org/2000/svg"
    }
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", text)
    assert embedded(page)["prompts"][4]["text"] == HOSTILE  # it ended no script


def test_pictures_are_made_to_fit(tmp_path):
    of = runs.prompts(2)
    folder = runs.made(tmp_path / "run", of=of)
    noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)
    from jaxspec.evaluation import records
    from jaxspec.figures import save_png

    lines = []
    for sample in records.read_samples(folder).values():
        save_png(folder / sample.file, noise, {})
        digest = records.sha256(folder / sample.file)
        lines.append(replace(sample, sha256=digest, time=records.now()))
    (folder / "samples" / "two.jsonl").write_bytes(records.sample_lines(lines))
    made = write_report([folder], tmp_path / "small.html", megabytes=0.2)
    assert made["bytes"] <= 200_000 and made["side"] < 512
    with pytest.raises(ValueError, match="2 pictures do not fit 0.01 MB"):
        write_report([folder], tmp_path / "none.html", megabytes=0.01)
    assert not (tmp_path / "none.html").exists()


def test_runs_that_cannot_be_shown_together_are_refused(two, tmp_path):
    of = runs.prompts(4)
    other = runs.made(tmp_path / "b", SCD(), of=[*of[:3], replace(of[3], text="x")])
    out = tmp_path / "report.html"
    with pytest.raises(ValueError, match="prompt 'p3' is .* in one run and 'x' in SCD"):
        write_report([two[0], other], out)
    with pytest.raises(ValueError, match="ar is given twice"):
        write_report([two[0], two[0]], out)
    with pytest.raises(FileNotFoundError, match="holds no run.json"):
        write_report([tmp_path], out)
    empty = runs.made(tmp_path / "c", of=of, missing=[(p.id, 0) for p in of])
    with pytest.raises(ValueError, match="has no picture yet"):
        write_report([empty], out)
    first = {("p0", 0): "NaN"}
    failed = runs.made(tmp_path / "d", of=of, failed=first)
    with pytest.raises(ValueError, match="the first 1 prompts have no picture"):
        write_report([failed], out, prompts=1)
    file = next((other / "images").rglob("*.png"))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="is not as it was written"):
        write_report([other], out)
    assert not out.exists()


def test_sheet_marks_what_is_not_there(two, tmp_path):
    made = write_grid(two, tmp_path / "sheet.png")
    assert made == {"pictures": 8, "gaps": 2}
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    tile = lambda row, column: sheet[
        8 + row * (sheet.shape[0] - 8) // 5 :, 8 + column * 104 :
    ][:96, :96]
    larger = lambda image: image.repeat(3, 0).repeat(3, 1)
    np.testing.assert_array_equal(tile(0, 0), larger(runs.picture(0, 0)))
    np.testing.assert_array_equal(tile(2, 1), larger(runs.picture(2, 0)))
    for row in (1, 3):  # grey, with words on it
        gap = tile(row, 1)
        assert (gap.max(-1) == gap.min(-1)).mean() > 0.9 and gap.std() > 10
