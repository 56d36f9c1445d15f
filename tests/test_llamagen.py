"""LlamaGen, assembled by the command: of classes and of captions."""

import json
import re
import warnings

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import jaxspec
from jaxspec.checkpoints import T5, convert, t5_config
from jaxspec.methods import AR, EAGLE2
from jaxspec.models.t5 import T5Encoder
from jaxspec.models.vq import VQ
from jaxspec.reading.captions import clean_caption
from jaxspec.reading.llamagen import ClassReader, imagenet_names
from tests.converting import DECODER, manifest, run, source, told
from tests.fixtures import synthetic
from tests.parity import published
from tests.toy import compilations

pytestmark = pytest.mark.optimised

C2I, T2I = (
    published("llamagen_c2i_tiny").expected,
    published("llamagen_t2i_tiny").expected,
)
GREEDY = dict(temperature=0, guidance=7.5)


DRAFTER = "lantern_drafter_llamagen_t2i_tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llamagen")


@pytest.fixture(scope="module")
def vq(folder):
    """The recorded tokenizer has 256 codes, the transformers draw from 96."""
    key = "quantize.embedding.weight"
    codes = synthetic.tensor(key, (96, 8), manifest("llamagen_vq16_tiny")["seed"])
    return source(folder / "vq", "llamagen_vq16_tiny", **{key: codes})


def converted(out, name: str, vq, **options):
    gpt = source(out.parent / name, name)
    options = [word for k, x in options.items() for word in (f"--{k}", x)]
    arguments = ["--gpt", gpt, "--vq", vq, *told(DECODER), *options, "--out", out]
    said = run("convert", "llamagen", *arguments)
    assert said.exit_code == 0, said.output
    return jaxspec.load(out)


@pytest.fixture(scope="module")
def classes(folder, vq):
    return converted(folder / "c2i", "llamagen_c2i_tiny", vq)


@pytest.fixture(scope="module")
def features(folder, vq):
    """Of captions, without a text encoder."""
    return converted(folder / "t2i", "llamagen_t2i_tiny", vq)


# Classes.


def test_recorded_tokens_of_classes(classes):
    labels = C2I["cond"].tolist()
    out = jaxspec.generate(classes, labels, **GREEDY)
    shape = out.tokens.shape
    np.testing.assert_array_equal(out.tokens, C2I["greedy_cfg7p5"].reshape(shape))
    assert out.prompts == ["4", "0"] and out.settings["family"] == "LlamaGen c2i"
    # To bytes as LlamaGen's evaluation does it.
    vq = VQ(classes.config.vq)
    pixels = jax.jit(lambda p, x: vq.apply(p, x, method="decode"))
    want = np.clip(127.5 * pixels(classes.params["vq"], out.tokens) + 128, 0, 255)
    difference = out.images.astype(int) - want.astype(np.uint8)
    assert np.abs(difference).max() <= 1 and (difference != 0).mean() < 0.01


def test_labels_in_every_form_and_alone(classes):
    want = C2I["greedy_cfg1"].reshape(2, 4, 4)
    settings = GREEDY | {"guidance": 1}
    out = jaxspec.generate(classes, np.int32([4, 0]), **settings)
    np.testing.assert_array_equal(out.tokens, want)
    for label in (4, "4", np.int64(4), [" 4"]):
        ids = classes.read(label)[1]
        assert ids.tolist() == [4]
    drawn = jaxspec.generate(classes, [0, 4], seed=3, guidance=1, top_k=0)
    again = jaxspec.generate(classes, ["4", 1], seed=3, guidance=1, top_k=0)
    np.testing.assert_array_equal(drawn.tokens[1], again.tokens[0])
    assert not np.array_equal(drawn.tokens[0], again.tokens[1])


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (10, "class labels are 0 to 9, not 10"),
        (-1, "class labels are 0 to 9, not -1"),
        (True, "must be a whole number, not True"),
        (4.0, "must be a whole number, not 4.0"),
        ("cat", "must be a whole number, not 'cat'"),
    ],
)
def test_labels_that_are_none(classes, label, said):
    with compilations() as compiled, pytest.raises(ValueError, match=f"^[^\n]*{said}"):
        jaxspec.generate(classes, [1, label])
    assert compiled == []


def test_imagenet_s_names():
    names, reader = imagenet_names(), ClassReader(1000)
    assert len(set(names)) == len(names) == 1000
    asked = reader.read(["golden retriever", "Tench ", 388, "999"])
    assert asked.values["labels"].tolist() == asked.ids.tolist() == [207, 0, 388, 999]
    assert names[388] == "giant panda" and names[999] == "toilet tissue"
    with pytest.raises(ValueError, match="no class of ImageNet: .* golden retriever"):
        reader.label("retriever")


