"""Key tables of the published checkpoints, one a family."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from jaxspec.checkpoints.convert import CONV, LEADING_ONE, LINEAR, SAME, Entry, Table
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.models.vq import VQ, VQConfig

# What LlamaGen's and Tar's transformers have in common.
TRUNK = (
    Entry("token_embedding", ("tok_embeddings.weight",)),
    Entry("attention_norm", ("layers.{layer}.attention_norm.weight",)),
    # Rows of wqkv are ordered q, k, v, as our columns are.
    Entry("qkv", ("layers.{layer}.attention.wqkv.weight",), LINEAR),
    Entry("attention_out", ("layers.{layer}.attention.wo.weight",), LINEAR),
    Entry("ffn_norm", ("layers.{layer}.ffn_norm.weight",)),
    Entry(
        "gate_up",
        (
            "layers.{layer}.feed_forward.w1.weight",
            "layers.{layer}.feed_forward.w3.weight",
        ),
        LINEAR,
    ),
    Entry("down", ("layers.{layer}.feed_forward.w2.weight",), LINEAR),
    Entry("norm", ("norm.weight",)),
    Entry("head", ("output.weight",), LINEAR),
)

# Class-conditional (c2i) and caption-conditional (t2i) files; a model has either.
LLAMAGEN_PREFIX = (
    Entry("class_embedding", ("cls_embedding.embedding_table.weight",)),
    Entry("prefix_in", ("cls_embedding.cap_proj.fc1.weight",), LINEAR),
    Entry("prefix_out", ("cls_embedding.cap_proj.fc2.weight",), LINEAR),
    Entry("prefix_null", ("cls_embedding.uncond_embedding",)),
)

ARDTOK_PREFIX = (
    Entry("prefix_proj", ("clip_proj.weight",), LINEAR),
    Entry("prefix_bias", ("clip_proj.bias",)),
    Entry("position_embedding", ("abs_pe",), LEADING_ONE),
)


# Convolutions and norms of the VQ's blocks: our name, theirs.
RES = {
    "norm1": "norm1",
    "conv1": "conv1",
    "norm2": "norm2",
    "conv2": "conv2",
    "shortcut": "nin_shortcut",
}
ATTENTION = {"norm": "norm", "q": "q", "k": "k", "v": "v", "out": "proj_out"}
ENDS = {"conv_in": "conv_in", "norm_out": "norm_out", "conv_out": "conv_out"}


def _block(path: str, key: str, names: dict[str, str]) -> Iterator[Entry]:
    for ours, theirs in names.items():
        weight, layout = ("scale", SAME) if "norm" in ours else ("kernel", CONV)
        yield Entry(f"{path}{ours}/{weight}", (f"{key}{theirs}.weight",), layout)
        yield Entry(f"{path}{ours}/bias", (f"{key}{theirs}.bias",))


def _level(path: str, key: str, blocks: int) -> Iterator[Entry]:
    for i in range(blocks):
        yield from _block(f"{path}/res_{i}/", f"{key}.res.{i}.", RES)
        yield from _block(f"{path}/attention_{i}/", f"{key}.attn.{i}.", ATTENTION)


def llamagen_vq_entries(config: VQConfig) -> Iterator[Entry]:
    """LlamaGen's tokenizer; its decoder counts resolutions from the lowest up."""
    yield Entry("codebook", ("quantize.embedding.weight",))
    yield from _block("encoder/", "", {"to_code": "quant_conv"})
    yield from _block("decoder/", "", {"from_code": "post_quant_conv"})
    for side in ("encoder", "decoder"):
        yield from _block(f"{side}/", f"{side}.", ENDS)
        yield from _block(f"{side}/middle/res_0/", f"{side}.mid.0.", RES)
        yield from _block(f"{side}/middle/attention/", f"{side}.mid.1.", ATTENTION)
        yield from _block(f"{side}/middle/res_1/", f"{side}.mid.2.", RES)
    levels = len(config.multipliers)
    for i in range(levels):
        down, up = f"encoder.conv_blocks.{i}", f"decoder.conv_blocks.{levels - 1 - i}"
        yield from _level(f"encoder/level_{i}", down, config.encoder_blocks)
        yield from _level(f"decoder/level_{i}", up, config.decoder_blocks)
        yield from _block(f"encoder/down_{i}/", down, {"conv": ".downsample.conv"})
        yield from _block(f"decoder/up_{i}/", up, {"conv": ".upsample.conv"})


def _init_transformer(config: TransformerConfig):
    # Any method will do: `setup` makes all parameters.
    init = partial(Transformer(config).init, method="logits")
    states = jax.ShapeDtypeStruct((1, config.width), jnp.float32)
    return jax.eval_shape(init, jax.random.key(0), states)


def _init_vq(config: VQConfig):
    image = jax.ShapeDtypeStruct((1, config.factor, config.factor, 3), jnp.float32)
    return jax.eval_shape(VQ(config).init, jax.random.key(0), image)


LLAMAGEN = Table(
    entries=lambda config: TRUNK + LLAMAGEN_PREFIX,
    init=_init_transformer,
    not_weights=frozenset({"freqs_cis"}),  # the rotary table, which we compute
)
ARDTOK = Table(
    entries=lambda config: TRUNK + ARDTOK_PREFIX,
    init=_init_transformer,
)
LLAMAGEN_VQ = Table(
    entries=llamagen_vq_entries,
    init=_init_vq,
    not_weights=frozenset({"quantize.codebook_used"}),  # a usage counter of training
)
