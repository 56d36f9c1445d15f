"""The published families: how a checkpoint is recognised, configured and told apart.

A family is recognised by names that all its files have and no other family's; its
configuration comes from the checkpoint's arguments and shapes. What several places tell
(arguments, tables, the published file's name, the caller) must agree.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxspec.checkpoints.chameleon import (
    anole_drafter_config,
    chameleon_config,
    chameleon_raw_config,
    grid_config,
)
from jaxspec.checkpoints.configs import (
    LLAMAGEN_SIZES,
    LPD_SIZES,
    ardtok_config,
    lantern_drafter_config,
    llamagen_config,
    lpd_config,
    qwen2_config,
    t5_config,
    ta_tok_config,
    vq_by_shapes,
)
from jaxspec.checkpoints.convert import Table, Tensor
from jaxspec.checkpoints.readers import Checkpoint
from jaxspec.checkpoints.tables import (
    ARDTOK,
    CHAMELEON,
    CHAMELEON_RAW,
    CHAMELEON_VQ,
    LANTERN_ANOLE_DRAFTER,
    LANTERN_DRAFTER,
    LLAMAGEN,
    LLAMAGEN_VQ,
    LPD,
    QWEN2,
    T5,
    TA_TOK,
)
from jaxspec.models.chameleon import ChameleonGridConfig
from jaxspec.models.lpd import LPDConfig
from jaxspec.models.qwen2 import Qwen2Config
from jaxspec.models.t5 import T5Config
from jaxspec.models.ta_tok import TaTokConfig
from jaxspec.models.transformer import TransformerConfig
from jaxspec.models.vq import VQConfig

# Those parts of a folder of ours that are one for each size of pictures.
DECODERS, DRAFTERS, LPDS = "decoders", "drafters", "lpd"
ANOLE_DRAFTER = "LANTERN drafter for Anole"
LLAMAGEN_DRAFTER = "LANTERN drafter for LlamaGen t2i"
CELL = 16  # pixels a side, of every published decoder's tokenizer
# Names of published files, as far as they promise something.
_FILES = re.compile(
    r"(?P<kind>c2i|t2i|ar_dtok|lpd)_(?P<size>\w+?)_(stage\d_)?(?P<pixels>\d+)(px)?"
    r"|vq_ds(?P<factor>\d+)_[ct]2i"
)

# LANTERN's drafters of LlamaGen t2i: of stage I, 256 px, and of stage II, 512 px.
_LLAMAGEN_DRAFTER = re.compile(r"llamagen(2?)_drafter")


@dataclass(frozen=True)
class Family:
    """A family of published checkpoints.

    Attributes:
      name: as its paper has it.
      keys: names of tensors that all its files have.
      table: of its conversion.
      kind: the class of its configuration.
      config: (checkpoint, size, heads) -> configuration; see `configure`.
      part: the place of such a model among those of a folder of ours.
      layers: regular expression with the number of a layer, to count them by.
      width: the tensor and axis that is as wide as the model.
      sizes: (width, layers) -> name.
      file: what a published file's name begins with.
    """

    name: str
    keys: tuple[str, ...]
    table: Table
    kind: type
    config: Callable[[Checkpoint, int | None, int | None], Any]
    part: str
    layers: str
    width: tuple[str, int]
    sizes: Mapping[tuple[int, int], str] = field(default_factory=dict)
    file: str = ""

    def measure(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Width and number of layers."""
        found = (re.match(self.layers, key) for key in tensors)
        key, axis = self.width
        return (
            tensors[key].shape[axis],
            1 + max((int(m[1]) for m in found if m), default=-1),
        )

    def size(self, tensors: Mapping[str, Tensor]) -> str:
        """Such as "XL (36 layers, 1280 wide)"."""
        width, depth = self.measure(tensors)
        plain = f"{depth} layer{'s' * (depth != 1)}, {width} wide"
        name = self.sizes.get((width, depth))
        return f"{name} ({plain})" if name else f"a size of its own ({plain})"

    def configure(
        self, checkpoint: Checkpoint, size: int | None = None, heads: int | None = None
    ) -> Any:
        """The configuration of its model.

        Args:
          checkpoint: of this family.
          size: pixels a side of a decoder's pictures; LlamaGen's weights do not tell.
          heads: of a LlamaGen transformer of a size that was not published.

        Raises:
          ValueError: it cannot be told, is told in ways that differ, or the file has
            the name of another published model.
        """
        self._check_name(checkpoint)
        if self.part not in (DECODERS, DRAFTERS, LPDS) and (size, heads) != (
            None,
            None,
        ):
            raise ValueError(
                f"size and heads are a decoder's or a drafter's, not {self.name}'s"
            )
        try:
            return self.config(checkpoint, size, heads)
        except (KeyError, IndexError) as error:
            raise ValueError(f"what tells its sizes is not there: {error}") from None

    def _check_name(self, checkpoint: Checkpoint) -> None:
        told = _FILES.fullmatch(checkpoint.path.stem)
        if not told:
            return
        kind, size = told["kind"] or "vq", told["size"] or f"VQ-{told['factor']}"
        found = self.sizes.get(self.measure(checkpoint.tensors), "")
        if kind != self.file or size.casefold() != found.casefold():
            raise ValueError(
                f"{checkpoint.path.name} is the name of another model: the file holds "
                f"{self.name}, {self.size(checkpoint.tensors)}"
            )


