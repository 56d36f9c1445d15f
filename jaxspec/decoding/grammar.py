"""The image grammar: cells whose token is certain before anything is drawn.

Some models end every row of a picture with a newline token (Lumina-mGPT, Liu et al.
2024, arXiv 2408.02657). The grid then has a column more than the picture, its last, and
a code more than the tokenizer, the last too. A newline is fed like any other token, and
takes no draw.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class ImageGrammar:
    """Which cells of a grid are newlines; static.

    Attributes:
      grid: rows and columns, that of the newlines among them.
      newline: its code, the last one; None if there are none.
    """

    grid: tuple[int, int]
    newline: int | None = None

    @staticmethod
    def of(config: Any) -> "ImageGrammar":
        """That of a network's configuration, with `newline` if there can be any."""
        newline = config.vocab_size - 1 if getattr(config, "newline", None) else None
        return ImageGrammar(config.grid, newline)

    @property
    def picture(self) -> tuple[int, int]:
        """Rows and columns of the picture."""
        h, w = self.grid
        return h, w - (self.newline is not None)

    @property
    def end(self) -> int:
        """Cells up to the last that is drawn; what is behind it is never fed."""
        h, w = self.grid
        return h * w - (self.newline is not None)

    def codes(self, size: int) -> int:
        """Codes of pictures among `size`, the first ones."""
        return size - (self.newline is not None)

    def forced(self, cells: jax.Array) -> jax.Array:
        """Which cells, of any shape, are newlines."""
        if self.newline is None:
            return jnp.zeros(cells.shape, bool)
        w = self.grid[1]
        return cells % w == w - 1

    @property
    def mask(self) -> jax.Array:
        """Bool [H, W]: which are newlines."""
        h, w = self.grid
        return self.forced(jnp.arange(h * w)).reshape(h, w)

    def fits(self, cells: jax.Array, codes: jax.Array) -> jax.Array:
        """Whether codes can stand at cells; of shapes that broadcast."""
        if self.newline is None:
            return jnp.ones(jnp.broadcast_shapes(cells.shape, codes.shape), bool)
        return self.forced(cells) == (codes == self.newline)

    def allowed(self, logits: jax.Array, cells: jax.Array) -> jax.Array:
        """Logits [B, T, V] of cells [B, T], -inf for codes that cannot be there."""
        if self.newline is None:
            return logits
        codes = jnp.arange(logits.shape[-1])[None, None]
        return jnp.where(self.fits(cells[..., None], codes), logits, -jnp.inf)

    def refuse(self, method: str) -> None:
        """Raises ValueError if there are newlines, for a method that draws none."""
        if self.newline is not None:
            raise ValueError(
                f"{method} draws grids without newlines only, and this model ends "
                "rows with them: take another method, such as ZipAR"
            )

    def without(self, grids: Any) -> Any:
        """Grids [..., H, W] without the newlines."""
        if self.newline is None:
            return grids
        return grids[..., : self.picture[1]]

    def written(self, pictures: jax.Array) -> jax.Array:
        """Codes [..., H, W] of pictures with the newlines."""
        if self.newline is None:
            return pictures
        end = [(0, 0)] * (pictures.ndim - 1) + [(0, 1)]
        return jnp.pad(pictures, end, constant_values=self.newline)
