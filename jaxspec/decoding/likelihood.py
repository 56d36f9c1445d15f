"""How likely a target finds pictures that are finished, whatever drew them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.decoding.target import Target
from jaxspec.models.cache import Cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Likelihood:
    """What a target says of B pictures, each cell given those before it.

    Attributes:
      divergences: int32 [B], cells whose code the target would never draw there, with
        its settings: it is not among the top-k and top-p, or at temperature 0 not the
        likeliest. An exact method has none, but for rounding where two are nearly tied.
      log_prob: float32 [B], the mean log-probability of the other cells' codes, in nats
        a cell.
    """

    divergences: jax.Array
    log_prob: jax.Array


@jax.jit
def likelihood(target: Target, tokens: jax.Array) -> Likelihood:
    """Reads pictures int32 [B, h, w], without newlines: a pass a row, and a prefill."""
    log_p = target.grammar.without(log_probs_of(target, target.grammar.written(tokens)))
    never = jnp.isneginf(log_p)
    total = jnp.sum(jnp.where(never, 0.0, log_p), axis=(1, 2))
    mean = total / jnp.maximum(jnp.sum(~never, axis=(1, 2)), 1)
    return Likelihood(jnp.sum(never, axis=(1, 2)), mean)


def log_probs_of(target: Target, grids: jax.Array) -> jax.Array:
    """Log-probabilities [B, H, W] of the codes of whole grids, newlines among them.

    As they are sampled from: -inf where the target would never draw that code.
    """
    b, h, w = grids.shape
    n, flat = h * w, grids.reshape(b, h * w)
    follows = jnp.pad(flat[:, 1:], ((0, 0), (0, 1)))  # of the last cell: nothing

    def read(cache: Cache, row: jax.Array) -> tuple[Cache, jax.Array]:
        """Feeds a row, [B, w]: the log-probabilities of the cells after its own."""
        cells = jnp.broadcast_to(row * w + jnp.arange(w), (b, w))
        visible = jnp.arange(n)[None, None] <= cells[..., None]
        fed = jax.lax.dynamic_slice_in_dim(flat, row * w, w, axis=1)
        log_p, cache = target.follow(cache, fed, cells, cells >= 0, visible)
        codes = jax.lax.dynamic_slice_in_dim(follows, row * w, w, axis=1)
        return cache, jnp.take_along_axis(log_p, codes[..., None], axis=-1)[..., 0]

    first, cache = target.prefill()
    start = jnp.take_along_axis(first, flat[:, :1], axis=-1)
    _, after = jax.lax.scan(read, cache, jnp.arange(h))
    after = jnp.moveaxis(after, 0, 1).reshape(b, n)
    return jnp.concatenate([start, after[:, :-1]], axis=1).reshape(b, h, w)
