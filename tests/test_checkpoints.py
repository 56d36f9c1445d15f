"""Strict conversion of PyTorch state dicts, and its inverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import (
    ARDTOK,
    LLAMAGEN,
    LLAMAGEN_VQ,
    ardtok_config,
    convert,
    llamagen_config,
    to_torch,
    vq_config,
)
from jaxspec.models.transformer import Transformer
from jaxspec.models.vq import VQConfig
from tests.parity import TRANSFORMERS, published

OTHERS = [
    "llamagen_vq16_tiny",
    "tar_tatok_tiny",
    "qwen2_tiny",
    "qwen2_tiny_tied",
    "t5_tiny",
]


def weights(name: str) -> dict[str, np.ndarray]:
    """The fixture's state dict without what is not a weight; a fresh dict."""
    model = published(name)
    drops = lambda key: model.table.drops(key, model.config)
    return {k: v for k, v in model.state_dict.items() if not drops(k)}


def assert_same_bits(got: dict, want: dict):
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype, key
        assert got[key].shape == tensor.shape, key
        assert got[key].tobytes() == tensor.tobytes(), key


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", [*TRANSFORMERS, *OTHERS])
def test_round_trip_is_bit_equal(name, dtype):
    model = published(name)
    state_dict = {k: v.astype(dtype) for k, v in weights(name).items()}
    params = convert(state_dict, model.config, model.table)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(dtype)}
    assert_same_bits(to_torch(params, model.config, model.table), state_dict)


def test_round_trip_at_full_size():
    model = published("llamagen_vq16_full")
    got = to_torch(model.params, model.config, model.table)
    assert_same_bits(got, weights("llamagen_vq16_full"))


def test_converted_tree_is_the_module_s_own():
    model = published("llamagen_c2i_tiny")
    tokens = jnp.zeros((1, model.config.cells), jnp.int32)
    init = Transformer(model.config).init
    want = jax.eval_shape(init, jax.random.key(0), jnp.zeros(1, jnp.int32), tokens)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(model.params) == shapes(want)


def test_conversion_shares_no_memory():
    model = published("llamagen_c2i_tiny")
    state_dict = {k: v.copy() for k, v in weights("llamagen_c2i_tiny").items()}
    params = convert(state_dict, model.config, model.table)
    before = params["params"]["norm"].copy()
    state_dict["norm.weight"][:] = 0
    np.testing.assert_array_equal(params["params"]["norm"], before)


def test_every_problem_is_reported_at_once():
    model = published("llamagen_c2i_tiny")
    state_dict = weights("llamagen_c2i_tiny")
    state_dict["outputs.weight"] = state_dict.pop("output.weight")
    del state_dict["layers.1.attention.wo.weight"]
    state_dict["layers.3.ffn_norm.weight"] = state_dict["layers.2.ffn_norm.weight"]
    state_dict["norm.weight"] = np.ones((1, 64), np.float32)
    state_dict["tok_embeddings.weight"] = np.zeros((96, 64), np.int8)
    wide = state_dict["layers.0.feed_forward.w2.weight"].astype(np.float64)
    state_dict["layers.0.feed_forward.w2.weight"] = wide
    half = state_dict["layers.2.feed_forward.w3.weight"].astype(jnp.bfloat16)
    state_dict["layers.2.feed_forward.w3.weight"] = half
    with pytest.raises(ValueError) as error:
        convert(state_dict, model.config, model.table)
    first, *rest = str(error.value).splitlines()
    assert first == "8 problems in the state dict; nothing was converted:"
    assert sorted(rest) == [
        "  missing layers.1.attention.wo.weight [64, 64]",
        "  missing output.weight [96, 64] (nearest: outputs.weight)",
        "  shape of norm.weight is [1, 64], not [64]",
        "  type of layers.0.feed_forward.w2.weight is float64, not one of "
        "float32, float16, bfloat16",
        "  type of tok_embeddings.weight is int8, not one of float32, float16, "
        "bfloat16",
        "  types differ in what becomes one array: float32 in "
        "layers.2.feed_forward.w1.weight, bfloat16 in layers.2.feed_forward.w3.weight",
        "  unexpected layers.3.ffn_norm.weight [64]",
        "  unexpected outputs.weight [96, 64] (nearest: output.weight)",
    ]


