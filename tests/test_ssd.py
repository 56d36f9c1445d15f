"""SSD: rows drafted from the row above, corrected in rounds."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from experiments.emoji import train_ssd
from jaxspec.decoding import ACCEPTED, DRAWN, Target
from jaxspec.methods import AR, SSD
from jaxspec.methods.upsampled import Upsampled, draft_keys
from jaxspec.models import abstract
from jaxspec.models.ssd import Spatial, SSDConfig, SSDHead
from jaxspec.pipeline import Pipeline
from jaxspec.testing import keys_of, random_weights, toy_target
from jaxspec.upsampling import Nearest
from tests import toy

GRID = (3, 4)


def head_of(target: Target, seed: int = 5) -> Spatial:
    """A random head of a target."""
    config = SSDConfig(target.model.config, 24)
    return Spatial(random_weights(abstract.ssd(config), seed), config)


def alike(params):
    """A target's parameters, changed so that all its inputs are the same."""
    inner = dict(params["params"])
    for name in ("token_embedding", "prefix_proj", "prefix_bias"):
        inner[name] = jnp.zeros_like(inner[name])
    places = inner["position_embedding"]
    inner["position_embedding"] = jnp.broadcast_to(places[:1], places.shape)
    return {"params": inner}


def test_the_head_by_hand():
    """Z and a gate on its norm; a new head guesses the state above."""
    config = SSDConfig(toy_target((2, 2), 5).model.config, 3)
    rng = np.random.default_rng(0)
    s, e = rng.normal(size=(2, 1, 4, 16)).astype(np.float32)
    new = SSDHead(config).init(jax.random.key(0), s, e)
    np.testing.assert_allclose(SSDHead(config).apply(new, s, e), s, atol=1e-6)
    params = random_weights(abstract.ssd(config))
    p = jax.tree.map(np.asarray, params["params"])
    z = np.concatenate([s, e], -1) @ p["join"]
    normed = z / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-5) * p["norm"]
    gate, up = np.split(normed @ p["gate_up"], 2, axis=-1)
    want = z + (gate / (1 + np.exp(-gate)) * up) @ p["down"]
    np.testing.assert_allclose(SSDHead(config).apply(params, s, e), want, atol=1e-4)


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_passes_and_where_cells_came_from(rounds):
    target = toy_target(GRID, 12, 2, guidance=2.0)
    out = toy.decode_jitted(SSD(head_of(target), rounds), target, keys_of(2))
    h, w = GRID
    assert out.target_passes.tolist() == [w - 1 + (h - 1) * (rounds + 1) - 1] * 2
    np.testing.assert_array_equal(out.final_pass[:, 0], [np.arange(w)] * 2)
    for row in range(1, h):
        last = w - 1 + (row - 1) * (rounds + 1) + rounds
        np.testing.assert_array_equal(out.final_pass[:, row], last)
    assert (np.asarray(out.origin[:, 0]) == DRAWN).all()
    assert out.drafted.tolist() == [(h - 1) * w * (rounds > 0)] * 2


def test_with_a_round_for_each_column_greedy_tokens_are_ars():
    target = toy_target(GRID, 12, 2, guidance=2.0, temperature=0.0)
    out = toy.decode_jitted(SSD(head_of(target), rounds=4), target, keys_of(2))
    want = toy.decode_jitted(AR(), target, keys_of(2))
    np.testing.assert_array_equal(out.tokens, want.tokens)


def test_a_single_round_by_hand():
    """The second row: its drafts, and which of them the target keeps."""
    target, keys = toy_target((2, 3), 12, 1, temperature=0.0), keys_of(1)
    spatial = head_of(target)
    out = toy.decode_jitted(SSD(spatial, rounds=1), target, keys)
    config, model = target.model.config, target.model
    ask = lambda *x, method: model.apply(target.params, *x, method=method)

    def forced(tokens):
        states = ask(target.condition, tokens, method="forced")
        return states[:, config.prefix_length - 1 :]

    row = out.tokens.reshape(1, -1)[:, :3]
    padded = jnp.pad(row, ((0, 0), (0, 3)))
    above, embeddings = forced(padded)[:, :3], target.embeddings[row]
    below = SSDHead(spatial.config).apply(spatial.params, above, embeddings)
    drafts = jnp.argmax(ask(below, method="logits"), -1)
    judged = forced(jnp.concatenate([row, drafts], axis=1))[:, 3:]
    want = jnp.argmax(ask(judged, method="logits"), -1)
    np.testing.assert_array_equal(out.tokens[:, 1], want)
    kept = out.origin[:, 1] == ACCEPTED
    np.testing.assert_array_equal(kept, want == drafts)


