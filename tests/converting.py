"""Published checkpoints as files, rebuilt from the fixtures, and their outputs."""

import json
import os
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file
from typer.testing import CliRunner

from jaxspec import cli
from tests.fixtures import synthetic
from tests.parity import FOLDER

DECODER = dict(size=64, heads=4)  # of LlamaGen's tiny fixtures, 4x4 cells
FIXTURES = {  # name, family, what the caller tells
    "llamagen_c2i_tiny": ("LlamaGen c2i", DECODER),
    "llamagen_t2i_tiny": ("LlamaGen t2i", DECODER),
    "tar_ardtok_tiny": ("Tar AR-DTok", {}),
    "tar_tatok_tiny": ("Tar TA-Tok", {}),
    "lantern_drafter_llamagen_t2i_tiny": (
        "LANTERN drafter for LlamaGen t2i",
        dict(size=256, heads=4),
    ),
    "llamagen_vq16_tiny": ("LlamaGen VQ", {}),
    "chameleon_vq_tiny": ("Chameleon VQ", {}),
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


def source(folder: Path, name: str, args: dict | None = None, **changed) -> Path:
    """A folder of a fixture with its arguments in config.json; None takes one away."""
    tensors = {k: x for k, x in (weights(name) | changed).items() if x is not None}
    save(folder / "model.safetensors", tensors)
    args = manifest(name)["args"] | (args or {})
    (folder / "config.json").write_text(json.dumps(args))
    return folder


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


def run(*arguments: object):
    """The command line."""
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def told(settings: dict) -> list[str]:
    """Settings of a conversion as options of the command."""
    return [word for k, x in settings.items() for word in (f"--{k}", str(x))]


# What the published code gave, as a reference of `jaxspec parity`.


def _last(x: np.ndarray) -> np.ndarray:
    """Channels last."""
    return np.moveaxis(x, 1, -1)


def reference(name: str) -> dict[str, np.ndarray]:
    """The recorded arrays of a fixture under the names that `parity` knows."""
    with np.load(FOLDER / "expected" / f"{name}.npz") as file:
        found = dict(file)
    if name.startswith(("llamagen_vq", "chameleon_vq")):
        codes = found["indices"]
        codes, tokens = (
            x.reshape(len(x), 4, 4) for x in (codes, found.get("decode_indices", codes))
        )
        arrays = {
            "vq/pictures": _last(found["image"]),
            "vq/latents": _last(found["pre_quant"]),
            "vq/encoded": codes,
            "vq/tokens": tokens,
            "vq/images": _last(found["decoded"]),
        }
    elif name == "tar_tatok_tiny":
        arrays = {
            "ta_tok/pictures": _last(found["image"]),
            "ta_tok/indices": found["decode_indices"],
            "ta_tok/features": found["decoded"],
        } | {
            f"ta_tok/encoded_scale{s}": found[f"indices_scale{s + 1}"] for s in range(3)
        }
    elif name.startswith("qwen2"):
        arrays = {"llm/seen": found["mask"]}
        arrays |= {f"llm/{key}": found[key] for key in ("tokens", "logits")}
    elif name.startswith("lantern_drafter"):
        arrays = {
            "drafters/256/features": found["hidden"],
            "drafters/256/tokens": found["tokens"],
            "drafters/256/predicted": found["output"],
        }
    elif name == "t5_tiny":
        arrays = {"t5/seen": found["mask"]}
        arrays |= {f"t5/{key}": found[key] for key in ("tokens", "states")}
    else:
        place = f"decoders/{16 * round(found['tokens'].shape[1] ** 0.5)}"
        arrays = {
            f"{place}/condition": found["cond"],
            f"{place}/tokens": found["tokens"],
            f"{place}/logits": found["logits"],
        }
    return arrays
