"""What a method sees of a model, what it returns, and the engines that run it."""

from jaxspec.decoding.decoded import (
    ACCEPTED,
    BONUS,
    DRAWN,
    FORCED,
    RESAMPLED,
    Decoded,
)
from jaxspec.decoding.grammar import ImageGrammar
from jaxspec.decoding.run import (
    Method,
    advance,
    begin,
    bound,
    check_fits,
    check_method,
    decode,
    decode_eagerly,
    describe,
    method_class,
)
from jaxspec.decoding.target import Target, map_targets, targets_in

__all__ = [
    "ACCEPTED",
    "BONUS",
    "DRAWN",
    "FORCED",
    "RESAMPLED",
    "Decoded",
    "ImageGrammar",
    "Method",
    "Target",
    "advance",
    "begin",
    "bound",
    "check_fits",
    "check_method",
    "decode",
    "decode_eagerly",
    "describe",
    "map_targets",
    "method_class",
    "targets_in",
]
