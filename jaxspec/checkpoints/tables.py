"""Key tables of the published checkpoints, one a family."""

from collections.abc import Iterator

import numpy as np

from jaxspec.checkpoints.convert import (
    CONV,
    LEADING_ONE,
    LINEAR,
    SAME,
    Entry,
    Layout,
    Table,
)
from jaxspec.models import abstract
from jaxspec.models.chameleon import ChameleonGridConfig
from jaxspec.models.ta_tok import TaTokConfig
from jaxspec.models.vq import VQConfig

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


FIRST = Layout(lambda x: x[0, 0], lambda x: x[None, None])  # (1, 1, C), (C)

LLAMAGEN = Table(
    entries=lambda config: TRUNK + LLAMAGEN_PREFIX,
    init=abstract.transformer,
    not_weights=frozenset({"freqs_cis"}),  # the rotary table, which we compute
)
ARDTOK = Table(
    entries=lambda config: TRUNK + ARDTOK_PREFIX,
    init=abstract.transformer,
)
LLAMAGEN_VQ = Table(
    entries=llamagen_vq_entries,
    init=abstract.vq,
    not_weights=frozenset({"quantize.codebook_used"}),  # a usage counter of training
)


# LPD, a vision transformer of timm's kind.

_LPD = "blocks.{layer}."
LPD_ENTRIES = (
    Entry("token_embedding", ("token_emb.weight",)),
    Entry("query", ("mask_token",), FIRST),
    Entry("positions", ("pos_embed",), LEADING_ONE),
    Entry("class_embedding", ("class_emb.weight",)),
    Entry("null_class", ("fake_latent",)),
    Entry("input_norm_scale", ("z_proj_ln.weight",)),
    Entry("input_norm_bias", ("z_proj_ln.bias",)),
    *(
        Entry(f"norm{i}_{ours}", (f"{_LPD}norm{i}.{theirs}",))
        for i in (1, 2)
        for ours, theirs in (("scale", "weight"), ("bias", "bias"))
    ),
    *(
        entry
        for ours, theirs in (
            ("qkv", "attn.qkv"),
            ("attention_out", "attn.proj"),
            ("fc1", "mlp.fc1"),
            ("fc2", "mlp.fc2"),
        )
        for entry in (
            Entry(ours, (f"{_LPD}{theirs}.weight",), LINEAR),
            Entry(f"{ours}_bias", (f"{_LPD}{theirs}.bias",)),
        )
    ),
    Entry("norm_scale", ("norm.weight",)),
    Entry("norm_bias", ("norm.bias",)),
    Entry("head", ("head.weight",), LINEAR),
)
LPD = Table(entries=lambda config: LPD_ENTRIES, init=abstract.lpd)


# EAGLE's drafter, as LANTERN has it for LlamaGen; its one layer is layer 0.

_EAGLE = "layers.0."
EAGLE_JOIN = (
    Entry("token_embedding", ("embed_tokens.weight",)),
    Entry("join", ("fc.weight",), LINEAR),
    Entry("join_bias", ("fc.bias",)),
)
EAGLE_ENTRIES = (
    *EAGLE_JOIN,
    Entry("qkv", tuple(f"{_EAGLE}self_attn.{x}_proj.weight" for x in "qkv"), LINEAR),
    Entry("attention_out", (f"{_EAGLE}self_attn.o_proj.weight",), LINEAR),
    Entry("ffn_norm", (f"{_EAGLE}post_attention_layernorm.weight",)),
    Entry(
        "gate_up",
        (f"{_EAGLE}mlp.gate_proj.weight", f"{_EAGLE}mlp.up_proj.weight"),
        LINEAR,
    ),
    Entry("down", (f"{_EAGLE}mlp.down_proj.weight",), LINEAR),
)
LANTERN_DRAFTER = Table(entries=lambda config: EAGLE_ENTRIES, init=abstract.eagle)


