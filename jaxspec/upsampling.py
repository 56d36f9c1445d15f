"""Grids of codes at another resolution: what turns a small draft into a large one.

An upsampler is a pure function `upsampler(tokens, grid)` of codes int32 [B, h, w] that
returns codes [B, H, W] for a `grid` (H, W). Those here take smaller grids, too.
`Nearest` and `Pixels` take any, `Latents` those that it has networks for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxspec.models.upsampler import Resampler, UpsamplerConfig
from jaxspec.models.vq import VQ, VQConfig, nearest

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline

# (tokens, grid) -> tokens, as above.
Upsampler = Callable[[jax.Array, tuple[int, int]], jax.Array]
Filter = Literal["bicubic", "lanczos3", "lanczos5", "bilinear", "nearest"]
# Those that a family gives all that they need (see `named`).
Name = Literal["pixels", "latents", "nearest"]


def resized(
    upsampler: Upsampler | Name, tokens: jax.Array, grid: tuple[int, int]
) -> jax.Array:
    """What an upsampler makes of tokens [B, h, w], int32 [B, H, W].

    Raises:
      ValueError: it does not keep its promise.
    """
    out, shape = named(upsampler)(tokens, grid), (len(tokens), *grid)
    if out.shape != shape or not jnp.issubdtype(out.dtype, jnp.integer):
        raise ValueError(
            f"the upsampler must return whole numbers {list(shape)}, not "
            f"{out.dtype} {list(out.shape)}"
        )
    return out.astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nearest:
    """Each code copied over the cells that its own covers: the floor of upsamplers."""

    def __call__(self, tokens: jax.Array, grid: tuple[int, int]) -> jax.Array:
        rows, columns = (
            jnp.arange(large) * small // large
            for large, small in zip(grid, tokens.shape[1:], strict=True)
        )
        return tokens[:, rows][:, :, columns]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pixels:
    """Through pixels: codes to a picture, the picture resized, and back to codes.

    MuLo-SD's training-free upsampler (Peruzzo et al. 2026, arXiv 2601.05149v2), with a
    filter in place of a super-resolution network. Downwards it is antialiased.

    Attributes:
      filter: of the resize, as `jax.image.resize` knows it; "bicubic" is Keys' with
        a = -0.5, as Pillow's.
      params: of the VQ tokenizer. `generate` fills it in where it is None.
      vq: its configuration.
    """

    filter: Filter = field(default="bicubic", metadata={"static": True})
    params: Any = field(default=None, repr=False)
    vq: VQConfig | None = field(default=None, repr=False, metadata={"static": True})

    def __post_init__(self):
        if self.filter not in get_args(Filter):
            known = ", ".join(get_args(Filter))
            raise ValueError(f"filter must be one of {known}, not {self.filter!r}")

    def bind(self, pipeline: "Pipeline") -> "Pixels":
        """With the tokenizer of a family, unless it has one."""
        if self.vq is not None:
            return self
        return replace(self, params=pipeline.params["vq"], vq=pipeline.config.vq)

    def __call__(self, tokens: jax.Array, grid: tuple[int, int]) -> jax.Array:
        if self.vq is None:
            raise ValueError(
                "Pixels needs a VQ tokenizer: Pixels().bind(pipeline), or give params "
                "and vq"
            )
        vq, factor = VQ(self.vq), self.vq.factor
        images: Any = vq.apply(self.params, tokens, method="decode")
        shape = (len(tokens), grid[0] * factor, grid[1] * factor, 3)
        # A filter overshoots at edges: no picture goes beyond black and white.
        images = jax.image.resize(jnp.clip(images, -1, 1), shape, self.filter)
        codes: Any = vq.apply(self.params, jnp.clip(images, -1, 1), method="encode")
        return codes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Latents:
    """By networks that were trained for it, on the vectors of codes.

    MuLo-SD's learned upsampler and downsampler (Peruzzo et al. 2026, arXiv 2601.05149;
    see `jaxspec.models.upsampler`). What a network makes becomes the nearest codes.

    A network takes grids of as many rows as it was trained for, of any width. Where
    none goes all the way, several are chained, each as far as it goes.

    `generate` gives `Latents()` those of the family; `Latents.create` takes your own.

    Attributes:
      networks: parameters, by rows before and after, such as {(8, 16): ...}.
      codes: [V, d], the codebook as it is used.
      configs: (rows before, rows after, network) of each.
    """

    networks: dict[tuple[int, int], Any] = field(default_factory=dict, repr=False)
    codes: jax.Array | None = field(default=None, repr=False)
    configs: tuple[tuple[int, int, UpsamplerConfig], ...] = field(
        default=(), repr=False, metadata={"static": True}
    )

    @staticmethod
    def create(
        networks: Mapping[tuple[int, int], tuple[UpsamplerConfig, Any]],
        codes: jax.Array,
    ) -> "Latents":
        """From networks with their parameters, by rows before and after.

        Raises:
          ValueError: a network does not go from one to the other.
        """
        ways = sorted(networks)
        for before, after in ways:
            config, _ = networks[before, after]
            small, large = sorted((before, after))
            up = config.direction == "up"
            if small * config.scale != large or up != (before < after):
                raise ValueError(
                    f"a network from {before} to {after} rows cannot be one that goes "
                    f"{config.direction} and whose scale is {config.scale}"
                )
        return Latents(
            networks={way: networks[way][1] for way in ways},
            codes=codes,
            configs=tuple((*way, networks[way][0]) for way in ways),
        )

    def fits(self, pipeline: "Pipeline", size: Any = None) -> None:
        """Raises ValueError if it has no networks, and the family none either."""
        if self.codes is None and not pipeline.config.upsamplers:
            raise ValueError(
                f"{pipeline.config.name} has no learned upsamplers: take Pixels() or "
                "Nearest()"
            )

    def bind(self, pipeline: "Pipeline") -> "Latents":
        """With the networks of a family, unless it has some.

        Raises:
          ValueError: the family has none.
        """
        if self.codes is not None:
            return self
        self.fits(pipeline)
        config, params = pipeline.config, pipeline.params
        networks = {
            (before // config.vq.factor, after // config.vq.factor): (
                network,
                params["upsamplers"][f"{before}-{after}"],
            )
            for before, after, network in config.upsamplers
        }
        codes: Any = VQ(config.vq).apply(params["vq"], method="codes")
        return Latents.create(networks, codes)

    def __call__(self, tokens: jax.Array, grid: tuple[int, int]) -> jax.Array:
        rows, codes = tokens.shape[1], self.codes
        if codes is None:
            raise ValueError(
                "Latents needs its networks: Latents().bind(pipeline), or "
                "Latents.create(...)"
            )
        while rows != grid[0]:
            rows, network = self._furthest(rows, grid[0])
            latents: Any = network(codes[tokens])
            tokens = nearest(latents, codes)
        return tokens

    def _furthest(self, rows: int, wanted: int) -> tuple[int, Callable]:
        """The network that goes furthest towards the rows wanted, and where to.

        Raises:
          ValueError: there is none.
        """
        low, high = sorted((rows, wanted))
        ways = {b: c for a, b, c in self.configs if a == rows and low <= b <= high}
        if not ways:
            known = ", ".join(f"{a} to {b}" for a, b, _ in self.configs)
            raise ValueError(
                f"there is no trained network from {rows} rows towards {wanted}; there "
                f'are: {known}. "pixels" needs none'
            )
        end = min(ways, key=lambda b: abs(b - wanted))
        params = self.networks[rows, end]
        return end, lambda latents: Resampler(ways[end]).apply(params, latents)


_NAMED: dict[str, type] = {"pixels": Pixels, "latents": Latents, "nearest": Nearest}


def named(upsampler: Any) -> Any:
    """The upsampler of a name, with its defaults; anything else stays as it is.

    Raises:
      ValueError: no upsampler has that name.
    """
    if not isinstance(upsampler, str):
        return upsampler
    if upsampler not in _NAMED:
        raise ValueError(f"upsampler must be {' or '.join(_NAMED)}, not {upsampler!r}")
    return _NAMED[upsampler]()


__all__ = [
    "Filter",
    "Latents",
    "Name",
    "Nearest",
    "Pixels",
    "Upsampler",
    "named",
    "resized",
]
