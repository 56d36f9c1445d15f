"""From logits to the distribution that is sampled, and draws from it.

The order is that of the published samplers: guidance, temperature, top-k, top-p,
log-softmax, all in float32. Every acceptance rule works on the result, never on raw
logits.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

_SMALLEST = float(jnp.finfo(jnp.float32).tiny)
_LARGEST = float(jnp.finfo(jnp.float32).max)


def _checked(name: str, value: float, want: str, most: float = _LARGEST) -> float:
    """A setting as a plain number from 0 to `most`; NaN is neither."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= most:
        raise ValueError(f"{name} must be {want}, not {value}")
    return number


def _count(name: str, value: int, want: str) -> int:
    if _checked(name, value, want) % 1:
        raise ValueError(f"{name} must be {want}, not {value}")
    return int(value)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Sampling settings; `None` switches a step off.

    What is off is part of the structure (another compiled program); the numbers are
    ordinary inputs, so changing them compiles nothing. Make one with `create`, which
    checks the numbers.

    Attributes:
      temperature: logits are divided by it; None is argmax.
      guidance: scale s of classifier-free guidance, `u + s (c - u)`, which costs an
        unconditional row beside each conditional one; None is conditional only.
      guided_cells: guidance applies to this many first cells only; None is to all.
      ramp_cells: the scale grows evenly from 1 at the first cell to `guidance` behind
        this many; None is the same for all.
      top_k: only the k likeliest codes are kept, and those tied with the k-th.
      top_p: codes are kept from the likeliest on until their sum passes p; the one that
        passes it is kept, and those tied with it.
    """

    temperature: float | jax.Array | None = 1.0
    guidance: float | jax.Array | None = None
    guided_cells: int | jax.Array | None = None
    ramp_cells: int | jax.Array | None = None
    top_k: int | jax.Array | None = None
    top_p: float | jax.Array | None = None

    @staticmethod
    def create(
        vocab_size: int,
        *,
        temperature: float = 1.0,
        guidance: float = 1.0,
        guided_cells: int | None = None,
        ramp_cells: int | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> "Sampling":
        """Checks settings in their usual form and makes the record.

        Temperature 0 is argmax, guidance 1 is off (0 is unconditional), top_k 0 and
        top_p 1 are off.

        Raises:
          ValueError: a setting is no number, NaN, or out of its range.
        """
        temperature = _checked("temperature", temperature, "0 (argmax) or more")
        guidance = _checked("guidance", guidance, "0 (unconditional), 1 (off) or more")
        top_p = _checked("top_p", top_p, "between 0 and 1 (1 is off)", most=1)
        top_k = _count("top_k", top_k, "0 (off) or a count")
        if guided_cells is not None:
            guided_cells = _count("guided_cells", guided_cells, "a count")
        if ramp_cells is not None:
            ramp_cells = _count("ramp_cells", ramp_cells, "a count")
        if top_k > vocab_size:
            warnings.warn(
                f"top_k {top_k} is more than the {vocab_size} codes; all are kept",
                stacklevel=2,
            )
        return Sampling(
            # Below the smallest float32 there is nothing left to divide by.
            temperature=None if temperature < _SMALLEST else temperature,
            guidance=None if guidance == 1 else guidance,
            guided_cells=None if guidance == 1 else guided_cells,
            ramp_cells=None if guidance == 1 or not ramp_cells else ramp_cells,
            top_k=top_k if 0 < top_k < vocab_size else None,
            top_p=top_p if top_p < 1 else None,
        )

    @property
    def rows(self) -> int:
        """Rows of the network an image takes: 2 with guidance (null after its own)."""
        return 1 if self.guidance is None else 2


def guide(logits: jax.Array, cells: jax.Array, sampling: Sampling) -> jax.Array:
    """Joins conditional and null rows: [B * rows, T, V] to [B, T, V] logits.

    Rows of one image are neighbours, so that images can be split over devices.
    `cells` [B, T] are the cells that the logits are about.
    """
    if sampling.guidance is None:
        return logits
    pair = logits.reshape(-1, 2, *logits.shape[1:])
    conditional, null = pair[:, 0], pair[:, 1]
    scale = jnp.asarray(sampling.guidance, jnp.float32)
    if sampling.ramp_cells is not None:
        risen = jnp.minimum(cells / sampling.ramp_cells, 1.0)
        scale = (1.0 + (scale - 1.0) * risen)[..., None]
    if sampling.guided_cells is not None:
        scale = jnp.where(cells[..., None] < sampling.guided_cells, scale, 1.0)
        # Exactly the conditional logits where guidance is off, not u + (c - u).
        guided = null + scale * (conditional - null)
        return jnp.where(scale == 1.0, conditional, guided)
    return null + scale * (conditional - null)


def keep_top_k(logits: jax.Array, k: int | jax.Array) -> jax.Array:
    """Sets logits below the k-th largest of the last axis to -inf."""

    def enough(kept):
        # XLA's CPU backend adds floats faster; they are exact up to 2^24 codes.
        return jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.float32) >= k

    return _keep(logits, enough)


def keep_top_p(logits: jax.Array, p: float | jax.Array) -> jax.Array:
    """Keeps the likeliest codes up to and including the one whose sum passes p."""
    probs = jax.nn.softmax(logits, axis=-1)

    def passes(kept):
        return jnp.sum(jnp.where(kept, probs, 0), axis=-1, keepdims=True) > p

    return _keep(logits, passes)


def _keep(logits: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Keeps the fewest of the largest logits that are enough; all, if those are not.

    Finds the smallest that is kept bit by bit. On a CPU, 32 sums over the codes take a
    fraction of the time of sorting them (`experiments/bench_sampling.py`).
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)
    negative = bits >> 31 == 1
    order = jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))  # as the floats'

    def next_bit(i, least):
        higher = least | (jnp.uint32(1 << 31) >> i)
        return jnp.where(enough(order >= higher), higher, least)

    none = jnp.zeros_like(order[..., :1])
    least = jax.lax.fori_loop(0, 32, next_bit, none)
    return jnp.where(order >= least, logits, -jnp.inf)


def likeliest(logits: jax.Array) -> jax.Array:
    """`argmax` of the last axis, int32 [...]: the first of the largest.

    Two plain reductions, of floats, which are exact up to 2^24: XLA's CPU backend takes
    ten times as long over one of pairs, which is what `jnp.argmax` is.
    """
    codes = jax.lax.broadcasted_iota(jnp.float32, logits.shape, logits.ndim - 1)
    best = jnp.max(logits, axis=-1, keepdims=True)
    last = logits.shape[-1] - 1.0  # nothing equals NaN
    return jnp.min(jnp.where(logits == best, codes, last), axis=-1).astype(jnp.int32)


def log_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Log-probabilities [..., V] of the distribution that is sampled from.

    Takes guided logits. A NaN or +inf among them, or no code that is left, makes the
    whole row NaN, which is how decoding notices. Argmax is a distribution too: 0 at the
    first largest logit, -inf elsewhere.
    """
    return _some_at_once(partial(_log_probs, sampling=sampling), logits)


