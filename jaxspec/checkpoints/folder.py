"""Our own format: a folder with `config.json`, `tokenizer.json` and the weights.

Weights are a safetensors file for each part, such as `vq.safetensors` and
`decoders-128.safetensors`, or an orbax checkpoint (`format="orbax"`) for sharded saves.
They are loaded as float32 unless asked otherwise.
"""

import dataclasses
import json
import os
import shutil
import types
import typing
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxspec.checkpoints.trees import flatten, unflatten
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
from jaxspec.models.ssd import SSDConfig
from jaxspec.models.transformer import TransformerConfig
from jaxspec.models.upsampler import UpsamplerConfig
from jaxspec.models.vq import VQConfig
from jaxspec.pipeline import Defaults, Pipeline, PipelineConfig, abstract_params
from jaxspec.quantisation import quantised
from jaxspec.reading.llamagen import CaptionReader, ClassReader
from jaxspec.reading.lumina import AnoleReader, LuminaReader
from jaxspec.reading.tar import TarReader
from jaxspec.sharding import (
    NO_INT8,
    RULES,
    Rule,
    check_heads,
    from_first,
    layout,
    mesh_of,
)
from jaxspec.text import PieceText, tokenizer_of

FAMILIES = Path(__file__).parent.parent / "families"
# Of these, each model has a file of its own.
SEVERAL = ("decoders", "upsamplers", "drafters", "flashar", "lpd", "ssd")
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


def config_to_json(config: PipelineConfig) -> dict[str, Any]:
    """A family's configuration as `config.json` holds it."""
    out = dataclasses.asdict(config)
    out["decoders"] = {str(size): dataclasses.asdict(c) for size, c in config.decoders}
    out["upsamplers"] = {
        f"{before}-{after}": dataclasses.asdict(c)
        for before, after, c in config.upsamplers
    }
    out["drafters"] = {str(size): dataclasses.asdict(c) for size, c in config.drafters}
    for part in ("flashar", "lpd", "ssd"):
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
            "drafters": by_size(values.get("drafters", {})),
            "flashar": by_size(values.get("flashar", {}), FlashConfig),
            "lpd": by_size(values.get("lpd", {}), LPDConfig),
            "ssd": by_size(values.get("ssd", {}), SSDConfig),
            "upsamplers": upsamplers,
            "vq": from_dict(VQConfig, values["vq"]),
            "text": from_dict(reader, text),
            "defaults": from_dict(Defaults, values["defaults"]),
        },
    )


def _read_tokenizer(path: Path) -> str:
    with _one_line(path):
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
    lost = [k for k, finite in flatten(_finite(weights)).items() if not finite]
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
            save_file({k: np.asarray(x) for k, x in part.items()}, folder / name)
            # The library makes files that only their owner can read.
            shutil.copymode(folder / CONFIG, folder / name)
    else:
        write_orbax(folder, weights)


def write_config(config: PipelineConfig, folder: Path) -> None:
    """Writes `config.json` of a family, and the `tokenizer.json` of its reader."""
    write_json(folder / CONFIG, config_to_json(config))
    spec = getattr(config.text, "spec", None)
    if spec is not None:
        (folder / TOKENIZER).write_text(spec, encoding="utf8")


