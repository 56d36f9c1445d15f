"""LlamaGen: class labels, or captions through a T5 encoder.

Sun et al. 2024, "Autoregressive Model Beats Diffusion" (arXiv 2406.06525), sections 3.1
and 3.3. A caption has 120 tokens at most; its states stand at the end of the prefix,
and what is left of it is masked. Settings are those of the published sampling scripts.
"""

import difflib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxspec.models.t5 import T5Config, T5Encoder
from jaxspec.reading import Asked, Padded, Reader, Shown, check_texts, ids_of, timed
from jaxspec.reading.captions import clean_caption
from jaxspec.sharding import by_image, mesh_of
from jaxspec.text import tokenizer_of


@dataclass(frozen=True)
class ClassReader(Reader):
    """Reads class labels: numbers, or names where they are ImageNet's; static.

    Attributes:
      classes: how many there are.
    """

    kind: ClassVar[str] = "classes"

    classes: int

    def wants(self) -> dict[str, Any]:
        return {"prefix": "class", "prefix_width": self.classes}

    def read(self, prompts: Sequence[Any]) -> Asked:
        labels = np.array([self.label(prompt) for prompt in prompts], np.int32)
        return Asked(
            [str(p) for p in prompts], labels.astype(np.uint32), {"labels": labels}
        )

    def label(self, prompt: Any) -> int:
        """The label of a number, of its digits, or of a class's name.

        Raises:
          ValueError: there is no such class, or several of the name.
        """
        if isinstance(prompt, bool) or not isinstance(prompt, int | np.integer | str):
            raise ValueError(f"a class label must be a whole number, not {prompt!r}")
        try:
            label = int(prompt)
        except ValueError:
            return self._named(str(prompt))
        if not 0 <= label < self.classes:
            raise ValueError(
                f"class labels are 0 to {self.classes - 1}, not {label} (guidance 0 "
                "is for pictures of no class)"
            )
        return label

    def _named(self, name: str) -> int:
        if self.classes != len(imagenet_names()):
            raise ValueError(f"a class label must be a whole number, not {name!r}")
        wanted = name.strip().casefold()
        known = [found.casefold() for found in imagenet_names()]
        if wanted not in known:
            raise ValueError(
                f"{name!r} is no class of ImageNet: give a label" + _near(wanted, known)
            )
        return known.index(wanted)

    def show(self, params: dict[str, Any], asked: Asked, keys: jax.Array) -> Shown:
        return Shown(asked.values["labels"])

    def describe(self) -> dict[str, Any]:
        return {"classes": self.classes}


def _near(name: str, known: Sequence[str]) -> str:
    """The names that come nearest, for an error."""
    within = [k for k in known if name and name in k][:3]
    near = within or difflib.get_close_matches(name, known, n=3)
    return f", or a name such as {', '.join(near)}" if near else ", or a name of one"


@cache
def imagenet_names() -> tuple[str, ...]:
    """Names of ImageNet's 1,000 classes, by label."""
    file = resources.files("jaxspec.reading") / "imagenet_classes.txt"
    lines = file.read_text(encoding="utf8").splitlines()
    return tuple(line for line in lines if not line.startswith("#"))


