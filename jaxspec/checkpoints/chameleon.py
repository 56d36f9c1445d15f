"""Chameleon's checkpoints: their configurations, and whether they were made to draw.

Lumina-mGPT and Anole are Chameleon, trained to draw. Meta's own release is the same
network and converts like them, but was not released to make pictures.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.configs import llama_sizes, shape_of
from jaxspec.checkpoints.convert import Tensor
from jaxspec.checkpoints.readers import Checkpoint
from jaxspec.models.chameleon import ChameleonConfig, ChameleonGridConfig

CELL = 16  # pixels a side
NEWLINE = 8803  # of Lumina-mGPT, <reserved08799>
ANOLE_SIZE = 512  # pixels a side, the only one
_LUMINA = re.compile(r"lumina[-_]?mgpt[^/\\]*?-(\d{2,4})(?![0-9a-z])", re.IGNORECASE)
_META = re.compile(r"facebook(/|--)chameleon", re.IGNORECASE)


def chameleon_config(
    args: Mapping[str, Any], state_dict: Mapping[str, Tensor]
) -> ChameleonConfig:
    """Configuration of a Chameleon in Hugging Face's layout.

    Args:
      args: its `config.json`.
      state_dict: the weights; whether heads share their norms is told by the shapes.

    Raises:
      ValueError: it lacks a size, or asks for what no such model has.
    """
    known = {
        "model_type": ("chameleon",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "tie_word_embeddings": (False, None),
    }
    norm = "model.layers.0.self_attn.{}_norm.weight"
    return ChameleonConfig(
        **llama_sizes(args, known) | {"tied": False},
        norm_epsilon=args.get("rms_norm_eps", 1e-5),
        head_norms=(
            shape_of(state_dict, norm.format("q"))[0],
            shape_of(state_dict, norm.format("k"))[0],
        ),
        output_norms=bool(args.get("swin_norm")),
    )


def chameleon_raw_config(
    args: Mapping[str, Any], state_dict: Mapping[str, Tensor]
) -> ChameleonConfig:
    """Configuration of a Chameleon in Meta's layout, in one file or in slices.

    Args:
      args: Meta's `params.json`, if it is there; else what shapes do not tell is as in
        the 7B model, which is the one that is in one file.
      state_dict: the weights; slices have norms of heads of their own.

    Raises:
      ValueError: a tensor that tells something is missing, or slices lack the file.
    """
    told = args.get("model", args)
    vocab, width = shape_of(state_dict, "tok_embeddings.weight")
    norm = "layers.0.attention.{}_normalization.weight"
    *slices, head_width = shape_of(state_dict, norm.format("q"))
    if slices and "swin_norm" not in told:
        raise ValueError(
            "params.json, with swin_norm, must be beside the slices: nothing else "
            "tells whether layers norm what they take (7B) or what they return (34B)"
        )
    layers = (key.split(".") for key in state_dict if key.startswith("layers."))
    return ChameleonConfig(
        vocab_size=vocab,
        width=width,
        depth=1 + max(int(parts[1]) for parts in layers),
        heads=shape_of(state_dict, "layers.0.attention.wq.weight")[0] // head_width,
        key_heads=shape_of(state_dict, "layers.0.attention.wk.weight")[0] // head_width,
        head_width=head_width,
        hidden=shape_of(state_dict, "layers.0.feed_forward.w1.weight")[0],
        norm_epsilon=told.get("norm_eps", 1e-5),
        rotary_base=told.get("rope_theta", 1e4),
        head_norms=(slices[0], slices[0]) if slices else (1, 1),
        output_norms=bool(told.get("swin_norm")),
    )


def anole_drafter_config(
    args: Mapping[str, Any], state_dict: Mapping[str, Tensor], size: int | None
) -> ChameleonGridConfig:
    """Configuration of LANTERN's drafter for Anole, by its shapes.

    Args:
      args: its `config.json`, if there is one.
      state_dict: the weights.
      size: pixels a side of the target's pictures, by default Anole's 512.

    Raises:
      ValueError: a tensor that tells something is missing, heads cannot be grouped, or
        the size has no whole number of cells.
    """
    layer = "layers.0.self_attn"
    vocab, width = shape_of(state_dict, "embed_tokens.weight")
    norms, head_width = shape_of(state_dict, f"{layer}.q_norm.weight")
    key_norms, _ = shape_of(state_dict, f"{layer}.k_norm.weight")
    language = ChameleonConfig(
        vocab_size=vocab,
        width=width,
        depth=1,
        heads=shape_of(state_dict, f"{layer}.q_proj.weight")[0] // head_width,
        key_heads=shape_of(state_dict, f"{layer}.k_proj.weight")[0] // head_width,
        head_width=head_width,
        hidden=shape_of(state_dict, "layers.0.mlp.gate_proj.weight")[0],
        norm_epsilon=args.get("rms_norm_eps", 1e-5),
        head_norms=(norms, key_norms),
    )
    return square(language, ANOLE_SIZE if size is None else size, newline=None)


def grid_config(
    language: ChameleonConfig, checkpoint: Checkpoint, size: int | None
) -> ChameleonGridConfig:
    """What a checkpoint draws, as far as its name and its `config.json` tell.

    Lumina-mGPT's rows end with newlines; all others draw as Anole does.

    Raises:
      ValueError: the size cannot be told, or is told in ways that differ.
    """
    kinds = " ".join(map(str, checkpoint.args.get("architectures") or ()))
    named = _LUMINA.findall(str(checkpoint.path))
    if not named and "XLLMX" not in kinds:
        return square(language, ANOLE_SIZE if size is None else size, newline=None)
    claims = {int(x) for x in named[-1:]} | ({size} if size is not None else set())
    if not claims:
        raise ValueError(
            "the weights do not tell the size: pass it; Lumina-mGPT-7B-768 has 768"
        )
    if len(claims) > 1:
        raise ValueError(f"size is {size}, but the model's name says {named[-1]}")
    return square(language, claims.pop(), newline=NEWLINE)


def square(
    language: ChameleonConfig, size: int, newline: int | None
) -> ChameleonGridConfig:
    """A square picture of this many pixels a side.

    Raises:
      ValueError: it has no whole number of cells.
    """
    if size <= 0 or size % CELL:
        raise ValueError(f"size must be a multiple of {CELL} pixels, not {size}")
    side = size // CELL
    grid = side, side + (newline is not None)
    return ChameleonGridConfig(language, grid, newline=newline)


def check_draws(checkpoint: Checkpoint, reason: str | None, family: str) -> None:
    """Refuses weights that were not made to draw.

    Nothing in the weights tells. Lumina-mGPT's code writes `mask_image_logits` into
    `config.json`: true masks image codes while it trains and runs.

    Args:
      checkpoint: of a language model.
      reason: why it can draw, where the files say nothing or otherwise; it is recorded.
      family: what it is given as: "Lumina-mGPT", "Anole" or "Chameleon".

    Raises:
      ValueError: it cannot, or nothing says that it can.
    """
    if reason is not None and reason.strip():
        return
    path, args = checkpoint.path, checkpoint.args
    remedy = "; if they were, say why with --draws"
    names = f"{path} {args.get('_name_or_path', '')}"
    masked = args.get("mask_image_logits")
    if _META.search(names):
        raise ValueError(
            f"{path} is Meta's own release, which makes no pictures: it was published "
            "to read pictures and to write text. Lumina-mGPT and Anole are the same "
            f"network, trained to draw{remedy}"
        )
    if masked:
        raise ValueError(
            f"{path}: config.json has mask_image_logits true: image codes were masked, "
            f"so that these weights may not have been trained to draw{remedy}"
        )
    if masked is None and family != "Anole":
        raise ValueError(
            f"{path}: config.json has no mask_image_logits, so that nothing tells "
            f"whether these weights were trained to draw{remedy}"
        )