def test_defaults_are_the_published_or_all_codes(classes, features):
    want = dict(size=64, guidance=4.0, temperature=1.0, top_k=96, top_p=1.0)
    assert classes.describe()["defaults"] == want
    assert features.describe()["defaults"] == want | {"guidance": 7.5}


# Captions.


def own_features() -> list[np.ndarray]:
    """The recorded features without their padding."""
    seen = T2I["cond_mask"] > 0
    assert not seen.all()
    return [x[s] for x, s in zip(T2I["cond"], seen, strict=True)]


@pytest.mark.parametrize("guidance", [1, 7.5])
def test_recorded_tokens_of_captions(features, guidance):
    """With the mask of what is padded, which the null caption has too."""
    settings = dict(temperature=0, guidance=guidance)
    out = jaxspec.generate(features, features=own_features(), **settings)
    want = T2I[f"greedy_cfg{str(guidance).replace('.', 'p')}"]
    np.testing.assert_array_equal(out.tokens, want.reshape(out.tokens.shape))
    assert out.settings["clean"] is True


def tokenizer() -> str:
    words = ["<pad>", "</s>", "<unk>", *"a cat red hat in the x y".split()]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return made.to_str()


@pytest.fixture(scope="module")
def t5(folder):
    """The tiny encoder, its states as wide as the transformer takes them."""
    wide = lambda shape: tuple(24 if n == 40 else n for n in shape)
    tensors = {
        key: synthetic.tensor(key, wide(x["shape"]), 13)
        for key, x in manifest("t5_tiny")["tensors"].items()
    }
    path = source(folder / "t5", "t5_tiny", {"d_model": 24}, **tensors)
    (path / "tokenizer.json").write_text(tokenizer())
    return path, tensors


@pytest.fixture(scope="module")
def captions(folder, vq, t5):
    out = folder / "spoken"
    out.mkdir()
    return converted(out / "t2i", "llamagen_t2i_tiny", vq, t5=t5[0])


def test_captions_stand_at_the_prefix_s_end(captions, t5):
    """Their states are those of each alone, unpadded."""
    shown = captions.condition(["A red cat", "hat"])
    config = t5_config(manifest("t5_tiny")["args"] | {"d_model": 24})
    params = convert(t5[1], config, T5)
    for row, ids in enumerate([[3, 5, 4, 1], [6, 1]]):
        alone = T5Encoder(config).apply(
            params, np.int32([ids]), np.ones((1, len(ids)), bool)
        )
        vectors, n = np.asarray(shown.vectors[row]), len(ids)
        np.testing.assert_allclose(vectors[-n:], alone[0], rtol=0, atol=1e-4)
        assert not vectors[:-n].any()
        assert (
            np.asarray(shown.visible[row]).tolist() == [False] * (120 - n) + [True] * n
        )


def test_pictures_of_captions(captions):
    pair = jaxspec.generate(captions, ["a red cat", "the hat in a hat"], **GREEDY)
    swap = jaxspec.generate(captions, ["the hat in a hat", "A RED cat"], **GREEDY)
    np.testing.assert_array_equal(pair.images, swap.images[::-1])
    assert not np.array_equal(*pair.tokens)
    stages = {"prompts", "captions", "decode", "pictures"}
    assert pair.seconds.keys() == stages and json.loads(pair.to_json())
    # The encoder's own states lead to the same pictures.
    shown = captions.condition(["a red cat", "the hat in a hat"])
    states = [
        np.asarray(x)[s] for x, s in zip(shown.vectors, shown.visible, strict=True)
    ]
    given = jaxspec.generate(captions, features=states, **GREEDY)
    np.testing.assert_array_equal(given.tokens, pair.tokens)


def test_long_captions_are_cut_with_counts(captions):
    reader = captions.config.text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader.words("x " * 119) == [9] * 119 + [1]
    with pytest.warns(UserWarning, match="has 131 tokens; the first 119 and its end"):
        assert reader.words("x " * 100 + "y " * 30) == [9] * 100 + [10] * 19 + [1]


