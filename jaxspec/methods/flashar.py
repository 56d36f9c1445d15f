"""FlashAR: an anti-diagonal a pass, by a model with a second head."""

from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxspec.decoding import Decoded, Target, method_class, wavefront
from jaxspec.models.cache import Cache
from jaxspec.models.flashar import Flash, FlashHead
from jaxspec.models.transformer import TransformerConfig, extend_layers
from jaxspec.sampling import Sampling
from jaxspec.sizes import Size

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline


@method_class
class FlashAR:
    """A whole anti-diagonal a pass (FlashAR, 2026, arXiv 2605.09430).

    A trained branch of the model's last layers says what comes below a cell, as the
    model itself says what comes at its right; a gate mixes the two for every cell. The
    cells of an anti-diagonal have all they need once the one before it is drawn, and
    are drawn at once, each on its own: the wavefront engine at window 1.

    Guarantee: biased: it draws from what the head has learned, and the cells of an
    anti-diagonal do not know of one another.
    Passes, prefill included: H + W - 1.

    Attributes:
      head: a `Flash` that was trained with the target. None is for `jaxspec.generate`:
        the family's own.
    """

    head: Flash | None = field(default=None, repr=False, metadata={"arrays": True})

    def fits(self, pipeline: "Pipeline", size: Size) -> None:
        """Raises ValueError if the family has newlines, or no head for that size."""
        pipeline.grammar(size).refuse("FlashAR")
        if self.head is None:
            pipeline.trained("flashar", size)

    def bind(
        self, pipeline: "Pipeline", condition: jax.Array, sampling: Sampling, size: int
    ) -> "FlashAR":
        """With the family's head for that size, where none is given."""
        if self.head is not None:
            return self
        return replace(self, head=pipeline.flash(size))

    def start(self, target: Target, keys: jax.Array) -> wavefront.WavefrontState:
        """Prefills both branches and draws cell 0, of which the model alone tells.

        Raises:
          ValueError: there is no head, or it does not fit the target.
        """
        return wavefront.start(target, keys, prefilled=self._prefilled(target))

    def step(
        self, target: Target, state: wavefront.WavefrontState
    ) -> wavefront.WavefrontState:
        b, n = state.fresh.shape
        most = min(target.grid)
        open_cells = wavefront.ready(state.pending, window=1).reshape(b, n)
        cells, valid = wavefront.first_cells(open_cells, most)
        read = partial(self._follow, target, cells)
        return wavefront.step_at(state, cells, valid, read, most)

    def finished(self, state: wavefront.WavefrontState) -> jax.Array:
        return wavefront.finished(state)

    def decoded(self, state: wavefront.WavefrontState) -> Decoded:
        return state.decoded

    def log_q(self, target: Target, tokens: jax.Array) -> jax.Array | None:
        """Log-probabilities [B, N, V] that the cells of grids [B, H, W] are drawn from.

        One pass. None if a cell sees some that are behind it in raster order: judged in
        that order, it would not be a draw of what is returned.
        """
        flash, _, _ = self._parts(target)
        if not flash.config.causal:
            return None
        first, caches = self._prefilled(target)
        raster = tokens.reshape(len(tokens), -1)
        places = jnp.arange(raster.shape[1])
        cells = jnp.broadcast_to(places[1:], raster[:, 1:].shape)
        everything = jnp.ones_like(raster, bool)
        fed = raster[:, :-1], cells - 1, everything[:, :-1], everything
        rest, _ = self._follow(target, cells, caches, *fed)
        return jnp.concatenate([first[:, None], rest], axis=1)

    def _prefilled(self, target: Target) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Log-probabilities [B, V] of cell 0, and the caches with the condition."""
        flash, target, config = self._parts(target)
        x, slots, visible = target.prefix_inputs()
        caches = tuple(
            Cache.empty(replace(config, depth=depth), x.shape[0], x.dtype)
            for depth in (flash.config.shared, flash.config.depth, flash.config.depth)
        )
        right, _, caches = self._read(target, caches, x, slots, visible, slots)
        first = jnp.zeros((target.batch, 1), jnp.int32)
        return target.log_probs(right[:, -1:], first)[:, 0], caches

    def _parts(self, target: Target) -> tuple[Flash, Target, TransformerConfig]:
        """The head, the target with the weights that go with it, and its shape.

        Raises:
          ValueError: there is no head, or it does not fit the target.
        """
        if not isinstance(self.head, Flash):
            raise ValueError(
                f"head must be a Flash that was trained with the target, not "
                f"{self.head!r}; jaxspec.generate takes the family's own"
            )
        target.grammar.refuse("FlashAR")
        config: Any = target.model.config
        self.head.check(config)
        flash = self.head.unstacked()
        if flash.target is not None:
            target = replace(target, params=flash.target)
        return flash, target, config

    def _read(
        self, target: Target, caches: tuple[Cache, ...], *inputs: jax.Array
    ) -> tuple[jax.Array, jax.Array, tuple[Cache, ...]]:
        """Features [B * rows, T, C] of both branches, right and down, and the caches.

        Takes inputs, slots, visible and places, as `Target.inputs` makes them.
        """
        flash, target, config = self._parts(target)
        (low, own, branch), (x, slots, visible, places) = caches, inputs
        layers = target.params["params"]["layers"]
        below, above = layers[: flash.config.shared], layers[flash.config.shared :]
        x, low = extend_layers(config, below, x, slots, low, visible, places)
        right, own = extend_layers(config, above, x, slots, own, visible, places)
        features: Any = target.model.apply(target.params, right, method="features")
        head = FlashHead(flash.config)
        more = config, x, slots, branch, visible, places
        down: Any = head.apply(flash.params, *more, method="extend")
        return features, down[0], (low, own, down[1])

    def _follow(
        self,
        target: Target,
        cells: jax.Array,
        caches: tuple[Cache, ...],
        tokens: jax.Array,
        fed: jax.Array,
        write: jax.Array,
        fresh: jax.Array,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Log-probabilities [B, F, V] of cells, once those before them are fed."""
        flash, target, _ = self._parts(target)
        w, raster = target.grid[1], jnp.arange(fresh.shape[1])[None, None]
        diagonal = lambda cell: cell // w + cell % w
        seen = fresh[:, None] & (diagonal(raster) <= diagonal(fed)[..., None])
        if flash.config.causal:
            seen &= raster <= fed[..., None]
        inputs = target.inputs(tokens, fed, write, seen)
        right, down, caches = self._read(target, caches, *inputs)
        right = _of(right, target.rows(fed), target.rows(cells - 1))
        down = _of(down, target.rows(fed), target.rows(cells - w))
        read_out: Any = target.model.apply(target.params, right, method="read_out")
        joint = right, read_out, down, target.rows(cells)
        head = FlashHead(flash.config)
        logits: Any = head.apply(flash.params, *joint, method="logits")
        return target.distribution(logits, cells), caches


def _of(x: jax.Array, fed: jax.Array, wanted: jax.Array) -> jax.Array:
    """Of x [B, T, C], about cells fed [B, T], the rows that are about wanted [B, F].

    Any row for a cell that was not fed.
    """
    place = jnp.argmax(fed[:, None] == wanted[..., None], axis=-1)
    return jnp.take_along_axis(x, place[..., None], axis=1)