def test_an_exact_head_is_always_kept():
    """Where every state is the same, so is the one below."""
    target = toy_target(GRID, 12, 3)
    target = replace(target, params=alike(target.params))
    config = SSDConfig(target.model.config, 24)
    none = jnp.zeros((1, 1, 16))
    head = Spatial(SSDHead(config).init(jax.random.key(0), none, none), config)
    out = toy.decode_jitted(SSD(head), target, keys_of(3))
    assert (np.asarray(out.origin[:, 1:]) == ACCEPTED).all()
    first = toy.decode_jitted(SSD(head, rounds=0), target, keys_of(3))
    np.testing.assert_array_equal(out.tokens, first.tokens)


def drafts_of(grid, batch=2) -> Upsampled:
    return Upsampled(toy_target(grid, 12, batch, seed=1), Nearest(), AR())


def test_a_round_over_an_upsampled_picture_by_hand():
    """Every cell is what the target says, greedily, given the drafts before it."""
    target = toy_target((2, 4), 12, 2, guidance=2.0, temperature=0.0)
    upsampled, keys = drafts_of((1, 2)), keys_of(2)
    method = SSD(rounds=1, upsampled=upsampled, rows=2)
    out = toy.decode_jitted(method, target, keys)
    small = toy.decode_jitted(AR(), upsampled.draft, draft_keys(keys)).tokens
    drafts = np.repeat(np.repeat(small, 2, axis=1), 2, axis=2).reshape(2, -1)
    ar = np.asarray(toy.decode_jitted(AR(), target, keys).tokens).reshape(2, -1)
    given = np.where(np.arange(8) == 0, ar[:, :1], drafts)  # cell 0 is not a draft
    seen = np.arange(8)[None, :, None] >= np.arange(8)
    cells = np.broadcast_to(np.arange(8), (2, 8))
    _, cache = target.prefill()
    fed = jnp.asarray(given), cells, jnp.ones((2, 8), bool)
    log_p, _ = target.follow(cache, *fed, jnp.broadcast_to(seen, (2, 8, 8)))
    want = np.concatenate([ar[:, :1], np.argmax(log_p, -1)[:, :-1]], axis=1)
    np.testing.assert_array_equal(out.tokens.reshape(2, -1), want)
    origin = np.asarray(out.origin).reshape(2, -1)
    np.testing.assert_array_equal(origin[:, 1:] == ACCEPTED, (want == drafts)[:, 1:])
    assert out.target_passes.tolist() == [1, 1] and out.draft_passes.tolist() == [1, 1]
    assert out.drafted.tolist() == [7, 7]


