"""Configurations of published checkpoints, from shapes and constructor arguments."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.convert import Tensor
from jaxspec.models.drafter import eagle_config
from jaxspec.models.lpd import LPDConfig
from jaxspec.models.qwen2 import Qwen2Config
from jaxspec.models.t5 import T5Config
from jaxspec.models.ta_tok import TaTokConfig, TowerConfig
from jaxspec.models.transformer import TransformerConfig
from jaxspec.models.vq import VQConfig

# LlamaGen's sizes, width to depth and heads: B, L, XL, XXL, 1B, XXXL, 3B, 7B.
LLAMAGEN_SIZES = {
    768: (12, 12),
    1024: (24, 16),
    1280: (36, 20),
    1536: (48, 24),
    2048: (22, 32),
    2560: (48, 40),
    3200: (24, 32),
    4096: (32, 32),
}

# LPD's sizes, width to depth and heads: L, XL, XXL.
LPD_SIZES = {1024: (24, 16), 1280: (36, 20), 1536: (48, 24)}

# SigLIP2's vision towers, width to depth and heads: base, large, so400m.
SIGLIP2_SIZES = {768: (12, 12), 1024: (24, 16), 1152: (27, 16)}


def shape_of(state_dict: Mapping[str, Tensor], key: str) -> tuple[int, ...]:
    """The shape of a tensor; raises ValueError if it is not there."""
    if key not in state_dict:
        raise ValueError(f"no {key!r} in the state dict: another family, or a wrapper?")
    return tuple(state_dict[key].shape)


def _square(cells: int) -> tuple[int, int]:
    side = math.isqrt(cells)
    if side * side != cells:
        raise ValueError(f"{cells} cells are not a square grid")
    return side, side


def llamagen_config(
    state_dict: Mapping[str, Tensor],
    grid: tuple[int, int] | None = None,
    heads: int | None = None,
) -> TransformerConfig:
    """Configuration of a LlamaGen transformer (c2i or t2i).

    Args:
      state_dict: the weights.
      grid: rows and columns of tokens; 256 px is (16, 16). Nothing in the weights tells
        it, but a `freqs_cis` beside them does.
      heads: of a size that was not published; depth is then counted in the keys.

    Raises:
      ValueError: the grid or the heads cannot be told, or a tensor that tells something
        is missing.
    """
    vocab, width = shape_of(state_dict, "tok_embeddings.weight")
    if heads is not None:
        layers = (key.split(".") for key in state_dict if key.startswith("layers."))
        depth = 1 + max((int(parts[1]) for parts in layers), default=-1)
    elif width in LLAMAGEN_SIZES:
        depth, heads = LLAMAGEN_SIZES[width]
    else:
        raise ValueError(f"no published size has width {width}: pass `heads`")
    caption = "cls_embedding.uncond_embedding"
    if caption in state_dict:
        prefix, (length, prefix_width) = "caption", shape_of(state_dict, caption)
    else:
        rows, _ = shape_of(state_dict, "cls_embedding.embedding_table.weight")
        prefix, length, prefix_width = "class", 1, rows - 1
    if grid is None and "freqs_cis" in state_dict:
        grid = _square(shape_of(state_dict, "freqs_cis")[0] - length)
    elif grid is None:
        raise ValueError(
            "the weights do not tell the grid: pass it; 256 px is (16, 16)"
        )
    return TransformerConfig(
        vocab_size=vocab,
        width=width,
        depth=depth,
        heads=heads,
        hidden=shape_of(state_dict, "layers.0.feed_forward.w1.weight")[0],
        grid=grid,
        prefix=prefix,
        prefix_length=length,
        prefix_width=prefix_width,
        positions="rotary",
    )


def lantern_drafter_config(
    args: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    grid: tuple[int, int],
    heads: int | None = None,
) -> TransformerConfig:
    """Configuration of LANTERN's drafter for a caption-conditional LlamaGen.

    Args:
      args: of its constructor, as far as they are there.
      state_dict: the weights.
      grid: rows and columns of tokens of the target; nothing in the weights tells it.
      heads: by default those of the args, or of LlamaGen of that width.

    Raises:
      ValueError: the heads cannot be told, or a tensor that tells something is missing.
    """
    vocab, width = shape_of(state_dict, "embed_tokens.weight")
    _, known = LLAMAGEN_SIZES.get(width, (None, None))
    heads = heads or args.get("num_attention_heads", known)
    if heads is None:
        raise ValueError(f"no published size has width {width}: pass `heads`")
    target = TransformerConfig(
        vocab_size=vocab,
        width=width,
        depth=1,
        heads=heads,
        hidden=shape_of(state_dict, "layers.0.mlp.gate_proj.weight")[0],
        grid=grid,
        prefix="caption",
        prefix_length=120,
        prefix_width=2048,
        positions="rotary",
    )
    return eagle_config(target, norm_epsilon=args.get("rms_norm_eps", 1e-6))


def lpd_config(state_dict: Mapping[str, Tensor], heads: int | None = None) -> LPDConfig:
    """Configuration of an LPD transformer, whose shapes tell all but the heads.

    Args:
      state_dict: the weights.
      heads: of a size that was not published.

    Raises:
      ValueError: the heads cannot be told, the grid is not square, or a tensor that
        tells something is missing.
    """
    vocab, width = shape_of(state_dict, "token_emb.weight")
    if heads is None and width not in LPD_SIZES:
        raise ValueError(f"no published size has width {width}: pass `heads`")
    layers = (key.split(".") for key in state_dict if key.startswith("blocks."))
    return LPDConfig(
        vocab_size=vocab,
        width=width,
        depth=1 + max((int(parts[1]) for parts in layers), default=-1),
        heads=heads or LPD_SIZES[width][1],
        hidden=shape_of(state_dict, "blocks.0.mlp.fc1.weight")[0],
        grid=_square(shape_of(state_dict, "pos_embed")[1] - 1),
        prefix="class",
        prefix_length=1,
        prefix_width=shape_of(state_dict, "class_emb.weight")[0],
    )


def ardtok_config(
    args: Mapping[str, Any], state_dict: Mapping[str, Tensor]
) -> TransformerConfig:
    """Configuration of Tar's AR-DTok from the `args` beside its state dict.

    What `args` leaves out has the default of the published constructor.

    Raises:
      ValueError: the model is of a kind that no published file has, or `args` lacks a
        size.
    """
    if not args:
        raise ValueError(
            "no arguments beside the weights, and they tell its sizes: a folder may "
            "have them as config.json"
        )
    kind = args.get("model_type", "class_cond")
    if kind != "clip_cond":
        raise ValueError(f"model_type must be 'clip_cond', not {kind!r}")
    try:
        heads, cells = args["n_head"], args["max_seq_len"]
        if args.get("n_kv_head") not in (None, heads):
            raise ValueError(f"grouped heads ({args['n_kv_head']}) are not supported")
        return TransformerConfig(
            vocab_size=args["vocab_size"],
            width=args["dim"],
            depth=args["n_layer"],
            heads=heads,
            hidden=shape_of(state_dict, "layers.0.feed_forward.w1.weight")[0],
            grid=_square(cells),
            prefix="features",
            prefix_length=args["cls_token_num"],
            prefix_width=args.get("cond_dim", 1152),
            positions="learned",
            norm_epsilon=args.get("norm_eps", 1e-5),
        )
    except KeyError as error:
        raise ValueError(f"args lack {error}; they hold {sorted(args)}") from None


def vq_config(args: Mapping[str, Any]) -> VQConfig:
    """Configuration of LlamaGen's VQ from constructor arguments.

    Takes `ch`, `ch_mult`, `z_channels`, `codebook_size` and `codebook_embed_dim`; what
    is left out is as in VQ-16.

    Raises:
      ValueError: another argument is among them.
    """
    names = {
        "ch": "width",
        "ch_mult": "multipliers",
        "z_channels": "latent_width",
        "codebook_size": "codebook_size",
        "codebook_embed_dim": "code_width",
    }
    unknown = sorted(set(args) - set(names))
    if unknown:
        raise ValueError(f"unknown arguments {unknown}; known are {sorted(names)}")
    fields = {names[name]: value for name, value in args.items()}
    if "multipliers" in fields:
        fields["multipliers"] = tuple(fields["multipliers"])  # static, so hashable
    return VQConfig(**fields)


def vq_by_shapes(
    state_dict: Mapping[str, Tensor], down: str, up: str, block: str, **fixed
) -> VQConfig:
    """Configuration of a published VQ from its tensors.

    Args:
      state_dict: the weights.
      down, up: what the names of the encoder's and the decoder's levels begin with.
      block: what their residual blocks are called.
      **fixed: what no shape tells: `normalize_codes`, `attention`.

    Raises:
      ValueError: a tensor that tells something is missing, or levels are no multiples
        of the first convolution's width.
    """

    def count(*names: str) -> int:
        pattern = r"\.".join((*map(re.escape, names), r"(\d+)", ""))
        found = (re.match(pattern, key) for key in state_dict)
        return len({match[1] for match in found if match})

    width = shape_of(state_dict, "encoder.conv_in.weight")[0]
    widths = [
        shape_of(state_dict, f"{down}.{i}.{block}.0.conv1.weight")[0]
        for i in range(count(down))
    ]
    if any(x % width for x in widths):
        raise ValueError(
            f"levels are {widths} wide, no multiples of the first convolution's {width}"
        )
    codes, code_width = shape_of(state_dict, "quantize.embedding.weight")
    return VQConfig(
        codebook_size=codes,
        code_width=code_width,
        width=width,
        multipliers=tuple(x // width for x in widths),
        encoder_blocks=count(down, "0", block),
        decoder_blocks=count(up, "0", block),
        latent_width=shape_of(state_dict, "quant_conv.weight")[1],
        **fixed,
    )


def _refuse(found: Mapping[str, Any], wanted: Mapping[str, tuple]) -> None:
    """Raises ValueError for a setting that the model here does not know."""
    for name, known in wanted.items():
        value = found.get(name, known[0])
        if value not in known:
            raise ValueError(f"{name} {value!r} is not supported, only {known[0]!r}")


def llama_sizes(
    config: Mapping[str, Any], known: Mapping[str, tuple]
) -> dict[str, Any]:
    """What `config.json` tells of any `LlamaConfig`.

    Raises:
      ValueError: it lacks a size, or asks for what the models here do not have: scaled
        rotary positions, quantized weights, or what is not among `known`.
    """
    # transformers 5 writes the rotary settings in one place, older ones in two.
    rotary: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0)}
    for name in ("rope_scaling", "rope_parameters"):
        rotary |= config.get(name) or {}
    found = dict(config) | {
        "rope_type": rotary.get("rope_type", rotary.get("type", "default"))
    }
    common = {
        "hidden_act": ("silu",),
        "rope_type": ("default",),
        "quantization_config": (None,),
    }
    _refuse(found, {**known, **common})
    try:
        heads = config["num_attention_heads"]
        return {
            "vocab_size": config["vocab_size"],
            "width": config["hidden_size"],
            "depth": config["num_hidden_layers"],
            "heads": heads,
            "key_heads": config.get("num_key_value_heads") or heads,
            "head_width": config.get("head_dim") or config["hidden_size"] // heads,
            "hidden": config["intermediate_size"],
            "tied": config.get("tie_word_embeddings", False),
            "rotary_base": rotary["rope_theta"],
        }
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}") from None


def qwen2_config(config: Mapping[str, Any]) -> Qwen2Config:
    """Configuration of a Qwen2 language model from its `config.json`.

    Raises:
      ValueError: it lacks a size, or asks for what no Tar model has: another kind of
        model, scaled rotary positions, sliding windows, quantized weights.
    """
    windows = {"sliding_attention"} & set(config.get("layer_types") or ())
    found = dict(config) | {
        "use_sliding_window": bool(config.get("use_sliding_window") or windows)
    }
    known = {"model_type": ("qwen2",), "use_sliding_window": (False,)}
    return Qwen2Config(
        **llama_sizes(found, known), norm_epsilon=config.get("rms_norm_eps", 1e-6)
    )


def t5_config(config: Mapping[str, Any]) -> T5Config:
    """Configuration of a T5 encoder from its `config.json`.

    Raises:
      ValueError: it lacks a size, or is not of T5 v1.1's kind, such as flan-t5-xl's.
    """
    _refuse(
        {"feed_forward_proj": "relu"} | dict(config),
        {
            "model_type": ("t5",),
            "feed_forward_proj": ("gated-gelu",),
            "quantization_config": (None,),
        },
    )
    try:
        return T5Config(
            vocab_size=config["vocab_size"],
            width=config["d_model"],
            depth=config["num_layers"],
            heads=config["num_heads"],
            head_width=config["d_kv"],
            hidden=config["d_ff"],
            buckets=config.get("relative_attention_num_buckets", 32),
            max_distance=config.get("relative_attention_max_distance", 128),
            norm_epsilon=config.get("layer_norm_epsilon", 1e-6),
        )
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}") from None


def ta_tok_config(
    args: Mapping[str, Any], state_dict: Mapping[str, Tensor]
) -> TaTokConfig:
    """Configuration of Tar's TA-Tok from the `args` beside its state dict.

    Depth and heads of the encoder are those of the SigLIP2 tower of its width, unless
    `args["vision"]` holds a tower's own configuration.

    Raises:
      ValueError: `args` lacks the bottleneck, or describes what no published file has;
        a tensor that tells a size is missing; the sizes do not fit each other.
    """
    try:
        bottleneck = args["bottleneck"]["args"]
        regularizer = bottleneck["regularizer"]["args"]
        kind = bottleneck["regularizer"]["name"]
        codes, code_width = regularizer["codebook_size"], bottleneck["bottleneck_dim"]
    except KeyError as error:
        raise ValueError(f"args lack {error}; they hold {sorted(args)}") from None
    vision = dict(args.get("vision", {}))
    known = {
        "regularizer": ("simvq",),
        "norm": ("none",),
        "select_layer_id": (-2,),
        "hidden_act": ("gelu_pytorch_tanh",),
    }
    _refuse(vision | bottleneck | dict(args) | {"regularizer": kind}, known)
    patches = "embeddings.patch_embedding.weight"
    places = "embeddings.position_embedding.weight"
    fc1 = "encoder.layers.0.mlp.fc1.weight"
    width, channels, patch, _ = shape_of(state_dict, f"encoder.{patches}")
    if vision:
        depth, heads = vision["num_hidden_layers"], vision["num_attention_heads"]
    elif width in SIGLIP2_SIZES:
        depth, heads = SIGLIP2_SIZES[width]
    else:
        raise ValueError(f"no SigLIP2 tower has width {width}: give args a `vision`")
    encoder = TowerConfig(
        width=width,
        depth=depth - 1,  # it is read before its last layer
        heads=heads,
        hidden=shape_of(state_dict, f"encoder.{fc1}")[0],
        channels=channels,
        patch=patch,
        places=_square(shape_of(state_dict, f"encoder.{places}")[0])[0],
        final_norm=False,
    )
    decoder_width, decoder_channels = shape_of(
        state_dict, f"decoder.vision_model.{patches}"
    )
    decoder = TowerConfig(
        width=decoder_width,
        depth=args.get("decoder_depth", 3),
        heads=12,  # of transformers' default Siglip2VisionConfig, which Tar takes
        hidden=shape_of(state_dict, f"decoder.vision_model.{fc1}")[0],
        channels=decoder_channels,
        patch=1,
        places=_square(shape_of(state_dict, f"decoder.vision_model.{places}")[0])[0],
        final_norm=True,
    )
    return TaTokConfig(
        image=args.get("input_size", 384),
        codebook_size=codes,
        code_width=code_width,
        normalize_codes=regularizer.get("l2_normalized", False),
        encoder=encoder,
        decoder=decoder,
    )
