"""Choosing among pictures: by any scores, by the family's matcher, and its training."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from experiments.emoji import augment, train_ar, train_matcher
from jaxspec.figures import labelled_grid
from jaxspec.models import abstract
from jaxspec.models.matcher import Matcher, MatcherConfig
from tests import toy

PROMPTS = ["red heart", "blue tree", "red heart"]  # the first and last read alike


@pytest.fixture(scope="module")
def family():
    plain = toy.family()
    (size,) = plain.config.sizes[-1:]
    network = MatcherConfig(
        plain.config.vq.code_width,
        plain.params["text"]["table"].shape[1],
        width=4,
        blocks=(1, 1),
        shared=3,
    )
    weights = {str(size): toy.randomly(abstract.matcher(network))}
    return replace(
        plain,
        params={**plain.params, "matchers": weights},
        config=replace(plain.config, matchers=((size, network),)),
    )


@pytest.fixture(scope="module")
def drawn(family):
    return jaxspec.generate(family, PROMPTS, num_images=4, seed=3)


def test_best_keeps_the_highest_scores_of_each_prompt_best_first(drawn):
    scores = [0.1, 0.9, 0.9, -1, 3, 2, 1, 0, -5, -4, -3, -2]
    two = drawn.best(scores, keep=2)
    rows = [1, 2, 4, 5, 11, 10]  # of equal scores the first
    assert two.numbers == [1, 2, 0, 1, 3, 2] and len(two) == 6
    assert two.prompts == [PROMPTS[i // 4] for i in rows]
    np.testing.assert_array_equal(two.images, drawn.images[rows])
    np.testing.assert_array_equal(two.stats.final_pass, drawn.stats.final_pass[rows])
    np.testing.assert_allclose(two.scores, np.array(scores)[rows], rtol=1e-6)
    listed = json.loads(two.to_json())["images"]
    assert [x["image"] for x in listed] == two.numbers and listed[2]["score"] == 3
    one_each = drawn.best(scores)
    assert one_each.num_images == 1 and one_each.numbers == [1, 0, 3]
    labels = [f"{two.prompts[k]} ({n})" for k, n in enumerate(two.numbers)]
    sheet = labelled_grid(list(two.images), labels, columns=2)  # a row a prompt
    np.testing.assert_array_equal(two.grid(), sheet)
    with pytest.raises(ValueError, match=r"one a picture, \[6\], not \[12\]"):
        two.best(scores)
    with pytest.raises(ValueError, match="score 2 is not finite"):
        drawn.best([0, 1, np.nan, *range(9)])
    with pytest.raises(ValueError, match="keep must be 1 to 4"):
        drawn.best(scores, keep=5)


def test_best_of_draws_more_and_keeps_what_matches_best(family, drawn):
    scores = jaxspec.match(family, drawn.tokens, drawn.prompts)
    assert scores.shape == (12,) and (np.abs(scores) <= 1).all()
    out = jaxspec.generate(family, PROMPTS, best_of=4, seed=3, batch_size=5)
    want = scores.reshape(3, 4)
    assert out.numbers == want.argmax(1).tolist() and out.settings["best_of"] == 4
    np.testing.assert_allclose(out.scores, want.max(1), rtol=1e-5)
    np.testing.assert_array_equal(out.tokens, drawn.best(scores).tokens)
    # Of four for two pictures, the best two of the same four.
    two = jaxspec.generate(family, PROMPTS[1], num_images=2, best_of=2, seed=3)
    assert two.numbers == np.argsort(-want[1])[:2].tolist()
    assert "best_of" not in drawn.settings and drawn.scores is None
    assert out.summary()["best_of"] == 4 and "best_of" not in drawn.summary()
    # A prompt is read once: what is said about it is said once.
    with pytest.warns(UserWarning, match="kept") as said:
        jaxspec.generate(family, "red heart hat hat hat hat", best_of=3)
    assert len(said) == 1


def test_match_is_the_cosine_of_both_towers(family, drawn):
    """Calculated again from the towers; a batch-mate changes nothing."""
    ((size, config),) = family.config.matchers
    codes = family.params["vq"]["params"]["codebook"]
    codes = codes / np.linalg.norm(codes, axis=-1, keepdims=True)
    vectors = family.read(drawn.prompts)[0]
    picture, caption = Matcher(config).apply(
        family.params["matchers"][str(size)], jnp.asarray(codes)[drawn.tokens], vectors
    )
    np.testing.assert_allclose(np.linalg.norm(picture, axis=-1), 1, atol=1e-4)
    want = np.einsum("nd,nd->n", picture, caption)
    got = jaxspec.match(family, drawn.tokens, drawn.prompts)
    np.testing.assert_allclose(got, want, atol=1e-5)
    alone = jaxspec.match(family, drawn.tokens[5:6], drawn.prompts[5])
    np.testing.assert_allclose(alone, want[5:6], atol=1e-5)
    # Slots without words are no words.
    padded = np.pad(vectors, ((0, 0), (0, 2), (0, 0)))
    weights = family.params["matchers"][str(size)]
    latents = jnp.asarray(codes)[drawn.tokens]
    again = Matcher(config).apply(weights, latents, padded)[1]
    np.testing.assert_allclose(again, caption, atol=1e-6)


def test_what_cannot_be_chosen_is_refused(family, drawn):
    with pytest.raises(ValueError, match=r"no size.*scores of your own"):
        jaxspec.generate(toy.family(), "red heart", best_of=2)
    with pytest.raises(ValueError, match="best_of"):
        jaxspec.generate(family, "red heart", best_of=0)
    with pytest.raises(ValueError, match="12 pictures have 1 prompts"):
        jaxspec.match(family, drawn.tokens, "red heart")
    with pytest.raises(ValueError, match="codes 0 to"):
        jaxspec.match(family, drawn.tokens - 99, drawn.prompts)
    with pytest.raises(ValueError, match="tokens must be grids"):
        jaxspec.match(family, drawn.tokens[0], "red heart")


def test_a_matcher_is_saved_and_loaded(family, drawn, tmp_path):
    jaxspec.save(family, tmp_path / "family")
    back = jaxspec.load(tmp_path / "family")
    assert back.config.matchers == family.config.matchers
    scores = [jaxspec.match(x, drawn.tokens, drawn.prompts) for x in (family, back)]
    np.testing.assert_array_equal(*scores)


def test_the_emoji_family_tells_its_own_drawings_apart():
    family = jaxspec.load("emoji")
    prompts = ["glossy red heart", "flat police officer", "blob grinning face"]
    tokens = jaxspec.generate(family, prompts, seed=0).tokens
    table = [
        jaxspec.match(family, tokens, [prompt] * len(tokens)) for prompt in prompts
    ]
    assert (np.argmax(table, axis=0) == [0, 1, 2]).all()


# Training.


def test_contrast_by_hand():
    """Two of one label share what they want; the third wants itself."""
    towers = np.eye(3, dtype=np.float32)
    rows = np.log(np.exp([[1, 0, 0]]).sum())
    # Rows 0 and 1 want 0 and 1 by halves: cosines 1 and 0, mean 1/2.
    want = ((rows - 0.5) * 2 + (rows - 1)) / 3
    got = train_matcher.contrast(towers, towers, np.array([7, 7, 9]), 1.0)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_found_by_hand():
    """Labels 0, 1, 2; the last picture's own label comes third."""
    captions = np.eye(3, dtype=np.float32)
    pictures = np.array([[3, 1, 2], [1, 3, 2], [2, 3, 1]], np.float32)
    labels = np.arange(3)
    shares = [train_matcher.found(pictures, captions, labels, k) for k in (1, 2, 3)]
    np.testing.assert_allclose(shares, [2 / 3, 2 / 3, 1])


