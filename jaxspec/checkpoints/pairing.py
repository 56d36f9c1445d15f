"""Which models belong together: checks across the files of one pipeline.

Each file may convert without a complaint and the pictures still be noise, because they
are of different pairs. Sizes that must agree are compared here, and what the names of
published files promise; a message names the files.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxspec.decoding import ImageGrammar
from jaxspec.models.chameleon import ChameleonGridConfig
from jaxspec.models.drafter import Eagle
from jaxspec.models.qwen2 import Qwen2Config
from jaxspec.models.t5 import T5Config
from jaxspec.models.ta_tok import TaTokConfig
from jaxspec.models.transformer import TransformerConfig
from jaxspec.models.vq import VQConfig

POOLS = (1, 2, 3)  # that TA-Tok averages by: Tar's scales 0, 1 and 2
# The tokenizers that decoders of a kind of prefix were trained with.
VQ_FILES = {"class": "c2i", "caption": "t2i", "features": "t2i"}
_VQ_NAME = re.compile(r"vq_ds\d+_([ct]2i)\b")


class Decoder(NamedTuple):
    """A decoder, the file it comes from, and the side in pixels of its pictures."""

    file: str
    config: Any  # TransformerConfig or ChameleonGridConfig
    size: int


class VQFile(NamedTuple):
    """A VQ tokenizer and the file it comes from."""

    file: str
    config: VQConfig


def check_llamagen(
    decoder: Decoder, vq: VQFile, t5: tuple[str, T5Config] | None = None
) -> None:
    """Checks the models of a LlamaGen pipeline.

    Args:
      decoder: class-conditional, or of captions.
      vq: its tokenizer.
      t5: name and configuration of the text encoder, for captions only.

    Raises:
      ValueError: they do not belong together; all that is wrong, a line each.
    """
    problems = list(decoder_and_vq(decoder, vq))
    if t5 is not None:
        problems += decoder_and_t5(decoder, *t5)
    _refuse(problems)


def check_tar(
    decoders: Sequence[Decoder],
    vq: VQFile,
    ta_tok: tuple[str, TaTokConfig],
    llm: tuple[str, Qwen2Config] | None = None,
) -> None:
    """Checks the models of a Tar pipeline.

    Args:
      decoders: AR-DTok of one size or several.
      vq: the tokenizer that they share.
      ta_tok: name and configuration.
      llm: name and configuration of the language model, if there is one.

    Raises:
      ValueError: they do not belong together; all that is wrong, a line each.
    """
    problems = list(decoders_together(decoders))
    for decoder in decoders:
        problems += decoder_and_vq(decoder, vq)
        problems += decoder_and_ta_tok(decoder, *ta_tok)
    if llm is not None:
        problems += llm_and_ta_tok(*llm, *ta_tok)
    _refuse(problems)


def check_chameleon(decoders: Sequence[Decoder], vq: VQFile) -> None:
    """Checks the models of Lumina-mGPT, Anole or another Chameleon.

    Raises:
      ValueError: they do not belong together; all that is wrong, a line each.
    """
    problems = list(decoders_together(decoders))
    for decoder in decoders:
        problems += decoder_and_vq(decoder, vq)
    _refuse(problems)


def check_drafter(decoder: Decoder, file: str, drafter: Any) -> None:
    """Raises ValueError if an EAGLE drafter was made for another decoder."""
    try:
        Eagle({}, drafter).check(decoder.config)
    except ValueError as error:
        _refuse([f"{file} is no drafter of {decoder.file}: {error}"])


def check_together(decoders: Sequence[Decoder]) -> None:
    """Raises ValueError if decoders cannot be the sizes of one family."""
    _refuse(decoders_together(decoders))


def _refuse(problems: Iterable[str]) -> None:
    if problems := list(problems):
        raise ValueError(
            "these models do not belong together; nothing was converted:\n  "
            + "\n  ".join(problems)
        )


def decoder_and_vq(decoder: Decoder, vq: VQFile) -> Iterator[str]:
    """What keeps a decoder and a tokenizer from drawing one picture together."""
    grammar = ImageGrammar.of(decoder.config)
    codes, tokens = vq.config.codebook_size, grammar.codes(decoder.config.vocab_size)
    if tokens != codes:
        yield (
            f"{decoder.file} draws from {tokens} codes, and {vq.file} has {codes} "
            f"of them{_fitting(decoder)}"
        )
    rows, columns = grammar.picture
    factor = vq.config.factor
    if (rows * factor, columns * factor) != (decoder.size, decoder.size):
        yield (
            f"{decoder.file} draws {rows}x{columns} cells for {decoder.size} px, and "
            f"{vq.file} makes {factor} px a side of each{_fitting(decoder)}"
        )
    if not isinstance(decoder.config, TransformerConfig):
        return
    kind, named = VQ_FILES[decoder.config.prefix], _VQ_NAME.search(vq.file)
    if named and named[1] != kind:
        yield (
            f"{vq.file} is by its name the tokenizer of {named[1]} models, and "
            f"{decoder.file} is none{_fitting(decoder)}"
        )


def _fitting(decoder: Decoder) -> str:
    """The published tokenizer of a decoder, where it draws from as many codes."""
    if isinstance(decoder.config, ChameleonGridConfig):
        return " (published with Meta's vqgan.ckpt)"
    if decoder.config.vocab_size != VQConfig().codebook_size:
        return ""
    return f" (published with vq_ds16_{VQ_FILES[decoder.config.prefix]}.pt)"


def decoder_and_t5(decoder: Decoder, file: str, t5: T5Config) -> Iterator[str]:
    """What keeps a decoder from being conditioned by a text encoder."""
    if decoder.config.prefix != "caption":
        yield f"{decoder.file} takes no captions, so that it needs no {file}"
    elif decoder.config.prefix_width != t5.width:
        yield (
            f"{decoder.file} takes captions {decoder.config.prefix_width} wide, and "
            f"{file} gives {t5.width} (published with google/flan-t5-xl)"
        )


def decoder_and_ta_tok(
    decoder: Decoder, file: str, ta_tok: TaTokConfig
) -> Iterator[str]:
    """What keeps a decoder from being conditioned by TA-Tok's features."""
    config = decoder.config
    if config.prefix != "features":
        yield f"{decoder.file} takes no features, so that it needs no {file}"
        return
    if config.prefix_width != ta_tok.encoder.width:
        yield (
            f"{decoder.file} takes features {config.prefix_width} wide, and {file} "
            f"gives {ta_tok.encoder.width}"
        )
    counts = [ta_tok.indices(pool) for pool in POOLS]
    if config.prefix_length not in counts:
        yield (
            f"{decoder.file} takes {config.prefix_length} features, and {file} gives "
            + " or ".join(map(str, counts))
        )


def decoders_together(decoders: Sequence[Decoder]) -> Iterator[str]:
    """What keeps decoders from being the sizes of one family."""
    first = decoders[0]
    for i, other in enumerate(decoders):
        same = [d.file for d in decoders[:i] if d.size == other.size]
        if same:
            yield f"{same[0]} and {other.file} both draw {other.size} px"
        for name in ("prefix", "prefix_length", "prefix_width", "newline"):
            one, two = (getattr(x.config, name, None) for x in (first, other))
            if one != two:
                yield (
                    f"{first.file} and {other.file} take different conditions: {name} "
                    f"is {one} and {two}"
                )


def llm_and_ta_tok(
    llm_file: str, llm: Qwen2Config, file: str, ta_tok: TaTokConfig
) -> Iterator[str]:
    """What keeps a language model from writing TA-Tok's indices."""
    if llm.vocab_size <= ta_tok.codebook_size:
        yield (
            f"{llm_file} knows {llm.vocab_size} tokens, which do not hold the "
            f"{ta_tok.codebook_size} of {file} (a Tar model has them all)"
        )
