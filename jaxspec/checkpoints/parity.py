"""Whether converted models compute what the published code did.

A reference is an `.npz` file of inputs and of what the original made of them, recorded
by whoever has the original (docs/converting.md says how). Its arrays are named after
the model's place in the folder and what they are, such as `vq/tokens` and `vq/images`.
One output is one stage; a wrong rotary layout, swapped projections or a lost layer
leave none of them within the limits.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.checkpoints.convert import check_dtype
from jaxspec.checkpoints.folder import load
from jaxspec.checkpoints.readers import naming, read_json
from jaxspec.checkpoints.single import load_model
from jaxspec.checkpoints.writer import CONFIG
from jaxspec.models.chameleon import ChameleonGridConfig
from jaxspec.models.drafter import EagleConfig, head_of
from jaxspec.models.llama import Llama, LlamaConfig
from jaxspec.models.t5 import T5Config, T5Encoder
from jaxspec.models.ta_tok import TaTok, TaTokConfig
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.models.vq import VQ, VQConfig
from jaxspec.pipeline import Pipeline

Models = Mapping[str, tuple[Any, Any]]  # place -> configuration, parameters
ROWS = 1024  # of logits that are compared at a time, in float64


@dataclass(frozen=True)
class Limits:
    """What a stage may differ by.

    Attributes:
      error: of a value, in units of the largest recorded one (or of 1, if that is
        smaller). 1e-4 suits float32 on both sides.
      kl: of the distributions of any position, recorded against ours, in nats.
      agreement: the least fraction of equal codes, or of equal likeliest codes.
    """

    error: float = 1e-4
    kl: float = 1e-3
    agreement: float = 0.999

    def __post_init__(self):
        """Raises ValueError for a limit that is none."""
        for name, value in asdict(self).items():
            if not 0 <= value < math.inf or (name == "agreement" and value > 1):
                raise ValueError(f"the limit of {name} cannot be {value}")


@dataclass(frozen=True)
class Input:
    """A recorded input.

    Attributes:
      shape: its axes; None is any length, the same for all first axes of a stage.
      below: what its codes are below; None for values that are not codes.
    """

    shape: tuple[int | None, ...]
    below: int | None = None

    def taken(self, name: str, x: np.ndarray) -> np.ndarray:
        """The array as int32 or float32; ValueError where the model cannot take it."""
        fits = len(x.shape) == len(self.shape) and all(
            want in (None, found)
            for found, want in zip(x.shape, self.shape, strict=True)
        )
        if not fits or not x.size:
            wanted = ", ".join("*" if n is None else str(n) for n in self.shape)
            raise ValueError(f"{name} is {list(x.shape)}; the model takes [{wanted}]")
        if self.below is None:
            return _finite(name, x).astype(np.float32)
        if x.dtype.kind not in "iub" or x.min() < 0 or x.max() >= self.below:
            raise ValueError(f"{name} must be whole numbers from 0 to {self.below - 1}")
        return x.astype(np.int32)


@dataclass(frozen=True)
class Stage:
    """An output of a model that is compared.

    Attributes:
      output: its name.
      kind: logits, other values, or codes.
      inputs: those that it is made of, by name.
      run: `(params, **inputs) -> output`.
      masks: inputs of zeros and ones that may be left out.
      counts: the mask of the positions that are compared; what lies elsewhere means
        nothing.
    """

    output: str
    kind: Literal["logits", "values", "codes"]
    inputs: dict[str, Input]
    run: Callable[..., Any]
    masks: dict[str, Input] = field(default_factory=dict)
    counts: str | None = None


def _decoder(c: TransformerConfig | ChameleonGridConfig) -> list[Stage]:
    if isinstance(c, ChameleonGridConfig):
        return _language(c.language)
    condition = Input((None, c.prefix_length, c.prefix_width))
    if c.prefix == "class":
        condition = Input((None,), c.prefix_width + 1)
    inputs = {"condition": condition, "tokens": Input((None, c.cells), c.vocab_size)}
    masks = {"prefix_visible": Input((None, c.prefix_length), 2)}
    return [Stage("logits", "logits", inputs, Transformer(c).apply, masks)]


def _drafter(c: EagleConfig) -> list[Stage]:
    words = c.language.vocab_size if isinstance(c, ChameleonGridConfig) else 0
    inputs = {
        "features": Input((None, None, c.width)),
        "tokens": Input((None, None), words or c.vocab_size),
    }
    return [Stage("predicted", "values", inputs, head_of(c).apply)]


def _vq(c: VQConfig) -> list[Stage]:
    tokens = {"tokens": Input((None, None, None), c.codebook_size)}
    pictures = {"pictures": Input((None, None, None, 3))}

    def encode(params, pictures, method):
        return VQ(c).apply(params, pictures, method=method)

    return [
        Stage("images", "values", tokens, partial(VQ(c).apply, method="decode")),
        Stage("latents", "values", pictures, partial(encode, method="latents")),
        Stage("encoded", "codes", pictures, partial(encode, method="encode")),
    ]


def _ta_tok(c: TaTokConfig) -> list[Stage]:
    indices = {"indices": Input((None, None), c.codebook_size)}
    pictures = {"pictures": Input((None, None, None, 3))}

    def encode(params, pictures, pool):
        return TaTok(c).apply(params, pictures, pool, method="encode")

    decode = partial(TaTok(c).apply, method="decode")
    return [Stage("features", "values", indices, decode)] + [
        Stage(f"encoded_scale{s}", "codes", pictures, partial(encode, pool=s + 1))
        for s in range(3)
    ]


def _language(c: LlamaConfig) -> list[Stage]:
    tokens = {"tokens": Input((None, None), c.vocab_size)}
    seen = {"seen": Input((None, None), 2)}
    return [Stage("logits", "logits", tokens, Llama(c).apply, seen, counts="seen")]


def _t5(c: T5Config) -> list[Stage]:
    tokens = {"tokens": Input((None, None), c.vocab_size)}
    seen = {"seen": Input((None, None), 2)}

    def run(params, tokens, seen=None):
        seen = jnp.ones(tokens.shape, bool) if seen is None else seen
        return T5Encoder(c).apply(params, tokens, seen)

    return [Stage("states", "values", tokens, run, seen, counts="seen")]


# By the first part of a model's place.
STAGES: dict[str, Callable[[Any], list[Stage]]] = {
    "decoders": _decoder,
    "drafters": _drafter,
    "vq": _vq,
    "ta_tok": _ta_tok,
    "llm": _language,
    "t5": _t5,
}


def stages(place: str, config: Any) -> tuple[Stage, ...]:
    """The stages of a model; each compiles once for inputs of a shape."""
    return _stages(place.partition("/")[0], config)


@cache
def _stages(kind: str, config: Any) -> tuple[Stage, ...]:
    return tuple(replace(x, run=jax.jit(x.run)) for x in STAGES[kind](config))


@dataclass(frozen=True)
class Compared:
    """How far a stage of ours is from the recorded one.

    Attributes:
      stage: such as "vq/images".
      shape: of what is compared; positions that do not count are left out.
      error: largest difference, and `scale` what it is measured by (see `Limits`).
      kl_mean, kl_max: over positions, in nats; of logits only.
      agreement: of codes, or of the likeliest codes.
      problems: the limits that it is outside of.
    """

    stage: str
    shape: tuple[int, ...]
    error: float | None = None
    scale: float | None = None
    kl_mean: float | None = None
    kl_max: float | None = None
    agreement: float | None = None
    problems: tuple[str, ...] = ()


# The comparison.


def compare(
    models: Models, reference: Mapping[str, np.ndarray], limits: Limits
) -> Iterator[Compared]:
    """Runs every recorded stage and compares.

    Raises:
      ValueError: an array of the reference is not known, does not fit its model, is
        not finite or the same everywhere; or an input is missing.
    """
    known = {
        f"{place}/{stage.output}": (stage, params)
        for place, (config, params) in models.items()
        for stage in stages(place, config)
    }
    used: set[str] = set()
    jobs = []
    for name, (stage, params) in known.items():
        if name in reference:
            place = name.removesuffix(stage.output)
            inputs = _inputs(place, stage, reference)
            want = _checked_output(name, stage, params, inputs, reference[name])
            used |= {name, *(place + key for key in inputs)}
            jobs.append((name, stage, params, inputs, want))
    unused = sorted(reference.keys() - used)
    if unused or not jobs:
        raise ValueError(
            f"no stage of these models uses {unused}"
            if unused
            else f"it holds none of the stages {', '.join(known)}"
        )
    for name, stage, params, inputs, want in jobs:
        with jax.default_matmul_precision("highest"):
            got = np.asarray(stage.run(params, **inputs))
        if stage.counts in inputs:
            counted = inputs[stage.counts] > 0
            got, want = got[counted], want[counted]
        yield _compared(name, stage.kind, got, want, limits)


def _inputs(
    place: str, stage: Stage, reference: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The recorded inputs of a stage, checked."""
    missing = [place + name for name in stage.inputs if place + name not in reference]
    if missing:
        raise ValueError(f"{place}{stage.output} is recorded, but not {missing}")
    wanted = stage.inputs | {
        name: mask for name, mask in stage.masks.items() if place + name in reference
    }
    found = {
        name: wanted[name].taken(place + name, reference[place + name])
        for name in wanted
    }
    rows = {place + name: len(x) for name, x in found.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"inputs differ in their first axis: {rows}")
    return {k: x > 0 if k in stage.masks else x for k, x in found.items()}


