"""Islands: which cells are rejected with a reject, and which can be drawn at once."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.decoding import wavefront
from jaxspec.decoding.islands import expand, label
from jaxspec.methods.mulo import MuLo
from tests.slow_mulo import around, islands_of
from tests.test_decoding import board


def strings(cells) -> list[str]:
    return ["".join("x" if x else "." for x in row) for row in np.asarray(cells)]


def test_expansion_by_hand():
    rejected = board(
        "......",
        "...x..",
        "......",
        "x.....",
        "......",
    )
    got = lambda *args: strings(expand(rejected, *args)[0])
    assert got(1, "square", "first") == [
        "......",
        "...xx.",
        "xxxxx.",
        "xx....",
        "xx....",
    ]
    assert got(1, "square", "block") == [
        "..xxx.",
        "..xxx.",
        "xxxxx.",
        "xx....",
        "xx....",
    ]
    assert got(1, "forward", "block") == [
        "......",
        "...xx.",
        "..xxx.",
        "xx....",
        "xx....",
    ]
    raster = ["......", "...xxx", "xxxxxx", "xxxxxx", "xxxxxx"]
    assert got(1, "raster", "first") == raster
    assert got(0, "square", "first") == strings(rejected[0])
    assert (
        strings(expand(board("....", "...."), 3, "raster", "first")[0]) == ["...."] * 2
    )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_expansion_and_islands_against_loops(data):
    h, w = data.draw(st.sampled_from([(1, 5), (4, 7), (6, 3)]))
    bits = data.draw(st.lists(st.booleans(), min_size=2 * h * w, max_size=2 * h * w))
    sparse = data.draw(st.sampled_from([0, 0.7, 0.9]))
    keep = np.random.default_rng(0).random((2, h, w)) >= sparse
    cells = np.array(bits).reshape(2, h, w) & keep
    radius = data.draw(st.sampled_from([0, 1, 2, 9]))
    how = data.draw(st.sampled_from(["square", "forward", "raster"]))
    clip = data.draw(st.sampled_from(["first", "block"]))
    got = np.asarray(expand(jnp.asarray(cells), radius, how, clip))
    labels = np.asarray(label(jnp.asarray(cells)))
    for b in range(2):
        np.testing.assert_array_equal(got[b], around(cells[b], radius, how, clip))
        want = islands_of(cells[b])
        # The same cells have the same number, whichever it is.
        pairs = set(zip(want.ravel().tolist(), labels[b].ravel().tolist(), strict=True))
        assert len(pairs) == len(set(want.ravel())) == len(set(labels[b].ravel()))
        assert (-1, -1) in pairs or cells[b].all()


def test_ready_in_islands_on_every_board():
    """All 4096 boards of 3 by 4 cells, and all that is done of them at random."""
    boards = np.array(list(product([False, True], repeat=12))).reshape(-1, 3, 4)
    labels = np.stack([islands_of(x) for x in boards])
    pending = boards & (np.random.default_rng(0).random(boards.shape) < 0.8)
    run = jax.jit(wavefront.ready, static_argnums=(1, 2))
    for window in (1, 2, 4):
        got = np.asarray(run(jnp.asarray(pending), window, False, jnp.asarray(labels)))
        for i, j in product(range(3), range(4)):
            want = pending[:, i, j].copy()
            if j > 0:
                want &= ~pending[:, i, j - 1]
            for c in range(min(j + window, 4)) if i else ():
                same = labels[:, i - 1, c] == labels[:, i, j]
                want &= ~(pending[:, i - 1, c] & same)
            np.testing.assert_array_equal(got[:, i, j], want)
        np.testing.assert_array_equal(got.any((1, 2)), pending.any((1, 2)))


def passes_of(pending: np.ndarray, method: MuLo, most: int | None) -> int:
    """Of the schedule alone."""
    islands = label(jnp.asarray(pending)) if method.order == "islands" else None
    run = jax.jit(wavefront.ready, static_argnums=(1, 2))
    pending, count = pending.copy(), 0
    while pending.any():
        now = np.asarray(run(jnp.asarray(pending), method.window, False, islands))
        pending[tuple(np.argwhere(now)[:most].T)] = False
        count += 1
    return count


@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("share", [0.01, 0.03])
def test_the_default_frontier_is_as_fast_as_any(window, share):
    rejected = np.random.default_rng(0).random((1, 32, 32)) < share
    pending = np.asarray(expand(jnp.asarray(rejected), 3, "square", "first"))
    islands, rows = MuLo(window=window), MuLo(window=window, order="rows")
    least = passes_of(pending, islands, None)
    assert passes_of(pending, islands, islands.most_at_once((32, 32))) <= 1.02 * least
    assert passes_of(pending, rows, None) >= least
