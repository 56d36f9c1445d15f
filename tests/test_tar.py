"""Tar, assembled by the command: from recorded indices to pixels, and from a prompt."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import jaxspec
from jaxspec.methods import EAGLE2, LANTERN, LPD, SCD, FlashAR, MuLo
from jaxspec.reading import Asked
from jaxspec.reading.tar import TarReader
from jaxspec.upsampling import Nearest
from tests.converting import left_behind, manifest, run, source
from tests.fixtures import synthetic
from tests.parity import E2E, published
from tests.toy import compilations

EXPECTED = published(f"{E2E}_tatok").expected
INDICES = EXPECTED["ta_indices"]
GREEDY = dict(temperature=0, guidance=float(EXPECTED["cfg_scale"]))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<im_start>"]
SPECIAL += [f"<S{i}>" for i in range(3)] + [f"<I{i}>" for i in range(128)]


def mulo(threshold: float) -> MuLo:
    return MuLo(upsampler=Nearest(), neighbours=1, threshold=threshold, window=8)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Options of the command, for the recorded models."""
    folder = tmp_path_factory.mktemp("tar")
    part = lambda name: source(folder / name, f"{E2E}_{name}")
    return {
        "--ta-tok": part("tatok"),
        "--vq": part("vq"),
        "--ar-dtok": [part("ardtok64px"), part("ardtok128px")],
    }


def convert(options: dict, out, **changed):
    """Runs the command."""
    words = []
    for name, value in (options | changed).items():
        for x in value if isinstance(value, list) else [value]:
            words += [name, x]
    return run("convert", "tar", *words, "--out", out)