@pytest.mark.parametrize(("rows", "rounds"), [(1, 4), (3, 11)])
def test_with_a_round_for_each_cell_upsampled_drafts_come_to_be_ars(rows, rounds):
    target = toy_target(GRID, 12, 2, guidance=2.0, temperature=0.0)
    method = SSD(rounds=rounds, upsampled=drafts_of((1, 1)), rows=rows)
    out = toy.decode_jitted(method, target, keys_of(2))
    want = toy.decode_jitted(AR(), target, keys_of(2))
    np.testing.assert_array_equal(out.tokens, want.tokens)
    assert out.target_passes.tolist() == [3 // rows * (rounds + 1) - 1] * 2


def test_images_are_independent():
    target = toy_target(GRID, 12, 3, guidance=2.0)
    method = SSD(head_of(target), 1)
    whole = toy.decode_jitted(method, target, keys_of(3))
    keys = keys_of(3)[jnp.array([2, 0])]
    some = toy.decode_jitted(method, toy.take(target, [2, 0]), keys)
    np.testing.assert_array_equal(some.tokens, whole.tokens[np.array([2, 0])])


def test_no_head_and_heads_of_other_models_are_refused():
    target, keys = toy_target(GRID, 12), keys_of(1)
    with pytest.raises(ValueError, match="head must be a Spatial that was trained"):
        SSD().start(target, keys)
    with pytest.raises(ValueError, match=r"made for another target: its grid is \(3,"):
        SSD(head_of(target)).start(toy_target((4, 3), 12), keys)
    column = toy_target((3, 1), 12)
    with pytest.raises(ValueError, match="this grid has one column: use AR"):
        SSD(head_of(column)).start(column, keys)
    with pytest.raises(ValueError, match="rounds must be 0 or more, not -1"):
        SSD(rounds=-1)
    with pytest.raises(ValueError, match="rows must be 1, or give upsampled"):
        SSD(rows=2)
    with pytest.raises(ValueError, match="rounds must be 1 or more, not 0"):
        SSD(rounds=0, upsampled=drafts_of((1, 1)))
    with pytest.raises(ValueError, match="rows must divide the grid's 3, not 2"):
        SSD(upsampled=drafts_of((1, 1), 1), rows=2).start(target, keys)
    with pytest.raises(ValueError, match="give one of both"):
        SSD(head_of(target), upsampled=drafts_of((1, 1), 1)).start(target, keys)


def test_a_family_brings_its_head(tmp_path):
    plain = toy.family()
    heads = ((16, SSDConfig(dict(plain.config.decoders)[16], 24)),)
    params = {"ssd": {"16": random_weights(abstract.ssd(heads[0][1]))}}
    family = Pipeline(plain.params | params, replace(plain.config, ssd=heads))
    jaxspec.save(family, tmp_path)
    family = jaxspec.load(tmp_path)
    assert family.config.ssd == heads
    out = jaxspec.generate(family, "red heart", method=SSD(rounds=1))
    assert out.stats.target_passes.tolist() == [3 + 3 * 2 - 1]
    with pytest.raises(ValueError, match="an SSD head for no size, and none for 16"):
        jaxspec.generate(plain, "red heart", method=SSD())


def test_an_exact_head_has_no_loss():
    """Of the toy whose states are all the same."""
    config = toy.transformer(GRID, 12)
    params = alike(random_weights(abstract.transformer(config)))
    head = SSDConfig(config, 24)
    none = jnp.zeros((1, 1, 16))
    new = SSDHead(head).init(jax.random.key(0), none, none)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 12, (2, 12)))
    batch = tokens, tokens, toy.conditions(config, 2)
    found = jax.jit(lambda *x: train_ssd.compare(head, *x))(params, new, batch)
    assert float(found["states"]) < 1e-6 and float(found["overlap"]) > 0.999


def test_training_resumes_exactly(tmp_path, monkeypatch):
    """Killed after a save and started again, on what the target drew once."""
    plain = toy.family()
    model = dict(plain.config.decoders)[16]
    settings = train_ssd.SSDTraining(
        size=16, depth=2, steps=4, batch=2, rate=1e-2, hidden=8, pictures=3, seed=1
    )
    monkeypatch.setattr(train_ssd.SSDTraining, "model", model)
    monkeypatch.setattr(train_ssd, "make_evaluate", lambda *_: None)
    rng = np.random.default_rng(0)
    corpus = train_ssd.train_ar.Corpus(
        tokens=np.zeros((2, 5, 16), np.int16),
        mirrors=np.zeros(5, bool),
        pieces=rng.integers(0, 9, (5, model.prefix_length)),
        tags=[[]] * 5,
        table=rng.normal(size=(9, model.prefix_width)).astype(np.float32),
        nearest=np.zeros((12, 8), np.int16),
    )
    some = SimpleNamespace(index=lambda split: np.arange(5))
    make_batch = train_ssd.train_ar.make_batch

    class Killed(Exception):
        pass

    def run(folder, last=99):
        def batch(settings, drawn, index, step):
            if step >= last:
                raise Killed
            return make_batch(settings, drawn, index, step)

        monkeypatch.setattr(train_ssd.train_ar, "make_batch", batch)
        return train_ssd.train(settings, plain, corpus, some, tmp_path / folder, 2)

    whole = run("whole")
    with pytest.raises(Killed):
        run("killed", last=3)
    again = run("killed")
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    drawn = [np.load(tmp_path / x / "drawn.npz")["tokens"] for x in ("whole", "killed")]
    np.testing.assert_array_equal(*drawn)
    assert drawn[0].shape == (3, 16) and int(again.step) == 4
