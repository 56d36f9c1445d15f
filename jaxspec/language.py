"""Prompts to image tokens with a language model, in one compiled loop with its cache.

Tar's first stage (Han et al. 2025, arXiv 2506.18898): after a prompt that ends in the
tokens of image start and scale, Qwen2 writes 729, 169 or 81 semantic tokens.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.cache import Cache
from jaxspec.models.llama import Llama, causal, empty_cache, positions_of, unstacked
from jaxspec.sampling import WORD, Sampling, cell_keys, draw, log_probs
from jaxspec.sharding import by_image, mesh_of, on_host

BUCKET = 32  # prompts are padded to a multiple: another length compiles nothing


@dataclass(frozen=True)
class Grammar:
    """What is to be written; static and hashable.

    Attributes:
      count: image tokens that a row has when it is done.
      first, size: the image tokens are `first` to `first + size - 1`.
      ends: tokens that end a row before that.
      most: tokens that a row writes at most, image tokens or not; `count` by default,
        as published.
      only_images: draw image tokens only; as published, any token can be drawn.
    """

    count: int
    first: int
    size: int
    ends: tuple[int, ...] = ()
    most: int | None = None
    only_images: bool = False

    def __post_init__(self):
        """Raises ValueError for counts and ranges that make no sense."""
        if not 0 < self.count <= self.steps:
            raise ValueError(
                f"count is {self.count} and most {self.steps}: it takes 0 < count <= "
                "most"
            )
        if self.first < 0 or self.size < 1:
            raise ValueError(f"image tokens cannot be {self.size} from {self.first} on")

    @property
    def steps(self) -> int:
        return self.count if self.most is None else self.most

    def is_image(self, tokens: jax.Array) -> jax.Array:
        return (tokens >= self.first) & (tokens < self.first + self.size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Written:
    """What a language model wrote.

    Attributes:
      tokens: int32 [B, most], -1 after a row's end.
      codes: int32 [B, count], the image tokens among them, counted from the first of
        their range; 0 where there were no more.
      found: int32 [B], how many codes were written.
      finite: bool [B], whether all distributions of a row were.
    """

    tokens: jax.Array
    codes: jax.Array
    found: jax.Array
    finite: jax.Array


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as int32 [B, T], zeros on the left, and bool [B, T] where they are."""
    longest = max(map(len, prompts))
    length = -(-longest // BUCKET) * BUCKET
    tokens = np.zeros((len(prompts), length), np.int32)
    seen = np.zeros(tokens.shape, bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        seen[row, length - len(prompt) :] = True
    return tokens, seen


def write(
    model: Llama,
    params: Any,
    prompts: Sequence[Sequence[int]],
    keys: jax.Array,
    sampling: Sampling,
    grammar: Grammar,
    repetition_penalty: float | None = None,
    names: Sequence[object] | None = None,
) -> Written:
    """Continues prompts until they have their image tokens.

    A row's tokens do not depend on its neighbours, nor on how far it was padded.

    Args:
      model: static module.
      params: its parameters; hand in `unstacked` ones to copy the layers only once.
      prompts: token ids of each row, up to the image start and scale tokens.
      keys: [B], as `sampling.image_key` makes them; not consumed.
      sampling: temperature, top-k and top-p; Tar takes 1, 1200 and 0.95.
      grammar: what to write.
      repetition_penalty: logits of tokens that stand in the prompt or were written are
        divided by it if positive, multiplied if negative (Keskar et al. 2019, "CTRL",
        section 4.1), for a model whose generation settings have one. None is off.
      names: what warnings and errors call each row; its number by default.

    Raises:
      ValueError: a prompt is empty or has an id that is no token, a range is not in the
        vocabulary, or a setting is not one for a language model.
      FloatingPointError: a distribution was not finite.
    """
    _check(model, prompts, keys, sampling, grammar, repetition_penalty)
    params = unstacked(model.config, params)
    tokens, seen = by_image(mesh_of(params), left_padded(prompts))
    out = written(
        model, grammar, params, tokens, seen, keys, sampling, repetition_penalty
    )
    names = range(len(prompts)) if names is None else names
    finite, found = on_host(out.finite), on_host(out.found).tolist()
    bad = list(dict.fromkeys(names[i] for i in np.flatnonzero(~finite)))
    if bad:
        raise FloatingPointError(
            f"prompts {bad}: logits were not finite; are the weights?"
        )
    # By name: rows may be repeated to fill a batch.
    short = {n: x for n, x in zip(names, found, strict=True) if x < grammar.count}
    if short:
        warnings.warn(
            f"prompts {list(short)} got {list(short.values())} of {grammar.count} "
            "image tokens; the rest is code 0",
            stacklevel=2,
        )
    return out


def _check(model, prompts, keys, sampling, grammar, penalty) -> None:
    vocabulary = model.config.vocab_size
    if not len(prompts) or not all(map(len, prompts)):
        raise ValueError("there must be a prompt, and a token in each")
    if len(keys) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many keys, not {len(keys)}")
    ids = np.concatenate([np.asarray(prompt) for prompt in prompts])
    if not (0 <= ids.min() and ids.max() < vocabulary):
        raise ValueError(
            f"prompts have ids {ids.min()} to {ids.max()}; the model has 0 to "
            f"{vocabulary - 1}"
        )
    last = max(grammar.first + grammar.size - 1, *grammar.ends, 0)
    if last >= vocabulary:
        raise ValueError(
            f"the grammar has token {last}; the model has 0 to {vocabulary - 1}"
        )
    if sampling.guidance is not None:
        raise ValueError("guidance is for images; a language model has none")
    if penalty is not None and not penalty > 0:
        raise ValueError(f"repetition_penalty must be positive, not {penalty}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """The loop's: tokens so far, rows that are done, and what `known` tokens are."""

    step: jax.Array
    tokens: jax.Array  # [B, most]
    found: jax.Array  # [B]
    done: jax.Array  # [B]
    finite: jax.Array  # [B]
    known: jax.Array  # bool [B, V], in the prompt or written
    cache: Cache


@partial(jax.jit, static_argnums=(0, 1))
def written(
    model: Llama,
    grammar: Grammar,
    params: Any,
    prompt: jax.Array,
    seen: jax.Array,
    keys: jax.Array,
    sampling: Sampling,
    penalty: jax.Array | None,
) -> Written:
    """The program of `write`: prompts [B, T] as `left_padded` makes them."""
    b, t = prompt.shape
    steps, rows = grammar.steps, jnp.arange(b)
    apply: Any = partial(model.apply, params)
    length = jnp.sum(seen, axis=1, dtype=jnp.int32)

    def draw_next(states: jax.Array, state: _State) -> _State:
        logits, start = apply(states, method="logits")[:, 0], 0
        if penalty is not None:
            punished = jnp.where(logits > 0, logits / penalty, logits * penalty)
            logits = jnp.where(state.known, punished, logits)
        if grammar.only_images:
            start = grammar.first
            logits = logits[:, start : start + grammar.size]
        log_p = log_probs(logits, sampling)
        cells = jnp.full((b, 1), state.step)
        token = draw(cell_keys(keys, cells, WORD), log_p[:, None])[:, 0] + start
        found = state.found + jnp.where(state.done, 0, grammar.is_image(token))
        ended = jnp.isin(token, jnp.array(grammar.ends, jnp.int32))
        return replace(
            state,
            step=state.step + 1,
            tokens=state.tokens.at[:, state.step].set(jnp.where(state.done, -1, token)),
            found=found,
            done=state.done | ended | (found >= grammar.count),
            finite=state.finite & (state.done | ~jnp.isnan(log_p[:, 0])),
            known=state.known.at[rows, token].set(True),
        )

    def feed(state: _State) -> _State:
        token = jnp.maximum(state.tokens[:, state.step - 1], 0)[:, None]
        at = jnp.full((b, 1), state.step - 1)
        written = jnp.broadcast_to(jnp.arange(steps) < state.step, (b, steps))
        visible = jnp.concatenate([seen, written], axis=1)[:, None]
        states, cache = apply(
            apply(token, method="embed"),
            at + length[:, None],
            at + t,
            state.cache,
            visible,
            method="extend",
        )
        return draw_next(states, replace(state, cache=cache))

    x = apply(prompt, method="embed")
    states, cache = apply(
        x,
        positions_of(seen),
        jnp.broadcast_to(jnp.arange(t), (b, t)),
        empty_cache(model.config, b, t + steps, x.dtype),
        jnp.pad(causal(seen), ((0, 0), (0, 0), (0, steps))),
        method="extend",
    )
    state = _State(
        step=jnp.int32(0),
        tokens=jnp.full((b, steps), -1, jnp.int32),
        found=jnp.zeros(b, jnp.int32),
        done=jnp.zeros(b, bool),
        finite=jnp.ones(b, bool),
        known=jnp.zeros((b, model.config.vocab_size), bool)
        .at[rows[:, None], prompt]
        .max(seen),
        cache=cache,
    )
    state = jax.lax.while_loop(
        lambda s: (s.step < steps) & ~jnp.all(s.done),
        feed,
        draw_next(states[:, -1:], state),
    )
    images = grammar.is_image(state.tokens)
    order = jnp.where(images, jnp.cumsum(images, axis=1) - 1, grammar.count)
    codes = jnp.zeros((b, grammar.count), jnp.int32)
    codes = codes.at[rows[:, None], order].set(
        state.tokens - grammar.first, mode="drop"
    )
    return Written(state.tokens, codes, state.found, state.finite)
