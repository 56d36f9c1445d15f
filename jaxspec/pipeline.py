"""A whole generator, from words to pixels, as one pytree."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding import Target
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.models.vq import VQ, VQConfig, from_uint8, to_uint8
from jaxspec.sampling import Sampling
from jaxspec.text import PieceText


@dataclass(frozen=True)
class Defaults:
    """Settings that `generate` takes where the caller gives none."""

    size: int
    guidance: float
    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True)
class PipelineConfig:
    """What a family is, apart from its weights; static and hashable.

    Attributes:
      name: of the family.
      decoders: (pixels, network) of each trained size, smallest first.
      vq: the tokenizer that all sizes share.
      text: how prompts are read.
      defaults: sampling settings, chosen by measurement.
      about: data, licences and training, as text.
    """

    name: str
    decoders: tuple[tuple[int, TransformerConfig], ...]
    vq: VQConfig
    text: PieceText
    defaults: Defaults
    about: str = ""

    def __post_init__(self):
        """Raises ValueError if the parts do not belong together."""
        for size, decoder in self.decoders:
            cells = size / self.vq.factor
            fits = {
                "grid": (tuple(decoder.grid), (cells, cells)),
                "vocab_size": (decoder.vocab_size, self.vq.codebook_size),
                "prefix_length": (decoder.prefix_length, self.text.slots),
            }
            for name, (found, want) in fits.items():
                if found != want:
                    raise ValueError(
                        f"the model for {size} px has {name} {found}; the tokenizer "
                        f"and the text of {self.name} need {want}"
                    )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size, _ in self.decoders)

    def check_size(self, size: int | None) -> int:
        """The size itself, or the default for None; raises ValueError if untrained."""
        size = self.defaults.size if size is None else size
        if size not in self.sizes:
            trained = ", ".join(map(str, self.sizes))
            raise ValueError(
                f"{self.name} has no model for {size} px; trained sizes: {trained}"
            )
        return int(size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pipeline:
    """A family's weights with its configuration; goes through jit and device_put.

    Attributes:
      params: {"decoders": {"128": ...}, "vq": ..., "text": {"table": [V, width]}}.
      config: static.
    """

    params: dict[str, Any]
    config: PipelineConfig = field(metadata={"static": True})

    def read(self, prompts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """What prompts say, and ids of what that is.

        Returns:
          Vectors [B, P, width], and ids uint32 [B]: equal for prompts that read alike,
          such as "red heart" and "glossy emoji of a red heart".

        Raises:
          ValueError: nothing of a prompt is known.
        """
        pieces = np.stack([self.config.text.pieces(p) for p in prompts])
        digests = [hashlib.sha256(row.tobytes()).digest()[:4] for row in pieces]
        ids = np.array([int.from_bytes(d, "big") for d in digests], np.uint32)
        # On the host: another number of prompts compiles nothing.
        return np.asarray(self.params["text"]["table"])[pieces], ids

    def condition(self, prompts: list[str]) -> np.ndarray:
        """What prompts say, [B, P, width] (see `read`)."""
        return self.read(prompts)[0]

    def target(
        self, condition: jax.Array, sampling: Sampling, size: int | None = None
    ) -> Target:
        """The model of one size, conditioned: what `jaxspec.decode` draws from."""
        size = self.config.check_size(size)
        model = Transformer(dict(self.config.decoders)[size])
        params = self.params["decoders"][str(size)]
        codes = _codebook(self.config.vq, self.params["vq"])
        return Target.create(model, params, condition, sampling, codes=codes)

    def images(self, tokens: jax.Array | np.ndarray) -> np.ndarray:
        """Pictures uint8 [B, h * factor, w * factor, 3] of code grids [B, h, w].

        Raises:
          ValueError: a token is not a code.
        """
        tokens = np.asarray(tokens)
        codes = self.config.vq.codebook_size
        if tokens.size and not (0 <= tokens.min() and tokens.max() < codes):
            raise ValueError(
                f"tokens run from {tokens.min()} to {tokens.max()}; the codebook has "
                f"codes 0 to {codes - 1}"
            )
        return np.asarray(_images(self.config.vq, self.params["vq"], tokens))

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Code grids int32 [B, h, w] of pictures uint8 [B, H, W, 3].

        Raises:
          ValueError: not pictures, or sides that are no multiple of a cell's.
        """
        images, factor = np.asarray(images), self.config.vq.factor
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise ValueError(
                "pictures must be uint8 [B, H, W, 3], not "
                f"{images.dtype} {list(images.shape)}"
            )
        if images.shape[1] % factor or images.shape[2] % factor:
            raise ValueError(
                f"picture sides must be multiples of {factor}, not "
                f"{images.shape[1]} x {images.shape[2]}"
            )
        return np.asarray(_codes(self.config.vq, self.params["vq"], images))

    def describe(self) -> dict[str, Any]:
        """Name, sizes, parameter counts, defaults and licences, for people to read."""

        def count(tree):
            return sum(int(np.size(x)) for x in jax.tree.leaves(tree))

        sizes = {
            str(size): {
                "grid": list(config.grid),
                "layers": config.depth,
                "width": config.width,
                "parameters": count(self.params["decoders"][str(size)]),
            }
            for size, config in self.config.decoders
        }
        return {
            "name": self.config.name,
            "sizes": sizes,
            "vq": {
                "codes": self.config.vq.codebook_size,
                "pixels_per_cell": self.config.vq.factor,
                "parameters": count(self.params["vq"]),
            },
            "styles": list(self.config.text.styles),
            "default_style": self.config.text.default_style,
            "defaults": vars(self.config.defaults),
            "about": self.config.about,
        }


def abstract_params(config: PipelineConfig) -> dict[str, Any]:
    """Shapes and float32 types of a family's parameters; computes nothing."""
    key = jax.eval_shape(jax.random.key, 0)
    decoders = {}
    for size, c in config.decoders:
        decoders[str(size)] = jax.eval_shape(
            Transformer(c).init,
            key,
            jax.ShapeDtypeStruct((1, c.prefix_length, c.prefix_width), jnp.float32),
            jax.ShapeDtypeStruct((1, c.cells), jnp.int32),
        )
    side = config.vq.factor
    picture = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    vq = jax.eval_shape(VQ(config.vq).init, key, picture)
    width = config.decoders[0][1].prefix_width
    vocabulary = config.text.tokenizer.get_vocab_size()
    table = jax.ShapeDtypeStruct((vocabulary, width), jnp.float32)
    return {"decoders": decoders, "vq": vq, "text": {"table": table}}


@jax.jit(static_argnums=0)
def _images(config: VQConfig, params: Any, tokens: jax.Array) -> jax.Array:
    images: Any = VQ(config).apply(params, tokens, method="decode")
    return to_uint8(images)


@jax.jit(static_argnums=0)
def _codes(config: VQConfig, params: Any, images: jax.Array) -> jax.Array:
    codes: Any = VQ(config).apply(params, from_uint8(images), method="encode")
    return codes


@jax.jit(static_argnums=0)
def _codebook(config: VQConfig, params: Any) -> jax.Array:
    codebook: Any = VQ(config).apply(params, method="codes")
    return codebook
