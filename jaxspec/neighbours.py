"""Which codes look alike: the nearest ones of each, as rules that pool them need."""

import hashlib
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.compile_cache import user_cache
from jaxspec.figures import atomically

KEPT = 1_000_000  # tables of so many numbers are kept on disk


def check_count(count: int, codes: int) -> None:
    """Raises ValueError if so many codes have no `count` nearest ones."""
    if not 1 <= count <= codes:
        raise ValueError(
            f"neighbours must be 1 to {codes}, the number of codes, not {count}"
        )


def check_table(table: jax.Array, codes: int, *, own: bool) -> None:
    """Refuses a table that cannot be of so many codes (on the host, not in jit).

    A table of another codebook with as many codes looks the same.

    Args:
      table: [V, k], codes near to each.
      codes: V.
      own: each code is the first of its row; else it is in no place of it.

    Raises:
      ValueError: numbers are no codes, or the code itself is where it should not be.
    """
    found = np.asarray(table)
    if not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"a table of neighbours has whole numbers, not {found.dtype}")
    if found.min() < 0 or found.max() >= codes:
        raise ValueError(
            f"the table of neighbours has codes {found.min()} to {found.max()}, and "
            f"there are 0 to {codes - 1}: is it of another codebook?"
        )
    itself = np.arange(codes)[:, None]
    if own and not np.array_equal(found[:, :1], itself):
        raise ValueError("each row of the table must begin with the code itself")
    if not own and np.any(found == itself):
        raise ValueError("the table must have the nearest others, not the code itself")


@partial(jax.jit, static_argnums=1)
def nearest_codes(codes: jax.Array, count: int) -> jax.Array:
    """The `count` nearest codes int32 [V, count] of each, itself first.

    By squared L2 distance of the vectors [V, d] as they are given: where these have
    norm 1, as in LlamaGen's tokenizer, also by cosine. Ties go to the lower code.

    Raises:
      ValueError: there are fewer codes than `count`, or it is less than 1.
    """
    check_count(count, len(codes))
    square, ids = jnp.sum(codes * codes, axis=-1), jnp.arange(len(codes))

    def nearest(code):
        # |a - b|^2 without |a|^2. Its own distance is the least even where another
        # code has the same vector.
        gap = jnp.where(ids == code, -jnp.inf, square - 2 * codes @ codes[code])
        return jax.lax.top_k(-gap, count)[1]

    return jax.lax.map(nearest, ids, batch_size=256)  # never V x V numbers


def neighbour_table(codes: jax.Array, count: int) -> jax.Array:
    """`nearest_codes`, computed once for the same codes (on the host, not in jit).

    Large tables are kept in the user's cache folder too (see `user_cache`).
    """
    content = np.asarray(codes).tobytes()
    return _table(content, codes.shape, str(codes.dtype), count)


@lru_cache(maxsize=4)
def _table(content: bytes, shape: tuple, dtype: str, count: int) -> jax.Array:
    codes = jnp.asarray(np.frombuffer(content, dtype).reshape(shape))
    if shape[0] * count < KEPT:
        return nearest_codes(codes, count)
    name = hashlib.sha256(f"{dtype}{shape}{count}".encode() + content).hexdigest()
    path = user_cache() / "neighbours" / f"{name[:32]}.npy"
    kept = _kept(path, (shape[0], count))
    if kept is not None:
        return jnp.asarray(kept, jnp.int32)
    table = nearest_codes(codes, count)
    with suppress(OSError):  # a full disk or none costs time, and nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomically(path) as draft, draft.open("wb") as file:
            np.save(file, np.asarray(table).astype(np.uint32))
    return table


def _kept(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The table in a file, if there is one and it is whole."""
    try:
        table = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    whole = table.shape == shape and table.dtype == np.uint32
    return (
        table if whole and np.array_equal(table[:, 0], np.arange(len(table))) else None
    )


__all__ = ["check_count", "check_table", "nearest_codes", "neighbour_table"]