def _finite(name: str, x: np.ndarray) -> np.ndarray:
    if x.dtype.kind != "f" or not np.isfinite(x).all():
        raise ValueError(f"{name} must be finite float values; record it as float32")
    return x


def _checked_output(name: str, stage: Stage, params, inputs, want: np.ndarray):
    """The recorded output; refused where it is not what the model gives."""
    try:
        shape = jax.eval_shape(stage.run, params, **inputs).shape
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the inputs of {name} do not fit: {reason}") from None
    if want.shape != shape:
        raise ValueError(
            f"{name} is {list(want.shape)}; the model gives {list(shape)} (channels "
            "come last)"
        )
    counted = inputs.get(stage.counts)
    if counted is not None and (counted.shape != shape[:-1] or not counted.any()):
        raise ValueError(f"{stage.counts} of {name} must show some of {shape[:-1]}")
    if stage.kind != "codes":
        _finite(name, want)
    elif want.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers")
    if want.size > 1 and (want == want.flat[0]).all():
        raise ValueError(f"{name} is {want.flat[0]} everywhere, which proves nothing")
    return want


def _compared(
    stage: str, kind: str, got: np.ndarray, want: np.ndarray, limits: Limits
) -> Compared:
    found: dict[str, Any] = {"stage": stage, "shape": want.shape}
    if kind == "codes":
        found["agreement"] = float(np.mean(got == want))
    elif not np.isfinite(got).all():
        return Compared(**found, problems=("ours is not finite",))
    else:
        found["error"] = float(np.abs(got - want).max())
        found["scale"] = max(1.0, float(np.abs(want).max()))
    if kind == "logits":
        rows = want.reshape(-1, want.shape[-1]), got.reshape(-1, want.shape[-1])
        kl = _divergence(*rows)
        found |= {"kl_mean": float(kl.mean()), "kl_max": float(kl.max())}
        likeliest = [x.argmax(axis=-1) for x in rows]
        found["agreement"] = float(np.mean(likeliest[0] == likeliest[1]))
    return Compared(**found, problems=tuple(_outside(found, limits)))


