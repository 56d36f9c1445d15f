"""Several pictures of a caption: how much they differ, and their colours."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments.methods import variety
from experiments.methods.colours import Examples, main_colours, named
from experiments.methods.contestants import Contestant
from jaxspec.methods import AR, ZipAR

# Colours.


def picture(colour, side=8, share=0.5):
    """White, and so much of it of one colour."""
    out = np.full((side, side, 3), 255, np.uint8)
    out[: int(side * share)] = colour
    return out


def test_colours_that_captions_name():
    assert named("flat emoji of red heart") == "red"
    assert named("noto emoji of Light Blue heart") == "blue"
    for caption in ("a heart", "white heart", "red and blue", "man: red hair"):
        assert named(caption) is None
    assert named("covered wagon, bluebird") is None  # whole words


def test_colours_of_pictures_by_hand():
    """The median of what is not background, and the name of the nearest example."""
    red, blue, half = picture((200, 0, 0)), picture((10, 10, 240)), picture((200, 0, 0))
    half[0] = (10, 10, 240)  # a quarter of what is drawn
    half[7] = (240, 240, 240)  # nearly white: no part of it
    blank = picture((255, 255, 255))
    got = main_colours(np.stack([red, blue, half, blank]))
    want = [[200, 0, 0], [10, 10, 240], [200, 0, 0], [255, 255, 255]]
    np.testing.assert_array_equal(got, want)
    shown = np.stack([red, blue, picture((0, 250, 0))])
    known = Examples.create(["red hat", "blue hat", "some hat"], shown)
    assert known.names.tolist() == ["red", "blue"]  # the last names none
    drawn = np.stack([picture((150, 30, 30)), picture((0, 60, 200)), blank, blue])
    assert known.names_of(drawn).tolist() == ["red", "blue", "", "blue"]
    asked = ["red cat", "red cat", "red cat", "a cat"]
    assert known.right(asked, drawn).tolist() == [True, False, False, False]


# Variety.


def test_distances_by_hand():
    """Of two captions: opposite, the same; and the same in another length."""
    centre = np.array([1.0, 1.0])
    around = np.array([[[1.0, 0.0], [0, 2]], [[-1, 0], [0, 2]], [[0, 1], [0, 5]]])
    got = variety.distances(around + centre, centre)
    want = [[2, 0], [1, 0], [1, 0]]  # pairs 0-1, 0-2, 1-2
    np.testing.assert_allclose(got, want, atol=1e-6)


def drawn(*features):
    return SimpleNamespace(features=np.array(features, float))


def test_methods_beside_ar():
    """AR draws two things of each caption, another method the same one twice."""
    ar, other = Contestant("AR", AR(), "exact"), Contestant("Z", ZipAR(4), "biased")
    up, down, left = [1.0, 0], [-1.0, 0], [0, 1.0]
    draws = [
        (ar, 0, drawn(up, up, up)),
        (ar, 1, drawn(down, left, left)),
        (ar, 2, drawn(up, up, up)),
        (ar, 3, drawn(left, left, left)),
        (ar, 4, drawn(up, up, up)),  # has no partner
        (other, 9, drawn(up, up, up)),
        (other, 10, drawn(up, up, left)),
    ]
    groups = variety.grouped(draws, 2)
    assert [(name, len(some)) for name, some in groups] == [("AR", 2)] * 2 + [("Z", 2)]
    rows = variety.compared(groups, np.array([up, down, left, [0, -1.0]]), same=0.1)
    values = [row["distance"]["value"] for row in rows]
    assert values == pytest.approx([4 / 3, 1, 1 / 3])
    assert [row["same"]["value"] for row in rows] == pytest.approx([0, 0, 2 / 3])
    assert rows[0]["distance"]["difference"] == pytest.approx([0, 0, 0])
    assert rows[2]["distance"]["difference"][0] == pytest.approx(-1)
    low, high = rows[2]["same"]["interval"]
    assert 0 <= low < 2 / 3 < high <= 1


def test_one_drawing_is_what_the_tokenizer_leaves_of_it():
    """The median of a quarter turn, and of two that come out as they were."""
    real = np.array([[1.0, 0], [0, 1], [-1, -1]])  # their mean is 0
    again = np.array([[0, 1.0], [0, 1], [-2, -2]])
    assert variety.same_drawing(real, again) == pytest.approx(0)
    again[1] = [1, 0]
    assert variety.same_drawing(real, again) == pytest.approx(1)
