"""The recorded outputs of published models, beside the model rebuilt and converted."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoints import (
    ARDTOK,
    LANTERN_DRAFTER,
    LLAMAGEN,
    LLAMAGEN_VQ,
    QWEN2,
    T5,
    TA_TOK,
    Table,
    ardtok_config,
    convert,
    llamagen_config,
    qwen2_config,
    t5_config,
    ta_tok_config,
    vq_config,
)
from jaxspec.models.drafter import eagle_config
from jaxspec.models.transformer import TransformerConfig
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
    if name == "t5_tiny":
        return t5_config(args), T5
    if name in ("tar_tatok_tiny", f"{E2E}_tatok"):
        return ta_tok_config(args, state_dict), TA_TOK
    if name.startswith("llamagen_vq") or name == f"{E2E}_vq":
        return vq_config(args), LLAMAGEN_VQ
    if name.startswith(("tar_ardtok", f"{E2E}_ardtok")):
        return ardtok_config(args, state_dict), ARDTOK
    if name.startswith("lantern_drafter"):  # LlamaGen at 256 px; it has no config
        llamagen = TransformerConfig(
            vocab_size=args["vocab_size"],
            width=args["hidden_size"],
            depth=1,
            heads=args["num_attention_heads"],
            hidden=args["intermediate_size"],
            grid=(16, 16),
            prefix="caption",
            prefix_length=120,
            prefix_width=2048,
            positions="rotary",
        )
        return eagle_config(
            llamagen, norm_epsilon=args["rms_norm_eps"]
        ), LANTERN_DRAFTER
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