@dataclass(frozen=True)
class CaptionReader(Reader):
    """Reads captions through a T5 encoder; static and hashable.

    Attributes:
      slots: tokens a caption has room for, its end among them.
      width: of the encoder's states.
      t5: configuration of the encoder; None where a folder was converted without one.
      spec: its `tokenizer.json`.
      clean: clean captions as the published code does (see `clean_caption`).
    """

    kind: ClassVar[str] = "captions"
    options: ClassVar[tuple[str, ...]] = ("clean",)
    starts: ClassVar[tuple[str, ...]] = ("features",)

    slots: int
    width: int
    t5: T5Config | None = None
    spec: str | None = None
    clean: bool = True

    def __post_init__(self):
        """Raises ValueError if the encoder is another, or `clean` is no bool."""
        if not isinstance(self.clean, bool | np.bool_):
            raise ValueError(f"clean must be a bool, not {self.clean!r}")
        if (self.t5 is None) != (self.spec is None):
            raise ValueError("a text encoder and its tokenizer go together")
        if self.t5 is not None and self.t5.width != self.width:
            raise ValueError(
                f"the text encoder's states are {self.t5.width} wide; the transformer "
                f"takes {self.width}"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        assert self.spec is not None
        return tokenizer_of(self.spec)

    def wants(self) -> dict[str, Any]:
        return {
            "prefix": "caption",
            "prefix_length": self.slots,
            "prefix_width": self.width,
        }

    def networks(self) -> dict[str, Any]:
        return {} if self.t5 is None else {"t5": self.t5}

    # What is asked for.

    def words(self, caption: str) -> list[int]:
        """Token ids of a caption, its end last; warns of what is dropped.

        Raises:
          ValueError: nothing of the caption is left after cleaning.
        """
        text = caption.lower().strip()
        if self.clean:
            text, dropped = clean_caption(caption)
            if dropped:
                warnings.warn(
                    f"cleaning dropped {', '.join(map(repr, dropped))} from "
                    f"{caption!r}; clean=False keeps it",
                    stacklevel=2,
                )
        if not text:
            raise ValueError(
                f"nothing of the caption {caption!r} is left after cleaning; "
                "clean=False keeps it"
            )
        ids = self.tokenizer.encode(text).ids
        if len(ids) > self.slots:
            warnings.warn(
                f"the caption has {len(ids)} tokens; the first {self.slots - 1} and "
                f"its end are kept: {caption!r}",
                stacklevel=2,
            )
            ids = [*ids[: self.slots - 1], ids[-1]]
        return ids

    def read(self, prompts: Sequence[Any]) -> Asked:
        if self.t5 is None:
            raise ValueError(
                "there is no text encoder to read captions: give features, or convert "
                "again with --t5"
            )
        check_texts(prompts)
        # Behind each other: an encoder's relative positions know no left padding.
        words = np.zeros((len(prompts), self.slots), np.int32)
        counts = np.zeros(len(prompts), np.int32)
        for row, prompt in enumerate(prompts):
            ids = self.words(prompt)
            words[row, : len(ids)], counts[row] = ids, len(ids)
        ids = ids_of([row[:n] for row, n in zip(words, counts, strict=True)])
        return Asked(list(prompts), ids, {"words": words, "counts": counts})

    def start(self, name: str, values: Any) -> Asked:
        captions = [np.asarray(x) for x in values]
        if not captions:
            raise ValueError("there are no features")
        for i, x in enumerate(captions):
            if x.ndim != 2 or not 0 < len(x) <= self.slots or x.shape[1] != self.width:
                raise ValueError(
                    f"features of a caption must be [1 to {self.slots}, {self.width}], "
                    f"not {list(x.shape)} as those of caption {i}"
                )
            if not np.isfinite(x.astype(np.float32)).all():
                raise ValueError(f"features of caption {i} are not finite")
        states = np.zeros((len(captions), self.slots, self.width), captions[0].dtype)
        for row, x in zip(states, captions, strict=True):
            row[: len(x)] = x
        names = [f"features {i}" for i in range(len(captions))]
        counts = np.array([len(x) for x in captions], np.int32)
        return Asked(names, ids_of(captions), {"states": states, "counts": counts})

    # What images show.

    def show(self, params: dict[str, Any], asked: Asked, keys: jax.Array) -> Shown:
        seconds: dict[str, float] = {}
        counts, states = asked.values["counts"], asked.values.get("states")
        if states is None:
            own, words = params["t5"], asked.values["words"]
            words, counts = by_image(mesh_of(own), (words, counts))
            encode = lambda: _states(self.t5, own, words, counts)
            states = timed(seconds, "captions", encode)
        return Shown(_left_padded(states, counts), seconds=seconds)

    def programs(self, batch: int) -> list[tuple[str, Callable, tuple[Any, ...]]]:
        if self.t5 is None:
            return []
        words = jax.ShapeDtypeStruct((batch, self.slots), jnp.int32)
        counts = jax.ShapeDtypeStruct((batch,), jnp.int32)
        encode = lambda params, *args: _states(self.t5, params["t5"], *args)
        return [("captions", encode, (words, counts))]

    def describe(self) -> dict[str, Any]:
        return {
            "caption_tokens": self.slots,
            "starts_from": [*(["prompts"] if self.t5 else []), *self.starts],
            "options": {name: getattr(self, name) for name in self.options},
        }


@jax.jit(static_argnums=0)
def _states(config: T5Config, params: Any, words: jax.Array, counts: jax.Array) -> Any:
    seen = jnp.arange(words.shape[1])[None] < counts[:, None]
    return T5Encoder(config).apply(params, words, seen)


@jax.jit
def _left_padded(states: jax.Array, counts: jax.Array) -> Padded:
    """States [B, P, C] of captions of so many tokens [B], moved to the prefix's end."""
    slots = states.shape[1]
    slot, padding = jnp.arange(slots)[None], slots - counts[:, None]
    visible = slot >= padding
    moved = jnp.take_along_axis(states, ((slot - padding) % slots)[..., None], axis=1)
    return Padded(jnp.where(visible[..., None], moved, 0), visible)


__all__ = ["CaptionReader", "ClassReader", "imagenet_names"]
