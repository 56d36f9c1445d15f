"""Methods side by side: statistics by hand, and a whole measurement of a toy family."""

import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.progress import Progress

import jaxspec
from experiments.methods import compare, measure, report, run, times
from experiments.methods.colours import Examples
from experiments.methods.contestants import (
    CONTESTANTS,
    Contestant,
    for_family,
    select,
)
from jaxspec.decoding import ACCEPTED, BONUS, DRAWN, RESAMPLED
from jaxspec.methods import AR, EAGLE2, GSD, SJD
from jaxspec.models.transformer import Transformer
from jaxspec.sampling import guide, log_probs
from tests import toy

# Statistics.


def test_permutation_test_by_hand():
    # One other seed: each difference of 1 keeps its sign or loses it, by a coin.
    for n, want in ((1, 1.0), (2, 1 / 2), (3, 1 / 4), (5, 1 / 16)):
        got = compare.exchange_test(np.ones(n), np.zeros((1, n)))
        assert got == pytest.approx(want, abs=0.02)
    # Two others that agree: only the odd one out differs by 3, the others by 1.5.
    got = compare.exchange_test(np.array([0.0]), np.array([[3.0], [3.0]]))
    assert got == pytest.approx(1 / 3, abs=0.02)


def test_permutation_test_holds_its_level_and_sees_through_captions():
    rng = np.random.default_rng(0)

    def p_value(shift):
        captions = 10 * rng.normal(size=(1, 20))
        draws = captions + rng.normal(size=(4, 20))
        return compare.exchange_test(draws[0] + shift, draws[1:], rounds=300)

    by_chance = np.array([p_value(0.0) for _ in range(400)])
    assert np.mean(by_chance < 0.2) == pytest.approx(0.2, abs=0.05)
    # Far less than captions differ by, far more than their mean differs by chance.
    assert max(p_value(1.5) for _ in range(5)) < 0.01


def test_bands_by_hand():
    t = 4.30265  # of 2 degrees of freedom, two-sided
    band = compare.set_band([1.0, 2.0, 3.0])
    want = dict(
        mean=2, deviation=1, low=2 - t * np.sqrt(4 / 3), high=2 + t * np.sqrt(4 / 3)
    )
    assert band == pytest.approx(want, abs=1e-4)
    assert compare.set_band([1.0]) is None
    # Two captions, of which one varies, by 2: means vary by half of that.
    band = compare.picture_band(np.array([[1.0, 5.0], [3.0, 5.0]]))
    reach = t * np.sqrt(1 / 2) * np.sqrt(3 / 2)
    want = dict(mean=3.5, deviation=np.sqrt(1 / 2), low=3.5 - reach, high=3.5 + reach)
    assert band == pytest.approx(want, abs=1e-4)


def test_outside_names_what_is_outside():
    bands = {"r5": {"low": 0.1, "high": 0.2}, "kid": {"low": 1, "high": 2}, "r1": None}
    row = {
        "name": "SJD",
        "r5": {"value": 0.3},
        "kid": {"value": 1.5},
        "r1": {"value": 9},
    }
    assert compare.outside(row, bands) == ["r5"]
    assert compare.outside(row | {"name": "AR"}, bands) is None


def test_speed_by_hand():
    slow = {"AR": [5.0, 5.0], "SJD": [4.0, 1.0]}  # a round on a machine half as fast
    fast = {"AR": [2.0, 2.0], "SJD": [1.0, 1.0]}
    passes = {"AR": [100.0, 100.0], "SJD": [20.0, 30.0]}
    record = {"batch": 4, "passes": passes, "rounds": [fast, slow, fast]}
    got = compare.speed(record)
    assert got["AR"] == dict(seconds=0.5, ratio=1.0, passes_ratio=1.0, realised=None)
    want = dict(seconds=0.25, ratio=2.0, passes_ratio=4.0, realised=(1 / 2) / (3 / 4))
    assert got["SJD"] == pytest.approx(want)


def test_drafts_kept_by_depth_by_hand():
    """Rounds of 0, 2, 1 and, to the picture's end, 1; and of 3 and 2."""
    codes = {"d": DRAWN, "a": ACCEPTED, "b": BONUS, "r": RESAMPLED}
    rows = [[codes[x] for x in row] for row in ("draabarrr", "daaabaabb")]
    origin = np.array(rows).reshape(2, 3, 3)
    origin[0, 2] = [BONUS, RESAMPLED, ACCEPTED]
    found = compare.kept_in_rounds(origin)
    np.testing.assert_array_equal(found, [0, 2, 1, 0, 1, 3, 2, 0])
    drawn = SimpleNamespace(origin=origin)
    shares = [5 / 8, 3 / 8, 1 / 8]
    assert compare.depths(EAGLE2(depth=3), drawn) == shares
    assert compare.depths(AR(), drawn) is None
    text = report.depth_table([{"name": "AR"}, {"name": "E", "depths": shares}])
    assert text.endswith("| E | 62 % | 38 % | 12 % | 2.12 |\n")
    assert report.depth_table([{"name": "AR", "depths": None}]) == ""


