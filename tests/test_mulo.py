"""MuLo-SD: against a slow reference, counts by hand, in the library."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from experiments.mulo import sweep
from jaxspec import neighbours
from jaxspec.acceptance import Amplified
from jaxspec.decoding import ACCEPTED, DRAWN, RESAMPLED
from jaxspec.methods import AR, SCD, ZipAR
from jaxspec.methods.mulo import MuLo
from jaxspec.methods.upsampled import draft_keys
from jaxspec.neighbours import nearest_codes, neighbour_table
from jaxspec.sampling import ACCEPT, cell_keys, uniform
from jaxspec.testing import keys_of
from jaxspec.upsampling import Nearest, Pixels
from tests import toy
from tests.slow_mulo import SlowDrafter, SlowMuLo

# Against loops.

CODES, BATCH, LOW, HIGH = 12, 3, (2, 2), (4, 6)


@pytest.fixture(scope="module")
def target():
    return toy.target(toy.transformer(HIGH, CODES), BATCH)


@pytest.fixture(scope="module")
def draft():
    return toy.target(toy.transformer(LOW, CODES), BATCH)


def noise(keys, cells: int) -> np.ndarray:
    """The Gumbel noise [B, N, V] that draws each cell."""
    at = jnp.broadcast_to(jnp.arange(cells), (len(keys), cells))
    gumbel = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (CODES,))))
    return np.asarray(gumbel(cell_keys(keys, at)))


def choice(gumbel):
    return lambda u, logits: int(np.argmax(logits + gumbel[u]))


def mass(method: MuLo, codes: np.ndarray, logits, draft: int) -> float:
    p = np.exp(logits - logits.max())
    p /= p.sum()
    if isinstance(method.rule, Amplified):
        return min(1, method.rule.k * p[draft])
    gap = ((codes - codes[draft]) ** 2).sum(-1)
    gap[draft] = -1
    pooled = p[np.argsort(gap, kind="stable")[: method.neighbours]].sum()
    return pooled / p.max() if method.relative else pooled


NEAREST = {"upsampler": Nearest()}
METHODS = {
    "default": MuLo(**NEAREST, radius=1, window=2, neighbours=3),
    "stale rounds": MuLo(
        **NEAREST,
        radius=0,
        window=1,
        rule=Amplified(8.0),
        test="chance",
        context="stale",
        clip="block",
        order="rows",
        frontier=4,
        rows=1,
        refresh="after",
    ),
    "raster": MuLo(
        **NEAREST,
        radius=2,
        neighbours=4,
        order="raster",
        expand="forward",
        refresh="before",
        rows_at_once=3,
    ),
    "rounds": MuLo(**NEAREST, radius=1, window=3, neighbours=5, relative=True, rows=1),
}


@pytest.mark.parametrize("name", METHODS)
def test_against_loops(name, draft, target):
    knobs, keys = METHODS[name], keys_of(BATCH)
    cells = jnp.broadcast_to(jnp.arange(24), (BATCH, 24))
    coins = np.asarray(uniform(cell_keys(keys, cells, ACCEPT)))
    codes = np.asarray(target.codes, np.float64)
    low_noise, high_noise = noise(draft_keys(keys), 4), noise(keys, 24)
    low_config, config = draft.model.config, target.model.config
    kept = []
    for threshold in (0.02, 0.1, 0.3) if knobs.test == "threshold" else (0,):
        method = replace(knobs, draft=draft, threshold=threshold)
        got = toy.decode_jitted(method, target, keys)
        assert (np.asarray(got.bad_pass) == -1).all()
        np.testing.assert_array_equal(got.drafted, [24] * BATCH)
        for b in range(BATCH):
            low = SlowDrafter(low_config, toy.params(low_config), draft.condition[b])
            low.choose = choice(low_noise[b])

            def keeps(u, logits, token, b=b, threshold=threshold):
                least = coins[b, u] if knobs.test == "chance" else threshold
                return mass(knobs, codes, logits, token) > least

            slow = SlowMuLo(config, toy.params(config), target.condition[b])
            tokens, origin, passes, number, drawn = slow.run(
                method, low, keeps, choice(high_noise[b])
            )
            np.testing.assert_array_equal(np.ravel(got.tokens[b]), tokens)
            np.testing.assert_array_equal(np.ravel(got.origin[b]), origin)
            np.testing.assert_array_equal(np.ravel(got.final_pass[b]), passes)
            assert got.target_passes[b] == number
            assert got.draft_passes[b] == drawn
            kept.append((origin == ACCEPTED).mean())
    assert min(kept) < 0.3 and max(kept) > 0.3  # it was a test of both


def test_threshold_0_keeps_the_enlarged_draft(draft, target):
    method = replace(METHODS["default"], draft=draft, threshold=0)
    got = toy.decode_jitted(method, target, keys_of(BATCH))
    low = toy.decode_jitted(ZipAR(), draft, draft_keys(keys_of(BATCH)))
    want = np.repeat(np.repeat(low.tokens, 2, 1), 3, 2)
    np.testing.assert_array_equal(got.tokens, want)
    np.testing.assert_array_equal(got.final_pass, np.ones((BATCH, *HIGH)))
    for field, value in {
        "target_passes": 1,
        "draft_passes": 3,
        "prefill_passes": 2,
        "drafted": 24,
        "bad_pass": -1,
    }.items():
        np.testing.assert_array_equal(getattr(got, field), [value] * BATCH)
    assert (got.origin == ACCEPTED).all()


@pytest.mark.parametrize(
    ("name", "same", "verified"),
    [("default", ZipAR(2), 1), ("raster", AR(), 4)],
)
def test_a_threshold_above_1_leaves_no_trace_of_the_draft(
    name, same, verified, draft, target
):
    method = replace(METHODS[name], draft=draft, threshold=1.5)
    got = toy.decode_jitted(method, target, keys_of(BATCH))
    want = toy.decode_jitted(same, target, keys_of(BATCH))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.target_passes, want.target_passes + verified)
    assert (got.origin == RESAMPLED).all()


def test_no_image_depends_on_its_neighbours(draft, target):
    method = replace(METHODS["default"], draft=draft, threshold=0.1)
    every = toy.decode_jitted(method, target, keys_of(BATCH))
    assert len({x.tobytes() for x in np.asarray(every.tokens)}) == BATCH
    rows = np.array([2, 0, 2])
    method = replace(method, draft=toy.take(draft, rows))
    got = toy.decode_jitted(method, toy.take(target, rows), keys_of(BATCH)[rows])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[rows]), got, every)


def test_other_weights_thresholds_and_conditions_compile_nothing(draft, target):
    method = replace(METHODS["default"], draft=draft, threshold=0.1)
    toy.decode_jitted(method, target, keys_of(BATCH))
    weights = jax.tree.map(lambda x: 0.9 * x, draft.params)
    other = replace(draft, params=weights, condition=draft.condition + 1)
    keys = keys_of(BATCH, 1)
    with toy.compilations() as compiled:
        for threshold in (0.3, 1, np.float32(0.2)):
            method = replace(method, draft=other, threshold=threshold)
            toy.decode_jitted(method, target, keys)
    assert compiled == []


def test_a_nan_is_noted_whoever_meets_it(draft, target):
    method = replace(METHODS["default"], threshold=0.1)
    bad = replace(draft, condition=draft.condition.at[1].set(jnp.nan))
    got = toy.decode_jitted(replace(method, draft=bad), target, keys_of(BATCH))
    np.testing.assert_array_equal(got.bad_pass, [-1, 0, -1])
    weights = jax.tree.map(lambda x: x, target.params)
    table = weights["params"]["position_embedding"]
    weights["params"]["position_embedding"] = table.at[4 + 5].set(jnp.nan)
    bad = replace(target, params=weights)
    got = toy.decode_jitted(replace(method, draft=draft), bad, keys_of(BATCH))
    np.testing.assert_array_equal(got.bad_pass, [1, 1, 1])


# By hand.


def not_zero(log_p, log_q, drafts, codes):
    return (drafts != 0).astype(jnp.float32)


GRIDS = np.ones((3, 4, 8), np.int32)
GRIDS[0, 1, 1] = GRIDS[0, 2, 6] = 0
GRIDS[2] = 0


def by_hand(tokens, grid):
    return jnp.asarray(GRIDS)


def test_islands_and_passes_by_hand():
    """Image 0 has two islands, image 1 no reject, image 2 nothing else."""
    draft = toy.target(toy.transformer((2, 4), 4), 3)
    target = toy.target(toy.transformer((4, 8), 4), 3)
    method = MuLo(draft, by_hand, rule=not_zero, radius=1, window=8)
    got = toy.decode_jitted(method, target, keys_of(3))
    # Pass 1 verifies. No cell before the first reject (1, 1) is drawn again.
    want = [
        [1, 1, 1, 1, 1, 1, 1, 1],
        [1, 2, 3, 1, 1, 2, 3, 4],
        [4, 5, 6, 1, 1, 5, 6, 7],
        [1, 1, 1, 1, 1, 8, 9, 10],
    ]
    np.testing.assert_array_equal(got.final_pass[0], want)
    redrawn = np.array(want) > 1
    assert ((np.asarray(got.origin[0]) == ACCEPTED) == ~redrawn).all()
    assert [int(got.count(o)[0]) for o in (RESAMPLED, DRAWN, ACCEPTED)] == [2, 12, 18]
    np.testing.assert_array_equal(got.tokens[1], GRIDS[1])
    np.testing.assert_array_equal(got.count(RESAMPLED), [2, 0, 32])
    # Of image 2 the prefill draws the first cell, and a pass each the others.
    np.testing.assert_array_equal(got.target_passes, [10, 1, 32])
    np.testing.assert_array_equal(got.draft_passes, [7, 7, 7])
    np.testing.assert_array_equal(got.prefill_passes, [2, 2, 2])


def test_a_large_table_is_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(neighbours, "KEPT", 1)
    codes = jax.random.normal(jax.random.key(7), (6, 2))
    want = np.asarray(neighbour_table(codes, 3))
    (path,) = tmp_path.rglob("*.npy")

    def again():
        neighbours._table.cache_clear()
        return np.asarray(neighbour_table(codes, 3))

    np.save(path, np.load(path)[:, [0, 2, 1]])  # so that it shows who made it
    np.testing.assert_array_equal(again(), want[:, [0, 2, 1]])
    path.write_bytes(path.read_bytes()[:-5])
    np.testing.assert_array_equal(again(), want)
    np.testing.assert_array_equal(np.load(path), want)


def test_neighbours_by_hand():
    codes = jnp.array([[0.0, 0], [1, 0], [0.9, 0.3], [0, 0], [5, 5]])
    want = [[0, 3, 2], [1, 2, 0], [2, 1, 0], [3, 0, 2], [4, 2, 1]]
    np.testing.assert_array_equal(nearest_codes(codes, 3), want)
    # Itself first, also of two that are alike.
    np.testing.assert_array_equal(nearest_codes(codes, 1)[:, 0], range(5))
    assert neighbour_table(codes, 3) is neighbour_table(codes + 0, 3)
    with pytest.raises(ValueError, match="neighbours must be 1 to 5, .* not 6"):
        nearest_codes(codes, 6)


# In the library.


def test_generate_drafts_with_the_next_smaller_size():
    family = toy.family()
    run = lambda method, **more: jaxspec.generate(
        family, ["red heart", "blue tree"], method=method, seed=3, **more
    )
    kept = run(MuLo(threshold=0.0, neighbours=4))
    keys = jaxspec.image_keys(3, family.read(["red heart", "blue tree"])[1], [0, 0])
    sampling = jaxspec.Sampling.create(12, guidance=2.0, temperature=0.9, top_k=8)
    condition = jnp.asarray(family.condition(["red heart", "blue tree"]))
    low = toy.decode_jitted(
        ZipAR(), family.target(condition, sampling, 8), draft_keys(keys)
    )
    want = Pixels().bind(family)(low.tokens, (4, 4))
    np.testing.assert_array_equal(kept.tokens, want)
    np.testing.assert_array_equal(kept.stats.draft_passes, [3, 3])
    method = json.loads(kept.to_json())["settings"]["method"]
    assert method["name"] == "MuLo" and method["threshold"] == 0
    assert method["upsampler"]["filter"] == "bicubic" and method["draft"] is None
    with toy.compilations() as compiled:
        redrawn = run(MuLo(draft=8, threshold=2.0, neighbours=4))
    assert "start" not in compiled and "_advance" not in compiled
    plain = run(AR())
    np.testing.assert_array_equal(redrawn.tokens, plain.tokens)
    # What was drafted stands beside what was drawn in its place.
    np.testing.assert_array_equal(redrawn.stats.drafts, want)
    assert plain.stats.drafts is None
    sheet, others = redrawn.map(1, family), redrawn.map(1)
    panel = sheet.shape[1] - others.shape[1]
    np.testing.assert_array_equal(sheet[8:264, panel:], others[8:264])
    small = jaxspec.decode_tokens(family, want[1:])[0]
    drawn = sheet[8:264, 8:264][8::16, 8::16]
    np.testing.assert_array_equal(drawn, small)
    for draft, size, said in (
        (None, 8, "toy has no model to draft for 8 px: no smaller size divides it"),
        (12, 16, "toy has no model for 12 px; trained sizes: 8, 16"),
        (16, 8, "a draft of 16 px cannot be enlarged to 8 px"),
    ):
        with pytest.raises(ValueError, match=said):
            run(MuLo(draft=draft), size=size)


def test_the_paper_s_knobs_and_ours():
    paper = MuLo(draft=256, draft_method=ZipAR(16), radius=3, window=16)
    assert MuLo.paper(draft=256) == paper and MuLo.paper(radius=2).radius == 2
    # What the sweeps are around is the default.
    assert MuLo() == sweep.BASE


def test_any_method_drafts(draft, target):
    """Also another MuLo, with a drafter of one cell; traced, not run."""
    tiny = toy.target(toy.transformer((1, 1), CODES), BATCH)
    cascade = MuLo(draft=tiny, upsampler=Nearest(), neighbours=2)
    for inner in (cascade, SCD(4)):
        method = MuLo(draft=draft, upsampler=Nearest(), draft_method=inner)
        method = replace(method, neighbours=2)
        got = jax.eval_shape(jaxspec.decode, method, target, keys_of(BATCH))
        assert got.tokens.shape == (BATCH, *HIGH)


def test_what_does_not_fit_is_refused(draft, target):
    fits = MuLo(draft=draft, upsampler=Nearest(), neighbours=3)
    other = lambda grid, codes=CODES, batch=BATCH: toy.target(
        toy.transformer(grid, codes), batch
    )
    wrong = jnp.zeros((CODES, 2), jnp.int32)
    for knobs, said in (
        (
            {"draft": other((2, 4))},
            "must divide .*, or be a smaller one .*, and is 2 x 4",
        ),
        ({"draft": other(LOW, 7)}, "the target's number of codes, 12, not 7"),
        ({"draft": other(LOW, batch=2)}, "the target's batch of conditions, 3, not 2"),
        ({"draft": 64}, "draft must be a Target, with its condition; a size"),
        ({"table": wrong}, r"table must be \[12, 3\], not \[12, 2\]"),
        ({"neighbours": 13}, "neighbours must be 1 to 12, the number of codes, not 13"),
        ({"upsampler": Pixels()}, "Pixels needs a VQ tokenizer"),
        ({"upsampler": lambda x, _: x}, r"whole numbers \[3, 4, 6\], not int32 \[3, 2"),
    ):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(replace(fits, **knobs).start, target, keys_of(BATCH))
    with pytest.raises(ValueError, match="the target has no codes: create it with"):
        jax.eval_shape(fits.start, replace(target, codes=None), keys_of(BATCH))
    for knobs, said in (
        (
            {"expand": "round"},
            "expand must be square or forward or raster, not 'round'",
        ),
        ({"radius": -1}, "radius must be 0 or more, not -1"),
        ({"window": 0}, "window must be 1 or more, not 0"),
        ({"threshold": float("nan")}, "threshold must be 0 or more, not nan"),
        ({"rule": "Ratio"}, "rule must be a function or a rule"),
    ):
        with pytest.raises(ValueError, match=said):
            MuLo(**knobs)
