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


def toy_build(width: int = 6) -> tuple[np.ndarray, np.ndarray, dict]:
    """Vectors [14, 6] of the toy's 13 pieces and a word, its table and tokenizer."""
    vectors = np.random.default_rng(0).normal(size=(14, 6)).astype(np.float32)
    captions = ["hearts red –", "ø heart blob ½"]  # all kept pieces but [ and ]
    built = text_table.build(
        vectors[:13], toy_spec(), captions, {"blob": vectors[13]}, width
    )
    return vectors, *built


def test_tokenizer_keeps_latin_pieces_with_dense_ids():
    _, table, spec = toy_build()
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    assert tokenizer.get_vocab_size() == len(table) == 10
    encoded = tokenizer.encode("Red hearts – réd ω ø blob")
    assert encoded.tokens == "red heart ##s – red [UNK] ø blob".split()
    assert encoded.ids == [6, 4, 5, 7, 6, 1, 8, 9]
    assert 0 not in tokenizer.encode("[PAD] [CLS]").ids


def test_table_turns_and_scales_the_vectors():
    vectors, table, _ = toy_build()
    assert table.dtype == np.float16 and not table[:2].any()
    rows, kept = table[2:].astype(np.float32), vectors[[4, 5, 7, 8, 9, 11, 12, 13]]
    np.testing.assert_allclose(np.square(rows).mean(), 1, atol=1e-3)

    def distances(x):
        return np.linalg.norm(x[:, None] - x[None], axis=-1)

    ratio = distances(rows)[0, 1:] / distances(kept)[0, 1:]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-2)


def test_components_are_those_of_the_pieces_in_captions():
    used = toy_build()[1][4:].astype(np.float32)
    np.testing.assert_allclose(used.mean(0), 0, atol=1e-3)
    spread = np.square(used).mean(0)
    assert (np.diff(spread) < 0).all()
    narrow = toy_build(width=2)[1][4:].astype(np.float32)
    ratio = narrow / used[:, :2]
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-2)


def test_same_files_twice(tmp_path):
    names = ("text.safetensors", "tokenizer.json")
    for folder in (tmp_path / "a", tmp_path / "b"):
        text_table.write(folder, *toy_build()[1:])
    first, second = (
        [(tmp_path / f / name).read_bytes() for name in names] for f in "ab"
    )
    assert first == second


@pytest.fixture(scope="module")
def real():
    spec = json.loads((minilm.package_folder() / "tokenizer.json").read_text())
    return *text_table.build_family(), spec


@needs_minilm
def test_table_of_the_family(real):
    table, _, _ = real
    assert table.shape == (27943, 64) and np.isfinite(table).all()
    assert np.square(table[2:].astype(np.float32)).mean() == pytest.approx(1, abs=1e-3)


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
