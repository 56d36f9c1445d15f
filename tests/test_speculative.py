"""Speculative decoding with a drafter: counts, ragged progress, and what is refused.

That it draws the target's distribution is in `test_exactness.py`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding import (
    ACCEPTED,
    BONUS,
    DRAWN,
    RESAMPLED,
    Decoded,
    advance,
    begin,
    decode_eagerly,
    jacobi,
)
from jaxspec.methods import SJD, Speculative
from jaxspec.testing import keys_of, toy_target
from tests import toy

GRID, CODES = (3, 4), 12


def assert_same(got: Decoded, want: Decoded):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("length", [1, 20])
def test_a_drafter_equal_to_the_target_is_always_right(length):
    target = toy_target(GRID, CODES, 2, guidance=2.0)
    out = toy.decode_jitted(Speculative(target, length), target, keys_of(2))
    passes = -(-11 // (length + 1))
    np.testing.assert_array_equal(out.target_passes, passes)
    np.testing.assert_array_equal(out.count(RESAMPLED), 0)
    # The last round may end with its drafts.
    assert (out.count(BONUS) >= passes - 1).all()
    np.testing.assert_array_equal(out.count(ACCEPTED), out.drafted)
    np.testing.assert_array_equal(out.draft_passes, out.drafted)
    np.testing.assert_array_equal(out.prefill_passes, 2)
    # Another drafter is wrong now and then, and compiles nothing.
    other = toy_target(GRID, CODES, 2, seed=1, guidance=3.0, temperature=0.5)
    with toy.compilations() as compiled:
        out = toy.decode_jitted(Speculative(other, length), target, keys_of(2))
    assert compiled == []
    assert (out.count(RESAMPLED) > 0).all()


# Counts of a trace by hand.


def first_two_of_the_first_image(log_p, log_q, drafts, codes=None):
    """Keeps two drafts a round of image 0, and none of image 1."""
    place = jnp.arange(drafts.shape[1])[None]
    return jnp.where(place < jnp.array([[2], [0]]), 1.0, 0.0)


def origins(text: str) -> np.ndarray:
    known = {"d": DRAWN, "a": ACCEPTED, "r": RESAMPLED, "b": BONUS}
    return np.array([known[c] for c in text]).reshape(GRID)


def test_counts_by_hand():
    """Windows of 4 drafts from cells 1, 4, 7 and 10; and from every cell."""
    target, draft = toy_target(GRID, CODES, 2), toy_target(GRID, CODES, 2, seed=1)
    method = Speculative(draft, 4, first_two_of_the_first_image)
    out = toy.decode_jitted(method, target, keys_of(2))
    np.testing.assert_array_equal(out.origin[0], origins("daaraaraaraa"))
    np.testing.assert_array_equal(out.origin[1], origins("drrrrrrrrrrr"))
    passes = [[0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4], list(range(12))]
    np.testing.assert_array_equal(out.final_pass.reshape(2, 12), passes)
    for name, count in {
        "target_passes": [4, 11],
        "drafted": [4 + 4 + 4 + 2, 8 * 4 + 3 + 2 + 1],
        "draft_passes": [4 + 4 + 4 + 2, 8 * 4 + 3 + 2 + 1],
        "prefill_passes": [2, 2],
        "bad_pass": [-1, -1],
    }.items():
        np.testing.assert_array_equal(getattr(out, name), count, name)


def test_counts_with_a_bonus_by_hand():
    """Windows of 2 drafts and a bonus; the last one ends with its drafts.

    The drafter is the target, and says what the target says of every draft: its cache
    is right behind full acceptance and behind rejects.
    """
    target = toy_target(GRID, CODES, 2)
    method = Speculative(target, 2, first_two_of_the_first_image)

    @jax.jit
    def look(target, method, state):
        old, _ = method.propose(state)
        _, verdict = jacobi.judge(target, old, rule=method.rule)
        cells = old.done[:, None] + jnp.arange(2)[None]
        return old.log_q, verdict.log_p[:, :2], cells < 12

    state = begin(method, target, keys_of(2))
    while not method.finished(state).all():
        log_q, log_p, inside = look(target, method, state)
        np.testing.assert_allclose(log_q[inside], log_p[inside], atol=1e-4)
        state = advance(method, target, state, np.int32(1))
    out = method.decoded(state)
    np.testing.assert_array_equal(out.origin[0], origins("daabaabaabaa"))
    np.testing.assert_array_equal(out.origin[1], origins("drrrrrrrrrrr"))
    np.testing.assert_array_equal(out.target_passes, [4, 11])
    np.testing.assert_array_equal(out.drafted, [8, 10 * 2 + 1])


# Ragged progress.


def test_neither_image_waits_for_the_other():
    """Greedy; image 0's drafter sees what the target sees, image 1's something else.

    So much else, that it is never right. Together in chunks, alone in one loop.
    """
    target = toy_target(GRID, CODES, 2, temperature=0)
    other = 3 * toy.conditions(target.model.config, 1, seed=55)[0]
    draft = replace(target, condition=target.condition.at[1].set(other))
    method, keys = Speculative(draft, 4), keys_of(2)
    state = begin(method, target, keys)
    while not method.finished(state).all():
        state = advance(method, target, state, np.int32(2))
    together = method.decoded(state)
    np.testing.assert_array_equal(together.target_passes, [3, 11])
    np.testing.assert_array_equal(together.count(ACCEPTED), [9, 0])
    for i in (0, 1):
        one, alone = toy.take(target, [i]), toy.take(method, [i])
        got = toy.decode_jitted(alone, one, keys[i : i + 1])
        assert_same(got, jax.tree.map(lambda x, i=i: x[i : i + 1], together))


def test_eagerly():
    """One round: every operation is compiled by itself."""
    target, keys = toy_target((1, 3), 3, depth=1), keys_of(1)
    method = Speculative(target, 2)
    got = decode_eagerly(method, target, keys)
    assert_same(got, toy.decode_jitted(method, target, keys))


# Rules, and what is refused.


def test_a_rule_of_ones_own_compiles_once():
    def rule(log_p, log_q, drafts, codes):
        return jnp.zeros(drafts.shape)

    target = toy_target((1, 2), 3)
    toy.decode_jitted(SJD(2, rule=rule), target, keys_of(1))
    with toy.compilations() as compiled:
        out = toy.decode_jitted(SJD(2, rule=rule), target, keys_of(1))
    assert compiled == []
    np.testing.assert_array_equal(out.origin, [[[DRAWN, RESAMPLED]]])


def test_what_does_not_fit_is_refused():
    target = toy_target(GRID, CODES, 2)
    for draft, message in [
        (toy_target((4, 3), CODES, 2), r"the target's grid, \(3, 4\), not \(4, 3\)"),
        (toy_target(GRID, 9, 2), "the target's number of codes, 12, not 9"),
        (toy_target(GRID, CODES, 1), "the target's batch of conditions, 2, not 1"),
        ("emoji", "draft must be a Target of its own, .* not 'emoji'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Speculative(draft).start(target, keys_of(2))
    with pytest.raises(ValueError, match="length must be 1 or more, not 0"):
        Speculative(target, 0)
    with pytest.raises(ValueError, match="define it once with def"):
        Speculative(target, rule=lambda log_p, log_q, drafts, codes: 1.0)


def test_a_drafter_that_breaks_is_noted():
    """It fails at cell 6, which image 0 drafts in the second round, 1 in the third."""
    target = toy_target(GRID, CODES, 2)
    weights = jax.tree.map(lambda x: x, target.params)
    table = weights["params"]["position_embedding"]
    weights["params"]["position_embedding"] = table.at[4 + 5].set(
        jnp.nan
    )  # fed for cell 6
    draft = replace(target, params=weights)
    method = Speculative(draft, 4, first_two_of_the_first_image)
    out = toy.decode_jitted(method, target, keys_of(2))
    np.testing.assert_array_equal(out.bad_pass, [2, 3])