def test_what_is_not_a_weight_is_dropped_by_name_alone():
    model = published("llamagen_c2i_tiny")
    extra = {"freqs_cis": np.zeros((17, 8, 2), np.float32)}
    got = convert(weights("llamagen_c2i_tiny") | extra, model.config, LLAMAGEN)
    assert "freqs_cis" not in to_torch(got, model.config, LLAMAGEN)
    assert "quantize.codebook_used" in published("llamagen_vq16_tiny").state_dict
    with pytest.raises(ValueError, match=r"unexpected freqs_cis \[17, 8, 2\]"):
        convert(
            weights("llamagen_vq16_tiny") | extra,
            published("llamagen_vq16_tiny").config,
            LLAMAGEN_VQ,
        )


def test_wrong_table_and_wrong_parameters_are_refused():
    tar, c2i = published("tar_ardtok_tiny"), published("llamagen_c2i_tiny")
    with pytest.raises(ValueError, match="no entry for.*position_embedding"):
        convert(weights("tar_ardtok_tiny"), tar.config, LLAMAGEN)
    with pytest.raises(ValueError, match="do not fit.*position_embedding"):
        to_torch(tar.params, c2i.config, LLAMAGEN)


def test_configurations_of_published_sizes():
    """3B's heads are 100 wide: heads and depth come from the size, not a rule."""
    tensor = lambda *shape: np.broadcast_to(np.float32(0), shape)
    state_dict = {
        "tok_embeddings.weight": tensor(16384, 3200),
        "cls_embedding.embedding_table.weight": tensor(1001, 3200),
        "layers.0.feed_forward.w1.weight": tensor(8704, 3200),
    }
    config = llamagen_config(state_dict, (24, 24))
    assert (config.depth, config.heads, config.head_width) == (24, 32, 100)
    assert (config.prefix, config.prefix_length) == ("class", 1)
    assert (config.prefix_width, config.hidden, config.slots) == (1000, 8704, 577)
    with pytest.raises(ValueError, match="grid"):
        llamagen_config(state_dict)
    table = {"freqs_cis": tensor(257, 50, 2)}
    assert llamagen_config(state_dict | table).grid == (16, 16)
    with pytest.raises(ValueError, match="no 'tok_embeddings.weight'"):
        llamagen_config({"model": tensor(1)}, (16, 16))
    assert vq_config({"ch_mult": [1, 2, 2, 4]}) == VQConfig(multipliers=(1, 2, 2, 4))
    with pytest.raises(ValueError, match="unknown arguments"):
        vq_config({"ch_multiplier": [1, 2]})


def test_ardtok_arguments_that_do_not_fit():
    state_dict = weights("tar_ardtok_tiny")
    args = {
        "model_type": "clip_cond",
        "dim": 64,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 96,
        "max_seq_len": 16,
        "cls_token_num": 9,
        "cond_dim": 40,
    }
    assert ardtok_config(args, state_dict) == published("tar_ardtok_tiny").config
    # Another grid: the published loader drops the positions without a word.
    config = ardtok_config(args | {"max_seq_len": 25}, state_dict)
    with pytest.raises(ValueError, match=r"abs_pe is \[1, 24, 64\], not \[1, 33, 64\]"):
        convert(state_dict, config, ARDTOK)
    with pytest.raises(ValueError, match="grouped"):
        ardtok_config(args | {"n_kv_head": 2}, state_dict)
    with pytest.raises(ValueError, match="square"):
        ardtok_config(args | {"max_seq_len": 24}, state_dict)
    with pytest.raises(ValueError, match="clip_cond"):
        ardtok_config(args | {"model_type": "indice_cond"}, state_dict)
    del args["n_head"]
    with pytest.raises(ValueError, match="args lack 'n_head'"):
        ardtok_config(args, state_dict)
