"""Qwen2 against transformers' own: layers, logits, caches and what they write."""

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxspec.checkpoints import QWEN2, convert, qwen2_config, to_torch
from jaxspec.language import Grammar, write
from jaxspec.models.llama import (
    Llama,
    causal,
    empty_cache,
    layer_shapes,
    positions_of,
    unstacked,
)
from jaxspec.sampling import Sampling, image_key

VOCABULARY, LENGTH, WRITTEN = 61, 11, 8
LENGTHS = (LENGTH, 6, 1)
ARGS = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
KINDS = {
    "grouped": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "grouped, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "one key head": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "not grouped": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def pair(request):
    """A model of transformers with random weights; ours, with its parameters."""
    args = ARGS | request.param
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**args)).eval()
    for name, x in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(x, 0.5, 1.5)
        else:
            torch.nn.init.normal_(x, std=x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3)
    model.generation_config.pad_token_id = 0
    # As saved: to_dict is what config.json holds.
    config = qwen2_config(model.config.to_dict())
    assert config.tied == args["tie_word_embeddings"]
    weights = {k: x.numpy() for k, x in model.state_dict().items()}
    params = convert(weights, config, QWEN2)
    back = to_torch(params, config, QWEN2)
    assert weights.keys() - back.keys() == (
        {"lm_head.weight"} if config.tied else set()
    )
    return model, Llama(config), jax.tree.map(jnp.asarray, params)


@pytest.fixture(scope="module")
def text():
    """Tokens [B, T] padded on the left, and where they are."""
    tokens = torch.randint(VOCABULARY, (len(LENGTHS), LENGTH))
    seen = torch.arange(LENGTH)[None] >= LENGTH - torch.tensor(LENGTHS)[:, None]
    return tokens, seen


def arguments(tokens, seen) -> dict:
    positions = (seen.long().cumsum(1) - 1).clamp(min=0)
    return {"attention_mask": seen.long(), "position_ids": positions}


def test_logits(pair, text):
    theirs, model, params = pair
    tokens, seen = text
    with torch.inference_mode():
        want = theirs(tokens, **arguments(*text)).logits
    got = np.asarray(model.apply(params, tokens.numpy(), seen.numpy()))
    assert want.std() > 0.5
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_states_after_each_layer(pair, text, depth):
    theirs, model, params = pair
    tokens, seen = text
    with torch.inference_mode():
        out = theirs(tokens, output_hidden_states=True, **arguments(*text))
    stacked = layer_shapes(model.config)
    inner = {k: x[:depth] if k in stacked else x for k, x in params["params"].items()}
    got = Llama(replace(model.config, depth=depth)).apply(
        {"params": inner}, tokens.numpy(), seen.numpy(), method="states"
    )
    want = out.hidden_states[depth]
    np.testing.assert_allclose(np.asarray(got)[seen], want[seen], rtol=0, atol=1e-4)


def test_cached(pair, text):
    """Both sides token by token after four, each with a cache of its own."""
    theirs, model, params = pair
    tokens, seen = text
    options = arguments(*text)
    # transformers renamed the argument within 5.x.
    names = inspect.signature(theirs.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    kept = {name: transformers.DynamicCache(config=theirs.config)}
    parts = [range(4), *([i] for i in range(4, LENGTH))]
    want = []
    with torch.inference_mode():
        for part in parts:
            part, end = list(part), part[-1] + 1
            out = theirs(
                tokens[:, part],
                attention_mask=options["attention_mask"][:, :end],
                position_ids=options["position_ids"][:, part],
                use_cache=True,
                **kept,
            )
            want.append(out.logits)
    want = torch.cat(want, 1)

    taken = unstacked(model.config, params)
    rows = len(LENGTHS)
    cache = empty_cache(model.config, rows, LENGTH, jnp.float32)
    visible, positions = causal(jnp.asarray(seen.numpy())), positions_of(seen.numpy())

    @jax.jit
    def feed(part, tokens, cache):
        x = model.apply(taken, tokens, method="embed")
        at = jnp.broadcast_to(part, tokens.shape)
        states, cache = model.apply(
            taken, x, positions[:, part], at, cache, visible[:, part], method="extend"
        )
        return model.apply(taken, states, method="logits"), cache

    got = []
    for part in parts:
        part = np.array(part)
        logits, cache = feed(part, tokens.numpy()[:, part], cache)
        got.append(logits)
    got = np.concatenate(got, axis=1)
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:prompts:UserWarning")  # that they ended
@pytest.mark.parametrize("penalty", [None, 1.3])
def test_greedy_writing(pair, text, penalty):
    """A padded batch in both, up to an end token that one of the rows has."""
    theirs, model, params = pair
    tokens, seen = text
    options = dict(do_sample=False, max_new_tokens=WRITTEN, repetition_penalty=penalty)
    mask = seen.long()
    with torch.inference_mode():
        free = theirs.generate(tokens, attention_mask=mask, **options)[:, LENGTH:]
        end = int(free[0, 2])
        want = theirs.generate(
            tokens, attention_mask=mask, eos_token_id=end, **options
        )[:, LENGTH:]
    ours = [row[row_seen].tolist() for row, row_seen in zip(tokens, seen, strict=True)]
    keys = jnp.stack([image_key(0, 0, i) for i in range(len(ours))])
    sampling = Sampling.create(VOCABULARY, temperature=0.0)
    grammar = Grammar(WRITTEN, first=0, size=VOCABULARY, ends=(end,))
    got = write(model, params, ours, keys, sampling, grammar, penalty)
    got = np.asarray(got.tokens)
    assert (got[0] == -1).any()
    want = np.pad(want.numpy(), ((0, 0), (0, WRITTEN - want.shape[1])))
    for row, theirs_row in zip(got, want, strict=True):
        length = (row >= 0).sum()
        np.testing.assert_array_equal(row[:length], theirs_row[:length])
        assert (theirs_row[length:] == 0).all()  # padding