def to_files(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Weights by the file that holds them: each model of a family has its own."""
    parts: dict[str, dict[str, Any]] = {}
    for key, x in flat.items():
        first, second, *_ = key.split("/")
        name = f"{first}-{second}" if first in SEVERAL else first
        parts.setdefault(f"{name}.safetensors", {})[key] = x
    return parts


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


@contextmanager
def _one_line(path: Path) -> Generator[None]:
    """What a damaged file breaks, of whatever kind, as one line that names the file."""
    try:
        yield
    except Exception as error:  # the tokenizers library raises just that
        plain = isinstance(error, ValueError) or type(error) is Exception
        kind = "" if plain else f"{type(error).__name__}: "
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {kind}{reason}") from error


def _check_fit(found: dict[str, Any], want: dict[str, Any]) -> None:
    """Raises ValueError with all differences between shapes, both by name."""
    missing, unexpected = want.keys() - found.keys(), found.keys() - want.keys()
    wrong = [
        f"{k} is {list(found[k])}, not {list(want[k].shape)}"
        for k in sorted(found.keys() & want.keys())
        if tuple(found[k]) != tuple(want[k].shape)
    ]
    if missing or unexpected or wrong:
        raise ValueError(
            f"it does not fit config.json: missing {sorted(missing)}, unexpected "
            f"{sorted(unexpected)}, misshapen {wrong}"
        )


def read_weights(
    folder: Path,
    want: dict[str, Any],
    dtype,
    where: Mapping[str, NamedSharding] | None = None,
) -> dict[str, Any]:
    """The weights of a folder, those of `want` and of its shapes, on the device.

    All are flat dictionaries; `dtype` None keeps the types of the files. With `where`,
    each device, and each process, reads its own part.

    Raises:
      ValueError: the folder is damaged, or holds other weights.
    """
    read = _read_orbax if (folder / ORBAX).is_dir() else _read_safetensors
    return read(folder, want, dtype, where or {})


def _read_safetensors(
    folder: Path, want: dict[str, Any], dtype, where: Mapping[str, NamedSharding]
) -> dict[str, Any]:
    tensors = {}
    for name, part in to_files(want).items():
        path = folder / name
        with _one_line(path), safe_open(path, framework="numpy") as f:
            _check_fit({k: f.get_slice(k).get_shape() for k in f.keys()}, part)
            for k in part:
                # Cast by numpy and put, not `asarray`: JAX would compile both for each
                # shape.
                if k in where:
                    tensors[k] = _read_parts(f.get_slice(k), where[k], dtype)
                else:
                    tensors[k] = _cast_by_numpy(f.get_tensor(k), dtype)
    return tensors if where else jax.device_put(tensors)


def _cast_by_numpy(x: np.ndarray, dtype) -> np.ndarray:
    return x if dtype is None else x.astype(jnp.dtype(dtype))


def _read_parts(file: Any, sharding: NamedSharding, dtype) -> jax.Array:
    """A tensor of a file, of which the devices of this process read their parts."""
    read: dict[str, np.ndarray] = {}  # devices may have the same

    def part(index: Any) -> np.ndarray:
        if str(index) not in read:
            read[str(index)] = _cast_by_numpy(file[index], dtype)
        return read[str(index)]

    return jax.make_array_from_callback(tuple(file.get_shape()), sharding, part)


def _read_orbax(
    folder: Path, want: dict[str, Any], dtype, where: Mapping[str, NamedSharding]
) -> dict[str, Any]:
    import orbax.checkpoint as ocp  # slow to import

    path = folder / ORBAX
    with _one_line(path), ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path.absolute()).item_metadata
        if metadata is None:
            raise ValueError("it is not a whole orbax checkpoint")
        found = metadata.tree
        _check_fit({k: x.shape for k, x in flatten(found).items()}, want)
        abstract = {
            k: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=where.get(k))
            for k, x in flatten(found).items()
        }
        return flatten(checkpointer.restore(path.absolute(), unflatten(abstract)))


def load_config(name_or_folder: str | os.PathLike = "emoji") -> PipelineConfig:
    """What a family is, without its weights.

    Raises:
      FileNotFoundError: there is no such family or folder.
      ValueError: the configuration is damaged, or is one model's alone.
    """
    folder = _find(name_or_folder)
    with _one_line(folder / CONFIG):
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
    if weights not in (None, "int8"):
        raise ValueError(f"weights must be 'int8' or None, not {weights!r}")
    if weights is not None and mesh is not None:
        raise ValueError(NO_INT8)
    config, folder = load_config(name_or_folder), _find(name_or_folder)
    with _one_line(folder / CONFIG):
        abstract = abstract_params(config)
    want, where = flatten(abstract), None
    if mesh is not None:
        check_heads(config, mesh)
        where = layout(want, mesh, rules)
    flat = read_weights(folder, want, dtype, where)
    leaves = [flat[k] for k in flatten(abstract)]
    params = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    pipeline = Pipeline(params, config)
    return pipeline if weights is None else quantised(pipeline)
