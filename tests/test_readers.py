"""Reading checkpoint files safely, and converting single ones by streaming."""

import argparse
import errno
import hashlib
import json
import os
import re
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import jaxspec
from jaxspec import commands_checkpoints
from jaxspec.checkpoints import convert_model, inspect_checkpoint, load_model, read
from jaxspec.checkpoints import readers as readers_module
from jaxspec.checkpoints import writer as writer_module
from jaxspec.checkpoints.containers import peel
from jaxspec.checkpoints.readers import FileTensor
from tests.fixtures import synthetic
from tests.parity import FOLDER, published

DECODER = dict(size=64, heads=4)  # of LlamaGen's tiny fixtures, 4x4 cells
FIXTURES = {  # name, family, what the caller tells
    "llamagen_c2i_tiny": ("LlamaGen c2i", DECODER),
    "llamagen_t2i_tiny": ("LlamaGen t2i", DECODER),
    "tar_ardtok_tiny": ("Tar AR-DTok", {}),
    "tar_tatok_tiny": ("Tar TA-Tok", {}),
    "llamagen_vq16_tiny": ("LlamaGen VQ", {}),
    "qwen2_tiny_tied": ("Qwen2", {}),
    "t5_tiny": ("T5", {}),
}


def manifest(name: str) -> dict:
    return synthetic.load_manifest(FOLDER / "manifests" / f"{name}.json")


def weights(name: str) -> dict[str, np.ndarray]:
    return synthetic.state_dict(manifest(name))


def save(path: Path, tensors: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: x.copy() for k, x in tensors.items()}, path)
    return path


def save_sharded(folder: Path, tensors: dict) -> Path:
    """Two shards and their index, as transformers writes them."""
    keys = list(tensors)
    name = "model-0000{}-of-00002.safetensors"
    placed = {key: name.format(1 + i % 2) for i, key in enumerate(keys)}
    for name in set(placed.values()):
        save(folder / name, {k: tensors[k] for k in keys if placed[k] == name})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return index


def assert_same_bits(got: dict, want: dict):
    got, want = ({k: np.asarray(x) for k, x in d.items()} for d in (got, want))
    assert got.keys() == want.keys()
    for key, x in want.items():
        assert (got[key].dtype, got[key].shape) == (x.dtype, x.shape), key
        assert got[key].tobytes() == x.tobytes(), key


def flat(params) -> dict:
    return {jax.tree_util.keystr(k): x for k, x in jax.tree.leaves_with_path(params)}


