"""Lumina-mGPT and Anole: a chat prompt, and the tokens that begin a picture.

Both go on from Chameleon (Meta 2024, arXiv 2405.09818), one vocabulary of words and
image codes. Lumina-mGPT (Liu et al. 2024, arXiv 2408.02657) is asked for a picture of a
size, and told the size once more by two tokens before it; Anole (Chern et al. 2024,
arXiv 2407.06135) draws one size. Prompts and settings are those of the published code.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import jax
import numpy as np
from tokenizers import Tokenizer

from jaxspec.reading import Asked, Padded, Reader, Shown, check_texts, ids_of
from jaxspec.sizes import Size, sides_of, size_label
from jaxspec.text import tokenizer_of

BEGIN, PAD = 0, 1  # <s>, <pad>
FIRST, CODES = 4, 8192  # the token of code 0, and how many codes there are
PICTURE = 8197  # begins a picture, <racm3:break>
TURN = 8710  # ends a turn of the chat, <reserved08706>
NEWLINE = 8803  # ends a row of codes, <reserved08799>
SIDE = 8804  # and n more: a side of n patches, <reserved08800> ...
PATCH = 32  # pixels a side that a size token counts
SQUARES = (512, 768, 1024)  # pixels a side, those of Lumina-mGPT's published models
SLOTS = 32  # prompts are padded to a multiple, so that few lengths compile
# Settings of the published code of both (and of SJD, GSD and ZipAR).
DEFAULTS = {"guidance": 3.0, "top_k": 2000}
_NAMES = {BEGIN: "<s>", PICTURE: "<racm3:break>", TURN: "<reserved08706>"}


def code_name(code: int) -> str:
    """The vocabulary's name of an image code: IMGIMG, its digits as letters, Z."""
    return "IMGIMG" + "".join(chr(ord("A") + int(d)) for d in str(code)) + "Z"


def codes_of(tokens: Any) -> np.ndarray:
    """Image codes int32 [...] of tokens of the vocabulary.

    Raises:
      ValueError: one is no image token: perhaps these are codes already.
    """
    tokens = np.asarray(tokens)
    last = FIRST + CODES - 1
    if tokens.size and not (FIRST <= tokens.min() and tokens.max() <= last):
        raise ValueError(
            f"image tokens are {FIRST} to {last}, and these run from {tokens.min()} to "
            f"{tokens.max()}: are they codes of the tokenizer already, or a whole "
            "sequence?"
        )
    return (tokens - FIRST).astype(np.int32)


