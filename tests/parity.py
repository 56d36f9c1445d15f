"""The recorded outputs of published models, beside the model rebuilt and converted."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoints import (
    ARDTOK,
    LLAMAGEN,
    LLAMAGEN_VQ,
    Table,
    ardtok_config,
    convert,
    llamagen_config,
    vq_config,
)
from tests.fixtures import synthetic

FOLDER = Path(__file__).parent / "fixtures"
TRANSFORMERS = [
    "tar_ardtok_tiny",
    "tar_ardtok_tiny_gqa",
    "llamagen_c2i_tiny",
    "llamagen_t2i_tiny",
]


@dataclass(frozen=True)
class Published:
    """`expected` is what PyTorch gave; `params` are on the device."""

    state_dict: dict[str, np.ndarray]
    config: Any
    table: Table
    params: Any
    expected: dict[str, np.ndarray]


def _describe(name: str, args: dict, state_dict: dict) -> tuple[Any, Table]:
    if name.startswith("llamagen_vq"):
        return vq_config(args), LLAMAGEN_VQ
    if name.startswith("tar_ardtok"):
        return ardtok_config(args, state_dict), ARDTOK
    side = int(args["block_size"] ** 0.5)
    grid = (side, side)
    return llamagen_config(state_dict, grid, args["n_head"]), LLAMAGEN


@cache
def published(name: str) -> Published:
    manifest = synthetic.load_manifest(FOLDER / "manifests" / f"{name}.json")
    state_dict = synthetic.state_dict(manifest)
    config, table = _describe(name, manifest["args"], state_dict)
    params = jax.tree.map(jax.numpy.asarray, convert(state_dict, config, table))
    with np.load(FOLDER / "expected" / f"{name}.npz") as file:
        expected = dict(file)
    return Published(state_dict, config, table, params, expected)
