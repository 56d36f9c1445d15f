"""Sheets and files of pictures, against what Pillow reads back."""

import os
import stat

import numpy as np
import pytest
from PIL import Image

from jaxspec.figures import labelled_grid, save_png

RED, BLUE = (200, 0, 0), (0, 0, 200)


def flat(height, width, colour):
    """One colour, uint8 [height, width, 3]."""
    return np.full((height, width, 3), colour, np.uint8)


def box(sheet, colour):
    """Rows and columns [top, bottom, left, right] that a colour fills, all of them."""
    rows, columns = np.nonzero((sheet == colour).all(-1))
    edges = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
    assert (sheet[edges[0] : edges[1], edges[2] : edges[3]] == colour).all()
    return edges


def ink(sheet, top, left, width):
    """Columns [left, right] of the dark pixels in the label under a picture."""
    part = sheet[top:, left : left + width].max(-1) < 128
    columns = np.nonzero(part.any(0))[0]
    return columns.min(), columns.max() + 1


def test_mixed_sizes_are_centred_and_not_stretched():
    sheet = labelled_grid([flat(40, 30, RED), flat(100, 120, BLUE)], ["a", "b"])
    assert sheet.dtype == np.uint8 and sheet.shape[1] == 3 * 8 + 2 * 120
    assert box(sheet, RED) == (8 + 30, 8 + 70, 8 + 45, 8 + 75)
    assert box(sheet, BLUE) == (8, 108, 8 + 120 + 8, 8 + 120 + 8 + 120)
    assert (sheet[:8] == 255).all() and (sheet[:, :8] == 255).all()


def test_columns_fill_row_by_row():
    images = [flat(96, 96, (10 * i, 0, 0)) for i in range(5)]
    sheet = labelled_grid(images, [""] * 5, columns=2)
    corners = [box(sheet, (10 * i, 0, 0))[::2] for i in range(5)]
    step = corners[2][0] - corners[0][0]  # of a row: picture, label, gap
    assert 96 + 8 + 11 < step < 96 + 8 + 30
    assert corners == [(8 + step * (i // 2), 8 + 104 * (i % 2)) for i in range(5)]
    # About square when nothing is said: 5 pictures take 3 columns.
    assert labelled_grid(images, [""] * 5).shape[1] == 8 + 3 * 104


def test_labels_wrap_and_are_shortened_inside_their_cell():
    def room(label):
        sheet = labelled_grid([flat(50, 128, RED)], [label])
        left, right = ink(sheet, 58, 0, sheet.shape[1])
        assert 8 <= left and right <= 8 + 128
        return sheet.shape[0]

    one, two, three = (
        room("short"),
        room("glossy emoji of a red heart"),
        room("ab " * 40),
    )
    assert one < two < three and three - two == two - one
    assert room("ab " * 4000) == three  # three lines at most
    assert room("a" * 400) == one  # one word is cut
    np.testing.assert_array_equal(
        labelled_grid([flat(50, 128, RED)], ["cafe"]),
        labelled_grid([flat(50, 128, RED)], ["café"]),
    )


def test_small_pictures_get_room_for_their_label():
    sheet = labelled_grid([flat(32, 32, RED)], ["red heart"])
    left, right = ink(sheet, 40, 0, sheet.shape[1])
    assert right - left > 32
    assert box(sheet, RED)[2] == (sheet.shape[1] - 32) // 2


@pytest.mark.parametrize(
    "images, labels, columns, said",
    [
        ([], [], None, "no picture"),
        ([flat(8, 8, RED)], ["a", "b"], None, "1 pictures, but 2 labels"),
        ([flat(8, 8, RED)], ["a"], 0, "columns must be 1 or more"),
        ([flat(8, 8, RED)[..., 0]], ["a"], None, r"uint8 \[8, 8\]"),
        ([flat(8, 8, RED) / 255], ["a"], None, r"float64 \[8, 8, 3\]"),
    ],
)
def test_bad_input_is_refused(images, labels, columns, said):
    with pytest.raises(ValueError, match=said):
        labelled_grid(images, labels, columns)


def test_png_keeps_pixels_and_text(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    path = tmp_path / "a.png"
    path.write_text("old")
    save_png(path, image, {"prompt": 'a "red" café ♥', "settings": '{"seed": 0}'})
    with Image.open(path) as read:
        assert read.text == {"prompt": 'a "red" café ♥', "settings": '{"seed": 0}'}
        np.testing.assert_array_equal(np.asarray(read), image)
    assert os.listdir(tmp_path) == ["a.png"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    def fail(self, stream, **_):
        with open(stream, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    path = tmp_path / "a.png"
    path.write_text("old")
    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_png(path, flat(4, 4, RED), {})
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.png"]
