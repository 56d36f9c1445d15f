"""Reading checkpoint files safely, whatever they are wrapped in."""

import argparse
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import commands_checkpoints
from jaxspec.checkpoints import read
from jaxspec.checkpoints import readers as readers_module
from jaxspec.checkpoints.containers import peel
from jaxspec.checkpoints.readers import FileTensor
from tests.converting import (
    assert_same_bits,
    manifest,
    run,
    save,
    save_sharded,
    source,
    weights,
)

# Files and folders.


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_safetensors_keep_their_bits(tmp_path, dtype):
    want = {k: v.astype(dtype) for k, v in weights("llamagen_c2i_tiny").items()}
    want["empty"], want["scalar"] = np.zeros((0, 3), dtype), np.array(3, dtype)
    found = read(save(tmp_path / "x.safetensors", want))
    assert_same_bits(found.tensors, want)
    assert found.nbytes == sum(x.nbytes for x in want.values())
    assert found.containers == ()


def test_shards_are_one_checkpoint(tmp_path):
    want = weights("llamagen_c2i_tiny")
    index = save_sharded(tmp_path, want)
    for path in (index, tmp_path):
        found = read(path)
        assert_same_bits(found.tensors, want)
        assert [f.name[:11] for f in found.files] == ["model-00001", "model-00002"]


def test_a_folder_s_config_is_its_arguments(tmp_path):
    save(tmp_path / "other.safetensors", {"a": np.ones(2, np.float32)})
    assert read(tmp_path).tensors.keys() == {"a"}
    save(tmp_path / "model.safetensors", {"b": np.ones(2, np.float32)})
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert read(tmp_path).tensors.keys() == {"b"}
    assert read(tmp_path).args == {"hidden_size": 8}
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json: holds a list"):
        read(tmp_path)


