"""Maps and animations, at cells that are known."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from jaxspec import maps
from jaxspec.decoding import ACCEPTED, BONUS, DRAWN, RESAMPLED, Decoded
from jaxspec.maps import (
    BLANK,
    blanked,
    map_sheet,
    moments,
    origin_colours,
    pass_colours,
    save_animation,
)

COLOURS = {
    DRAWN: (0, 114, 178),
    ACCEPTED: (0, 158, 115),
    RESAMPLED: (213, 94, 0),
    BONUS: (240, 228, 66),
}
ORIGIN = np.array([[[DRAWN, ACCEPTED], [RESAMPLED, BONUS]]], np.int8)
FINAL = np.array([[[0, 1], [1, 4]]], np.int32)


def stats(origin, final):
    empty = Decoded.empty(len(final), final.shape[1:])
    return replace(empty, origin=origin, final_pass=final)


def test_colours_at_known_cells():
    final = FINAL[0].copy()
    final[0, 1] = -1  # never
    colours = origin_colours(ORIGIN[0], final)
    assert colours.dtype == np.uint8
    assert [tuple(c) for c in colours.reshape(4, 3)] == [
        COLOURS[DRAWN],
        BLANK,
        COLOURS[RESAMPLED],
        COLOURS[BONUS],
    ]
    colours = pass_colours(final, 4)
    ends = (68, 1, 84), (253, 231, 37)  # of viridis
    quarter = (59, 82, 139)
    found = [tuple(c) for c in colours.reshape(4, 3)]
    assert found == [ends[0], BLANK, quarter, ends[1]]
    assert tuple(pass_colours(np.zeros((1, 1), int), 0)[0, 0]) == ends[0]
    # Each pass is lighter than the one before, and none is the grey of nothing.
    scale = pass_colours(np.arange(60)[None], 59)[0].astype(float)
    assert (np.diff(scale @ [0.2126, 0.7152, 0.0722]) > 0).all()
    assert (scale.std(-1) > 10).all()


def block(sheet, left, row, column, side=128):
    """The one colour of a cell of a panel that is 2 by 2 cells of `side` pixels."""
    top, left = 8 + row * side, left + column * side
    colours = np.unique(
        sheet[top : top + side, left : left + side].reshape(-1, 3), axis=0
    )
    assert len(colours) == 1
    return tuple(int(c) for c in colours[0])


def test_picture_and_both_maps_stand_side_by_side_enlarged():
    image = np.zeros((1, 2, 2, 3), np.uint8)
    image[0, 1, 0] = 9, 8, 7
    sheet = map_sheet(image, stats(ORIGIN, FINAL), ["red heart"])
    panels = [8, 8 + 264, 8 + 2 * 264]  # left edges: 256 pixels and a gap each
    assert sheet.shape[1] == 3 * 264 + 8
    assert block(sheet, panels[0], 0, 0) == (0, 0, 0)
    assert block(sheet, panels[0], 1, 0) == (9, 8, 7)
    for k, origin in enumerate(COLOURS):
        row, column = divmod(k, 2)
        assert block(sheet, panels[1], row, column) == COLOURS[origin]
        when = pass_colours(FINAL[0], 4)[row, column]
        assert block(sheet, panels[2], row, column) == tuple(when)
        # The legend has a swatch of it.
        legend = sheet[8 + 256 :, panels[1] : panels[1] + 256].reshape(-1, 3)
        assert (legend == COLOURS[origin]).all(-1).sum() > 100
    # The scale has the five passes from 0 to 4, in order and equally wide.
    bar = sheet[8 + 256 + 7, panels[2] : panels[2] + 256]
    want = pass_colours(np.arange(256)[None] * 5 // 256, 4)[0]
    np.testing.assert_array_equal(bar, want)


def test_a_sheet_has_one_scale_and_its_columns():
    later = np.concatenate([FINAL, FINAL * 2])
    images = np.zeros((2, 2, 2, 3), np.uint8)
    sheet = map_sheet(images, stats(ORIGIN.repeat(2, 0), later), ["a", "b"], columns=2)
    assert sheet.shape[1] == 6 * 264 + 8
    first, second = (8 + k * 264 for k in (2, 5))
    assert block(sheet, first, 1, 1) == tuple(pass_colours(later[0], 8)[1, 1])
    assert block(sheet, second, 1, 1) == (253, 231, 37)


def test_islands_are_counted_and_what_is_not_there_has_no_legend(monkeypatch):
    origin = np.full((1, 4, 4), ACCEPTED, np.int8)
    origin[0, 0, 0] = origin[0, 1, 1] = RESAMPLED  # one part, by a corner
    origin[0, 3, 3] = DRAWN
    said = []
    grid = lambda panels, labels, columns: said.extend(labels)
    monkeypatch.setattr(maps, "labelled_grid", grid)
    legend = maps._origin_legend
    monkeypatch.setattr(
        maps, "_origin_legend", lambda *x: said.append(x[1]) or legend(*x)
    )
    image = np.zeros((1, 4, 4, 3), np.uint8)
    known = stats(origin, np.ones((1, 4, 4), np.int32))
    maps.map_sheet(image, known, ["a"], islands=True)
    assert said[0] == [1, 13, 2, 0]
    assert said[1:] == [
        "a",
        "where each cell came from: 2 islands",
        "pass that made it final",
    ]
    bonus = (legend(256, [1, 13, 2, 0]) == COLOURS[BONUS]).all(-1)
    assert not bonus.any()


def test_moments_by_hand():
    final = np.array([[[0, 2], [2, 7]], [[0, 3], [9, 7]]])
    assert moments(final, 60).tolist() == [-1, 0, 2, 3, 7, 9]
    assert moments(final, 6).tolist() == [-1, 0, 2, 3, 7, 9]
    assert moments(final, 4).tolist() == [-1, 0, 3, 9]
    assert moments(final, 2).tolist() == [-1, 9]
    many = moments(np.arange(256).reshape(1, 16, 16), 60)
    assert len(many) == 60 and many[-1] == 255 and set(np.diff(many[1:])) <= {4, 5}
    with pytest.raises(ValueError, match="2 frames or more, not 1"):
        moments(final, 1)


def test_blanked_cells_are_grey_and_no_other():
    image = np.full((1, 4, 6, 3), 7, np.uint8)
    got = blanked(image, np.array([[[True, False, True], [False, True, True]]]))
    grey = (got == BLANK).all(-1)[0]
    want = [[0, 0, 1, 1, 0, 0]] * 2 + [[1, 1, 0, 0, 0, 0]] * 2
    np.testing.assert_array_equal(grey, want)
    assert (got[0][~grey] == 7).all()


def test_animation_is_read_back_frame_by_frame(tmp_path):
    frames = [np.full((32, 48, 3), value, np.uint8) for value in (208, 120, 30)]
    path = tmp_path / "a.webp"
    save_animation(path, frames, {"prompt": "café ♥"})
    with Image.open(path) as read:
        assert (read.n_frames, read.size, read.info["loop"]) == (3, (48, 32), 0)
        assert json.loads(read.getexif()[270]) == {"prompt": "café ♥"}
        durations = []
        for k, frame in enumerate(frames):
            read.seek(k)
            np.testing.assert_allclose(np.asarray(read.convert("RGB")), frame, atol=3)
            durations.append(read.info["duration"])
    assert durations == [250, 250, 2000]
    assert os.listdir(tmp_path) == ["a.webp"]


def test_failed_animation_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.webp"
    path.write_text("old")
    frames = [np.zeros((8, 8, 3), np.uint8), np.zeros((9, 9, 3), np.uint8)]
    with pytest.raises(Exception, match="."):
        save_animation(path, frames, {})
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.webp"]
