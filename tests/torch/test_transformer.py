"""The transformer against transformers' Llama, its rotary positions switched off."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxspec.checkpoints import ARDTOK, convert
from jaxspec.decoding import Target
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.sampling import Sampling

BATCH = 2
CONFIG = TransformerConfig(
    vocab_size=61,
    width=32,
    depth=3,
    heads=4,
    hidden=48,
    grid=(3, 5),
    prefix="features",
    prefix_length=3,
    prefix_width=6,
    positions="learned",
)
KEYS = {  # transformers' name of a tensor, Tar's
    r"model\.embed_tokens\.": "tok_embeddings.",
    r"model\.layers\.(\d+)\.input_layernorm\.": r"layers.\1.attention_norm.",
    r"model\.layers\.(\d+)\.self_attn\.o_proj\.": r"layers.\1.attention.wo.",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"layers.\1.ffn_norm.",
    r"model\.layers\.(\d+)\.mlp\.gate_proj\.": r"layers.\1.feed_forward.w1.",
    r"model\.layers\.(\d+)\.mlp\.up_proj\.": r"layers.\1.feed_forward.w3.",
    r"model\.layers\.(\d+)\.mlp\.down_proj\.": r"layers.\1.feed_forward.w2.",
    r"model\.norm\.": "norm.",
    r"lm_head\.": "output.",
}


@pytest.fixture(scope="module")
def llama():
    """A Llama of random weights that keep the scale of what flows through."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.width,
        intermediate_size=CONFIG.hidden,
        num_hidden_layers=CONFIG.depth,
        num_attention_heads=CONFIG.heads,
        max_position_embeddings=CONFIG.slots,
        rms_norm_eps=CONFIG.norm_epsilon,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.model.rotary_emb.inv_freq.zero_()  # every position turns by nothing
    for name, x in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(x, 0.5, 1.5)
        else:
            torch.nn.init.normal_(x, std=1.5 * x.shape[1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def params(llama):
    """Ours: the Llama's, and a prefix and positions that it does not have."""
    rng = np.random.default_rng(0)
    ours = {
        "clip_proj.weight": rng.standard_normal((CONFIG.width, CONFIG.prefix_width)),
        "clip_proj.bias": rng.standard_normal(CONFIG.width),
        "abs_pe": rng.standard_normal((1, CONFIG.slots - 1, CONFIG.width)),
    }
    state_dict = {key: x.astype(np.float32) for key, x in ours.items()}
    theirs = {key: x.numpy() for key, x in llama.state_dict().items()}
    for i in range(CONFIG.depth):
        attention = f"model.layers.{i}.self_attn."
        qkv = [theirs.pop(f"{attention}{name}_proj.weight") for name in "qkv"]
        state_dict[f"layers.{i}.attention.wqkv.weight"] = np.concatenate(qkv)
    for key, x in theirs.items():
        (name,) = [re.sub(a, b, key) for a, b in KEYS.items() if re.match(a, key)]
        state_dict[name] = x
    return jax.tree.map(jnp.asarray, convert(state_dict, CONFIG, ARDTOK))


@pytest.fixture(scope="module")
def drawn():
    """A condition [B, P, prefix_width] and tokens [B, N]."""
    rng = np.random.default_rng(1)
    shape = (BATCH, CONFIG.prefix_length, CONFIG.prefix_width)
    condition = rng.standard_normal(shape).astype(np.float32)
    tokens = rng.integers(CONFIG.vocab_size, size=(BATCH, CONFIG.cells))
    return jnp.asarray(condition), jnp.asarray(tokens, jnp.int32)


@pytest.fixture(scope="module")
def embedded(params, drawn):
    """What the layers are fed, [B, P + N - 1, C]."""
    condition, tokens = drawn
    apply = Transformer(CONFIG).apply
    cells = jnp.broadcast_to(jnp.arange(CONFIG.cells - 1), tokens[:, :-1].shape)
    prefix = apply(params, condition, method="prefix")
    fed = apply(params, tokens[:, :-1], cells, method="embed")
    return torch.from_numpy(np.concatenate([prefix, fed], axis=1))


def test_teacher_forced(llama, params, drawn, embedded):
    with torch.inference_mode():
        want = llama(inputs_embeds=embedded, use_cache=False).logits
    got = Transformer(CONFIG).apply(params, *drawn)
    want = want[:, CONFIG.prefix_length - 1 :].numpy()
    assert want.std() > 0.5  # logits that tell something
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_cached(llama, params, drawn, embedded):
    """Both sides token by token, each with a cache of its own."""
    condition, tokens = drawn
    sampling = Sampling.create(CONFIG.vocab_size)
    target = Target.create(Transformer(CONFIG), params, condition, sampling)
    follow = jax.jit(Target.follow)
    raster, written = jnp.arange(CONFIG.cells), jnp.ones((BATCH, 1), bool)

    log_p, cache = target.prefill()
    got = [log_p[:, None]]
    for cell in range(CONFIG.cells - 1):
        visible = jnp.broadcast_to(raster <= cell, (BATCH, 1, CONFIG.cells))
        fed, at = tokens[:, cell : cell + 1], jnp.full((BATCH, 1), cell)
        log_p, cache = follow(target, cache, fed, at, written, visible)
        got.append(log_p)

    # transformers renamed the argument within 5.x.
    names = inspect.signature(llama.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    kept = {name: transformers.DynamicCache(config=llama.config)}
    want, p = [], CONFIG.prefix_length
    with torch.inference_mode():
        for chunk in embedded.split([p] + [1] * (CONFIG.cells - 1), dim=1):
            logits = llama(inputs_embeds=chunk, use_cache=True, **kept).logits[:, -1:]
            want.append(logits.log_softmax(-1))
    np.testing.assert_allclose(
        np.concatenate(got, axis=1), torch.cat(want, 1).numpy(), rtol=0, atol=1e-4
    )
