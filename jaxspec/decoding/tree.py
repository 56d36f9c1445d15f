"""The tree engine: a tree of drafts, judged in one pass, kept along one path.

A round: a drafter grows a tree of candidates behind the newest final token
(`drafting`), and one pass of the target reads all of it, each node seeing the final
cells and the nodes above it, which gives the target's distribution behind every node.
From the root on, the children of a node are tested one after the other; the first that
is kept is gone to, and where none is, a token is drawn in their place. What was kept is
final, its keys and values are moved from scratch slots to its cells, and the next tree
grows from the token that was drawn.

`judge_along` keeps a child with a chance, and a reject leaves the residual for those
after it (SpecInfer, Miao et al. 2023, arXiv 2305.09781, algorithm 2; without
replacement as in EAGLE's code). Where children were chosen without chance and the rule
is exact, that is the same as drawing a token from the target and looking which child
has it, which is what `draw_along` does. `follow_along` leaves nothing to chance: it
goes to the end of the longest path of which a rule likes every node.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxspec.acceptance import Ratio, Rule, chance, rest_of
from jaxspec.decoding.decoded import ACCEPTED, BONUS, RESAMPLED, Decoded
from jaxspec.decoding.drafting import Growing, Growth, Tree, ancestors, take
from jaxspec.decoding.first import draw_first
from jaxspec.decoding.grammar import ImageGrammar
from jaxspec.decoding.jacobi import one_hot
from jaxspec.decoding.target import Target
from jaxspec.models.cache import Cache
from jaxspec.sampling import ACCEPT, DRAW, cell_keys, draw, likeliest, uniform


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TreeState:
    """What a round leaves to the next.

    Attributes:
      cache: the target's.
      drafting: the drafter's.
      keys: [B] image keys.
      done: int32 [B], final cells.
      fresh: int32 [B], how many of them the drafter has not read, D + 1 at most.
      features: [R, D + 1, F], the target's, of what stands before each of these.
      codes: what the rule is given, or None.
      decoded: the result so far.
    """

    cache: Cache
    drafting: Cache
    keys: jax.Array
    done: jax.Array
    fresh: jax.Array
    features: jax.Array
    codes: jax.Array | None
    decoded: Decoded


@runtime_checkable
class Likes(Protocol):
    """A rule without chance."""

    def likes(
        self, log_p: jax.Array, drafts: jax.Array, codes: jax.Array | None
    ) -> jax.Array:
        """Which drafts [B, M] are liked, each in a distribution [B, M, V] of its own.

        `codes` are what rules are given.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """The path that was kept.

    Attributes:
      nodes: int32 [B, D + 1], the root and what was kept behind it; 0 after that.
      kept: int32 [B], how many nodes behind the root.
      token: int32 [B], what was drawn behind the last of them.
      rejected: bool [B], that one had children, and none of them was kept.
    """

    nodes: jax.Array
    kept: jax.Array
    token: jax.Array
    rejected: jax.Array

    @staticmethod
    def begin(batch: int, depth: int) -> "Route":
        none = jnp.zeros(batch, jnp.int32)
        nodes = jnp.zeros((batch, depth + 1), jnp.int32)
        return Route(nodes, none, none, none > 0)

    @property
    def last(self) -> jax.Array:
        """int32 [B, 1], the node that was reached."""
        return take(self.nodes, self.kept[:, None])

    def to(self, node: jax.Array, going: jax.Array) -> "Route":
        """One node [B] further, where `going`."""
        kept = self.kept + going
        place = jnp.arange(self.nodes.shape[1])[None]
        new = going[:, None] & (place == kept[:, None])
        return replace(self, nodes=jnp.where(new, node[:, None], self.nodes), kept=kept)


def start(
    target: Target, how: Growing, keys: jax.Array, codes: jax.Array | None = None
) -> TreeState:
    """Prefills target and drafter, and draws cell 0; `codes` are for the rule."""
    read, cache = target.read_prefix(scratch=how.shape.nodes)
    first = jnp.zeros((target.batch, 1), jnp.int32)
    log_p = target.log_probs(read[:, -1:], first)[:, 0]
    _, _, cache, decoded = draw_first(target, keys, (log_p, cache))
    features = jnp.pad(read[:, -1:], ((0, 0), (0, how.shape.depth), (0, 0)))
    one = jnp.ones(target.batch, jnp.int32)
    return TreeState(
        cache=cache,
        drafting=how.drafter.prefill(read, how.scratch),
        keys=keys,
        done=one,
        fresh=one,
        features=features[..., : how.drafter.width],
        codes=codes,
        decoded=replace(decoded, prefill_passes=decoded.prefill_passes + 1),
    )


