"""Trees of drafts: their shapes and masks by hand, and how they are judged."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.acceptance import Cooled, Ratio
from jaxspec.decoding import (
    ACCEPTED,
    BONUS,
    DRAWN,
    RESAMPLED,
    ImageGrammar,
    advance,
    begin,
    tree,
)
from jaxspec.decoding.drafting import Growth, Tree, ancestors, take
from jaxspec.decoding.shapes import Dynamic, Static
from jaxspec.methods import AR, EAGLE, EAGLE2
from jaxspec.models.cache import Cache
from jaxspec.testing import exact_check, keys_of, toy_target
from tests import toy

SMALL = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


# Shapes.


def test_a_node_sees_itself_and_those_above():
    """0 - 1 - 3, 0 - 2 - 4 - 5."""
    parent = jnp.array([[0, 0, 0, 1, 2, 4]])
    want = as_bits("100000", "110000", "101000", "110100", "101010", "101011")
    np.testing.assert_array_equal(ancestors(parent, 3)[0], want)


def as_bits(*rows: str) -> np.ndarray:
    return np.array([[c == "1" for c in row] for row in rows])


def chosen_tree(parent: list[int], depth: list[int]) -> Tree:
    """A tree of one image whose nodes are all there; of token 0, chosen."""
    zeros = jnp.zeros((1, len(parent)), jnp.int32)
    return Tree(
        tokens=zeros,
        parent=jnp.array([parent]),
        depth=jnp.array([depth]),
        valid=zeros == 0,
        scores=zeros,
        drawn=None,
        source=zeros,
    )


def test_what_a_pass_feeds_by_hand():
    """The root at cell 2 of 6 cells; behind it 1 and 2 at cell 3, behind 1 node 3."""
    fed = {}

    class Spy:
        def read(self, cache, tokens, cells, write, visible, slots):
            fed.update(cells=cells, write=write, visible=visible, slots=slots)
            return tokens, cache

        def log_probs(self, read, cells):
            return cells  # of what comes behind

    nodes = chosen_tree(parent=[0, 0, 0, 1], depth=[0, 1, 1, 2])
    decoded = SimpleNamespace(tokens=jnp.zeros((1, 2, 3)))
    state = SimpleNamespace(cache=None, done=jnp.array([3]), decoded=decoded)
    behind, _, _ = tree._read(Spy(), state, nodes, 2)
    np.testing.assert_array_equal(behind, [[3, 4, 4, 5]])
    np.testing.assert_array_equal(fed["cells"], [[2, 3, 3, 4]])
    np.testing.assert_array_equal(fed["slots"], [[2, 6, 7, 8]])
    # Final cells, and of the nodes in scratch slots itself and those above.
    want = as_bits("111000 000", "111000 100", "111000 010", "111000 101")
    np.testing.assert_array_equal(fed["visible"][0], np.delete(want, 6, axis=1))


def test_what_was_kept_is_copied_to_its_cells():
    """Slots hold their numbers: 4 of the prefix, 12 cells, 6 of scratch."""
    target = toy_target(GRID, CODES, 2, guidance=2.0)
    numbers = jnp.broadcast_to(jnp.arange(22.0)[None, None, :, None], (4, 1, 22, 1))
    out = target.keep(
        Cache((numbers,), (numbers,)),
        slots=jnp.array([[14, 16], [12, 17]]),
        cells=jnp.array([[2, 3], [7, 8]]),
        valid=jnp.array([[True, True], [True, False]]),
    )
    want = np.arange(22) * np.ones((4, 1))  # two rows an image
    want[:2, [4 + 2, 4 + 3]] = 4 + 14, 4 + 16
    want[2:, 4 + 7] = 4 + 12
    for found in jax.tree.leaves(out):
        np.testing.assert_array_equal(found[:, 0, :, 0], want)


@pytest.mark.parametrize(
    ("liked", "nodes", "token", "rejected"),
    [
        ([0, 1, 1, 1], [0, 2, 3, 0], 13, False),  # longer, though it comes later
        ([0, 1, 1, 0], [0, 1, 0, 0], 11, False),  # of one length, the first
        ([0, 0, 0, 1], [0, 0, 0, 0], 10, True),  # not below one that is not liked
    ],
)
def test_the_longest_path_is_followed_by_hand(liked, nodes, token, rejected):
    """Behind the root 1 and 2, behind 2 node 3; behind i stands 10 + i."""
    stub = SimpleNamespace(likes=lambda *_: jnp.array([liked]) > 0)
    shape = chosen_tree(parent=[0, 0, 0, 2], depth=[0, 1, 1, 2])
    log_p = jnp.log(jax.nn.one_hot(10 + jnp.arange(4), 16) + 1e-3)[None]
    grammar = ImageGrammar((3, 4))
    route = tree.follow_along(
        shape, log_p, jnp.array([3]), 3, rule=stub, grammar=grammar
    )
    assert route.nodes.tolist() == [nodes] and route.token.tolist() == [token]
    assert route.kept.tolist() == [np.count_nonzero(nodes)]
    assert route.rejected.tolist() == [rejected]


def test_a_static_tree_reads_what_has_children():
    shape = Static(SMALL)
    assert (shape.depth, shape.width, shape.beam, shape.nodes) == (3, 2, 2, 6)
    scores = jnp.zeros((1, 4))
    # Of depth 1 both, of depth 2 the first child of the first.
    np.testing.assert_array_equal(shape.read(jnp.int32(1), scores), [[0, 1]])
    np.testing.assert_array_equal(shape.read(jnp.int32(2), scores), [[0, 0]])
    # 2 of depth 1, 4 of depth 2 (the last is not there), 4 of depth 3.
    np.testing.assert_array_equal(shape.kept(scores), [[0, 1, 2, 3, 4, 6]])


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ((), "a tree must be a tuple of paths such as"),
        (([0],), "a tree must be a tuple of paths such as"),
        (((0,), (1, 0)), r"path \(1, 0\) of a tree .* and \(1,\) be in the tree"),
        (((0,), (0,)), "a path is twice in the tree"),
    ],
)
def test_what_is_no_tree_is_refused(paths, said):
    with pytest.raises(ValueError, match=said):
        EAGLE(tree=paths)


# A drafter that knows only the token it is fed, and says so in its table.


@dataclass(frozen=True)
class Bigrams:
    """What follows a code is `log_q` [V, V]; its features count how it was fed."""

    log_q: jax.Array
    width = 1

    def follow(self, cache, features, tokens, cells, write, visible, slots):
        return self.log_q[tokens], features + 1, cache


def random_log(*shape, seed=0):
    x = np.random.default_rng(seed).normal(0, 1.5, shape)
    return jax.nn.log_softmax(jnp.asarray(x, jnp.float32))


@partial(jax.jit, static_argnums=(1, 3))
def grown(log_q, shape, done, draws=False) -> Tree:
    """Trees behind final tokens 2 and 1, the last of `done` [B] of 12 cells."""
    b, length = len(done), shape.depth + 1
    final = jnp.array([2, 1, *[0] * length])[None, :length]
    growth = Growth(
        drafter=Bigrams(log_q),
        shape=shape,
        draws=draws,
        cells=12,
        end=12,
        keys=keys_of(b),
        attempt=jnp.zeros(b, jnp.int32),
        done=done,
        tokens=jnp.broadcast_to(final, (b, length)),
        fresh=jnp.full(b, 2),
        features=jnp.zeros((b, length, 1)),
    )
    return growth.grow(Cache((), ()))[0]


def paths_of(out: Tree, image: int) -> dict[int, tuple[int, ...]]:
    """Tokens from the root to each node that is valid."""
    paths = {0: ()}
    for node in range(1, out.tokens.shape[1]):
        if out.valid[image, node]:
            above = paths[int(out.parent[image, node])]
            paths[node] = (*above, int(out.tokens[image, node]))
    return paths


def test_a_dynamic_tree_has_the_likeliest_paths():
    log_q, shape = random_log(4, 4), Dynamic(3, 16, 9).fitting(4)
    assert shape == Dynamic(3, 4, 9)
    out = grown(log_q, shape, jnp.array([3, 11]))
    scores, beam = {}, {(): 0.0}
    for _ in range(3):
        offered = {
            (*path, code): score + float(log_q[(1, *path)[-1], code])
            for path, score in beam.items()
            for code in range(4)
        }
        scores |= offered
        beam = {p: offered[p] for p in sorted(offered, key=offered.get)[-4:]}
    got = paths_of(out, 0)
    assert set(got.values()) == {(), *sorted(scores, key=scores.get)[-9:]}
    assert [len(path) for path in got.values()] == out.depth[0].tolist()
    # Image 1 has one cell left.
    np.testing.assert_array_equal(out.valid[1], out.depth[1] <= 1)
    assert len(paths_of(out, 1)) == 5


def test_a_static_tree_has_the_codes_of_its_ranks():
    log_q = random_log(4, 4, seed=1)
    rank = np.argsort(-np.asarray(log_q), axis=1)

    def codes(path, code=1):
        below = rank[code, path[0]] if path else 0
        return (below, *codes(path[1:], below)) if path else ()

    out = grown(log_q, Static(SMALL), jnp.array([3]))
    assert set(paths_of(out, 0).values()) == {(), *map(codes, SMALL)}


IMAGES = 20_000
DONE = jnp.full(IMAGES, 3)


def test_children_are_drawn_without_replacement():
    """The order of a root's two children, counted; a code of no probability is none."""
    log_q = random_log(3, 3).at[1, 2].set(-jnp.inf)
    log_q = jax.nn.log_softmax(log_q, axis=-1)
    out = grown(log_q, Static(((0,), (1,), (2,))), DONE, True)
    np.testing.assert_array_equal(out.valid, [[True, True, True, False]] * IMAGES)
    np.testing.assert_array_equal(np.sort(out.tokens[:, 1:3]), [[0, 1]] * IMAGES)
    assert_frequent(out.tokens[:, 1], np.exp(log_q[1]))
    np.testing.assert_array_equal(out.source, 0)
    np.testing.assert_array_equal(out.drawn[0], log_q[None, 1])


