"""What a method sees of a model: the distribution of the cell after a given one."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.decoding.grammar import ImageGrammar
from jaxspec.models.cache import Cache
from jaxspec.models.chameleon import ChameleonGrid
from jaxspec.models.lpd import LPDNet
from jaxspec.models.transformer import Transformer
from jaxspec.sampling import Sampling, guide, log_probs
from jaxspec.sharding import mesh_of


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
      null: the condition and visible prefix slots that guidance compares with, where
        they are the image's own and not the model's `null`; of the same shapes.
      mesh: what the parameters are split over; None if they are not.
    """

    params: Any
    condition: jax.Array
    prefix_visible: jax.Array
    sampling: Sampling
    codes: jax.Array | None
    model: Transformer | ChameleonGrid | LPDNet = field(metadata={"static": True})
    null: tuple[jax.Array, jax.Array] | None = None
    mesh: Mesh | None = field(default=None, metadata={"static": True})

    @staticmethod
    def create(
        model: Transformer | ChameleonGrid | LPDNet,
        params: Any,
        condition: jax.Array,
        sampling: Sampling,
        prefix_visible: jax.Array | None = None,
        codes: jax.Array | None = None,
        null: tuple[jax.Array, jax.Array] | None = None,
    ) -> "Target":
        """Copies the layers' weights, unless they are `prepared` already."""
        params = model.prepared(params)
        condition = jnp.asarray(condition)
        if prefix_visible is None:
            shape = (condition.shape[0], model.config.prefix_length)
            prefix_visible = jnp.ones(shape, bool)
        visible = jnp.asarray(prefix_visible)
        mesh = mesh_of(params)
        return Target(params, condition, visible, sampling, codes, model, null, mesh)

    @property
    def batch(self) -> int:
        return self.condition.shape[0]

    @property
    def grid(self) -> tuple[int, int]:
        return self.model.config.grid

    @property
    def grammar(self) -> ImageGrammar:
        """Which cells are newlines."""
        return ImageGrammar.of(self.model.config)

    def check_draft(self, draft: Any) -> None:
        """Refuses what cannot draft for this target; its grid may be another.

        Raises:
          ValueError: it is no target, or has other codes, newlines where there are
            none or none where there are, or another batch.
        """
        if not isinstance(draft, Target):
            raise ValueError(
                f"draft must be a Target of its own, with its condition, not {draft!r}"
            )
        codes = [x.model.config.vocab_size for x in (draft, self)]
        newlines = [x.grammar.newline for x in (draft, self)]
        for what, own, wanted in (
            ("number of codes", *codes),
            ("newline code", *newlines),
            ("batch of conditions", draft.batch, self.batch),
        ):
            if own != wanted:
                raise ValueError(
                    f"the drafter must have the target's {what}, {wanted}, not {own}"
                )

    def check_companion(self, draft: Any) -> None:
        """`check_draft`, for a drafter that is to have the target's grid.

        Raises:
          ValueError: also where it has another.
        """
        self.check_draft(draft)
        if draft.grid != self.grid:
            raise ValueError(
                f"the drafter must have the target's grid, {self.grid}, not "
                f"{draft.grid}"
            )

    @property
    def embeddings(self) -> jax.Array:
        """The model's input embeddings of the codes [V, C]."""
        return self.params["params"]["token_embedding"]

    def rows(self, x: jax.Array) -> jax.Array:
        """Images [B, ...] to the network's rows: with guidance, each twice."""
        return jnp.repeat(x, self.sampling.rows, axis=0)

    def of_images(self, pick: Callable[[jax.Array], jax.Array]) -> "Target":
        """The target of other images: all that is one for each goes through `pick`."""
        own = self.condition, self.prefix_visible, self.null
        condition, visible, null = jax.tree.map(pick, own)
        return replace(self, condition=condition, prefix_visible=visible, null=null)

    def _prefix_rows(self) -> jax.Array:
        """Which prefix slots the network's rows see [B * rows, P]."""
        if self.sampling.guidance is None or self.null is None:
            return self.rows(self.prefix_visible)
        return _neighbours(self.prefix_visible, self.null[1])

    def _apply(self, method: str, *args) -> Any:
        return self.model.apply(self.params, *args, method=method)

    def log_probs(self, features: jax.Array, cells: jax.Array) -> jax.Array:
        """Log-probabilities [B, T, V] of cells [B, T], as they are sampled from.

        `features` [B * rows, T, C] are of what stands before them, as `read` returns
        them; with guidance an image has two rows, else one.
        """
        return self.distribution(self._apply("read_out", features), cells)

    def distribution(self, logits: jax.Array, cells: jax.Array) -> jax.Array:
        """`log_probs` of logits [B * rows, T, V], whatever made them."""
        guided = guide(logits, cells, self.sampling)
        return log_probs(self.grammar.allowed(guided, cells), self.sampling)

    def prefix_rows(self) -> tuple[jax.Array, jax.Array]:
        """Condition and visible slots [B * rows, P] of the network's rows."""
        condition = self.condition
        if self.sampling.guidance is not None:
            null = self.null[0] if self.null else self._apply("null", condition)
            condition = _neighbours(condition, null)
        return condition, self._prefix_rows()

    def prefix_inputs(self, scratch: int = 0) -> tuple[jax.Array, ...]:
        """The condition as `Transformer.extend` takes it: inputs, slots, visible.

        Of B * rows rows and P slots; with `scratch` slots more than cells to be seen.
        """
        config = self.model.config
        condition, seen = self.prefix_rows()
        x = self._apply("prefix", condition)
        p = config.prefix_length
        slots = jnp.broadcast_to(jnp.arange(p), x.shape[:2])
        visible = jnp.tril(jnp.ones((1, p, p), bool)) & seen[:, None]
        visible |= jnp.eye(p, dtype=bool)[None]  # a padding row would else see nothing
        visible = jnp.pad(visible, ((0, 0), (0, 0), (0, config.cells + scratch)))
        return x, slots, visible

    def read_prefix(self, scratch: int = 0) -> tuple[jax.Array, Cache]:
        """Runs the condition: features [B * rows, P, C] of its slots, and the cache.

        The cache has `scratch` slots more than cells, for `read` to write.

        Raises:
          ValueError: the model does not say what follows a cell.
        """
        if isinstance(self.model, LPDNet):
            raise ValueError(
                "LPD's model draws the cells that it is asked for, not those that "
                "follow others: decode with jaxspec.LPD()"
            )
        x, slots, visible = self.prefix_inputs(scratch)
        cache = Cache.empty(self.model.config, x.shape[0], x.dtype, scratch)
        states, cache = self._apply("extend", x, slots, cache, visible)
        return self._apply("features", states), cache

    def prefill(self) -> tuple[jax.Array, Cache]:
        """Runs the condition: log-probabilities [B, V] of cell 0, and the cache."""
        features, cache = self.read_prefix()
        first = jnp.zeros((self.batch, 1), jnp.int32)
        return self.log_probs(features[:, -1:], first)[:, 0], cache

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
        features, cache = self.read(cache, tokens, cells, write, visible)
        return self.log_probs(features, cells + 1), cache

    def read(
        self,
        cache: Cache,
        tokens: jax.Array,
        cells: jax.Array,
        write: jax.Array,
        visible: jax.Array,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """The pass of `follow`, up to what the head reads.

        Args:
          cache, tokens, cells, write: as for `follow`.
          visible: bool [B, T, N + scratch], which slots each input sees.
          slots: int32 [B, T], where each is written: at its cell, or at N or more, a
            scratch slot. So several tokens can stand at one cell.

        Returns:
          Features [B * rows, T, C] of the inputs, and the cache.
        """
        x, slots, visible, places = self.inputs(tokens, cells, write, visible, slots)
        states, cache = self._apply("extend", x, slots, cache, visible, places)
        return self._apply("features", states), cache

    def inputs(
        self,
        tokens: jax.Array,
        cells: jax.Array,
        write: jax.Array,
        visible: jax.Array,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """What `read` feeds, as `Transformer.extend` takes it.

        Takes what `read` does; returns inputs, slots, visible and places, of B * rows
        rows.
        """
        p = self.model.config.prefix_length
        last = p + visible.shape[-1]  # this slot and those after it are not written
        slots = jnp.where(write, p + (cells if slots is None else slots), last)
        tokens, at, slots, visible = map(self.rows, (tokens, cells, slots, visible))
        prefix = jnp.broadcast_to(self._prefix_rows()[:, None], (*tokens.shape, p))
        visible = jnp.concatenate([prefix, visible], axis=-1)
        return self._apply("embed", tokens, at), slots, visible, at + p

    def keep(
        self, cache: Cache, slots: jax.Array, cells: jax.Array, valid: jax.Array
    ) -> Cache:
        """The cache, with what is in slots [B, T] at cells too, where `valid`."""
        p = self.model.config.prefix_length
        to = jnp.where(valid, p + cells, cache.slots)
        return cache.copied(self.rows(p + slots), self.rows(to))


def _neighbours(a: jax.Array, b: jax.Array) -> jax.Array:
    """Rows of a and b [B, ...] in turn: [2 B, ...]."""
    return jnp.stack([a, b], axis=1).reshape(-1, *a.shape[1:])


def targets_in(tree: Any) -> list[Target]:
    """The targets in a tree, such as the drafters of a method, its own first."""
    is_target = lambda x: isinstance(x, Target)
    return [x for x in jax.tree.leaves(tree, is_leaf=is_target) if is_target(x)]


def map_targets(change: Callable[[Target], Any], tree: Any) -> Any:
    """The same tree, such as a method, with `change` applied to the targets in it."""
    is_target = lambda x: isinstance(x, Target)
    return jax.tree.map(
        lambda x: change(x) if is_target(x) else x, tree, is_leaf=is_target
    )
