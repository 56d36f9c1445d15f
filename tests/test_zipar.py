"""ZipAR with an adaptive window: against loops, exactness, and passes."""

import numpy as np
import pytest

from jaxspec.decoding import ACCEPTED, RESAMPLED
from jaxspec.methods import AR, ZipAR
from jaxspec.testing import exact_check, keys_of, toy_target
from tests import toy
from tests.slow import Chance, SlowZipAR

CODES = 5


@pytest.mark.parametrize(
    ("grid", "window", "frontier"), [((3, 5), 1, 3), ((4, 5), 2, 3), ((3, 1), 1, 1)]
)
def test_against_loops(grid, window, frontier):
    """The loops know of one image: none depends on its neighbours."""
    config, batch = toy.transformer(grid, CODES), 4
    target, keys = toy.target(config, batch), keys_of(batch)
    got = toy.decode_jitted(ZipAR(window, adaptive=True), target, keys)
    for b in range(batch):
        slow = SlowZipAR(config, toy.params(config), target.condition[b])
        chance = Chance(keys[b], config.cells, CODES)
        tokens, passes, origin, drafted = slow.zipar(window, frontier, chance)
        np.testing.assert_array_equal(got.tokens[b], tokens)
        np.testing.assert_array_equal(got.final_pass[b], passes)
        np.testing.assert_array_equal(got.origin[b], origin)
        assert got.drafted[b] == drafted
        assert got.target_passes[b] == passes.max()


@pytest.mark.parametrize("window", [1, 2])
def test_exact_if_the_last_draw_knows_the_whole_row(window):
    """A candidate is drawn with one token above at least, and judged with both.

    It then has the distribution of the second draw, whatever the first one was.
    """
    settings = {"temperature": 0.8, "guidance": 1.5, "top_k": 3}
    target = toy_target((3, 2), 3, 1, **settings)
    result = exact_check(ZipAR(window, adaptive=True), target)
    assert result.passed, result


def test_biased_where_rows_overlap():
    target = toy_target((2, 3), 3, 1)
    result = exact_check(ZipAR(1, adaptive=True), target)
    assert result.distance > 1.5 * result.threshold, result


def test_passes():
    """Between those of a fixed window one larger and those of AR, row by row."""
    (h, w), window, batch = (6, 3), 1, 16
    target = toy_target((h, w), CODES, batch)
    out = toy.decode_jitted(ZipAR(window, adaptive=True), target, keys_of(batch))
    # A row starts a pass after its first cell is final, with window + 1 to w above it.
    final, origin = np.asarray(out.final_pass), np.asarray(out.origin)[:, 1:, 0]
    waits = np.diff(final[..., 0], axis=1)
    assert set(waits.ravel().tolist()) == set(range(window + 1, w + 1))
    np.testing.assert_array_equal(np.diff(final, axis=2), 1)
    np.testing.assert_array_equal(out.target_passes, waits.sum(axis=1) + w - 1)
    # Each pass of a wait but the first judges a candidate. The last one keeps it, or
    # the row above is full.
    np.testing.assert_array_equal(out.drafted, (waits - window).sum(axis=1))
    assert set(origin.ravel().tolist()) == {ACCEPTED, RESAMPLED}
    assert (waits[origin == RESAMPLED] == w).all()


def test_greedy():
    target = toy_target((3, 4), 12, 4, temperature=0)
    method = ZipAR(1, adaptive=True)
    one, other = (
        toy.decode_jitted(method, target, keys_of(4, seed)) for seed in (0, 1)
    )
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.final_pass, other.final_pass)
    want = toy.decode_jitted(AR(), target, keys_of(4)).tokens
    got = toy.decode_jitted(ZipAR(4, adaptive=True), target, keys_of(4)).tokens
    np.testing.assert_array_equal(got, want)
