"""Single models converted by streaming: strictly, wholly, or not at all."""

import errno
import hashlib
import json
import re
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.checkpoints import convert_model, inspect_checkpoint, load_model
from jaxspec.checkpoints import single as single_module
from jaxspec.checkpoints import writer as writer_module
from tests.converting import (
    DECODER,
    FIXTURES,
    assert_same_bits,
    flat,
    left_behind,
    run,
    save,
    save_sharded,
    source,
    weights,
)
from tests.parity import published

# Converting.


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


# Damaged files, through the command line.

TAR = "tar_ardtok_tiny"


def damaged(kind: str, folder: Path) -> tuple[Path, list[str], str]:
    """What to convert, with which options, and what the error says."""
    tensors, path = weights(TAR), folder / "model.safetensors"

    def of_tar(message: str, *options: str, **changed):
        return source(folder, TAR, **changed), list(options), message

    if kind == "head removed":
        return of_tar(r"missing output\.weight \[96, 64\]", **{"output.weight": None})
    if kind == "layer missing":
        gone = {k: None for k in tensors if k.startswith("layers.1.")}
        return of_tar(r"missing layers\.1\.attention\.wqkv", **gone)
    if kind == "layer too many":
        more = {k.replace("s.2.", "s.3."): x for k, x in tensors.items() if "s.2." in k}
        return of_tar(r"unexpected layers\.3\.attention\.wqkv", **more)
    if kind == "wrong grid":
        return of_tar(r"8x8 \(128 px\) by size, 4x4", "--size", "128")
    if kind == "positions of another grid":
        table = np.zeros((1, 9 + 25 - 1, 64), np.float32)
        return of_tar(r"5x5 \(80 px\) by its position table", abs_pe=table)
    if kind == "not a number":
        bad = {"norm.weight": np.full(64, np.nan, np.float32)}
        return of_tar("decoders/64/params/norm is not finite", **bad)
    if kind == "half a prefix":
        half = {f"module.{k}": x for k, x in list(tensors.items())[:5]}
        return of_tar(r"unexpected module\.", **half)
    if kind == "shard missing":
        index = save_sharded(folder, tensors)
        (folder / "model-00002-of-00002.safetensors").unlink()
        return index, [], r"missing: \['model-00002-of-00002"
    if kind == "truncated":
        of_tar("")
        path.write_bytes(path.read_bytes()[:-100])
        return path, [], "model.safetensors.*not fully covered"
    if kind == "empty folder":
        folder.mkdir()
        return folder, [], "holds no weights"
    if kind == "no arguments":
        of_tar("")
        return path, [], "no arguments beside the weights"
    return of_tar("dtype must be one of", "--dtype", "int8")


@pytest.mark.parametrize(
    "kind",
    ["head removed", "layer missing", "layer too many", "wrong grid",
     "positions of another grid", "not a number", "half a prefix", "shard missing",
     "truncated", "empty folder", "no arguments", "no float type"],
)  # fmt: skip
def test_damaged_files_leave_an_error_and_nothing_else(tmp_path, kind):
    path, options, message = damaged(kind, tmp_path / "source")
    result = run("convert", "model", path, "--out", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert re.search(message, result.stderr), result.stderr
    assert left_behind(tmp_path) == ["source"]


@pytest.mark.parametrize("prefix", ["module._orig_mod.", "_orig_mod.module.module."])
def test_nested_prefixes_are_taken_off(tmp_path, prefix):
    nested = {prefix + k: x for k, x in weights("llamagen_c2i_tiny").items()}
    path = save(tmp_path / "x.safetensors", nested)
    provenance = convert_model(path, tmp_path / "out", **DECODER)
    want = published("llamagen_c2i_tiny").params
    assert_same_bits(flat(load_model(tmp_path / "out")[1]), flat(want))
    (part,) = provenance["parts"].values()
    assert "".join(part["containers"]) == prefix


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


KILLED = """
import os, signal, sys
from jaxspec.checkpoints import convert_model

def progress(done, total):
    if done > 0.7 * total:
        os.kill(os.getpid(), signal.SIGKILL)

convert_model(*sys.argv[1:], size=64, heads=4, progress=progress)
"""


def test_a_killed_run_leaves_nothing_under_the_name(model, tmp_path):
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, model, out])
    assert killed.returncode == -signal.SIGKILL
    partial, name = left_behind(tmp_path)
    assert name == model.name and partial.startswith(".out.")
    convert_model(model, out, **DECODER)
    assert left_behind(tmp_path) == ["out", model.name]
    want = published("llamagen_c2i_tiny").params
    assert_same_bits(flat(load_model(out)[1]), flat(want))


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


# The other format.


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", [TAR, "t5_tiny"])
def test_both_formats_hold_the_same_bits(tmp_path, name, dtype):
    path, found = source(tmp_path / "source", name), {}
    for format in writer_module.FORMATS:
        convert_model(path, tmp_path / format, dtype=dtype, format=format)
        found[format] = load_model(tmp_path / format)
    assert found["orbax"][0] == found["safetensors"][0] == published(name).config
    assert_same_bits(flat(found["orbax"][1]), flat(found["safetensors"][1]))
    names = ["config.json", "orbax", "provenance.json"]
    assert left_behind(tmp_path / "orbax") == names


def test_both_formats_load_strictly(model, tmp_path):
    for format in writer_module.FORMATS:
        out = tmp_path / format
        convert_model(model, out, format=format, **DECODER)
        values = json.loads((out / "config.json").read_text())
        values["config"]["depth"] = 4
        (out / "config.json").write_text(json.dumps(values))
        with pytest.raises(ValueError, match=r"not fit config.json.*not \[4, 64\]"):
            load_model(out)
    with pytest.raises(ValueError, match="format must be safetensors or orbax, not"):
        convert_model(model, tmp_path / "out", format="npz", **DECODER)


def test_an_orbax_write_that_fails_leaves_nothing(model, tmp_path, monkeypatch):
    def fail(folder, weights):
        assert left_behind(folder) == ["config.json", "decoders-64.safetensors"]
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(single_module, "write_orbax", fail)
    with pytest.raises(OSError, match="Input/output"):
        convert_model(model, tmp_path / "out", format="orbax", **DECODER)
    assert left_behind(tmp_path) == [model.name]


# The command line.


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