def test_what_cleaning_drops_is_said(captions):
    with pytest.warns(UserWarning, match="cleaning dropped '4x4' from 'a 4x4 cat'"):
        assert captions.config.text.words("a 4x4 cat") == [3, 4, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader = captions.reading(clean=False).config.text
        assert reader.words(" A 4x4 cat") == [3, 2, 4, 1]
    with (
        pytest.warns(UserWarning, match="dropped '猫'"),
        pytest.raises(ValueError, match="nothing of the caption '猫' is left"),
    ):
        captions.ask("猫")


@pytest.mark.parametrize(
    ("caption", "text", "dropped"),
    [
        ("A Cat  in the hat.", "a cat in the hat.", []),
        (
            "“Cats”, says a ‘well-known’ dog—twice",
            "\"cats\", says a 'well-known' dog-twice",
            [],
        ),
        ("a this-is-my-old-cat", "a this is my old cat", []),
        (
            "see https://a.com/b.png?x=1 now",
            "see now",
            ["https", "a", "com", "b", "png", "x", "1"],
        ),
        ("cat @bob (red) #12", "cat red", ["bob", "12"]),
        ("<b>cat</b> &amp; hat", "cat hat", ["b"]),
        (
            "IMG_1.jpg of r2d2, free shipping",
            "of",
            ["img_1", "jpg", "r2d2", "free", "shipping"],
        ),
    ],
)
def test_cleaning_by_hand(caption, text, dropped):
    assert clean_caption(caption) == (text, dropped)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompts": "a cat"}, "no text encoder to read captions: .* --t5"),
        ({"features": []}, "there are no features"),
        ({"features": [np.zeros((121, 24))]}, r"must be \[1 to 120, 24\], not"),
        ({"features": [np.zeros((3, 25))]}, r"not \[3, 25\] as those of caption 0"),
        ({"features": [np.full((3, 24), np.inf)]}, "of caption 0 are not finite"),
        ({"semantic_tokens": [1]}, "does not start from semantic_tokens, but from"),
    ],
)
def test_what_cannot_be_drawn_is_refused(features, given, said):
    line = f"^[^\n]*{said}[^\n]*$"
    with compilations() as compiled, pytest.raises(ValueError, match=line):
        jaxspec.generate(features, **given)
    assert compiled == []


def test_a_drafter_is_converted_with_its_target(folder, vq, tmp_path):
    """EAGLE-2 is exact: with the drafter that the command took, AR's tokens."""
    eagle = source(tmp_path / "eagle", DRAFTER)
    family = converted(tmp_path / "ours", "llamagen_t2i_tiny", vq, drafter=eagle)
    assert (tmp_path / "ours" / "drafters-64.safetensors").is_file()
    captions = [np.ones((3, 24), np.float32)]
    method = EAGLE2(depth=2, top_k=2, total=4)
    out, want = (
        jaxspec.generate(family, features=captions, method=x) for x in (method, AR())
    )
    np.testing.assert_array_equal(out.tokens, want.tokens)
    assert (out.stats.draft_passes > 0).all()


def test_models_that_do_not_belong_together(folder, vq, tmp_path):
    c2i = source(tmp_path / "c2i", "llamagen_c2i_tiny")
    t2i = source(tmp_path / "t2i", "llamagen_t2i_tiny")
    t5 = source(tmp_path / "t5", "t5_tiny")
    eagle = source(tmp_path / "eagle", DRAFTER)
    few = {"embed_tokens.weight": np.zeros((64, 64), np.float32)}
    narrow = source(tmp_path / "narrow", DRAFTER, **few)
    codes = source(tmp_path / "vq256", "llamagen_vq16_tiny")
    for gpts, more, said in [
        ([c2i], ["--vq", codes], "draws from 96 codes, and vq256 has 256"),
        ([c2i], ["--vq", vq, "--t5", t5], "c2i takes no captions"),
        ([t2i], ["--vq", vq, "--t5", t5], "takes captions 24 wide, and t5 gives 40"),
        ([c2i, t2i], ["--vq", vq], "size is for one file"),
        ([c2i], ["--vq", vq, "--drafter", eagle], "eagle is no drafter of c2i: the"),
        ([t2i], ["--vq", vq, "--drafter", narrow], "its vocab_size is 64, and this"),
        ([t2i], ["--vq", vq, "--drafter", t2i], "t2i holds LlamaGen t2i, not LANTERN"),
        ([t2i], ["--vq", vq, *["--drafter", eagle] * 2], "2 drafters for 1 models"),
        ([vq], ["--vq", vq], "size and heads are a decoder's"),
    ]:
        words = [word for x in gpts for word in ("--gpt", x)]
        out = run(
            "convert",
            "llamagen",
            *words,
            *more,
            *told(DECODER),
            "--out",
            tmp_path / "o",
        )
        assert out.exit_code == 2 and re.search(re.escape(said), out.stderr), out.output
        assert not (tmp_path / "o").exists()
