"""Qwen2 against recorded outputs of transformers' own, and the loop that writes."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import QWEN2, convert, qwen2_config, to_torch
from jaxspec.language import Grammar, write, written
from jaxspec.models.llama import (
    Llama,
    causal,
    empty_cache,
    positions_of,
    rotary,
    rotate_halves,
    unstacked,
)
from jaxspec.models.qwen2 import Qwen2Config
from jaxspec.sampling import Sampling, image_key
from tests.parity import published

NAMES = ["qwen2_tiny", "qwen2_tiny_tied"]
UNTIED = NAMES[0]
each = pytest.mark.parametrize("name", NAMES)
GREEDY = Sampling.create(96, temperature=0.0)


@cache
def jitted(config: Qwen2Config, method: str = "__call__"):
    return jax.jit(partial(Llama(config).apply, method=method))


def recorded(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [B, T], left-padded; which are seen; logits [B, T, V]."""
    expected = published(name).expected
    return expected["tokens"], expected["mask"] > 0, expected["logits"]


def teacher_forced(name: str, tokens, seen=None, params=None) -> np.ndarray:
    model = published(name)
    params = model.params if params is None else params
    return np.asarray(jitted(model.config)(params, tokens, seen))


# The network.


@each
def test_logits(name):
    tokens, seen, want = recorded(name)
    assert not seen.all() and want[seen].std() > 0.5
    got = teacher_forced(name, tokens, seen)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=1e-4)


def test_padding_on_either_side_changes_nothing():
    tokens, seen, want = recorded(UNTIED)
    row = seen[0]
    alone = teacher_forced(UNTIED, tokens[:1, row], seen[:1, row])
    np.testing.assert_allclose(alone[0], want[0, row], rtol=0, atol=1e-4)
    shift = int(row.sum())  # the text first, padding after it
    right = np.roll(tokens[:1], shift, 1), np.roll(seen[:1], shift, 1)
    got = teacher_forced(UNTIED, *right)
    np.testing.assert_allclose(got[0, :shift], want[0, row], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "size"), [(NAMES[0], 1), (NAMES[1], 4)])
def test_cached_equals_teacher_forced(name, size):
    """Left-padded rows of different lengths, five tokens first, then by `size`."""
    model = published(name)
    tokens, seen, want = recorded(name)
    batch, length = tokens.shape
    params = unstacked(model.config, model.params)
    run = lambda method, *args: jitted(model.config, method)(params, *args)
    cache = empty_cache(model.config, batch, length, jnp.float32)
    positions, visible = positions_of(seen), causal(jnp.asarray(seen))
    got = []
    for part in np.split(np.arange(length), [5, *range(5 + size, length, size)]):
        slots = jnp.broadcast_to(part, (batch, len(part)))
        x = run("embed", tokens[:, part])
        states, cache = run(
            "extend", x, positions[:, part], slots, cache, visible[:, part]
        )
        got.append(run("logits", states))
    got = np.concatenate(got, axis=1)
    np.testing.assert_allclose(got[seen], want[seen], rtol=0, atol=1e-4)


def test_rotary_by_hand():
    """Position 2, width 4, base 100: pairs (0, 2) and (1, 3) turn by 2 and 0.2."""
    x = jnp.array([1.0, 0.0, 0.0, 1.0]).reshape(1, 1, 1, 4)
    got = rotate_halves(x, *rotary(jnp.array([[2]]), 4, 100.0))
    want = [np.cos(2), -np.sin(0.2), np.sin(2), np.cos(0.2)]
    np.testing.assert_allclose(got[0, 0, 0], want, rtol=0, atol=1e-6)


def test_bfloat16_weights():
    tokens, seen, want = recorded(UNTIED)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), published(UNTIED).params)
    states = jitted(published(UNTIED).config, "states")(half, tokens, seen)
    assert states.dtype == jnp.bfloat16
    got = teacher_forced(UNTIED, tokens, seen, half)
    assert got.dtype == np.float32
    assert np.abs(got - want)[seen].mean() < 0.03 * want[seen].std()


# Writing.


def prompts(name: str) -> list[list[int]]:
    tokens, seen, _ = recorded(name)
    return [row[mask].tolist() for row, mask in zip(tokens, seen, strict=True)]


def keys(count: int) -> jax.Array:
    return jnp.stack([image_key(0, i, 0) for i in range(count)])


def run(name, rows, sampling, grammar, row_keys=None, **options):
    model = published(name)
    row_keys = keys(len(rows)) if row_keys is None else row_keys
    return write(
        Llama(model.config), model.params, rows, row_keys, sampling, grammar, **options
    )


@pytest.mark.parametrize(
    ("name", "key", "penalty"),
    [*((name, "greedy", None) for name in NAMES), (UNTIED, "greedy_penalty1p5", 1.5)],
)
def test_greedy_tokens(name, key, penalty):
    want = published(name).expected[key]
    grammar = Grammar(want.shape[1], first=0, size=96)
    got = run(name, prompts(name), GREEDY, grammar, repetition_penalty=penalty)
    np.testing.assert_array_equal(got.tokens, want)
    np.testing.assert_array_equal(got.codes, want)


