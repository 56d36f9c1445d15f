"""What each method promises beside exactness: counts and independence of images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.acceptance import Grouped, Ratio, residual
from jaxspec.decoding import ACCEPTED, BONUS, DRAWN, RESAMPLED, Target, wavefront
from jaxspec.methods import AR, GSD, SCD, SJD, Speculative, ZipAR
from jaxspec.models.transformer import Transformer
from jaxspec.sampling import Sampling, image_key
from jaxspec.testing import keys_of, toy_target
from tests import parity, toy

METHODS = [
    AR(),
    SJD(5),
    SCD(4),
    SCD(4, coupling="gumbel"),
    GSD(5),
    ZipAR(2),
    Speculative(toy_target((3, 4), 12, 4, seed=1), 3),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_cell_comes_from_somewhere_once(method):
    target = toy_target((3, 4), 12, 4, guidance=2.0)
    out = toy.decode_jitted(method, target, keys_of(4))
    parts = [out.count(o) for o in (DRAWN, ACCEPTED, RESAMPLED, BONUS)]
    np.testing.assert_array_equal(sum(parts), 12)
    np.testing.assert_array_equal(out.final_pass.max((1, 2)), out.target_passes)
    assert (out.drafted >= out.count(ACCEPTED)).all()
    assert (out.bad_pass == -1).all()
    if not isinstance(method, AR | ZipAR):
        # Every pass settles one that was not drafted; the last may end with drafts.
        bonus = out.count(RESAMPLED) + out.count(BONUS)
        assert ((bonus == out.target_passes) | (bonus == out.target_passes - 1)).all()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_no_image_depends_on_its_neighbours(method):
    target = toy_target((3, 4), 12, 4, guidance=2.0)
    keys = keys_of(4)
    together = toy.decode_jitted(method, target, keys)
    for i in (0, 3):
        one, alone = toy.take(target, [i]), toy.take(method, [i])
        got = toy.decode_jitted(alone, one, keys[i : i + 1])
        want = jax.tree.map(lambda x, i=i: x[i : i + 1], together)
        jax.tree.map(np.testing.assert_array_equal, got, want)


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