def assert_frequent(codes, p):
    """Codes come as often as they should, within five standard deviations."""
    got = np.bincount(codes, minlength=len(p)) / len(codes)
    assert np.all(np.abs(got - p) <= 5 * np.sqrt(p * (1 - p) / len(codes))), (got, p)


# Judging: what follows each node is a table too, so that the distribution is known.


@partial(jax.jit, static_argnums=(2, 3))
def first_two(out: Tree, log_p, depth: int, rule):
    """Tokens of the next two cells, and whether the second was reached."""
    common = out, log_p[out.tokens], keys_of(IMAGES, 1), DONE, depth
    if rule is None:
        route = tree.draw_along(*common)
    else:
        how = {"rule": rule, "grammar": ImageGrammar((3, 4))}
        route = tree.judge_along(*common, passes=0 * DONE + 1, **how)
    tokens = take(out.tokens, route.nodes[:, 1:3])
    last = jnp.arange(2)[None] == route.kept[:, None]
    tokens = jnp.where(last, route.token[:, None], tokens)
    return tokens[:, 0], tokens[:, 1], route.kept > 0


@pytest.mark.parametrize(
    ("shape", "draws", "rule"),
    [
        (Dynamic(2, 3, 6), False, None),
        (Dynamic(2, 3, 6), False, Ratio()),
        (Static(SMALL), True, Ratio()),
        # Stricter with depth, and it makes up for that in what a reject leaves.
        (Static(SMALL), True, Cooled(delta=0.8, nu=0.5)),
    ],
    ids=["chosen, drawn along", "chosen", "drawn", "cooled"],
)
def test_both_ways_to_judge_are_exact(shape, draws, rule):
    log_p = random_log(4, 4, seed=2)
    out = grown(random_log(4, 4), shape, DONE, draws)
    first, second, reached = map(np.asarray, first_two(out, log_p, shape.depth, rule))
    assert_frequent(first, np.exp(log_p[1]))
    assert 0.1 < reached.mean() < 0.9
    for code in set(first[reached]):
        assert_frequent(second[reached & (first == code)], np.exp(log_p[code]))


