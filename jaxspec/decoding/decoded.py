"""What every method returns: tokens, counts, and a record of every cell."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxspec.decoding.grammar import ImageGrammar

# Where a cell's token came from.
DRAWN = 0  # from the target's distribution: no draft there, or dropped with others
ACCEPTED = 1  # a draft that was kept
RESAMPLED = 2  # from the target, in place of a rejected draft
BONUS = 3  # from the target, after a draft accepted to its end
FORCED = 4  # from the grammar: a newline


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoded:
    """Result of decoding B images on a grid of H by W cells.

    Attributes:
      tokens: int32 [B, H, W].
      final_pass: int32 [B, H, W], the pass in which a cell became final: 0 is the
        prefill, -1 is never.
      origin: int8 [B, H, W], one of DRAWN, ACCEPTED, RESAMPLED, BONUS, FORCED.
      target_passes, draft_passes: int32 [B], passes of the target and of the drafter
        that the image took part in, without prefill. A pass with guidance is one.
      prefill_passes: int32 [B], passes over conditions, of target and drafter.
      drafted: int32 [B], draft tokens that the target judged.
      bad_pass: int32 [B], the first pass with a log-probability that was not finite;
        -1 if none.
      drafts: int32 [B, H, W], what another model drafted of the whole picture before
        the target judged it; None with methods that have no such draft.
      newline: the code of the last column, which is forced, and final from the start;
        None if there is no such column.
    """

    tokens: jax.Array
    final_pass: jax.Array
    origin: jax.Array
    target_passes: jax.Array
    draft_passes: jax.Array
    prefill_passes: jax.Array
    drafted: jax.Array
    bad_pass: jax.Array
    drafts: jax.Array | None = None
    newline: int | None = field(default=None, metadata={"static": True})

    @staticmethod
    def empty(
        batch: int, grid: tuple[int, int], newline: int | None = None
    ) -> "Decoded":
        """Nothing decoded yet; the target's prefill is counted."""
        count = jnp.zeros(batch, jnp.int32)
        forced = ImageGrammar(grid, newline).mask

        def cells(free: int, else_: int, dtype) -> jax.Array:
            one = jnp.where(forced, else_, free).astype(dtype)
            return jnp.broadcast_to(one, (batch, *grid))

        return Decoded(
            tokens=cells(0, newline or 0, jnp.int32),
            final_pass=cells(-1, 0, jnp.int32),
            origin=cells(DRAWN, FORCED, jnp.int8),
            target_passes=count,
            draft_passes=count,
            prefill_passes=count + 1,
            drafted=count,
            bad_pass=count - 1,
            newline=newline,
        )

    @property
    def grammar(self) -> ImageGrammar:
        _, h, w = self.tokens.shape
        return ImageGrammar((h, w), self.newline)

    def picture(self) -> "Decoded":
        """The same of the picture's own cells, without newlines."""
        cut = self.grammar.without
        return replace(
            self,
            tokens=cut(self.tokens),
            final_pass=cut(self.final_pass),
            origin=cut(self.origin),
            drafts=None if self.drafts is None else cut(self.drafts),
            newline=None,
        )

    def count(self, origin: int) -> jax.Array:
        """Cells [B] that came from `origin`."""
        return jnp.sum((self.origin == origin) & (self.final_pass >= 0), axis=(1, 2))

    def summary(self) -> dict[str, float]:
        """Counts of the whole batch for people to read, means over its images.

        `passes_per_image` counts the target's passes with its prefill; `cells_per_pass`
        is the ratio of sums, not the mean of ratios. Newlines are no cells here.
        """
        images, (h, w) = len(self.tokens), self.grammar.picture
        passes = self.target_passes + 1  # the prefill draws too
        mean = lambda x: round(float(jnp.mean(x)), 4)
        return {
            "images": images,
            "cells": h * w,
            "passes_per_image": mean(passes),
            "draft_passes_per_image": mean(self.draft_passes),
            "cells_per_pass": round(images * h * w / float(jnp.sum(passes)), 4),
            "drafted": mean(self.drafted),
            "drawn": mean(self.count(DRAWN)),
            "accepted": mean(self.count(ACCEPTED)),
            "resampled": mean(self.count(RESAMPLED)),
            "bonus": mean(self.count(BONUS)),
        }

    def settle(
        self,
        cells: jax.Array,
        valid: jax.Array,
        tokens: jax.Array,
        origin: int | jax.Array,
    ) -> "Decoded":
        """Makes cells [B, T] final in the current pass, where `valid`.

        Newlines stay as they are.
        """
        b, h, w = self.tokens.shape
        valid = valid & ~self.grammar.forced(cells)
        at = jnp.where(valid, cells, h * w)  # out of range is dropped

        def put(x, value):
            one = lambda x, at, value: x.at[at].set(value, mode="drop")
            value = jnp.broadcast_to(value, at.shape)
            # By vmap: over several devices each then writes its own images.
            return jax.vmap(one)(x.reshape(b, -1), at, value).reshape(b, h, w)

        return replace(
            self,
            tokens=put(self.tokens, tokens),
            final_pass=put(self.final_pass, self.target_passes[:, None]),
            origin=put(self.origin, jnp.asarray(origin, jnp.int8)),
        )

    def judged(self, cells: jax.Array, valid: jax.Array) -> "Decoded":
        """Counts drafts of cells [B, T], where `valid`; newlines are none."""
        drafts = jnp.sum(valid & ~self.grammar.forced(cells), axis=1)
        return replace(self, drafted=self.drafted + drafts)

    def check(self, log_p: jax.Array, valid: jax.Array) -> "Decoded":
        """Notes the current pass if a log-probability [B, T, V] in use is NaN."""
        bad = jnp.any(jnp.isnan(log_p[..., 0]) & valid, axis=1) & (self.bad_pass < 0)
        return replace(self, bad_pass=jnp.where(bad, self.target_passes, self.bad_pass))
