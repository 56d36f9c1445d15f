"""Proofs on toys: who is exact, who is biased, and that the checks can fail."""

from dataclasses import dataclass, field, replace
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxspec.acceptance import Cooled, Grouped, Ratio, residual
from jaxspec.decoding import Target, method_class
from jaxspec.methods import (
    AR,
    GSD,
    PJD,
    SCD,
    SJD,
    Addition,
    Amplify,
    Speculative,
    ZipAR,
    speculative,
)
from jaxspec.methods.upsampled import Upsampled
from jaxspec.sampling import Sampling, draw, keep_top_k
from jaxspec.testing import (
    divergence,
    enumerate_grids,
    exact_check,
    keys_of,
    toy_target,
)
from jaxspec.upsampling import Nearest
from tests import toy

ROW, COLUMN, BLOCK = (1, 6), (6, 1), (2, 3)
TOP_K = {"temperature": 0.8, "guidance": 1.5, "top_k": 2}
TOP_P = {"temperature": 1.2, "guidance": 0.5, "guided_cells": 3, "top_p": 0.8}


def drafter(grid, codes=3, batch=1, **sampling):
    """Knows nothing of the target: other weights, size, condition."""
    return toy_target(grid, codes, batch, seed=1, width=8, depth=1, **sampling)


def small(grid):
    """Drafts of another grid."""
    return Upsampled(drafter(grid), Nearest(), AR())


EXACT = [
    (AR(), ROW, {}),
    (AR(), BLOCK, TOP_K),
    (SJD(window=3), BLOCK, {}),
    (SJD(window=9, initial="repeat-left"), ROW, TOP_P),
    (SJD(window=2, initial="repeat-above"), COLUMN, TOP_K),
    (SJD(window=3, initial="sample-left"), COLUMN, {}),
    (SJD(window=4, initial="sample-above"), BLOCK, TOP_K),
    (SCD(window=3), BLOCK, TOP_P),
    (SCD(window=3, coupling="gumbel", initial="sample-left"), COLUMN, TOP_K),
    (SCD(window=4, coupling="gumbel", initial="repeat-above"), BLOCK, {}),
    (SJD(window=4, initial="upsampled", upsampled=small((1, 3))), BLOCK, TOP_P),
    (SCD(window=7, initial="upsampled", upsampled=small((2, 1))), BLOCK, {}),
    (PJD(3, 3, "maximal", "upsampled", upsampled=small((1, 1))), BLOCK, TOP_K),
    (ZipAR(window=3), BLOCK, {}),  # a whole row
    (Speculative(drafter(BLOCK), length=2), BLOCK, {}),
    (Speculative(drafter(ROW, top_p=0.7), length=8), ROW, TOP_K),
    (Speculative(drafter(COLUMN, temperature=0), length=3), COLUMN, TOP_P),
]


@pytest.mark.parametrize(("method", "grid", "sampling"), EXACT, ids=str)
def test_exact_methods_draw_every_grid_as_often_as_they_should(method, grid, sampling):
    check = exact_check(method, toy_target(grid, 3, **sampling))
    assert check.passed, check


BIASED = [
    (Amplify(window=3, k=4.0), (4, 1)),
    (Addition(window=3, c=0.5), (2, 2)),
    (GSD(window=3, max_difference=1.0), (1, 4)),
    (SJD(window=3, rule=Cooled(delta=2.0)), (2, 2)),
    (ZipAR(window=1), (2, 2)),  # rows overlap
]


@pytest.mark.parametrize(("method", "grid"), BIASED, ids=str)
def test_biased_methods_show_their_bias(method, grid):
    check = exact_check(method, toy_target(grid, 4))
    assert check.distance > 1.5 * check.threshold, check


# The checks can fail.


@dataclass(frozen=True)
class KeepAll:
    def __call__(self, log_p, log_q, drafts, codes=None):
        return jnp.ones(drafts.shape)