def test_a_chosen_child_judged_as_drawn_is_not():
    """So the test can fail."""
    log_p, shape = random_log(4, 4, seed=2), Static(SMALL)
    out, drawn = (
        grown(random_log(4, 4), shape, DONE, draws) for draws in (False, True)
    )
    first, *_ = first_two(replace(out, drawn=drawn.drawn), log_p, shape.depth, Ratio())
    with pytest.raises(AssertionError):
        assert_frequent(np.asarray(first), np.exp(log_p[1]))


def test_a_rule_knows_how_deep_a_child_is():
    """Certain at the root's children, and hopeless behind them."""
    out = grown(random_log(4, 4), Static(SMALL), DONE, True)
    steep = Cooled(delta=1e6, nu=100.0)
    static = {"static_argnums": 4, "static_argnames": ("rule", "grammar")}
    route = jax.jit(tree.judge_along, **static)(
        out,
        random_log(4, 4, seed=2)[out.tokens],
        keys_of(IMAGES, 1),
        DONE,
        3,
        passes=0 * DONE + 1,
        rule=steep,
        grammar=ImageGrammar((3, 4)),
    )
    np.testing.assert_array_equal(route.kept, 1)


# Methods.

GRID, CODES = (3, 4), 12


def test_eagle_2_draws_what_ar_draws_in_fewer_passes():
    target = toy_target(GRID, CODES, 2, guidance=2.0)
    method = EAGLE2(target, depth=3, top_k=4, total=9)
    keys = keys_of(2)
    want = toy.decode_jitted(AR(), target, keys).tokens
    out = toy.decode_jitted(method, target, keys)
    np.testing.assert_array_equal(out.tokens, want)
    assert (out.target_passes < 8).all()
    # A drafter that knows nothing changes nothing but the counts, and compiles nothing.
    other = toy_target(GRID, CODES, 2, seed=1, guidance=3.0, temperature=0.5)
    with toy.compilations() as compiled:
        worse = toy.decode_jitted(replace(method, draft=other), target, keys)
    assert compiled == []
    np.testing.assert_array_equal(worse.tokens, want)
    assert (worse.count(ACCEPTED) < out.count(ACCEPTED)).all()
    for x in (out, worse):
        kinds = sum(x.count(kind) for kind in (DRAWN, ACCEPTED, RESAMPLED, BONUS))
        np.testing.assert_array_equal(kinds, 12)
        np.testing.assert_array_equal(x.count(DRAWN), 1)
        assert (x.drafted <= 9 * x.target_passes).all()
        assert (x.draft_passes <= 3 * x.target_passes).all()
        np.testing.assert_array_equal(x.prefill_passes, 2)
        # A round ends with a token of the target's, but for one that fills the grid.
        drawn = x.count(RESAMPLED) + x.count(BONUS)
        assert ((x.target_passes - drawn >= 0) & (x.target_passes - drawn <= 1)).all()


