"""From what is asked for to what a transformer is conditioned on, family by family."""

from jaxspec.reading.reader import (
    Asked,
    Padded,
    Reader,
    Shown,
    check_texts,
    ids_of,
    timed,
)

__all__ = ["Asked", "Padded", "Reader", "Shown", "check_texts", "ids_of", "timed"]