def _divergence(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """KL(want || got) of each row of logits [R, V], in nats."""

    def log_softmax(x):
        x = x - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    out = np.empty(len(want))
    for i in range(0, len(want), ROWS):
        block = slice(i, i + ROWS)
        p, q = (log_softmax(x[block].astype(np.float64)) for x in (want, got))
        out[block] = np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0.0)
    return out


def _outside(found: Mapping[str, Any], limits: Limits) -> Iterator[str]:
    """The limits that a stage does not keep."""
    if "error" in found and found["error"] > limits.error * found["scale"]:
        largest = limits.error * found["scale"]
        yield f"the largest error is {found['error']:.3g}, above {largest:.3g}"
    if "kl_max" in found and found["kl_max"] > limits.kl:
        yield f"the largest KL is {found['kl_max']:.3g} nats, above {limits.kl:.3g}"
    if "agreement" in found and found["agreement"] < limits.agreement:
        yield (
            f"{found['agreement']:.2%} of the codes agree, less than "
            f"{limits.agreement:.2%}"
        )


# Folders and files.


def open_models(folder: str | os.PathLike, dtype=jnp.float32) -> Models:
    """The models of a folder, of one model or of a whole family, by their places.

    Raises:
      FileNotFoundError, ValueError: as `load_model` and `load` do.
    """
    place = read_json(Path(folder) / CONFIG).get("part")
    if place is not None:
        return {place: load_model(folder, dtype=dtype)}
    return models_of(load(folder, dtype=dtype))


def models_of(pipeline: Pipeline) -> Models:
    """The models of a family, by their places."""
    params, config = pipeline.params, pipeline.config
    sized = {
        f"{kind}/{size}": (c, params[kind][str(size)])
        for kind in ("decoders", "drafters")
        for size, c in getattr(config, kind)
    }
    others = {"vq": config.vq} | config.text.networks()
    return sized | {place: (c, params[place]) for place, c in others.items()}


def read_reference(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file; never runs code of it.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is damaged, or holds objects.
    """
    with naming(Path(path)), Path(path).open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, Mapping):
            raise ValueError("is not an .npz file of several arrays")
        return dict(arrays)


def check_parity(
    folder: str | os.PathLike,
    reference: str | os.PathLike,
    limits: Limits = Limits(),
    *,
    dtype=jnp.float32,
) -> dict[str, Any]:
    """Compares a converted folder with a recorded reference.

    Args:
      folder: as `convert_model` or `jaxspec.save` write it.
      reference: an `.npz` file, its arrays named as `stages` has them.
      limits: what may differ.
      dtype: of our weights in memory; None keeps the folder's.

    Returns:
      A record fit for JSON: "stages", a dictionary of `Compared` each; "unchecked", the
      models of which nothing is recorded; "limits"; and "ok".

    Raises:
      FileNotFoundError, ValueError: the folder or the file cannot be read, or the file
        does not fit the folder.
    """
    if dtype is not None:
        check_dtype(dtype)
    models, arrays = open_models(folder, dtype), read_reference(reference)
    with naming(Path(reference)):
        found = list(compare(models, arrays, limits))
    checked = {stage.stage.rpartition("/")[0] for stage in found}
    return {
        "jaxspec": jaxspec.__version__,
        "folder": Path(folder).name,
        "reference": Path(reference).name,
        "limits": asdict(limits),
        "stages": [asdict(stage) for stage in found],
        "unchecked": sorted(models.keys() - checked),
        "ok": not any(stage.problems for stage in found),
    }