# Hugging Face's Llama: Qwen2, with biases, and Chameleon, with norms of the heads.

_LLAMA = "model.layers.{layer}."
LLAMA_ENTRIES = (
    Entry("token_embedding", ("model.embed_tokens.weight",)),
    Entry("attention_norm", (f"{_LLAMA}input_layernorm.weight",)),
    Entry("query", (f"{_LLAMA}self_attn.q_proj.weight",), LINEAR),
    Entry("query_bias", (f"{_LLAMA}self_attn.q_proj.bias",)),
    Entry("query_norm", (f"{_LLAMA}self_attn.q_norm.weight",)),
    Entry("query_norm_bias", (f"{_LLAMA}self_attn.q_norm.bias",)),
    Entry(
        "key_value",
        (f"{_LLAMA}self_attn.k_proj.weight", f"{_LLAMA}self_attn.v_proj.weight"),
        LINEAR,
    ),
    Entry(
        "key_value_bias",
        (f"{_LLAMA}self_attn.k_proj.bias", f"{_LLAMA}self_attn.v_proj.bias"),
    ),
    Entry("key_norm", (f"{_LLAMA}self_attn.k_norm.weight",)),
    Entry("key_norm_bias", (f"{_LLAMA}self_attn.k_norm.bias",)),
    Entry("attention_out", (f"{_LLAMA}self_attn.o_proj.weight",), LINEAR),
    Entry("ffn_norm", (f"{_LLAMA}post_attention_layernorm.weight",)),
    Entry(
        "gate_up",
        (f"{_LLAMA}mlp.gate_proj.weight", f"{_LLAMA}mlp.up_proj.weight"),
        LINEAR,
    ),
    Entry("down", (f"{_LLAMA}mlp.down_proj.weight",), LINEAR),
    Entry("norm", ("model.norm.weight",)),
    Entry("head", ("lm_head.weight",), LINEAR),  # where it is not tied
)
# Rotary tables of old files, which we compute.
_ROTARY = frozenset(
    {"model.rotary_emb.inv_freq", "model.layers.*.self_attn.rotary_emb.inv_freq"}
)


QWEN2 = Table(
    entries=lambda config: LLAMA_ENTRIES,
    init=abstract.llama,
    not_weights=_ROTARY,
    tied=lambda config: (
        {"lm_head.weight": "model.embed_tokens.weight"} if config.tied else {}
    ),
)
CHAMELEON = Table(
    entries=lambda config: LLAMA_ENTRIES,
    init=abstract.chameleon,
    not_weights=_ROTARY,
    # Its VQ is converted from the file that has the decoder too.
    unused=lambda config: ("model.vqmodel.*",),
)


# EAGLE's drafter for Anole: a whole layer of Chameleon, layer 0.
ANOLE_DRAFTER_ENTRIES = (
    *EAGLE_JOIN,
    *(
        Entry(x.path, tuple(k.replace(_LLAMA, _EAGLE) for k in x.keys), x.layout)
        for x in LLAMA_ENTRIES
        if x.stacked
    ),
)
LANTERN_ANOLE_DRAFTER = Table(
    entries=lambda config: ANOLE_DRAFTER_ENTRIES, init=abstract.eagle
)


# Chameleon as Meta and Anole published it first: queries and keys lie in the order of
# interleaved rotary pairs, (0, 1), (2, 3), ..., where Hugging Face has halves.