def _log_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    logits = logits.astype(jnp.float32)
    bad = ~jnp.all(logits < jnp.inf, axis=-1, keepdims=True)
    bad |= ~jnp.any(logits > -jnp.inf, axis=-1, keepdims=True)
    if sampling.temperature is None:
        best = likeliest(logits)
        chosen = jax.nn.one_hot(best, logits.shape[-1], dtype=bool)
        out = jnp.where(chosen, 0.0, -jnp.inf)
    else:
        # From the maximum, so that a tiny temperature cannot overflow.
        logits = logits - jnp.max(logits, axis=-1, keepdims=True)
        logits = logits / jnp.asarray(sampling.temperature, jnp.float32)
        if sampling.top_k is not None:
            logits = keep_top_k(logits, sampling.top_k)
        if sampling.top_p is not None:
            logits = keep_top_p(logits, sampling.top_p)
        out = jax.nn.log_softmax(logits, axis=-1)
    return jnp.where(bad, jnp.nan, out)


# Numbers of a window that a CPU works on together: with what is made of them they fit
# its cache. More take twice the time each (`experiments/bench_sampling.py`).
AT_ONCE = 1 << 20


def _some_at_once(function: Callable[..., jax.Array], *given: jax.Array) -> jax.Array:
    """`function` of arrays [B, T, ...], the last with codes: on a CPU, of some cells.

    Each cell is on its own. Other arrays than those of windows go as a whole.
    """
    x = given[-1]
    cells = x.shape[1] if x.ndim == 3 else 1
    most = max(1, AT_ONCE * cells // max(x.size, 1))
    if most >= cells:
        return function(*given)

    def in_parts(*given):
        out = jax.eval_shape(function, *given)

        def part(i, out):
            first = jnp.minimum(i * most, cells - most)  # the last overlap
            some = (jax.lax.dynamic_slice_in_dim(y, first, most, 1) for y in given)
            done = function(*some)
            return jax.lax.dynamic_update_slice_in_dim(out, done, first, 1)

        parts = -(-cells // most)
        return jax.lax.fori_loop(0, parts, part, jnp.zeros(out.shape, out.dtype))

    return jax.lax.platform_dependent(*given, cpu=in_parts, default=function)


# Keys. A draw's key depends on the image and the cell alone: never on the batch row,
# the host, or how many draws came before.

# Purposes, what a key of a cell is used for:
DRAW = 0  # a token
ACCEPT = 1  # the test of a draft
GUMBEL = 2  # noise that belongs to the cell, pass after pass
INITIAL = 3  # a first draft
DRAFT = 8  # at cell 0: what a drafter's image keys are made of
ORDER = 10  # at cell 0: in what order cells are drawn
WORD = 9  # a language model's tokens, by their step


def image_key(
    seed: int, prompt_id: int | jax.Array, image: int | jax.Array
) -> jax.Array:
    """The key of one image: (seed, prompt id, number among the prompt's images)."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, prompt_id), image)


_image_keys = jax.jit(jax.vmap(image_key, in_axes=(None, 0, 0)))


def image_keys(seed: int, prompt_ids: ArrayLike, numbers: ArrayLike) -> jax.Array:
    """Keys [B] of images (see `image_key`)."""
    return _image_keys(
        np.uint32(seed),
        np.asarray(prompt_ids, np.uint32),
        np.asarray(numbers, np.uint32),
    )


def cell_keys(
    keys: jax.Array, cells: jax.Array, purpose: int = DRAW, attempt: int | jax.Array = 0
) -> jax.Array:
    """Keys [B, T] for a purpose at cells [B, T] of images with keys [B].

    Raises:
      ValueError: keys are not typed threefry keys; `rbg` keys change under vmap, and
        with them an image would depend on its row.
    """
    if str(keys.dtype) != "key<fry>":
        raise ValueError(f"keys must be as `image_key` makes them, not {keys.dtype}")

    def one(key, cell, attempt):
        key = jax.random.fold_in(jax.random.fold_in(key, cell), purpose)
        return jax.random.fold_in(key, attempt)

    over_cells = jax.vmap(one, in_axes=(None, 0, 0))
    return jax.vmap(over_cells)(keys, cells, jnp.broadcast_to(attempt, cells.shape))


def uniform(keys: jax.Array) -> jax.Array:
    """A number [B, T] from 0 to 1 for each key [B, T]."""
    return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def gumbel(keys: jax.Array, size: int) -> jax.Array:
    """Gumbel noise float32 [B, T, size], for each key [B, T]."""

    def noise(key):
        return jax.random.gumbel(key, (size,), jnp.float32)

    return jax.vmap(jax.vmap(noise))(keys)


def draw(keys: jax.Array, log_p: jax.Array) -> jax.Array:
    """One code int32 [B, T] from each log-distribution [B, T, V], by its own key."""
    return _some_at_once(_draw, keys, log_p)


def _draw(keys: jax.Array, log_p: jax.Array) -> jax.Array:
    def noisy(log_p):
        return likeliest(log_p + gumbel(keys, log_p.shape[-1]))

    def unless_certain(log_p):
        # As at temperature 0: there is nothing that noise could change.
        codes = jnp.sum(log_p > -jnp.inf, axis=-1, dtype=jnp.float32)
        return jax.lax.cond(jnp.all(codes <= 1), likeliest, noisy, log_p)

    # Elsewhere noise costs less than to ask.
    return jax.lax.platform_dependent(log_p, cpu=unless_certain, default=noisy)
