"""FlashAR: its head teacher-forced and through the caches, and decoding with it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from experiments.emoji import train_flashar
from jaxspec import Sampling
from jaxspec.decoding import Target
from jaxspec.methods import AR, SCD, SJD, SSD, FlashAR, MuLo
from jaxspec.methods.upsampled import Upsampled
from jaxspec.models import abstract
from jaxspec.models.flashar import (
    Flash,
    FlashConfig,
    forced_logits,
    new_head,
    visible_slots,
)
from jaxspec.models.transformer import Transformer
from jaxspec.pipeline import Pipeline
from jaxspec.sampling import guide, log_probs
from jaxspec.testing import (
    exact_check,
    keys_of,
    random_weights,
    toy_params,
    toy_target,
)
from jaxspec.upsampling import Nearest
from tests import toy


def target_of(grid, positions="learned", batch=2, **sampling) -> Target:
    config = replace(toy.transformer(grid, 12), positions=positions, depth=3)
    weights = random_weights(abstract.transformer(config))
    settings = Sampling.create(12, **sampling)
    condition = toy.conditions(config, batch)
    return Target.create(Transformer(config), weights, condition, settings)


def flash_of(target: Target, depth=2, context="diagonal", seed=5) -> Flash:
    """A random head of a target."""
    config = FlashConfig(target.model.config, depth, context)
    return Flash(random_weights(abstract.flash(config), seed), config)


@jax.jit
def guided(flash: Flash, target: Target, tokens: jax.Array) -> dict[str, jax.Array]:
    """Teacher-forced logits [B, N, V] of grids, after guidance."""
    null = target.model.apply(target.params, target.condition, method="null")
    both = [
        forced_logits(flash.config, target.params, flash.params, x, tokens)
        for x in (target.condition, null)
    ]
    pairs = jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *both)
    cells = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.tree.map(lambda x: guide(x, cells, target.sampling), pairs)


@pytest.mark.parametrize(
    ("grid", "positions", "context", "depth"),
    [
        ((3, 4), "learned", "diagonal", 2),
        ((4, 3), "rotary", "earlier", 1),
        ((4, 3), "rotary", "diagonal", 3),
    ],
)
def test_it_draws_what_it_is_teacher_forced(grid, positions, context, depth):
    """Greedily, with guidance; every cell in the pass of its anti-diagonal."""
    target = target_of(grid, positions, guidance=2.0, temperature=0.0)
    flash = flash_of(target, depth, context)
    out = toy.decode_jitted(FlashAR(flash), target, keys_of(2))
    logits = guided(flash, target, out.tokens.reshape(2, -1))["joint"]
    want = np.argmax(logits, -1).reshape(out.tokens.shape)
    np.testing.assert_array_equal(out.tokens, want)
    row, column = np.indices(grid)
    np.testing.assert_array_equal(out.final_pass, [row + column] * 2)
    np.testing.assert_array_equal(out.target_passes, sum(grid) - 2)


@pytest.mark.parametrize("grid", [(1, 5), (5, 1)])
def test_an_untrained_head_draws_what_ar_draws_along_a_line(grid):
    """In one row the target's head is asked alone, in one column its copy."""
    target = target_of(grid, guidance=2.0)
    config = FlashConfig(target.model.config, 2)
    flash = Flash(new_head(config, target.params), config)
    out = toy.decode_jitted(FlashAR(flash), target, keys_of(2))
    want = toy.decode_jitted(AR(), target, keys_of(2))
    np.testing.assert_array_equal(out.tokens, want.tokens)


def test_the_gate():
    """Even at first; closed, it leaves the target's own head, or the branch alone."""
    target = target_of((3, 4))
    config = FlashConfig(target.model.config, 1, "earlier")
    params = new_head(config, target.params)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 12, (2, 12)))
    row, column = np.divmod(np.arange(12), 4)
    forced = jax.jit(
        lambda head: forced_logits(
            config, target.params, head, target.condition, tokens
        )
    )
    found = forced(params)
    inside = (row > 0) & (column > 0)
    mean = (found["right"] + found["down"]) / 2
    np.testing.assert_allclose(found["joint"][:, inside], mean[:, inside], atol=1e-5)
    np.testing.assert_array_equal(found["joint"][:, :4], found["right"][:, :4])
    first = (row > 0) & (column == 0)
    np.testing.assert_array_equal(found["joint"][:, first], found["down"][:, first])
    for bias, branch in ((1e4, "right"), (-1e4, "down")):
        closed = {"params": params["params"] | {"gate_out_bias": jnp.array([bias])}}
        joint = forced(closed)["joint"][:, inside]
        np.testing.assert_allclose(joint, found[branch][:, inside], atol=1e-5)


