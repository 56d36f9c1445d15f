"""The T5 encoder against transformers' own, part by part."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.t5.modeling_t5 import T5Attention

from jaxspec.checkpoints import T5, convert, t5_config
from jaxspec.models.t5 import T5Config, T5Encoder, relative_buckets

BATCH, LENGTH = 3, 21
ARGS = {
    "model_type": "t5",
    "vocab_size": 50,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 3,
    "num_heads": 5,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 16,
    "feed_forward_proj": "gated-gelu",
}
CONFIG = t5_config(ARGS)


@pytest.fixture(scope="module")
def t5():
    """A whole T5 of random weights, as published files hold it; its encoder is read."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**ARGS, decoder_start_token_id=0)
    ).eval()
    for x in model.parameters():
        if x.ndim == 1:
            torch.nn.init.uniform_(x, 0.5, 1.5)
        else:
            torch.nn.init.normal_(x, std=x.shape[1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def params(t5):
    weights = {key: x.numpy() for key, x in t5.state_dict().items()}
    assert "decoder.block.0.layer.1.EncDecAttention.q.weight" in weights
    return jax.tree.map(jnp.asarray, convert(weights, CONFIG, T5))


@pytest.fixture(scope="module")
def captions():
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH))
    lengths = torch.tensor([LENGTH, 9, 1])
    return tokens, torch.arange(LENGTH)[None] < lengths[:, None]


def encode(config: T5Config, params, tokens, seen) -> np.ndarray:
    return np.asarray(T5Encoder(config).apply(params, tokens.numpy(), seen.numpy()))


def test_states(t5, params, captions):
    tokens, seen = captions
    with torch.inference_mode():
        want = t5.encoder(tokens, attention_mask=seen.long()).last_hidden_state
    got = encode(CONFIG, params, tokens, seen)
    assert want.std() > 0.5
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_states_after_each_layer(t5, params, captions, depth):
    """The first layers alone; ours end in the final norm."""
    tokens, seen = captions
    with torch.inference_mode():
        out = t5.encoder(tokens, attention_mask=seen.long(), output_hidden_states=True)
        want = t5.encoder.final_layer_norm(out.hidden_states[depth])
    stacked = ("attention_norm", "qkv", "attention_out", "ffn_norm", "gate_up", "down")
    inner = {k: x[:depth] if k in stacked else x for k, x in params["params"].items()}
    got = encode(replace(CONFIG, depth=depth), {"params": inner}, tokens, seen)
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (12, 16), (8, 20)])
def test_buckets(buckets, distance):
    """All offsets, flan-t5-xl's buckets among them: rounding decides at their ends."""
    length = 300
    place = torch.arange(length)
    want = T5Attention._relative_position_bucket(
        place[None] - place[:, None], True, buckets, distance
    )
    config = replace(CONFIG, buckets=buckets, max_distance=distance)
    np.testing.assert_array_equal(relative_buckets(config, length), want)


def test_bfloat16(t5, params, captions):
    """As far from float32 as transformers' bfloat16 is, or nearer."""
    tokens, seen = captions
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    got = encode(CONFIG, half, tokens, seen).astype(np.float32)
    want = encode(CONFIG, params, tokens, seen)
    model = transformers.T5EncoderModel(t5.config).eval()
    model.load_state_dict(t5.state_dict(), strict=False)
    with torch.inference_mode():
        theirs = model.to(torch.bfloat16)(tokens, attention_mask=seen.long())
    theirs = theirs.last_hidden_state.float().numpy()
    error = lambda x: np.abs(x - want)[seen].mean()
    assert error(got) < 1.2 * error(theirs)
