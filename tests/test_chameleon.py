"""Chameleon against recorded outputs of transformers' own, and what draws with it."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import CHAMELEON_RAW, convert, to_torch
from jaxspec.decoding import Target
from jaxspec.models.chameleon import ChameleonGrid, ChameleonGridConfig
from jaxspec.models.llama import (
    Llama,
    LlamaConfig,
    causal,
    empty_cache,
    layer_shapes,
    positions_of,
    unstacked,
)
from jaxspec.models.vq import VQ
from jaxspec.sampling import Sampling
from tests.parity import published

NAMES = ["chameleon_tiny", "chameleon_tiny_34b"]
SHARED = NAMES[0]
each = pytest.mark.parametrize("name", NAMES)


@cache
def jitted(config: LlamaConfig, method: str = "__call__"):
    return jax.jit(partial(Llama(config).apply, method=method))


def recorded(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [B, T], left-padded; which are seen; logits [B, T, V]."""
    expected = published(name).expected
    return expected["tokens"], expected["mask"] > 0, expected["logits"]


def test_the_fixtures_are_of_both_kinds():
    small, large = (published(name).config.language for name in NAMES)
    assert (small.heads, small.key_heads, small.head_norms) == (6, 6, (1, 1))
    assert (large.heads, large.key_heads, large.head_norms) == (6, 2, (6, 2))
    assert not small.output_norms and large.output_norms


@each
def test_states_after_each_layer_and_logits(name):
    model, (tokens, seen, want) = published(name), recorded(name)
    for depth in (1, 2):
        config = replace(model.config.language, depth=depth)
        inner = {
            k: x[:depth] if k in layer_shapes(config) else x
            for k, x in model.params["params"].items()
        }
        got = jitted(config, "states")({"params": inner}, tokens, seen)
        states = model.expected[f"states_{depth}"]
        assert states.std() > 0.5
        np.testing.assert_allclose(
            np.asarray(got)[seen], states[seen], rtol=0, atol=1e-4
        )
    got = np.asarray(jitted(model.config.language)(model.params, tokens, seen))
    assert got.dtype == np.float32 and want[seen].std() > 0.5
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=1e-4)


@each
def test_cached_equals_recorded(name):
    """Left-padded rows of different lengths, five tokens first, then one by one."""
    model, (tokens, seen, want) = published(name), recorded(name)
    language, (batch, length) = model.config.language, tokens.shape
    params = unstacked(language, model.params)
    run = lambda method, *args: jitted(language, method)(params, *args)
    cache = empty_cache(language, batch, length, jnp.float32)
    positions, visible = positions_of(seen), causal(jnp.asarray(seen))
    got = []
    for part in np.split(np.arange(length), range(5, length)):
        slots = jnp.broadcast_to(part, (batch, len(part)))
        x = run("embed", tokens[:, part])
        states, cache = run(
            "extend", x, positions[:, part], slots, cache, visible[:, part]
        )
        got.append(run("logits", states))
    got = np.concatenate(got, axis=1)
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=1e-4)


@each
def test_greedy_tokens(name):
    """Transformers' own cached loop wrote them, each prompt alone."""
    model, (tokens, seen, _) = published(name), recorded(name)
    greedy = model.expected["greedy"]
    text = np.concatenate([tokens, greedy], axis=1)
    seen = np.pad(seen, ((0, 0), (0, greedy.shape[1])), constant_values=True)
    logits = jitted(model.config.language)(model.params, text, seen)
    likeliest = np.asarray(logits).argmax(-1)[:, tokens.shape[1] - 1 : -1]
    np.testing.assert_array_equal(likeliest, greedy)


# What a target sees of it.


def prompts(config: ChameleonGridConfig) -> tuple[jax.Array, jax.Array]:
    """Two prompts of the grid's prefix, the first padded on the left."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(40, 96, (2, config.prefix_length)).astype(np.int32)
    seen = np.ones(tokens.shape, bool)
    seen[0, :2] = False
    return jnp.asarray(tokens), jnp.asarray(seen)


def grids(config: ChameleonGridConfig) -> np.ndarray:
    """Codes [2, N] with newlines in the last column."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, config.codes, (2, *config.grid)).astype(np.int32)
    codes[:, :, -1] = config.codes
    return codes.reshape(2, -1)


def forced(name: str, tokens: jax.Array, seen: jax.Array, codes: np.ndarray):
    """Logits [2, N, V] of cells, by the language model over the whole text."""
    config, params = published(name).config, published(name).params
    ids = np.where(codes == config.codes, config.newline, codes + config.first)
    text = np.concatenate([tokens, ids[:, :-1]], axis=1)
    seen = np.pad(seen, ((0, 0), (0, codes.shape[1] - 1)), constant_values=True)
    logits = np.asarray(jitted(config.language)(params, text, seen))
    logits = logits[:, config.prefix_length - 1 :]
    own = [*range(config.first, config.first + config.codes), config.newline]
    return logits[..., own]


