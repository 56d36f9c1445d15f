"""MuLo-SD: multi-scale local speculative decoding."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.acceptance import Rule, at, check_rule
from jaxspec.decoding import (
    Decoded,
    Method,
    Target,
    blocks,
    check_fits,
    decode,
    jacobi,
    method_class,
    wavefront,
)
from jaxspec.decoding.blocks import Block, First
from jaxspec.decoding.first import draw_first
from jaxspec.decoding.islands import Clip, Expand, expand, label
from jaxspec.decoding.wavefront import WavefrontState
from jaxspec.methods.upsampled import (
    bound_drafter,
    bound_upsampler,
    check_drafter,
    check_drafts,
    draft_keys,
    rescaled,
    with_draft,
)
from jaxspec.methods.zipar import ZipAR
from jaxspec.neighbours import (
    check_count,
    check_table,
    nearest_codes,
    neighbour_table,
)
from jaxspec.sampling import ACCEPT, Sampling, cell_keys, uniform
from jaxspec.sizes import Size
from jaxspec.upsampling import Name, Upsampler, named

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline

Test = Literal["threshold", "chance"]
Order = Literal["islands", "rows", "raster"]
Context = Literal["masked", "stale"]
Refresh = Literal["none", "before", "after"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MuLoState:
    """What is known once a draft is verified, and the cells drawn again since.

    Attributes:
      wave: the target's side.
      low: int32 [B, h, w], the draft as the drafter drew it.
      drafts: int32 [B, H, W], the draft on the target's grid.
      islands: int32 [B, H, W], the number of each cell's island; None if the order does
        not ask.
      done: int32 [B], rows of the drafter that are verified.
      drafter: its side, if it draws rows in turn; else None.
    """

    wave: WavefrontState
    low: jax.Array
    drafts: jax.Array
    islands: jax.Array | None
    done: jax.Array
    drafter: WavefrontState | None


@method_class
class MuLo:
    """Multi-scale local speculative decoding (Peruzzo et al. 2026, arXiv 2601.05149v2).

    A drafter of a smaller grid draws the whole picture. Its codes, enlarged to the
    target's grid, are the drafts of all cells, and one pass of the target verifies
    them: a draft is kept if the target gives its `neighbours` nearest codes together at
    least `threshold`. The cells around a reject are rejected with it. What results,
    islands in a sea of kept drafts, the target draws again, all islands at once.
    Defaults are measured, on grids of up to 32 x 32 cells (docs/methods.md);
    `MuLo.paper()` has the paper's.

    Cells come to be accepted (kept drafts), resampled (drawn in place of rejects) or
    drawn (in place of drafts that were kept but lay near a reject).

    Guarantee: biased: kept drafts are not draws of the target, and a cell that is drawn
    again does not see all cells before it. With a threshold above 1 all cells are, as
    by `ZipAR(window)`, which is exact where the window is a whole row.

    Attributes:
      draft: the drafter: a `Target` of its own, conditioned on the same images, with
        the same codes and a grid that divides the target's, or a smaller one of its
        shape; or for `generate` the size in pixels of a model of the family, by default
        the next smaller one.
      upsampler: `(codes [B, h, w], grid) -> codes [B, H, W]`, or the name of one of
        `jaxspec.upsampling`: through pixels, by networks that the family has for it
        ("latents"), or by copies ("nearest").
      draft_method: how the drafter decodes: any method, also another MuLo with a yet
        smaller drafter.
      rows: of the drafter's grid, those that are drafted and verified in a round, with
        what became of the rows above in view, as in the paper's version 1; by default
        the whole picture at once, as in version 2. Only AR and ZipAR draft rows.
      downsampler: makes the drafter's rows of the target's, by default the upsampler.
      threshold: least mass that keeps a draft. A change compiles nothing.
      neighbours: codes that are pooled, the draft among them; 1 is no pooling.
      rule: "pooled", or a rule of `jaxspec.acceptance` in its place. It is told that
        the draft was chosen, so that `Ratio()` is the target's probability of it, and
        `Grouped(...)` that of GSD's group.
      relative: the threshold is a share of the highest probability that the target
        gives any code there: strict where it is sure, lenient where it is not.
      test: a draft is kept if its mass reaches the threshold, as in the paper, or by
        chance, with the mass as probability.
      radius: rows and columns around a reject that are rejected with it.
      expand: the cells around are a square, or only those of it that come after the
        reject in raster order ("forward"); "raster" is all after the first reject, as
        if there were no locality.
      clip: no cell before the first reject is rejected with it, or any may be
        ("block").
      window: as for `ZipAR`, inside an island.
      order: all islands at once; "rows" is one wave over all of them, in which a cell
        waits for other islands too; "raster" is one cell a pass (the paper's version
        1).
      context: cells not yet drawn again are masked, or their rejected drafts stay
        visible, and stand where a token is wanted, until then ("stale").
      refresh: kept drafts are seen as the verification left them, when rejects were
        still in view; or fed once more without those, in a pass "before" cells are
        drawn again; or, where there are rounds, fed again with the drafts of the next
        one ("after"), which takes no pass.
      frontier: most cells drawn in a pass; fewer take more passes. By default twice as
        many as ZipAR draws, which is as fast as any number on grids of random rejects.
      rows_at_once: rows that are verified in a pass, where memory asks for more passes
        than one.
      table: the codes [V, neighbours] that are pooled, by default the nearest in
        `Target.codes` by squared L2.
    """

    draft: Target | int | None = field(
        default=None, repr=False, metadata={"arrays": True}
    )
    upsampler: Upsampler | Name = field(default="pixels", metadata={"arrays": True})
    draft_method: Method = field(default=ZipAR(4), metadata={"arrays": True})
    rows: int | None = None
    downsampler: Upsampler | Name | None = field(
        default=None, metadata={"arrays": True}
    )
    threshold: float = field(default=0.05, metadata={"arrays": True})
    neighbours: int = 16
    rule: Literal["pooled"] | Rule = "pooled"
    relative: bool = False
    test: Test = "threshold"
    radius: int = 1
    expand: Expand = "square"
    clip: Clip = "first"
    window: int = 4
    order: Order = "islands"
    context: Context = "masked"
    refresh: Refresh = "none"
    frontier: int | None = None
    rows_at_once: int | None = None
    table: jax.Array | None = field(default=None, repr=False, metadata={"arrays": True})

    @staticmethod
    def paper(**knobs: Any) -> "MuLo":
        """The paper's radius, and ZipAR with its published window."""
        own: dict[str, Any] = {"draft_method": ZipAR(16), "radius": 3, "window": 16}
        return MuLo(**own | knobs)

    def __post_init__(self):
        for name, choices in (
            ("test", Test),
            ("expand", Expand),
            ("clip", Clip),
            ("order", Order),
            ("context", Context),
            ("refresh", Refresh),
        ):
            value, known = getattr(self, name), get_args(choices)
            if value not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, not {value!r}")
        for name, least in (
            ("neighbours", 1),
            ("radius", 0),
            ("window", 1),
            ("frontier", 1),
            ("rows_at_once", 1),
            ("rows", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be {least} or more, not {value}")
        if self.refresh == "after" and self.rows is None:
            raise ValueError('refresh="after" is for rounds: give rows, or another')
        if isinstance(self.threshold, int | float | np.generic):  # not inside jit
            if not self.threshold >= 0:
                raise ValueError(f"threshold must be 0 or more, not {self.threshold}")
            # Another type would be another program.
            object.__setattr__(self, "threshold", float(self.threshold))
        if self.rule != "pooled":
            check_rule(self.rule)
        for name in ("upsampler", "downsampler"):
            given = named(getattr(self, name))
            object.__setattr__(self, name, given)
            if callable(given) and jax.tree_util.all_leaves([given]):
                # A plain function, which jit would not take.
                object.__setattr__(self, name, jax.tree_util.Partial(given))

    def fits(self, pipeline: "Pipeline", size: Size) -> None:
        """Raises ValueError if the family has no drafter or upsampler for that size."""
        check_drafts(self.draft, self.draft_method, pipeline, size)
        for scaler in (self.upsampler, self.downsampler):
            check_fits(scaler, pipeline, size)
        codes = dict(pipeline.config.decoders)[size].vocab_size
        if self._pools and self.table is None:
            check_count(self.neighbours, codes)
        elif self._pools:
            check_table(self._given(codes), codes, own=True)

    def bind(
        self, pipeline: "Pipeline", condition: Any, sampling: Sampling, size: Size
    ) -> "MuLo":
        """With the family's drafter, tokenizer and codebook, where none is given.

        The drafter has the same conditions and settings as the target of `size`.
        """
        draft, draft_method = bound_drafter(
            self.draft, self.draft_method, pipeline, condition, sampling, size
        )
        table, scalers = self.table, (self.upsampler, self.downsampler)
        up, down = (bound_upsampler(x, pipeline) for x in scalers)
        if self._pools and table is None and draft.codes is not None:
            table = neighbour_table(draft.codes, self.neighbours)
        return replace(
            self,
            draft=draft,
            draft_method=draft_method,
            upsampler=up,
            downsampler=down,
            table=table,
        )

    @property
    def _pools(self) -> bool:
        return self.rule == "pooled" and self.neighbours > 1

    def start(self, target: Target, keys: jax.Array) -> MuLoState:
        """Draws the draft, verifies it, and says which cells are to be drawn again.

        With `rows`, all this of the first of them.

        Raises:
          ValueError: drafter, upsampler or table do not fit the target, or rows are
            drafted by a method that cannot.
        """
        state, first = self.prefilled(target, keys)
        everyone = jnp.ones(target.batch, bool)
        state = self.drafted(target, state, everyone, revise=False)
        return self.verified(target, state, everyone, first)

    def step(self, target: Target, state: MuLoState) -> MuLoState:
        """A pass of the target, and before it a round of the images that are due."""
        if self.rows is not None:
            due = self.due(state)
            round_of = lambda s: self.verified(
                target, self.drafted(target, s, due), due
            )
            state = jax.lax.cond(jnp.any(due), round_of, lambda s: s, state)
        return self.resampled(target, state)

    def finished(self, state: MuLoState) -> jax.Array:
        verified = state.done >= state.low.shape[1]
        return wavefront.finished(state.wave) & verified

    def decoded(self, state: MuLoState) -> Decoded:
        return replace(state.wave.decoded, drafts=state.drafts)

    # The stages, of which `start` and `step` are made.

    def prefilled(self, target: Target, keys: jax.Array) -> tuple[MuLoState, First]:
        """The state with nothing drafted yet, and what the first cell is drawn from."""
        draft, b = check_drafter(target, self.draft), target.batch
        if self.rows is not None and target.grid[0] % draft.grid[0]:
            raise ValueError(
                f"rounds of rows need a drafter whose rows divide the target's, "
                f"{target.grid[0]}, and it has {draft.grid[0]}: leave rows out"
            )
        token, log_p, cache, decoded = draw_first(target, keys)
        none = jnp.zeros((b, *target.grid), bool)
        drafter: Any = None
        if self.rows is not None:
            drafter = self.draft_method.start(draft, draft_keys(keys))
            if not isinstance(drafter, WavefrontState):
                name = type(self.draft_method).__name__
                raise ValueError(f"rows are drafted by AR or ZipAR, not by {name}")
        state = MuLoState(
            wave=WavefrontState(cache, keys, none, none.reshape(b, -1), decoded),
            low=jnp.zeros((b, *draft.grid), jnp.int32),
            drafts=decoded.tokens,
            islands=jnp.full(none.shape, -1) if self.order == "islands" else None,
            done=jnp.zeros(b, jnp.int32),
            drafter=drafter,
        )
        return state, (token, log_p)

    def due(self, state: MuLoState) -> jax.Array:
        """Which images [B] have rows left, and nothing to be drawn before them."""
        return wavefront.finished(state.wave) & ~self.finished(state)

    def drafted(
        self,
        target: Target,
        state: MuLoState,
        images: jax.Array,
        *,
        revise: bool = True,
    ) -> MuLoState:
        """The next rows of some images [B], or all, as the drafter draws them.

        With `revise` it is told before what became of the rows above.
        """
        draft, drafter = check_drafter(target, self.draft), state.drafter
        if drafter is None:
            keys = draft_keys(state.wave.keys)
            return _with_draft(state, decode(self.draft_method, draft, keys))
        if revise:
            drafter = self._revised(target, state, drafter, images)
        row, done = jnp.arange(draft.grid[0])[None], state.done[:, None]
        new = (row >= done) & (row < done + self._rows(draft.grid[0]))
        pending = (new & images[:, None])[..., None]
        pending &= drafter.decoded.final_pass < 0  # the first cell is drawn already
        drafter = jax.lax.while_loop(
            lambda s: ~jnp.all(wavefront.finished(s)),
            lambda s: self.draft_method.step(draft, s),
            replace(drafter, pending=pending),
        )
        return _with_draft(replace(state, drafter=drafter), drafter.decoded)

    def verified(
        self,
        target: Target,
        state: MuLoState,
        images: jax.Array,
        first: First | None = None,
    ) -> MuLoState:
        """Verifies the rows drafted last; what is to be drawn again is then pending.

        `first` is None if the first cell's round was before.
        """
        draft, grid = check_drafter(target, self.draft), target.grid
        rows = self._rows(low_h := draft.grid[0])
        block = Block.create(
            images,
            state.done * grid[0] // low_h,
            rows * grid[0] // low_h,
            grid,
            self.rows_at_once,
        )
        inside = block.mask.reshape(-1, *grid)
        drafts = rescaled(self.upsampler, state.low, draft, target, state.done + rows)
        drafts = jnp.where(inside, drafts, state.drafts)

        tokens = jnp.where(inside, drafts, state.wave.decoded.tokens)
        wave = replace(state.wave, decoded=replace(state.wave.decoded, tokens=tokens))
        wave, kept = blocks.judge(
            target,
            wave,
            block,
            partial(self._keeps, target, state.wave.keys, self._pool(target)),
            first=first,
            most_late=self.most_at_once(target.grammar.picture),
            again=self.refresh == "after",
        )
        rejected = inside & ~kept.reshape(inside.shape)
        redrawn = expand(rejected, self.radius, self.expand, self.clip) & inside
        redrawn &= ~target.grammar.mask[None]
        wave = blocks.settle(wave, block, rejected, redrawn, first)
        if self.refresh == "before":
            wave = blocks.refresh(target, wave, block)
        islands = state.islands
        if islands is not None:
            islands = jnp.where(inside, label(wave.pending & inside), islands)
        done = jnp.where(images, jnp.minimum(state.done + rows, low_h), state.done)
        return replace(state, wave=wave, drafts=drafts, islands=islands, done=done)

    def resampled(self, target: Target, state: MuLoState) -> MuLoState:
        """One pass of the target, in which cells of all images are drawn again."""
        w, frontier = target.grid[1], self.most_at_once(target.grammar.picture)
        wave = wavefront.step(
            target,
            state.wave,
            window=w if self.order == "raster" else min(self.window, w),
            frontier=frontier,
            riders=frontier,  # each cell drawn may be the last of its run
            see_drafts=self.context == "stale",
            islands=state.islands,
        )
        return replace(state, wave=wave)

    def _rows(self, h: int) -> int:
        """Of the drafter's h rows, those in a round."""
        return min(self.rows or h, h)

    def _revised(
        self,
        target: Target,
        state: MuLoState,
        drafter: WavefrontState,
        images: jax.Array,
    ) -> WavefrontState:
        """The drafter, with what became of its rows, made small, in their place."""
        draft = check_drafter(target, self.draft)
        (h, w), b = draft.grid, draft.batch
        known = state.done * (target.grid[0] // h)
        scaler, drawn = self.downsampler or self.upsampler, state.wave.decoded.tokens
        small = rescaled(scaler, drawn, target, draft, known)
        fed = (jnp.arange(h * w)[None] < state.done[:, None] * w) & images[:, None]
        tokens = drafter.decoded.tokens.reshape(b, h * w)
        tokens = jnp.where(fed, small.reshape(b, h * w), tokens)
        whole = Block.create(images, jnp.zeros_like(state.done), h, draft.grid)
        cache, _ = blocks.sweep(draft, drafter.cache, tokens, fed, whole)
        passes = drafter.decoded.target_passes + images
        decoded = replace(
            drafter.decoded, tokens=tokens.reshape(b, h, w), target_passes=passes
        )
        fresh = drafter.fresh | fed
        return replace(drafter, cache=cache, decoded=decoded, fresh=fresh)

    # What is kept.

    def _keeps(
        self,
        target: Target,
        keys: jax.Array,
        table: jax.Array | None,
        cells: jax.Array,
        log_p: jax.Array,
        drafts: jax.Array,
    ) -> jax.Array:
        """Which drafts [B, T] at cells [B, T] pass their test."""
        codes = log_p.shape[-1]
        is_code = (drafts >= 0) & (drafts < codes)
        drafts = jnp.clip(drafts, 0, codes - 1)
        if callable(self.rule):
            log_q = jacobi.one_hot(drafts, codes)
            mass = self.rule(log_p, log_q, drafts, target.codes)
        elif table is not None:
            mass = jnp.sum(jnp.exp(at(log_p, table[drafts])), axis=-1)
        else:
            mass = jnp.exp(at(log_p, drafts))
        if self.relative:
            mass /= jnp.exp(jnp.max(log_p, axis=-1))
        if self.test == "threshold":
            return is_code & (mass >= self.threshold)
        return is_code & (uniform(cell_keys(keys, cells, ACCEPT)) < mass)

    def _pool(self, target: Target) -> jax.Array | None:
        """The codes [V, neighbours] that are pooled; None if each stands alone."""
        if not self._pools:
            return None
        if self.table is None and target.codes is None:
            raise ValueError(
                "MuLo pools the nearest codes, and the target has no codes: create it "
                "with codes=..., give a table, or use neighbours=1"
            )
        if self.table is None:
            return nearest_codes(target.codes, self.neighbours)
        return self._given(target.model.config.vocab_size)

    def _given(self, codes: int) -> jax.Array:
        """The table; raises ValueError if it is not of so many codes."""
        table: Any = self.table
        if table.shape != (codes, self.neighbours):
            raise ValueError(
                f"table must be {[codes, self.neighbours]}, not {list(table.shape)}"
            )
        return table

    def most_at_once(self, grid: tuple[int, int]) -> int:
        """Cells of a grid that are drawn in a pass."""
        if self.order == "raster":
            return 1
        rows = -(-grid[1] // self.window)  # open at once in an island of all cells
        return min(self.frontier or 2 * rows, grid[0] * grid[1])


def _with_draft(state: MuLoState, low: Decoded) -> MuLoState:
    """With what the drafter drew so far, and its counts."""
    decoded = with_draft(state.wave.decoded, low)
    return replace(state, wave=replace(state.wave, decoded=decoded), low=low.tokens)


__all__ = ["MuLo", "MuLoState"]
