"""The GPU check at a size that a CPU can run: that it runs, and what adds up."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import gpu_check


def test_the_check_runs_whole(tmp_path, capsys):
    gpu_check.main(["--tiny", "--out", str(tmp_path / "gpu.json")])
    record = json.loads((tmp_path / "gpu.json").read_text())
    done = {(x["grid"], x["method"]): x for x in record["pictures"]}
    assert set(done) == {
        (4, "AR"),
        (4, "ZipAR-2"),
        (4, "MuLo"),
        (2, "AR"),
        (2, "ZipAR-2"),
    }
    # A row starts two cells after the one above: 4 + 3 * 2 cells one after the other.
    assert done[4, "AR"]["target_passes"] == 15
    assert done[4, "ZipAR-2"]["target_passes"] == 4 + 3 * 2 - 1
    assert done[4, "MuLo"]["draft_passes"] == 3
    assert {(x["grid"], x["cells"]) for x in record["passes"]} == {
        (4, 1),
        (4, 4),
        (2, 1),
    }
    # 2 layers of 4 C^2 + 3 C F and 2 norms, a last norm and the head, in 16 bits.
    weights = 2 * (2 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) + 32 + 32 * 64)
    assert record["weights_bytes"] == weights
    assert "AR" in capsys.readouterr().out


def test_it_needs_no_library_of_the_command_line():
    code = "import sys; sys.modules['typer'] = None; import experiments.gpu_check"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_started_that_has_no_time():
    record = gpu_check.check(gpu_check.TINY, minutes=0)
    assert record["pictures"] == record["passes"] == record["attention"] == []
    assert "MuLo {'grid': 4, 'batch': 2}" in record["left_out"]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_share_of_drafts_is_rejected(share):
    drafts = jnp.asarray(np.random.default_rng(0).integers(0, 16384, (4, 5000)))
    kept = gpu_check.Forced(share)(None, None, drafts)
    assert float(kept.mean()) == pytest.approx(1 - share, abs=0.02)
