"""PJD: against loops, exact where rows do not matter to one another, and its counts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding import ImageGrammar, Target, rows
from jaxspec.methods import PJD, SJD, ZipAR
from jaxspec.testing import exact_check, keys_of, toy_target
from tests import toy
from tests.slow import Chance, SlowPJD

# One distribution, in loops.

CODES = 7


@pytest.mark.parametrize(
    ("grid", "method", "most"),
    [
        ((3, 4), PJD(3, context=2), 2),
        (
            (3, 4),
            PJD(4, context=1, coupling="gumbel", initial="repeat-left", rows=2),
            2,
        ),
        ((5, 3), PJD(2, context=1, coupling="maximal", rows=5), 5),
        ((4, 1), PJD(3, context=1), 1),
    ],
    ids=str,
)
def test_against_loops(grid, method, most):
    """Images differ in their conditions, and so in how far their rows are.

    The loops know of one image: none depends on its neighbours.
    """
    config, batch = toy.transformer(grid, CODES), 3
    target, keys = toy.target(config, batch), keys_of(batch)
    got = toy.decode_jitted(method, target, keys)
    for b in range(batch):
        slow = SlowPJD(config, toy.params(config), target.condition[b])
        chance = Chance(keys[b], config.cells, CODES)
        tokens, passes, origin, drafted = slow.pjd(method, most, chance)
        np.testing.assert_array_equal(got.tokens[b], tokens)
        np.testing.assert_array_equal(got.final_pass[b], passes)
        np.testing.assert_array_equal(got.origin[b], origin)
        assert got.drafted[b] == drafted
        assert got.target_passes[b] == passes.max()


# Exactness.

SETTINGS = {"temperature": 0.8, "guidance": 1.5, "top_k": 3}


@pytest.mark.parametrize(
    "method",
    [
        PJD(2, context=2, coupling="maximal", initial="repeat-above"),  # a whole row
        PJD(9, context=2, coupling="gumbel", initial="sample-above", rows=2),
    ],
    ids=str,
)
def test_exact_where_rows_follow_one_another(method):
    result = exact_check(method, toy_target((3, 2), 3, 1, **SETTINGS))
    assert result.passed, result


def rows_apart(target: Target) -> Target:
    """The target without attention, and blind to what is fed at the end of a row.

    Rows are then independent Markov chains, whatever is known of the others.
    """
    weights = jax.tree.map(lambda x: x, target.params)
    inner = weights["params"]
    for layer in inner["layers"]:
        layer["attention_out"] = jnp.zeros_like(layer["attention_out"])
    table, (h, w) = inner["position_embedding"], target.grid
    ends = target.model.config.prefix_length - 1 + w * jnp.arange(1, h)
    inner["position_embedding"] = table.at[ends].multiply(1e6)
    return replace(target, params=weights)


@pytest.mark.parametrize("coupling", ["independent", "gumbel"])
def test_exact_where_rows_are_independent(coupling):
    """Overlapping rows lack context, and that is all that is wrong with them."""
    target = rows_apart(toy_target((2, 3), 3, 1))
    result = exact_check(PJD(3, context=1, coupling=coupling), target)
    assert result.passed, result


def test_biased_where_rows_overlap():
    target = toy_target((2, 3), 3, 1)
    result = exact_check(PJD(3, context=1), target)
    assert result.distance > 1.5 * result.threshold, result


# What it has in common with others.


def assert_same(got, want, *fields):
    for field in fields or vars(want):
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field), field)


def test_one_row_is_sjd():
    target = toy_target((1, 9), CODES, 4)
    got = toy.decode_jitted(PJD(4), target, keys_of(4))
    assert_same(got, toy.decode_jitted(SJD(4), target, keys_of(4)))


def test_a_window_of_one_is_zipar():
    """No drafts: every row draws one cell a pass. Greedy, for keys differ."""
    target = toy_target((4, 5), 12, 4, temperature=0)
    got = toy.decode_jitted(PJD(1, context=2), target, keys_of(4))
    want = toy.decode_jitted(ZipAR(2), target, keys_of(4))
    assert_same(got, want, "tokens", "final_pass", "target_passes")


def test_greedy_does_not_depend_on_the_seed():
    """Unless first drafts do, and so what is accepted when, and in which context."""
    target = toy_target((3, 4), 12, 4, temperature=0)
    method = PJD(3, context=1, initial="repeat-left")
    one, other = (
        toy.decode_jitted(method, target, keys_of(4, seed)) for seed in (0, 1)
    )
    assert_same(one, other)


# The schedule.


def keep(log_p, log_q, drafts, codes=None):
    return jnp.ones(drafts.shape)


def reject(log_p, log_q, drafts, codes=None):
    return jnp.zeros(drafts.shape)


def test_passes_by_hand():
    target = toy_target((3, 4), CODES, 2)
    out = toy.decode_jitted(PJD(2, context=2, rule=keep), target, keys_of(2))
    # Row 0 takes columns 1 and 2, then 3, while row 1 begins; row 2 begins with two
    # tokens above it.
    want = [[0, 1, 1, 2], [2, 2, 3, 3], [3, 3, 4, 4]]
    np.testing.assert_array_equal(out.final_pass, [want] * 2)
    # Cell (0, 3) is a draft of a row that ends there; other passes have one draft and a
    # cell behind it.
    np.testing.assert_array_equal(out.origin[0], [[0, 1, 3, 1]] + [[1, 3, 1, 3]] * 2)
    np.testing.assert_array_equal(out.drafted, [6] * 2)
    # Nothing is kept: the topmost row draws a cell a pass, those below wait for it.
    out = toy.decode_jitted(PJD(3, context=1, rule=reject), target, keys_of(2))
    want = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(out.final_pass, [want] * 2)
    np.testing.assert_array_equal(out.origin, [np.where(want == 0, 0, 2)] * 2)


def schedule(h: int, w: int, window: int, context: int, most: int) -> int:
    """Passes after the prefill where every draft is kept."""
    done, passes = [1] + [0] * (h - 1), 0
    while done[-1] < w:
        top, new = sum(c == w for c in done), list(done)
        for i in range(top, min(h, top + most)):
            above = w if i == top else done[i - 1]
            if above >= min(context, w):
                new[i] += min(window, above - done[i])
        done, passes = new, passes + 1
    return passes


@pytest.mark.parametrize(
    ("side", "window", "context"), [(32, 8, 8), (32, 8, 6), (48, 8, 16), (24, 4, 3)]
)
def test_passes_of_the_docstring(side, window, context):
    lag = -(-context // window)
    want = -(-side // window) + (side - 1) * lag
    for most in (-(-side // context), side):
        assert schedule(side, side, window, context, most) == want


def test_lengths_by_hand():
    """A grid of 4 by 6; three segments take turns."""
    done = jnp.array(
        [
            [3, 6, 12],  # row 0 has three cells, so that row 1 may begin
            [4, 9, 13],
            [4, 10, 12],  # row 1 has caught up
            [19, 10, 15],  # row 0 is full: its segment has row 3
            [21, 24, 17],  # row 1 is full: there is no row 4
            [36, 24, 30],
        ]
    )
    want = [[3, 3, 0], [2, 1, 2], [2, 0, 3], [2, 2, 1], [2, 0, 1], [0, 0, 0]]
    np.testing.assert_array_equal(rows.lengths(done, ImageGrammar((4, 6)), 3, 3), want)
    # Rows wait for whole rows, the topmost one for none.
    want = [[3, 0, 0], [2, 0, 0], [2, 0, 0], [0, 2, 0], [0, 0, 1], [0, 0, 0]]
    np.testing.assert_array_equal(rows.lengths(done, ImageGrammar((4, 6)), 3, 9), want)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"window": 0}, "window must be 1 or more, not 0"),
        ({"context": 0}, "context must be 1 or more, not 0"),
        ({"rows": 0}, "rows must be 1 or more, or None, not 0"),
        ({"coupling": "none"}, "coupling must be one of independent, maximal, gumbel"),
        ({"initial": "sample-left"}, "take sample-above"),
        ({"initial": "zeros"}, "initial must be one of"),
    ],
)
def test_knobs_are_checked(knobs, message):
    with pytest.raises(ValueError, match=message):
        PJD(**knobs)