def test_a_colour_is_found_where_its_own_caption_matches_best():
    """Two drawings in three colours; the second's last two have the same one."""
    eye = np.eye(3, dtype=np.float32)
    pictures = np.stack([eye, eye])
    captions = np.stack([eye[[0, 2, 1]], eye[[0, 2, 1]]])
    labels = np.array([[0, 1, 2], [3, 4, 4]])
    share = train_matcher.colour_found(pictures, captions, labels)
    np.testing.assert_allclose(share, 4 / 6)


def test_batches_hold_some_drawings_in_two_colours():
    """Of ten drawings the even ones have one colour; kinds 3 to 5 name another."""
    colours = np.full((4, 10), "", "U9")
    colours[1:, ::2] = [["blue"], ["pink"], ["blue"]]
    codes = np.arange(4 * 10, dtype=np.int16).reshape(4, 10, 1)
    pieces = np.arange(10, dtype=np.int32)[:, None]
    corpus = train_ar.Corpus(
        codes[[0, 0]] + 40,
        np.zeros(10, bool),
        pieces,
        [[]] * 10,
        np.arange(100, dtype=np.float32)[:, None],
        np.zeros((100, 8), np.int16),
        augment.Variants(codes, np.zeros((4, 10, 1), np.float32), colours),
        np.where((colours != "")[..., None], 10 + codes, pieces).astype(np.int32),
    )
    drawings = SimpleNamespace(label=np.array([f"red {x}" for x in "abcdefghij"]))
    codebook = np.arange(100, dtype=np.float32)[:, None]
    pairs = train_matcher.Pairs.create(corpus, drawings, codebook)
    settings = train_matcher.MatcherTraining(batch=20, named=0.5, corruption=0.0)
    both = 0
    for step in range(40):
        batch = train_matcher.make_batch(settings, pairs, np.arange(10), step)
        pictures, captions, labels = (x.reshape(20, -1)[:, 0] for x in batch[:3])
        for picture, caption, label in zip(pictures, captions, labels, strict=True):
            kind, drawing = divmod(int(picture), 10)
            as_drawn = kind == 4  # its codes follow those of the variants
            named = not as_drawn and colours[kind, drawing] != ""
            assert caption == (10 + picture if named else drawing)
            name = colours[kind, drawing] if named else "red"
            same = pairs.labels[0 if not named else 2 + kind, drawing]
            assert label == same and (name != "red") == named
        first, second = pictures[:10:2] % 10, pictures[1:10:2] % 10
        np.testing.assert_array_equal(first, second)
        assert not (first % 2).any()
        both += (labels[:10:2] != labels[1:10:2]).sum()
    assert 0.5 < both / 200 < 0.8  # of four draws in three colours: 1 - 6 / 16
    blue, again = pairs.labels[3], pairs.labels[5]
    np.testing.assert_array_equal(blue, again)