@pytest.fixture(scope="module")
def tar(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "tar"
    said = convert(sources, out)
    assert said.exit_code == 0, said.output
    assert "Tar AR-DTok" in said.stdout and "decoders/128" in said.stdout
    return jaxspec.load(out)


# From recorded indices.


@pytest.mark.parametrize("size", [64, 128])
def test_recorded_tokens_and_pixels(tar, size):
    out = jaxspec.generate(tar, semantic_tokens=INDICES, size=size, **GREEDY)
    want = EXPECTED[f"tokens_{size}px"].reshape(out.tokens.shape)
    np.testing.assert_array_equal(out.tokens, want)
    difference = out.images.astype(int) - EXPECTED[f"image_{size}px"]
    assert np.abs(difference).max() <= 1
    assert (difference != 0).mean() < 0.01
    np.testing.assert_array_equal(out.stages["semantic_tokens"], INDICES)
    assert out.prompts == ["semantic tokens 0", "semantic tokens 1"]
    assert out.seconds.keys() == {"prompts", "features", "decode", "pictures"}
    assert json.loads(out.to_json())["settings"]["scale"] == 0


def test_every_stage_can_be_given(tar):
    features = tar.condition(semantic_tokens=INDICES)
    np.testing.assert_allclose(features, EXPECTED["features"], rtol=0, atol=1e-4)
    got = jaxspec.generate(tar, features=features, size=64, **GREEDY)
    want = EXPECTED["tokens_64px"].reshape(got.tokens.shape)
    np.testing.assert_array_equal(got.tokens, want)
    np.testing.assert_array_equal(jaxspec.decode_tokens(tar, want), got.images)


def test_mulo_drafts_with_the_smaller_model_on_the_same_features(tar):
    """Where it keeps nothing and its window is a row, MuLo is AR with a drafter."""
    method = mulo(threshold=2.0)
    out = jaxspec.generate(tar, semantic_tokens=INDICES, method=method, **GREEDY)
    assert out.settings["size"] == 128
    want = EXPECTED["tokens_128px"].reshape(out.tokens.shape)
    np.testing.assert_array_equal(out.tokens, want)
    assert (out.stats.draft_passes > 0).all()


def test_settings_are_the_published(tar):
    about = tar.describe()
    want = dict(size=128, guidance=4.0, temperature=1.0, top_k=0, top_p=1.0)
    assert about["defaults"] == want
    assert about["options"] == {
        "scale": 0,
        "only_images": False,
        "language_temperature": 1.0,
        "language_top_k": 1200,
        "language_top_p": 0.95,
    }
    assert about["starts_from"] == ["semantic_tokens", "features"]
    assert about["semantic_tokens"] == [36, 9, 4]  # 6 by 6, pooled by 1, 2 and 3


def test_fewer_semantic_tokens_bring_the_picture_nearer(tar):
    """Its first cell comes behind nine features; what follows keeps that order."""
    features = tar.condition(semantic_tokens=INDICES[:, :9])
    assert features.shape == (2, 9, 48)
    target = tar.target(features, jaxspec.Sampling(), 64)
    assert target.model.config.prefix_length == 9
    whole = tar.params["decoders"]["64"]["params"]["position_embedding"]
    kept = target.params["params"]["position_embedding"]
    np.testing.assert_array_equal(kept, whole[: 9 + 16 - 1])
    with pytest.raises(ValueError, match="has 37 vectors; the model takes 36"):
        tar.target(jnp.zeros((1, 37, 48)), jaxspec.Sampling(), 64)


# From a prompt.


def tokenizer(special: list[str]) -> str:
    """Letters, and Tar's special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    return made.to_str()


def language_model(folder, special=SPECIAL, settings=None, vocabulary=400):
    """A Qwen2 with Tar's vocabulary, as a folder of transformers."""
    seed = manifest("qwen2_tiny")["seed"]
    names = ("model.embed_tokens.weight", "lm_head.weight")
    wide = {name: synthetic.tensor(name, (vocabulary, 48), seed) for name in names}
    args = {"vocab_size": vocabulary, "max_position_embeddings": 256}
    source(folder, "qwen2_tiny", args, **wide)
    (folder / "tokenizer.json").write_text(tokenizer(special))
    settings = {"eos_token_id": [258, 256], **(settings or {})}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def spoken(sources, tmp_path_factory):
    """A folder of Tar with a language model of random weights."""
    folder = tmp_path_factory.mktemp("speaking")
    llm = language_model(folder / "llm", settings={"repetition_penalty": 1.1})
    said = convert(sources, folder / "tar", **{"--llm": llm})
    assert said.exit_code == 0, said.output
    return folder / "tar"


@pytest.fixture(scope="module")
def speaking(spoken):
    return jaxspec.load(spoken)


def test_prompts_are_put_as_published(speaking):
    reader = speaking.reading(scale=2).config.text
    text = reader.tokenizer.decode(reader.words("a {cat}"), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\na {cat}<|im_end|>\n<|im_start|>assistant\n<im_start><S2>"
    )
    assert reader.words("x")[-2:] == [259, 262]
    assert reader.first == 263
    assert (reader.writer.ends, reader.writer.repetition_penalty) == ((258, 256), 1.1)


LONG = "a photo of a macaw on a branch above a lake, the sun behind it, in oil"


@pytest.fixture(scope="module")
def drawn(speaking):
    return draw(speaking, [LONG, "a cat"])


def draw(tar, prompts, **settings):
    """Semantic tokens are drawn by chance, codes are the likeliest."""
    settings = dict(size=64, seed=5, only_images=True) | GREEDY | settings
    return jaxspec.generate(tar, prompts, **settings)


def test_from_prompts_to_pictures(drawn):
    tokens = drawn.stages["semantic_tokens"]
    assert tokens.shape == (2, 36) and drawn.images.shape == (2, 64, 64, 3)
    assert 0 <= tokens.min() and tokens.max() < 128
    assert len(np.unique(drawn.tokens, axis=0)) == 2
    stages = {"prompts", "language", "features", "decode", "pictures"}
    assert drawn.seconds.keys() == stages
    assert drawn.settings["only_images"] is True


def test_the_command_draws_the_same(drawn, spoken, tmp_path):
    words = ["--family", spoken, "--size", 64, "--seed", 5, "--temperature", 0]
    words += ["--option", "only_images=true", "--option", "language_top_k=400"]
    out = run("generate", LONG, "a cat", *words, "--out", f"{tmp_path}/")
    assert out.exit_code == 0 and out.stderr == "", out.output
    with Image.open(tmp_path / "a-cat-seed5.png") as image:
        np.testing.assert_array_equal(np.asarray(image), drawn.images[1])
        assert json.loads(image.text["settings"]) == drawn.settings
    told = run("generate", "a", "--family", spoken, "--option", "scale=7")
    assert told.stderr == "error: scale must be 0, 1 or 2, not 7\n"


def test_a_row_depends_on_its_prompt_and_number_alone(drawn, speaking):
    alone = draw(speaking, "a cat", num_images=2)
    semantic = alone.stages["semantic_tokens"]
    np.testing.assert_array_equal(semantic[0], drawn.stages["semantic_tokens"][1])
    np.testing.assert_array_equal(alone.tokens[0], drawn.tokens[1])
    np.testing.assert_array_equal(alone.images[0], drawn.images[1])
    assert not np.array_equal(*semantic)  # each image has a text of its own


def test_mulo_runs_from_a_prompt(drawn, speaking):
    out = draw(speaking, [LONG, "a cat"], size=128, method=mulo(threshold=0.05))
    semantic = drawn.stages["semantic_tokens"]
    np.testing.assert_array_equal(out.stages["semantic_tokens"], semantic)
    assert out.images.shape == (2, 128, 128, 3)
    assert (out.stats.draft_passes > 0).all()


def test_what_does_not_fit_is_refused_before_the_language_model(speaking, monkeypatch):
    monkeypatch.setattr(TarReader, "show", lambda *_: pytest.fail("it ran"))
    others = np.arange(1, 256 * 4 + 1).reshape(256, 4) % 256
    for method, said in [
        (MuLo(), "Tar has no model to draft for 64 px"),
        (SCD(initial="upsampled"), "Tar has no model to draft for 64 px"),
        (EAGLE2(), "Tar has a drafter for no size, and none for 64 px"),
        (LANTERN(), "Tar has a drafter for no size, and none for 64 px"),
        (FlashAR(), "Tar has a FlashAR head for no size, and none for 64 px"),
        (LPD(), "Tar has a model for LPD for no size, and none for 64 px"),
    ]:
        with pytest.raises(ValueError, match=f"^{said}"):
            draw(speaking, "a cat", method=method)
    for method, said in [
        (MuLo(draft_method=EAGLE2()), "a drafter for no size, and none for 64 px"),
        (MuLo(upsampler="latents"), "no learned upsamplers"),
        (MuLo(neighbours=257), "neighbours must be 1 to 256"),
        (MuLo(neighbours=4, table=others), "must begin with the code itself"),
        (MuLo(neighbours=4, table=others + 256), "is it of another codebook"),
    ]:
        with pytest.raises(ValueError, match=said):
            draw(speaking, "a cat", size=128, method=method)


def test_short_texts_are_filled_and_named(speaking):
    """Of 400 tokens, 128 are of images: without a grammar, few come out."""
    asked = speaking.ask("a cat").take(np.array([0, 0]))
    keys = jaxspec.image_keys(0, asked.ids, [0, 0])
    line = r"^prompts \['a cat'\] got \[\d+\] of 36 image tokens; the rest is code 0$"
    with pytest.warns(UserWarning, match=line):
        tokens = speaking.show(asked, keys).stages["semantic_tokens"]
    assert tokens[:, 0].any() and not tokens[:, -1].any()


# What does not fit.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompts": "a cat"}, "no language model to read prompts: .* --llm"),
        ({}, "there is no prompt"),
        ({"semantic_tokens": INDICES[:, :35]}, r"must be \[n, 36 or 9 or 4\], not"),
        ({"semantic_tokens": INDICES + 128}, "TA-Tok has 0 to 127"),
        ({"semantic_tokens": INDICES / 2}, "must be integers, not float64"),
        ({"features": np.zeros((1, 36, 47))}, r"must be \[n, T, 48\], not"),
        ({"features": np.zeros((1, 35, 48))}, "36 or 9 or 4 features, not 35"),
        ({"features": np.full((1, 36, 48), np.nan)}, "features are not finite"),
        ({"semantic_tokens": INDICES, "features": INDICES}, "give one of"),
        ({"prompts": "a", "semantic_tokens": INDICES}, "not both"),
        ({"semantic_tokens": INDICES, "scale": 3}, "scale must be 0, 1 or 2, not 3"),
        ({"semantic_tokens": INDICES, "scale": True}, "0, 1 or 2, not True"),
        ({"semantic_tokens": INDICES, "clean": 1}, "no option 'clean'; its options: s"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tar, given, said):
    line = f"^[^\n]*{said}[^\n]*$"
    with compilations() as compiled, pytest.raises(ValueError, match=line):
        jaxspec.generate(tar, **given)
    assert compiled == []


def test_empty_prompts_are_refused(speaking):
    with pytest.raises(ValueError, match="the prompt is empty"):
        speaking.ask(["a cat", " "])
    with pytest.raises(ValueError, match="top_p must be between 0 and 1"):
        speaking.reading(language_top_p=2.0)


def test_prompts_beyond_the_context_are_warned_of_with_counts(speaking):
    """Made for 256 tokens: 36 are written, and 220 are left."""
    reader = speaking.config.text
    fits = "x" * (220 - len(reader.words("")))
    speaking.ask(["a cat", fits])
    with pytest.warns(UserWarning, match="is 221 tokens .*, and 36 are .* 256 in all"):
        speaking.ask(["a cat", fits + "x"])
    speaking.reading(scale=2).ask(fits + "x" * 32)  # 4 are written


def test_models_that_do_not_belong_together(sources, tmp_path):
    vq = source(tmp_path / "vq", "llamagen_vq16_tiny")
    small = synthetic.tensor("quantize.embedding.weight", (96, 8), 0)
    other = source(
        tmp_path / "vq96", "llamagen_vq16_tiny", **{"quantize.embedding.weight": small}
    )
    ardtok = sources["--ar-dtok"][0]
    sources = sources | {"--ar-dtok": ardtok}  # fewer files to open
    narrow = source(tmp_path / "narrow", "tar_ardtok_tiny")  # features 40 wide
    no_image = language_model(tmp_path / "a", SPECIAL[:-1])
    few = language_model(tmp_path / "b", vocabulary=380)
    silent = language_model(tmp_path / "c")
    (silent / "tokenizer.json").unlink()
    chatty = language_model(tmp_path / "d")
    (chatty / "tokenizer_config.json").write_text('{"chat_template": "[INST]"}')
    for changed, said in [
        ({"--vq": other}, "draws from 256 codes, and vq96 has 96"),
        ({"--vq": ardtok}, "ardtok64px holds Tar AR-DTok, not LlamaGen VQ"),
        ({"--ta-tok": vq}, "vq holds LlamaGen VQ, not Tar TA-Tok"),
        ({"--ar-dtok": [ardtok, ardtok]}, "both draw 64 px"),
        ({"--ar-dtok": narrow}, "takes features 40 wide, and tatok gives 48"),
        ({"--llm": no_image}, "the tokenizer has no <I127>: is it a Tar model's?"),
        ({"--llm": few}, "image tokens up to 390; the language model has tokens 0 to"),
        ({"--llm": silent}, "tokenizer.json is missing"),
        ({"--llm": chatty}, "another chat template than Qwen2's"),
    ]:
        out = convert(sources, tmp_path / "out" / "tar", **changed)
        assert out.exit_code == 2 and re.search(re.escape(said), out.stderr), out.output
        assert not (tmp_path / "out").exists() or left_behind(tmp_path / "out") == []


def test_rows_of_what_is_asked():
    asked = Asked(["a", "b"], np.uint32([7, 8]), {"x": np.array([[1], [2]])})
    taken = asked.take(np.array([1, 0, 1]))
    assert taken.names == ["b", "a", "b"] and taken.ids.tolist() == [8, 7, 8]
    assert taken.values["x"].tolist() == [[2], [1], [2]]
