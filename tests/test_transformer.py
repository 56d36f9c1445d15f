"""The transformer against recorded outputs of the published PyTorch models."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding import Target, decode
from jaxspec.methods import AR
from jaxspec.models.cache import Cache
from jaxspec.models.transformer import (
    Transformer,
    TransformerConfig,
    rotary_table,
    rotate,
    swiglu_hidden,
)
from jaxspec.sampling import Sampling, image_key
from tests.parity import TRANSFORMERS, published

pytestmark = pytest.mark.optimised

each = pytest.mark.parametrize("name", TRANSFORMERS)


@cache
def jitted(config: TransformerConfig, method: str = "__call__"):
    return jax.jit(partial(Transformer(config).apply, method=method))


def prefix_visible(name: str) -> jax.Array | None:
    """The fixture's caption mask; bool [B, P], padding on the left."""
    mask = published(name).expected.get("cond_mask")
    return None if mask is None else jnp.asarray(mask > 0)


@each
def test_teacher_forced_logits(name):
    model = published(name)
    want = model.expected["logits"]
    got = jitted(model.config)(
        model.params, model.expected["cond"], model.expected["tokens"]
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def cached_logits(name: str, chunks: list[int]) -> np.ndarray:
    """Logits [B, N, V] by way of the cache, tokens fed in chunks of these sizes."""
    model, config = published(name), published(name).config
    run = lambda method, *args: jitted(config, method)(model.params, *args)
    tokens = jnp.asarray(model.expected["tokens"])
    batch, n, p = len(tokens), config.cells, config.prefix_length
    unpadded = prefix_visible(name)
    if unpadded is None:
        unpadded = jnp.ones((batch, p), bool)
    seen = jnp.pad(unpadded, ((0, 0), (0, n)), constant_values=True)
    slots = jnp.arange(config.slots)
    visible = (slots[:, None] >= slots[None])[None] & seen[:, None]
    visible |= jnp.eye(config.slots, dtype=bool)[None]

    feed = lambda x, first, cache: run(
        "extend",
        x,
        jnp.broadcast_to(first + jnp.arange(x.shape[1]), x.shape[:2]),
        cache,
        visible[:, first : first + x.shape[1]],
    )
    x = run("prefix", model.expected["cond"])
    states, cache = feed(x, 0, Cache.empty(config, batch))
    out, cell = [run("logits", states[:, -1:])], 0
    for size in chunks:
        cells = jnp.broadcast_to(cell + jnp.arange(size), (batch, size))
        x = run("embed", tokens[:, cell : cell + size], cells)
        states, cache = feed(x, p + cell, cache)
        out.append(run("logits", states))
        cell += size
    assert cell == n - 1
    return np.concatenate(out, axis=1)


@each
@pytest.mark.parametrize("size", [1, 5])  # 5 divides both 15 and 35
def test_cached_equals_teacher_forced(name, size):
    model = published(name)
    want = jitted(model.config)(
        model.params,
        model.expected["cond"],
        model.expected["tokens"],
        prefix_visible(name),
    )
    got = cached_logits(name, [size] * ((model.config.cells - 1) // size))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_padding_changes_nothing_that_is_read():
    """Whatever stands in masked caption slots, the logits are the same."""
    model = published("llamagen_t2i_tiny")
    visible = prefix_visible("llamagen_t2i_tiny")
    run = lambda condition: jitted(model.config)(
        model.params, condition, model.expected["tokens"], visible
    )
    condition = jnp.asarray(model.expected["cond"])
    noise = jnp.where(visible[..., None], condition, condition + 3.0)
    assert not visible.all() and visible[:, -1].all()
    np.testing.assert_allclose(run(noise), run(condition), rtol=0, atol=1e-5)


GREEDY = [
    ("tar_ardtok_tiny", "greedy_cfg1", {"guidance": 1.0}),
    ("tar_ardtok_tiny", "greedy_cfg4", {"guidance": 4.0}),
    ("tar_ardtok_tiny_gqa", "greedy_cfg1", {"guidance": 1.0}),
    ("tar_ardtok_tiny_gqa", "greedy_cfg4", {"guidance": 4.0}),
    # LlamaGen counts loop turns after the first token, and guides turns 0 to 5: seven
    # cells in all.
    *(
        (name, f"greedy_{recorded}", settings)
        for name in ("llamagen_c2i_tiny", "llamagen_t2i_tiny")
        for recorded, settings in {
            "cfg1": {"guidance": 1.0},
            "cfg7p5": {"guidance": 7.5},
            "cfg7p5_interval5": {"guidance": 7.5, "guided_cells": 7},
        }.items()
    ),
]


def greedy(name: str, settings: dict) -> np.ndarray:
    model = published(name)
    sampling = Sampling.create(model.config.vocab_size, temperature=0.0, **settings)
    target = Target.create(
        Transformer(model.config),
        model.params,
        model.expected["cond"],
        sampling,
        prefix_visible(name),
    )
    keys = jnp.stack([image_key(0, 0, i) for i in range(target.batch)])
    decoded = jax.jit(decode)(AR(), target, keys)
    return np.asarray(decoded.tokens).reshape(target.batch, -1)


@pytest.mark.parametrize(("name", "recorded", "settings"), GREEDY)
def test_greedy_tokens(name, recorded, settings):
    want = published(name).expected[recorded]
    np.testing.assert_array_equal(greedy(name, settings), want)


@pytest.mark.parametrize(
    ("width", "hidden"),
    [  # the published sizes: B, L, XL, XXL, XXXL, 1B, 3B, 7B
        (768, 2048),
        (1024, 2816),
        (1280, 3584),
        (1536, 4096),
        (2560, 6912),
        (2048, 5632),
        (3200, 8704),
        (4096, 11008),
    ],
)
def test_hidden_width(width, hidden):
    assert swiglu_hidden(width) == hidden


def test_rotary_by_hand():
    """Head width 8: two pairs turn with the row, two with the column, at 1 and 1/100.

    Pairs are neighbours, and the grid is not square.
    """
    config = TransformerConfig(
        vocab_size=7,
        width=16,
        depth=1,
        heads=2,
        hidden=8,
        grid=(2, 3),
        prefix="class",
        prefix_length=1,
        prefix_width=3,
        positions="rotary",
    )
    row, column = 1, 2
    table = jnp.asarray(rotary_table(config))[None, [1 + 3 * row + column]]
    x = jnp.tile(jnp.array([1.0, 0.0]), 4)[None, None, None]
    angles = [row * 1.0, row * 0.01, column * 1.0, column * 0.01]
    want = [f(a) for a in angles for f in (np.cos, np.sin)]
    np.testing.assert_allclose(rotate(x, table)[0, 0, 0], want, atol=1e-6)


def test_zero_rotary_rows_make_the_prefix_zero():
    """LlamaGen's prefix has neither queries nor keys, so it attends evenly."""
    name = "llamagen_t2i_tiny"
    model, config = published(name), published(name).config
    p = config.prefix_length
    assert not rotary_table(config)[:p].any()
    x = jitted(config, "prefix")(model.params, model.expected["cond"])
    slots = jnp.broadcast_to(jnp.arange(p), x.shape[:2])
    visible = jnp.tril(jnp.ones((1, p, config.slots), bool))
    empty = Cache.empty(config, len(x))
    _, cache = jitted(config, "extend")(model.params, x, slots, empty, visible)
    assert not any(key[..., :p, :].any() for key in cache.keys)
    assert all(value[..., p - 1, :].all() for value in cache.values)
    queries = jnp.ones((1, config.heads, p, config.head_width))
    assert not rotate(queries, jnp.asarray(rotary_table(config))[None, :p]).any()
