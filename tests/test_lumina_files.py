"""Lumina-mGPT and Anole from files laid out as published, through the command line."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from jaxspec.checkpoints import convert_model, load_model, read
from jaxspec.checkpoints.chameleon import grid_config
from jaxspec.checkpoints.readers import Checkpoint
from jaxspec.models.chameleon import ChameleonGridConfig
from jaxspec.models.stacks import restack
from jaxspec.pipeline import Defaults
from tests import toy_lumina
from tests.converting import left_behind, run, save
from tests.lumina_files import (
    VQ,
    language_model,
    language_params,
    raw_language_model,
    sliced_language_model,
    tokenizer_files,
    vq_params,
)

MASKED = {"mask_image_logits": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models of 64 and 128 px, with what they share as options of the commands."""
    folder = tmp_path_factory.mktemp("published")
    models = {
        size: language_model(folder / f"Lumina-mGPT-7B-{size}", seed=size)
        for size in (64, 128)
    }
    return {**models, **tokenizer_files(folder / "tokenizer")}


def convert(files, kind, models, out, *words):
    options = [(key, files[key]) for key in ("--vq", "--tokenizer")]
    options += [("--model", model) for model in models] + [("--out", out)]
    return run("convert", kind, *(x for pair in options for x in pair), *words)


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_lumina_of_two_sizes(files, tmp_path):
    out = tmp_path / "lumina"
    said = convert(files, "lumina", [files[128], files[64]], out)
    assert said.exit_code == 0, said.output
    assert "Chameleon, a size of its own (2 layers, 16 wide), as decoders/64" in (
        said.output
    )
    family = jaxspec.load(out)
    assert family.config.name == "Lumina-mGPT" and family.config.sizes == (64, 128)
    assert family.config.vq == VQ and family.config.pixels == "truncated"
    assert family.config.decoders == toy_lumina.family().config.decoders
    for size in (64, 128):
        own = restack(family.params["decoders"][str(size)])
        assert_same(own, language_params(size))
    assert_same(family.params["vq"], vq_params())
    found = json.loads((out / "provenance.json").read_text())["parts"]
    assert found["decoders/64"]["dropped"] == ["model.vqmodel.encoder.conv_in.weight"]
    assert found["vq"]["dropped"] == ["loss.discriminator.main.0.weight"]
    assert "told" not in found["decoders/64"]
    assert found["decoders/64"]["arguments"]["vocabulary_map"] == "200 entries"
    assert family.config.defaults == Defaults(128, 3.0, 1.0, 2000, 1.0)


def test_anole_in_either_layout(files, tmp_path):
    """Hugging Face's folder and Meta's one file make the same parameters."""
    folder = language_model(tmp_path / "hf", architectures=None, mask_image_logits=None)
    raw = raw_language_model(tmp_path / "consolidated.safetensors")
    for model in (folder, raw):
        out = tmp_path / f"{model.stem}-out"
        said = convert(files, "anole", [model], out)
        assert said.exit_code == 0, said.output
        family = jaxspec.load(out)
        ((size, config),) = family.config.decoders
        assert (size, config.grid, config.newline) == (512, (32, 32), None)
        assert family.config.text.kind == "anole"
        own = restack(family.params["decoders"]["512"])
        assert_same(own, language_params())