def identify(tensors: Mapping[str, Tensor]) -> Family | None:
    """The family that a state dict is of, by the names of its tensors.

    Raises:
      ValueError: they are parameters of ours, converted already.
    """
    if tensors and all("/" in key for key in tensors):
        raise ValueError("these are parameters of jaxspec's: converted already")
    return next((f for f in FAMILIES if all(k in tensors for k in f.keys)), None)


# Grids. Nothing in LlamaGen's weights tells its grid, so that all who do are asked.


def _agreed(claims: Mapping[str, int | None]) -> int | None:
    """The cells a side that all who tell them agree on."""
    told = {who: side for who, side in claims.items() if side is not None}
    if len(set(told.values())) > 1:
        each = (f"{n}x{n} ({CELL * n} px) by {who}" for who, n in told.items())
        raise ValueError(f"the grid is told in ways that differ: {', '.join(each)}")
    return next(iter(told.values()), None)


def _claims(checkpoint: Checkpoint, size: int | None) -> dict[str, int | None]:
    if size is not None and (size <= 0 or size % CELL):
        raise ValueError(f"size must be a multiple of {CELL} pixels, not {size}")
    name = _FILES.fullmatch(checkpoint.path.stem)
    pixels = int(name["pixels"]) if name and name["pixels"] else None
    return {
        "size": size and size // CELL,
        "the file's name": pixels and pixels // CELL,
    }


def _side(cells: int) -> int | None:
    """Of a square grid; None where it is none, which the table check then reports."""
    side = math.isqrt(max(cells, 0))
    return side if side * side == cells else None


def _llamagen(checkpoint, size, heads) -> TransformerConfig:
    tensors, args = checkpoint.tensors, checkpoint.args
    claims = _claims(checkpoint, size)
    if "freqs_cis" in tensors:
        caption = tensors.get("cls_embedding.uncond_embedding")
        prefix = 1 if caption is None else caption.shape[0]
        claims["freqs_cis"] = _side(tensors["freqs_cis"].shape[0] - prefix)
    if "image_size" in args and "downsample_size" in args:  # of the training script
        claims["its arguments"] = args["image_size"] // args["downsample_size"]
    side = _agreed(claims)
    if side is None:
        raise ValueError("the weights do not tell the grid: pass size, such as 256")
    heads = heads or args.get("n_head")
    width = tensors["tok_embeddings.weight"].shape[1]
    if heads is not None and (heads <= 0 or width % heads):
        raise ValueError(f"{heads} heads do not divide a width of {width}")
    config = llamagen_config(tensors, (side, side), heads)
    depth, known = LLAMAGEN_SIZES.get(width, (None, None))
    if depth == config.depth and known != config.heads:
        raise ValueError(f"LlamaGen of this size has {known} heads, not {heads}")
    return config


def _ardtok(checkpoint, size, heads) -> TransformerConfig:
    config = ardtok_config(checkpoint.args, checkpoint.tensors)
    if heads not in (None, config.heads):
        raise ValueError(f"its arguments tell {config.heads} heads, not {heads}")
    slots = checkpoint.tensors["abs_pe"].shape[1] + 1  # the last is never fed
    claims = _claims(checkpoint, size) | {
        "its arguments": config.grid[0],
        "its position table": _side(slots - config.prefix_length),
    }
    _agreed(claims)
    return config


