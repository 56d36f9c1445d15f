"""Published PyTorch checkpoints: key tables, strict conversion and its inverse."""

from jaxspec.checkpoints.configs import ardtok_config, llamagen_config, vq_config
from jaxspec.checkpoints.convert import Entry, Layout, Table, convert, to_torch
from jaxspec.checkpoints.tables import ARDTOK, LLAMAGEN, LLAMAGEN_VQ

__all__ = [
    "ARDTOK",
    "LLAMAGEN",
    "LLAMAGEN_VQ",
    "Entry",
    "Layout",
    "Table",
    "ardtok_config",
    "convert",
    "llamagen_config",
    "to_torch",
    "vq_config",
]
