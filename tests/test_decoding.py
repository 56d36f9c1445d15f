"""Decoding on toys: a slow reference of the wavefront, counts, keys."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding import (
    DRAWN,
    Decoded,
    advance,
    begin,
    decode_eagerly,
    method_class,
    wavefront,
)
from jaxspec.methods import AR
from jaxspec.models.transformer import TransformerConfig
from jaxspec.sampling import cell_keys
from jaxspec.testing import keys_of
from tests import toy


@method_class
class Wavefront(AR):
    """The engine with any window and frontier."""

    window: int
    frontier: int
    riders: int

    def step(self, target, state):
        return wavefront.step(target, state, **vars(self))


# One distribution, however it is run.


CONFIG = toy.transformer((3, 4), 12)
BATCH = 3


@pytest.fixture(scope="module")
def target():
    return toy.target(CONFIG, BATCH, guidance=2.0, top_k=8)


@pytest.fixture(scope="module")
def decoded(target) -> Decoded:
    return toy.decode_jitted(AR(), target, keys_of(BATCH))


def assert_same(got: Decoded, want: Decoded):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_in_chunks(target, decoded, chunk):
    state = begin(AR(), target, keys_of(BATCH))
    while not AR().finished(state).all():
        before = jax.tree.map(np.asarray, AR().decoded(state))
        final = before.final_pass >= 0
        want = np.asarray(decoded.tokens)[final]
        np.testing.assert_array_equal(before.tokens[final], want)
        state = advance(AR(), target, state, np.int32(chunk))
    assert_same(AR().decoded(state), decoded)


def test_eagerly(target, decoded):
    seen = []
    got = decode_eagerly(AR(), target, keys_of(BATCH), seen.append)
    assert_same(got, decoded)
    assert [int(s.pending[0].sum()) for s in seen] == list(range(11, -1, -1))


def test_finished_images_do_not_change(target, decoded):
    state = begin(AR(), target, keys_of(BATCH))
    state = advance(AR(), target, state, np.int32(100))
    more = jax.jit(partial(wavefront.step, window=4, frontier=2))(target, state)
    assert_same(more.decoded, decoded)
    jax.tree.map(np.testing.assert_array_equal, more.cache, state.cache)


def test_counts_of_ar(decoded):
    want = np.arange(12).reshape(1, 3, 4).repeat(BATCH, 0)
    np.testing.assert_array_equal(decoded.final_pass, want)
    np.testing.assert_array_equal(decoded.origin, np.full((BATCH, 3, 4), DRAWN))
    for field, value in {
        "target_passes": 11,
        "draft_passes": 0,
        "prefill_passes": 1,
        "drafted": 0,
        "bad_pass": -1,
    }.items():
        np.testing.assert_array_equal(getattr(decoded, field), [value] * BATCH)


def test_summary_by_hand():
    """Two images of 2 by 2 cells, in 3 and in 1 passes after the prefill."""
    decoded = replace(
        Decoded.empty(2, (2, 2)),
        final_pass=jnp.array([[[0, 1], [2, 3]], [[0, 1], [1, -1]]]),
        origin=jnp.array([[[0, 0], [0, 2]], [[0, 1], [3, 0]]], jnp.int8),
        target_passes=jnp.array([3, 1]),
        draft_passes=jnp.array([0, 5]),
        drafted=jnp.array([2, 1]),
    )
    assert decoded.summary() == {
        "images": 2,
        "cells": 4,
        "passes_per_image": 3.0,  # 4 and 2
        "draft_passes_per_image": 2.5,
        "cells_per_pass": 1.3333,  # 8 / 6
        "drafted": 1.5,
        "drawn": 2.0,  # 3 and 1: a cell that is not final came from nowhere
        "accepted": 0.5,
        "resampled": 0.5,
        "bonus": 0.5,
    }


def test_a_second_prompt_or_setting_compiles_nothing(target):
    for settings in ({"guidance": 2.0, "top_k": 8}, {"guidance": 5.0, "top_k": 3}):
        other = toy.target(CONFIG, BATCH, temperature=0.5, **settings)
        other = replace(other, condition=other.condition + 1)
        keys = keys_of(BATCH, seed=9)
        with toy.compilations() as compiled:
            toy.decode_jitted(AR(), other, keys)
            state = begin(AR(), other, keys)
            advance(AR(), other, state, np.int32(5))
    assert compiled == []


# No image depends on its row or on its neighbours.


def test_rows_and_neighbours_change_nothing():
    target, keys = toy.target(CONFIG, 8, guidance=2.0), keys_of(8)
    every = np.asarray(toy.decode_jitted(AR(), target, keys).tokens)
    assert len({tuple(x.ravel().tolist()) for x in every}) == 8
    for rows in ([5], [7, 3, 5, 1], [0, 0, 5, 5]):
        got = toy.decode_jitted(AR(), toy.take(target, rows), keys[np.array(rows)])
        np.testing.assert_array_equal(got.tokens, every[np.array(rows)])


def test_padding_of_the_condition_is_not_seen():
    target = toy.target(CONFIG, 2)
    visible = jnp.array([[False, False, True, True]] * 2)
    noise = jnp.where(visible[..., None], 0.0, 3.0)
    runs = [
        toy.decode_jitted(
            AR(),
            replace(target, prefix_visible=visible, condition=target.condition + x),
            keys_of(2),
        )
        for x in (jnp.zeros_like(noise), noise)
    ]
    assert_same(*runs)


def test_a_nan_is_noted_with_the_pass_and_image(target):
    """Position 4 + 5 is fed to draw cell 6; in pass 6, by all images."""
    weights = jax.tree.map(lambda x: x, target.params)
    table = weights["params"]["position_embedding"]
    weights["params"]["position_embedding"] = table.at[4 + 5].set(jnp.nan)
    got = toy.decode_jitted(AR(), replace(target, params=weights), keys_of(BATCH))
    np.testing.assert_array_equal(got.bad_pass, [6] * BATCH)
    condition = target.condition.at[1].set(jnp.nan)
    got = toy.decode_jitted(AR(), replace(target, condition=condition), keys_of(BATCH))
    np.testing.assert_array_equal(got.bad_pass, [-1, 0, -1])


# The wavefront.


def board(*rows: str) -> jax.Array:
    """Literal boards: `.` is done, anything else is pending."""
    return jnp.array([[[c != "." for c in row] for row in rows]])


def ready(pending: jax.Array, window: int) -> list[str]:
    got = np.asarray(wavefront.ready(pending, window))[0]
    return ["".join("x" if x else "." for x in row) for row in got]


def test_ready_by_hand():
    start = board(".???", "????", "????")
    assert ready(start, 4) == [".x..", "....", "...."]
    assert ready(start, 2) == [".x..", "....", "...."]
    # Two done above: the next row begins; the third waits for two of the second.
    assert ready(board("..??", "????", "????"), 2) == ["..x.", "x...", "...."]
    assert ready(board("...?", ".???", "????"), 2) == ["...x", ".x..", "...."]
    assert ready(board("....", "..??", "????"), 2) == ["....", "..x.", "x..."]
    # A whole row: plain raster order.
    assert ready(board("...?", "????", "????"), 4) == ["...x", "....", "...."]
    assert ready(board("....", "????", "????"), 4) == ["....", "x...", "...."]
    # At the right edge the window ends with the row.
    assert ready(board("....", "...?", "????"), 1) == ["....", "...x", "x..."]
    # Islands go at once, each run from its own left end, rows from the top.
    islands = board("?.?.", "....", ".??.")
    assert ready(islands, 4) == ["x.x.", "....", ".x.."]
    assert ready(board("..?.", "?.??"), 2) == ["..x.", "x..."]
    assert ready(board("..?.", "?.??"), 4) == ["..x.", "...."]
    assert ready(board("....", "...."), 2) == ["....", "...."]


def test_ready_on_every_board():
    """All 4096 boards of 3 by 4 cells and every window, against the rule in words."""
    boards = np.array(list(product([False, True], repeat=12))).reshape(-1, 3, 4)
    run = jax.jit(wavefront.ready, static_argnums=1)
    for window in (1, 2, 3, 4):
        got = np.asarray(run(jnp.asarray(boards), window))
        for i, j in product(range(3), range(4)):
            want = boards[:, i, j].copy()
            if j > 0:
                want &= ~boards[:, i, j - 1]
            if i > 0:
                want &= ~boards[:, i - 1, : j + window].any(-1)
            np.testing.assert_array_equal(got[:, i, j], want)
        np.testing.assert_array_equal(got.any((1, 2)), boards.any((1, 2)))


def test_first_cells():
    mask = jnp.array([[0, 1, 1, 0, 1], [0, 0, 0, 1, 0]], bool)
    cells, exist = wavefront.first_cells(mask, 2)
    np.testing.assert_array_equal(exist, [[True, True], [True, False]])
    assert cells[exist].tolist() == [1, 2, 3]
    assert wavefront.first_cells(mask, 9)[0].shape == (2, 5)


def rms(x, scale, epsilon):
    return x / np.sqrt(np.mean(x * x) + epsilon) * scale


class Slow:
    """The wavefront for one image, in loops and float64, each slot a list entry.

    Follows the words of `jaxspec.decoding.wavefront`, not its arrays.
    """

    def __init__(self, config: TransformerConfig, params, condition):
        self.config = config
        to_numpy = lambda x: np.asarray(x, np.float64)
        self.p = jax.tree.map(to_numpy, params["params"])
        self.slots = {}  # slot -> (keys, values), each a list over layers
        p = config.prefix_length
        inputs = to_numpy(condition) @ self.p["prefix_proj"] + self.p["prefix_bias"]
        for slot in range(p):
            seen = list(range(slot))
            self.slots[slot], out = self.feed(inputs[slot], slot, seen)
        self.first = out

    def feed(self, x, slot: int, seen: list[int]):
        """One input at a slot that sees others: its keys and values, and logits."""
        c, p = self.config, self.p
        x, kept = x + p["position_embedding"][slot], ([], [])
        for layer in range(c.depth):
            h = rms(x, p["attention_norm"][layer], c.norm_epsilon) @ p["qkv"][layer]
            q, k, v = h.reshape(3, c.heads, -1)
            kept[0].append(k)
            kept[1].append(v)
            ks = np.stack([*(self.slots[s][0][layer] for s in seen), k])
            vs = np.stack([*(self.slots[s][1][layer] for s in seen), v])
            scores = np.einsum("kd,skd->ks", q, ks) / np.sqrt(c.head_width)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            h = np.einsum("ks,skd->kd", weights, vs).ravel()
            x = x + h @ p["attention_out"][layer]
            h = rms(x, p["ffn_norm"][layer], c.norm_epsilon) @ p["gate_up"][layer]
            gate, up = np.split(h, 2)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ p["down"][layer]
        return kept, rms(x, p["norm"], c.norm_epsilon) @ p["head"]

    def decode(self, window: int, frontier: int, riders: int, choose):
        """Tokens and the pass of each cell [H, W]; `choose(cell, logits)` draws."""
        (h, w), p = self.config.grid, self.config.prefix_length
        tokens, passes, number = {0: choose(0, self.first)}, {0: 0}, 0
        while len(tokens) < h * w:
            number += 1
            now = [u for u in range(h * w) if self.ready(u, tokens, window)]
            inputs = {u - 1: u for u in now[:frontier]}
            due = [c for c in sorted(tokens) if p + c not in self.slots]
            late = [c for c in due if c not in inputs][:riders]
            inputs |= dict.fromkeys(late)
            new = {}
            for fed, u in sorted(inputs.items()):
                x = self.p["token_embedding"][tokens[self.stand_in(fed, tokens)]]
                # Inputs of this pass come in raster order, so the earlier are in.
                seen = [s for s in self.slots if s < p + fed]
                slot, logits = self.feed(x, p + fed, seen)
                if fed in tokens:  # else it is provisional: seen by itself alone
                    self.slots[p + fed] = slot
                if u is not None:
                    new[u] = choose(u, logits)
            tokens |= new
            passes |= dict.fromkeys(new, number)
        grid = lambda cells: np.array([cells[u] for u in range(h * w)]).reshape(h, w)
        return grid(tokens), grid(passes)

    def stand_in(self, fed: int, tokens: dict) -> int:
        w = self.config.grid[1]
        if fed in tokens:
            return fed
        return max(c for c in tokens if c <= (fed - w if fed >= w else fed))

    def ready(self, u: int, tokens: dict, window: int) -> bool:
        w = self.config.grid[1]
        i, j = divmod(u, w)
        above = [(i - 1) * w + c for c in range(min(j + window, w))] if i else []
        left = [u - 1] if j else []
        return u not in tokens and all(c in tokens for c in above + left)


@pytest.mark.parametrize(
    "window, frontier, riders", [(4, 1, 0), (2, 3, 0), (2, 3, 1), (1, 2, 2), (3, 12, 4)]
)
def test_wavefront_against_loops(window, frontier, riders):
    target = toy.target(CONFIG, BATCH)
    keys = keys_of(BATCH)
    cells = jnp.broadcast_to(jnp.arange(12), (BATCH, 12))
    gumbel = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (12,))))
    gumbel = np.asarray(gumbel(cell_keys(keys, cells)))
    got = toy.decode_jitted(Wavefront(window, frontier, riders), target, keys)
    for b in range(BATCH):
        slow = Slow(CONFIG, toy.params(CONFIG), target.condition[b])
        choose = lambda u, logits, b=b: int(np.argmax(logits + gumbel[b, u]))
        tokens, passes = slow.decode(window, frontier, riders, choose)
        np.testing.assert_array_equal(got.tokens[b], tokens)
        np.testing.assert_array_equal(got.final_pass[b], passes)
        assert got.target_passes[b] == passes.max()
