"""Sizes of pictures in pixels: the side of a square, or height and width."""

import operator
from typing import Any

import numpy as np

Size = int | tuple[int, int]


def sides_of(size: Size) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else size


def checked_size(size: Any) -> Size:
    """A size as above, of whatever types, or of its label; a square is one number.

    Raises:
      ValueError: it is none.
    """
    try:
        parts = [int(x) for x in size.split("x")] if isinstance(size, str) else size
        sides = [operator.index(x) for x in np.atleast_1d(np.asarray(parts))]
    except (TypeError, ValueError):
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ValueError(f"size must be pixels, or (height, width), not {size!r}")
    return sides[0] if len(set(sides)) == 1 else (sides[0], sides[1])


def size_label(size: Size) -> str:
    """Such as "768", or "576x1024", height first."""
    return str(size) if isinstance(size, int) else "x".join(map(str, size))