def trained_sizes(size: int) -> list[tuple[int, int]]:
    """(height, width) of the pictures that Lumina-mGPT of a size was trained on.

    As its code lists them: of about as many patches as the square, and of an aspect
    ratio of 4 at most.
    """
    most = (size // PATCH) ** 2
    width, height, found = most, 1, []
    while width:
        if max(width, height) <= 4 * min(width, height):
            found.append((height * PATCH, width * PATCH))
        if (height + 1) * width <= most:
            height += 1
        else:
            width -= 1
    return found


@dataclass(frozen=True)
class ChameleonReader(Reader):
    """What both families share: the vocabulary, padding, and the null branch.

    Guidance compares with a context that every published code chooses in its own way,
    an option. Where it is shorter, its positions begin at 0 with what is left.

    Attributes:
      spec: the vocabulary's `tokenizer.json`.
      sizes: of pictures, in pixels; conditions are made for each of them.
      unconditional: that context.
    """

    options: ClassVar[tuple[str, ...]] = ("unconditional",)
    contexts: ClassVar[tuple[str, ...]]  # that `unconditional` may name
    newline: ClassVar[int | None]
    begins: ClassVar[int]  # how many tokens begin a picture

    spec: str
    sizes: tuple[Size, ...]
    unconditional: str

    def __post_init__(self):
        """Raises ValueError for a context that there is not."""
        if self.unconditional not in self.contexts:
            known = " or ".join(self.contexts)
            raise ValueError(
                f"unconditional must be {known}, not {self.unconditional!r}"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.spec)

    def check_vocabulary(self) -> None:
        """Raises ValueError if tokens have other numbers than Chameleon's."""
        expected = {name: number for number, name in _NAMES.items()}
        expected |= {code_name(code): FIRST + code for code in range(CODES)}
        if self.newline is not None:
            expected["<reserved08799>"] = NEWLINE
            expected["<reserved08800>"] = SIDE
        for name, number in expected.items():
            found = self.tokenizer.token_to_id(name)
            if found != number:
                raise ValueError(
                    f"the tokenizer has {name} as {found}, and Chameleon as {number}: "
                    "is it another model's?"
                )

    def wants(self) -> dict[str, Any]:
        return {"first": FIRST, "newline": self.newline}

    # What is asked for.

    def words(self, text: str) -> list[int]:
        """Tokens of a text.

        Raises:
          ValueError: it names tokens that are no words, such as those of images.
        """
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        for number, name in zip(encoded.ids, encoded.tokens, strict=True):
            special = name.startswith("<") and name != "<"  # as Meta's code has it
            if special or name.startswith("IMGIMG"):
                raise ValueError(
                    f"the prompt {text!r} has {name} (token {number}), which is no "
                    "word: leave it out"
                )
        return encoded.ids

    @abstractmethod
    def sequence(self, prompt: str, size: Size) -> list[int]:
        """All tokens before the first of the picture."""

    def read(self, prompts: Sequence[Any]) -> Asked:
        check_texts(prompts)
        words = [np.array(self.words(prompt), np.int32) for prompt in prompts]
        values = {}
        for size in self.sizes:
            rows = [self.sequence(prompt, size) for prompt in prompts]
            slots = -(-max(map(len, rows)) // SLOTS) * SLOTS
            tokens = np.full((len(rows), slots), PAD, np.int32)
            for padded, row in zip(tokens, rows, strict=True):
                padded[slots - len(row) :] = row
            values[f"{size_label(size)} tokens"] = tokens
            values[f"{size_label(size)} counts"] = np.array([*map(len, rows)], np.int32)
        return Asked(list(prompts), ids_of(words), values)

    # What images show.

    def show(self, params: dict[str, Any], asked: Asked, keys: jax.Array) -> Shown:
        conditions = {}
        for size in self.sizes:
            label = size_label(size)
            tokens, counts = (
                asked.values[f"{label} {what}"] for what in ("tokens", "counts")
            )
            slot = np.arange(tokens.shape[1])[None]
            visible = slot >= tokens.shape[1] - counts[:, None]
            null = self._null(tokens, visible)
            conditions[label] = Padded(tokens, visible, Padded(*null))
        return Shown(conditions)

    def _null(
        self, tokens: np.ndarray, visible: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and visible slots [n, P] of the unconditional context."""
        slots = tokens.shape[1]
        before_picture = np.arange(slots)[None] < slots - self.begins
        last_words = np.arange(slots)[None] == slots - self.begins - 1
        if self.unconditional == "picture":  # what begins it, alone
            return tokens, visible & ~before_picture
        if self.unconditional == "turn":  # and the prompt's last token
            return tokens, visible & (~before_picture | last_words)
        if self.unconditional == "begin":  # and <s>
            tokens = np.where(last_words, BEGIN, tokens)
            return tokens, visible & (~before_picture | last_words)
        first = visible & ~np.pad(visible, ((0, 0), (1, 0)))[:, :-1]
        padded = np.where(before_picture, np.where(first, BEGIN, PAD), tokens)
        return padded.astype(np.int32), visible

    def describe(self) -> dict[str, Any]:
        return {"options": {name: getattr(self, name) for name in self.options}}


@dataclass(frozen=True)
class LuminaReader(ChameleonReader):
    """Reads prompts for Lumina-mGPT; static and hashable.

    Attributes:
      spec, sizes: as above.
      unconditional: "picture" is the tokens of picture start, height and width alone
        (Lumina's own code); "turn" the prompt's last token before them (SJD, GSD);
        "pads" a prompt of <s> and visible padding, as long as the real one (ZipAR).
    """

    kind: ClassVar[str] = "lumina"
    contexts: ClassVar[tuple[str, ...]] = ("picture", "turn", "pads")
    newline: ClassVar[int | None] = NEWLINE
    begins: ClassVar[int] = 3

    spec: str
    sizes: tuple[Size, ...]
    unconditional: str = "picture"

    def sequence(self, prompt: str, size: Size) -> list[int]:
        height, width = sides_of(size)
        request = f"Generate an image of {width}x{height} according to the following "
        sides = [SIDE + side // PATCH for side in (height, width)]
        words = self.words(f"{request}prompt:\n{prompt}")
        return [BEGIN, *words, TURN, PICTURE, *sides]

    def sized(self, size: tuple[int, int]) -> tuple[int, "LuminaReader"]:
        trained = [x for x in self.sizes if isinstance(x, int)]
        listed = {pair: x for x in trained for pair in trained_sizes(x)}
        if size not in listed:
            near = sorted(listed, key=lambda pair: _apart(pair, size))[:3]
            raise ValueError(
                f"Lumina-mGPT draws no {size_label(size)} (height x width); the "
                f"nearest it was trained on: {', '.join(map(size_label, near))}"
            )
        return listed[size], replace(self, sizes=(*self.sizes, size))

    def describe(self) -> dict[str, Any]:
        listed = trained_sizes(max(x for x in self.sizes if isinstance(x, int)))
        first, last = size_label(listed[0]), size_label(listed[-1])
        return {"also_draws": f"heights and widths, {first} to {last}"} | (
            super().describe()
        )

    def generated(self, rows: int, columns: int) -> int:
        # Picture start, both sides, a newline a row, picture end, turn end.
        return 3 + rows * (columns + 1) + 2


def _apart(a: tuple[int, int], b: tuple[int, int]) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


@dataclass(frozen=True)
class AnoleReader(ChameleonReader):
    """Reads prompts for Anole; static and hashable.

    Attributes:
      spec, sizes: as above; it draws one size, of 1,024 tokens without newlines.
      unconditional: "begin" is <s> and the token of picture start (Meta's code,
        LANTERN); "turn" has the prompt's last token in place of <s> (SJD).
    """

    kind: ClassVar[str] = "anole"
    contexts: ClassVar[tuple[str, ...]] = ("begin", "turn")
    newline: ClassVar[int | None] = None
    begins: ClassVar[int] = 1

    spec: str
    sizes: tuple[Size, ...] = (512,)
    unconditional: str = "begin"

    def sequence(self, prompt: str, size: Size) -> list[int]:
        return [BEGIN, *self.words(prompt), TURN, PICTURE]


__all__ = [
    "CODES",
    "DEFAULTS",
    "FIRST",
    "SQUARES",
    "AnoleReader",
    "LuminaReader",
    "code_name",
    "codes_of",
    "trained_sizes",
]
