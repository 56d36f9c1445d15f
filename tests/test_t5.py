"""The T5 encoder against recorded outputs of transformers' own."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import T5, convert, t5_config, to_torch
from jaxspec.models.t5 import T5Config, T5Encoder, relative_buckets
from tests.fixtures import synthetic
from tests.parity import FOLDER, published

TINY = "t5_tiny"


@cache
def jitted(config: T5Config):
    return jax.jit(T5Encoder(config).apply)


def states(tokens, seen, params=None) -> np.ndarray:
    model = published(TINY)
    params = model.params if params is None else params
    return np.asarray(jitted(model.config)(params, tokens, seen), np.float32)


def recorded() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    expected = published(TINY).expected
    return expected["tokens"], expected["mask"] > 0, expected["states"]


def test_states():
    tokens, seen, want = recorded()
    assert not seen.all() and want[seen].std() > 0.5
    np.testing.assert_allclose(
        states(tokens, seen)[seen], want[seen], rtol=0, atol=1e-4
    )


def test_padding_changes_nothing_that_is_read():
    tokens, seen, _ = recorded()
    other = np.where(seen, tokens, (tokens + 7) % published(TINY).config.vocab_size)
    want = states(tokens, seen)
    np.testing.assert_allclose(states(other, seen)[seen], want[seen], atol=1e-5)
    # Padding on the left is as good: positions are relative.
    shift = int((~seen[1]).sum())
    left = states(np.roll(tokens, shift, axis=1), np.roll(seen, shift, axis=1))
    np.testing.assert_allclose(left[1, shift:], want[1][seen[1]], atol=1e-5)


def test_buckets_by_hand():
    """8 buckets: 0, 1 for themselves, 2 to 6 and from 7 on by logarithm; later + 4.

    A side has 4 buckets, 2 of them exact; distance 20 would be at 2 + 2, and the third
    bucket ends where 2 log(n / 2) / log(10) reaches 1, at n = 6.3.
    """
    config = T5Config(1, 1, 1, 1, 1, 1, buckets=8, max_distance=20)
    got = relative_buckets(config, 31)
    assert got.shape == (31, 31)
    assert got[30, :].tolist() == [3] * 24 + [2] * 5 + [1, 0]
    assert got[0, :].tolist() == [0, 5] + [6] * 5 + [7] * 24


def test_bfloat16_is_safe():
    """Close to float32, even where states pass float16's range."""
    tokens, seen, _ = recorded()
    params = jax.tree.map(lambda x: x, published(TINY).params)
    table = params["params"]["token_embedding"]
    for scale in (1.0, 1e6):
        params["params"]["token_embedding"] = table * scale
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        want, got = states(tokens, seen, params), states(tokens, seen, half)
        assert np.isfinite(got).all()
        assert np.abs(got - want)[seen].mean() < 0.03 * want[seen].std()


# Conversion.


def state_dict() -> dict[str, np.ndarray]:
    return dict(published(TINY).state_dict)


def test_the_decoder_is_dropped_by_name():
    model = published(TINY)
    extra = {
        "decoder.block.0.layer.1.EncDecAttention.q.weight": np.ones((2, 2)),
        "decoder.embed_tokens.weight": np.ones((2, 2)),
        "lm_head.weight": np.ones((2, 2)),
    }
    got = convert(state_dict() | extra, model.config, T5)
    assert to_torch(got, model.config, T5).keys() == state_dict().keys()
    with pytest.raises(ValueError, match=r"unexpected encoder.block.3.layer.0"):
        key = "encoder.block.3.layer.0.layer_norm.weight"
        convert(state_dict() | {key: np.ones(40)}, model.config, T5)


def test_the_embedding_under_either_name():
    model = published(TINY)
    table = state_dict()["shared.weight"]
    named = state_dict() | {"encoder.embed_tokens.weight": table}
    for weights in (named, {k: v for k, v in named.items() if k != "shared.weight"}):
        got = convert(weights, model.config, T5)["params"]["token_embedding"]
        np.testing.assert_array_equal(got, table)
    with pytest.raises(ValueError, match="embed_tokens.weight differs from shared"):
        convert(named | {"encoder.embed_tokens.weight": table + 1}, model.config, T5)
    del named["shared.weight"], named["encoder.embed_tokens.weight"]
    with pytest.raises(ValueError, match="missing shared.weight"):
        convert(named, model.config, T5)


@pytest.mark.parametrize("swap", ["qk", "kv"])
def test_swapped_projections_fail_loudly(swap):
    """The shapes do not tell, the states do."""
    weights = state_dict()
    for i in range(published(TINY).config.depth):
        layer = f"encoder.block.{i}.layer.0.SelfAttention."
        a, b = (f"{layer}{name}.weight" for name in swap)
        weights[a], weights[b] = weights[b], weights[a]
    tokens, seen, want = recorded()
    got = states(tokens, seen, convert(weights, published(TINY).config, T5))
    # Swapped q and k only transpose the scores: told by the bias and the mask.
    assert np.abs(got - want)[seen].max() > 0.1


def test_configurations():
    args = synthetic.load_manifest(FOLDER / "manifests" / f"{TINY}.json")["args"]
    flan_t5_xl = {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 2048,
        "d_kv": 64,
        "d_ff": 5120,
        "num_layers": 24,
        "num_heads": 32,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": 32,
        "layer_norm_epsilon": 1e-6,
    }
    assert t5_config(flan_t5_xl) == T5Config(32128, 2048, 24, 32, 64, 5120, 32, 128)
    for change, message in {
        ("feed_forward_proj", "relu"): "feed_forward_proj 'relu' is not supported",
        ("model_type", "umt5"): "model_type 'umt5' is not supported, only 't5'",
    }.items():
        with pytest.raises(ValueError, match=message):
            t5_config(args | dict([change]))
    with pytest.raises(ValueError, match="feed_forward_proj 'relu'"):
        t5_config({k: v for k, v in args.items() if k != "feed_forward_proj"})
    with pytest.raises(ValueError, match="config.json lacks 'd_kv'"):
        t5_config({k: v for k, v in args.items() if k != "d_kv"})
