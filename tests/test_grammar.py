"""Rows that end with a newline: cells, passes and counts by hand, and exactness."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Sampling
from jaxspec.decoding import (
    ACCEPTED,
    BONUS,
    DRAWN,
    FORCED,
    RESAMPLED,
    ImageGrammar,
    Target,
    tree,
    wavefront,
)
from jaxspec.decoding.drafting import Tree
from jaxspec.methods import (
    AR,
    EAGLE,
    EAGLE2,
    LANTERN,
    LANTERNPP,
    LPD,
    PJD,
    SCD,
    SJD,
    SSD,
    FlashAR,
    MuLo,
    Speculative,
    ZipAR,
)
from jaxspec.methods.lantern import Pooled
from jaxspec.methods.upsampled import Upsampled, draft_keys
from jaxspec.models import abstract
from jaxspec.models.lpd import LPDConfig, LPDNet
from jaxspec.pipeline import Pipeline
from jaxspec.testing import (
    divergence,
    exact_check,
    keys_of,
    random_weights,
    toy_target,
)
from jaxspec.upsampling import Nearest
from tests import toy, toy_lumina

D, A, R, B, F = DRAWN, ACCEPTED, RESAMPLED, BONUS, FORCED
TREE = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))


def target(grid, codes=3, batch=1, **how):
    return toy_target(grid, codes, batch, newline=True, **how)


@dataclass(frozen=True)
class Always:
    """Keeps all drafts, or none."""

    chance: float

    def __call__(self, log_p, log_q, drafts, codes=None):
        return jnp.full(drafts.shape, self.chance)


# By hand: 2 rows of 3 cells. With newlines the cells are 0 1 2 N, 4 5 6 N.


def decoded(method, grid=(2, 3)):
    return toy.decode_jitted(method, target(grid, batch=2, guidance=2.0), keys_of(2))


BY_HAND = {
    "AR": (AR(), [[0, 1, 2, 0], [3, 4, 5, 0]], [[D, D, D, F], [D, D, D, F]], 0),
    "ZipAR": (ZipAR(1), [[0, 1, 2, 0], [1, 2, 3, 0]], [[D, D, D, F], [D, D, D, F]], 0),
    # 1 and 2 are kept, the newline is certain, 4 is for free; then 5 and 6.
    "SJD, all kept": (
        SJD(4, "repeat-left", Always(1.0)),
        [[0, 1, 1, 0], [1, 2, 2, 0]],
        [[D, A, A, F], [B, A, A, F]],
        4,
    ),
    # The pass of cell 4 has the newline as a draft, which no rule rejects.
    "SJD, none kept": (
        SJD(3, rule=Always(0.0)),
        [[0, 1, 2, 0], [3, 4, 5, 0]],
        [[D, R, R, F], [R, R, R, F]],
        2 + 1 + 1 + 2 + 1,
    ),
    # Row 1 is open from the start on, and behind row 0 by a cell.
    "PJD, all kept": (
        PJD(2, 1, initial="repeat-above", rule=Always(1.0)),
        [[0, 1, 1, 0], [1, 2, 2, 0]],
        [[D, A, B, F], [A, A, B, F]],
        3,
    ),
    # 1, 2 and the newline are kept and 4 is for free; then 5 and 6. Of 3 levels, that
    # of the newline and what is behind 6 have no drafts: 2 + 4 in each of two rounds.
    "LANTERN, all kept": (
        LANTERN(target((2, 3), batch=2, seed=1), 3, 2, 99, delta=1.0),
        [[0, 1, 1, 0], [1, 2, 2, 0]],
        [[D, A, A, F], [B, A, A, F]],
        2 * (2 + 4),
    ),
    "LANTERN++, all kept": (
        LANTERNPP(target((2, 3), batch=2, seed=1), TREE, ratio=1e9),
        [[0, 1, 1, 0], [1, 2, 2, 0]],
        [[D, A, A, F], [B, A, A, F]],
        2 * (2 + 2),
    ),
    "MuLo, all kept": (
        MuLo(target((2, 1), batch=2), Nearest(), AR(), threshold=0.0, neighbours=1),
        [[1, 1, 1, 0], [1, 1, 1, 0]],
        [[A, A, A, F], [A, A, A, F]],
        6,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_cells_passes_and_counts(name):
    method, final, origin, drafted = BY_HAND[name]
    out = decoded(method)
    for i in range(2):
        np.testing.assert_array_equal(out.final_pass[i], final)
        np.testing.assert_array_equal(out.origin[i], origin)
    np.testing.assert_array_equal(out.target_passes, np.max(final))
    np.testing.assert_array_equal(out.drafted, drafted)
    np.testing.assert_array_equal(out.tokens[..., 3], 3)
    assert np.max(out.tokens[..., :3]) < 3
    assert out.summary()["cells"] == 6
    np.testing.assert_array_equal(out.picture().tokens, out.tokens[..., :3])
    assert out.picture().summary() == out.summary()


def test_first_drafts_never_copy_a_newline():
    """A window that ends at a row's end: behind the newline, the code above is left."""
    out = decoded(SJD(3, "repeat-left", Always(1.0)))
    first, last = np.asarray(out.tokens[:, 0, 0]), np.asarray(out.tokens[:, 1, 2])
    want = np.stack([first, first, first, first, first, last], axis=-1)
    np.testing.assert_array_equal(out.picture().tokens.reshape(2, 6), want)
    np.testing.assert_array_equal(out.origin[0, 1], [A, A, B, F])


