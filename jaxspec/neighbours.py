"""Which codes look alike: the nearest ones of each, as rules that pool them need."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np


@partial(jax.jit, static_argnums=1)
def nearest_codes(codes: jax.Array, count: int) -> jax.Array:
    """The `count` nearest codes int32 [V, count] of each, itself first.

    By squared L2 distance of the vectors [V, d] as they are given: where these have
    norm 1, as in LlamaGen's tokenizer, also by cosine. Ties go to the lower code.

    Raises:
      ValueError: there are fewer codes than `count`, or it is less than 1.
    """
    if not 1 <= count <= len(codes):
        raise ValueError(
            f"neighbours must be 1 to {len(codes)}, the number of codes, not {count}"
        )
    square, ids = jnp.sum(codes * codes, axis=-1), jnp.arange(len(codes))

    def nearest(code):
        # |a - b|^2 without |a|^2. Its own distance is the least even where another
        # code has the same vector.
        gap = jnp.where(ids == code, -jnp.inf, square - 2 * codes @ codes[code])
        return jax.lax.top_k(-gap, count)[1]

    return jax.lax.map(nearest, ids, batch_size=256)  # never V x V numbers


def neighbour_table(codes: jax.Array, count: int) -> jax.Array:
    """`nearest_codes`, computed once for the same codes (on the host, not in jit)."""
    content = np.asarray(codes).tobytes()
    return _table(content, codes.shape, str(codes.dtype), count)


@lru_cache(maxsize=4)
def _table(content: bytes, shape: tuple, dtype: str, count: int) -> jax.Array:
    codes = np.frombuffer(content, dtype).reshape(shape)
    return nearest_codes(jnp.asarray(codes), count)


__all__ = ["nearest_codes", "neighbour_table"]