def _halves(x: np.ndarray, width: int) -> np.ndarray:
    """The last axis, heads of this width, from interleaved pairs to halves."""
    heads = x.reshape(*x.shape[:-1], -1, width // 2, 2)
    return heads.swapaxes(-1, -2).reshape(x.shape)


def _pairs(x: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `_halves`."""
    heads = x.reshape(*x.shape[:-1], -1, 2, width // 2)
    return heads.swapaxes(-1, -2).reshape(x.shape)


def chameleon_raw_entries(config: ChameleonGridConfig) -> Iterator[Entry]:
    """Chameleon under Meta's names, in Meta's layout."""
    layer, width = "layers.{layer}.", config.head_width
    turned = Layout(lambda x: _halves(x.T, width), lambda x: _pairs(x, width).T)
    head = Layout(  # (D) or, of slices, (slices, D); (1 or slices, D)
        lambda x: _halves(np.atleast_2d(x), width),
        lambda x: _pairs(x, width)[0] if len(x) == 1 else _pairs(x, width),
    )
    yield from (x for x in TRUNK if x.path != "qkv")
    yield Entry("query", (f"{layer}attention.wq.weight",), turned)
    yield Entry(
        "key_value",
        (f"{layer}attention.wk.weight", f"{layer}attention.wv.weight"),
        (turned, LINEAR),
    )
    for ours, theirs in (("query", "q"), ("key", "k")):
        norm = f"{layer}attention.{theirs}_normalization"
        yield Entry(f"{ours}_norm", (f"{norm}.weight",), head)
        yield Entry(f"{ours}_norm_bias", (f"{norm}.bias",), head)


CHAMELEON_RAW = Table(entries=chameleon_raw_entries, init=abstract.chameleon)


def chameleon_vq_entries(config: VQConfig) -> Iterator[Entry]:
    """Chameleon's tokenizer, as in Meta's vqgan.ckpt."""
    yield Entry("codebook", ("quantize.embedding.weight",))
    yield from _block("encoder/", "", {"to_code": "quant_conv"})
    yield from _block("decoder/", "", {"from_code": "post_quant_conv"})
    for side in ("encoder", "decoder"):
        yield from _block(f"{side}/", f"{side}.", ENDS)
        yield from _block(f"{side}/middle/res_0/", f"{side}.mid.block_1.", RES)
        yield from _block(f"{side}/middle/attention/", f"{side}.mid.attn_1.", ATTENTION)
        yield from _block(f"{side}/middle/res_1/", f"{side}.mid.block_2.", RES)
    for i in range(len(config.multipliers)):
        down, up = f"encoder.down.{i}", f"decoder.up.{i}"
        for j in range(config.encoder_blocks):
            yield from _block(f"encoder/level_{i}/res_{j}/", f"{down}.block.{j}.", RES)
        for j in range(config.decoder_blocks):
            yield from _block(f"decoder/level_{i}/res_{j}/", f"{up}.block.{j}.", RES)
        yield from _block(f"encoder/down_{i}/", down, {"conv": ".downsample.conv"})
        yield from _block(f"decoder/up_{i}/", up, {"conv": ".upsample.conv"})


CHAMELEON_VQ = Table(
    entries=chameleon_vq_entries,
    init=abstract.vq,
    not_weights=frozenset({"loss.*"}),  # the discriminator of its training
)


# Hugging Face's T5, of which the encoder is read.

_T5_ATTENTION, _T5_FFN = (
    "encoder.block.{layer}.layer.0.",
    "encoder.block.{layer}.layer.1.",
)
T5_ENTRIES = (
    Entry("token_embedding", ("shared.weight",)),
    Entry(
        "position_bias",
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
    ),
    Entry("attention_norm", (f"{_T5_ATTENTION}layer_norm.weight",)),
    Entry(
        "qkv",
        tuple(f"{_T5_ATTENTION}SelfAttention.{name}.weight" for name in "qkv"),
        LINEAR,
    ),
    Entry("attention_out", (f"{_T5_ATTENTION}SelfAttention.o.weight",), LINEAR),
    Entry("ffn_norm", (f"{_T5_FFN}layer_norm.weight",)),
    Entry(
        "gate_up",
        (
            f"{_T5_FFN}DenseReluDense.wi_0.weight",
            f"{_T5_FFN}DenseReluDense.wi_1.weight",
        ),
        LINEAR,
    ),
    Entry("down", (f"{_T5_FFN}DenseReluDense.wo.weight",), LINEAR),
    Entry("norm", ("encoder.final_layer_norm.weight",)),
)


T5 = Table(
    entries=lambda config: T5_ENTRIES,
    init=abstract.t5,
    unused=lambda config: ("decoder.*", "lm_head.weight"),
    tied=lambda config: {"encoder.embed_tokens.weight": "shared.weight"},
)


# Tar's TA-Tok: names as transformers gives the towers.

POINTWISE = Layout(
    lambda x: x.T[None, None], lambda x: x[0, 0].T
)  # (O, I), (1, 1, I, O)
PIXEL = Layout(
    lambda x: x[0, :, 0, 0], lambda x: x[None, :, None, None]
)  # (1, C, 1, 1)


def _dense(path: str, key: str) -> Iterator[Entry]:
    yield Entry(f"{path}/kernel", (f"{key}.weight",), LINEAR)
    yield Entry(f"{path}/bias", (f"{key}.bias",))


def tower_entries(path: str, key: str, patch: Layout) -> Iterator[Entry]:
    """A SigLIP tower; `patch` is how its patch embedding is laid out."""
    layer = f"{key}.encoder.layers.{{layer}}."
    yield Entry(
        f"{path}/patch/kernel", (f"{key}.embeddings.patch_embedding.weight",), patch
    )
    yield Entry(f"{path}/patch/bias", (f"{key}.embeddings.patch_embedding.bias",))
    yield Entry(f"{path}/positions", (f"{key}.embeddings.position_embedding.weight",))
    for i in (1, 2):
        yield Entry(f"{path}/norm{i}_scale", (f"{layer}layer_norm{i}.weight",))
        yield Entry(f"{path}/norm{i}_bias", (f"{layer}layer_norm{i}.bias",))
    linears = {
        "qkv": [f"self_attn.{name}_proj" for name in "qkv"],
        "attention_out": ["self_attn.out_proj"],
        "fc1": ["mlp.fc1"],
        "fc2": ["mlp.fc2"],
    }
    for ours, theirs in linears.items():
        weights = tuple(f"{layer}{name}.weight" for name in theirs)
        yield Entry(f"{path}/{ours}", weights, LINEAR)
        biases = tuple(f"{layer}{name}.bias" for name in theirs)
        yield Entry(f"{path}/{ours}_bias", biases)
    yield Entry(f"{path}/norm_scale", (f"{key}.post_layernorm.weight",))
    yield Entry(f"{path}/norm_bias", (f"{key}.post_layernorm.bias",))


def ta_tok_entries(config: TaTokConfig) -> Iterator[Entry]:
    """TA-Tok's towers, bottleneck and task layers."""
    yield Entry("pixel_shift", ("scale_layer.shift",), PIXEL)
    yield Entry("pixel_scale", ("scale_layer.scale",), PIXEL)
    yield from tower_entries("encoder", "encoder", CONV)
    yield from tower_entries("decoder", "decoder.vision_model", POINTWISE)
    yield from _dense("encode_task", "encode_task_layer.0")
    yield from _dense("decode_task_in", "decode_task_layer.0")
    yield from _dense("decode_task_out", "decode_task_layer.2")
    yield from _dense("to_code", "bottleneck.in_linear")
    yield from _dense("from_code", "bottleneck.out_linear")
    yield Entry("codebook", ("bottleneck.regularizer.embedding.weight",))
    yield from _dense("code_proj", "bottleneck.regularizer.embedding_proj")


TA_TOK = Table(
    entries=ta_tok_entries,
    init=abstract.ta_tok,
    # The encoder ends before its last layer, and neither tower is pooled.
    unused=lambda config: (
        f"encoder.encoder.layers.{config.encoder.depth}.*",
        "encoder.post_layernorm.*",
        "encoder.head.*",
        "decoder.vision_model.head.*",
        "bottleneck.regularizer.stochastic_temperature_inv",  # encoding by chance
    ),
)
