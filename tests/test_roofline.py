"""Passes beside their floor, at a size that compiles in seconds."""

import json

import numpy as np
import pytest

from experiments import roofline


def test_a_tiny_model_is_measured_whole(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "roofline.json"
    out.write_text(json.dumps({"sizes": {"emoji-256": {"passes": []}}}))
    roofline.main(["tiny"], rounds=1, out=out)
    record = json.loads(out.read_text())
    assert list(record["sizes"]) == ["emoji-256", "tiny"]  # what was there stays
    found = record["sizes"]["tiny"]
    assert [x["cells"] for x in found["passes"]] == [1, 2, 4, 8, 16]
    assert {k: x["cells"] for k, x in found["methods"].items()} == {"AR": 1, "SCD-2": 2}
    assert all(x["ms"] > 0 and x["floor_ms"] > 0 for x in found["passes"])
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "| cells | pass, ms |" in capsys.readouterr().out


def test_some_cells_are_measured_again_and_others_stay(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "roofline.json"
    row = {"ms": 7, "floor_ms": 1, "bound": "reading"}
    one = {"cells": 1, "ms": 7, "network_ms": 7}
    old = {"passes": [row | {"cells": c} for c in (2, 16)]}
    out.write_text(json.dumps({"sizes": {"tiny": old | {"methods": {"AR": one}}}}))
    roofline.main(["tiny"], cells=[2, 4], rounds=1, out=out)
    found = json.loads(out.read_text())["sizes"]["tiny"]
    assert [x["cells"] for x in found["passes"]] == [2, 4, 16]
    assert found["passes"][0]["ms"] != 7 and found["passes"][2]["ms"] == 7
    assert found["methods"]["AR"] == one and found["methods"]["SCD-2"]["cells"] == 2


def test_bytes_and_operations_by_hand():
    """Width 8, hidden 16, 2 layers, 16 codes; a class before 4 by 4 cells."""
    matrices = 2 * (4 * 8 * 8 + 3 * 8 * 16) + 8 * 16
    norms = 2 * (2 * 8) + 8
    target = roofline.tiny()
    for cells, last in ((1, 7), (4, 9), (16, 15)):
        assert roofline.places(target, cells)[-1] == last
        keys = 2 * 2 * 8 * (1 + last + 1)  # and values, of the class and those cells
        want = 4 * (matrices + norms + keys), 2 * cells * (matrices + keys)
        assert roofline.costs(target, cells) == want
    assert np.all(np.diff(roofline.places(target, 4)) == 1)