@dataclass(frozen=True)
class NoResidual(Ratio):
    """A reject is replaced from p itself."""

    def residual(self, log_p, log_q, place):
        return log_p


@dataclass(frozen=True)
class Soft(Ratio):
    """A chosen draft is judged as if it had been drawn evenly."""

    def soft(self, log_q):
        chosen = jnp.any(log_q == 0, axis=-1, keepdims=True)
        return jnp.where(chosen, -jnp.log(log_q.shape[-1]), log_q)

    def __call__(self, log_p, log_q, drafts, codes=None):
        return super().__call__(log_p, self.soft(log_q), drafts)

    def residual(self, log_p, log_q, place):
        return residual(log_p, self.soft(log_q))


@method_class
class Unfiltered(Speculative):
    """Drafts are drawn after top-k and judged by the density before."""

    def propose(self, state):
        filtered = lambda keys, log_q: draw(keys, keep_top_k(log_q, 2))
        with mock.patch.object(speculative, "draw", filtered):
            return super().propose(state)


@method_class
class Faulty(Speculative):
    """Sees the target through a faulty one."""

    fault: type = Target

    def step(self, target, state):
        return super().step(self.fault(**vars(target)), state)


class WritesOnce(Target):
    """A rejected draft stays in the cache: no slot is written again."""

    def follow(self, cache, tokens, cells, write, visible):
        filled = jnp.any(cache.keys[0] != 0, axis=(1, 3))
        filled = filled[:, self.model.config.prefix_length :]
        write &= ~jnp.take_along_axis(filled, cells, axis=1)
        return super().follow(cache, tokens, cells, write, visible)


class EarlyBonus(Target):
    """The bonus is drawn from the distribution of the cell before."""

    def follow(self, cache, tokens, cells, write, visible):
        log_p, cache = super().follow(cache, tokens, cells, write, visible)
        return log_p.at[:, -1].set(log_p[:, -2]), cache


@method_class
class Elsewhere(AR):
    """Draws with settings of its own."""

    sampling: Sampling = field(metadata={"arrays": True})

    def start(self, target, keys):
        return super().start(replace(target, sampling=self.sampling), keys)

    def step(self, target, state):
        return super().step(replace(target, sampling=self.sampling), state)


FAULTS = [
    Speculative(drafter(BLOCK), 2, KeepAll()),
    Speculative(drafter(BLOCK), 2, NoResidual()),
    SJD(window=3, initial="repeat-left", rule=Soft()),
    Unfiltered(drafter(BLOCK), 2),
    Faulty(drafter(BLOCK), 2, fault=WritesOnce),
    Faulty(drafter(BLOCK), 2, fault=EarlyBonus),
    Elsewhere(Sampling(temperature=1.15)),
]


@pytest.mark.parametrize("method", FAULTS, ids=str)
def test_the_check_sees_what_is_wrong(method):
    check = exact_check(method, toy_target(BLOCK, 3))
    assert check.distance > 1.2 * check.threshold, check


def test_toys_depend_on_what_came_before():
    """Cells drawn each by itself would be far off."""
    joint = enumerate_grids(toy_target(BLOCK, 3)).reshape([3] * 6)
    apart = np.ones([3] * 6)
    for cell in range(6):
        others = tuple(i for i in range(6) if i != cell)
        apart = apart * joint.sum(others, keepdims=True)
    np.testing.assert_allclose(joint.sum(), 1, rtol=1e-6)
    assert 0.5 * np.abs(joint - apart).sum() > 0.3