def test_rows_do_not_depend_on_each_other():
    """Drawn, of different lengths: alone, in another row, padded further."""
    short, long = prompts(UNTIED)[0], list(range(40))
    sampling = Sampling.create(96, temperature=1.0, top_k=50, top_p=0.95)
    grammar = Grammar(8, first=40, size=56, ends=(3,), most=30)
    alone = run(UNTIED, [short], sampling, grammar)
    together = run(UNTIED, [short, long], sampling, grammar)
    swapped = run(UNTIED, [long, short], sampling, grammar, keys(2)[::-1])
    assert not np.array_equal(together.tokens[0], together.tokens[1])
    for field in ("tokens", "codes", "found"):
        got = getattr(together, field)
        np.testing.assert_array_equal(getattr(alone, field)[0], got[0])
        np.testing.assert_array_equal(getattr(swapped, field)[::-1], got)


def test_only_images_restricts_what_is_drawn():
    """Greedy: each token is the likeliest of the range after what stands before it."""
    (tokens, seen, _), first, size = recorded(UNTIED), 20, 8
    grammar = Grammar(6, first, size, ends=(3,), only_images=True)
    got = run(UNTIED, prompts(UNTIED), GREEDY, grammar)
    assert got.found.tolist() == [6, 6]
    np.testing.assert_array_equal(got.codes, np.asarray(got.tokens) - first)
    assert not np.isin(published(UNTIED).expected["greedy"], got.tokens).all()
    text = np.concatenate([tokens, got.tokens], axis=1)
    seen = np.pad(seen, ((0, 0), (0, 6)), constant_values=True)
    logits = teacher_forced(UNTIED, text, seen)[:, tokens.shape[1] - 1 : -1]
    likeliest = logits[..., first : first + size].argmax(-1)
    np.testing.assert_array_equal(got.tokens, likeliest + first)


def test_counts_and_ends():
    """The recorded text, cut where it has its image tokens or ends."""
    text = published(UNTIED).expected["greedy"]
    assert text[0].tolist() == [71, 71, 67, 76, 79, 94, 37, 72, 64, 46]
    # Image tokens are 70 to 79: row 0 has 71, 71, 76; row 1 72, 72 and no third.
    grammar = Grammar(3, first=70, size=10, most=10)
    assert text[1].tolist() == [66, 82, 84, 18, 3, 72, 23, 72, 23, 2]
    with pytest.warns(UserWarning, match=r"prompts \[1\] got \[2\] of 3 image tokens"):
        got = run(UNTIED, prompts(UNTIED), GREEDY, grammar)
    assert got.tokens[0].tolist() == [71, 71, 67, 76] + [-1] * 6
    assert got.tokens[1].tolist() == text[1].tolist()
    assert got.codes.tolist() == [[1, 1, 6], [2, 2, 0]]
    assert got.found.tolist() == [3, 2]
    # Either end token ends its row, and stands in it.
    grammar = Grammar(3, first=70, size=10, most=10, ends=(67, 18))
    with pytest.warns(UserWarning, match=r"prompts \[0, 1\] got \[2, 0\] of 3"):
        got = run(UNTIED, prompts(UNTIED), GREEDY, grammar)
    assert got.tokens[0].tolist() == [71, 71, 67] + [-1] * 7
    assert got.tokens[1].tolist() == [66, 82, 84, 18] + [-1] * 6
    assert got.codes.tolist() == [[1, 1, 0], [0, 0, 0]]


def test_another_prompt_of_the_bucket_compiles_nothing():
    grammar = Grammar(2, 0, 96)
    run(UNTIED, [[1, 2, 3], [4]], GREEDY, grammar)
    before = written._cache_size()
    run(UNTIED, [list(range(20)), [5, 6]], GREEDY, grammar)
    assert written._cache_size() == before


def test_what_cannot_be_written_is_refused():
    grammar = Grammar(2, 0, 96)
    refused = {
        "a token in each": ([[1], []], {}),
        "ids 1 to 96; the model has 0 to 95": ([[1, 96]], {}),
        "as many keys, not 2": ([[1]], {"row_keys": keys(2)}),
        "must be positive, not 0": ([[1]], {"repetition_penalty": 0.0}),
        "guidance is for images": ([[1]], {"sampling": Sampling(guidance=4.0)}),
        "the grammar has token 99": ([[1]], {"grammar": Grammar(2, 90, 10)}),
        "the grammar has token 151645": (
            [[1]],
            {"grammar": Grammar(2, 0, 9, (151645,))},
        ),
    }
    for message, (rows, change) in refused.items():
        options = {"sampling": GREEDY, "grammar": grammar} | change
        with pytest.raises(ValueError, match=message):
            run(UNTIED, rows, **options)
    with pytest.raises(ValueError, match="count is 3 and most 2"):
        Grammar(3, 0, 9, most=2)
    with pytest.raises(ValueError, match="cannot be 0 from 5 on"):
        Grammar(3, 5, 0)


