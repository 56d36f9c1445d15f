"""The emoji family's measures, on inputs whose answers are known."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.emoji import data, metrics, minilm
from jaxspec.evaluation import efficientnet, measures

has_weights = all(
    importlib.util.find_spec(name) for name in (efficientnet.PACKAGE, minilm.PACKAGE)
)
needs_weights = pytest.mark.skipif(
    not has_weights, reason="weight packages are not installed (make train-deps)"
)


@pytest.fixture
def broadcast():
    """Lets the feature network add its channel vectors to pictures."""
    with jax.numpy_rank_promotion("allow"):
        yield


def with_moments(mean, covariance, count=200, seed=0):
    """Rows [count, D] whose sample mean and covariance are exactly those given."""
    x = np.random.default_rng(seed).normal(size=(count, len(mean)))
    x -= x.mean(0)
    whitened = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x.T))).T
    return whitened @ np.linalg.cholesky(covariance).T + mean


def test_frechet_distance_is_the_closed_form():
    # one axis each with (mean difference, standard deviations): d^2 + (s - t)^2, and a
    # rotation of both sets that changes nothing
    turn, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))
    a = with_moments([0, 0, 0], np.diag([1.0, 4.0, 9.0])) @ turn
    b = with_moments([2, 0, -1], np.diag([4.0, 4.0, 1.0]), 150, 2) @ turn
    assert metrics.frechet(a, b) == pytest.approx(4 + 1 + 1 + 0 + 4)
    assert metrics.frechet(a, a) == pytest.approx(0, abs=1e-9)


def test_frechet_distance_of_covariances_that_do_not_commute():
    s, t = np.array([[2.0, 1.0], [1.0, 2.0]]), np.diag([1.0, 4.0])
    # for 2 x 2 matrices, trace(root(M))^2 = trace(M) + 2 root(det(M))
    cross = np.sqrt(np.trace(s @ t) + 2 * np.sqrt(np.linalg.det(s @ t)))
    want = np.trace(s) + np.trace(t) - 2 * cross
    got = metrics.frechet(with_moments([0, 0], s), with_moments([0, 0], t, seed=1))
    assert got == pytest.approx(want)


def test_frechet_distance_refuses_too_few_pictures():
    with pytest.raises(ValueError, match="64 pictures are too few"):
        metrics.frechet(np.zeros((64, 64)), np.zeros((100, 64)))


def test_kernel_distance_is_unbiased():
    rng = np.random.default_rng(0)
    values = [
        metrics.kernel_distance(*rng.normal(size=(2, 100, 8)), rounds=1)[0]
        for _ in range(200)
    ]
    assert min(values) < 0 < max(values)
    mean, deviation = metrics.spread(values)
    assert abs(mean) < 3 * deviation / np.sqrt(len(values))


def test_kernel_distance_is_unbiased_for_pairs_too():
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(200, 100, 8))
    pairs = 0.6 * rng.normal(size=(2, 200, 100, 8)) + 0.8 * shared
    values = [
        metrics.kernel_distance(a, b, rounds=1)[0] for a, b in zip(*pairs, strict=True)
    ]
    mean, deviation = metrics.spread(values)
    assert abs(mean) < 3 * deviation / np.sqrt(len(values))


def test_kernel_distance_by_its_definition():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 100, 2)) + np.array([[[0.0]], [[0.5]]])
    kernel = lambda x, y: (x @ y / 2 + 1) ** 3  # noqa: E731
    terms = [
        kernel(a[i], a[j]) + kernel(b[i], b[j]) - 2 * kernel(a[i], b[j])
        for i in range(100)
        for j in range(100)
        if i != j
    ]
    value, error = metrics.kernel_distance(a, b)
    assert value == pytest.approx(np.mean(terms))
    assert 0 < error < value
    with pytest.raises(ValueError, match="at least 100 rows"):
        metrics.kernel_distance(a[:99], b[:99])


def test_recall_by_hand_with_ties():
    similarity = np.array(
        [
            [0.9, 0.1, 0.2, 0.3],  # best
            [0.9, 0.5, 0.1, 0.6],  # third
            [0.4, 0.4, 0.4, 0.1],  # one of three that share the first place
            [0.2, 0.2, 0.2, 0.2],  # nothing known
        ]
    )
    target = np.arange(4)
    np.testing.assert_allclose(
        measures.recall(similarity, target, 1), [1, 0, 1 / 3, 1 / 4]
    )
    np.testing.assert_allclose(
        measures.recall(similarity, target, 2), [1, 0, 2 / 3, 2 / 4]
    )
    np.testing.assert_allclose(measures.recall(similarity, target, 3), [1, 1, 1, 3 / 4])
    np.testing.assert_allclose(measures.recall(similarity, target, 9), 1)


def test_bootstrap_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    estimates = [metrics.bootstrap(rng.normal(size=100), 500) for _ in range(300)]
    covered = np.mean([e.low < 0 < e.high for e in estimates])
    assert 0.90 < covered < 0.98
    width = np.mean([e.high - e.low for e in estimates])
    assert width == pytest.approx(2 * 1.96 / 10, rel=0.05)
    assert metrics.bootstrap(np.ones(5)) == (1, 1, 1)


def test_spread_over_seeds():
    assert metrics.spread([1.0, 2.0, 3.0]) == (2.0, 1.0)
    with pytest.raises(ValueError, match="two seeds"):
        metrics.spread([1.0])


def toy_match():
    """Texts that are a noisy linear function of features, half of them to validate."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 20)) + 3
    texts = x @ rng.normal(size=(20, 6)) + rng.normal(size=(400, 6))
    return (x[:200], texts[:200], x[200:], texts[200:])


