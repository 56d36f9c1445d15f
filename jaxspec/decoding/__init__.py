"""What a method sees of a model, what it returns, and the engines that run it."""

from jaxspec.decoding.decoded import (
    ACCEPTED,
    BONUS,
    DRAWN,
    RESAMPLED,
    Decoded,
)
from jaxspec.decoding.run import (
    Method,
    advance,
    begin,
    bound,
    check_method,
    decode,
    decode_eagerly,
    describe,
    method_class,
)
from jaxspec.decoding.target import Target

__all__ = [
    "ACCEPTED",
    "BONUS",
    "DRAWN",
    "RESAMPLED",
    "Decoded",
    "Method",
    "Target",
    "advance",
    "begin",
    "bound",
    "check_method",
    "decode",
    "decode_eagerly",
    "describe",
    "method_class",
]
