"""Speculative decoding with a drafter of the same grid."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxspec.acceptance import Ratio, Rule, check_rule
from jaxspec.decoding import Decoded, Target, jacobi, method_class
from jaxspec.models.cache import Cache
from jaxspec.sampling import INITIAL, cell_keys, draw


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpeculativeState:
    """What a round leaves to the next.

    Attributes:
      window: the target's side; its drafts are those that were judged last.
      cache: the drafter's.
    """

    window: jacobi.JacobiState
    cache: Cache


@method_class
class Speculative:
    """Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).

    Also Chen et al. 2023 (arXiv 2302.01318). A round: the drafter draws `length` cells
    one by one, the target judges them in one pass, and draws the cell behind those that
    are kept. The target draws cell 0 from its prefill.

    Guarantee: exact, whatever the drafter and its sampling settings; with another rule
    than `Ratio`, that rule's. A drafter equal to the target is always right: then
    passes are ceil((N - 1) / (length + 1)) after the prefill.

    Attributes:
      draft: the drafter, conditioned on the same images: of the same grid, codes and
        batch as the target, of any size and settings. Another one of its shape compiles
        nothing.
      length: drafts a round.
      rule: judges drafts; your own is a function (see `jaxspec.acceptance`).
    """

    draft: Target = field(repr=False, metadata={"arrays": True})
    length: int = 5
    rule: Rule = Ratio()

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length must be 1 or more, not {self.length}")
        check_rule(self.rule)

    def start(self, target: Target, keys: jax.Array) -> SpeculativeState:
        """Prefills both models and draws cell 0.

        Raises:
          ValueError: the drafter is no `Target`, or does not fit the target.
        """
        target.check_companion(self.draft)
        # The first drafts go unseen: a round begins with new ones.
        window = self.length + 1
        state = jacobi.start(target, keys, window=window, initial="random")
        _, cache = self.draft.prefill()
        prefills = state.decoded.prefill_passes + 1
        decoded = replace(state.decoded, prefill_passes=prefills)
        return SpeculativeState(replace(state, decoded=decoded), cache)

    def step(self, target: Target, state: SpeculativeState) -> SpeculativeState:
        """A round: `length` passes of the drafter, one of the target."""
        old, cache = self.propose(state)
        window, _ = jacobi.judge(target, old, rule=self.rule, codes=target.codes)
        cells = old.done[:, None] + jnp.arange(self.length)[None]
        drafted = cells < target.grammar.end
        passes = window.decoded.draft_passes + jnp.sum(drafted, axis=1)
        decoded = replace(window.decoded, draft_passes=passes)
        decoded = decoded.check(old.log_q, drafted)
        return SpeculativeState(replace(window, decoded=decoded), cache)

    def propose(self, state: SpeculativeState) -> tuple[jacobi.JacobiState, Cache]:
        """The window with new drafts and what they were drawn from, and the cache."""
        window = state.window
        b, n = window.done.shape[0], window.decoded.tokens[0].size
        raster = jnp.arange(n)[None, None]
        attempt = window.decoded.target_passes[:, None]

        def draft(cache, tokens, cell):
            """Draws the cells [B] behind tokens [B, T], which are fed."""
            before = cell[:, None] - jnp.arange(tokens.shape[1], 0, -1)[None]
            fed = jnp.clip(before, 0, n - 1)
            write = (before >= 0) & (cell < n)[:, None]
            visible = raster <= fed[..., None]
            log_q, cache = self.draft.follow(cache, tokens, fed, write, visible)
            keys = cell_keys(window.keys, cell[:, None], INITIAL, attempt)
            return cache, draw(keys, log_q[:, -1:]), log_q[:, -1:]

        def later(carry, place):
            cache, token = carry
            cache, token, log_q = draft(cache, token, window.done + place)
            return (cache, token), (token, log_q)

        # The last two final cells: where all drafts were kept, the last of them was
        # never fed.
        last = jnp.clip(window.done[:, None] + jnp.arange(-2, 0)[None], 0, n - 1)
        final = jnp.take_along_axis(window.decoded.tokens.reshape(b, n), last, axis=1)
        cache, token, log_q = draft(state.cache, final, window.done)
        places = jnp.arange(1, self.length)
        (cache, _), rest = jax.lax.scan(later, (cache, token), places)
        drafts = jnp.concatenate([token, rest[0][..., 0].T], axis=1)
        log_q = jnp.concatenate([log_q, rest[1][:, :, 0].swapaxes(0, 1)], axis=1)
        return replace(window, drafts=drafts, log_q=log_q), cache

    def finished(self, state: SpeculativeState) -> jax.Array:
        return jacobi.finished(state.window)

    def decoded(self, state: SpeculativeState) -> Decoded:
        return state.window.decoded
