"""The sweep of MuLo's knobs: its settings, and what its table says; its stages."""

import importlib.util
import json
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.mulo import report, stages, sweep
from jaxspec.methods import AR, FlashAR, MuLo
from jaxspec.testing import keys_of
from tests import toy

RECORD = {"costs": {"64": 0.001, "128": 0.004}, "settings": {"size": 128}}


def test_settings_change_one_thing_at_a_time():
    sections = sweep.sections((32, 64, 128), 128)
    names = [each.name for section in sections.values() for each in section]
    assert len(set(names)) == len(names)
    (base,) = sections["MuLo"]
    methods = [each.method for section in sections.values() for each in section]
    assert methods.count(base.method) == 1 and sections["reference"][0].method == AR()
    for knob in sweep.KNOBS:
        assert all(isinstance(each.method, MuLo) for each in sections[knob])
    (ratio,) = sections["ratio"]
    assert ratio.name == "drafter of 32 px" and ratio.method.draft == 32
    assert sweep.sections((64, 128), 128)["ratio"] == []
    headed = sweep.sections((64, 128), 128, heads=(64,))["draft"]
    assert headed[-1].method.draft_method == FlashAR()
    assert len(headed) == 1 + len(sections["draft"])


def test_selection_keeps_the_reference():
    sections = sweep.sections((64, 128), 128)
    chosen = sweep.select("radius; ZipAR-*", sections)
    assert list(chosen) == ["reference", "radius", "others"]
    assert [each.name for each in chosen["others"]] == [
        "ZipAR-8",
        "ZipAR-4",
        "ZipAR-3",
        "ZipAR-2",
    ]
    with pytest.raises(ValueError, match="nothing is called 'nope'"):
        sweep.select("nope", sections)


def test_passes_of_the_drafter_count_by_their_cost():
    row = {"passes": {"mean": 50.0, "of_drafter": 36.0}}
    assert report.worth(row, RECORD) == pytest.approx(50 + 36 / 4)


def test_tables_and_picture(tmp_path):
    estimate = {"value": 0.2, "interval": [0.1, 0.3], "difference": [0.1, 0.0, 0.2]}
    row = {
        "made_by": "MuLo()",
        "passes": {"mean": 50.0, "deviation": 2.0, "ratio": 5.12, "of_drafter": 36.0},
        "kept": {"all": 0.5, "ink": 0.25},
        "nll": estimate,
        "ink_nll": 0.3,
        "off_support": {"cells": 0.01, "pictures": 0.5},
        "r1": estimate,
        "r5": estimate,
        "kid": {"value": 0.1, "error": 0.01},
        "kid_ar": None,
    }
    ar = row | {"name": "AR", "seed": 0, "outside": None}
    mulo = row | {"name": "MuLo", "seed": 1000, "outside": ["nll"]}
    band = {"mean": 1.0, "deviation": 0.1, "low": 0.8, "high": 1.2}
    record = RECORD | {
        "command": "toy",
        "date": "today",
        "machine": {},
        "family": "toy",
        "captions": 4,
        "ar_seeds": 2,
        "bands": dict.fromkeys(report.NAMES, band),
        "sections": {"reference": ["AR"], "MuLo": ["MuLo"]},
        "rows": [ar, mulo],
    }
    # 256 cells in 50 passes and 36 that cost a quarter.
    line = "| MuLo | 50.0 ± 2.0 | 36.0 | 59.0 | 4.34x | 50 % | 25 % | 0.100 [0.000, "
    assert line in report.tables(record)
    if importlib.util.find_spec("matplotlib"):
        report.write(record, tmp_path)
        assert json.loads((tmp_path / "mulo-128.json").read_text())["rows"]
        assert (tmp_path / "mulo-128.png").stat().st_size > 10_000


GRIDS = np.ones((3, 4, 8), np.int32)
GRIDS[0, 1, 1] = GRIDS[0, 2, 6] = 0
GRIDS[2] = 0


def by_hand(tokens, grid):
    return jnp.asarray(GRIDS)


def not_zero(log_p, log_q, drafts, codes):
    return (drafts != 0).astype(jnp.float32)


@pytest.mark.parametrize(
    ("rows", "verifying", "drawn_again", "drafting"),
    # Two rounds of rows verify twice, and the drafter reads once what became of one.
    # An island of a round ends with it: (1, 1) takes 2 cells along, (2, 6) takes 5.
    [(None, 1, [9, 0, 31], 7), (1, 2, [7, 0, 31], 8)],
)
def test_stages_are_those_of_the_whole(rows, verifying, drawn_again, drafting):
    draft = toy.target(toy.transformer((2, 4), 4), 3)
    target = toy.target(toy.transformer((4, 8), 4), 3)
    method = MuLo(draft, by_hand, rule=not_zero, radius=1, window=8, rows=rows)
    if rows:
        method = replace(method, downsampler="nearest")
    began = time.perf_counter()
    got, seconds, passes = stages.staged(method, target, keys_of(3))
    whole = time.perf_counter() - began
    want = toy.decode_jitted(method, target, keys_of(3))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(passes, [verifying] * 3)
    np.testing.assert_array_equal(got.target_passes - passes, drawn_again)
    assert tuple(seconds) == stages.STAGES
    assert min(seconds.values()) > 0 and sum(seconds.values()) <= whole
    said = stages.counts(got, passes)
    assert (said["verify_passes"], said["draft_passes"]) == (verifying, drafting)
    assert said["resample_passes"] == pytest.approx(sum(drawn_again) / 3)
    assert said["rejected"] == pytest.approx((2 + 0 + 32) / 96)
    assert said["kept"] + said["rejected"] + said["expanded"] == pytest.approx(1)


def test_both_models_are_weighed():
    target = toy.target(toy.transformer((4, 8), 4), 3, guidance=2.0)
    held = stages.memory(target)
    count = sum(x.size for x in jax.tree.leaves(target.params))
    assert held["weights"] == 4 * count
    # Keys and values of 2 layers of 16 numbers, of 3 pictures, each with and without
    # its condition, at 4 slots before 32 cells.
    cells = 2 * 2 * 16 * 3 * 2 * (4 + 32)
    assert 4 * cells <= held["cache"] < 4.5 * cells
