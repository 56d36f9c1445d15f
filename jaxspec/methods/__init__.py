"""Decoding methods, one module a published method."""

from jaxspec.methods.ar import AR

__all__ = ["AR"]