def test_a_drafter_equal_to_the_target_is_kept_to_full_depth():
    """The first child drawn is always kept: rounds of 4 cells from cell 1 on.

    Greedy, and in chunks beside an image whose drafter sees something else.
    """
    target = toy_target(GRID, CODES, 2, temperature=0)
    other = 3 * toy.conditions(target.model.config, 1, seed=55)[0]
    draft = replace(target, condition=target.condition.at[1].set(other))
    method, keys = EAGLE(draft, TREE), keys_of(2)
    state = begin(method, target, keys)
    while not method.finished(state).all():
        state = advance(method, target, state, np.int32(1))
    out = method.decoded(state)
    np.testing.assert_array_equal(
        out.tokens, toy.decode_jitted(AR(), target, keys).tokens
    )
    assert out.target_passes[0] == 3
    origin = "d" + "aaab" * 2 + "aaa"
    kinds = {"d": DRAWN, "a": ACCEPTED, "b": BONUS}
    np.testing.assert_array_equal(out.origin[0].ravel(), [kinds[c] for c in origin])
    passes = [0] + [1] * 4 + [2] * 4 + [3] * 3
    np.testing.assert_array_equal(out.final_pass[0].ravel(), passes)
    assert (out.drafted[0], out.draft_passes[0]) == (7 * 3, 3 * 3)
    assert out.target_passes[1] > 5
    alone = toy.decode_jitted(toy.take(method, [0]), toy.take(target, [0]), keys[:1])
    jax.tree.map(
        np.testing.assert_array_equal, alone, jax.tree.map(lambda x: x[:1], out)
    )


def test_every_grid_comes_as_often_as_it_should():
    """`EAGLE2` draws what AR draws; here children are drawn, of fewer than it asks."""
    draft = toy_target((2, 3), 3, seed=1, width=8, depth=1, top_k=2)
    target = toy_target((2, 3), 3, depth=1, guidance=1.5, temperature=0.8)
    check = exact_check(EAGLE(draft, TREE), target)
    assert check.passed, check


def test_what_does_not_fit_is_refused():
    target = toy_target(GRID, CODES, 2)
    for draft, message in [
        (toy_target((4, 3), CODES, 2), r"the target's grid, \(3, 4\), not \(4, 3\)"),
        (toy_target(GRID, 9, 2), "the target's number of codes, 12, not 9"),
        ("emoji", "draft must be a Target"),
        (None, "draft must be a Target"),
    ]:
        with pytest.raises(ValueError, match=message):
            EAGLE2(draft).start(target, keys_of(2))
    few = toy_target(GRID, 3, 2)
    with pytest.raises(ValueError, match="4 children of a node, and there are 3 codes"):
        EAGLE(few).start(few, keys_of(2))
    with pytest.raises(ValueError, match="total must be 1 or more, not 0"):
        EAGLE2(target, total=0)


def test_a_drafter_that_breaks_is_noted():
    target = toy_target(GRID, CODES, 2)
    weights = jax.tree.map(lambda x: x, target.params)
    table = weights["params"]["position_embedding"]
    # What is fed at cell 5.
    weights["params"]["position_embedding"] = table.at[4 + 5].set(jnp.nan)
    draft = replace(target, params=weights)
    method = EAGLE2(draft, depth=1, top_k=1, total=1)
    out = toy.decode_jitted(method, target, keys_of(2))
    assert (out.bad_pass > 0).all()
