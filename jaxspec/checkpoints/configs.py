"""Configurations of published checkpoints, from shapes and constructor arguments."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

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


def _shape(state_dict: Mapping[str, np.ndarray], key: str) -> tuple[int, ...]:
    if key not in state_dict:
        raise ValueError(f"no {key!r} in the state dict: another family, or a wrapper?")
    return tuple(state_dict[key].shape)


def _square(cells: int) -> tuple[int, int]:
    side = math.isqrt(cells)
    if side * side != cells:
        raise ValueError(f"{cells} cells are not a square grid")
    return side, side


def llamagen_config(
    state_dict: Mapping[str, np.ndarray],
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
    vocab, width = _shape(state_dict, "tok_embeddings.weight")
    if heads is not None:
        layers = (key.split(".") for key in state_dict if key.startswith("layers."))
        depth = 1 + max((int(parts[1]) for parts in layers), default=-1)
    elif width in LLAMAGEN_SIZES:
        depth, heads = LLAMAGEN_SIZES[width]
    else:
        raise ValueError(f"no published size has width {width}: pass `heads`")
    caption = "cls_embedding.uncond_embedding"
    if caption in state_dict:
        prefix, (length, prefix_width) = "caption", _shape(state_dict, caption)
    else:
        rows, _ = _shape(state_dict, "cls_embedding.embedding_table.weight")
        prefix, length, prefix_width = "class", 1, rows - 1
    if grid is None and "freqs_cis" in state_dict:
        grid = _square(_shape(state_dict, "freqs_cis")[0] - length)
    elif grid is None:
        raise ValueError(
            "the weights do not tell the grid: pass it; 256 px is (16, 16)"
        )
    return TransformerConfig(
        vocab_size=vocab,
        width=width,
        depth=depth,
        heads=heads,
        hidden=_shape(state_dict, "layers.0.feed_forward.w1.weight")[0],
        grid=grid,
        prefix=prefix,
        prefix_length=length,
        prefix_width=prefix_width,
        positions="rotary",
    )


def ardtok_config(
    args: Mapping[str, Any], state_dict: Mapping[str, np.ndarray]
) -> TransformerConfig:
    """Configuration of Tar's AR-DTok from the `args` beside its state dict.

    What `args` leaves out has the default of the published constructor.

    Raises:
      ValueError: the model is of a kind that no published file has, or `args` lacks a
        size.
    """
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
            hidden=_shape(state_dict, "layers.0.feed_forward.w1.weight")[0],
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