def left_behind(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


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


# Converting.


def source(folder: Path, name: str, **changed) -> Path:
    """A folder of a fixture, its arguments in config.json."""
    tensors = {k: x for k, x in (weights(name) | changed).items() if x is not None}
    save(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(manifest(name)["args"]))
    return folder


@pytest.mark.parametrize("name", FIXTURES)
def test_streamed_conversion_is_the_direct_one(tmp_path, name):
    family, told = FIXTURES[name]
    path, out = source(tmp_path / "source", name), tmp_path / "out"
    provenance = convert_model(path, out, **told)
    config, params = load_model(out)
    assert config == published(name).config
    assert_same_bits(flat(params), flat(published(name).params))
    ((place, part),) = provenance["parts"].items()
    assert json.loads((out / "provenance.json").read_text()) == provenance
    assert part["family"] == family
    assert part["files"][0]["name"] == "model.safetensors"
    assert left_behind(out) == sorted(
        ["config.json", "provenance.json", f"{place.replace('/', '-')}.safetensors"]
    )
    assert left_behind(tmp_path) == ["out", "source"]


def test_provenance_names_what_was_read(tmp_path):
    path = save(tmp_path / "x.safetensors", weights("llamagen_vq16_tiny"))
    seen = []
    found = convert_model(
        path, tmp_path / "out", dtype="bfloat16", progress=lambda *n: seen.append(n)
    )
    part = found["parts"]["vq"]
    assert found["jaxspec"] == jaxspec.__version__
    assert part["files"] == [
        {
            "name": "x.safetensors",
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    ]
    assert part["dropped"] == ["quantize.codebook_used"]
    assert (part["types"], part["cast_to"]) == (["float32"], "bfloat16")
    total = path.stat().st_size + sum(
        x.nbytes // 2 for x in jax.tree.leaves(published("llamagen_vq16_tiny").params)
    )
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_types_are_kept_or_cast_on_purpose(tmp_path):
    name = "llamagen_c2i_tiny"
    half = {k: x.astype(jnp.bfloat16) for k, x in weights(name).items()}
    path = save(tmp_path / "half.safetensors", half)
    convert_model(path, tmp_path / "kept", **DECODER)
    want = jax.tree.map(lambda x: x.astype(jnp.bfloat16), published(name).params)
    assert_same_bits(flat(load_model(tmp_path / "kept")[1]), flat(want))
    convert_model(path, tmp_path / "cast", dtype="float32", **DECODER)
    want = jax.tree.map(lambda x: x.astype(jnp.float32), want)
    assert_same_bits(flat(load_model(tmp_path / "cast")[1]), flat(want))
    half["output.weight"] = (half["output.weight"] * 1e6).astype(jnp.bfloat16)
    path = save(tmp_path / "large.safetensors", half)
    with pytest.raises(ValueError, match="64/params/head is not finite as float16"):
        convert_model(path, tmp_path / "new", dtype="float16", **DECODER)
    with pytest.raises(ValueError, match="dtype must be one of float32"):
        convert_model(path, tmp_path / "new", dtype="int8", **DECODER)
    assert "new" not in left_behind(tmp_path) and not list(tmp_path.glob(".*"))


def test_damaged_weights_are_listed_and_nothing_is_written(tmp_path):
    fused = weights("tar_ardtok_tiny")["layers.1.attention.wqkv.weight"]
    path = source(
        tmp_path / "source",
        "tar_ardtok_tiny",
        **{
            "output.weight": None,
            "layers.1.attention.wqkv.weight": fused[:-1],
            "layers.3.ffn_norm.weight": np.ones(64, np.float32),
            "norm.weight": np.ones(64, np.int8),
        },
    )
    with pytest.raises(ValueError) as error:
        convert_model(path, tmp_path / "out")
    assert str(error.value).splitlines() == [
        f"{path}: 4 problems in the state dict; nothing was converted:",
        "  missing output.weight [96, 64]",
        "  unexpected layers.3.ffn_norm.weight [64]",
        "  shape of layers.1.attention.wqkv.weight is [191, 64], not [192, 64]",
        "  type of norm.weight is int8, not one of float32, float16, bfloat16",
    ]
    assert left_behind(tmp_path) == ["source"]


def test_a_layer_that_is_missing(tmp_path):
    gone = {k: None for k in weights("tar_ardtok_tiny") if k.startswith("layers.2.")}
    path = source(tmp_path / "source", "tar_ardtok_tiny", **gone)
    with pytest.raises(ValueError, match=f"{len(gone)} problems") as error:
        convert_model(path, tmp_path / "out")
    assert str(error.value).count("missing layers.2.") == len(gone)


def test_what_was_converted_is_not_converted_again(tmp_path):
    path = save(tmp_path / "x.safetensors", weights("llamagen_c2i_tiny"))
    out = tmp_path / "out"
    convert_model(path, out, **DECODER)
    before = (out / "decoders-64.safetensors").read_bytes()
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        convert_model(path, out, **DECODER)
    for converted in (out, out / "decoders-64.safetensors"):
        with pytest.raises(ValueError, match="converted already"):
            convert_model(converted, tmp_path / "again")
    assert (out / "decoders-64.safetensors").read_bytes() == before
    assert left_behind(tmp_path) == ["out", "x.safetensors"]


# Pairings.


def test_grids_must_agree(tmp_path):
    c2i = weights("llamagen_c2i_tiny")
    path = save(tmp_path / "x.safetensors", c2i)
    with pytest.raises(ValueError, match="do not tell the grid: pass size"):
        convert_model(path, tmp_path / "out", heads=4)
    with pytest.raises(ValueError, match="multiple of 16"):
        convert_model(path, tmp_path / "out", size=60, heads=4)
    table = {"freqs_cis": np.zeros((17, 8, 2), np.float32)}
    path = save(tmp_path / "x.safetensors", c2i | table)
    with pytest.raises(
        ValueError, match=r"8x8 \(128 px\) by size, 4x4 .* by freqs_cis"
    ):
        convert_model(path, tmp_path / "out", size=128, heads=4)
    # The table is enough; it is no weight, and is dropped by name.
    found = convert_model(path, tmp_path / "out", heads=4)
    assert found["parts"]["decoders/64"]["dropped"] == ["freqs_cis"]

    places = np.zeros((1, 9 + 25 - 1, 64), np.float32)
    path = source(tmp_path / "tar", "tar_ardtok_tiny", abs_pe=places)
    with pytest.raises(
        ValueError, match=r"4x4.* by its arguments, 5x5.*position table"
    ):
        convert_model(path, tmp_path / "other")


def test_names_of_published_files_are_promises(tmp_path):
    c2i = weights("llamagen_c2i_tiny")
    for name in ("c2i_XL_384", "t2i_XL_stage1_256", "ar_dtok_lp_256px", "vq_ds16_t2i"):
        path = save(tmp_path / f"{name}.safetensors", c2i)
        with pytest.raises(ValueError, match="name of another model.*LlamaGen c2i, a"):
            convert_model(path, tmp_path / "out", **DECODER)
    tensors = {k: np.broadcast_to(np.float16(0), v) for k, v in b_shapes().items()}
    path = save(tmp_path / "c2i_B_384.safetensors", tensors)
    found = inspect_checkpoint(path)
    assert (found["size"], found["converts"]) == ("B (12 layers, 768 wide)", True)
    for heads, message in ((6, "has 12 heads, not 6"), (5, "do not divide")):
        found = inspect_checkpoint(path, heads=heads)
        assert message in found["problems"][0] and not found["converts"]
    found = inspect_checkpoint(path, size=256)
    assert found["problems"] == [
        "the grid is told in ways that differ: 16x16 (256 px) by size, 24x24 (384 px) "
        "by the file's name"
    ]


def b_shapes() -> dict[str, tuple[int, ...]]:
    """LlamaGen-B as to its size, with few codes and a narrow feed-forward layer."""
    layer = {
        "attention_norm.weight": (768,),
        "attention.wqkv.weight": (2304, 768),
        "attention.wo.weight": (768, 768),
        "ffn_norm.weight": (768,),
        "feed_forward.w1.weight": (8, 768),
        "feed_forward.w3.weight": (8, 768),
        "feed_forward.w2.weight": (768, 8),
    }
    layers = {f"layers.{i}.{k}": v for i in range(12) for k, v in layer.items()}
    return layers | {
        "tok_embeddings.weight": (16, 768),
        "cls_embedding.embedding_table.weight": (11, 768),
        "norm.weight": (768,),
        "output.weight": (16, 768),
    }


# Writing.


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "x.safetensors", weights("llamagen_c2i_tiny"))


def test_a_full_disk_leaves_nothing(model, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    with monkeypatch.context() as patch:
        patch.setattr(writer_module.shutil, "disk_usage", lambda _: usage(1000))
        with pytest.raises(OSError, match="bytes are needed, and .* has 1,000 left"):
            convert_model(model, tmp_path / "out", **DECODER)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module.os, "fsync", full)
    with pytest.raises(OSError, match=r"no space left for decoders-64\.safetensors"):
        convert_model(model, tmp_path / "out", **DECODER)
    assert left_behind(tmp_path) == ["x.safetensors"]


def test_a_target_that_cannot_be_written(model, tmp_path, monkeypatch):
    with pytest.raises(OSError, match="cannot write .*: Not a directory"):
        convert_model(model, model / "out", **DECODER)

    def read_only(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", read_only)  # root may write anywhere
    with pytest.raises(OSError, match="cannot write .*out: Permission denied"):
        convert_model(model, tmp_path / "out", **DECODER)


def test_what_a_killed_run_left_is_removed_and_a_live_one_is_not(model, tmp_path):
    dead, other = f".out.{'0' * 32}.partial", f".out.er.{'0' * 32}.partial"
    for name in (dead, dead.replace("0", "1"), other):
        (tmp_path / name).mkdir()
    (tmp_path / dead / "config.json").touch()
    with writer_module.new_folder(tmp_path / "out") as partial:
        assert left_behind(tmp_path) == sorted([partial.name, other, model.name])
        with pytest.raises(ValueError, match="is being written by another run"):
            convert_model(model, tmp_path / "out", **DECODER)
    assert left_behind(tmp_path) == sorted(["out", other, model.name])


# The command line.


def run(*arguments: object):
    app = commands_checkpoints.app
    return CliRunner().invoke(app, [str(a) for a in arguments])


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


def test_convert_a_model(tmp_path):
    vq = save(tmp_path / "x.safetensors", weights("llamagen_vq16_tiny"))
    out = run("convert", "model", vq, "--out", tmp_path / "vq")
    assert out.exit_code == 0, out.output
    assert "LlamaGen VQ, a size of its own (5 layers, 32 wide), as vq" in out.output
    config, params = load_model(tmp_path / "vq", dtype=jnp.float16)
    assert config.codebook_size == 256
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float16)}
    again = run("convert", "model", vq, "--out", tmp_path / "vq")
    assert again.exit_code == 2 and "not an empty folder" in again.stderr