def step(
    target: Target, how: Growing, state: TreeState, rule: Rule | Likes
) -> TreeState:
    """A round: D passes of the drafter, one of the target, a cell or more.

    Args:
      target: the model.
      how: trees grow.
      state: from `start` or the step before.
      rule: judges children, or says which it likes.
    """
    n, end = state.decoded.tokens[0].size, target.grammar.end
    active = state.done < end
    tree, drafting = _growth(how, state).grow(state.drafting)
    log_p, read, cache = _read(target, state, tree, how.shape.depth)
    passes = state.decoded.target_passes + active
    if isinstance(rule, Likes):
        route = follow_along(
            tree,
            log_p,
            state.done,
            how.shape.depth,
            rule=rule,
            grammar=target.grammar,
            codes=state.codes,
        )
    elif rule == Ratio() and not how.draws:
        route = draw_along(tree, log_p, state.keys, state.done, how.shape.depth)
    else:
        route = judge_along(
            tree,
            log_p,
            state.keys,
            state.done,
            how.shape.depth,
            passes=passes,
            rule=rule,
            grammar=target.grammar,
            codes=state.codes,
        )
    left = jnp.clip(end - state.done, 0, how.shape.depth)
    decoded = replace(
        state.decoded,
        target_passes=passes,
        draft_passes=state.decoded.draft_passes + left,
    )
    nodes = state.done[:, None] - 1 + tree.depth[:, 1:]
    decoded = decoded.judged(nodes, tree.valid[:, 1:])
    decoded = decoded.check(tree.scores[..., None], active[:, None])
    decoded = decoded.check(log_p, tree.valid)

    # The nodes behind the root, and what was drawn behind the last of them.
    place, kept = jnp.arange(how.shape.depth + 1)[None], route.kept[:, None]
    behind = jnp.roll(route.nodes, -1, axis=1)
    tokens = jnp.where(place < kept, take(tree.tokens, behind), route.token[:, None])
    cells = state.done[:, None] + place
    settled = (place <= kept) & (cells < end)
    drawn = jnp.where(route.rejected, RESAMPLED, BONUS)[:, None]
    origin = jnp.where(place < kept, ACCEPTED, drawn)
    features = take(read, target.rows(route.nodes))
    return TreeState(
        cache=target.keep(cache, n - 1 + behind, cells, settled & (place < kept)),
        drafting=drafting,
        keys=state.keys,
        done=state.done + (route.kept + 1) * active,
        fresh=route.kept + 1,
        features=features[..., : how.drafter.width],
        codes=state.codes,
        decoded=decoded.settle(cells, settled, tokens, origin),
    )


def _growth(how: Growing, state: TreeState) -> Growth:
    """What the next tree grows from."""
    tokens = state.decoded.tokens.reshape(len(state.done), -1)
    n = tokens.shape[1]
    place = (state.done - state.fresh)[:, None] + jnp.arange(how.shape.depth + 1)[None]
    return Growth(
        drafter=how.drafter,
        shape=how.shape,
        draws=how.draws,
        cells=n,
        end=state.decoded.grammar.end,
        keys=state.keys,
        attempt=state.decoded.target_passes,
        done=state.done,
        tokens=take(tokens, jnp.clip(place, 0, n - 1)),
        fresh=state.fresh,
        features=state.features,
    )


def _read(
    target: Target, state: TreeState, tree: Tree, depth: int
) -> tuple[jax.Array, jax.Array, Cache]:
    """The target's pass over a tree: [B, M, V] behind each node, features, cache.

    The root is written to its cell, the other nodes to scratch slots.
    """
    (b, m), n = tree.tokens.shape, state.decoded.tokens[0].size
    place = jnp.arange(m)[None]
    cells = jnp.minimum(state.done[:, None] - 1 + tree.depth, n - 1)
    slots = jnp.where(place > 0, n - 1 + place, cells)
    before = jnp.arange(n)[None, None] < state.done[:, None, None]
    before = jnp.broadcast_to(before, (b, m, n))
    above = ancestors(tree.parent, depth)[..., 1:]
    visible = jnp.concatenate([before, above], axis=-1)
    read, cache = target.read(
        state.cache, tree.tokens, cells, tree.valid, visible, slots
    )
    return target.log_probs(read, cells + 1), read, cache


def draw_along(
    tree: Tree, log_p: jax.Array, keys: jax.Array, done: jax.Array, depth: int
) -> Route:
    """Draws a token behind each node, and goes on where a child has it.

    The noise is the cell's own, as in plain AR decoding: where no rounding decides, the
    tokens are AR's of the same keys, whatever the drafter.

    Args:
      tree: of which `valid` children count.
      log_p: float32 [B, M, V], the target's distribution behind each node.
      keys: [B] image keys.
      done: int32 [B], the cell behind the root.
      depth: of the tree.
    """

    def on(carry):
        route, over = carry
        node = route.last
        cell = done[:, None] + route.kept[:, None]
        token = draw(cell_keys(keys, cell), take(log_p, node))
        child = _children(tree, node)
        same = child & (tree.tokens == token)
        going = jnp.any(same, axis=1) & ~over
        rejected = jnp.any(child, axis=1) & ~going
        route = replace(
            route,
            token=jnp.where(over, route.token, token[:, 0]),
            rejected=jnp.where(over, route.rejected, rejected),
        )
        return route.to(jnp.argmax(same, axis=1), going), ~going

    begin = Route.begin(len(done), depth), ~tree.valid[:, 0]
    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[1]), on, begin)[0]


