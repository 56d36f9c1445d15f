"""Published PyTorch checkpoints: key tables, strict conversion and its inverse."""

from jaxspec.checkpoints.assemble import (
    convert_chameleon,
    convert_llamagen,
    convert_tar,
)
from jaxspec.checkpoints.chameleon import chameleon_config
from jaxspec.checkpoints.configs import (
    ardtok_config,
    lantern_drafter_config,
    llamagen_config,
    lpd_config,
    qwen2_config,
    t5_config,
    ta_tok_config,
    vq_by_shapes,
    vq_config,
)
from jaxspec.checkpoints.convert import Entry, Layout, Table, convert, to_torch
from jaxspec.checkpoints.inspect import inspect_checkpoint
from jaxspec.checkpoints.parity import Limits, check_parity
from jaxspec.checkpoints.readers import Checkpoint, read
from jaxspec.checkpoints.single import convert_model, load_model
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

__all__ = [
    "ARDTOK",
    "CHAMELEON",
    "CHAMELEON_RAW",
    "CHAMELEON_VQ",
    "LANTERN_ANOLE_DRAFTER",
    "LANTERN_DRAFTER",
    "LLAMAGEN",
    "LLAMAGEN_VQ",
    "LPD",
    "QWEN2",
    "T5",
    "TA_TOK",
    "Checkpoint",
    "Entry",
    "Layout",
    "Limits",
    "Table",
    "ardtok_config",
    "chameleon_config",
    "check_parity",
    "convert",
    "convert_chameleon",
    "convert_llamagen",
    "convert_model",
    "convert_tar",
    "inspect_checkpoint",
    "lantern_drafter_config",
    "llamagen_config",
    "load_model",
    "lpd_config",
    "qwen2_config",
    "read",
    "t5_config",
    "ta_tok_config",
    "to_torch",
    "vq_by_shapes",
    "vq_config",
]
