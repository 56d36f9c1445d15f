"""Prompts of the embedded family: forms that mean the same, and what is refused."""

import warnings

import numpy as np
import pytest

from jaxspec.text import PieceText
from tests import toy

TEXT = toy.text()
IDS = TEXT.tokenizer.get_vocab()


def pieces(*words: str) -> list[int]:
    ids = [IDS[w] for w in words]
    return ids + [0] * (TEXT.slots - len(ids))


@pytest.mark.parametrize(
    "prompt",
    [
        "red heart",
        "glossy red heart",
        "A glossy emoji of a red heart",
        "emoji of the red heart",
        "Red  HEART, glossy!\n",
        "'a red heart' emoji",
        "an emoji: red heart",
        "red heart emojis",
    ],
)
def test_the_same_picture_in_other_words(prompt):
    assert TEXT.canonical(prompt) == ("glossy", "red heart")
    got = TEXT.pieces(prompt)
    assert got.dtype == np.int32 and got.tolist() == pieces("glossy", "red", "heart")


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("flat red heart", ("flat", "red", "heart")),
        ("red heart, flat", ("flat", "red", "heart")),
        ("glossy flat hat", ("glossy", "hat")),  # the first style word is the style
        ("trees", ("glossy", "tree", "##s")),
        ("heart red", ("glossy", "heart", "red")),
    ],
)
def test_other_words_are_other_pictures(prompt, want):
    assert TEXT.pieces(prompt).tolist() == pieces(*want)


def test_accents_and_apostrophes_however_they_are_typed():
    """Captions have ’; é may be one character or two."""
    wide = PieceText(TEXT.spec, 6, toy.STYLES, "glossy")
    typed, printed = wide.pieces("woman's hat"), wide.pieces("woman’s hat")
    want = pieces("glossy", "woman", "’", "s", "hat", "[PAD]")
    assert typed.tolist() == printed.tolist() == want[:6]
    for cafe in ("cafe", "café", "cafe\u0301"):
        assert TEXT.pieces(cafe).tolist() == pieces("glossy", "cafe")


@pytest.mark.parametrize(
    "prompt", ["", " \t\n", "!?", "emoji of", "flat", "红色", "xyzzy"]
)
def test_prompts_that_say_nothing_are_refused(prompt):
    with pytest.raises(ValueError, match="^[^\n]*prompt[^\n]*$"):
        TEXT.pieces(prompt)


def test_unknown_words_are_ignored_with_a_warning():
    with pytest.warns(UserWarning, match=r"^1 unknown .* 'red xyzzy heart'"):
        got = TEXT.pieces("red xyzzy heart")
    assert got.tolist() == pieces("glossy", "red", "heart")


def test_long_prompts_are_cut_with_both_counts():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full = TEXT.pieces("red red heart")
    with pytest.warns(UserWarning, match="has 5 pieces; the first 3 are kept"):
        cut = TEXT.pieces("red red heart tree tree")
    assert full.tolist() == cut.tolist() == pieces("glossy", "red", "red", "heart")


def test_readers_are_equal_by_value_and_hashable():
    assert TEXT == toy.text() and hash(TEXT) == hash(toy.text())
    assert TEXT != PieceText(TEXT.spec, 4, toy.STYLES, "flat")
