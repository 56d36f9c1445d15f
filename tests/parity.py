"""The recorded outputs of published models, beside the model rebuilt and converted."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoints import (
    ARDTOK,
    CHAMELEON,
    CHAMELEON_VQ,
    LANTERN_DRAFTER,
    LLAMAGEN,
    LLAMAGEN_VQ,
    LPD,
    QWEN2,
    T5,
    TA_TOK,
    Table,
    ardtok_config,
    chameleon_config,
    convert,
    lantern_drafter_config,
    llamagen_config,
    lpd_config,
    qwen2_config,
    t5_config,
    ta_tok_config,
    vq_by_shapes,
    vq_config,
)
from jaxspec.models.chameleon import ChameleonGridConfig
from tests.fixtures import synthetic

FOLDER = Path(__file__).parent / "fixtures"
TRANSFORMERS = [
    "tar_ardtok_tiny",
    "tar_ardtok_tiny_gqa",
    "llamagen_c2i_tiny",
    "llamagen_t2i_tiny",
]
E2E = "tar_e2e_tiny"  # several models, recorded together


@dataclass(frozen=True)
class Published:
    """`expected` is what PyTorch gave; `params` are on the device."""

    state_dict: dict[str, np.ndarray]
    config: Any
    table: Table
    params: Any
    expected: dict[str, np.ndarray]


def _describe(name: str, args: dict, state_dict: dict) -> tuple[Any, Table]:
    if name in ("qwen2_tiny", "qwen2_tiny_tied"):
        return qwen2_config(args), QWEN2
    if name == "chameleon_vq_tiny":
        return vq_by_shapes(
            state_dict,
            "encoder.down",
            "decoder.up",
            "block",
            normalize_codes=False,
            attention="middle",
        ), CHAMELEON_VQ
    if name.startswith("chameleon"):  # 2 by 2 codes of 10 and newlines
        language = chameleon_config(args, state_dict)
        grid = ChameleonGridConfig(language, (2, 3), 6, codes=10, first=7, newline=30)
        return grid, CHAMELEON
    if name == "t5_tiny":
        return t5_config(args), T5
    if name in ("tar_tatok_tiny", f"{E2E}_tatok"):
        return ta_tok_config(args, state_dict), TA_TOK
    if name.startswith("llamagen_vq") or name == f"{E2E}_vq":
        return vq_config(args), LLAMAGEN_VQ
    if name.startswith(("tar_ardtok", f"{E2E}_ardtok")):
        return ardtok_config(args, state_dict), ARDTOK
    if name == "lpd_tiny":
        return lpd_config(state_dict, args["decoder_num_heads"]), LPD
    if name.startswith("lantern_drafter"):  # of 256 px, which nothing in it tells
        config = lantern_drafter_config(args, state_dict, (16, 16))
        return config, LANTERN_DRAFTER
    side = int(args["block_size"] ** 0.5)
    grid = (side, side)
    return llamagen_config(state_dict, grid, args["n_head"]), LLAMAGEN


@cache
def published(name: str) -> Published:
    manifest = synthetic.load_manifest(FOLDER / "manifests" / f"{name}.json")
    state_dict = synthetic.state_dict(manifest)
    config, table = _describe(name, manifest["args"], state_dict)
    params = jax.tree.map(jax.numpy.asarray, convert(state_dict, config, table))
    recorded = E2E if name.startswith(E2E) else name
    with np.load(FOLDER / "expected" / f"{recorded}.npz") as file:
        expected = dict(file)
    return Published(state_dict, config, table, params, expected)
