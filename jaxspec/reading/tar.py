"""Tar: a prompt to semantic tokens to features, from which AR-DTok draws.

Han et al. 2025, "Vision as a Dialect" (arXiv 2506.18898). A Qwen2 writes 729, 169 or 81
indices of TA-Tok (scale 0, 1 or 2), TA-Tok turns them into as many features, and those
are the prefix of AR-DTok, whatever size it draws. Settings are those of the published
inference code.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxspec.language import Grammar, write, written
from jaxspec.models.llama import Llama, unstacked
from jaxspec.models.qwen2 import Qwen2Config
from jaxspec.models.ta_tok import TaTok, TaTokConfig
from jaxspec.reading import Asked, Reader, Shown, check_texts, ids_of, timed
from jaxspec.sampling import Sampling
from jaxspec.sharding import by_image, mesh_of, on_host
from jaxspec.text import tokenizer_of

SCALES = (0, 1, 2)
PROMPT = 128  # tokens of a prompt and its template, to plan memory by
# Qwen2's own template for a system and a user turn.
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{prompt}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class Writer:
    """Tar's language model with its vocabulary; static and hashable.

    Attributes:
      config: of the network.
      ends: tokens that end a text.
      repetition_penalty: of its published generation settings; None is off.
      chat: the turns before the image; `{prompt}` is replaced.
      context: tokens that it was made for, prompt and image together; None where its
        `config.json` does not say.
    """

    config: Qwen2Config
    ends: tuple[int, ...] = ()
    repetition_penalty: float | None = None
    chat: str = CHAT
    context: int | None = None


@dataclass(frozen=True)
class TarReader(Reader):
    """Reads prompts for AR-DTok; static and hashable.

    Attributes:
      ta_tok: configuration of the semantic tokenizer.
      writer: the language model; None where a folder was converted without one.
      spec: its `tokenizer.json`.
      scale: 0, 1 or 2: 729, 169 or 81 semantic tokens.
      only_images: draw image tokens only; as published, any token can be drawn, and an
        image that comes out short is filled with code 0.
      language_temperature, language_top_k, language_top_p: sampling of semantic tokens.
    """

    kind: ClassVar[str] = "tar"
    options: ClassVar[tuple[str, ...]] = (
        "scale",
        "only_images",
        "language_temperature",
        "language_top_k",
        "language_top_p",
    )
    starts: ClassVar[tuple[str, ...]] = ("semantic_tokens", "features")

    ta_tok: TaTokConfig
    writer: Writer | None = None
    spec: str | None = None
    scale: int = 0
    only_images: bool = False
    language_temperature: float = 1.0
    language_top_k: int = 1200
    language_top_p: float = 0.95

    def __post_init__(self):
        """Raises ValueError for a scale or a setting that there is not."""
        if type(self.scale) is not int or self.scale not in SCALES:
            raise ValueError(f"scale must be 0, 1 or 2, not {self.scale!r}")
        if not isinstance(self.only_images, bool | np.bool_):
            raise ValueError(f"only_images must be a bool, not {self.only_images!r}")
        if (self.writer is None) != (self.spec is None):
            raise ValueError("a language model and its tokenizer go together")
        if self.writer is not None:
            self._sampling()  # which checks the numbers

    @property
    def counts(self) -> tuple[int, ...]:
        """How many semantic tokens a picture has, by scale."""
        return tuple(self.ta_tok.indices(scale + 1) for scale in SCALES)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        assert self.spec is not None
        return tokenizer_of(self.spec)

    def token(self, name: str) -> int:
        """The id of a token of the vocabulary.

        Raises:
          ValueError: there is none; the tokenizer is not a Tar model's.
        """
        number = self.tokenizer.token_to_id(name)
        if number is None:
            raise ValueError(f"the tokenizer has no {name}: is it a Tar model's?")
        return number

    @cached_property
    def first(self) -> int:
        """The id of the first image token; the others follow it."""
        last = self.ta_tok.codebook_size - 1
        first = self.token("<I0>")
        if self.token(f"<I{last}>") != first + last:
            raise ValueError(
                f"the tokenizer's image tokens <I0> to <I{last}> are not in a row"
            )
        return first

    def check_vocabulary(self) -> None:
        """Raises ValueError if the language model and its tokenizer do not fit Tar."""
        if self.writer is None:
            return
        for name in ("<|im_start|>", "<|im_end|>", "<im_start>", "<S0>"):
            self.token(name)
        last = self.first + self.ta_tok.codebook_size - 1
        if last >= self.writer.config.vocab_size:
            raise ValueError(
                f"the tokenizer has image tokens up to {last}; the language model has "
                f"tokens 0 to {self.writer.config.vocab_size - 1}"
            )

    def wants(self) -> dict[str, Any]:
        return {
            "prefix": "features",
            "prefix_width": self.ta_tok.decoder.width,
            "prefix_length": self.counts[0],
        }

    def networks(self) -> dict[str, Any]:
        own = {"ta_tok": self.ta_tok}
        return own if self.writer is None else {**own, "llm": self.writer.config}

    # What is asked for.

    def words(self, prompt: str) -> list[int]:
        """Token ids of a prompt, up to the tokens of image start and scale."""
        assert self.writer is not None
        text = self.writer.chat.replace("{prompt}", prompt)
        for name in ("<im_start>", f"<S{self.scale}>"):
            self.token(name)  # or it would be read as plain letters
            text += name
        return self.tokenizer.encode(text).ids

    def read(self, prompts: Sequence[Any]) -> Asked:
        if self.writer is None:
            raise ValueError(
                "there is no language model to read prompts: give semantic_tokens or "
                "features, or convert again with --llm"
            )
        check_texts(prompts)
        words = [np.array(self.words(prompt), np.int32) for prompt in prompts]
        self._warn_of_long(prompts, words)
        ragged = np.empty(len(words), object)
        for i, row in enumerate(words):
            ragged[i] = row
        return Asked(list(prompts), ids_of(words), {"words": ragged})

    def _warn_of_long(self, prompts: Sequence[str], words: list[np.ndarray]) -> None:
        """Nothing is cut: rotary positions go on where the model knows none."""
        assert self.writer is not None
        most, count = self.writer.context, self.counts[self.scale]
        for prompt, row in zip(prompts, words, strict=True):
            if most is not None and len(row) + count > most:
                warnings.warn(
                    f"{prompt[:60]!r} ... is {len(row)} tokens with its "
                    f"template, and {count} are written behind it; the language model "
                    f"was made for {most} in all, and may lose the thread",
                    stacklevel=2,
                )

    def start(self, name: str, values: Any) -> Asked:
        values = np.asarray(values)
        if name == "semantic_tokens":
            values = self._semantic_tokens(values)
        else:
            values = self._features(values)
        names = [f"{name.replace('_', ' ')} {i}" for i in range(len(values))]
        return Asked(names, ids_of(values), {name: values})

    def _semantic_tokens(self, tokens: np.ndarray) -> np.ndarray:
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        counts, codes = self.counts, self.ta_tok.codebook_size
        if tokens.ndim != 2 or not len(tokens) or tokens.shape[1] not in counts:
            raise ValueError(
                f"semantic_tokens must be [n, {' or '.join(map(str, counts))}], not "
                f"{list(tokens.shape)}"
            )
        if not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"semantic_tokens must be integers, not {tokens.dtype}")
        if tokens.min() < 0 or tokens.max() >= codes:
            raise ValueError(
                f"semantic_tokens run from {tokens.min()} to {tokens.max()}; TA-Tok "
                f"has 0 to {codes - 1}"
            )
        return tokens.astype(np.int32)

    def _features(self, features: np.ndarray) -> np.ndarray:
        features = features[None] if features.ndim == 2 else features
        counts, width = self.counts, self.ta_tok.decoder.width
        shape = features.shape
        if len(shape) != 3 or not len(features) or shape[2] != width:
            raise ValueError(f"features must be [n, T, {width}], not {list(shape)}")
        if shape[1] not in counts:
            raise ValueError(
                f"a picture has {' or '.join(map(str, counts))} features, not "
                f"{shape[1]}"
            )
        if not np.isfinite(features.astype(np.float32)).all():
            raise ValueError("features are not finite")
        return features

    # What images show.

    def show(self, params: dict[str, Any], asked: Asked, keys: jax.Array) -> Shown:
        seconds: dict[str, float] = {}
        values = asked.values
        if "features" in values:
            return Shown(values["features"])
        tokens = values.get("semantic_tokens")
        if tokens is None:
            write = lambda: self._write(params, asked, keys)
            tokens = timed(seconds, "language", write)
        own = params["ta_tok"]
        tokens = by_image(mesh_of(own), tokens)
        decode = lambda: _features(self.ta_tok, own, tokens)
        features = timed(seconds, "features", decode)
        return Shown(features, {"semantic_tokens": on_host(tokens)}, seconds)

    def _write(
        self, params: dict[str, Any], asked: Asked, keys: jax.Array
    ) -> jax.Array:
        """Semantic tokens int32 [B, count] of prompts."""
        assert self.writer is not None
        written = write(
            Llama(self.writer.config),
            params["llm"],
            asked.values["words"].tolist(),
            keys,
            self._sampling(),
            self._grammar(self.first),
            self.writer.repetition_penalty,
            asked.names,
        )
        return written.codes

    def _grammar(self, first: int) -> Grammar:
        assert self.writer is not None
        return Grammar(
            self.counts[self.scale],
            first,
            self.ta_tok.codebook_size,
            ends=self.writer.ends,
            only_images=self.only_images,
        )

    def programs(self, batch: int) -> list[tuple[str, Callable, tuple[Any, ...]]]:
        indices = jax.ShapeDtypeStruct((batch, self.counts[self.scale]), jnp.int32)
        decode = lambda params, x: _features(self.ta_tok, params["ta_tok"], x)
        programs: list = [("features", decode, (indices,))]
        if self.writer is None:
            return programs
        writer, sampling = self.writer, self._sampling()
        words = jax.ShapeDtypeStruct((batch, PROMPT), jnp.int32)
        seen = jax.ShapeDtypeStruct((batch, PROMPT), jnp.bool_)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))

        def write(params, words, seen, keys):
            return written(
                Llama(writer.config),
                self._grammar(0),
                unstacked(writer.config, params["llm"]),
                words,
                seen,
                keys,
                sampling,
                writer.repetition_penalty,
            )

        return [("language", write, (words, seen, keys)), *programs]

    def _sampling(self) -> Sampling:
        assert self.writer is not None
        return Sampling.create(
            self.writer.config.vocab_size,
            temperature=self.language_temperature,
            top_k=self.language_top_k,
            top_p=self.language_top_p,
        )

    def describe(self) -> dict[str, Any]:
        return {
            "semantic_tokens": list(self.counts),
            "starts_from": [*(["prompts"] if self.writer else []), *self.starts],
            "options": {name: getattr(self, name) for name in self.options},
        }


@jax.jit(static_argnums=0)
def _features(config: TaTokConfig, params: Any, tokens: jax.Array) -> jax.Array:
    features: Any = TaTok(config).apply(params, tokens, method="decode")
    return features


__all__ = ["CHAT", "TarReader", "Writer"]
