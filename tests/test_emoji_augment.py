"""Variants of the emoji drawings, and batches of them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.emoji import augment, named_colours, train_ar
from experiments.emoji.codes import SLOTS
from experiments.methods.colours import Examples

RED, BLUE = [200, 30, 30], [30, 30, 200]


def square(colour, other=None) -> np.ndarray:
    """A square of one colour over white, its lower half perhaps of another."""
    drawing = np.full((32, 32, 3), 255, np.uint8)
    drawing[8:24, 8:24] = colour
    if other is not None:
        drawing[16:24, 8:24] = other
    return drawing


def test_moved_drawings_keep_their_colours_and_white():
    rng = np.random.default_rng(0)
    made = [augment.moved(square(RED), rng) for _ in range(8)]
    results, told = [x[0] for x in made], [x[1] for x in made]
    assert len({x.tobytes() for x in results}) == 8
    for image in results:
        reds = (image[..., 1] < 142).sum()  # at the edges it is blurred with white
        assert 0.6 * 256 < reds < 1.25 * 256 and (image[0, 0] == 255).all()
    # What is told is where it went: 25 sides to the right, from the sixth number.
    columns = [(255 - x[..., 1]).sum(0) @ np.arange(32) for x in results]
    weights = [(255 - x[..., 1]).sum() for x in results]
    right = np.divide(columns, weights) - 15.5
    np.testing.assert_allclose(right, np.array(told)[:, 4] * 32 / 25, atol=0.5)


@pytest.mark.parametrize(
    ("drawing", "hue"),
    [
        (square(RED), 0),
        (square(BLUE), 240),
        (square(RED, BLUE), None),
        (square([40, 40, 40]), None),
        (np.full((32, 32, 3), 255, np.uint8), None),
    ],
)
def test_the_hue_of_a_drawing(drawing, hue):
    found = augment.own_hue(drawing)
    assert found is None if hue is None else abs((found - hue + 180) % 360 - 180) < 2


def test_a_named_drawing_has_the_colour_that_it_is_called():
    rng, names = np.random.default_rng(0), set()
    for _ in range(60):
        image, told, name = augment.named(square(RED), rng)
        found = augment.own_hue(image)
        assert abs((found - augment.HUES[name] + 180) % 360 - 180) < 3
        assert not any(told)
        names.add(name)
    assert names == set(augment.HUES) - {"red"}
    both = square(RED, BLUE)
    image, _, name = augment.named(both, rng)
    assert name == "" and (image == both).all()


def test_a_moved_and_named_drawing_is_both_and_tells_how_it_moved():
    moved, told, _ = augment.moved(square(RED), np.random.default_rng(0))
    image, same, name = augment.moved_and_named(square(RED), np.random.default_rng(0))
    assert same == told and name in set(augment.HUES) - {"red"}
    turned = augment.turn_hue(moved, augment.HUES[name] - augment.own_hue(moved))
    np.testing.assert_array_equal(image, turned)


def test_the_share_of_named_colours(monkeypatch):
    """All of it where prompts are obeyed, a seventh where every drawing is red."""
    red = square(RED)
    paint = lambda colour: augment.turn_hue(red, augment.HUES[colour])
    answers = {"obeys": lambda prompt: paint(prompt.split()[1]), "red": lambda _: red}

    def generate(family, prompts, seed):
        return SimpleNamespace(images=np.stack([answers[family](p) for p in prompts]))

    monkeypatch.setattr(named_colours.jaxspec, "generate", generate)
    names = list(augment.HUES)
    known = Examples.create(names, np.stack([paint(name) for name in names]))
    obeys = named_colours.share("obeys", known, named=True)
    assert set(obeys.values()) == {1.0}
    only_red = dict.fromkeys(names, 0.0) | {"red": 1.0, "all": 0.143}
    assert named_colours.share("red", known, named=False) == only_red


def test_a_label_names_its_colour_once():
    assert augment.name_colour("red apple", "blue") == "blue apple"
    assert augment.name_colour("apple", "blue") == "blue apple"
    assert augment.name_colour("T-Rex", "pink") == "pink T-Rex"
    assert augment.name_colour("shredder", "pink") == "pink shredder"


def test_variants_are_mirrored_where_that_is_allowed_and_told_and_kept(tmp_path):
    images = np.stack([square(RED), square(BLUE)] * 20)
    images[:, 8:24, 8:12] = 0
    mirrors = np.arange(40) < 20
    calls = []

    def encode(drawings):
        """Where the black edge lies: 0 on the left, 1 on the right."""
        calls.append(len(drawings))
        dark = drawings.astype(int).sum(-1) < 100
        left, right = dark[:, :, :16].sum((1, 2)), dark[:, :, 16:].sum((1, 2))
        return (right > left)[:, None].astype(np.int16)

    kinds = ("moved", "varied", "named")
    load = lambda: augment.load(tmp_path / "x.npz", images, mirrors, encode, kinds)
    made = load()
    edge = made.tokens[..., 0]
    assert edge.shape == (3, 40) and not edge[:, 20:].any()
    assert (edge[:, :20].sum(1) > 3).all() and (edge[:, :20].sum(1) < 17).all()
    np.testing.assert_array_equal(made.told[:2, :, -1], 2 * edge[:2])
    assert (made.told[:2, :, 0] == 1).all() and not made.told[2].any()
    assert (np.abs(made.told) < 4.1).all()
    # Of hues, "moved" turns none and "varied" half.
    turned = made.told[..., 6:8].any(-1)
    assert not turned[0].any() and 8 < turned[1].sum() < 32
    assert (made.colours[:2] == "").all() and (made.colours[2] != "").any()
    encoded = len(calls)
    again = load()
    assert len(calls) == encoded + 1  # the sample that tells what they were made of
    for name in ("tokens", "told", "colours"):
        np.testing.assert_array_equal(getattr(again, name), getattr(made, name))


def corpus(colours: str) -> train_ar.Corpus:
    """Ten drawings whose tokens are their number; variant k of it is 10 + 10 k more."""
    pieces = np.zeros((10, SLOTS), np.int32)
    pieces[:, 0] = np.arange(10) + 1
    drawn = np.arange(10, dtype=np.int16)[:, None].repeat(4, 1)
    told = np.zeros((3, 10, augment.TOLD), np.float32)
    told[:2] = [[[1] * augment.TOLD], [[2] * augment.TOLD]]
    tokens = np.stack([drawn + 10 * (k + 1) for k in range(3)])
    variants = augment.Variants(tokens, told, np.full((3, 10), colours))
    nearest = np.zeros((100, 8), np.int16)
    table = np.arange(200, dtype=np.float32)[:, None].repeat(16, 1)
    plain = train_ar.Corpus(
        np.stack([drawn, drawn]), np.zeros(10, bool), pieces, [[]] * 10, table, nearest
    )
    return replace(
        plain, variants=variants, named=np.stack([pieces] * 2 + [pieces + 100])
    )


@pytest.mark.parametrize("last", ["named", "moved and named"])
@pytest.mark.parametrize(("told", "named"), [(1.0, 0.0), (0.0, 1.0), (0.4, 0.2)])
def test_batches_of_variants_have_their_codes_captions_and_what_is_told(
    told, named, last
):
    settings = train_ar.ARTraining(
        size=16,
        depth=1,
        steps=1,
        batch=10,
        rate=1.0,
        unconditional=0.0,
        corruption=0.0,
        tags=0.0,
        mirror=0.0,
        variants=("varied", "varied", last),
        told=told,
        named=named,
    )
    kinds = []
    for step in range(60):
        made = train_ar.make_batch(settings, corpus("red"), np.arange(10), step)
        inputs, targets, condition = made
        np.testing.assert_array_equal(inputs, targets)
        kind, drawing = np.divmod(
            targets[:, 0], 10
        )  # 0 as drawn, 1 and 2 told, 3 named
        np.testing.assert_array_equal(np.sort(drawing), np.arange(10))
        want = np.where(kind == 3, drawing + 101, drawing + 1)
        np.testing.assert_array_equal(condition[:, 0, 0], want)
        said = condition[:, -1]
        numbers = np.where((kind == 1) | (kind == 2), kind, (kind == 3) * 100)
        np.testing.assert_array_equal(
            said[:, : augment.TOLD], numbers[:, None] * np.ones(9)
        )
        kinds.append(np.bincount(kind, minlength=4))
    shares = np.sum(kinds, 0) / 600
    want = [1 - told - named, told / 2, told / 2, named]
    np.testing.assert_allclose(shares, want, atol=0.1)
