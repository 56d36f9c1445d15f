"""LPD: groups of cells that are near what is drawn and far from one another."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding import Decoded, Target, method_class, wavefront
from jaxspec.decoding.orders import group_sizes, lpd_order
from jaxspec.decoding.wavefront import WavefrontState
from jaxspec.models.cache import Cache
from jaxspec.models.lpd import LPDConfig, LPDNet
from jaxspec.sampling import ORDER, Sampling, cell_keys
from jaxspec.sizes import Size

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LPDState:
    """The wave, and the order [B, N] in which it goes over the cells."""

    wave: WavefrontState
    order: jax.Array


@method_class
class LPD:
    """Locality-aware parallel decoding (LPD, 2025, arXiv 2507.01957).

    A model of its own draws any cells that it is asked for. Groups of cells are drawn
    at once, each cell on its own: those with the most drawn around them, far from one
    another, fewest first. The wavefront engine, with a given order in place of
    readiness.

    Guarantee: biased: it draws from a model of its own, and the cells of a group do not
    know of one another.
    Passes, prefill included: `steps`.

    Attributes:
      model: a `Target` whose model is an `LPDNet`. None is for `jaxspec.generate`: the
        family's own; or for a target that is one itself.
      steps: groups; how large they are follows (see `orders.group_sizes`).
      sizes: of the groups, in place of that; together all cells.
      repulsion: rows and columns that the cells of a group keep apart, if they can.
      ramp: guidance grows with the cells that are drawn, as published; else it is the
        same for all.
      order: int32 [B, N], the cells in the order in which they are drawn; by default
        each picture's own, by its key (see `orders.lpd_order`).
    """

    model: Target | None = field(default=None, repr=False, metadata={"arrays": True})
    steps: int = 20
    sizes: tuple[int, ...] | None = field(default=None, repr=False)
    repulsion: int = 2
    ramp: bool = True
    order: jax.Array | None = field(default=None, repr=False, metadata={"arrays": True})

    def __post_init__(self):
        for name, least in (("steps", 1), ("repulsion", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} must be {least} or more, not {getattr(self, name)}"
                )

    def fits(self, pipeline: "Pipeline", size: Size) -> None:
        """Raises ValueError if the family has newlines, no model, or other groups."""
        pipeline.grammar(size).refuse("LPD")
        if self.model is None:
            self._sizes(pipeline.trained("lpd", size)[1])

    def bind(
        self, pipeline: "Pipeline", condition: jax.Array, sampling: Sampling, size: int
    ) -> "LPD":
        """With the family's model for that size, where none is given."""
        if self.model is not None:
            return self
        return replace(self, model=pipeline.lpd(condition, sampling, size))

    def start(self, target: Target, keys: jax.Array) -> LPDState:
        """Draws the first group, asked for with the condition.

        Raises:
          ValueError: there is no model, it does not fit the target, or its grid has
            fewer cells than steps.
        """
        model, config = self._model(target)
        b, n, sizes = target.batch, config.cells, self._sizes(config)
        order = self.order
        if order is None:
            own = cell_keys(keys, jnp.zeros((b, 1), jnp.int32), ORDER)[:, 0]
            order = jax.vmap(
                lambda key: lpd_order(key, config.grid, sizes, self.repulsion)
            )(own)
        elif order.shape != (b, n):
            raise ValueError(f"order must be {[b, n]}, not {list(order.shape)}")
        first, most = sizes[0], max(sizes)
        prefix = model.prefix_inputs(most)
        cache = Cache.empty(config, len(prefix[0]), prefix[0].dtype, most)
        state = WavefrontState(
            cache=cache,
            keys=keys,
            pending=jnp.ones((b, *config.grid), bool),
            fresh=jnp.zeros((b, n), bool),
            decoded=Decoded.empty(b, config.grid),
        )
        group = order[:, :first], jnp.ones((b, first), bool)
        read = partial(self._asked, model, *group, jnp.zeros(b, jnp.int32), prefix)
        wave = wavefront.step_at(state, *group, read, 0)
        # This was the prefill.
        decoded = replace(
            wave.decoded,
            target_passes=jnp.zeros_like(wave.decoded.target_passes),
            final_pass=jnp.minimum(wave.decoded.final_pass, 0),
            bad_pass=jnp.minimum(wave.decoded.bad_pass, 0),
        )
        return LPDState(replace(wave, decoded=decoded), order)

    def step(self, target: Target, state: LPDState) -> LPDState:
        model, config = self._model(target)
        sizes = np.array(self._sizes(config))
        ends = np.cumsum(sizes)
        number = state.wave.decoded.target_passes + 1  # of the group
        begin = jnp.asarray(np.append(ends - sizes, config.cells))[number]
        end = jnp.asarray(np.append(ends, config.cells))[number]
        places = begin[:, None] + jnp.arange(sizes.max())[None]
        valid = places < end[:, None]
        places = jnp.minimum(places, config.cells - 1)
        cells = jnp.take_along_axis(state.order, places, axis=1)
        read = partial(self._asked, model, cells, valid, begin, None)
        most = int(sizes.max())
        return replace(
            state, wave=wavefront.step_at(state.wave, cells, valid, read, most)
        )

    def finished(self, state: LPDState) -> jax.Array:
        return wavefront.finished(state.wave)

    def decoded(self, state: LPDState) -> Decoded:
        return state.wave.decoded

    def _sizes(self, config: LPDConfig) -> tuple[int, ...]:
        """Of the groups; raises ValueError if these are not all cells."""
        if self.sizes is None:
            return group_sizes(config.cells, self.steps)
        if min(self.sizes, default=0) < 1 or sum(self.sizes) != config.cells:
            raise ValueError(
                f"sizes must add up to the {config.cells} cells, not "
                f"{sum(self.sizes)}, and be 1 or more"
            )
        return self.sizes

    def _model(self, target: Target) -> tuple[Target, LPDConfig]:
        """What draws, with its settings; raises ValueError if it cannot."""
        model = target if self.model is None else self.model
        if not isinstance(model, Target) or not isinstance(model.model, LPDNet):
            raise ValueError(
                "model must be a Target of an LPDNet: jaxspec.generate takes the "
                "family's own"
            )
        target.grammar.refuse("LPD")
        target.check_companion(model)
        config = model.model.config
        if self.ramp and model.sampling.guidance is not None:
            sampling = replace(model.sampling, ramp_cells=config.cells)
            model = replace(model, sampling=sampling)
        return model, config

    def _asked(
        self,
        model: Target,
        cells: jax.Array,
        valid: jax.Array,
        begin: jax.Array,
        prefix: tuple[jax.Array, ...] | None,
        cache: Cache,
        tokens: jax.Array,
        fed: jax.Array,
        write: jax.Array,
        fresh: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Feeds tokens, asks for cells [B, F] where `valid`; their log-probabilities.

        Queries are written to scratch slots, which the next pass writes over. `begin`
        [B] is how many cells are drawn already; with `prefix`, the condition is fed
        too.
        """
        (b, f), n = cells.shape, fresh.shape[1]
        config: Any = model.model.config
        scratch = cache.slots - config.slots
        query = jnp.full_like(cells, config.query)
        mine = jnp.pad(valid, ((0, 0), (0, scratch - f)))
        seen = jnp.concatenate([fresh, jnp.zeros_like(mine)], axis=1)
        asked = jnp.concatenate([fresh, mine], axis=1)
        visible = jnp.concatenate(
            [
                jnp.broadcast_to(x[:, None], (b, t, x.shape[1]))
                for x, t in ((seen, fed.shape[1]), (asked, f))
            ],
            axis=1,
        )
        join = lambda *x: jnp.concatenate(x, axis=1)
        scratch_slots = jnp.broadcast_to(n + jnp.arange(f), (b, f))
        x, slots, visible, _ = model.inputs(
            join(tokens, query),
            join(fed, cells),
            join(write, valid),
            visible,
            join(fed, scratch_slots),
        )
        if prefix is not None:
            x, slots, visible = map(join, prefix, (x, slots, visible))
        run: Any = model.model.apply
        states, cache = run(model.params, x, slots, cache, visible, method="extend")
        features = run(model.params, states[:, -f:], method="features")
        order = begin[:, None] + jnp.arange(f)[None]
        return model.log_probs(features, order), cache
