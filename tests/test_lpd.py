"""LPD: its order schedule, its masks, the released model's outputs, and decoding."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import jaxspec
from experiments.emoji import train_lpd
from jaxspec import Sampling
from jaxspec.checkpoints import convert_model, load_model
from jaxspec.decoding import Target
from jaxspec.decoding.orders import group_sizes, lpd_order
from jaxspec.methods import AR, LPD
from jaxspec.models import abstract
from jaxspec.models.lpd import LPDConfig, LPDNet, seen_by_groups
from jaxspec.pipeline import Pipeline
from jaxspec.sampling import guide
from jaxspec.testing import keys_of, random_weights, toy_params, toy_target
from tests import toy
from tests.parity import published

# The order schedule.


def test_published_group_sizes():
    """256 cells in 20 and 32 steps, 1,024 in 48, as far as the paper's files tell."""
    assert group_sizes(256, 20) == (
        *(1, 2, 4, 5, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 18, 19, 19, 20, 20, 20),
    )
    short, long = group_sizes(256, 32), group_sizes(1024, 48)
    assert short[:8] == (1, 1, 2, 2, 3, 3, 4, 5) and short[-2:] == (12, 12)
    assert long[:28] == (*range(1, 24), 23, 24, 25, 26, 26) and long[-2:] == (33, 34)


@given(st.integers(1, 300), st.integers(1, 300))
def test_group_sizes_of_any_grid(cells, steps):
    if steps > cells:
        with pytest.raises(ValueError, match=f"from 1 to the {cells} cells, not"):
            group_sizes(cells, steps)
        return
    sizes = group_sizes(cells, steps)
    assert len(sizes) == steps and sum(sizes) == cells and min(sizes) >= 1
    assert steps == 1 or sizes[0] == 1


def gap(a, b):
    return np.abs(a - b).max()


def check_choice(cell, everything, drawn, group, repulsion):
    """A cell of a group is the one, or one of those, that the rule takes."""
    taken = {tuple(c) for c in (*drawn, *group)}
    left = [c for c in everything if tuple(c) not in taken]

    def worth(c):
        return sum(1 / np.linalg.norm(c - d) for d in drawn if gap(c, d) == 1)

    def distance(c):
        return min(np.linalg.norm(c - g) for g in group)

    def is_good(c):
        return worth(c) >= 1 and all(gap(c, g) > repulsion for g in group)

    good = [c for c in left if is_good(c)]
    value = worth if good else distance
    assert is_good(cell) or not good
    assert value(cell) == pytest.approx(max(map(value, good or left)), abs=1e-6)


def check_order(order, grid, sizes, repulsion):
    """Each choice is one that the rule allows, given those before it."""
    cells = [np.array(divmod(int(c), grid[1])) for c in order]
    everything = [np.array(c) for c in np.ndindex(grid)]
    ends = np.cumsum(sizes)
    for begin, end in zip(ends - sizes, ends, strict=True):
        for i in range(max(begin, 1), end):
            drawn, group = cells[:begin], cells[begin:i]
            check_choice(cells[i], everything, drawn, group, repulsion)


GRIDS = [((4, 4), 5, 1), ((3, 6), 4, 2), ((6, 5), 8, 2), ((1, 7), 3, 1)]


@pytest.fixture(scope="module")
def ordered():
    """A compiled schedule for each of a few grids."""
    out = {}
    for grid, steps, repulsion in GRIDS:
        sizes = group_sizes(grid[0] * grid[1], steps)
        run = jax.jit(lambda k, g=grid, s=sizes, r=repulsion: lpd_order(k, g, s, r))
        out[grid] = run, sizes, repulsion
    return out


@settings(max_examples=40, deadline=None)
@given(which=st.sampled_from([grid for grid, *_ in GRIDS]), seed=st.integers(0, 2**31))
def test_orders(ordered, which, seed):
    """A permutation; what is near comes first and far from one another, if it can."""
    run, sizes, repulsion = ordered[which]
    order = np.asarray(run(jax.random.key(seed)))
    assert sorted(order) == list(range(which[0] * which[1]))
    np.testing.assert_array_equal(order, run(jax.random.key(seed)))
    check_order(order, which, np.array(sizes), repulsion)


def test_orders_differ_from_key_to_key(ordered):
    run, *_ = ordered[6, 5]
    orders = np.array([run(jax.random.key(i)) for i in range(20)])
    assert len(np.unique(orders, axis=0)) > 15
    assert len(set(orders[:, 0])) > 5


# The model.


