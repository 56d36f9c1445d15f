"""Fast decoding of autoregressive image generators, in JAX."""

from jaxspec.checkpoints.folder import families, load, save
from jaxspec.decoding import Decoded, Method, Target, decode
from jaxspec.generate import Generated, generate
from jaxspec.methods import AR
from jaxspec.pipeline import Pipeline
from jaxspec.sampling import Sampling

__version__ = "0.1.0"

__all__ = [
    "AR",
    "Decoded",
    "Generated",
    "Method",
    "Pipeline",
    "Sampling",
    "Target",
    "decode",
    "families",
    "generate",
    "load",
    "save",
]
