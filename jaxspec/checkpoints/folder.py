"""Our own format: a folder with `config.json`, `tokenizer.json` and the weights.

Weights are a safetensors file for each part, such as `vq.safetensors` and
`decoders-128.safetensors`, or an orbax checkpoint (`format="orbax"`) for sharded saves.
They are loaded as float32 unless asked otherwise. Files have layers stacked; `load`
reads them apart, as decoding takes them (see `jaxspec.models.stacks`).
"""

import dataclasses
import json
import os
import shutil
import types
import typing
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jaxspec.checkpoints.trees import flatten, unflatten
from jaxspec.checkpoints.weights import as_stored, one_line, read_weights, to_files
from jaxspec.checkpoints.writer import (
    CONFIG,
    ORBAX,
    check_format,
    new_folder,
    write_json,
    write_orbax,
)
from jaxspec.models.chameleon import ChameleonGridConfig
from jaxspec.models.flashar import FlashConfig
from jaxspec.models.int8 import has_int8
from jaxspec.models.lpd import LPDConfig
from jaxspec.models.matcher import MatcherConfig
from jaxspec.models.ssd import SSDConfig
from jaxspec.models.stacks import stack
from jaxspec.models.transformer import TransformerConfig
from jaxspec.models.upsampler import UpsamplerConfig
from jaxspec.models.vq import VQConfig
from jaxspec.pipeline import Defaults, Pipeline, PipelineConfig
from jaxspec.quantisation import check_weights, turned_layer, with_int8
from jaxspec.reading.llamagen import CaptionReader, ClassReader
from jaxspec.reading.lumina import AnoleReader, LuminaReader
from jaxspec.reading.tar import TarReader
from jaxspec.sharding import (
    RULES,
    Rule,
    check_heads,
    from_first,
    layout,
    mesh_of,
)
from jaxspec.text import PieceText, tokenizer_of
from jaxspec.weight_shapes import abstract_params

FAMILIES = Path(__file__).parent.parent / "families"
TOKENIZER = "tokenizer.json"
_READERS = (
    PieceText,
    ClassReader,
    CaptionReader,
    TarReader,
    LuminaReader,
    AnoleReader,
)
READERS = {x.kind: x for x in _READERS}


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

    def parsed(hint, value):
        if value is None:
            return None
        options = [x for x in typing.get_args(hint) if x is not type(None)]
        if isinstance(hint, types.UnionType) and len(options) == 1:  # X | None
            (hint,) = options
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            return from_dict(hint, value)
        return tuple(value) if typing.get_origin(hint) is tuple else value

    return kind(**{k: parsed(hints[k], v) for k, v in values.items()})


# Networks beside the decoders, by part of the configuration.
_BESIDE = {
    "drafters": TransformerConfig,
    "flashar": FlashConfig,
    "lpd": LPDConfig,
    "ssd": SSDConfig,
    "matchers": MatcherConfig,
}


def config_to_json(config: PipelineConfig) -> dict[str, Any]:
    """A family's configuration as `config.json` holds it."""
    out = dataclasses.asdict(config)
    out["decoders"] = {str(size): dataclasses.asdict(c) for size, c in config.decoders}
    out["upsamplers"] = {
        f"{before}-{after}": dataclasses.asdict(c)
        for before, after, c in config.upsamplers
    }
    for part in _BESIDE:
        networks = getattr(config, part)
        out[part] = {str(size): dataclasses.asdict(c) for size, c in networks}
    text = {"kind": config.text.kind, **out["text"]}
    if text.get("spec") is not None:
        text["spec"] = TOKENIZER  # its own file
    return {**out, "text": text}


def _config_from_json(values: dict[str, Any], folder: Path) -> PipelineConfig:
    def by_size(networks, kind=TransformerConfig):
        return tuple(
            (int(size), from_dict(ChameleonGridConfig if "language" in c else kind, c))
            for size, c in sorted(networks.items(), key=lambda kv: int(kv[0]))
        )

    upsamplers = tuple(
        (*map(int, way.split("-")), from_dict(UpsamplerConfig, c))
        for way, c in values.get("upsamplers", {}).items()
    )
    text = dict(values["text"])
    if "kind" not in text:  # from before there were several
        text |= {"kind": PieceText.kind, "spec": TOKENIZER}
    reader = READERS[text.pop("kind")]
    if text.get("spec") is not None:
        text["spec"] = _read_tokenizer(folder / TOKENIZER)
    return from_dict(
        PipelineConfig,
        {
            **values,
            "decoders": by_size(values["decoders"]),
            **{
                part: by_size(values.get(part, {}), kind)
                for part, kind in _BESIDE.items()
            },
            "upsamplers": upsamplers,
            "vq": from_dict(VQConfig, values["vq"]),
            "text": from_dict(reader, text),
            "defaults": from_dict(Defaults, values["defaults"]),
        },
    )


def _read_tokenizer(path: Path) -> str:
    with one_line(path):
        spec = path.read_text(encoding="utf8")
        tokenizer_of(spec)
        return spec


