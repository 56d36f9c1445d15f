"""LANTERN's rules by hand, where they are exact, and the methods that use them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.acceptance import Ratio, residual
from jaxspec.decoding import ACCEPTED, BONUS
from jaxspec.methods import AR, LANTERN, LANTERNPP
from jaxspec.methods.lantern import Likeliest, Pooled, others
from jaxspec.neighbours import nearest_codes
from jaxspec.testing import exact_check, keys_of, toy_target
from tests import toy

# Code 0 is judged; 1, 2, 3, 4 are its nearest, in this order.
P = np.log(np.array([[[0.2, 0.1, 0.05, 0.25, 0.3, 0.1]]], np.float32))
TABLE = jnp.array([[1, 2, 3, 4, 5]] * 6)
DRAFT = jnp.zeros((1, 1), jnp.int32)
CHOSEN = jnp.where(jnp.arange(6) == 0, 0.0, -jnp.inf)[None, None]
DRAWN = np.log(np.array([[[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]]], np.float32))


@pytest.mark.parametrize(
    ("rule", "log_q", "chance"),
    [
        (Pooled(4, delta=0.05), CHOSEN, 0.2),
        (Pooled(4, delta=0.12), CHOSEN, 0.3),
        (Pooled(1, delta=0.2), CHOSEN, 0.3),
        (Pooled(4, delta=0.42), CHOSEN, 0.6),
        (Pooled(4, times=1.0), CHOSEN, 0.2),
        (Pooled(4, times=1.8), CHOSEN, 0.35),
        (Pooled(4, times=1.8), DRAWN, 0.7),
        (Pooled(4, times=3.1), DRAWN, 1.0),
    ],
    ids=str,
)
def test_what_is_pooled_by_hand(rule, log_q, chance):
    np.testing.assert_allclose(rule(P, log_q, DRAFT, TABLE), [[chance]], rtol=1e-5)


def norm(*mass):
    mass = np.array(mass)
    return mass / mass.sum()


@pytest.mark.parametrize(
    ("rule", "log_q", "left"),
    [
        (Pooled(2, delta=0.12), CHOSEN, norm(0, 0.1, 0.05, 0.25, 0.3, 0.1)),
        (
            Pooled(2, delta=0.12, residual="pooled"),
            CHOSEN,
            norm(0, 0, 0.05, 0.25, 0.3, 0.1),
        ),
        # Two neighbours and one more.
        (
            Pooled(2, delta=0.12, residual="released"),
            CHOSEN,
            norm(0, 0, 0, 0, 0.3, 0.1),
        ),
        (
            Pooled(2, delta=0.01, residual="released"),
            CHOSEN,
            norm(0, 0.1, 0.05, 0.25, 0.3, 0.1),
        ),
        # Nothing is left: all codes alike, as released.
        (Pooled(5, delta=0.12, residual="released"), CHOSEN, norm(1, 1, 1, 1, 1, 1)),
        (Pooled(2, times=1.8), DRAWN, norm(0, 0, 0, 0.15, 0.2, 0)),
        (
            Pooled(2, times=1.8, residual="released-static"),
            DRAWN,
            norm(0, 0.1, 0.05, 0.25, 0.2, 0),
        ),
        # min(q, p~): of 0 is 0.35, of the others 0.1 (q), as p~ is no less.
        (Pooled(2, times=1.8, residual="optimal"), DRAWN, norm(0, 0, 0, 0.15, 0.2, 0)),
    ],
    ids=str,
)
def test_what_a_reject_leaves_by_hand(rule, log_q, left):
    found = np.exp(rule.rejected(P, log_q, DRAFT, TABLE))
    np.testing.assert_allclose(found[0, 0], left, atol=1e-6)


def random_case(seed, b=200, v=9):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (2, b, 1, v))
    logits = np.where(rng.random(logits.shape) < 0.2, -np.inf, logits)  # as top-k does
    log_p, log_q = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32), axis=-1)
    drafts = jnp.argmax(log_q + rng.gumbel(size=log_q.shape), axis=-1)
    table = nearest_codes(jnp.asarray(rng.normal(size=(v, 3)), jnp.float32), v)[:, 1:]
    return log_p, log_q, drafts, table


def test_acceptance_is_never_below_the_exact_one():
    log_p, log_q, drafts, table = random_case(0)
    exact = Ratio()(log_p, log_q, drafts)
    more = 0
    for rule in (Pooled(5, delta=0.3), Pooled(5, times=3.0), Pooled(8, delta=1.0)):
        chance = rule(log_p, log_q, drafts, table)
        assert bool(jnp.all(chance >= exact - 1e-6) & jnp.all(chance <= 1))
        more += int(jnp.sum(chance > exact + 1e-3))
    assert more > 100


@pytest.mark.parametrize(
    "rule",
    [
        Pooled(5, delta=0.0, residual="pooled"),
        Pooled(5, times=1.0),
        Pooled(5, times=1.0, residual="optimal"),
    ],
    ids=str,
)
def test_rules_that_move_nothing_are_exact(rule):
    log_p, log_q, drafts, table = random_case(1)
    chance = Ratio()(log_p, log_q, drafts)
    np.testing.assert_allclose(rule(log_p, log_q, drafts, table), chance, rtol=1e-5)
    left = jnp.exp(rule.rejected(log_p, log_q, drafts, table))
    np.testing.assert_allclose(left, jnp.exp(residual(log_p, log_q)), atol=1e-6)


def test_the_released_residual_is_not_even_at_delta_0():
    """A neighbour of no probability counts as pooled, and all of them go."""
    log_p, _, drafts, table = random_case(1)
    chosen = jnp.where(jax.nn.one_hot(drafts, 9, dtype=bool), 0.0, -jnp.inf)
    rule = Pooled(5, delta=0.0, residual="released")
    left = jnp.exp(rule.rejected(log_p, chosen, drafts, table))
    assert float(jnp.max(jnp.abs(left - jnp.exp(residual(log_p, chosen))))) > 0.1


# Methods.

TREE = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
GRID, CODES = (3, 4), 12


@pytest.mark.parametrize(
    "method",
    [
        LANTERN(depth=3, top_k=3, total=99, delta=1.0),
        LANTERNPP(tree=TREE, neighbours=99, ratio=1e9),
    ],
    ids=["LANTERN", "LANTERN++"],
)
def test_a_bound_that_binds_nothing_keeps_everything(method):
    """All mass is pooled: 4 cells a round, whatever is drafted."""
    target = toy_target(GRID, CODES, 2)
    other = toy_target(GRID, CODES, 2, seed=1)
    out = toy.decode_jitted(replace(method, draft=other), target, keys_of(2))
    np.testing.assert_array_equal(out.target_passes, 3)
    np.testing.assert_array_equal(out.count(ACCEPTED), 9)
    np.testing.assert_array_equal(out.count(BONUS), 2)


def test_greedy_tokens_are_those_of_ar_whatever_a_reject_leaves():
    """A reject of a neighbour of the likeliest code must not take that code with it."""
    target = toy_target(GRID, CODES, 2, temperature=0)
    draft, keys = toy_target(GRID, CODES, 2, seed=1), keys_of(2)
    want = toy.decode_jitted(AR(), target, keys).tokens
    method = LANTERN(draft, 3, 3, 9, neighbours=8, residual="released")
    out = toy.decode_jitted(method, target, keys)
    np.testing.assert_array_equal(out.tokens, want)


def test_the_greedy_mode_likes_what_is_likeliest_with_its_neighbours():
    """Of code 0: 0.2 alone, 0.6 with all its neighbours; of another 0.3 at most."""
    for rule, liked in (
        (Pooled(4, delta=0.05), False),
        (Pooled(4, delta=0.42), True),
        (Pooled(4, times=1.2), False),
        (Pooled(4, times=3.1), True),
    ):
        assert Likeliest(rule).likes(P, DRAFT, TABLE).tolist() == [[liked]]


@pytest.mark.parametrize(
    ("method", "passes"),
    [
        (LANTERN(None, 3, 3, 9, neighbours=8, delta=0.0, greedy="pooled"), None),
        (LANTERNPP(tree=TREE, neighbours=8, ratio=1.0, greedy="pooled"), None),
        (LANTERN(None, 3, 3, 99, delta=1.0, greedy="pooled"), 3),
        (LANTERNPP(tree=TREE, neighbours=99, ratio=1e9, greedy="pooled"), 3),
    ],
    ids=["LANTERN", "LANTERN++", "LANTERN, all pooled", "LANTERN++, all pooled"],
)
def test_the_greedy_mode_without_a_bound_and_with_all_pooled(method, passes):
    """Where nothing is pooled, tokens are AR's; where all is, no draft is dropped."""
    target = toy_target(GRID, CODES, 2, temperature=0)
    other = toy_target(GRID, CODES, 2, seed=1)
    out = toy.decode_jitted(replace(method, draft=other), target, keys_of(2))
    if passes is None:
        want = toy.decode_jitted(AR(), target, keys_of(2)).tokens
        np.testing.assert_array_equal(out.tokens, want)
    else:
        np.testing.assert_array_equal(out.target_passes, passes)


