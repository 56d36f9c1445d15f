"""Real PyTorch files: none runs code, and all convert to what computes the same."""

import argparse
import json
import os
import tracemalloc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.checkpoints import convert_model, inspect_checkpoint, load_model, read
from jaxspec.checkpoints.readers import FileTensor
from tests.converting import manifest, reference, run, told, weights
from tests.parity import published


def state_dict(name: str, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {k: torch.from_numpy(x).to(dtype) for k, x in weights(name).items()}


def save(path, content, **how):
    path.parent.mkdir(exist_ok=True)
    torch.save(content, path, **how)
    return path


class Marker:
    """Unpickling it would make a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("within", ["model", "list", "args", "state_dict"])
def test_no_code_of_a_file_runs(tmp_path, within, legacy):
    evil, tensor = Marker(tmp_path / "marker"), torch.ones(2)
    content = {
        "model": {"model": evil},
        "list": [tensor, evil],
        "args": {"model": {"args": {"a": evil}, "sd": {"w": tensor}}},
        "state_dict": {"w": tensor, "x": evil},
    }[within]
    path = tmp_path / "x.pt"
    save(path, content, _use_new_zipfile_serialization=not legacy)
    message = "PyTorch's zip format" if legacy else "was refused.*it asks for .*mkdir"
    for reads in (read, inspect_checkpoint):
        with pytest.raises(ValueError, match=f"{message}.*save it again safely"):
            reads(path)
    with pytest.raises(ValueError):
        convert_model(path, tmp_path / "out")
    assert os.listdir(tmp_path) == ["x.pt"]
    with warnings.catch_warnings():  # the file is as dangerous as it should be
        warnings.simplefilter("ignore")
        torch.load(path, weights_only=False)
    assert (tmp_path / "marker").exists()


def test_the_variable_that_switches_safety_off_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = save(tmp_path / "x.pt", {"model": Marker(tmp_path / "marker")})
    with pytest.raises(ValueError, match="was refused"):
        read(path)
    assert not (tmp_path / "marker").exists()


def test_damaged_files(tmp_path):
    path = save(tmp_path / "x.pt", {"w": torch.ones(1000)})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"x\.pt cannot be read.*is it whole"):
        read(path)
    path.write_bytes(data[:2])
    with pytest.raises(ValueError, match="not in PyTorch's zip format"):
        read(path)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch's own, of such tensors
@pytest.mark.parametrize("kind", ["bare", "quantized", "sparse"])
def test_what_is_no_dictionary_of_plain_tensors(tmp_path, kind):
    x = torch.ones(3)
    content, message = {
        "bare": (x, "holds a Tensor, not tensors by name"),
        "quantized": (
            {"w": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)},
            r"w is not a plain tensor \(qint8",
        ),
        "sparse": ({"w": x.to_sparse()}, r"w is not a plain tensor.*sparse"),
    }[kind]
    path = save(tmp_path / "x.pt", content)
    with pytest.raises(ValueError, match=message):
        read(path)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_values_keep_their_bits(tmp_path, dtype):
    x = (torch.randn(7, 5) * 9).to(dtype)
    tensors = {
        "plain": x,
        "transposed": x.T,
        "slice": x[1:5:2, 3],
        "scalar": x[0, 0],
        "empty": x[:0],
    }
    if dtype.is_floating_point:
        tensors["parameter"] = torch.nn.Parameter(x)
    found = read(save(tmp_path / "x.pth", tensors)).tensors
    assert found.keys() == tensors.keys()
    for key, want in tensors.items():
        got = np.asarray(found[key])
        assert (str(got.dtype), got.shape) == (str(dtype)[6:], tuple(want.shape))
        assert got.tobytes() == bits(want), key
        assert got.astype(np.float32).tolist() == want.float().tolist()


def bits(x: torch.Tensor) -> bytes:
    """Of its values in order, NumPy's types or not."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_containers_of_training_scripts(tmp_path):
    tensors = state_dict("llamagen_c2i_tiny")
    ema = {k: x + 1 for k, x in tensors.items()}
    training = {
        "model": {f"module._orig_mod.{k}": x for k, x in tensors.items()},
        "ema": ema,
        "optimizer": {"state": {0: torch.ones(2)}},
        "args": argparse.Namespace(image_size=64, downsample_size=16),
    }
    path = save(tmp_path / "0001000.pt", training)
    with pytest.raises(ValueError, match="several sets of weights, model and ema"):
        read(path)
    found = read(path, "model")
    assert found.containers == ("model", "module.", "_orig_mod.")
    assert found.left_out == ("ema", "optimizer")
    assert np.array_equal(found.tensors["norm.weight"], tensors["norm.weight"])
    # The grid is in the arguments.
    convert_model(path, tmp_path / "out", weights="ema", heads=4)
    config, params = load_model(tmp_path / "out")
    assert config == published("llamagen_c2i_tiny").config
    assert np.array_equal(params["params"]["norm"], ema["norm.weight"])


CONTAINERS = {  # name, its file, what it is wrapped in, what the caller tells
    "tar_ardtok_tiny": ("ar_dtok.pth", "tar", {}),
    "tar_ardtok_tiny_gqa": ("ar_dtok.pth", "tar", {}),
    "tar_tatok_tiny": ("ta_tok.pth", "tar", {}),
    "llamagen_vq16_tiny": ("vq.pt", "model", {}),
    "llamagen_c2i_tiny": ("c2i.pt", "bare", dict(size=64, heads=4)),
    "llamagen_t2i_tiny": ("t2i.pt", "module", dict(size=64, heads=4)),
    "t5_tiny": ("pytorch_model.bin", "folder", {}),
    "qwen2_tiny": ("pytorch_model.bin.index.json", "folder", {}),
}


def rebuild(folder, name: str, dtype=torch.float32):
    """A fixture as a real file in its real container."""
    file, container, _ = CONTAINERS[name]
    tensors, args = state_dict(name, dtype), manifest(name)["args"]
    path = folder / file
    if container != "folder":
        content = {
            "tar": {"model": {"name": name, "args": args, "sd": tensors}},
            "bare": tensors,
        }.get(container, {container: tensors})
        return save(path, content)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(args))
    if path.suffix != ".json":
        save(path, tensors)
        return folder
    placed = {k: f"pytorch_model-{i % 3}.bin" for i, k in enumerate(tensors)}
    for shard in set(placed.values()):
        save(folder / shard, {k: x for k, x in tensors.items() if placed[k] == shard})
    path.write_text(json.dumps({"weight_map": placed}))
    return folder


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", CONTAINERS)
def test_files_convert_as_their_state_dicts_do(tmp_path, name):
    """All by the command line: from the file to what the published code computed."""
    path, out = rebuild(tmp_path / "source", name), tmp_path / "out"
    converted = run("convert", "model", path, "--out", out, *told(CONTAINERS[name][2]))
    assert converted.exit_code == 0, converted.output
    config, params = load_model(out)
    assert config == published(name).config
    assert_same_bits(params, published(name).params)
    np.savez(tmp_path / "reference.npz", **reference(name))
    proof = run("parity", out, "--reference", tmp_path / "reference.npz")
    assert proof.exit_code == 0 and "ok" in proof.output, proof.output
    provenance = json.loads((out / "provenance.json").read_text())
    (part,) = provenance["parts"].values()
    wrapped = {"tar": ["model", "sd"], "bare": [], "folder": []}
    container = CONTAINERS[name][1]
    assert part["containers"] == wrapped.get(container, [container])
    if container in ("tar", "folder"):
        assert part["arguments"] == manifest(name)["args"]


