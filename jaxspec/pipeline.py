"""A whole generator, from words to pixels, as one pytree."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding import ImageGrammar, Target
from jaxspec.models.chameleon import ChameleonGrid, ChameleonGridConfig
from jaxspec.models.drafter import Eagle, EagleConfig
from jaxspec.models.flashar import Flash, FlashConfig
from jaxspec.models.lpd import LPDConfig, LPDNet
from jaxspec.models.matcher import MatcherConfig
from jaxspec.models.ssd import Spatial, SSDConfig
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.models.upsampler import UpsamplerConfig
from jaxspec.models.vq import VQConfig
from jaxspec.pixels import TO_UINT8, Bytes, codebook, codes_of_pictures, pictures
from jaxspec.reading import Asked, Padded, Reader, Shown
from jaxspec.sampling import Sampling, image_keys
from jaxspec.sharding import by_image, filled_size, mesh_of, on_host
from jaxspec.sizes import Size, checked_size, sides_of, size_label
from jaxspec.weight_shapes import layers_apart

# One prompt or several: text, or class labels.
Prompts = str | int | Sequence[str | int]
Decoder = TransformerConfig | ChameleonGridConfig
_FAR = 1e3  # from any code, a coordinate

# Networks beside the models, as errors name them, and what does without them.
_TRAINED = {
    "drafters": ("a drafter", "give the method one, draft=..."),
    "flashar": ("a FlashAR head", "give the method one, head=..."),
    "ssd": ("an SSD head", "give the method one, head=..."),
    "lpd": ("a model for LPD", "give the method one, model=..."),
    "matchers": ("a matcher", "choose by scores of your own, Generated.best(scores)"),
}


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
      decoders: (pixels, network) of each size, those trained first, smallest first.
      vq: the tokenizer that all sizes share.
      text: how what is asked for is read.
      defaults: sampling settings: measured, or those of the published code.
      about: data, licences and training, as text.
      pixels: how they become bytes.
      upsamplers: (pixels before, pixels after, network) of each that is learned, see
        `jaxspec.upsampling.Latents`.
      drafters: (pixels, network) of each EAGLE drafter, trained with the model of that
        size.
      flashar: (pixels, network) of each of FlashAR's heads, likewise.
      ssd: (pixels, network) of each of SSD's heads, as for the drafters.
      matchers: (pixels, network) of each that tells how well pictures match captions.
      lpd: (pixels, network) of each of LPD's models, beside the decoder of that size.
    """

    name: str
    decoders: tuple[tuple[Size, Decoder], ...]
    vq: VQConfig
    text: Reader
    defaults: Defaults
    about: str = ""
    pixels: Bytes = "rounded"
    upsamplers: tuple[tuple[int, int, UpsamplerConfig], ...] = ()
    drafters: tuple[tuple[int, EagleConfig], ...] = ()
    flashar: tuple[tuple[int, FlashConfig], ...] = ()
    lpd: tuple[tuple[int, LPDConfig], ...] = ()
    ssd: tuple[tuple[int, SSDConfig], ...] = ()
    matchers: tuple[tuple[int, MatcherConfig], ...] = ()

    def __post_init__(self):
        """Raises ValueError if the parts do not belong together."""
        for size, decoder in self.decoders:
            h, w = sides_of(size)
            grammar, factor = ImageGrammar.of(decoder), self.vq.factor
            codes = grammar.codes(decoder.vocab_size)
            needs = [
                ("grid", grammar.picture, (h / factor, w / factor), "its tokenizer"),
                ("vocab_size", codes, self.vq.codebook_size, "its tokenizer"),
            ]
            for name, want in self.text.wants().items():
                needs.append((name, getattr(decoder, name), want, "its reader"))
            for name, found, want, who in needs:
                if found != want:
                    raise ValueError(
                        f"{self.name}: the model for {size_label(size)} px has {name} "
                        f"{found}, but {who} needs {want}"
                    )
        for before, after, network in self.upsamplers:
            if network.code_width != self.vq.code_width:
                raise ValueError(
                    f"{self.name}: the network from {before} to {after} px has codes "
                    f"of width {network.code_width}, its tokenizer of "
                    f"{self.vq.code_width}"
                )
        for kind, part in ((Eagle, "drafters"), (Flash, "flashar"), (Spatial, "ssd")):
            for size, network in getattr(self, part):
                what, _ = _TRAINED[part]
                if size not in self.sizes:
                    raise ValueError(f"{self.name}: {what} for {size} px has no target")
                kind({}, network).check(dict(self.decoders)[size])
        for size, network in self.lpd:
            decoder = dict(self.decoders).get(size)
            for name in ("grid", "vocab_size", *self.text.wants()):
                found, want = getattr(network, name), getattr(decoder, name, None)
                if found != want:
                    raise ValueError(
                        f"{self.name}: LPD's model for {size} px has {name} {found}, "
                        f"and the decoder {want}"
                    )
        if self.pixels not in TO_UINT8:
            known = " or ".join(TO_UINT8)
            raise ValueError(f"pixels must be {known}, not {self.pixels!r}")

    def reading(self, **options) -> "PipelineConfig":
        """The same family, told to read in another way, such as `scale=1` for Tar.

        Raises:
          ValueError: the family has no such option, or not of that value.
        """
        for name in options:
            if name not in self.text.options:
                known = ", ".join(self.text.options) or "none"
                raise ValueError(
                    f"{self.name} has no option {name!r}; its options: {known}"
                )
        if not options:
            return self
        changed: Any = replace(self.text, **options)  # ty: ignore[invalid-argument-type]
        return replace(self, text=changed)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(size for size, _ in self.decoders)

    def sized(self, size: Size | str | None) -> tuple["PipelineConfig", Size]:
        """As `Pipeline.sized`, and the size whose model draws it."""
        size = self.defaults.size if size is None else checked_size(size)
        if isinstance(size, int) or size in self.sizes:
            return self, self.check_size(size)
        trained, text = self.text.sized(sides_of(size))
        return self.with_size(size, trained, text), trained

    def with_size(self, size: Size, like: Size, text: Reader) -> "PipelineConfig":
        """With one size more, of a model as that of another, read by `text`."""
        network = dict(self.decoders)[like]
        newline = ImageGrammar.of(network).newline is not None
        h, w = (side // self.vq.factor for side in sides_of(size))
        network = replace(network, grid=(h, w + newline))
        return replace(self, decoders=(*self.decoders, (size, network)), text=text)

    def check_size(self, size: Size | str | None) -> Size:
        """The size itself, or the default for None; raises ValueError if untrained."""
        size = self.defaults.size if size is None else checked_size(size)
        if size not in self.sizes:
            trained = ", ".join(map(size_label, self.sizes))
            raise ValueError(
                f"{self.name} has no model for {size_label(size)} px; trained sizes: "
                f"{trained}"
            )
        return size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pipeline:
    """A family's weights with its configuration; goes through jit and device_put.

    Attributes:
      params: {"decoders": {"128": ...}, "vq": ...}, {"upsamplers": {"64-128": ...}}
        if there are any, and what its reader has, such as
        {"text": {"table": [V, width]}}. EAGLE drafters, if there are any, are
        {"drafters": {"128": ...}}, FlashAR's heads {"flashar": {"128": ...}}, LPD's
        models {"lpd": {"64": ...}}, SSD's heads {"ssd": {"128": ...}}, matchers
        {"matchers": {"128": ...}}.
      config: static.
    """

    params: dict[str, Any]
    config: PipelineConfig = field(metadata={"static": True})

    def reading(self, **options) -> "Pipeline":
        """The same family, told to read in another way (see `PipelineConfig.reading`).

        Raises:
          ValueError: the family has no such option, or not of that value.
        """
        return replace(self, config=self.config.reading(**options))

    def unstacked(self) -> "Pipeline":
        """The same family with the layers apart of all networks that decode.

        `jaxspec.load` returns one of that kind, which stays as it is. Of one whose
        layers are stacked, as training leaves them, this copies them.
        """
        return replace(self, params=layers_apart(self.config, self.params))

    def sized(self, size: Size | str | None) -> "Pipeline":
        """The same family, able to draw a size that is none of its own, if it can be.

        Weights are shared. Lumina-mGPT was trained on many heights and widths beside
        squares, and told them by its prompt.

        Raises:
          ValueError: none of its models draws that size.
        """
        config, trained = self.config.sized(size)
        if config is self.config:
            return self
        new, weights = config.sizes[-1], self.params["decoders"]
        decoders = {**weights, size_label(new): weights[size_label(trained)]}
        return Pipeline({**self.params, "decoders": decoders}, config)

    def ask(self, prompts: Prompts | None = None, **start) -> Asked:
        """What prompts ask for, or what is given in their place; computes nothing.

        Args:
          prompts: one or several: text, or class labels.
          **start: one of what the family can start from, such as `semantic_tokens=...`;
            None is not given.

        Raises:
          ValueError: there is nothing, or more than one thing; it cannot be read; or
            the family does not start there.
        """
        given = {name: x for name, x in start.items() if x is not None}
        if prompts is not None and given:
            raise ValueError(f"give prompts or {' or '.join(given)}, not both")
        if prompts is None and not given:
            raise ValueError("there is no prompt")
        if prompts is not None:
            if isinstance(prompts, str | int | np.integer):
                prompts = [cast(str | int, prompts)]
            if not len(prompts):
                raise ValueError("there is no prompt")
            return self.config.text.read(prompts)
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(given)}")
        ((name, values),) = given.items()
        if name not in self.config.text.starts:
            known = ", ".join(("prompts", *self.config.text.starts))
            raise ValueError(
                f"{self.config.name} does not start from {name}, but from: {known}"
            )
        return self.config.text.start(name, values)

    def show(self, asked: Asked, keys: jax.Array) -> Shown:
        """What images with keys [B] show, where `asked` is of B images."""
        return self.config.text.show(self.params, asked, keys)

    def read(
        self, prompts: Prompts | None = None, *, seed: int = 0, **start
    ) -> tuple[Any, np.ndarray]:
        """The conditions of prompts, and ids of what those are.

        Args:
          prompts: as for `ask`.
          seed: of what a language model writes; of each prompt it is the first image.
          **start: as for `ask`.

        Returns:
          Conditions as `target` takes them, such as vectors [B, P, width], and ids
          uint32 [B]: equal for prompts that read alike, such as "red heart" and "glossy
          emoji of a red heart".

        Raises:
          ValueError: as `ask` does.
        """
        asked = self.ask(prompts, **start)
        keys = image_keys(seed, asked.ids, np.zeros_like(asked.ids))
        return self.show(asked, keys).condition, asked.ids

    def condition(self, prompts: Prompts | None = None, **how) -> Any:
        """The conditions of prompts (see `read`)."""
        return self.read(prompts, **how)[0]

    def target(
        self, condition: Any, sampling: Sampling, size: Size | None = None
    ) -> Target:
        """The model of one size, conditioned: what `jaxspec.decode` draws from.

        Args:
          condition: labels int32 [B], vectors [B, P, width], or `Padded` ones; or those
            of several sizes, by their labels. Where positions are learned, P may be
            less than the model was made for, and the picture begins right behind it, as
            in Tar.
          sampling: settings.
          size: pixels of a side, or height and width.

        Raises:
          ValueError: there is no model of that size, or it takes another condition.
        """
        size = self.config.check_size(size)
        label = size_label(size)
        config = dict(self.config.decoders)[size]
        params = self.params["decoders"][label]
        if isinstance(condition, dict):
            if label not in condition:
                known = ", ".join(condition)
                raise ValueError(f"the condition is one of {known} px, not of {label}")
            condition = condition[label]
        visible = null = None
        if isinstance(condition, Padded):
            if condition.null is not None:
                null = condition.null.vectors, condition.null.visible
            condition, visible = condition.vectors, condition.visible
        condition = jnp.asarray(condition)
        if isinstance(config, ChameleonGridConfig):
            # Rotary positions: a prompt of any length does.
            config = replace(config, prefix_length=condition.shape[1])
        elif config.prefix != "class":
            condition = condition.astype(params["params"]["token_embedding"].dtype)
            config, params = _shortened(config, params, condition.shape[1])
        codes = codebook(self.config.vq, self.params["vq"])
        if ImageGrammar.of(config).newline is not None:
            # Far from all codes, so that it is nobody's neighbour.
            codes = jnp.pad(codes, ((0, 1), (0, 0)), constant_values=_FAR)
        return Target.create(
            network_of(config), params, condition, sampling, visible, codes, null
        )

    def grammar(self, size: Size | None = None) -> ImageGrammar:
        """Which cells of the grid of one size are newlines."""
        return ImageGrammar.of(dict(self.config.decoders)[self.config.check_size(size)])

    def trained(self, part: str, size: Size | None = None) -> tuple[Any, Any]:
        """Parameters and configuration of a network beside the model of one size.

        Args:
          part: "drafters", "flashar", "ssd", "lpd" or "matchers".
          size: pixels a side.

        Raises:
          ValueError: there is none.
        """
        size, networks = self.config.check_size(size), dict(getattr(self.config, part))
        if size not in networks:
            what, instead = _TRAINED[part]
            sizes = ", ".join(f"{x} px" for x in networks) or "no size"
            raise ValueError(
                f"{self.config.name} has {what} for {sizes}, and none for "
                f"{size_label(size)} px: {instead}"
            )
        return self.params[part][size_label(size)], networks[size]

    def drafter(self, size: Size | None = None) -> Eagle:
        """The EAGLE drafter of the model of one size; as `trained` does it."""
        return Eagle(*self.trained("drafters", size))

    def flash(self, size: Size | None = None) -> Flash:
        """FlashAR's head for the model of one size, ready to decode."""
        return Flash(*self.trained("flashar", size)).unstacked()

    def spatial(self, size: Size | None = None) -> Spatial:
        """SSD's head for the model of one size."""
        return Spatial(*self.trained("ssd", size))

    def lpd(
        self, condition: Any, sampling: Sampling, size: Size | None = None
    ) -> Target:
        """LPD's model of one size, conditioned (see `target`).

        Raises:
          ValueError: there is none, or the condition is padded.
        """
        params, config = self.trained("lpd", size)
        if isinstance(condition, dict | Padded):
            raise ValueError("LPD's models take labels or plain vectors, not captions")
        condition = jnp.asarray(condition)
        if config.prefix != "class":
            condition = condition.astype(params["params"]["token_embedding"].dtype)
        codes = codebook(self.config.vq, self.params["vq"])
        return Target.create(LPDNet(config), params, condition, sampling, codes=codes)

    def images(self, tokens: jax.Array | np.ndarray) -> np.ndarray:
        """Pictures uint8 [B, h * factor, w * factor, 3] of code grids [B, h, w].

        Raises:
          ValueError: a token is not a code.
        """
        tokens = np.asarray(tokens)
        self.check_codes(tokens)
        config, params = self.config, self.params["vq"]
        mesh, count = mesh_of(params), len(tokens)
        tokens = np.pad(
            tokens, ((0, filled_size(count, mesh) - count), (0, 0), (0, 0)), "edge"
        )
        images = pictures(config.vq, config.pixels, params, by_image(mesh, tokens))
        return on_host(images)[:count]

    def check_codes(self, tokens: np.ndarray) -> None:
        """Raises ValueError if a token is not a code."""
        codes = self.config.vq.codebook_size
        if tokens.size and not (0 <= tokens.min() and tokens.max() < codes):
            raise ValueError(
                f"tokens run from {tokens.min()} to {tokens.max()}; the codebook has "
                f"codes 0 to {codes - 1}"
            )

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
        return on_host(codes_of_pictures(self.config.vq, self.params["vq"], images))

    def describe(self) -> dict[str, Any]:
        """Name, sizes, parameter counts, defaults and licences, for people to read."""

        def count(tree):
            return sum(int(np.size(x)) for x in jax.tree.leaves(tree))

        sizes = {
            size_label(size): {
                "grid": list(ImageGrammar.of(config).picture),
                "layers": config.depth,
                "width": config.width,
                "parameters": count(self.params["decoders"][size_label(size)]),
            }
            for size, config in self.config.decoders
        }
        trained = {
            part: [size for size, _ in getattr(self.config, part)]
            for part in _TRAINED
            if getattr(self.config, part)
        }
        return {
            "name": self.config.name,
            "sizes": sizes,
            "vq": {
                "codes": self.config.vq.codebook_size,
                "pixels_per_cell": self.config.vq.factor,
                "parameters": count(self.params["vq"]),
            },
            **({"trained": trained} if trained else {}),
            **self.config.text.describe(),
            "defaults": vars(self.config.defaults),
            "about": self.config.about,
        }


def network_of(config: Decoder) -> Transformer | ChameleonGrid:
    """The network that draws, of its configuration."""
    if isinstance(config, ChameleonGridConfig):
        return ChameleonGrid(config)
    return Transformer(config)


def _shortened(
    config: TransformerConfig, params: Any, length: int
) -> tuple[TransformerConfig, Any]:
    """The model with a shorter prefix; raises ValueError if it cannot have it."""
    if length == config.prefix_length:
        return config, params
    if config.positions != "learned" or length > config.prefix_length:
        raise ValueError(
            f"the condition has {length} vectors; the model takes "
            f"{config.prefix_length}"
        )
    config = replace(config, prefix_length=length)
    inner = dict(params["params"])
    inner["position_embedding"] = inner["position_embedding"][: config.slots - 1]
    return config, {"params": inner}
