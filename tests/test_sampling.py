"""Sampling rules and keys, by hand and against plain loops."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxspec import sampling
from jaxspec.sampling import (
    Sampling,
    cell_keys,
    draw,
    guide,
    image_key,
    keep_top_k,
    keep_top_p,
    likeliest,
    log_probs,
)
from tests.toy import compilations

V = 7
log_probs_jitted = jax.jit(log_probs)


def probabilities(logits, vocab: int | None = None, **choices) -> np.ndarray:
    logits = jnp.asarray(logits, jnp.float32)
    sampling = Sampling.create(vocab or logits.shape[-1], **choices)
    return np.exp(log_probs_jitted(logits, sampling))


def softmax(x) -> np.ndarray:
    x = np.exp(np.asarray(x, np.float64) - np.max(x))
    return x / x.sum()


def test_temperature_then_top_k_then_top_p():
    """Probabilities (.5, .3, .2) at temperature 1/2 is (25, 9, 4) / 38.

    Of these top-k 2 leaves (25, 9) / 34, the first of which passes 0.7; before
    temperature or before top-k it would not.
    """
    logits = np.log([0.2, 0.5, 0.3])
    got = probabilities(logits, temperature=0.5)
    np.testing.assert_allclose(got, np.array([4, 25, 9]) / 38, rtol=1e-5)
    got = probabilities(logits, temperature=0.5, top_k=2)
    np.testing.assert_allclose(got, [0, 25 / 34, 9 / 34], rtol=1e-5)
    got = probabilities(logits, temperature=0.5, top_k=2, top_p=0.7)
    np.testing.assert_allclose(got, [0, 1, 0], rtol=1e-5)
    for one_less in ({"top_k": 2}, {"temperature": 0.5}):
        assert (probabilities(logits, top_p=0.7, **one_less) > 0).sum() == 2


@pytest.mark.parametrize(
    ("scale", "want"),
    [(0.0, [5.0, -1.0]), (0.5, [3.0, 1.0]), (3.0, [-7.0, 11.0])],
)
def test_guidance_by_hand(scale, want):
    """With c = (1, 3) and u = (5, -1), 0 is u, 1/2 lies between, 3 is beyond c."""
    pair = jnp.array([[[1.0, 3.0]], [[5.0, -1.0]]])
    sampling = Sampling.create(2, guidance=scale)
    assert sampling.rows == 2
    got = guide(pair, jnp.zeros((1, 1), jnp.int32), sampling)
    np.testing.assert_allclose(got, [[want]], rtol=1e-6)


def test_guidance_off_is_one_conditional_row():
    sampling = Sampling.create(2, guidance=1.0, guided_cells=3)
    assert sampling == Sampling() and sampling.rows == 1
    logits = jnp.array([[[1.0, 3.0]], [[5.0, -1.0]]])
    got = guide(logits, jnp.zeros((2, 1), jnp.int32), sampling)
    np.testing.assert_array_equal(got, logits)


def test_guided_cells_are_the_first_and_the_others_exactly_conditional():
    pair = jnp.array([[[0.1, 0.2]] * 3, [[0.3, 1e7]] * 3], jnp.float32)
    sampling = Sampling.create(2, guidance=2.0, guided_cells=2)
    got = guide(pair, jnp.array([[1, 2, 3]]), sampling)
    np.testing.assert_allclose(got[0, 0], [-0.1, -1e7], rtol=1e-6)
    # u + (c - u) would have lost the 0.2.
    np.testing.assert_array_equal(got[0, 1:], pair[0, 1:])


def test_guidance_that_rises():
    """From 1 at the first cell to 5 at the fifth, and no further."""
    pair = jnp.array([[[1.0, 3.0]] * 4, [[2.0, 2.0]] * 4])
    sampling = Sampling.create(2, guidance=5.0, ramp_cells=4)
    got = guide(pair, jnp.array([[0, 1, 4, 9]]), sampling)
    want = [[2 - s, 2 + s] for s in (1, 2, 5, 5)]
    np.testing.assert_allclose(got, [want], rtol=1e-6)
    both = replace(sampling, guided_cells=4)
    got = guide(pair, jnp.array([[0, 1, 4, 9]]), both)
    want = [[2 - s, 2 + s] for s in (1, 2, 1, 1)]
    np.testing.assert_allclose(got, [want], rtol=1e-6)
    assert Sampling.create(2, guidance=1.0, ramp_cells=4) == Sampling()


def test_top_k_keeps_those_tied_with_the_kth():
    got = probabilities([1.0, 3.0, 2.0, 2.0, 0.0], top_k=2)
    np.testing.assert_allclose(got, [0, *softmax([3, 2, 2]), 0], rtol=1e-5)


def test_top_k_of_codes_already_out():
    out = -np.inf
    got = keep_top_k(jnp.array([out, 1.0, out, 2.0]), 3)
    np.testing.assert_array_equal(got, [out, 1.0, out, 2.0])


@pytest.mark.parametrize(
    ("p", "kept"), [(0.0, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 4), (0.9, 4)]
)
def test_top_p_keeps_the_code_that_passes_p(p, kept):
    """Probabilities (1/2, 1/4, 1/8, 1/8); tied codes come and go together."""
    want = np.array([0.125, 0.5, 0.125, 0.25])
    got = probabilities(np.log(want), top_p=p)
    least = np.sort(want)[::-1][kept - 1]
    want[want < least] = 0
    np.testing.assert_allclose(got, want / want.sum(), rtol=1e-5)


def test_argmax_is_a_distribution_of_one_code_whatever_the_key():
    logits = jnp.array([[[1.0, 4.0, 4.0, 0.0]]])
    log_p = log_probs(logits, Sampling.create(4, temperature=0, top_k=1, top_p=0.1))
    np.testing.assert_array_equal(log_p[0, 0], [-np.inf, 0, -np.inf, -np.inf])
    keys = jax.random.split(image_key(0, 0, 0), 50)[None]
    codes = draw(keys, jnp.broadcast_to(log_p, (1, 50, 4)))
    assert codes.dtype == jnp.int32
    np.testing.assert_array_equal(codes, 1)


def test_the_likeliest_is_the_first_of_the_largest():
    logits = np.random.default_rng(0).integers(0, 3, (4, 50, 7)).astype(np.float32)
    logits[logits == 0] = -np.inf
    logits[0, 0] = -np.inf
    got = likeliest(jnp.asarray(logits))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-8, 1e-37, 1e-60])
def test_tiny_temperatures_are_nearly_argmax(temperature):
    got = probabilities([100.0, -100.0, 99.9], temperature=temperature)
    np.testing.assert_array_equal(got, [1, 0, 0])


def test_top_k_of_more_codes_than_there_are_is_said_and_all():
    with pytest.warns(UserWarning, match="top_k 9 is more than the 7 codes"):
        assert Sampling.create(V, top_k=9).top_k is None
    assert Sampling.create(V, top_k=V).top_k is None
    assert Sampling.create(V, top_k=0, top_p=1.0) == Sampling()


@pytest.mark.parametrize(
    "choice",
    [
        {name: value}
        for name in (
            "temperature",
            "guidance",
            "top_k",
            "top_p",
            "guided_cells",
            "ramp_cells",
        )
        for value in (-1, -1e-9, float("nan"), float("inf"), 1e39, "many")
    ]
    + [{"top_p": 1.1}, {"top_k": 1.5}, {"guided_cells": 0.5}, {"ramp_cells": -2}],
    ids=str,
)
def test_numbers_out_of_range_are_refused(choice):
    (name,) = choice
    with pytest.raises(ValueError, match=f"^{name} must be [^\n]*$"):
        Sampling.create(V, **choice)


def test_numpy_numbers_are_numbers():
    got = Sampling.create(V, temperature=np.float32(0.5), top_k=np.int64(3))
    assert got == Sampling(temperature=0.5, top_k=3)
    assert type(got.temperature) is float and type(got.top_k) is int


def test_top_k_of_many_codes_is_that_of_sorting_and_keeps_ties():
    rng = np.random.default_rng(0)
    logits = np.round(4 * rng.normal(size=(2, 3, 3001)).astype(np.float32), 1)
    logits[0] *= 0.37  # and few ties, many bits
    logits[1, 0, :2990] = -np.inf  # fewer than k are left
    for k in (1, 20, 1000):
        kth = np.sort(logits, axis=-1)[..., -k, None]
        want = np.where(logits >= kth, logits, -np.inf)
        np.testing.assert_array_equal(keep_top_k(logits, k), want)


def test_a_few_cells_at_once_are_what_all_are(monkeypatch):
    """13 cells, by fives of which the last overlap; both to the bit."""
    logits = 3 * jax.random.normal(jax.random.key(0), (2, 13, 40))
    logits = logits.at[0, 4, 3].set(jnp.nan).at[1, 12].set(-jnp.inf)
    cells = jnp.tile(jnp.arange(13), (2, 1))
    keys = cell_keys(jnp.stack([image_key(0, 0, i) for i in range(2)]), cells)
    choices = Sampling.create(40, temperature=0.7, top_k=30, top_p=0.9)

    def found(at_once):
        monkeypatch.setattr(sampling, "AT_ONCE", at_once)
        log_p = jax.jit(lambda x: log_probs(x, choices))(logits)
        return log_p, jax.jit(lambda k, p: draw(k, p))(keys, log_p)

    for all_, parts in zip(found(1 << 20), found(2 * 5 * 40), strict=True):
        np.testing.assert_array_equal(all_, parts)


def test_noise_is_left_out_only_where_it_changes_nothing():
    keys = jax.random.split(image_key(0, 0, 0), 30)[None]
    one = jnp.where(jnp.arange(8) == 5, 0.0, -jnp.inf)
    certain = jnp.broadcast_to(one, (1, 30, 8))
    np.testing.assert_array_equal(jax.jit(draw)(keys, certain), 5)
    even = jnp.log(jnp.full((1, 30, 8), 1 / 8))
    some = jnp.where(jnp.arange(30)[None, :, None] == 2, even, certain)
    drawn = jax.jit(draw)
    want, got = drawn(keys, even), drawn(keys, some)
    assert want[0, 2] not in (0, 5)  # what no noise would draw
    np.testing.assert_array_equal(got, jnp.full((1, 30), 5).at[0, 2].set(want[0, 2]))


def slow_probabilities(logits, temperature, top_k, top_p) -> np.ndarray:
    """The rules with loops over sorted codes, in float64."""
    logits = logits.astype(np.float64) / temperature
    order = np.argsort(-logits, kind="stable")
    kept = logits >= logits[order[top_k - 1]]
    p = softmax(np.where(kept, logits, -np.inf))
    total, last = 0.0, order[0]
    for code in order:
        last = code
        total += p[code]
        if total > top_p:
            break
    p[logits < logits[last]] = 0
    return p / p.sum()


# Halves and -inf: sums of them are exact, and ties are common.
logit = st.one_of(st.integers(-8, 8).map(lambda x: x / 2), st.just(-np.inf))


@settings(max_examples=200, deadline=None)
@given(
    arrays.arrays(np.float32, V, elements=logit).filter(lambda x: x.max() > -np.inf),
    st.sampled_from([0.25, 1.0, 2.0]),
    st.integers(1, V - 1),
    st.floats(0, 0.99),
)
def test_against_loops_and_a_code_always_survives(logits, temperature, top_k, top_p):
    got = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert got.max() > 0 and not got[logits == -np.inf].any()
    np.testing.assert_allclose(got.sum(), 1, rtol=1e-5)
    want = slow_probabilities(logits, temperature, top_k, top_p)
    close = abs(np.cumsum(np.sort(want)[::-1]) - top_p).min() < 1e-5
    if not close:  # of two codes on the edge, rounding decides
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("choices", [{"temperature": 0}, {"top_k": 2, "top_p": 0.9}])
def test_what_is_no_number_makes_its_row_nan(bad, choices):
    logits = np.zeros((3, 4), np.float32)
    logits[0, 2], logits[1] = bad, -np.inf  # and so does a row without a code
    got = probabilities(logits, **choices)
    assert np.isnan(got[:2]).all()
    np.testing.assert_allclose(got[2].sum(), 1, rtol=1e-6)


def test_numbers_are_inputs_and_steps_are_structure():
    run = jax.jit(log_probs)
    logits = jnp.arange(4.0)
    run(logits, Sampling.create(4, temperature=0.5, top_k=2, top_p=0.9))
    with compilations() as compiled:
        run(logits, Sampling.create(4, temperature=2.0, top_k=3, top_p=0.1))
    assert compiled == []
    with compilations() as compiled:
        run(logits, Sampling.create(4, temperature=0.5, top_k=2))
    assert len(compiled) == 1


# Keys.


def test_keys_depend_on_seed_prompt_and_number():
    ids = [(seed, prompt, i) for seed in (0, 1) for prompt in (0, 1) for i in (0, 1)]
    ids += [(2**32 - 1, 0, 0), (2**31, 0, 0), (0, 2**32 - 1, 0)]
    keys = [tuple(jax.random.key_data(image_key(*i)).tolist()) for i in ids]
    assert len(set(keys)) == len(ids)


def test_keys_are_threefry_whatever_the_default():
    want = jax.random.key_data(image_key(3, 1, 4))
    assert want.shape == (2,)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(jax.random.key_data(image_key(3, 1, 4)), want)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_that_change_under_vmap_are_refused(impl):
    cells = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="image_key"):
        cell_keys(jax.random.key(0, impl=impl)[None], cells)
    with pytest.raises(ValueError, match="image_key"):
        cell_keys(jax.random.PRNGKey(0)[None], cells)


def test_a_draw_depends_on_its_image_and_cell_alone():
    keys = jnp.stack([image_key(0, 0, i) for i in range(4)])
    cells = jnp.array([[5, 1, 3]] * 4)
    log_p = jnp.log(jnp.full((4, 3, 50), 1 / 50))
    codes = draw(cell_keys(keys, cells), log_p)
    assert len(set(codes.ravel().tolist())) > 6
    alone = draw(cell_keys(keys[2:3], cells[2:3, 1:2]), log_p[2:3, 1:2])
    assert alone[0, 0] == codes[2, 1]
    others = [
        cell_keys(keys, cells, purpose=1),
        cell_keys(keys, cells, attempt=jnp.full((4, 1), 1)),
    ]
    for other in others:
        assert (draw(other, log_p) == codes).mean() < 0.5


def test_draws_have_the_probabilities():
    """50,000 draws; a frequency strays five deviations once in a million runs."""
    p, n = np.array([0.5, 0.3, 0.15, 0.05, 0.0]), 50_000
    keys = cell_keys(image_key(0, 0, 0)[None], jnp.arange(n)[None])
    codes = draw(keys, jnp.broadcast_to(jnp.log(p), (1, n, 5)))
    got = np.bincount(np.ravel(codes), minlength=5) / n
    assert (abs(got - p) <= 5 * np.sqrt(p * (1 - p) / n)).all()


def test_top_p_alone_by_hand():
    got = keep_top_p(jnp.log(jnp.array([0.1, 0.6, 0.3])), 0.6)
    np.testing.assert_array_equal(jnp.isfinite(got), [False, True, True])