def _drafter(checkpoint, size, heads) -> TransformerConfig:
    claims = _claims(checkpoint, size)
    for stage in _LLAMAGEN_DRAFTER.findall(str(checkpoint.path)):
        claims["its name"] = (512 if stage else 256) // CELL
    side = _agreed(claims)
    if side is None:
        raise ValueError("the weights do not tell the grid: pass size, such as 256")
    args, tensors = checkpoint.args, checkpoint.tensors
    return lantern_drafter_config(args, tensors, (side, side), heads)


def _anole_drafter(checkpoint, size, heads) -> ChameleonGridConfig:
    config = anole_drafter_config(checkpoint.args, checkpoint.tensors, size)
    if heads not in (None, config.language.heads):
        raise ValueError(f"its shapes tell {config.language.heads} heads, not {heads}")
    return config


def _chameleon(checkpoint, size, heads) -> ChameleonGridConfig:
    language = chameleon_config(checkpoint.args, checkpoint.tensors)
    if heads not in (None, language.heads):
        raise ValueError(f"its config.json tells {language.heads} heads, not {heads}")
    return grid_config(language, checkpoint, size)


def _chameleon_raw(checkpoint, size, heads) -> ChameleonGridConfig:
    language = chameleon_raw_config(checkpoint.args, checkpoint.tensors)
    if heads not in (None, language.heads):
        raise ValueError(f"its shapes tell {language.heads} heads, not {heads}")
    return grid_config(language, checkpoint, size)


def _lpd(checkpoint, size, heads) -> LPDConfig:
    config = lpd_config(checkpoint.tensors, heads)
    _agreed(_claims(checkpoint, size) | {"its position table": config.grid[0]})
    depth, known = LPD_SIZES.get(config.width, (None, None))
    if depth == config.depth and known != config.heads:
        raise ValueError(f"LPD of this size has {known} heads, not {heads}")
    return config


def _vq(checkpoint, *_) -> VQConfig:
    """LlamaGen's tokenizer, which normalises codes and looks at the lowest level."""
    levels = ("encoder.conv_blocks", "decoder.conv_blocks")
    return vq_by_shapes(checkpoint.tensors, *levels, "res")


def _chameleon_vq(checkpoint, *_) -> VQConfig:
    return vq_by_shapes(
        checkpoint.tensors,
        "encoder.down",
        "decoder.up",
        "block",
        normalize_codes=False,
        attention="middle",
    )


