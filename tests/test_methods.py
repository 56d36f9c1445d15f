"""What each method promises, on toys: exactness, bias, counts, and independence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.acceptance import Grouped, Ratio, residual
from jaxspec.decoding import ACCEPTED, BONUS, DRAWN, RESAMPLED, Target, wavefront
from jaxspec.methods import AR, GSD, SCD, SJD, Addition, Amplify, ZipAR
from jaxspec.models.transformer import Transformer
from jaxspec.sampling import Sampling, image_key
from tests import parity, toy
from tests.test_decoding import distance, enumerated, keys_of, noise, one_condition

COUNT = 20_000


def frequencies(method, target) -> np.ndarray:
    """How often each grid comes among COUNT images of one condition."""
    out = toy.decode_jitted(method, one_condition(target, COUNT), keys_of(COUNT))
    tokens = np.asarray(out.tokens).reshape(COUNT, -1)
    codes = target.model.config.vocab_size
    places = codes ** np.arange(tokens.shape[1])[::-1]
    return np.bincount(tokens @ places, minlength=codes ** tokens.shape[1]) / COUNT


SETTINGS = {"temperature": 0.8, "guidance": 1.5, "top_k": 3}


@pytest.mark.parametrize(
    "method",
    [
        SJD(window=3),
        SJD(window=2, initial="repeat-left"),
        SJD(window=9, initial="sample-above"),
        SCD(window=3),
        SCD(window=4, coupling="gumbel", initial="repeat-above"),
        SCD(window=3, coupling="gumbel", initial="sample-left"),
        ZipAR(window=2),  # a whole row
    ],
    ids=str,
)
def test_exact_methods_draw_every_grid_as_often_as_they_should(method):
    target = toy.target(toy.transformer((3, 2), 3), 1, **SETTINGS)
    want = enumerated(target, **SETTINGS)
    assert distance(frequencies(method, target), want) < noise(want, COUNT)


@pytest.mark.parametrize(
    "method",
    [
        Amplify(window=3, k=4.0),
        Addition(window=3, c=0.5),
        GSD(window=3, max_difference=1.0),
    ],
)
def test_biased_methods_show_their_bias(method):
    target = toy.target(toy.transformer((2, 2), 4), 1)
    want = enumerated(target)
    assert distance(frequencies(method, target), want) > 1.5 * noise(want, COUNT)


def test_zipar_is_biased_where_rows_overlap():
    target = toy.target(toy.transformer((2, 3), 3), 1)
    want = enumerated(target)
    biased = frequencies(ZipAR(window=1), target)
    assert distance(biased, want) > 1.5 * noise(want, COUNT)


METHODS = [AR(), SJD(5), SCD(4), SCD(4, coupling="gumbel"), GSD(5), ZipAR(2)]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_cell_comes_from_somewhere_once(method):
    target = toy.target(toy.transformer((3, 4), 12), 4, guidance=2.0)
    out = toy.decode_jitted(method, target, keys_of(4))
    parts = [out.count(o) for o in (DRAWN, ACCEPTED, RESAMPLED, BONUS)]
    np.testing.assert_array_equal(sum(parts), 12)
    np.testing.assert_array_equal(out.final_pass.max((1, 2)), out.target_passes)
    assert (out.drafted >= out.count(ACCEPTED)).all()
    assert (out.bad_pass == -1).all()
    if isinstance(method, SJD):  # every pass after the prefill settles one undrafted
        bonus = out.count(RESAMPLED) + out.count(BONUS)
        assert ((bonus == out.target_passes) | (bonus == out.target_passes - 1)).all()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_no_image_depends_on_its_neighbours(method):
    target = toy.target(toy.transformer((3, 4), 12), 4, guidance=2.0)
    keys = keys_of(4)
    together = toy.decode_jitted(method, target, keys)
    for i in (0, 3):
        one = Target.create(
            target.model,
            target.params,
            target.condition[i : i + 1],
            target.sampling,
            codes=target.codes,
        )
        alone = toy.decode_jitted(method, one, keys[i : i + 1])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])
        assert alone.target_passes[0] == together.target_passes[i]


@pytest.mark.parametrize("method", [SJD(5), SCD(4), SCD(4, coupling="gumbel")], ids=str)
def test_greedy_is_ar_and_independent_of_the_seed(method):
    target = toy.target(toy.transformer((3, 4), 12), 4, temperature=0)
    want = toy.decode_jitted(AR(), target, keys_of(4)).tokens
    for seed in (0, 1):
        got = toy.decode_jitted(method, target, keys_of(4, seed))
        np.testing.assert_array_equal(got.tokens, want)


def rows_and_passes(h: int, w: int, method: ZipAR) -> int:
    """Passes of the schedule alone, prefill included."""
    pending = jnp.ones((1, h, w), bool).at[:, 0, 0].set(False)

    @jax.jit
    def after(p):
        return p & ~wavefront.ready(p, method.window, method.first_row_alone)

    passes = 1
    while pending.any():
        pending, passes = after(pending), passes + 1
    return passes


@pytest.mark.parametrize(
    ("side", "window", "released"),
    [(24, 8, 224), (24, 16, 400), (32, 16, 544), (64, 16, 1120)],
)
def test_zipar_passes(side, window, released):
    assert rows_and_passes(side, side, ZipAR(window, True)) == released
    ideal = side + (side - 1) * window
    assert rows_and_passes(side, side, ZipAR(window)) == ideal


def test_released_zipar_token_for_token():
    """Recorded outputs of the published LlamaGen decoder, greedy."""
    recorded = parity.published("zipar_released_tiny")
    model, expected = Transformer(recorded.config), recorded.expected
    names = [n.removeprefix("tokens_") for n in expected if n.startswith("tokens_")]
    assert len(names) == 12
    for name in names:
        window, guidance, label = (
            float(part.lstrip("wcfglas")) for part in name.split("_")
        )
        sampling = Sampling.create(96, temperature=0, guidance=guidance)
        condition = np.array([int(label)])
        target = Target.create(model, recorded.params, condition, sampling)
        method = ZipAR(int(window), first_row_alone=True, unfilled="zero")
        out = toy.decode_jitted(method, target, image_key(0, 0, 0)[None])
        np.testing.assert_array_equal(
            np.asarray(out.tokens).ravel(), expected[f"tokens_{name}"], name
        )
        assert out.target_passes[0] + 1 == expected[f"passes_{name}"], name


# Rules, by hand.

P = jnp.log(jnp.array([[[0.5, 0.3, 0.15, 0.05]]]))
Q = jnp.log(jnp.array([[[0.1, 0.4, 0.25, 0.25]]]))


def chance(rule, draft, codes=None):
    return float(rule(P, Q, jnp.array([[draft]]), codes)[0, 0])


def test_ratio_and_residual_by_hand():
    got = [chance(Ratio(), i) for i in range(4)]
    np.testing.assert_allclose(got, [1, 0.75, 0.6, 0.2], rtol=1e-5)
    np.testing.assert_allclose(jnp.exp(residual(P, Q)), [[[1, 0, 0, 0]]], atol=1e-6)
    np.testing.assert_allclose(residual(P, P), P)


def test_groups_by_hand():
    near = Grouped(below=1, above=1, max_difference=1.0, max_distance=1.0)
    # Code 1: with 2 below and 0 above, 0.95 / 0.75.
    assert chance(near, 1) == 1
    # Code 3 is last: only 2 above it, 0.2 / 0.5.
    np.testing.assert_allclose(chance(near, 3), 0.4, rtol=1e-5)
    # Code 2: 1 and 3 beside it, 0.5 / 0.9; code 1 differs by 0.15, code 3 by 0.1.
    np.testing.assert_allclose(chance(near, 2), 0.5 / 0.9, rtol=1e-5)
    strict = Grouped(1, 1, max_difference=0.12, max_distance=1.0)
    np.testing.assert_allclose(chance(strict, 2), 0.2 / 0.5, rtol=1e-5)
    # Code 3 lies far from code 2.
    codes = jnp.array([[0.0], [0.1], [0.2], [2.0]])
    np.testing.assert_allclose(chance(near, 2, codes), 0.45 / 0.65, rtol=1e-5)


def test_groups_of_one_are_the_ratio():
    alone = Grouped(0, 0, 1.0, 1.0)
    for draft in range(4):
        np.testing.assert_allclose(chance(alone, draft), chance(Ratio(), draft))