def test_what_inputs_see_by_hand():
    """One prefix slot and three cells, of which the second is drawn first."""
    got = seen_by_groups(jnp.array([[1, 0, 1]]), prefix=1)[0]
    want = [  # prefix, cells 0 1 2, queries 0 1 2
        "1000000",
        "1111000",  # cells of the second group see both groups
        "1010000",
        "1111000",
        "1010101",  # their queries the first group and each other
        "1000010",
        "1010101",
    ]
    np.testing.assert_array_equal(got, [[c == "1" for c in row] for row in want])


@pytest.fixture(scope="module")
def released():
    return published("lpd_tiny")


def released_groups(expected):
    """The group of each cell [B, N] of the recorded orders."""
    number = np.repeat(np.arange(len(expected["group_sizes"])), expected["group_sizes"])
    groups = np.zeros_like(expected["orders"])
    np.put_along_axis(groups, expected["orders"], number[None], axis=1)
    return groups


def test_the_released_model(released):
    expected = released.expected
    out = jax.jit(LPDNet(released.config).apply)(
        released.params,
        expected["labels"],
        expected["tokens"],
        released_groups(expected),
    )
    out = np.take_along_axis(np.asarray(out), expected["orders"][..., None], axis=1)
    np.testing.assert_allclose(out, expected["logits"], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "guidance", "ramp"),
    [
        ("greedy_cfg1", 1.0, True),
        ("greedy_cfg4_linear", 4.0, True),
        ("greedy_cfg4_constant", 4.0, False),
        ("greedy_unconditional", 0.0, False),
    ],
)
def test_the_released_decoding(released, name, guidance, ramp):
    """Its groups, which are 1 to 8 cells; not those of a cosine."""
    expected = released.expected
    sampling = Sampling.create(96, temperature=0.0, guidance=guidance)
    target = Target.create(
        LPDNet(released.config), released.params, expected["labels"], sampling
    )
    sizes = tuple(expected["group_sizes"].tolist())
    method = LPD(sizes=sizes, ramp=ramp, order=jnp.asarray(expected["orders"]))
    out = toy.decode_jitted(method, target, keys_of(2))
    np.testing.assert_array_equal(out.tokens.reshape(2, -1), expected[name])
    np.testing.assert_array_equal(out.target_passes, 7)
    np.testing.assert_array_equal(
        out.final_pass.reshape(2, -1), released_groups(expected)
    )


def test_a_released_model_converts(released, tmp_path):
    save_file(released.state_dict, tmp_path / "lpd.safetensors")
    told = convert_model(tmp_path / "lpd.safetensors", tmp_path / "ours", heads=4)
    assert told["parts"]["lpd/96"]["family"] == "LPD"
    config, params = load_model(tmp_path / "ours")
    assert config == released.config
    jax.tree.map(np.testing.assert_array_equal, params, released.params)
    with pytest.raises(ValueError, match="told in ways that differ: 16x16"):
        convert_model(
            tmp_path / "lpd.safetensors", tmp_path / "none", heads=4, size=256
        )


# Training.


def test_groups_by_lot():
    """Sizes as in decoding, cells by lot."""
    groups = train_lpd.groups_by_lot(np.random.default_rng(0), 16, [5, 16, 1])
    for row, steps in zip(groups, (5, 16, 1), strict=True):
        assert np.bincount(row).tolist() == list(group_sizes(16, steps))
    assert (groups[0] != np.sort(groups[0])).any()