def test_slices_of_several_devices_are_one_model(tmp_path):
    """As Meta's 34B: of four heads, each has a slice, and norms of its own."""
    language = replace(toy_lumina.language(), heads=4, key_heads=4, norm_epsilon=1e-6)
    language = replace(language, head_norms=(4, 4), output_norms=True)
    want = sliced_language_model(tmp_path / "34b", language, 4)
    convert_model(tmp_path / "34b", tmp_path / "out")
    config, params = load_model(tmp_path / "out")
    assert config == ChameleonGridConfig(language, (32, 32), newline=None)
    assert_same(params, want)

    slices = sorted((tmp_path / "34b").glob("*.safetensors"))
    own = load_file(slices[1])
    for path, changed, said in [
        (
            slices[1],
            own,
            "01.safetensors is one of 4 slices of a model: give their fol",
        ),
        (slices[1].parent, own | {"rope.freqs": own["norm.weight"]}, "not all slices"),
        (slices[1].parent, own | {"norm.weight": np.ones(3)}, "slices of norm.weight "),
    ]:
        save(slices[1], changed)
        with pytest.raises(ValueError, match=said):
            read(path)
    save(slices[1], own)
    (tmp_path / "34b" / "params.json").unlink()
    with pytest.raises(ValueError, match="params.json, with swin_norm, must be beside"):
        convert_model(tmp_path / "34b", tmp_path / "none")
    slices[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks slices .* consolidated\.01"):
        read(tmp_path / "34b")


def test_weights_that_were_not_made_to_draw(files, tmp_path):
    out = tmp_path / "out"
    masked = language_model(tmp_path / "Lumina-mGPT-7B-64", **MASKED)
    silent = language_model(
        tmp_path / "tuned", architectures=None, mask_image_logits=None
    )
    meta = language_model(
        tmp_path / "models--facebook--chameleon-7b",
        architectures=["ChameleonForConditionalGeneration"],
        mask_image_logits=None,
    )
    for kind, model, reason in [
        ("lumina", masked, "config.json has mask_image_logits true: image codes were"),
        ("chameleon", silent, "has no mask_image_logits, so that nothing tells"),
        ("chameleon", meta, "is Meta's own release, which makes no pictures"),
        ("anole", meta, "is Meta's own release, which makes no pictures"),
    ]:
        said = convert(files, kind, [model], out)
        assert said.exit_code == 2 and reason in said.stderr, said.output
        assert said.stderr.count("\n") == 1 and "say why with --draws" in said.stderr
        assert not out.exists()
    reason = "unmasked while it was tuned"
    for kind, model, size in (("lumina", masked, 64), ("anole", meta, 512)):
        out = tmp_path / kind
        said = convert(files, kind, [model], out, "--draws", reason)
        assert said.exit_code == 0, said.output
        parts = json.loads((out / "provenance.json").read_text())["parts"]
        assert parts[f"decoders/{size}"]["told"] == {"draws": reason}


def test_what_does_not_belong_together(files, tmp_path):
    shuffled = json.loads(files["--tokenizer"].read_text())
    vocabulary = shuffled["model"]["vocab"]
    one, two = "IMGIMGBZ", "IMGIMGCZ"
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    other = tmp_path / "text_tokenizer.json"
    other.write_text(json.dumps(shuffled))
    unnamed = language_model(tmp_path / "tuned")
    anole = language_model(tmp_path / "anole", architectures=None)
    for kind, models, changed, words, reason in [
        ("lumina", [files[64]], {"--tokenizer": other}, [], f"has {one} as 6, and"),
        ("lumina", [files[64]], {"--vq": files[64]}, [], "holds Chameleon, not Chamel"),
        ("lumina", [unnamed], {"--tokenizer": "no.json"}, [], "no.json is missing: it"),
        ("lumina", [unnamed], {}, [], "the weights do not tell the size: pass it"),
        ("lumina", [files[64]], {}, ["--size", 128], "size is 128, but the model's na"),
        ("lumina", [files[64]] * 2, {}, [], "both draw 64 px"),
        ("lumina", [anole], {}, [], "anole is not Lumina-mGPT: by its name or its"),
        ("anole", [files[64]], {}, [], "64 is not Anole: by its name or its config.js"),
    ]:
        said = convert(files | changed, kind, models, tmp_path / "out" / "x", *words)
        assert said.exit_code == 2 and reason in said.stderr, said.output
        assert not (tmp_path / "out").exists() or left_behind(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("path", "kinds", "size", "grid"),
    [
        ("Lumina-mGPT-7B-768", [], None, (48, 49)),
        ("models--Alpha-VLLM--Lumina-mGPT-7B-1024/snapshots/ab", [], None, (64, 65)),
        ("Lumina-mGPT-2024/Lumina-mGPT-34B-512", [], 512, (32, 33)),
        ("Lumina-mGPT-7B-768-Omni", [], None, (48, 49)),
        ("tuned", ["ChameleonXLLMXForConditionalGeneration"], 768, (48, 49)),
        ("Anole-7b-v0.1-hf", [], None, (32, 32)),
    ],
)
def test_sizes_of_published_names(path, kinds, size, grid, tmp_path):
    checkpoint = Checkpoint(tmp_path / path, (), {}, args={"architectures": kinds})
    assert grid_config(toy_lumina.language(), checkpoint, size).grid == grid