def test_what_slots_see_by_hand():
    """A prefix of 1 slot, 2 rows of 3 cells, of which the last is never fed."""
    config = replace(toy.transformer((2, 3), 12), prefix_length=1)
    want = [
        "100000",
        "110000",
        "111010",  # of cell 1: its anti-diagonal is cell 3
        "111111",  # of cell 2: and 4
        "111010",
        "111111",
    ]
    read = lambda rows: np.array([[c == "1" for c in row] for row in rows])
    got = visible_slots(FlashConfig(config, 1))[0]
    np.testing.assert_array_equal(got, read(want))
    earlier = visible_slots(FlashConfig(config, 1, "earlier"))[0]
    np.testing.assert_array_equal(earlier, read(want) & np.tri(6, dtype=bool))
    # Cell 3 sees cell 1, of its anti-diagonal, and not cell 2, which is behind it.
    assert read(want)[4].tolist() == [1, 1, 1, 0, 1, 0]


def test_images_are_independent_and_another_head_compiles_nothing():
    target = target_of((3, 4), batch=3, guidance=2.0)
    method = FlashAR(flash_of(target))
    whole = toy.decode_jitted(method, target, keys_of(3))
    rows = [2, 0]
    some = toy.decode_jitted(
        method, toy.take(target, rows), keys_of(3)[jnp.array(rows)]
    )
    np.testing.assert_array_equal(some.tokens, whole.tokens[np.array(rows)])
    with toy.compilations() as compiled:
        other = toy.decode_jitted(FlashAR(flash_of(target, seed=6)), target, keys_of(3))
    assert compiled == [] and (other.tokens != whole.tokens).any()


def test_a_head_may_bring_the_target_that_was_trained_with_it():
    target = target_of((3, 4))
    other = random_weights(abstract.transformer(target.model.config), seed=9)
    flash = flash_of(target)
    got = toy.decode_jitted(FlashAR(replace(flash, target=other)), target, keys_of(2))
    other = Target.create(target.model, other, target.condition, target.sampling)
    want = toy.decode_jitted(FlashAR(flash), other, keys_of(2))
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_no_head_and_heads_of_other_models_are_refused():
    flash, keys = flash_of(target_of((3, 4))), keys_of(2)
    with pytest.raises(ValueError, match="head must be a Flash that was trained with"):
        FlashAR().start(target_of((3, 4)), keys)
    for other, said in [
        (target_of((4, 3)), r"its grid is \(3, 4\), and this target needs \(4, 3\)"),
        (target_of((3, 4), "rotary"), "its positions is learned"),
        (toy_target((3, 4), 12, 2), "its depth is 3"),
    ]:
        with pytest.raises(ValueError, match=f"made for another target: {said}"):
            FlashAR(flash).start(other, keys)
    with pytest.raises(ValueError, match="depth must be from 1 to the target's 3"):
        replace(flash.config, depth=4)
    with pytest.raises(ValueError, match="context must be diagonal or earlier"):
        replace(flash.config, context="raster")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """The toy family with heads for both sizes, saved and loaded."""
    plain, folder = toy.family(), tmp_path_factory.mktemp("family") / "saved"
    heads = tuple((size, FlashConfig(c, 1)) for size, c in plain.config.decoders)
    params = {str(size): random_weights(abstract.flash(c)) for size, c in heads}
    params = plain.params | {"flashar": params}
    jaxspec.save(Pipeline(params, replace(plain.config, flashar=heads)), folder)
    return jaxspec.load(folder)


def test_a_family_brings_its_heads(family):
    out = jaxspec.generate(family, "red heart", method=FlashAR())
    assert out.stats.target_passes.tolist() == [6]  # 4 by 4 cells
    assert out.settings["method"] == {"name": "FlashAR", "head": None}
    plain = toy.family()
    with pytest.raises(ValueError, match="a FlashAR head for no size, and none for 16"):
        jaxspec.generate(plain, "red heart", method=FlashAR())
    small, large = dict(plain.config.decoders).values()
    with pytest.raises(ValueError, match="made for another target: its grid"):
        replace(plain.config, flashar=((8, FlashConfig(large, 1)),))
    with pytest.raises(ValueError, match="a FlashAR head for 32 px has no target"):
        replace(plain.config, flashar=((32, FlashConfig(small, 1)),))