@pytest.mark.parametrize(("window", "passes"), [(8, 377), (16, 753), (24, 1129)])
def test_passes_of_released_zipar_at_768_px(window, passes):
    """The released window counts the newline: 8 is 7 tokens of the row above."""
    after = jax.jit(lambda p: p & ~wavefront.ready(p, window - 1))
    pending = ~ImageGrammar((48, 49), 9).mask[None].at[0, 0, 0].set(True)
    for _ in range(passes - 2):
        pending = after(pending)
    assert pending.any()
    assert not after(pending).any()
    assert passes == 48 + 47 * (window - 1)


# Exactness.

GRID = (2, 2)
TOP_K = {"temperature": 0.8, "guidance": 1.5, "top_k": 2}
TOP_P = {"temperature": 1.2, "guidance": 0.5, "top_p": 0.8}


def drafter(grid=GRID, **sampling):
    """Knows nothing of the target."""
    return target(grid, seed=1, width=8, depth=1, **sampling)


EXACT = [
    (AR(), TOP_K),
    (ZipAR(1, adaptive=True), {}),  # judged with the whole row above, if not before
    (SJD(3), TOP_P),
    (SJD(4, "repeat-left"), {}),
    (SJD(3, "sample-left"), TOP_K),
    (SCD(3, "upsampled", upsampled=Upsampled(drafter((2, 1)), Nearest(), AR())), TOP_P),
    (PJD(2, 2, "maximal"), TOP_K),
    (Speculative(drafter(), 2), TOP_K),
    (EAGLE2(drafter(), depth=3, top_k=2, total=5), TOP_P),
    (EAGLE(drafter(), tree=TREE), {}),
    (LANTERN(drafter(), 3, 2, 5, neighbours=3, delta=0.0), TOP_P),
    (LANTERNPP(drafter(), TREE, ratio=1.0), TOP_K),
    (MuLo(drafter((1, 1)), Nearest(), AR(), threshold=2.0, neighbours=1), {}),
]


@pytest.mark.parametrize(("method", "sampling"), EXACT, ids=str)
def test_exact_methods_draw_every_picture_as_often_as_they_should(method, sampling):
    check = exact_check(method, target(GRID, **sampling))
    assert check.grids == 81
    assert check.passed, check


def test_what_a_cell_can_hold():
    grammar, inf = ImageGrammar((2, 3), 3), -np.inf
    got = grammar.allowed(jnp.zeros((1, 2, 4)), jnp.array([[4, 5]]))
    np.testing.assert_array_equal(got, [[[0, 0, 0, inf], [inf, inf, inf, 0]]])
    assert (grammar.picture, grammar.end) == ((2, 2), 5)
    np.testing.assert_array_equal(
        grammar.written(jnp.ones((1, 2, 2), int))[0, 1], [1, 1, 3]
    )
    with pytest.raises(ValueError, match="newline code, 3, not None"):
        Speculative(toy_target((2, 3), 4)).start(target((2, 2)), keys_of(1))


