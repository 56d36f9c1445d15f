"""Fast decoding of autoregressive image generators, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxspec.checkpoints.folder import families, load, save
    from jaxspec.compile_cache import use_compile_cache
    from jaxspec.decoding import Decoded, Method, Target, decode
    from jaxspec.exporting import export_decode, load_decode
    from jaxspec.generation import Generated, decode_tokens, generate
    from jaxspec.matching import match
    from jaxspec.methods import (
        AR,
        EAGLE,
        EAGLE2,
        GSD,
        LANTERN,
        LANTERNPP,
        LPD,
        PJD,
        SCD,
        SJD,
        SSD,
        Addition,
        Amplify,
        FlashAR,
        MuLo,
        Speculative,
        ZipAR,
    )
    from jaxspec.pipeline import Pipeline
    from jaxspec.quantisation import quantised
    from jaxspec.sampling import Sampling, image_keys

# Imported when first used, so that `jaxspec --help` does not wait for JAX.
_HOME = {
    "AR": "methods",
    "Addition": "methods",
    "Amplify": "methods",
    "Decoded": "decoding",
    "EAGLE": "methods",
    "EAGLE2": "methods",
    "FlashAR": "methods",
    "GSD": "methods",
    "Generated": "generation",
    "LANTERN": "methods",
    "LANTERNPP": "methods",
    "LPD": "methods",
    "Method": "decoding",
    "MuLo": "methods",
    "PJD": "methods",
    "Pipeline": "pipeline",
    "SCD": "methods",
    "SJD": "methods",
    "SSD": "methods",
    "Sampling": "sampling",
    "Speculative": "methods",
    "Target": "decoding",
    "ZipAR": "methods",
    "decode": "decoding",
    "decode_tokens": "generation",
    "export_decode": "exporting",
    "families": "checkpoints.folder",
    "generate": "generation",
    "image_keys": "sampling",
    "load": "checkpoints.folder",
    "load_decode": "exporting",
    "match": "matching",
    "method_class": "decoding",
    "quantised": "quantisation",
    "save": "checkpoints.folder",
    "use_compile_cache": "compile_cache",
}

__all__ = [
    "AR",
    "EAGLE",
    "EAGLE2",
    "GSD",
    "LANTERN",
    "LANTERNPP",
    "LPD",
    "PJD",
    "SCD",
    "SJD",
    "SSD",
    "Addition",
    "Amplify",
    "Decoded",
    "FlashAR",
    "Generated",
    "Method",
    "MuLo",
    "Pipeline",
    "Sampling",
    "Speculative",
    "Target",
    "ZipAR",
    "decode",
    "decode_tokens",
    "export_decode",
    "families",
    "generate",
    "image_keys",
    "load",
    "load_decode",
    "match",
    "method_class",
    "quantised",
    "save",
    "use_compile_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxspec.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