def test_weights_that_are_not_finite_are_reported():
    model = published(UNTIED)
    params = jax.tree.map(lambda x: x, model.params)
    params["params"]["token_embedding"] = (
        params["params"]["token_embedding"].at[7].set(jnp.nan)
    )
    with pytest.raises(FloatingPointError, match=r"prompts \[1\]"):
        write(
            Llama(model.config),
            params,
            [[5, 17], [5, 7, 17]],
            keys(2),
            GREEDY,
            Grammar(2, 0, 96),
        )


# Conversion.


def state_dict(name: str = UNTIED) -> dict[str, np.ndarray]:
    return dict(published(name).state_dict)


def layer_key(i: int, name: str) -> str:
    return f"model.layers.{i}.self_attn.{name}"


def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection reordered as for interleaved rotary pairs."""
    parts = x.reshape(heads, 2, -1, *x.shape[1:])
    return parts.swapaxes(1, 2).reshape(x.shape)


def test_another_rotary_layout_fails_loudly():
    """The shapes do not tell; the logits, compared at 1e-4, do."""
    model, weights = published(UNTIED), state_dict()
    for i in range(model.config.depth):
        for name, heads in (("q_proj", 6), ("k_proj", 2)):
            for part in ("weight", "bias"):
                key = layer_key(i, f"{name}.{part}")
                weights[key] = interleaved(weights[key], heads)
    params = convert(weights, model.config, QWEN2)
    tokens, seen, want = recorded(UNTIED)
    got = teacher_forced(UNTIED, tokens, seen, params)
    assert np.abs(got - want)[seen].max() > 0.1


def test_swapped_projections_fail_loudly():
    model = published(UNTIED)
    weights = state_dict()
    for i in range(model.config.depth):
        for part in ("weight", "bias"):
            k, v = (layer_key(i, f"{name}_proj.{part}") for name in "kv")
            weights[k], weights[v] = weights[v], weights[k]
    params = convert(weights, model.config, QWEN2)
    tokens, seen, want = recorded(UNTIED)
    got = teacher_forced(UNTIED, tokens, seen, params)
    assert np.abs(got - want)[seen].max() > 0.1
    # Queries and keys of grouped heads differ in shape.
    weights = state_dict()
    q, k = (layer_key(0, f"{name}_proj.weight") for name in "qk")
    weights[q], weights[k] = weights[k], weights[q]
    with pytest.raises(
        ValueError, match=r"q_proj.weight is \[16, 48\], not \[48, 48\]"
    ):
        convert(weights, model.config, QWEN2)


def test_tied_and_untied_heads():
    tied, weights = published("qwen2_tiny_tied"), state_dict("qwen2_tiny_tied")
    assert "lm_head.weight" not in weights
    table = weights["model.embed_tokens.weight"]
    copied = weights | {"lm_head.weight": table}
    got = convert(copied, tied.config, QWEN2)
    assert to_torch(got, tied.config, QWEN2).keys() == weights.keys()
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed"):
        convert(weights | {"lm_head.weight": table + 1}, tied.config, QWEN2)
    with pytest.raises(ValueError, match=r"missing lm_head.weight \[96, 48\]"):
        convert(weights, published(UNTIED).config, QWEN2)


def test_rotary_tables_of_old_files_are_dropped_by_name():
    model, table = published(UNTIED), np.zeros(4, np.float32)
    extra = {layer_key(i, "rotary_emb.inv_freq"): table for i in range(3)}
    extra["model.rotary_emb.inv_freq"] = table
    got = convert(state_dict() | extra, model.config, QWEN2)
    assert to_torch(got, model.config, QWEN2).keys() == state_dict().keys()
    with pytest.raises(ValueError, match="unexpected model.inv_freq"):
        convert(state_dict() | {"model.inv_freq": table}, model.config, QWEN2)


def test_configurations():
    """Qwen2.5-1.5B and 7B, of which Tar is made, with Tar's larger vocabulary."""
    common = {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "num_hidden_layers": 28,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_window_layers": 21,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "vocab_size": 217207,
    }
    small = common | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    want = Qwen2Config(217207, 1536, 28, 12, 2, 128, 8960, True, 1e-6, 1e6)
    assert qwen2_config(small) == want
    # As transformers 5 writes it.
    new = {k: v for k, v in small.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    new["layer_types"] = ["full_attention"] * 28
    assert qwen2_config(new) == want
    refused = {
        "model_type 'qwen3' is not supported, only 'qwen2'": {"model_type": "qwen3"},
        "rope_type 'yarn' is not": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope_type 'linear' is not": {"rope_parameters": {"rope_type": "linear"}},
        "use_sliding_window True": {"use_sliding_window": True},
        "use_sliding_window True is": {"layer_types": ["sliding_attention"] * 28},
        "quantization_config": {"quantization_config": {"bits": 4}},
        "13 query heads cannot share 2": {"num_attention_heads": 13, "head_dim": 128},
    }
    for message, change in refused.items():
        with pytest.raises(ValueError, match=message):
            qwen2_config(small | change)
    with pytest.raises(ValueError, match="config.json lacks 'hidden_size'"):
        qwen2_config({k: v for k, v in small.items() if k != "hidden_size"})