def save(
    params: Pipeline, folder: str | os.PathLike, *, dtype=None, format="safetensors"
) -> None:
    """Writes a pipeline into a new folder.

    Args:
      params: the pipeline.
      folder: must not exist or be empty.
      dtype: cast the weights, such as `jnp.float16`; None keeps them.
      format: "safetensors" (a file for each part), or "orbax": split over a mesh, each
        device's part is written where it is. Processes that share weights all call
        this alike, with a folder that all of them see, and need "orbax".

    Raises:
      ValueError: the folder is not empty, the format is not known or not fit for what
        several processes share, or a weight is int8, or not finite (in the type asked
        for).
    """
    folder = Path(folder)
    check_format(format)
    if has_int8(params):
        raise ValueError(
            "int8 weights are not saved: save the family as it was before, and ask for "
            "int8 when it is loaded"
        )
    weights, mesh = params.params, mesh_of(params.params)
    if mesh is not None and mesh.is_multi_process and format != ORBAX:
        raise ValueError(
            "weights that several processes share are saved with format='orbax'"
        )
    if dtype is not None:
        weights = _cast(weights, dtype)
    finite = flatten(_finite(weights))  # of layers apart, each
    lost = [k for k, x in finite.items() if not all(map(bool, jax.tree.leaves(x)))]
    if lost:
        as_type = f" as {jnp.dtype(dtype).name}" if dtype is not None else ""
        raise ValueError(f"weights are not finite{as_type}: {', '.join(lost)}")
    with ExitStack() as held:
        enter = lambda: str(held.enter_context(new_folder(folder)))
        partial = Path(from_first(mesh, enter))
        from_first(mesh, lambda: write_config(params.config, partial))
        _write(weights, partial, format)
        from_first(mesh, held.close)  # it has its name before anyone goes on


@jax.jit(static_argnums=1)
def _cast(weights: Any, dtype) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), weights)


@jax.jit
def _finite(weights: Any) -> Any:
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), weights)


def _write(weights: Any, folder: Path, format: str) -> None:
    if format == "safetensors":
        for name, part in to_files(flatten(weights)).items():
            save_file({k: _on_host(x) for k, x in part.items()}, folder / name)
            # The library makes files that only their owner can read.
            shutil.copymode(folder / CONFIG, folder / name)
    else:
        whole = jax.jit(stack)  # over several devices, and several processes
        tensors = {
            k: whole(x) if isinstance(x, tuple) else x
            for k, x in flatten(weights).items()
        }
        write_orbax(folder, unflatten(tensors))


def _on_host(x: Any) -> np.ndarray:
    """A parameter as files have it."""
    if isinstance(x, tuple):
        return stack([np.asarray(layer) for layer in x], np)
    return np.asarray(x)


def write_config(config: PipelineConfig, folder: Path) -> None:
    """Writes `config.json` of a family, and the `tokenizer.json` of its reader."""
    write_json(folder / CONFIG, config_to_json(config))
    spec = getattr(config.text, "spec", None)
    if spec is not None:
        (folder / TOKENIZER).write_text(spec, encoding="utf8")


def _find(name_or_folder: str | os.PathLike) -> Path:
    name = str(name_or_folder)
    if name in families():
        return FAMILIES / name
    folder = Path(name_or_folder)
    if (folder / CONFIG).is_file():
        return folder
    if folder.is_dir():
        raise ValueError(
            f"{folder} holds no config.json: it is not a folder that jaxspec wrote"
        )
    known = ", ".join(families())
    raise FileNotFoundError(
        f"no family or folder {name!r}; families that come with jaxspec: {known}"
    )


def load_config(name_or_folder: str | os.PathLike = "emoji") -> PipelineConfig:
    """What a family is, without its weights.

    Raises:
      FileNotFoundError: there is no such family or folder.
      ValueError: the configuration is damaged, or is one model's alone.
    """
    folder = _find(name_or_folder)
    with one_line(folder / CONFIG):
        values = json.loads((folder / CONFIG).read_text(encoding="utf8"))
        if "part" in values:
            raise ValueError(
                "it is one model, which `jaxspec.checkpoints.load_model` opens; "
                "`jaxspec convert tar` or `llamagen` puts models together"
            )
        return _config_from_json(values, folder)


def load(
    name_or_folder: str | os.PathLike = "emoji",
    *,
    dtype=jnp.float32,
    weights: str | None = None,
    mesh: Mesh | None = None,
    rules: Sequence[Rule] = RULES,
) -> Pipeline:
    """Loads a family by name, or a folder written by `save`.

    Args:
      name_or_folder: such as "emoji".
      dtype: of the weights in memory; None keeps the file's.
      weights: "int8" for the transformers' matrices in int8 (see `jaxspec.quantised`);
        the others have `dtype`, with which all is computed.
      mesh: of devices to split the weights over (see `jaxspec.sharding.make_mesh`);
        each device reads its own part of them.
      rules: how they are split (see `jaxspec.sharding.layout`).

    Raises:
      FileNotFoundError: there is no such family or folder.
      ValueError: the folder is damaged or does not hold what its configuration says, or
        the weights cannot be split over the mesh; or `weights` is not known.
    """
    check_weights(weights)
    config, folder = load_config(name_or_folder), _find(name_or_folder)
    with one_line(folder / CONFIG):
        abstract = abstract_params(config)
    want, where = flatten(abstract), None
    if mesh is not None:
        check_heads(config, mesh)
        where = layout(as_stored(want), mesh, rules)
    if weights is None:
        return Pipeline(unflatten(read_weights(folder, want, dtype, where)), config)
    # A matrix at a time, so that the float ones are never all there.
    small = read_weights(folder, want, dtype, where, turned_layer)
    return with_int8(Pipeline(unflatten(small), config))
