"""Chameleon from real containers: a folder of transformers, and torch's own files."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import jaxspec
from jaxspec.models.llama import Llama
from tests.converting import run
from tests.lumina_files import tokenizer_files

ARGS = {
    "vocab_size": 9156,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def theirs():
    """Random; its folder, as transformers saves it, has each head's own norms."""
    torch.manual_seed(0)
    config = transformers.ChameleonConfig(
        **ARGS,
        num_key_value_heads=2,
        vocabulary_map={"<image>": 8711},  # no image tokens: none is masked
        vq_config={"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1},
    )
    model = transformers.ChameleonForConditionalGeneration(config).eval()
    for name, x in model.named_parameters():
        if "norm" in name and "weight" in name:
            torch.nn.init.uniform_(x, 0.5, 1.5)
        else:
            torch.nn.init.normal_(x, std=x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3)
    return model


def as_bin(folder, tensors) -> None:
    """The shards of a folder in torch's format, as older versions wrote them."""
    index = folder / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    for name in set(placed.values()):
        own = {key: tensors[key] for key, file in placed.items() if file == name}
        torch.save(own, folder / name.replace("safetensors", "bin"))
        (folder / name).unlink()
    index.unlink()
    placed = {k: name.replace("safetensors", "bin") for k, name in placed.items()}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": placed}))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_folder_of_transformers(theirs, tmp_path, kind):
    folder = tmp_path / "Anole-7b-v0.1-hf"
    theirs.save_pretrained(folder, max_shard_size="500KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    if kind == "bin":
        as_bin(folder, theirs.state_dict())
    files = tokenizer_files(tmp_path / "tokenizer")
    vqgan = tmp_path / "vqgan.ckpt"  # in Lightning's container
    torch.save({"epoch": 3, "state_dict": load_file(files["--vq"])}, vqgan)
    out = tmp_path / "out"
    said = run(
        *("convert", "anole", "--model", folder, "--vq", vqgan),
        *("--tokenizer", files["--tokenizer"], "--out", out),
    )
    assert said.exit_code == 0, said.output
    parts = json.loads((out / "provenance.json").read_text())["parts"]
    assert parts["vq"]["containers"] == ["state_dict"]
    family = jaxspec.load(out)
    ((_, config),) = family.config.decoders
    assert config.language.head_norms == (2, 2)
    tokens = torch.randint(9156, (2, 7))
    with torch.inference_mode():
        want = theirs(tokens).logits.numpy()
    params = family.params["decoders"]["512"]
    got = jax.jit(Llama(config.language).apply)(params, tokens.numpy())
    assert want.std() > 0.5
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