def test_text_match_finds_the_texts_of_unseen_pictures():
    x, texts, val_x, val_texts = toy_match()
    match, strength = metrics.fit_text_match(x, texts, val_x, val_texts)
    assert strength < 1  # little noise asks for little ridge
    labels = np.array([f"label {i % 100}" for i in range(200)])
    repeated = val_texts[np.arange(200) % 100]  # the second half shows other pictures
    result = metrics.text_match(match, val_x, labels, repeated)
    half = metrics.text_match(match, val_x[:100], labels[:100], repeated[:100])
    assert half["r1"].value > 0.6 and half["cosine"].value > 0.9
    assert half["r5"].low < half["r5"].value <= half["r5"].high
    assert result["r5"].value == pytest.approx(half["r5"].value / 2, abs=0.06)


def test_ridge_is_the_minimiser():
    x, texts, *val = toy_match()
    match, _ = metrics.fit_text_match(x, texts, *val, strengths=(2.0,))
    x, texts = x - x.mean(0), texts - texts.mean(0)
    ridge = 2.0 * np.trace(x.T @ x) / 20 * np.eye(20)
    want = np.linalg.solve(x.T @ x + ridge, x.T @ texts)
    np.testing.assert_allclose(match.weights, want, atol=1e-9)


def test_principal_axes_are_those_of_most_variance():
    x = with_moments([5, 5, 5], np.diag([1.0, 9.0, 4.0]))
    axes = metrics.principal_axes(x, 2)
    np.testing.assert_allclose(np.abs(axes), [[0, 0], [1, 0], [0, 1]], atol=1e-9)


def test_features_refuse_other_types():
    with pytest.raises(TypeError, match="uint8"):
        metrics.features(np.zeros((1, 8, 8, 3), np.float32))


@needs_weights
def test_features_do_not_depend_on_the_batch(broadcast):
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), np.uint8)
    got = metrics.features(images, batch=2)
    assert got.shape == (3, 1280) and got.dtype == np.float32
    alone = np.concatenate([metrics.features(x[None], batch=2) for x in images])
    np.testing.assert_allclose(got, alone, atol=1e-5)


CACHE = Path("runs/emoji")


@needs_weights
@pytest.mark.skipif(
    not (CACHE / "features.npz").exists(),
    reason="features of the drawings are not cached (experiments.emoji.evaluate)",
)
def test_real_drawings_match_their_labels(broadcast):
    drawings = data.load(CACHE)
    ref = metrics.reference(drawings, CACHE)
    chosen = metrics.evaluation_set(drawings, "test_pair")
    x, labels, texts = ref.features[chosen], drawings.label[chosen], ref.texts[chosen]
    right = metrics.text_match(ref.match, x, labels, texts)
    assert 0.58 < right["r5"].value < 0.68
    shuffled = np.random.default_rng(0).permutation(x)
    wrong = metrics.text_match(ref.match, shuffled, labels, texts)
    assert wrong["r5"].value < 3 * 5 / len(set(labels)) < 0.07

    few = chosen[:100]
    got = metrics.evaluate(ref, drawings, drawings.images[128][few], few)
    assert got["kid"] == pytest.approx(0, abs=1e-3)
    assert got["fd"] == pytest.approx(0, abs=0.1)
    assert got["r5"].low < got["r5"].value < got["r5"].high
    assert got["r5_chance"] == pytest.approx(5 / len(set(labels[:100])))