def test_shards_that_do_not_fit_their_index(tmp_path):
    tensors = {k: np.ones(2, np.float32) for k in "abcd"}
    index = save_sharded(tmp_path, tensors)
    placed = json.loads(index.read_text())["weight_map"]

    def change(**changed):
        index.write_text(json.dumps({"weight_map": placed | changed}))

    change(e="model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"they lack \['e'\]"):
        read(index)
    del placed["d"]
    change()
    with pytest.raises(ValueError, match=r"it lacks \['d'\]"):
        read(index)
    change(d="../d.safetensors")
    with pytest.raises(ValueError, match="not the name of a file beside it"):
        read(index)
    change(d="model-00009.safetensors")
    with pytest.raises(FileNotFoundError, match=r"missing: \['model-00009"):
        read(index)
    index.write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        read(index)
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"shards, but not their \.index\.json"):
        read(tmp_path)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        read(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        read(tmp_path)
    whole = save(tmp_path / "x.safetensors", {"a": np.ones(9, np.float32)})
    data = whole.read_bytes()
    starts = {
        "is empty": b"",
        "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
        "a web page": b"\n<!DOCTYPE html>",
        "not fully covered": data[:-1],
        "header": data[:12],
        "eader": b"\xff" * 64,
    }
    for message, start in starts.items():
        whole.write_bytes(start)
        with pytest.raises(ValueError, match=rf"x\.safetensors.*{message}"):
            read(whole)
    (tmp_path / "x.onnx").write_bytes(data)
    with pytest.raises(ValueError, match=r"weights are read from \.safetensors, \.pt"):
        read(tmp_path / "x.onnx")
    (tmp_path / "y.pth").write_bytes(data)
    with pytest.raises(ValueError, match=r"several weights; name one: .*x.*y"):
        read(tmp_path)


def test_torch_is_asked_for_by_name(tmp_path, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(readers_module, "import_module", absent)
    (tmp_path / "x.pth").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jaxspec\[torch\]"'):
        read(tmp_path / "x.pth")


# Containers.

PLAIN = {"a.weight": np.ones((2, 3)), "b.bias": np.zeros(4)}


def prefixed(prefix: str) -> dict:
    return {prefix + key: x for key, x in PLAIN.items()}


@pytest.mark.parametrize(
    ("content", "containers"),
    [
        (PLAIN, ()),
        ({"model": PLAIN, "epoch": 3}, ("model",)),
        ({"module": PLAIN}, ("module",)),
        ({"state_dict": PLAIN}, ("state_dict",)),
        ({"ema": PLAIN, "model": {}}, ("ema",)),
        ({"model": {"name": "x", "args": {}, "sd": PLAIN}}, ("model", "sd")),
        (prefixed("module."), ("module.",)),
        (prefixed("module._orig_mod."), ("module.", "_orig_mod.")),
        ({"model": prefixed("_orig_mod.module.")}, ("model", "_orig_mod.", "module.")),
        (prefixed("module.module."), ("module.", "module.")),
        ({"a._orig_mod.weight": PLAIN["a.weight"], "b.bias": 0 * PLAIN["b.bias"]},
         ("_orig_mod.",)),
        ({"model": {"module": {"state_dict": prefixed("module.")}}},
         ("model", "module", "state_dict", "module.")),
    ],
)  # fmt: skip
def test_containers_are_taken_off_and_reported(content, containers):
    found = peel(content)
    assert_same_bits(found.tensors, PLAIN)
    assert found.containers == containers


def test_arguments_beside_the_weights_are_kept():
    found = peel({"model": {"name": "ar_dtok", "args": {"dim": 8}, "sd": PLAIN}})
    assert (found.name, found.args) == ("ar_dtok", {"dim": 8})
    training = {"model": PLAIN, "optimizer": {}, "args": argparse.Namespace(dim=8)}
    assert peel(training).args == {"dim": 8}
    assert peel(training).left_out == ("optimizer",)


def test_several_sets_of_weights_demand_a_choice():
    both = {"model": PLAIN, "ema": {k: x + 1 for k, x in PLAIN.items()}, "net": PLAIN}
    with pytest.raises(ValueError, match="several sets of weights, model and ema"):
        peel(both)
    assert peel(both, "ema").tensors["b.bias"][0] == 1
    assert peel(both, "model").tensors["b.bias"][0] == 0
    assert peel(both, "net").containers == ("net",)
    with pytest.raises(ValueError, match="several sets"):
        peel(both, "other")
    with pytest.raises(ValueError, match="no set of weights 'ema': it holds a.weight"):
        peel({"model": PLAIN}, "ema")


def test_contents_without_weights():
    itself = {}
    itself["model"] = itself
    for content, message in {
        "[1]": "holds a list",
        '{"epoch": 3, "net": {"a": 1}}': r"epoch \(int\), net \(a dictionary of 1\)",
        "{}": "it holds nothing",
    }.items():
        with pytest.raises(ValueError, match=message):
            peel(json.loads(content))
    with pytest.raises(ValueError, match="more than 16 deep"):
        peel(itself)
    with pytest.raises(ValueError, match="not all names"):
        peel({0: PLAIN["a.weight"]})
    with pytest.raises(ValueError, match="collide"):
        peel({"a": PLAIN["b.bias"], "_orig_mod.a": PLAIN["b.bias"]})


# The command line.


def test_inspect_reads_no_weights(tmp_path, monkeypatch):
    path = source(tmp_path / "tar", "tar_ardtok_tiny")

    def fail(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(FileTensor, "__array__", fail)
    out = run("inspect", path)
    assert out.exit_code == 0, out.output
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.output.splitlines())
    assert lines["family"] == "Tar AR-DTok, a size of its own (3 layers, 64 wide)"
    assert lines["types"] == "27 float32"
    assert lines["converts"] == "yes"
    assert json.loads(lines["arguments"]) == manifest("tar_ardtok_tiny")["args"]
    assert "abs_pe" in run("inspect", path, "--tensors").output.splitlines()[-27]
    found = json.loads(run("inspect", path, "--json").output)
    assert found["tensors"][0] == {
        "name": "abs_pe", "shape": [1, 24, 64], "type": "float32", "bytes": 6144,
    }  # fmt: skip
    assert found["values"] == sum(x.size for x in weights("tar_ardtok_tiny").values())


def test_inspect_says_why_not(tmp_path):
    path = save(tmp_path / "x.safetensors", {"w": np.ones(3, np.float32)})
    assert "no: of no family that is known here" in run("inspect", path).output
    emoji = Path(commands_checkpoints.__file__).parent / "families" / "emoji"
    out = run("inspect", emoji).output
    assert "vq.safetensors" in out and "converted already" in out
    out = run("inspect", tmp_path / "nothing")
    assert out.exit_code == 2 and out.stderr.startswith("error: no file or folder")