def test_no_rule_keeps_what_the_grammar_forbids():
    """A newline in a picture's cell, a code in a newline's, and what rejects leave."""
    grammar, codes = ImageGrammar((2, 3), 3), jnp.array([[1, 2, 3], [0, 2, 3], [0] * 3])
    codes = jnp.concatenate([codes, jnp.array([[0, 1, 2]])])  # all others of each
    certain = jnp.where(jnp.arange(4) == 3, 0.0, -jnp.inf)
    even = jnp.where(jnp.arange(4) < 3, -jnp.log(3.0), -jnp.inf)
    rule = Pooled(3, delta=1.0, residual="released")
    b, static = 50, ("rule", "grammar")
    judge = jax.jit(tree.judge_along, static_argnums=4, static_argnames=static)
    for cell, child, log_p in ((1, 3, even), (2, 0, certain)):
        one = jnp.zeros((b, 2), jnp.int32)
        grown = Tree(
            tokens=one.at[:, 1].set(child),
            parent=one,
            depth=one.at[:, 1].set(1),
            valid=one == 0,
            scores=jnp.zeros((b, 1)),
            drawn=None,
            source=one,
        )
        route = judge(
            grown,
            jnp.broadcast_to(log_p, (b, 2, 4)),
            keys_of(b),
            jnp.full(b, cell),
            1,
            passes=jnp.ones(b, jnp.int32),
            rule=rule,
            codes=codes,
            grammar=grammar,
        )
        # All of p is pooled, so the rule would keep it; of what it leaves, which is all
        # codes alike, those that fit are drawn.
        np.testing.assert_array_equal(route.kept, 0)
        assert set(np.asarray(route.token).tolist()) == (
            {3} if cell == 2 else {0, 1, 2}
        )


def test_methods_that_draw_no_newlines_say_so_first(monkeypatch):
    family = toy_lumina.family()
    monkeypatch.setattr(Pipeline, "show", lambda *_: pytest.fail("it ran"))
    for method in (LPD(), FlashAR(), SSD()):
        said = f"{type(method).__name__} draws grids without newlines only, and this"
        with pytest.raises(ValueError, match=said):
            jaxspec.generate(family, "a cat", method=method)
    with pytest.raises(ValueError, match="LPD draws grids without newlines only"):
        LPD(lpd_target()).start(target((2, 2)), keys_of(1))


def lpd_target():
    """LPD's model of the same cells and codes, the newlines among them."""
    config = LPDConfig(4, 8, 1, 2, 16, (2, 3), "features", 4, 8)
    shapes = abstract.lpd(config)
    condition = target((2, 2)).condition
    how = random_weights(shapes), condition, Sampling.create(4)
    return Target.create(LPDNet(config), *how)


def test_greedy_methods_agree():
    greedy = target((3, 4), 12, 3, temperature=0)
    keys = keys_of(3)
    want = toy.decode_jitted(AR(), greedy, keys)
    for method in (ZipAR(4), PJD(3, 4)):
        got = toy.decode_jitted(method, greedy, keys)
        assert divergence(got, want, greedy).explained(1e-4), method


# All methods, once more: every cell comes from somewhere, and no image depends on
# those beside it.

CELLS = [
    ZipAR(2, adaptive=True),
    PJD(2, 2, "maximal"),
    MuLo(
        target((1, 2), 12, 4, seed=1),
        Nearest(),
        AR(),
        threshold=0.1,
        neighbours=2,
        rows=1,
        radius=1,
        window=2,
        refresh="after",
    ),
]


@pytest.mark.parametrize("method", CELLS, ids=lambda m: type(m).__name__)
def test_every_cell_comes_from_somewhere_whatever_is_beside_it(method):
    several, keys = target((3, 4), 12, 4), keys_of(4)
    out = toy.decode_jitted(method, several, keys)
    parts = [out.count(o) for o in (DRAWN, ACCEPTED, RESAMPLED, BONUS)]
    np.testing.assert_array_equal(sum(parts), 12)
    np.testing.assert_array_equal(out.count(FORCED), 3)
    assert (out.drafted >= out.count(ACCEPTED)).all()
    assert (out.bad_pass == -1).all()
    got = toy.decode_jitted(toy.take(method, [2]), toy.take(several, [2]), keys[2:3])
    want = jax.tree.map(lambda x: x[2:3], out)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_drafter_of_the_same_shape_need_not_divide_the_grid():
    """2 by 2 cells for 3 by 3, as 512 px for 768: copied, all of them are kept."""
    draft = target((2, 2), seed=1)
    method = MuLo(draft, Nearest(), AR(), threshold=0.0, neighbours=1)
    out = toy.decode_jitted(method, target((3, 3)), keys_of(1))
    low = toy.decode_jitted(AR(), draft, draft_keys(keys_of(1))).tokens
    which = np.array([0, 0, 1])  # of 3 cells, the floor of 2/3 of their numbers
    want = np.asarray(low)[:, which][:, :, which]
    np.testing.assert_array_equal(out.picture().tokens, want)
    assert out.drafted == 9 and out.target_passes == 1
    rounds = replace(method, rows=1)
    with pytest.raises(ValueError, match="divide the target's, 3, and it has 2"):
        rounds.start(target((3, 3)), keys_of(1))