@each
def test_the_grid_is_the_language_model(name):
    """Ids 7 to 16 and 30 of it are the 11 codes of a cell."""
    config = published(name).config
    (tokens, seen), codes = prompts(config), grids(config)
    want = forced(name, tokens, seen, codes)
    assert want.shape == (2, 6, 11) and want.std() > 0.5
    model = ChameleonGrid(config)
    params = model.prepared(published(name).params)
    got = jax.jit(model.apply)(params, tokens, jnp.asarray(codes), seen)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    assert model.prepared(params) is params


def test_a_target_reads_it_by_its_cache():
    """Cell by cell, also from a scratch slot, as by teacher forcing."""
    name = SHARED
    config = published(name).config
    (tokens, seen), codes = prompts(config), grids(config)
    want = forced(name, tokens, seen, codes)
    target = Target.create(
        ChameleonGrid(config),
        published(name).params,
        tokens,
        Sampling.create(config.vocab_size),
        seen,
    )

    @jax.jit
    def read(target, cache, token, cell, slot):
        at = jnp.full((2, 1), cell)
        visible = jnp.arange(config.cells + 1)[None, None] < cell
        visible = visible.at[:, :, slot].set(True)
        features, cache = target.read(
            cache,
            token[:, None],
            at,
            jnp.ones((2, 1), bool),
            jnp.broadcast_to(visible, (2, 1, config.cells + 1)),
            jnp.full((2, 1), slot),
        )
        return target._apply("read_out", features)[:, 0], cache

    features, cache = jax.jit(Target.read_prefix, static_argnums=1)(target, 1)
    got = [target._apply("read_out", features[:, -1])]
    for cell in range(config.cells - 1):
        scratch, _ = read(target, cache, codes[:, cell], cell, config.cells)
        logits, cache = read(target, cache, codes[:, cell], cell, cell)
        np.testing.assert_allclose(scratch, logits, rtol=0, atol=1e-5)
        got.append(logits)
    np.testing.assert_allclose(np.stack(got, axis=1), want, rtol=0, atol=1e-4)


def test_tokens_that_the_language_model_lacks_are_refused():
    language = published(SHARED).config.language
    with pytest.raises(ValueError, match="from 4 to 8803; .* has 0 to 95"):
        ChameleonGridConfig(language, (2, 3))
    with pytest.raises(ValueError, match="6 query heads cannot share 4 norms"):
        replace(language, head_norms=(4, 1))


# Conversion.


def pairs(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads from halves to interleaved pairs, written out."""
    x = x.reshape(heads, -1, *x.shape[1:])
    half = x.shape[1] // 2
    order = [i + half * side for i in range(half) for side in (0, 1)]
    return x[:, order].reshape(-1, *x.shape[2:])


def test_metas_layout_is_the_same_model():
    """Under Meta's names, queries and keys and their norms as interleaved pairs."""
    model = published(SHARED)
    theirs = {
        "embed_tokens": "tok_embeddings",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "self_attn.q_norm": "attention.q_normalization",
        "self_attn.k_norm": "attention.k_normalization",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "lm_head": "output",
    }
    raw = {}
    for key, x in model.state_dict.items():
        if "q_proj" in key or "k_proj" in key:
            x = pairs(x, 6)
        elif "q_norm" in key or "k_norm" in key:
            x = pairs(x[0], 1)
        for ours, name in theirs.items():
            key = key.replace(ours, name)
        raw[key.removeprefix("model.")] = x
    params = convert(raw, model.config, CHAMELEON_RAW)
    jax.tree.map(np.testing.assert_array_equal, params, model.params)
    back = to_torch(params, model.config, CHAMELEON_RAW)
    assert back.keys() == raw.keys()
    for key, x in back.items():
        np.testing.assert_array_equal(x, raw[key])


def test_vq():
    model = published("chameleon_vq_tiny")
    assert not model.config.normalize_codes and model.config.attention == "middle"
    run = lambda x, method: jax.jit(partial(VQ(model.config).apply, method=method))(
        model.params, x
    )
    last = lambda name: np.moveaxis(model.expected[name], 1, -1)
    latents = run(last("image"), "latents")
    np.testing.assert_allclose(latents, last("pre_quant"), rtol=0, atol=1e-4)
    codes = VQ(model.config).apply(model.params, latents, method="nearest")
    want = model.expected["indices"]
    assert len(np.unique(want)) > 8
    np.testing.assert_array_equal(codes.reshape(want.shape), want)
    tokens = model.expected["decode_indices"].reshape(2, 4, 4)
    got = run(tokens, "decode")
    assert last("decoded").std() > 0.1
    np.testing.assert_allclose(got, last("decoded"), rtol=0, atol=1e-4)
