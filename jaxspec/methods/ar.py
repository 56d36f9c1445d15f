"""Plain autoregressive decoding: one cell a pass, in raster order."""

import jax

from jaxspec.decoding import Decoded, Target, method_class, wavefront


@method_class
class AR:
    """The baseline: N - 1 passes after the prefill, which draws the first cell.

    Newlines take none: N is the cells of the picture.

    Guarantee: exact. The wavefront engine with a window of a whole row.
    """

    def start(self, target: Target, keys: jax.Array) -> wavefront.WavefrontState:
        return wavefront.start(target, keys)

    def step(
        self, target: Target, state: wavefront.WavefrontState
    ) -> wavefront.WavefrontState:
        # In place of a row's last cell, the newline behind it is fed.
        riders = 0 if target.grammar.newline is None else 1
        return wavefront.step(
            target, state, window=target.grid[1], frontier=1, riders=riders
        )

    def finished(self, state: wavefront.WavefrontState) -> jax.Array:
        return wavefront.finished(state)

    def decoded(self, state: wavefront.WavefrontState) -> Decoded:
        return state.decoded
