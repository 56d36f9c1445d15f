"""Prompts of the embedded family: words to pieces to vectors.

A prompt is brought to one form, a style word and a label, split into word pieces, and
each piece's vector fills one slot of the prefix. There is no text encoder: the
transformer reads the vectors itself.
"""

import re
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxspec.models.transformer import TransformerConfig
from jaxspec.reading import Asked, Reader, Shown, check_texts, ids_of


@cache
def tokenizer_of(spec: str) -> Tokenizer:
    """The tokenizer that a `tokenizer.json` describes; read once."""
    return Tokenizer.from_str(spec)


@dataclass(frozen=True)
class PieceText(Reader):
    """Prompt reader of a family, static and hashable.

    Attributes:
      spec: a WordPiece `tokenizer.json`, with [PAD] 0 and [UNK] 1.
      slots: pieces a prompt has room for, the style among them.
      styles: style words; each is one piece.
      default_style: the style of a prompt that names none.
    """

    kind: ClassVar[str] = "pieces"

    spec: str
    slots: int
    styles: tuple[str, ...]
    default_style: str

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.spec)

    def canonical(self, prompt: str) -> tuple[str, str]:
        """Style and label of a prompt.

        "A glossy emoji of a red heart", "glossy red heart" and "red heart, glossy" are
        the same picture, however accents and apostrophes were typed.
        """
        text = unicodedata.normalize("NFC", prompt).lower().replace("'", "’")
        text = re.sub(r"[^\w\s’-]|\B’|’\B", " ", text)  # a ’ within a word stays
        text = re.sub(r"\bemojis?( of)?\b", " ", text)
        words = text.split()
        style = next((w for w in words if w in self.styles), self.default_style)
        rest = [w for w in words if w not in self.styles]
        while len(rest) > 1 and rest[0] in ("a", "an", "the"):
            rest = rest[1:]
        return style, " ".join(rest)

    def pieces(self, prompt: str) -> np.ndarray:
        """Piece ids int32 [slots] of a prompt: style first, 0 where nothing is left.

        Warns about pieces that do not fit and words that are not known.

        Raises:
          ValueError: nothing of the prompt is known.
        """
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        style, label = self.canonical(prompt)
        encoded = self.tokenizer.encode(label)
        known = [i for i in encoded.ids if i > 1]
        if not known:
            raise ValueError(
                f"nothing in the prompt {prompt!r} is known; describe a thing in "
                "English, such as 'red heart'"
            )
        if len(known) < len(encoded.ids):
            lost = len(encoded.ids) - len(known)
            warnings.warn(
                f"{lost} unknown word(s) of {prompt!r} are ignored", stacklevel=2
            )
        room = self.slots - 1
        if len(known) > room:
            warnings.warn(
                f"the prompt has {len(known)} pieces; the first {room} are kept",
                stacklevel=2,
            )
        ids = [self.tokenizer.token_to_id(style), *known[:room]]
        return np.array(ids + [0] * (self.slots - len(ids)), np.int32)

    def wants(self) -> dict[str, Any]:
        return {"prefix_length": self.slots}

    def parameters(self, decoder: TransformerConfig) -> dict[str, Any]:
        shape = (self.tokenizer.get_vocab_size(), decoder.prefix_width)
        return {"text": {"table": jax.ShapeDtypeStruct(shape, jnp.float32)}}

    def read(self, prompts: Sequence[Any]) -> Asked:
        check_texts(prompts)
        pieces = np.stack([self.pieces(prompt) for prompt in prompts])
        return Asked(list(prompts), ids_of(pieces), {"pieces": pieces})

    def show(self, params: dict[str, Any], asked: Asked, keys: jax.Array) -> Shown:
        # On the host: another number of prompts compiles nothing.
        return Shown(np.asarray(params["text"]["table"])[asked.values["pieces"]])

    def describe(self) -> dict[str, Any]:
        return {"styles": list(self.styles), "default_style": self.default_style}