def test_others_judge_what_it_drafts(family):
    """As MuLo's drafter at a smaller size and at the target's own, and as SJD's."""
    own = dict(draft=16, upsampler="nearest", draft_method=FlashAR())
    everything = MuLo(**own, threshold=0.0, neighbours=1)
    out = jaxspec.generate(family, "red heart", method=everything)
    drafted = jaxspec.generate(family, "red heart", method=FlashAR())
    assert out.stats.draft_passes.tolist() == [6]
    assert out.stats.target_passes.tolist() == [1]  # all is kept
    assert out.tokens.shape == drafted.tokens.shape
    low = MuLo(draft_method=FlashAR(), threshold=2.0, window=4, neighbours=1)
    out = jaxspec.generate(family, "red heart", method=low)
    assert out.stats.draft_passes.tolist() == [2]  # 2 by 2 cells
    drafts = Upsampled(draft=16, upsampler=Nearest(), method=FlashAR())
    exact = SJD(window=4, initial="upsampled", upsampled=drafts)
    assert jaxspec.generate(family, "red heart", method=exact).stats.draft_passes == [6]
    rounds = SSD(rounds=2, upsampled=drafts, rows=4)
    out = jaxspec.generate(family, "red heart", method=rounds)
    assert out.stats.target_passes == [2] and out.stats.draft_passes == [6]


def flashed(target: Target, flash: Flash) -> SCD:
    """A window of four, of what FlashAR drew of the same grid."""
    drafts = Upsampled(target, Nearest(), FlashAR(flash))
    return SCD(window=4, initial="upsampled", upsampled=drafts)


def test_what_its_cells_were_drawn_from():
    """What is teacher-forced, after guidance and top-k.

    With the paper's context nothing: a draw depends on some that are judged after it.
    """
    target = target_of((3, 4), guidance=2.0, top_k=5)
    flash = flash_of(target, context="earlier")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 12, (2, 3, 4)))
    got = jax.jit(FlashAR(flash).log_q)(target, tokens)
    logits = guided(flash, target, tokens.reshape(2, -1))["joint"]
    want = log_probs(logits, target.sampling)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert FlashAR(flash_of(target)).log_q(target, tokens) is None


@pytest.mark.parametrize("context", ["earlier", "diagonal"])
def test_its_drafts_are_judged_exactly(context):
    """By p / q where each is a draw given those before it, else as chosen."""
    target = toy_target((2, 3), 3, guidance=1.5)
    method = flashed(target, flash_of(target, 1, context))
    check = exact_check(method, target)
    assert check.passed, check


def test_drafts_of_the_targets_own_distribution_are_all_kept():
    """Where all cells have one distribution, an untrained head says just that."""
    target = target_of((3, 4))
    inner = dict(target.params["params"])
    for name in ("token_embedding", "prefix_proj", "prefix_bias"):
        inner[name] = jnp.zeros_like(inner[name])
    places = inner["position_embedding"]
    inner["position_embedding"] = jnp.broadcast_to(places[:1], places.shape)
    target = replace(target, params={"params": inner})
    config = FlashConfig(target.model.config, 2, "earlier")
    flash = Flash(new_head(config, target.params), config)
    out = toy.decode_jitted(flashed(target, flash), target, keys_of(2))
    assert out.target_passes.tolist() == [3, 3]  # 11 cells, 4 a pass
    # 5 anti-diagonals and one more pass, which tells of all cells.
    assert out.draft_passes.tolist() == [6, 6]


def test_training_resumes_exactly(tmp_path, monkeypatch):
    """A head alone, and one with its target; killed after a save, and started again."""
    config = toy.transformer((2, 3), 12)
    target = toy_params(config)
    settings = train_flashar.FlashTraining(
        size=16, depth=2, steps=4, batch=2, rate=1e-2, branch=1, backbone=0.2
    )
    monkeypatch.setattr(train_flashar.FlashTraining, "model", config)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 12, (5, 2, 6)).astype(np.int32)
    condition = np.asarray(toy.conditions(config, 2))

    class Killed(Exception):
        pass

    def run(folder, last=99):
        def batch(settings, corpus, index, step):
            if step >= last:
                raise Killed
            return tokens[step], tokens[step], condition

        monkeypatch.setattr(train_flashar.train_ar, "make_batch", batch)
        monkeypatch.setattr(train_flashar, "make_evaluate", lambda *_: None)
        some = type("Drawings", (), {"index": lambda self, split: None})()
        return train_flashar.train(
            settings, target, None, some, tmp_path / folder, save_every=2
        )

    whole = run("whole")
    with pytest.raises(Killed):
        run("killed", last=3)
    again = run("killed")
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    # The target was trained too, and slower than the head.
    moved = lambda a, b: float(jnp.abs(a["params"]["qkv"] - b["params"]["qkv"]).max())
    head = new_head(settings.flash, target)
    slow, fast = (
        moved(whole.params["target"], target),
        moved(whole.params["head"], head),
    )
    assert 0 < slow < fast / 2
