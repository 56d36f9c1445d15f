"""Lumina-mGPT and Anole: prompts, sizes, guidance, and pictures by every method."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import jaxspec
from jaxspec.decoding import DRAWN
from jaxspec.methods import AR, SJD, ZipAR
from jaxspec.reading.lumina import AnoleReader, LuminaReader, codes_of, trained_sizes
from jaxspec.sampling import Sampling
from jaxspec.sizes import checked_size
from jaxspec.testing import keys_of
from tests import toy, toy_lumina
from tests.converting import run
from tests.lumina_files import language_model, tokenizer_files

PROMPT = "a red heart"


def tokens_of(text: str) -> list[int]:
    return toy_lumina.family().config.text.tokenizer.encode(text).ids


def shown(family, prompt=PROMPT, **options):
    family = family.reading(**options)
    return family.condition(prompt)


# Prompts.


def test_a_prompt_by_hand():
    """`<s>` request `<reserved08706>` picture start, height, width; padded left."""
    condition = shown(toy_lumina.family())
    assert list(condition) == ["64", "128"]
    words = tokens_of(
        "Generate an image of 128x128 according to the following prompt:\na red heart"
    )
    want = [0, *words, 8710, 8197, 8808, 8808]
    assert len(want) == len(words) + 5
    got = condition["128"]
    slots = got.vectors.shape[1]
    assert slots % 32 == 0 and slots - len(want) < 32
    np.testing.assert_array_equal(got.vectors[0, slots - len(want) :], want)
    np.testing.assert_array_equal(got.vectors[0, : slots - len(want)], 1)
    np.testing.assert_array_equal(got.visible[0], np.arange(slots) >= slots - len(want))


def test_a_size_is_height_then_width_in_tokens_and_width_then_height_in_words():
    condition = shown(toy_lumina.family().sized((32, 96)))
    row = condition["32x96"].vectors[0]
    np.testing.assert_array_equal(row[-4:], [8710, 8197, 8805, 8807])
    words = tokens_of("Generate an image of 96x32 according")
    np.testing.assert_array_equal(row[row.tolist().index(0) + 1 :][: len(words)], words)


def test_anole_is_asked_without_a_size():
    got = shown(toy_lumina.anole())["64"]
    want = [0, *tokens_of(PROMPT), 8710, 8197]
    np.testing.assert_array_equal(got.vectors[0, -len(want) :], want)


def test_trained_sizes_by_hand():
    sizes = trained_sizes(64)  # 4 patches of 32 px, at most 4 to 1
    want = [(32, 128), (32, 96), (32, 64), (64, 64), (64, 32), (96, 32), (128, 32)]
    assert sizes == want
    assert (768, 768) in trained_sizes(768) and (576, 1024) in trained_sizes(768)
    assert not set(trained_sizes(512)) & set(trained_sizes(768))


CONTEXTS = {  # name -> tokens of the unconditional context
    "picture": lambda n, end: end,
    "turn": lambda n, end: [8710, *end],
    "pads": lambda n, end: [0, *[1] * (n - 1), *end],
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_guidance_compares_with(name):
    """Each published code's own context: its logits are those of it alone, unpadded."""
    family = toy_lumina.family().reading(unconditional=name)
    condition = family.condition(PROMPT)
    own = condition["64"]
    seen = own.null.vectors[own.null.visible].tolist()
    n = int(own.visible.sum()) - 3
    end = [8197, 8806, 8806]
    assert seen == CONTEXTS[name](n, end)

    settings = Sampling.create(8192, guidance=0.0)
    got, cache = family.target(condition, settings, 64).prefill()
    alone = replace(
        own, vectors=np.array([seen]), visible=np.ones((1, len(seen)), bool)
    )
    alone = replace(alone, null=None)
    plain = family.target({"64": alone}, Sampling.create(8192), 64)
    want, other = plain.prefill()
    np.testing.assert_allclose(got, want, atol=1e-5)
    # And so behind the first token, at positions that go on from there.
    args = jnp.array([[7]]), jnp.array([[0]]), jnp.ones((1, 1), bool)
    visible = (jnp.arange(20) == 0)[None, None]
    got, _ = family.target(condition, settings, 64).follow(cache, *args, visible)
    want, _ = plain.follow(other, *args, visible)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda f: f.read("a <racm3:break> b"),
            "the prompt 'a <racm3:break> b' has <racm3:break> .token 8197., which is",
        ),
        (lambda f: f.read("<reserved08799>"), "leave it out"),
        (lambda f: f.reading(unconditional="none"), "must be picture or turn or pads"),
        (lambda f: f.sized((64, 96)), "draws no 64x96 .* on: 32x96, 64x64"),
        (lambda f: f.sized(96), "no model for 96 px; trained sizes: 64, 128"),
        (
            lambda f: f.sized((64, 64, 3)),
            r"pixels, or \(height, width\), not \(64, 64, 3\)",
        ),
        (lambda f: codes_of([4, 8196]), "image tokens are 4 to 8195"),
        (lambda f: codes_of([0, 17]), "are they codes of the tokenizer already"),
        (
            lambda f: jaxspec.decode_tokens(f, np.full((1, 4, 4), 8195)),
            "codes 0 to 8191",
        ),
        (lambda f: toy_lumina.anole().sized((64, 128)), "no model for 64x128 px"),
    ],
)
def test_what_cannot_be_read_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call(toy_lumina.family())