def test_lantern_shows_its_bias():
    target, draft = toy_target((2, 2), 4), toy_target((2, 2), 4, seed=1)
    method = LANTERN(draft, depth=2, top_k=2, total=4, neighbours=2, delta=0.5)
    check = exact_check(method, target)
    assert check.distance > 1.5 * check.threshold, check


def test_the_table_of_neighbours():
    target = toy_target(GRID, CODES)
    table = others(target, None, 4)
    np.testing.assert_array_equal(table, nearest_codes(target.codes, 5)[:, 1:])
    assert others(target, None, 1000).shape == (CODES, CODES - 1)
    np.testing.assert_array_equal(others(target, table, 2), table[:, :2])
    with pytest.raises(
        ValueError, match=r"table must be \[12, 5 or more\], .* \[12, 4\]"
    ):
        others(target, table, 5)
    with pytest.raises(ValueError, match="the target has no codes"):
        others(replace(target, codes=None), None, 4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LANTERN(delta=1.1), "delta must be 0 to 1, not 1.1"),
        (lambda: LANTERN(neighbours=0), "neighbours must be 1 or more, not 0"),
        (lambda: LANTERN(residual="plain"), "residual must be one of pooled, released"),
        (lambda: LANTERN(greedy="yes"), "greedy must be one of exact, pooled, not"),
        (lambda: LANTERNPP(ratio=0.5), "ratio must be 1 or more, not 0.5"),
        (lambda: LANTERNPP(tree=()), "a tree must be a tuple of paths"),
    ],
)
def test_knobs_out_of_range_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
