"""Chameleon from real containers: a folder of transformers, and torch's own files."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers

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


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_folder_of_transformers(theirs, tmp_path, kind):
    folder = tmp_path / "Anole-7b-v0.1-hf"
    theirs.save_pretrained(folder, max_shard_size="500KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    if kind == "bin":  # as folders of older versions are
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        placed = index["weight_map"]
        for file in shards:
            own = {
                k: theirs.state_dict()[k] for k, f in placed.items() if f == file.name
            }
            torch.save(own, folder / f"{file.stem}.bin")
            file.unlink()
        (folder / "model.safetensors.index.json").unlink()
        placed = {k: f.replace("safetensors", "bin") for k, f in placed.items()}
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"weight_map": placed})
        )
    files = tokenizer_files(tmp_path / "tokenizer")
    vqgan = tmp_path / "vqgan.ckpt"  # in Lightning's container
    from safetensors.torch import load_file

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
