"""The family's word pieces and their vectors."""

import importlib.util
import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from experiments.emoji import data, minilm, text_table

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(minilm.PACKAGE) is None,
    reason=f"{minilm.PACKAGE} is not installed (make train-deps)",
)


TOY_TEXT = "hearts red – ø ½"


def toy_spec() -> dict:
    pieces = "[PAD] [unused0] [UNK] [CLS] [ ] ω heart ##s red ##ος – ø".split()
    return {
        "version": "1.0",
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
        },
    }


@pytest.fixture
def toy() -> tuple[np.ndarray, np.ndarray, dict]:
    """13 embeddings [13, 6], and the table [9, 6] and tokenizer built from them."""
    embeddings = np.random.default_rng(0).normal(size=(13, 6)).astype(np.float32)
    return embeddings, *text_table.build(embeddings, toy_spec(), [TOY_TEXT], {}, width=6)


def test_tokenizer_keeps_latin_pieces_with_dense_ids(toy):
    tokenizer = Tokenizer.from_str(json.dumps(toy[2]))
    assert tokenizer.get_vocab_size() == len(toy[1]) == 9
    encoded = tokenizer.encode("Red hearts – réd ω ø")
    assert encoded.tokens == "red heart ##s – red [UNK] ø".split()
    assert encoded.ids == [6, 4, 5, 7, 6, 1, 8]
    assert 0 not in tokenizer.encode("[PAD] [CLS]").ids


def test_table_turns_and_scales_the_embeddings(toy):
    embeddings, table, _ = toy
    assert table.dtype == np.float16 and not table[:2].any()
    got, want = table[2:].astype(np.float32), embeddings[[4, 5, 7, 8, 9, 11, 12]]
    np.testing.assert_allclose(got.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(np.square(got).mean(), 1, atol=1e-3)
    spread = np.square(got).mean(0)
    assert (np.diff(spread) < 0).all()  # components in order

    def distances(x):
        return np.linalg.norm(x[:, None] - x[None], axis=-1)

    ratio = distances(got)[0, 1:] / distances(want)[0, 1:]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-2)


@pytest.fixture(scope="module")
def real():
    folder = minilm.package_folder()
    spec = json.loads((folder / "tokenizer.json").read_text())
    return *text_table.build_family(), spec


@needs_minilm
def test_same_table_twice(real, tmp_path):
    table, spec, old = real
    again, _ = text_table.build_family()
    np.testing.assert_array_equal(table, again)
    assert table.shape == (27943, 64) and np.isfinite(table).all()
    for folder in (tmp_path / "a", tmp_path / "b"):
        text_table.write(folder, table, spec)
    for name in ("text.safetensors", "tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (
            tmp_path / "b" / name
        ).read_bytes()


@needs_minilm
def test_captions_are_split_as_by_minilm(real):
    _, spec, old = real
    rows = data.metadata()
    texts = sorted({r["label"] for r in rows} | {r["tags"] for r in rows})
    texts += ["Glossy emoji of a red heart", "CRÈME brûlée’s 3 ½ cups – “hot”"]
    a, b = (Tokenizer.from_str(json.dumps(s)) for s in (spec, old))
    b.no_padding()
    b.no_truncation()
    got = [e.tokens for e in a.encode_batch(texts)]
    want = [e.tokens for e in b.encode_batch(texts, add_special_tokens=False)]
    assert got == want


@needs_minilm
@pytest.mark.parametrize(
    "word, neighbours",
    [
        ("heart", {"hearts", "cardiac"}),
        ("red", {"blue", "reddish"}),
        ("king", {"queen", "monarch"}),
        ("lime", {"lemon", "citrus"}),
    ],
)
def test_near_vectors_are_near_words(real, word, neighbours):
    table, spec, _ = real
    vocab = spec["model"]["vocab"]
    pieces = {i: piece for piece, i in vocab.items()}
    x = table.astype(np.float32)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-6)
    nearest = np.argsort(-x @ x[vocab[word]])[1:30]
    assert neighbours <= {pieces[i] for i in nearest}
