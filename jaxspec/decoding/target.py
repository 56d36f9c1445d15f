"""What a method sees of a model: the distribution of the cell after a given one."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.transformer import Cache, Transformer, unstacked
from jaxspec.sampling import Sampling, guide, log_probs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Target:
    """A conditioned model with its sampling settings; nothing in it changes.

    A method asks `prefill` for the first cell's distribution and a cache that holds the
    condition, then `follow` for the others. It sees log-probabilities of the
    distribution that is sampled from, never logits, guidance or what a cache holds.

    Attributes:
      params: the model's parameters.
      condition: what the images show, batch axis first (see `Transformer.prefix`).
      prefix_visible: bool [B, P], which prefix slots are not padding.
      sampling: how logits become the distribution.
      codes: [V, d] what codes look like, for rules that ask; None if nothing is known.
      model: the static module.
    """

    params: Any
    condition: jax.Array
    prefix_visible: jax.Array
    sampling: Sampling
    codes: jax.Array | None
    model: Transformer = field(metadata={"static": True})

    @staticmethod
    def create(
        model: Transformer,
        params: Any,
        condition: jax.Array,
        sampling: Sampling,
        prefix_visible: jax.Array | None = None,
        codes: jax.Array | None = None,
    ) -> "Target":
        """Copies the layers' weights, unless they are `unstacked` already."""
        params = unstacked(model.config, params)
        condition = jnp.asarray(condition)
        if prefix_visible is None:
            shape = (condition.shape[0], model.config.prefix_length)
            prefix_visible = jnp.ones(shape, bool)
        visible = jnp.asarray(prefix_visible)
        return Target(params, condition, visible, sampling, codes, model)

    @property
    def batch(self) -> int:
        return self.condition.shape[0]

    @property
    def grid(self) -> tuple[int, int]:
        return self.model.config.grid

    def check_draft(self, draft: Any) -> None:
        """Refuses what cannot draft for this target; its grid may be another.

        Raises:
          ValueError: it is no target, or has other codes or another batch.
        """
        if not isinstance(draft, Target):
            raise ValueError(
                f"draft must be a Target of its own, with its condition, not {draft!r}"
            )
        codes = [x.model.config.vocab_size for x in (draft, self)]
        for what, own, wanted in (
            ("number of codes", *codes),
            ("batch of conditions", draft.batch, self.batch),
        ):
            if own != wanted:
                raise ValueError(
                    f"the drafter must have the target's {what}, {wanted}, not {own}"
                )

    @property
    def embeddings(self) -> jax.Array:
        """The model's input embeddings of the codes [V, C]."""
        return self.params["params"]["token_embedding"]

    def _rows(self, x: jax.Array) -> jax.Array:
        """Images [B, ...] to the network's rows: with guidance, each twice."""
        return jnp.repeat(x, self.sampling.rows, axis=0)

    def _apply(self, method: str, *args):
        return self.model.apply(self.params, *args, method=method)

    def _log_probs(self, states: jax.Array, cells: jax.Array) -> jax.Array:
        logits = guide(self._apply("logits", states), cells, self.sampling)
        return log_probs(logits, self.sampling)

    def prefill(self) -> tuple[jax.Array, Cache]:
        """Runs the condition: log-probabilities [B, V] of cell 0, and the cache."""
        config = self.model.config
        condition = self.condition
        if self.sampling.guidance is not None:
            null = self._apply("null", condition)
            condition = jnp.stack([condition, null], axis=1)
            condition = condition.reshape(-1, *self.condition.shape[1:])
        x = self._apply("prefix", condition)
        p = config.prefix_length
        slots = jnp.broadcast_to(jnp.arange(p), x.shape[:2])
        visible = jnp.tril(jnp.ones((1, p, p), bool)) & self.prefix_visible[:, None]
        visible |= jnp.eye(p, dtype=bool)[None]  # a padding row would else see nothing
        visible = jnp.pad(visible, ((0, 0), (0, 0), (0, config.cells)))
        cache = Cache.empty(config, x.shape[0], x.dtype)
        states, cache = self._apply("extend", x, slots, cache, self._rows(visible))
        first = jnp.zeros((self.batch, 1), jnp.int32)
        return self._log_probs(states[:, -1:], first)[:, 0], cache

    def follow(
        self,
        cache: Cache,
        tokens: jax.Array,
        cells: jax.Array,
        write: jax.Array,
        visible: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """One pass: feeds tokens at cells, and says what follows each.

        Args:
          cache: from `prefill` or the pass before.
          tokens: int32 [B, T], what is fed.
          cells: int32 [B, T], where it stands in the grid, raster order.
          write: bool [B, T]; an input that is not written is padding, and what is
            returned for it means nothing.
          visible: bool [B, T, N], which cells each input sees, itself among them. All
            inputs are written before any is read.

        Returns:
          Log-probabilities [B, T, V] of the cell after each, and the cache.
        """
        config = self.model.config
        slots = jnp.where(write, cells + config.prefix_length, config.slots)
        prefix = jnp.broadcast_to(
            self.prefix_visible[:, None],
            (*tokens.shape, config.prefix_length),
        )
        visible = jnp.concatenate([prefix, visible], axis=-1)
        tokens, at, slots, visible = map(self._rows, (tokens, cells, slots, visible))
        x = self._apply("embed", tokens, at)
        states, cache = self._apply("extend", x, slots, cache, visible)
        return self._log_probs(states, cells + 1), cache