def _children(tree: Tree, node: jax.Array) -> jax.Array:
    """Which nodes [B, M] are candidates behind a node [B, 1]."""
    below = (tree.parent == node) & tree.valid
    return below.at[:, 0].set(False)  # the root is nobody's child


def judge_along(
    tree: Tree,
    log_p: jax.Array,
    keys: jax.Array,
    done: jax.Array,
    depth: int,
    *,
    passes: jax.Array,
    rule: Rule,
    grammar: ImageGrammar,
    codes: jax.Array | None = None,
) -> Route:
    """Tests the children of a node one after the other, and goes to the first kept.

    A reject leaves of p what the rule says, by default the residual; of q, what the
    next child was drawn from: q without the rejects.

    Args:
      tree, log_p, keys, done, depth: as for `draw_along`.
      passes: int32 [B], the number of this pass.
      rule: judges a child; its place is its depth behind the root's children. It may
        have `rejected(log_p, log_q, drafts, codes)`, what a reject leaves of p,
        log-probabilities [B, 1, V], where that is not its residual.
      grammar: no rule rejects a newline, or keeps what cannot be.
      codes: for the rule.
    """
    b, m, v = log_p.shape
    place = jnp.arange(m)[None]

    def left(p, q, token, cell, deep):
        own = getattr(rule, "rejected", None)
        rest = own(p, q, token, codes) if own else rest_of(rule, p, q, deep)
        if grammar.newline is None:
            return rest
        return jax.nn.log_softmax(grammar.allowed(rest, cell), axis=-1)

    def on(carry):
        route, over, p, tried, after = carry
        node = route.last
        open_ = _children(tree, node) & (place > after[:, None])
        some = jnp.any(open_, axis=1)
        child = jnp.argmax(open_, axis=1)[:, None]
        token = take(tree.tokens, child)
        if tree.drawn is None:
            q = one_hot(token, v)
        else:
            q = jnp.where(tried, -jnp.inf, take(tree.drawn, take(tree.source, child)))
            q = jax.nn.log_softmax(q, axis=-1)
        deep = route.kept[:, None]
        attempt = passes[:, None] * m + child
        cell = done[:, None] + deep
        coin = uniform(cell_keys(keys, cell, ACCEPT, attempt))
        kept = coin < chance(rule, p, q, token, codes, deep)
        kept = (kept | grammar.forced(cell)) & grammar.fits(cell, token)
        kept = kept[:, 0]
        testing, going = some & ~over, some & kept & ~over
        rest = jnp.where(testing[:, None, None], left(p, q, token, cell, deep), p)
        p = jnp.where(going[:, None, None], take(log_p, child), rest)
        is_token = jax.nn.one_hot(token, v, dtype=bool)
        tried = (tried | is_token) & ~going[:, None, None]
        rejected = jnp.where(testing, ~kept, route.rejected)
        route = replace(route, rejected=rejected).to(child[:, 0], going)
        return route, over | ~some, p, tried, child[:, 0]

    begin = Route.begin(b, depth), ~tree.valid[:, 0], log_p[:, :1]
    none = jnp.zeros((b, 1, v), bool), jnp.zeros(b, jnp.int32)
    route, _, p, *_ = jax.lax.while_loop(
        lambda carry: ~jnp.all(carry[1]), on, (*begin, *none)
    )
    cell = done[:, None] + route.kept[:, None]
    token = draw(cell_keys(keys, cell, DRAW, passes[:, None]), p)
    return replace(route, token=token[:, 0])


def follow_along(
    tree: Tree,
    log_p: jax.Array,
    done: jax.Array,
    depth: int,
    *,
    rule: Likes,
    grammar: ImageGrammar,
    codes: jax.Array | None = None,
) -> Route:
    """Goes to the end of the longest path of nodes that the rule likes.

    Of several the first; behind it stands the likeliest token.

    Args:
      tree, log_p, done, depth: as for `draw_along`.
      rule: says which nodes are liked.
      grammar: newlines are always liked, and what cannot be never is.
      codes: for the rule.
    """
    cell = done[:, None] - 1 + tree.depth
    liked = rule.likes(take(log_p, tree.parent), tree.tokens, codes)
    liked = (liked | grammar.forced(cell)) & grammar.fits(cell, tree.tokens)
    liked = (liked & tree.valid).at[:, 0].set(True)  # the root is there
    path = ancestors(tree.parent, depth)
    whole = jnp.all(liked[:, None] | ~path, axis=2)
    last = jnp.argmax(jnp.where(whole, tree.depth, -1), axis=1)[:, None]
    place = jnp.arange(depth + 1)[None, :, None]
    on = take(path, last) & (tree.depth[:, None] == place)
    return Route(
        nodes=jnp.argmax(on, axis=2),  # 0, the root, behind its end
        kept=take(tree.depth, last)[:, 0],
        token=likeliest(take(log_p, last))[:, 0],
        rejected=jnp.any(_children(tree, last), axis=1),
    )


def finished(state: TreeState) -> jax.Array:
    """Which images [B] have all their cells."""
    return state.done >= state.decoded.grammar.end
