"""LlamaGen and Tar from real containers: torch's files, and folders of transformers."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

import jaxspec
from tests.converting import DECODER, manifest, run, told, weights
from tests.parity import E2E, published
from tests.test_llamagen import tokenizer as t5_tokenizer
from tests.test_tar import SPECIAL
from tests.test_tar import tokenizer as tar_tokenizer

# Qwen2's own, as far as a system and a user turn need it.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tensors(name: str) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(x) for key, x in weights(name).items()}


def as_tar(path, name: str):
    """As Tar saves its models."""
    content = {"name": name, "args": manifest(name)["args"], "sd": tensors(name)}
    torch.save({"model": content}, path)
    return path


def converted(family: str, out, *words):
    said = run("convert", family, *words, "--out", out)
    assert said.exit_code == 0, said.output
    return jaxspec.load(out)


@pytest.fixture(scope="module")
def tar_files(tmp_path_factory):
    """What the command is given, the language model left out."""
    folder = tmp_path_factory.mktemp("tar")
    torch.save({"model": tensors(f"{E2E}_vq")}, folder / "vq.pt")
    words = ["--ta-tok", as_tar(folder / "ta_tok.pth", f"{E2E}_tatok")]
    words += ["--vq", folder / "vq.pt"]
    for size in (64, 128):
        path = folder / f"ar_dtok_{size}.pth"
        words += ["--ar-dtok", as_tar(path, f"{E2E}_ardtok{size}px")]
    return words


def test_tar_from_its_own_containers(tar_files, tmp_path):
    tar = converted("tar", tmp_path / "tar", *tar_files)
    provenance = json.loads((tmp_path / "tar" / "provenance.json").read_text())
    assert provenance["parts"]["ta_tok"]["containers"] == ["model", "sd"]
    expected = published(f"{E2E}_tatok").expected
    for size in (64, 128):
        out = jaxspec.generate(
            tar, semantic_tokens=expected["ta_indices"], size=size, temperature=0
        )
        want = expected[f"tokens_{size}px"].reshape(out.tokens.shape)
        np.testing.assert_array_equal(out.tokens, want)
        difference = out.images.astype(int) - expected[f"image_{size}px"]
        assert np.abs(difference).max() <= 1


def test_tar_reads_prompts_as_transformers_does(tar_files, tmp_path):
    """The folder is written by transformers; greedy texts are its own."""
    spec = Tokenizer.from_str(tar_tokenizer(SPECIAL))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=spec, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    args = manifest("qwen2_tiny")["args"] | {"vocab_size": 400, "eos_token_id": 258}
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**args)).eval()
    model.model.embed_tokens.weight.data.normal_(std=0.5)
    model.lm_head.weight.data.normal_(std=48**-0.5)
    model.generation_config.repetition_penalty = 1.05
    model.save_pretrained(tmp_path / "llm")
    fast.save_pretrained(tmp_path / "llm")
    tar = converted("tar", tmp_path / "tar", *tar_files, "--llm", tmp_path / "llm")
    reader = tar.config.text
    assert reader.writer.repetition_penalty == 1.05 and reader.writer.ends == (258,)

    prompt = "A photo of a macaw, {really}"
    turns = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": prompt},
    ]
    text = fast.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = fast(text + "<im_start><S0>", return_tensors="pt").input_ids
    assert reader.words(prompt) == ids[0].tolist()

    with torch.inference_mode():
        wrote = model.generate(ids, max_new_tokens=36, do_sample=False)[0]
    wrote = wrote[ids.shape[1] :].numpy()
    found = wrote[(wrote >= 263) & (wrote < 263 + 128)] - 263
    assert len(found) > 3
    with pytest.warns(UserWarning, match=rf"got \[{len(found)}\] of 36 image tokens"):
        out = jaxspec.generate(
            tar, prompt, size=64, temperature=0, language_temperature=0
        )
    got = out.stages["semantic_tokens"][0]
    np.testing.assert_array_equal(got, np.pad(found, (0, 36 - len(found))))


@pytest.mark.parametrize("container", ["model", "module", "state_dict", None])
def test_llamagen_from_its_containers(container, tmp_path):
    vq = tensors("llamagen_vq16_tiny")
    vq["quantize.embedding.weight"] = vq["quantize.embedding.weight"][:96]
    torch.save({"model": vq}, tmp_path / "vq.pt")
    gpt = tensors("llamagen_c2i_tiny") | {"freqs_cis": torch.zeros(17, 8, 2)}
    gpt = gpt if container is None else {container: gpt}
    torch.save(gpt, tmp_path / "gpt.pt")
    words = ["--gpt", tmp_path / "gpt.pt", "--vq", tmp_path / "vq.pt", *told(DECODER)]
    params = converted("llamagen", tmp_path / "c2i", *words)
    expected = published("llamagen_c2i_tiny").expected
    labels = expected["cond"].tolist()
    out = jaxspec.generate(params, labels, temperature=0, guidance=7.5)
    want = expected["greedy_cfg7p5"].reshape(out.tokens.shape)
    np.testing.assert_array_equal(out.tokens, want)


def test_captions_as_transformers_encodes_them(tmp_path):
    """Padded to 120, encoded, and moved to the end, as the published script does."""
    args = manifest("t5_tiny")["args"] | {"d_model": 24, "dropout_rate": 0.0}
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(transformers.T5Config(**args)).eval()
    for x in model.parameters():
        x.data.normal_(std=1.0 if x.ndim == 1 else x.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "t5")
    spec = Tokenizer.from_str(t5_tokenizer())
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=spec, pad_token="<pad>", eos_token="</s>"
    )
    fast.save_pretrained(tmp_path / "t5")
    vq = tensors("llamagen_vq16_tiny")
    vq["quantize.embedding.weight"] = vq["quantize.embedding.weight"][:96]
    torch.save({"model": vq}, tmp_path / "vq.pt")
    torch.save({"model": tensors("llamagen_t2i_tiny")}, tmp_path / "gpt.pt")
    words = ["--gpt", tmp_path / "gpt.pt", "--vq", tmp_path / "vq.pt", *told(DECODER)]
    params = converted("llamagen", tmp_path / "t2i", *words, "--t5", tmp_path / "t5")

    captions = ["a red cat in the hat", "x y", "x " * 130]
    tokens = fast(
        captions,
        max_length=120,
        padding="max_length",
        truncation=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        states = model(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
    with pytest.warns(UserWarning, match="has 131 tokens"):
        got = jax.tree.map(np.asarray, params.condition(captions))
    counts = tokens.attention_mask.sum(1).tolist()
    assert counts == [7, 3, 120]
    for i, n in enumerate(counts):
        moved = torch.cat([states[i, n:] * 0, states[i, :n]]).numpy()
        np.testing.assert_allclose(got.vectors[i], moved, rtol=0, atol=1e-4)
    flipped = torch.flip(tokens.attention_mask, dims=[-1]).numpy() > 0
    np.testing.assert_array_equal(got.visible, flipped)
