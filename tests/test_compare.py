"""Pairs, differences and what is told, on runs whose numbers are known."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxspec.cli import app
from jaxspec.evaluation.compare import compare
from jaxspec.evaluation.compared import compared_table, notes
from jaxspec.evaluation.counts import counts, times
from jaxspec.evaluation.intervals import bootstrap, normal, ratio, times_as_fast
from jaxspec.evaluation.records import Sample
from jaxspec.evaluation.results import guarantee, labels, method_label, read_results
from jaxspec.evaluation.scores import read_scores, write_scores
from jaxspec.evaluation.tables import lines, told, turned
from jaxspec.methods import GSD, SCD, SJD, ZipAR
from tests import runs


@pytest.fixture
def three(tmp_path):
    """AR, an exact method and a biased one, in a quarter of the passes."""
    of = runs.prompts(6)
    fast = {"cells": runs.rows, "drafted": 10, "seconds": 0.125}
    return (
        runs.made(tmp_path / "ar", of=of, compiled=["p0"]),
        runs.made(tmp_path / "scd", SCD(), of=of, **fast, missing=[("p5", 0)]),
        runs.made(tmp_path / "gsd", GSD(), of=of, **fast),
    )


def quality(values, **about):
    return runs.score("R@5", values, **about)


def test_pairs_and_ratios_by_hand(three):
    record = compare(three)
    assert record["base"] == "AR"
    ar, scd, gsd = record["runs"]
    assert "paired" not in ar
    pair = scd["paired"]
    assert pair["pictures"] == 5 and pair["left_out"] == ["p5/0"]
    assert pair["fewer_passes"] == (4, 4, 4)
    assert pair["passes_difference"] == (-12, -12, -12)
    # Both exact: time is told, of the four pairs in whose batches nothing compiled.
    assert pair["speed"] == (4, None, None) and pair["timed"] == 4
    assert pair["equal_tokens"] == 0  # the toy's tokens are its passes
    assert gsd["paired"]["speed"] is None
    assert "says nothing without its quality" in gsd["paired"]["withheld"]


def test_speed_of_a_biased_method_is_told_beside_its_score_only(three):
    ar, _, gsd = three
    write_scores(ar, [quality({f"p{i}/0": 0.5 for i in range(6)})])
    write_scores(gsd, [quality({f"p{i}/0": 0.5 - 0.1 * i for i in range(5)})])
    pair = compare([ar, gsd])["runs"][1]["paired"]
    assert pair["speed"] == (4, None, None)
    difference = pair["scores"]["R@5"]["difference"]
    assert difference.value == pytest.approx(-0.2)  # mean of 0, -0.1 ... -0.4
    assert difference.low < -0.2 < difference.high < 0
    # Nor is a distance of other sets, which their size changes.
    for folder, count in ((ar, 6), (gsd, 5)):
        whole = quality(dict.fromkeys(map(str, range(count)), 0.5))
        write_scores(folder, [dataclasses.replace(whole, name="FID", values={})])
    pair = compare([ar, gsd])["runs"][1]["paired"]
    assert pair["scores"]["FID"] == {"not_compared": "measured of 6 and of 5 pictures"}
    # A score that was measured otherwise is no pair of it.
    write_scores(gsd, [quality({"p0/0": 0.1}, resize="another")])
    pair = compare([ar, gsd])["runs"][1]["paired"]
    assert pair["scores"]["R@5"] == {"not_compared": "measured with another resize"}
    assert pair["speed"] is None


def test_times_vary_from_batch_to_batch_and_not_from_picture_to_picture():
    def batches(*seconds):
        """Each of two pictures."""
        shares = [x for x in seconds for _ in range(2)]
        return times(
            Sample("a", i, 0, seconds=x, compiled=False) for i, x in enumerate(shares)
        )

    slow, fast = batches(1.0, 3.0), batches(0.5, 0.25)
    # The slowest batch twice beside the fastest twice is one draw in 16.
    assert times_as_fast(slow, fast) == (2 / 0.375, 1 / 0.5, 3 / 0.25)
    assert times_as_fast(slow, batches(0.5)) == (4, None, None)
    assert times([Sample("a", 0, 0, seconds=1.0, compiled=True)]) is None


def test_times_of_other_machines_are_not_compared(three, tmp_path):
    other = runs.made(tmp_path / "gpu", SCD(), of=runs.prompts(6), device="gpu")
    pair = compare([three[0], other])["runs"][1]["paired"]
    assert pair["speed"] is None
    assert pair["withheld"] == "not the same device: cpu and gpu"
    for how, said in (
        ({"host": "there"}, "not the same host: here and there"),
        ({"refill": True}, "not the same batch: 4 and 4, rows handed on"),
    ):
        other = runs.made(tmp_path / said, SCD(), of=runs.prompts(6), **how)
        assert compare([three[0], other])["runs"][1]["paired"]["withheld"] == said


def test_exact_methods_of_other_targets_are_not_of_one_quality(three, tmp_path):
    warm = {"temperature": 1.0}
    other = runs.made(tmp_path / "warm", SCD(), of=runs.prompts(6), settings=warm)
    pair = compare([three[0], other])["runs"][1]["paired"]
    assert pair["speed"] is None
    assert "from other targets (temperature: None -> 1.0): `jaxspec" in pair["withheld"]


def test_a_damaged_record_is_named(three):
    (record,) = (three[1] / "records/p3").iterdir()
    record.write_bytes(record.read_bytes()[:-20])
    with pytest.raises(ValueError, match="records/p3/0.npz in .* is not as it was"):
        compare(three)


def test_runs_that_are_no_pairs_are_refused(three, tmp_path):
    of = runs.prompts(6)
    seeded = runs.made(tmp_path / "seed", SCD(), of=of, seed=7)
    with pytest.raises(ValueError, match=r"AR and SCD have other seeds \(0 and 7\)"):
        compare([three[0], seeded])
    pair = compare([three[0], seeded], anyway=True)["runs"][1]["paired"]
    assert pair["settings"] == ["seed: 0 -> 7"] and pair["pictures"] == 6
    fewer = runs.made(tmp_path / "few", SCD(), of=of[:3], settings={"guidance": 1.0})
    with pytest.raises(ValueError, match="AR and SCD have other prompts: .*--anyway"):
        compare([three[0], fewer])
    pair = compare([three[0], fewer], anyway=True)["runs"][1]["paired"]
    assert pair["pictures"] == 3 and "guidance: 2.0 -> 1.0" in pair["settings"]
    others = runs.made(tmp_path / "no", SCD(), of=runs.prompts(9)[6:])
    with pytest.raises(ValueError, match="no picture in common"):
        compare([three[0], others], anyway=True)
    with pytest.raises(ValueError, match="takes two runs"):
        compare([three[0]])


def test_counts_are_defined_once(tmp_path):
    """Two pictures a prompt; pooled and mean differ where pictures do."""
    of = runs.prompts(2)
    folder = runs.made(
        tmp_path / "run",
        SCD(),
        of=of,
        images=2,
        cells=lambda: runs.rows(),
        drafted=10,
        failed={("p0", 1): "x"},
    )
    found = counts(read_results(folder))
    assert (found["pictures"], found["failed"], found["missing"]) == (3, 1, 0)
    assert found["cells"] == 16 and found["passes"] == (4, 4, 4)
    assert found["accepted_per_pass"]["pooled"].value == pytest.approx(8 / 3)
    assert found["cells_per_pass"]["mean"].value == 4
    assert found["acceptance"]["pooled"].value == 0.8
    assert found["stages"] == {"pictures": 0.25} and found["batch"] == ["4"]


def test_intervals():
    # The mean of (0, 1) x 50: standard error 0.05.
    found = bootstrap(np.tile([0.0, 1.0], 50))
    assert found.value == 0.5
    assert found.low == pytest.approx(0.4, abs=0.02)
    assert found.high == pytest.approx(0.6, abs=0.02)
    # A ratio of sums is not the mean of ratios, and nothing is divided by 0.
    assert ratio(np.array([1.0, 9.0]), np.array([1.0, 3.0])).value == 2.5
    assert ratio(np.array([1.0, 0.0]), np.array([1.0, 0.0])) == (1, 1, 1)
    assert bootstrap(np.array([3.0])) == (3, None, None)  # nothing tells how it varies
    assert normal(1, 0.5) == pytest.approx((1, 0.02, 1.98))


def test_labels_and_promises(tmp_path, monkeypatch):
    from jaxspec.acceptance import Cooled
    from jaxspec.decoding import describe

    label = lambda method: method_label(describe(method))
    assert label(ZipAR(4)) == "ZipAR(window=4)" and label(SCD()) == "SCD"
    assert label(SJD(rule=Cooled())) == "SJD(rule=Cooled)"
    for there in ("a/run", "b/run"):
        runs.made(tmp_path / there, SCD(), of=runs.prompts(1))
    monkeypatch.chdir(tmp_path)
    found = [read_results(path) for path in ("a/run", "b/run")]
    assert labels(found) == ["SCD · a/run", "SCD · b/run"]
    promise = lambda method: guarantee(describe(method))
    assert promise(SCD()) == "exact" and promise(SJD(rule=Cooled())) == "biased"
    assert promise(GSD()) == "biased" and guarantee({"name": "Mine"}) == "unknown"


def test_numbers_as_they_are_told():
    assert [told(x) for x in (0.12345, 1.2345, 123.45, 12345.6, 0, None)] == [
        "0.123",
        "1.23",
        "123",
        "12,346",
        "0.000",
        "",
    ]


def test_table_and_notes(three, tmp_path):
    ar, scd, gsd = three
    write_scores(ar, [quality({f"p{i}/0": 0.5 for i in range(6)})])
    write_scores(gsd, [quality({f"p{i}/0": 0.25 for i in range(6)})])
    record = compare(three)
    text = "\n".join(lines(turned(compared_table(record))))
    row = lambda name: next(x for x in text.splitlines() if x.startswith(name))
    assert row("passes").split() == [
        *"passes 16.0 (16.0 to 16.0) 4.00 (4.00 to 4.00) 4.00 (4.00 to 4.00)".split()
    ]
    assert row("R@5, difference").endswith("-0.250 (-0.250 to -0.250)")
    assert row("times as fast").split()[3:5] == ["4.00x", "4.00x"]  # of a batch each
    assert any("p5/0" in line for line in notes(record))
    assert any("1 left out since something compiled" in line for line in notes(record))
    out = tmp_path / "compare.json"
    names = [str(path) for path in three]
    ran = CliRunner().invoke(app, ["evaluate", "compare", *names, "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    again = json.loads(out.read_text())
    assert again["runs"][1]["paired"]["fewer_passes"] == [4, 4, 4]
    ran = CliRunner().invoke(app, ["evaluate", "compare", names[0]])
    assert (
        ran.exit_code == 2 and ran.output == "error: comparing takes two runs or more\n"
    )


def test_what_the_target_says_is_paired(three, tmp_path):
    of = runs.prompts(4)
    ar = runs.made(tmp_path / "checked", of=of, said=(0, -2.0))
    gsd = runs.made(
        tmp_path / "biased", GSD(), of=of, said=(3, -2.5), missing=[("p1", 0)]
    )
    record = compare([ar, gsd])
    found, pair = record["runs"][1]["counts"], record["runs"][1]["paired"]
    assert found["divergences"] == (3, 3, 3)
    assert found["log_prob"].value == pytest.approx(-2.5 - 5 / 3)  # 0, 2 and 3 less
    assert pair["log_prob_difference"].value == pytest.approx(-0.5)
    text = "\n".join(lines(turned(compared_table(record))))
    assert (
        "divergent cells" in text
        and "-4.17 (difference -0.500, -0.500 to -0.500)" in text
    )
    assert "hold codes that the target would never draw" in notes(record)[0]
    text = "\n".join(lines(turned(compared_table(compare(three)))))
    assert "divergent" not in text


def test_scores_replace_their_own_and_survive(three):
    folder = three[0]
    write_scores(folder, [quality({"p0/0": 0.5})])
    write_scores(folder, [runs.score("other", {"p0/0": 1.0})])
    write_scores(folder, [quality({"p0/0": 0.75})])
    found = read_scores(folder)
    assert [(s.name, s.value) for s in found.values()] == [("R@5", 0.75), ("other", 1)]
    with pytest.raises(ValueError, match="R@5 of .* is nan .*weights damaged"):
        write_scores(folder, [quality({"p0/0": float("nan")})])
    assert read_scores(folder) == found
    (folder / "scores.json").write_text('{"format": 1, "scores": {"R@5": {}}}')
    with pytest.raises(ValueError, match="scores.json cannot be read"):
        read_scores(folder)
