"""Matrices in int8: how far they are off, what products are, where they cannot be."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec import sharding
from jaxspec.cli import app
from jaxspec.models.int8 import Int8, by_digits, by_floats, matmul
from jaxspec.pipeline import network_of
from jaxspec.recipe import Recipe
from tests import toy, toy_lumina


@pytest.fixture(scope="module")
def family():
    return jaxspec.quantised(toy.family())


def test_each_column_has_its_scale_and_no_number_is_off_by_more_than_half_of_it():
    matrix = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    matrix[:, 0] = 0
    matrix[:3, 1], matrix[3:, 1] = (254, -127, 1), 0  # a scale of 2
    made = Int8.of(jnp.asarray(matrix))
    assert made.values.dtype == jnp.int8 and made.values.shape == (6, 40)
    np.testing.assert_array_equal(made.values[1, :4], [127, -64, 0, 0])
    np.testing.assert_array_equal(made.values[0], 0)
    np.testing.assert_allclose(made.scale, abs(matrix).max(0) / 127, rtol=1e-6)
    off = abs(np.asarray(made.matrix()) - matrix)
    assert (off <= np.asarray(made.scale) / 2 + 1e-6).all()
    assert (abs(np.asarray(made.values)).max(1)[1:] == 127).all()


def test_products_are_those_of_the_matrix_it_stands_for_row_by_row():
    rng = np.random.default_rng(1)
    weight = Int8.of(jnp.asarray(rng.normal(size=(96, 8)), jnp.float32))
    x = rng.normal(size=(2, 3, 96)) * 10.0 ** rng.integers(-6, 6, (2, 3, 1))
    x[0, 1] = 0
    matrix = np.asarray(weight.matrix(), np.float64)
    x = jnp.asarray(x, jnp.float32)
    want = np.asarray(x, np.float64) @ matrix
    # What an input is off by, and sums in float32.
    off = np.abs(x).max(-1, keepdims=True) * abs(matrix).sum(0) * (1 / (4 * 127**2))
    for way in (by_digits, by_floats):
        got = way(x, weight.values, weight.scale)
        assert (abs(np.asarray(got) - want) <= off * 1.01).all()
    got = jax.jit(matmul)(x, weight)
    np.testing.assert_array_equal(got[0, 1], 0)
    np.testing.assert_array_equal(matmul(x[1:, 2:], weight)[0, 0], got[1, 2])
    for bad in (np.nan, np.inf):
        broken = matmul(x.at[0, 0, 5].set(bad), weight)
        assert not np.isfinite(broken[0, 0]).any()
        np.testing.assert_array_equal(broken[1:], got[1:])
    assert matmul(x.astype(jnp.bfloat16), weight).dtype == jnp.bfloat16


@pytest.mark.parametrize("of", [toy.family, toy_lumina.family], ids=["toy", "Lumina"])
def test_a_network_is_the_float_one_of_the_matrices_that_its_own_stand_for(of):
    family = of()
    size, config = family.config.decoders[0]
    model = network_of(config)
    condition = jnp.ones((2, 3), jnp.int32)
    if of is toy.family:
        condition = toy.conditions(config, 2)
    else:
        model = network_of(replace(config, prefix_length=3))
    tokens = jnp.arange(2 * config.cells).reshape(2, -1) % config.vocab_size
    forward = jax.jit(model.apply)
    plain = model.prepared(family.params["decoders"][str(size)])
    small = jaxspec.quantised(family).params["decoders"][str(size)]
    is_int8 = lambda x: isinstance(x, Int8)
    stands_for = jax.tree.map(
        lambda x: x.matrix() if is_int8(x) else x, small, is_leaf=is_int8
    )
    matrices = sum(map(is_int8, jax.tree.leaves(small, is_leaf=is_int8)))
    assert matrices == 1 + config.depth * (4 if of is toy.family else 5)
    want, got, float_ = (
        np.asarray(forward(x, condition, tokens)) for x in (stands_for, small, plain)
    )
    np.testing.assert_allclose(got, want, atol=2e-3 * want.std())
    # Rounding is seen, and is small.
    assert 1e-3 < np.abs(got - float_).mean() / float_.std() < 0.05


def test_pictures_do_not_depend_on_the_batch_and_say_what_made_them(family):
    prompts = ["red heart", "blue tree"]
    out = jaxspec.generate(family, prompts, seed=3, size=8)
    alone = jaxspec.generate(family, "blue tree", seed=3, size=8)
    np.testing.assert_array_equal(out.tokens[1], alone.tokens[0])
    assert out.settings["weights"] == "int8"
    assert "weights" not in Recipe.create(toy.family()).settings


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_what_is_read_as_int8_is_what_is_turned_later(tmp_path, format, family):
    jaxspec.save(toy.family(), tmp_path / "toy", format=format)
    read = jaxspec.load(tmp_path / "toy", weights="int8")
    assert jax.tree.structure(read.params) == jax.tree.structure(family.params)
    jax.tree.map(np.testing.assert_array_equal, read.params, family.params)


def test_where_int8_cannot_be_is_said_in_a_line(family, tmp_path):
    mesh = sharding.make_mesh(1, 1)
    for refused, said in (
        (lambda: jaxspec.load(weights="int4"), "must be 'int8' or None, not 'int4'"),
        (lambda: jaxspec.generate(family, "cafe", mesh=mesh), "split before they are"),
        (lambda: jaxspec.quantised(family), "toy are int8 already"),
        (lambda: jaxspec.save(family, tmp_path / "new"), "int8 weights are not saved"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            refused()
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_by_command(monkeypatch, tmp_path):
    def load(name, **how):
        raise ValueError(f"{name} was asked for with {how}")

    monkeypatch.setattr(jaxspec, "load", load)
    command = ["generate", "red heart", "--out", str(tmp_path / "x.png")]
    for kind, said in (
        ("int8", "emoji was asked for with {'weights': 'int8'}"),
        ("int4", "--weights must be int8, not 'int4'"),
    ):
        got = CliRunner().invoke(app, [*command, "--weights", kind])
        assert (got.exit_code, got.stderr) == (2, f"error: {said}\n")
