"""The first cell, which every method draws from the prefill."""

import jax
import jax.numpy as jnp

from jaxspec.decoding.decoded import DRAWN, Decoded
from jaxspec.decoding.target import Target
from jaxspec.models.cache import Cache
from jaxspec.sampling import cell_keys, draw


def draw_first(
    target: Target,
    keys: jax.Array,
    prefilled: tuple[jax.Array, Cache] | None = None,
) -> tuple[jax.Array, jax.Array, Cache, Decoded]:
    """Prefills the target and draws cell 0, which needs no further pass.

    With `prefilled`, what `Target.prefill` returns was found already.

    Returns:
      The token [B, 1], the log-probabilities [B, 1, V] it was drawn from, the cache,
      and the result so far.
    """
    log_p, cache = prefilled or target.prefill()
    log_p = log_p[:, None]
    first = jnp.zeros((target.batch, 1), jnp.int32)
    valid = jnp.ones((target.batch, 1), bool)
    token = draw(cell_keys(keys, first), log_p)
    decoded = Decoded.empty(target.batch, target.grid, target.grammar.newline)
    decoded = decoded.check(log_p, valid)
    return token, log_p, cache, decoded.settle(first, valid, token, DRAWN)