def test_what_cannot_be_checked_is_refused():
    for call, message in [
        (lambda: enumerate_grids(toy_target((3, 4), 12)), "8,916,100,448,256 grids"),
        (lambda: enumerate_grids(toy_target((1, 2), 3, 5)), "the target has 5"),
        (lambda: exact_check(AR(), images=20), "20 images are too few"),
        (lambda: exact_check(AR), "method must be one such as"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_broken_method_is_no_method():
    target = toy_target(ROW, 3)
    weights = jax.tree.map(lambda x: x * jnp.nan, target.params)
    with pytest.raises(RuntimeError, match="NaN"):
        exact_check(AR(), replace(target, params=weights))


# GSD's theorem 1.


def distributions(size: int):
    weights = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    return weights.filter(any).map(lambda x: np.array(x, np.float32) / sum(x))


@jax.jit
def chances(p, q, labels):
    """How often each code is kept: by the group of its label, and alone."""
    v = len(p)
    log_p, log_q = (jnp.broadcast_to(jnp.log(x), (1, v, v)) for x in (p, q))
    every = jnp.arange(v)[None]
    groups = Grouped(below=v, above=v, max_difference=2.0, max_distance=0.5)
    return groups(log_p, log_q, every, labels[:, None])[0], Ratio()(
        log_p, log_q, every
    )[0]


@settings(max_examples=200, deadline=None)
@given(
    distributions(6),
    distributions(6),
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
)
def test_groups_that_are_a_partition_never_keep_less(p, q, labels):
    grouped, alone = chances(p, q, jnp.array(labels, jnp.float32))
    grouped, alone = np.sum(q * grouped), np.sum(q * alone)
    labels = np.array(labels)
    masses = [min(p[labels == c].sum(), q[labels == c].sum()) for c in range(6)]
    np.testing.assert_allclose(grouped, sum(masses), atol=1e-5)
    np.testing.assert_allclose(alone, np.minimum(p, q).sum(), atol=1e-5)
    assert grouped >= alone - 1e-5


# Greedy.

TALL = (5, 3)


@pytest.mark.parametrize(
    "method",
    [
        SJD(window=5, initial="repeat-above"),
        SJD(window=4, initial="sample-above"),
        SCD(window=4),
        SCD(window=20, coupling="gumbel"),
        ZipAR(window=3),
        Speculative(drafter(TALL, 12, 4), 4),
    ],
    ids=str,
)
def test_greedy_is_ar_and_independent_of_the_seed(method):
    target = toy_target(TALL, 12, 4, temperature=0)
    want = toy.decode_jitted(AR(), target, keys_of(4))
    got = toy.decode_jitted(method, target, keys_of(4, seed=1))
    found = divergence(got, want, target)
    assert found.explained(1e-4), found


def test_divergence_against_decoding():
    """The margin is that of the distribution that decoding sees at the first cell."""
    target = toy_target((2, 2), 5, 3, guidance=2.0)
    a = jnp.array([[0, 1, 2, 3]] * 3)
    b = a.at[0, 2].set(4).at[0, 3].set(0).at[1, 0].set(3)
    first, cache = target.prefill()
    cells = jnp.broadcast_to(jnp.arange(4), (3, 4))
    seen = cells[:, None] <= cells[..., None]
    log_p, _ = target.follow(cache, a, cells, cells >= 0, seen)
    gap = lambda p, *codes: float(p.max() - min(p[c] for c in codes))
    margin = [gap(log_p[0, 1], 2, 4), gap(first[1], 0, 3), 0]
    found = divergence(a.reshape(3, 2, 2), b.reshape(3, 2, 2), target)
    np.testing.assert_array_equal(found.cell, [2, 0, -1])
    np.testing.assert_allclose(found.margin, margin, atol=1e-4)
    assert found.explained(max(margin) + 1e-3)
    assert not found.explained(max(margin) - 1e-3)
    assert str(found).startswith("2 of 3 images differ; image ")
    with pytest.raises(ValueError, match=r"must be \[3, 2, 2\], not \[3, 4\]"):
        divergence(a, b, target)
    with pytest.raises(ValueError, match="from 0 to 4"):
        divergence(a.reshape(3, 2, 2), b.reshape(3, 2, 2) + 1, target)