def test_bfloat16_files_stay_bfloat16(tmp_path):
    name = "tar_ardtok_tiny"
    path = rebuild(tmp_path / "source", name, torch.bfloat16)
    convert_model(path, tmp_path / "out")
    _, params = load_model(tmp_path / "out")
    want = jax.tree.map(lambda x: x.astype(jnp.bfloat16), published(name).params)
    assert_same_bits(params, want)


def test_conversion_streams(tmp_path, monkeypatch):
    """Of a model of 110 MB no more than a layer or two, 14 MB each, are held."""
    width, hidden, depth = 512, 1536, 8
    layer = {
        "attention_norm.weight": (width,),
        "attention.wqkv.weight": (3 * width, width),
        "attention.wo.weight": (width, width),
        "ffn_norm.weight": (width,),
        "feed_forward.w1.weight": (hidden, width),
        "feed_forward.w3.weight": (hidden, width),
        "feed_forward.w2.weight": (width, hidden),
    }
    shapes = {f"layers.{i}.{k}": v for i in range(depth) for k, v in layer.items()}
    shapes |= {
        "tok_embeddings.weight": (64, width),
        "cls_embedding.embedding_table.weight": (11, width),
        "norm.weight": (width,),
        "output.weight": (64, width),
    }
    path = save(tmp_path / "x.pt", {k: torch.ones(v) for k, v in shapes.items()})
    assert path.stat().st_size > 100e6
    reads = []
    whole = FileTensor.__array__
    monkeypatch.setattr(
        FileTensor, "__array__", lambda x, *a, **k: reads.append(x) or whole(x, *a, **k)
    )
    tracemalloc.start()
    try:
        inspect_checkpoint(path, size=64, heads=8)
        assert not reads
        convert_model(path, tmp_path / "out", size=64, heads=8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(reads) == len(shapes)  # each once
    assert peak < 30e6
