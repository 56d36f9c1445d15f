"""Chameleon: Lumina-mGPT and Anole, as language models and as models of a picture.

Chameleon (Meta 2024, arXiv 2405.09818, section 2.3) is a Llama over one vocabulary of
words and image codes, with a LayerNorm of every query and key head; the 34B model
norms what its branches return. Lumina-mGPT (Liu et al. 2024, arXiv 2408.02657) and
Anole (Chern et al. 2024, arXiv 2407.06135) are the same network, trained to draw.

The whole language model is a `Llama` of `ChameleonConfig`. `ChameleonGrid` is what a
decoding method sees of it: a grid of codes behind a prompt. Lumina-mGPT ends every row
of codes with a newline token: the last column of its grid, and code number `codes`.

Axis legend as in `models.llama`; P prefix slots, N cells of the grid, S = P + N.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models import llama
from jaxspec.models.cache import Cache
from jaxspec.models.int8 import matmul
from jaxspec.models.llama import LlamaConfig
from jaxspec.models.transformer import rms_norm


@dataclass(frozen=True)
class ChameleonConfig(LlamaConfig):
    """Static shape of the `Llama`; its defaults are Chameleon's."""

    tied: bool = False
    head_norms: tuple[int, int] | None = (1, 1)


@dataclass(frozen=True)
class ChameleonGridConfig:
    """A picture as the language model writes it.

    Attributes:
      language: the language model.
      grid: rows and columns of cells, the column of newlines among them.
      prefix_length: P, tokens of the prompt and of what begins the picture; prompts
        set it, and nothing in the weights depends on it.
      codes: number of image codes, which are tokens in a row.
      first: the token of code 0.
      newline: the token that ends a row; None where rows just follow each other.
    """

    language: ChameleonConfig
    grid: tuple[int, int]
    prefix_length: int = 0
    codes: int = 8192
    first: int = 4
    newline: int | None = 8803

    def __post_init__(self):
        """Raises ValueError for tokens that the language model does not have."""
        last = max(self.first + self.codes - 1, self.newline or 0)
        if self.first < 0 or last >= self.language.vocab_size:
            raise ValueError(
                f"image tokens run from {self.first} to {last}; the language model has "
                f"0 to {self.language.vocab_size - 1}"
            )

    @property
    def vocab_size(self) -> int:
        """What a cell can be: a code, or the newline behind them."""
        return self.codes + (self.newline is not None)

    def words(self, codes: jax.Array) -> jax.Array:
        """The language model's tokens of codes, which may be newlines."""
        tokens = self.first + codes
        if self.newline is None:
            return tokens
        return jnp.where(codes == self.codes, self.newline, tokens)

    @property
    def cells(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def slots(self) -> int:
        return self.prefix_length + self.cells

    @property
    def depth(self) -> int:
        return self.language.depth

    @property
    def width(self) -> int:
        return self.language.width

    @property
    def key_heads(self) -> int:
        return self.language.key_heads

    @property
    def head_width(self) -> int:
        return self.language.head_width


def _of_cells(config: ChameleonGridConfig, x: jax.Array, axis: int) -> jax.Array:
    """What of an axis over all tokens is of those that a cell can be."""
    parts = [(config.first, config.first + config.codes)]
    if config.newline is not None:
        parts.append((config.newline, config.newline + 1))
    slices = [jax.lax.slice_in_dim(x, *part, axis=axis) for part in parts]
    return jnp.concatenate(slices, axis=axis)


def rotary_positions(
    config: ChameleonGridConfig, places: jax.Array, visible: jax.Array
) -> jax.Array:
    """Positions [B, T] of slots: how many of the row's tokens lie before.

    Every input sees the whole of its row's prompt, or all of it up to itself.
    """
    p = config.prefix_length
    prompt = jnp.sum(visible[..., :p], axis=-1, dtype=jnp.int32)
    return prompt + jnp.maximum(places - p, -1)


class ChameleonGrid(nn.Module):
    """What draws a picture; pure, used through `apply(prepared_params, method=...)`.

    It has the methods of `Transformer` that a `Target` asks for. A condition is the
    token ids of the prompt, padded on the left, up to those that begin the picture.
    What of it a row sees also says where the row's text begins, from where its rotary
    positions count; so two rows may have contexts of different lengths.
    """

    config: ChameleonGridConfig

    @nn.nowrap
    def prepared(self, params: dict) -> dict:
        """What this runs on, from the parameters of the language model.

        The layers are taken apart, and the embeddings and the head of what a cell can
        be are copied out: `token_embedding` [V, C] and `head` [C, V], of 8,193 tokens
        in place of 65,536. All embeddings stay, as `word_embedding`, for the prompt.
        """
        if "word_embedding" in params["params"]:
            return params
        inner = llama.unstacked(self.config.language, params)["params"]
        words = inner["token_embedding"]
        own = {
            "word_embedding": words,
            "token_embedding": _of_cells(self.config, words, 0),
            "head": _of_cells(self.config, inner["head"], 1),
        }
        return {"params": inner | own}

    def setup(self):
        for name in ("word_embedding", "token_embedding", "layers", "norm", "head"):
            setattr(self, name, self.get_variable("params", name))

    def prefix(self, condition: jax.Array) -> jax.Array:
        """Prefix embeddings [B, P, C] of token ids int32 [B, P]."""
        return self.word_embedding[condition]

    def null(self, condition: jax.Array) -> jax.Array:
        """The same tokens: without a condition, fewer of them are visible."""
        return condition

    def embed(self, tokens: jax.Array, cells: jax.Array) -> jax.Array:
        """Input embeddings [B, T, C] of codes [B, T], wherever they stand."""
        del cells
        return self.token_embedding[tokens]

    def extend(
        self,
        x: jax.Array,
        slots: jax.Array,
        cache: Cache,
        visible: jax.Array,
        places: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """As `Transformer.extend`."""
        places = slots if places is None else places
        positions = rotary_positions(self.config, places, visible)
        language = self.config.language
        return llama.extend(language, self.layers, x, positions, slots, cache, visible)

    def features(self, states: jax.Array) -> jax.Array:
        """What the head reads of states [..., C]: the same after the final norm."""
        return rms_norm(states, self.norm, self.config.language.norm_epsilon)

    def read_out(self, features: jax.Array) -> jax.Array:
        """float32 logits [..., V] of the cell after each of `features` [..., C]."""
        return matmul(features, self.head).astype(jnp.float32)

    def __call__(
        self,
        condition: jax.Array,
        tokens: jax.Array,
        prefix_visible: jax.Array | None = None,
    ) -> jax.Array:
        """Teacher-forced logits [B, N, V]; row i predicts tokens[:, i].

        Args:
          condition: as for `prefix`.
          tokens: int32 [B, N], the whole grid in raster order.
          prefix_visible: bool [B, P], which prefix slots are not padding.
        """
        b, p = condition.shape
        rest = tokens[:, :-1]
        x = jnp.concatenate([self.prefix(condition), self.embed(rest, rest)], axis=1)
        if prefix_visible is None:
            prefix_visible = jnp.ones((b, p), bool)
        seen = jnp.pad(
            prefix_visible, ((0, 0), (0, rest.shape[1])), constant_values=True
        )
        attention = llama.uncached(
            self.config.language, llama.positions_of(seen), llama.causal(seen)
        )
        for layer in self.layers:
            x = llama.block(self.config.language, layer, x, attention)
        return self.read_out(self.features(x[:, p - 1 :]))