def test_times_of_another_run():
    raw = {"batch": 4, "passes": {"AR": [16.0], "SJD": [8.0]}}
    raw["rounds"] = [{"AR": [2.0], "SJD": [1.6]}]
    about = {"command": "x", "commit": "abc", "date": "d", "note": "Quiet."}
    rows = [{"name": name, "time": {}} for name in ("AR", "SJD", "New")]
    record = {"rows": rows, "raw_times": {}}
    found = times.add_times(record, about | {"timing": {"batch4": raw}})
    ratios = [row["time"]["4"] and row["time"]["4"]["ratio"] for row in found["rows"]]
    assert ratios == [1.0, 1.25, None]
    assert report.times_note(found["times_of"]).endswith("commit abc, d. Quiet.")
    with pytest.raises(ValueError, match="has times of its own"):
        times.add_times(record | {"raw_times": {"1": raw}}, about)


def test_cells_outside_the_support_are_counted_apart():
    grids = np.array([[[1.0, 3.0]], [[np.inf, 5.0]]])
    mean, outside = measure.inside(grids)
    np.testing.assert_array_equal(mean, [2, 5])
    np.testing.assert_array_equal(outside, [0, 1])
    with pytest.raises(ValueError, match="picture 1 has no cell"):
        measure.inside(np.array([[[1.0]], [[np.inf]]]))
    with pytest.raises(ValueError, match="not a number"):
        measure.inside(np.array([[[1.0, np.nan]]]))


# Likelihood.


def test_likelihood_is_that_of_the_distribution_sampled_from():
    settings = {"temperature": 0.8, "guidance": 1.5, "top_k": 4}
    target = toy.target(toy.transformer((2, 3), 6), 2, **settings)
    tokens = np.random.default_rng(0).integers(0, 6, (2, 2, 3))
    condition, raster = np.asarray(target.condition), tokens.reshape(2, 6)
    pairs = np.stack([condition, np.zeros_like(condition)], axis=1)  # with null rows
    forward = jax.jit(Transformer(target.model.config).apply)
    logits = forward(
        target.params, pairs.reshape(4, *condition.shape[1:]), raster.repeat(2, 0)
    )
    cells = jnp.broadcast_to(jnp.arange(6), (2, 6))
    log_p = log_probs(guide(logits, cells, target.sampling), target.sampling)
    want = -np.take_along_axis(np.asarray(log_p), raster[..., None], axis=2)[..., 0]
    got = measure.negative_log_likelihood(target, tokens).reshape(2, 6)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert 0 < np.isinf(want).sum() < 12


# The whole.

TOYS = [
    Contestant("AR", AR(), "exact"),
    Contestant("SJD", SJD(4), "exact"),
]
PLAN = run.Plan(count=4, seeds=2, batch=2, rounds=2, timed=1, others=2)


def toy_task() -> measure.Task:
    def features(images):
        return images.reshape(len(images), -1, 48).mean(1).astype(np.float32) / 255

    def match(x):
        return {"r1": x[:, 0], "r5": x[:, 1]}

    captions = ["red heart", "blue tree", "flat emoji of a hat", "woman"]
    real = np.random.default_rng(0).random((4, 48))
    return measure.Task(toy.family(), captions, real, features, match)


def toy_several() -> run.Several:
    """Two captions that name a colour, and which is which."""
    coloured = replace(toy_task(), captions=["red heart", "blue tree"])
    examples = Examples(np.array([[255.0, 0, 0], [0, 0, 255]]), np.array(["red", ""]))
    return run.Several(0.1, coloured, examples)


@pytest.fixture(scope="module")
def toy_record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with Progress(disable=True) as bar:
        record = run.measure(toy_task(), TOYS, PLAN, folder, bar, toy_several())
    about = {"command": "toy", "date": "today", "machine": {}}
    return folder, about | record


