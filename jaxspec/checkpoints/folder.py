"""Our own format: a folder with `config.json`, `tokenizer.json` and the weights.

Weights are one safetensors file, or an orbax checkpoint (`format="orbax"`) for
sharded saves. They are loaded as float32 unless asked otherwise.
"""

import dataclasses
import json
import os
import typing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxspec.models.transformer import TransformerConfig
from jaxspec.models.vq import VQConfig
from jaxspec.pipeline import Defaults, Pipeline, PipelineConfig, abstract_params
from jaxspec.text import PieceText

FAMILIES = Path(__file__).parent.parent / "families"
WEIGHTS, ORBAX = "model.safetensors", "orbax"


def families() -> list[str]:
    """Names of the families that come with the package."""
    return sorted(p.parent.name for p in FAMILIES.glob("*/config.json"))


def from_dict(kind: Any, values: dict[str, Any]) -> Any:
    """Makes a configuration dataclass from JSON values; lists become tuples.

    Raises:
      ValueError: a field is missing or not known.
    """
    hints = typing.get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    required = {
        f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING
    }
    unknown, missing = values.keys() - known, required - values.keys()
    if unknown or missing:
        raise ValueError(
            f"{kind.__name__}: unknown fields {sorted(unknown)}, missing "
            f"{sorted(missing)}; was it written by another version of jaxspec?"
        )

    def is_tuple(t):
        return typing.get_origin(t) is tuple

    return kind(**{k: tuple(v) if is_tuple(hints[k]) else v for k, v in values.items()})


def _config_to_json(config: PipelineConfig) -> dict[str, Any]:
    out = dataclasses.asdict(config)
    out["decoders"] = {str(size): dataclasses.asdict(c) for size, c in config.decoders}
    del out["text"]["spec"]  # its own file
    return out


def _config_from_json(values: dict[str, Any], tokenizer: str) -> PipelineConfig:
    decoders = tuple(
        (int(size), from_dict(TransformerConfig, c))
        for size, c in sorted(values["decoders"].items(), key=lambda kv: int(kv[0]))
    )
    return from_dict(
        PipelineConfig,
        {
            **values,
            "decoders": decoders,
            "vq": from_dict(VQConfig, values["vq"]),
            "text": from_dict(PieceText, {**values["text"], "spec": tokenizer}),
            "defaults": from_dict(Defaults, values["defaults"]),
        },
    )


def _flatten(params: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(params)
    return {"/".join(str(k.key) for k in path): leaf for path, leaf in leaves}


def save(
    params: Pipeline, folder: str | os.PathLike, *, dtype=None, format="safetensors"
) -> None:
    """Writes a pipeline into a new folder.

    Args:
      params: the pipeline.
      folder: must not exist or be empty.
      dtype: cast the weights, such as `jnp.float16`; None keeps them.
      format: "safetensors" (one file), or "orbax" (written shard by shard).

    Raises:
      ValueError: the folder is not empty, or the format is not known.
    """
    folder = Path(folder)
    if format not in ("safetensors", "orbax"):
        raise ValueError(f"format must be 'safetensors' or 'orbax', not {format!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder")
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True)
    try:
        weights = params.params
        if dtype is not None:
            weights = jax.tree.map(lambda x: jnp.asarray(x, dtype), weights)
        if format == "safetensors":
            flat = {k: np.asarray(x) for k, x in _flatten(weights).items()}
            save_file(flat, partial / WEIGHTS)
        else:
            import orbax.checkpoint as ocp  # slow to import

            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(partial.absolute() / ORBAX, weights)
        config = json.dumps(_config_to_json(params.config), indent=1)
        (partial / "config.json").write_text(config + "\n")
        (partial / "tokenizer.json").write_text(params.config.text.spec)
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    finally:
        if partial.exists():
            import shutil

            shutil.rmtree(partial)


def _find(name_or_folder: str | os.PathLike) -> Path:
    name = str(name_or_folder)
    if name in families():
        return FAMILIES / name
    folder = Path(name_or_folder)
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise ValueError(
            f"{folder} holds no config.json: it is not a folder that jaxspec wrote"
        )
    known = ", ".join(families())
    raise FileNotFoundError(
        f"no family or folder {name!r}; families that come with jaxspec: {known}"
    )


def _read_safetensors(path: Path, want: dict[str, Any], dtype) -> dict[str, Any]:
    try:
        with safe_open(path, framework="flax") as f:
            found = set(f.keys())
            missing, unexpected = want.keys() - found, found - want.keys()
            shape = {k: tuple(f.get_slice(k).get_shape()) for k in found & want.keys()}
            wrong = [
                f"{k} is {list(shape[k])}, not {list(want[k].shape)}"
                for k in sorted(shape)
                if shape[k] != tuple(want[k].shape)
            ]
            if missing or unexpected or wrong:
                raise ValueError(
                    f"{path} does not fit its config.json: missing {sorted(missing)}, "
                    f"unexpected {sorted(unexpected)}, misshapen {wrong}"
                )
            return {k: jnp.asarray(f.get_tensor(k), dtype) for k in want}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def load(name_or_folder: str | os.PathLike = "emoji", *, dtype=jnp.float32) -> Pipeline:
    """Loads a family by name, or a folder written by `save`.

    Args:
      name_or_folder: such as "emoji".
      dtype: of the weights in memory; None keeps the file's.

    Raises:
      FileNotFoundError: there is no such family or folder.
      ValueError: the folder is damaged or does not hold what its configuration says.
    """
    folder = _find(name_or_folder)
    try:
        values = json.loads((folder / "config.json").read_text())
        tokenizer = (folder / "tokenizer.json").read_text()
        config = _config_from_json(values, tokenizer)
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} cannot be read: {error!r}") from error
    abstract = abstract_params(config)
    if (folder / ORBAX).is_dir():
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore((folder / ORBAX).absolute(), abstract)
        if dtype is not None:
            params = jax.tree.map(lambda x: x.astype(dtype), params)
        return Pipeline(params, config)
    flat = _read_safetensors(folder / WEIGHTS, _flatten(abstract), dtype)
    leaves = [flat[k] for k in _flatten(abstract)]
    return Pipeline(jax.tree.unflatten(jax.tree.structure(abstract), leaves), config)
