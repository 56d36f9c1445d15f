"""ZipAR (He et al. 2024, "ZipAR: Accelerating Auto-regressive Image Generation")."""

from typing import Literal

import jax

from jaxspec.decoding import Decoded, Target, method_class, wavefront


@method_class
class ZipAR:
    """A row starts as soon as the row above holds `window` tokens.

    Section 3.2 of the paper (He et al. 2024, arXiv 2412.04062). Rows then advance
    together, one cell each a pass. A row's first cell is drawn before the cell that
    precedes it in raster order exists: the token above that cell stands in for it. The
    context of every other cell lacks the right part of the rows above.

    With `adaptive`, the paper's adaptive window, that is the earliest start. The row's
    first cell x is drawn from p_k, the distribution given k tokens of the row above,
    but is not yet final. Each pass the row above has one more, and x is kept with
    min(1, p_k+1(x) / p_k(x)): then it is final, and the row starts. Else it is drawn
    from the positive part of p_k+1 - p_k, and waits on. Once the row above is full, x
    is final in either case.

    Guarantee: biased, for both reasons; with `window` of a whole row, exact.
    Passes, prefill included: W + (H - 1) window; with `first_row_alone`,
    2 W + (H - 2) window. With `adaptive`, at least those of a window one larger, since
    x is tested a pass after it was drawn, and at most H W.

    Attributes:
      window: tokens of the row above that a row waits for; at least, if `adaptive`.
      first_row_alone: the second row waits for the whole first one, as in the released
        LlamaGen code.
      unfilled: cells before a cell that are not there yet are masked, or take attention
        and give zeros ("zero"), as in the released LlamaGen code.
      adaptive: a row waits until its first cell withstands one more token above.
    """

    window: int = 16
    first_row_alone: bool = False
    unfilled: Literal["mask", "zero"] = "mask"
    adaptive: bool = False

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"window must be 1 or more, not {self.window}")
        if self.unfilled not in ("mask", "zero"):
            raise ValueError(f"unfilled must be mask or zero, not {self.unfilled!r}")

    def start(self, target: Target, keys: jax.Array) -> wavefront.WavefrontState:
        return wavefront.start(target, keys, tentative=self.adaptive)

    def step(
        self, target: Target, state: wavefront.WavefrontState
    ) -> wavefront.WavefrontState:
        h, w = target.grammar.picture
        window = min(self.window, w)
        return wavefront.step(
            target,
            state,
            window=window,
            frontier=min(h, -(-w // window)),  # rows that can be open at once
            riders=1,  # the last cell of the row that was filled in the pass before
            first_row_alone=self.first_row_alone,
            see_unfilled=self.unfilled == "zero",
        )

    def finished(self, state: wavefront.WavefrontState) -> jax.Array:
        return wavefront.finished(state)

    def decoded(self, state: wavefront.WavefrontState) -> Decoded:
        return state.decoded