def test_measurement_of_a_toy_family(toy_record):
    _, record = toy_record
    rows = {report.label(row): row for row in record["rows"]}
    assert list(rows) == ["AR, seed 0", "AR, seed 1", "SJD"]
    ar, sjd = rows["AR, seed 0"], rows["SJD"]
    assert ar["passes"] == dict(mean=16, deviation=0, ratio=1, of_drafter=0)
    assert 4 <= sjd["passes"]["mean"] < 16 and 0 < sjd["acceptance"] < 1
    assert ar["acceptance"] is None and ar["outside"] is None
    for row in rows.values():  # exact: nothing that the target would not draw
        assert row["off_support"] == {"cells": 0, "pictures": 0}
        assert set(row["time"]) == {"1", "2"}
    # AR against its other seed, which is against it.
    other = rows["AR, seed 1"]
    assert ar["nll"]["difference"][0] == pytest.approx(-other["nll"]["difference"][0])
    assert other["kid_ar"] is not None and ar["kid_ar"] is None
    assert len(record["raw_times"]["1"]["rounds"]) == 2
    # With two seeds there is one distance between them, and no spread of it.
    assert record["bands"]["kid_ar"] is None and record["bands"]["nll"] is not None


def test_several_pictures_of_a_toy_family(toy_record):
    """With two seeds of each method: all else is of the first."""
    _, record = toy_record
    assert len(record["rows"]) == 3 and record["several"]["seeds"] == 2
    ar, sjd = record["several"]["rows"]
    assert (ar["name"], sjd["name"]) == ("AR", "SJD")
    assert 0 < ar["distance"]["value"] < 2 and ar["distance"]["difference"] == [0, 0, 0]
    assert sjd["distance"]["value"] != ar["distance"]["value"]
    assert 0 <= sjd["colour"]["value"] <= 0.5  # no picture is called blue


def test_a_stopped_measurement_goes_on(toy_record, monkeypatch):
    folder, record = toy_record

    def forbidden(*args, **kwargs):
        raise AssertionError("drawn again")

    monkeypatch.setattr(jaxspec, "generate", forbidden)
    monkeypatch.setattr(measure, "decode_batch", forbidden)
    with Progress(disable=True) as bar:
        again = run.measure(toy_task(), TOYS, PLAN, folder, bar, toy_several())
        assert json.dumps(again) == json.dumps({k: record[k] for k in again})
        more = [*TOYS, Contestant("GSD", GSD(), "biased")]
        with pytest.raises(AssertionError, match="drawn again"):
            run.measure(toy_task(), more, PLAN, folder, bar)


def test_report_of_a_toy_family(toy_record, tmp_path):
    _, record = toy_record
    text = report.table(record)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in lines] == [17] * 5 + [8] * 4
    assert "| AR, seed 0 | exact | 16.0 ± 0.0 | 1.00x | 1.00x | 1.00x |  |" in text
    assert "- SJD: `SJD(window=4, initial='random', rule=Ratio())`" in text
    if importlib.util.find_spec("matplotlib"):
        report.write(record, tmp_path)
        assert json.loads((tmp_path / "methods.json").read_text())["rows"]
        assert (tmp_path / "methods.png").stat().st_size > 10_000


def test_names_cover_neither_points_nor_each_other():
    points = np.random.default_rng(0).uniform(0, 300, (30, 2))
    sizes = np.tile([40.0, 10.0], (15, 1))
    offsets = report.place_names(points, list(range(15)), sizes)
    centres = points[:15] + np.stack(offsets)
    apart = np.abs(centres[:, None] - points[None]) > np.array([[[20, 5]]])
    assert apart.any(2).all()
    apart = np.abs(centres[:, None] - centres[None]) >= np.array([[[40, 10]]])
    assert (apart.any(2) | np.eye(15, dtype=bool)).all()
    alone = report.place_names(np.zeros((1, 2)), [0], sizes[:1])[0]
    np.testing.assert_allclose(alone, [30, 0])


def test_selection_by_name():
    names = [each.name for each in select("SJD*, GSD")]
    assert names == ["AR", "SJD", "SJD-left", "GSD", "SJD-cooled"]
    assert select("*") == list(CONTESTANTS)
    with pytest.raises(ValueError, match="no method is called 'sjd'; there are AR, "):
        select("sjd")


def test_methods_that_a_family_has_no_networks_for_are_left_out():
    names = {each.name for each in for_family(toy.family())}
    assert {"AR", "SCD", "SSD-upsampled"} <= names
    assert not names & {"EAGLE", "FlashAR", "FlashAR-SCD", "SSD", "LPD-10", "MuLo-LPD"}
    assert "MuLo" not in names  # of 16 neighbours, and there are 12 codes


def test_plans_that_measure_nothing_are_refused():
    with pytest.raises(ValueError, match="seeds must be 2 or more, not 1"):
        run.Plan(seeds=1)
    with pytest.raises(ValueError, match="others must be at most AR's seeds, 2, not 3"):
        run.Plan(seeds=2, others=3)