def test_codes_and_tokens_are_one_to_one():
    np.testing.assert_array_equal(codes_of([4, 5, 8195]), [0, 1, 8191])


def test_a_vocabulary_with_other_numbers_is_refused():
    spec = json.loads(toy_lumina.vocabulary())
    LuminaReader(json.dumps(spec), (64,)).check_vocabulary()
    vocab = spec["model"]["vocab"]
    # Code 10 is spelled BA: sorted by name, codes would not be in order of number.
    assert (vocab["IMGIMGBAZ"], vocab["IMGIMGJZ"]) == (14, 13)
    vocab["IMGIMGBAZ"], vocab["IMGIMGJZ"] = 13, 14
    with pytest.raises(ValueError, match="has IMGIMGJZ as 14, and Chameleon as 13"):
        AnoleReader(json.dumps(spec)).check_vocabulary()


# Pictures.


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Files as published, of 64 and of 128 px, through `jaxspec convert lumina`."""
    folder = tmp_path_factory.mktemp("lumina")
    shared = tokenizer_files(folder / "tokenizer")
    options = [word for pair in shared.items() for word in pair]
    for size in (64, 128):
        model = language_model(folder / f"Lumina-mGPT-7B-{size}", seed=size)
        options += ["--model", model]
    said = run("convert", "lumina", *options, "--out", folder / "out")
    assert said.exit_code == 0, said.output
    return folder / "out"


METHODS = [  # as words of the command line, and passes where they are known
    (["ar"], 64),
    (["zipar", "--window", 3], 8 + 7 * 3),
    (["sjd", "--window", 8], None),
    (["scd", "--window", 8], None),
    (["gsd", "--window", 8, "--knob", "table=embedding"], None),
    (["mulo", "--window", 3, "--knob", "threshold=0.0001", "--knob", "radius=1"], None),
]


@pytest.mark.parametrize(("method", "passes"), METHODS, ids=lambda m: str(m))
def test_every_method_draws_a_picture_and_its_counts_add_up(
    converted, method, passes, tmp_path
):
    picture = tmp_path / "heart.png"
    words = ["--family", converted, "--method", *method, "--out", picture, "--stats"]
    said = run("generate", PROMPT, *words)
    assert said.exit_code == 0, said.output
    with Image.open(picture) as image:
        assert image.size == (128, 128)
        assert json.loads(image.text["settings"])["guidance"] == 3
    lines = (line.split(": ") for line in said.stdout.splitlines() if ": " in line)
    counts = {name: float(value) for name, value in lines}
    origins = ("drawn", "accepted", "resampled", "bonus")
    assert sum(counts[name] for name in origins) == counts["cells"] == 64
    assert counts["published_tokens"] == 3 + 8 * 9 + 2
    assert passes in (None, counts["passes_per_image"])


def test_another_aspect_ratio_and_anole():
    wide = jaxspec.generate(
        toy_lumina.family(), PROMPT, size=(32, 128), method=ZipAR(2)
    )
    assert set(wide.stats.origin.ravel().tolist()) == {DRAWN}  # no newline is left
    assert wide.images.shape == (1, 32, 128, 3) and wide.settings["size"] == "32x128"
    assert checked_size("32x128") == (32, 128)
    square = jaxspec.generate(toy_lumina.anole(), PROMPT, method=SJD(4))
    assert square.tokens.shape == (1, 4, 4)


def test_greedy_tokens_are_those_of_teacher_forcing_whatever_is_beside_them():
    """With guidance, each row has its own context; a long prompt lengthens both."""
    family, settings = (
        toy_lumina.family(),
        Sampling.create(8192, temperature=0, guidance=3),
    )
    short = family.target(family.condition(PROMPT), settings, 64)
    both = family.target(family.condition([PROMPT, PROMPT * 9]), settings, 64)
    assert both.prefix_visible.shape[1] > short.prefix_visible.shape[1]
    alone = toy.decode_jitted(AR(), short, keys_of(1))
    pair = toy.decode_jitted(AR(), both, keys_of(2))
    np.testing.assert_array_equal(alone.tokens[0], pair.tokens[0])

    tokens = alone.tokens.reshape(1, 20)
    branches = (short.condition, short.prefix_visible), short.null
    own, null = (
        short.model.apply(short.params, condition, tokens, visible)[..., :8192]
        for condition, visible in branches
    )
    best = np.argmax(null + 3.0 * (own - null), axis=-1).reshape(4, 5)
    np.testing.assert_array_equal(alone.tokens[0, :, :4], best[:, :4])
    assert len(np.unique(best)) > 4 and (alone.tokens[0, :, 4] == 8192).all()