def test_training_resumes_exactly_and_learns(tmp_path, monkeypatch):
    settings = train_lpd.LPDTraining(
        size=32, depth=1, steps=4, batch=2, rate=1e-2, groups=(3, 16), text_width=8
    )
    model = replace(toy.transformer((4, 4), 12), depth=1, prefix_length=16)
    monkeypatch.setattr(train_lpd.LPDTraining, "model", model)
    rng = np.random.default_rng(0)
    tokens = np.repeat(rng.integers(0, 12, (2, 1)), 16, axis=1).astype(np.int32)
    condition = rng.normal(size=(2, 16, 8)).astype(np.float32)

    class Killed(Exception):
        pass

    def run(folder, last=99):
        def batch(settings, corpus, train, step):
            if step >= last:
                raise Killed
            return tokens, tokens, condition

        monkeypatch.setattr(train_lpd.train_ar, "make_batch", batch)
        monkeypatch.setattr(train_lpd, "make_evaluate", lambda *_: None)
        some = SimpleNamespace(index=lambda split: None)
        target = toy_params(model)
        return train_lpd.train(settings, target, None, some, tmp_path / folder, 2)

    whole = run("whole")
    with pytest.raises(Killed):
        run("killed", last=3)
    jax.tree.map(np.testing.assert_array_equal, run("killed").params, whole.params)
    lines = (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
    rows = [json.loads(x) for x in lines]
    assert rows[-1]["loss"] < rows[0]["loss"]


# Decoding with a prefix of features, as a family's.


def toy_lpd(grid, batch=2, **sampling) -> Target:
    """An LPD model beside `toy_target` of the same grid."""
    config = LPDConfig(12, 16, 2, 2, 24, grid, "features", 4, 8)
    condition = toy.conditions(toy.transformer(grid, 12), batch)
    settings = Sampling.create(12, **sampling)
    weights = random_weights(abstract.lpd(config))
    return Target.create(LPDNet(config), weights, condition, settings)


@pytest.fixture(scope="module")
def drawn():
    """Greedily, guided, in orders of their own."""
    model = toy_lpd((4, 4), 3, guidance=3.0, temperature=0.0)
    method = LPD(model, steps=5, repulsion=1)
    target = toy_target((4, 4), 12, 3)
    return method, target, toy.decode_jitted(method, target, keys_of(3))


def test_it_draws_what_it_is_teacher_forced(drawn):
    method, _, out = drawn
    model = method.model
    groups = out.final_pass.reshape(3, -1)
    assert [np.bincount(g).tolist() for g in np.asarray(groups)] == [
        list(group_sizes(16, 5))
    ] * 3
    assert out.target_passes.tolist() == [4] * 3
    null = model.model.apply(model.params, model.condition, method="null")
    tokens = out.tokens.reshape(3, -1)
    apply = jax.jit(model.model.apply)
    both = [apply(model.params, x, tokens, groups) for x in (model.condition, null)]
    both = jnp.stack(both, 1).reshape(6, *both[0].shape[1:])
    # The ramp goes by places in the order.
    order = method.start(drawn[1], keys_of(3)).order
    place = jnp.argsort(order, axis=1)
    sampling = replace(model.sampling, ramp_cells=16)
    np.testing.assert_array_equal(
        np.argmax(guide(both, place, sampling), -1), np.asarray(tokens)
    )


def test_images_are_independent(drawn):
    method, target, out = drawn
    some = replace(method, model=toy.take(method.model, [2, 0]))
    keys = keys_of(3)[jnp.array([2, 0])]
    again = toy.decode_jitted(some, toy.take(target, [2, 0]), keys)
    np.testing.assert_array_equal(again.tokens, out.tokens[np.array([2, 0])])


def test_what_cannot_draw_is_refused(drawn):
    method, target, _ = drawn
    model, keys = method.model, keys_of(3)
    with pytest.raises(ValueError, match="model must be a Target of an LPDNet"):
        LPD().start(target, keys)
    with pytest.raises(ValueError, match=r"must have the target's grid, \(3, 4\)"):
        LPD(model).start(toy_target((3, 4), 12, 3), keys)
    with pytest.raises(ValueError, match="steps must be from 1 to the 16 cells"):
        LPD(model, steps=17).start(target, keys)
    with pytest.raises(ValueError, match=r"order must be \[3, 16\], not \[3, 4\]"):
        LPD(model, steps=4, order=jnp.zeros((3, 4), int)).start(target, keys)
    with pytest.raises(ValueError, match="sizes must add up to the 16 cells, not 3"):
        LPD(model, sizes=(1, 2)).start(target, keys)
    with pytest.raises(ValueError, match="decode with jaxspec.LPD"):
        AR().start(model, keys)


def test_a_family_brings_its_model(tmp_path):
    plain = toy.family()
    width = dict(plain.config.decoders)[16].prefix_width
    model = replace(toy_lpd((4, 4)).model.config, prefix_width=width)
    models = ((16, model),)
    params = plain.params | {"lpd": {"16": random_weights(abstract.lpd(model))}}
    jaxspec.save(Pipeline(params, replace(plain.config, lpd=models)), tmp_path)
    family = jaxspec.load(tmp_path)
    assert family.config.lpd == models
    out = jaxspec.generate(family, "red heart", method=LPD(steps=4))
    assert out.stats.target_passes.tolist() == [3]
    with pytest.raises(ValueError, match="for LPD for 16 px, and none for 8 px"):
        jaxspec.generate(family, "red heart", method=LPD(steps=4), size=8)
    with pytest.raises(ValueError, match="LPD's model for 8 px has grid"):
        replace(plain.config, lpd=((8, model),))