_DRAFTER = "layers.0.self_attn."
_HF_NORM = "model.layers.0.self_attn.q_norm.bias"
_RAW_NORM = "layers.0.attention.q_normalization.weight"
_CHAMELEON_SIZES = {(4096, 32): "7B", (8192, 48): "34B"}
_WQKV = "layers.0.attention.wqkv.weight"
_LLAMAGEN_NAMES = ("B", "L", "XL", "XXL", "1B", "XXXL", "3B", "7B")
_LLAMAGEN: dict[str, Any] = dict(
    table=LLAMAGEN,
    kind=TransformerConfig,
    config=_llamagen,
    part=DECODERS,
    layers=r"layers\.(\d+)\.",
    width=("tok_embeddings.weight", 1),
    sizes={
        (width, depth): name
        for (width, (depth, _)), name in zip(
            LLAMAGEN_SIZES.items(), _LLAMAGEN_NAMES, strict=True
        )
    },
)
FAMILIES = (
    Family(
        name="LlamaGen c2i",
        keys=(_WQKV, "tok_embeddings.weight", "cls_embedding.embedding_table.weight"),
        file="c2i",
        **_LLAMAGEN,
    ),
    Family(
        name="LlamaGen t2i",
        keys=(_WQKV, "tok_embeddings.weight", "cls_embedding.uncond_embedding"),
        file="t2i",
        **_LLAMAGEN,
    ),
    Family(
        name="Tar AR-DTok",
        keys=(_WQKV, "tok_embeddings.weight", "clip_proj.weight", "abs_pe"),
        table=ARDTOK,
        kind=TransformerConfig,
        config=_ardtok,
        part=DECODERS,
        layers=r"layers\.(\d+)\.",
        width=("tok_embeddings.weight", 1),
        sizes={(1280, 30): "LP"},
        file="ar_dtok",
    ),
    # Before the other: it has all of the other's tensors, and more.
    Family(
        name=ANOLE_DRAFTER,
        keys=("fc.weight", "embed_tokens.weight", f"{_DRAFTER}q_norm.weight"),
        table=LANTERN_ANOLE_DRAFTER,
        kind=ChameleonGridConfig,
        config=_anole_drafter,
        part=DRAFTERS,
        layers=r"layers\.(\d+)\.",
        width=("embed_tokens.weight", 1),
        sizes={(4096, 1): "of Anole-7B"},
    ),
    Family(
        name=LLAMAGEN_DRAFTER,
        keys=("fc.weight", "embed_tokens.weight", f"{_DRAFTER}q_proj.weight"),
        table=LANTERN_DRAFTER,
        kind=TransformerConfig,
        config=_drafter,
        part=DRAFTERS,
        layers=r"layers\.(\d+)\.",
        width=("embed_tokens.weight", 1),
        sizes={
            (width, 1): f"for {name}"
            for width, name in zip(LLAMAGEN_SIZES, _LLAMAGEN_NAMES, strict=True)
        },
    ),
    Family(
        name="Chameleon",
        keys=(_HF_NORM, "lm_head.weight"),
        table=CHAMELEON,
        kind=ChameleonGridConfig,
        config=_chameleon,
        part=DECODERS,
        layers=r"model\.layers\.(\d+)\.",
        width=("model.embed_tokens.weight", 1),
        sizes=_CHAMELEON_SIZES,
    ),
    Family(
        name="Chameleon in Meta's layout",
        keys=(_RAW_NORM, "tok_embeddings.weight"),
        table=CHAMELEON_RAW,
        kind=ChameleonGridConfig,
        config=_chameleon_raw,
        part=DECODERS,
        layers=r"layers\.(\d+)\.",
        width=("tok_embeddings.weight", 1),
        sizes=_CHAMELEON_SIZES,
    ),
    Family(
        name="Chameleon VQ",
        keys=("encoder.mid.block_1.norm1.weight", "quantize.embedding.weight"),
        table=CHAMELEON_VQ,
        kind=VQConfig,
        config=_chameleon_vq,
        part="vq",
        layers=r"encoder\.down\.(\d+)\.",
        width=("encoder.conv_in.weight", 0),
        sizes={(128, 5): "VQGAN"},
    ),
    Family(
        name="LPD",
        keys=("mask_token", "fake_latent", "z_proj_ln.weight", "token_emb.weight"),
        table=LPD,
        kind=LPDConfig,
        config=_lpd,
        part=LPDS,
        layers=r"blocks\.(\d+)\.",
        width=("token_emb.weight", 1),
        sizes={
            (width, depth): name
            for (width, (depth, _)), name in zip(
                LPD_SIZES.items(), ("L", "XL", "XXL"), strict=True
            )
        },
        file="lpd",
    ),
    Family(
        name="LlamaGen VQ",
        keys=("encoder.conv_blocks.0.res.0.conv1.weight", "quantize.embedding.weight"),
        table=LLAMAGEN_VQ,
        kind=VQConfig,
        config=_vq,
        part="vq",
        layers=r"encoder\.conv_blocks\.(\d+)\.",
        width=("encoder.conv_in.weight", 0),
        sizes={(128, 5): "VQ-16", (128, 4): "VQ-8"},
        file="vq",
    ),
    Family(
        name="Tar TA-Tok",
        keys=(
            "bottleneck.regularizer.embedding_proj.weight",
            "encoder.embeddings.patch_embedding.weight",
        ),
        table=TA_TOK,
        kind=TaTokConfig,
        config=lambda found, *_: ta_tok_config(found.args, found.tensors),
        part="ta_tok",
        layers=r"encoder\.encoder\.layers\.(\d+)\.",
        width=("encoder.embeddings.patch_embedding.weight", 0),
        sizes={(1152, 27): "so400m"},
    ),
    Family(
        name="Qwen2",
        keys=("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"),
        table=QWEN2,
        kind=Qwen2Config,
        config=lambda found, *_: qwen2_config(found.args),
        part="llm",
        layers=r"model\.layers\.(\d+)\.",
        width=("model.embed_tokens.weight", 1),
        sizes={(896, 24): "0.5B", (1536, 28): "1.5B", (3584, 28): "7B"},
    ),
    Family(
        name="T5",
        keys=("shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
        table=T5,
        kind=T5Config,
        config=lambda found, *_: t5_config(found.args),
        part="t5",
        layers=r"encoder\.block\.(\d+)\.",
        width=("shared.weight", 1),
        sizes={(2048, 24): "XL", (4096, 24): "XXL", (1024, 24): "large"},
    ),
)
