"""Several published models at a time: put together into a folder that draws.

`jaxspec.load` opens it. Everything is checked before anything is written: that each
file is the model it is given as, that all of it converts, and that the models belong
together.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from jaxspec.checkpoints.chameleon import NEWLINE, check_draws
from jaxspec.checkpoints.folder import TOKENIZER, write_config
from jaxspec.checkpoints.pairing import (
    Decoder,
    VQFile,
    check_chameleon,
    check_drafter,
    check_llamagen,
    check_tar,
    check_together,
)
from jaxspec.checkpoints.published import ANOLE_DRAFTER, LLAMAGEN_DRAFTER
from jaxspec.checkpoints.readers import naming, read_json
from jaxspec.checkpoints.single import Part, Progress, open_model, write_folder
from jaxspec.pipeline import Defaults, PipelineConfig
from jaxspec.reading import Reader
from jaxspec.reading.llamagen import CaptionReader, ClassReader
from jaxspec.reading.lumina import DEFAULTS, AnoleReader, LuminaReader
from jaxspec.reading.tar import TarReader, Writer
from jaxspec.text import tokenizer_of

Source = str | os.PathLike


def convert_tar(
    folder: Source,
    *,
    ar_dtok: Sequence[Source],
    ta_tok: Source,
    vq: Source,
    llm: Source | None = None,
    weights: str | None = None,
    dtype=None,
    format: str = "safetensors",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Converts the models of Tar into a new folder.

    Args:
      folder: must not exist or be empty; it appears when all of it is written.
      ar_dtok: files of AR-DTok, one for each size.
      ta_tok: file of TA-Tok.
      vq: file of the VQ tokenizer that AR-DTok draws codes of.
      llm: folder of the language model, with its tokenizer; without it, drawing starts
        from semantic tokens.
      weights: which set, where an AR-DTok file has several.
      dtype, format, progress: as for `convert_model`.

    Returns:
      What `provenance.json` holds.

    Raises:
      FileNotFoundError, ModuleNotFoundError, OSError, ValueError: as `convert_model`
        does; or the models do not belong together.
    """
    decoders = [_open(x, "Tar AR-DTok", weights=weights, dtype=dtype) for x in ar_dtok]
    tokens = _open(ta_tok, "Tar TA-Tok", dtype=dtype)
    pictures = _open(vq, "LlamaGen VQ", dtype=dtype)
    parts = [*decoders, tokens, pictures]
    language = None if llm is None else _open(llm, "Qwen2", dtype=dtype)
    check_tar(
        [_decoder(part) for part in decoders],
        VQFile(_name(pictures), pictures.config),
        (_name(tokens), tokens.config),
        None if language is None else (_name(language), language.config),
    )
    reader = TarReader(tokens.config)
    if language is not None:
        parts.append(language)
        reader = TarReader(
            tokens.config,
            _writer(language),
            _tokenizer(language),
            language_top_k=min(1200, language.config.vocab_size),
        )
        with naming(language.checkpoint.path):
            reader.check_vocabulary()
    # As in the published inference code.
    defaults = {"guidance": 4.0, "top_k": 0}
    config = _config("Tar", decoders, pictures, reader, defaults, pixels="truncated")
    write = lambda partial: write_config(config, partial)
    return write_folder(Path(folder), parts, write, progress, format)


def convert_llamagen(
    folder: Source,
    *,
    gpt: Sequence[Source],
    vq: Source,
    t5: Source | None = None,
    drafter: Sequence[Source] = (),
    size: int | None = None,
    heads: int | None = None,
    weights: str | None = None,
    dtype=None,
    format: str = "safetensors",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Converts the models of LlamaGen, of classes or of captions, into a new folder.

    Args:
      folder: must not exist or be empty; it appears when all of it is written.
      gpt: files of the transformer, one for each size; all of classes, or all of
        captions.
      vq: file of their VQ tokenizer.
      t5: folder of the text encoder, with its tokenizer, for captions; without it,
        drawing starts from its features.
      drafter: LANTERN's drafters of these transformers, for EAGLE and LANTERN, in the
        order of `gpt`; where there are fewer, the last transformers have none.
      size, heads: as for `open_model`, where there is one file.
      weights: which set, where a transformer's file has several.
      dtype, format, progress: as for `convert_model`.

    Returns:
      What `provenance.json` holds.

    Raises:
      FileNotFoundError, ModuleNotFoundError, OSError, ValueError: as `convert_model`
        does; or the models do not belong together.
    """
    if size is not None and len(gpt) > 1:
        raise ValueError(
            "size is for one file: name several as published, c2i_B_256.pt"
        )
    told = {"size": size, "heads": heads, "weights": weights, "dtype": dtype}
    decoders = [_open(x, "LlamaGen c2i", "LlamaGen t2i", **told) for x in gpt]
    pictures = _open(vq, "LlamaGen VQ", dtype=dtype)
    encoder = None if t5 is None else _open(t5, "T5", dtype=dtype)
    check_together([_decoder(part) for part in decoders])
    for part in decoders:
        check_llamagen(
            _decoder(part),
            VQFile(_name(pictures), pictures.config),
            None if encoder is None else (_name(encoder), encoder.config),
        )
    eagles = _drafters(drafter, decoders, LLAMAGEN_DRAFTER, heads=heads, dtype=dtype)
    first, parts = decoders[0].config, [*decoders, pictures, *eagles]
    if first.prefix == "class":
        reader: Reader = ClassReader(first.prefix_width)
        defaults = {"guidance": 4.0, "top_k": min(2000, first.vocab_size)}
    else:
        reader = CaptionReader(first.prefix_length, first.prefix_width)
        defaults = {"guidance": 7.5, "top_k": min(1000, first.vocab_size)}
    if encoder is not None:
        parts.append(encoder)
        reader = CaptionReader(
            first.prefix_length, first.prefix_width, encoder.config, _tokenizer(encoder)
        )
    name = decoders[0].family.name
    config = _config(
        name, decoders, pictures, reader, defaults, drafters=_sized(eagles)
    )
    write = lambda partial: write_config(config, partial)
    return write_folder(Path(folder), parts, write, progress, format)


def convert_chameleon(
    folder: Source,
    *,
    family: Literal["Lumina-mGPT", "Anole", "Chameleon"],
    model: Sequence[Source],
    vq: Source,
    tokenizer: Source,
    drafter: Sequence[Source] = (),
    size: int | None = None,
    draws: str | None = None,
    dtype=None,
    format: str = "safetensors",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Converts Lumina-mGPT, Anole or another Chameleon that draws into a new folder.

    Args:
      folder: must not exist or be empty; it appears when all of it is written.
      family: what it is. Lumina-mGPT is asked and draws in its own way; another
        Chameleon as Anole does.
      model: folders or files of the language model, one for each size.
      vq: Meta's vqgan.ckpt, the tokenizer that all of them share.
      tokenizer: Meta's text_tokenizer.json, the vocabulary that all of them share.
      drafter: LANTERN's drafters of these models, as for `convert_llamagen`.
      size: pixels a side, where there is one model whose name does not tell.
      draws: why it can draw, where its files do not say so; it is recorded.
      dtype, format, progress: as for `convert_model`.

    Returns:
      What `provenance.json` holds.

    Raises:
      FileNotFoundError, ModuleNotFoundError, OSError, ValueError: as `convert_model`
        does; nothing says that the model was trained to draw; the vocabulary has other
        numbers; or the models do not belong together.
    """
    if size is not None and len(model) > 1:
        raise ValueError("size is for one model: name several as published")
    if not Path(tokenizer).is_file():
        raise FileNotFoundError(
            f"{tokenizer} is missing: it lies beside Meta's vqgan.ckpt"
        )
    lumina = family == "Lumina-mGPT"
    newline = NEWLINE if lumina else None
    decoders = []
    for path in model:
        part = _open(
            path, "Chameleon", "Chameleon in Meta's layout", size=size, dtype=dtype
        )
        check_draws(part.checkpoint, draws, family)
        config = replace(part.config, newline=newline)
        if (part.config.newline is None) != (newline is None):
            raise ValueError(
                f"{path} is not {family}: by its name or its config.json it "
                + ("ends no row" if lumina else "ends every row")
                + " with a newline; convert it as "
                + ("Anole or Chameleon" if lumina else "Lumina-mGPT")
            )
        told = {"draws": draws} if draws else {}
        decoders.append(replace(part, config=config, told=told))
    pictures = _open(vq, "Chameleon VQ", dtype=dtype)
    check_chameleon(
        [_decoder(part) for part in decoders], VQFile(_name(pictures), pictures.config)
    )
    eagles = _drafters(drafter, decoders, ANOLE_DRAFTER, dtype=dtype)
    sizes = tuple(sorted(map(_size, decoders)))
    spec = _vocabulary(Path(tokenizer))
    reader = LuminaReader(spec, sizes) if lumina else AnoleReader(spec, sizes)
    with naming(Path(tokenizer)):
        reader.check_vocabulary()
    config = _config(
        family,
        decoders,
        pictures,
        reader,
        DEFAULTS,
        pixels="truncated",
        drafters=_sized(eagles),
    )
    write = lambda partial: write_config(config, partial)
    parts = [*decoders, pictures, *eagles]
    return write_folder(Path(folder), parts, write, progress, format)


def _open(path: Source, *families: str, **how) -> Part:
    """The model at a path, which must be of one of the families."""
    part = open_model(path, **how)
    if part.family.name not in families:
        wanted = " or ".join(families)
        raise ValueError(f"{path} holds {part.family.name}, not {wanted}")
    return part


def _drafters(
    paths: Sequence[Source], decoders: Sequence[Part], family: str, **how
) -> list[Part]:
    """The drafter at each path, made for the decoder in its place."""
    if len(paths) > len(decoders):
        raise ValueError(
            f"there are {len(paths)} drafters for {len(decoders)} models: one for each"
        )
    parts = []
    for path, decoder in zip(paths, decoders, strict=False):
        part = _open(path, family, size=_size(decoder), **how)
        check_drafter(_decoder(decoder), _name(part), part.config)
        parts.append(part)
    return parts


def _name(part: Part) -> str:
    return part.checkpoint.path.name


def _size(part: Part) -> int:
    """Pixels a side, of a part that is one for each size."""
    return int(part.place.rpartition("/")[2])


def _sized(parts: Sequence[Part]) -> tuple[tuple[int, Any], ...]:
    """Sizes and configurations, the smallest first."""
    return tuple(sorted((_size(part), part.config) for part in parts))


def _decoder(part: Part) -> Decoder:
    return Decoder(_name(part), part.config, _size(part))


def _config(
    name: str,
    decoders: Sequence[Part],
    vq: Part,
    reader: Reader,
    defaults: dict[str, Any],
    **more,
) -> PipelineConfig:
    sizes = _sized(decoders)
    return PipelineConfig(
        name=name,
        decoders=sizes,
        vq=vq.config,
        text=reader,
        defaults=Defaults(sizes[-1][0], temperature=1.0, top_p=1.0, **defaults),
        about="Converted from published files: see provenance.json.",
        **more,
    )


# What lies beside the weights of a language model or a text encoder.


def _tokenizer(part: Part) -> str:
    """The `tokenizer.json` of a model."""
    path = _beside(part) / TOKENIZER
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; transformers' AutoTokenizer writes it with "
            "save_pretrained"
        )
    return _vocabulary(path)


def _vocabulary(path: Path) -> str:
    """What a tokenizer's file holds, once it can be read."""
    with naming(path):
        spec = path.read_text(encoding="utf8")
        tokenizer_of(spec)
    return spec


def _writer(part: Part) -> Writer:
    """A language model with its own settings of generation."""
    folder, settings = _beside(part), dict(part.checkpoint.args)
    template = folder / "chat_template.jinja"
    chat = template.read_text(encoding="utf8") if template.is_file() else None
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= read_json(folder / name)
    chat = chat or settings.get("chat_template") or "<|im_start|>"
    if "<|im_start|>" not in str(chat):
        raise ValueError(f"{folder} has another chat template than Qwen2's")
    ends = settings.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    penalty = settings.get("repetition_penalty")
    return Writer(
        part.config,
        ends=tuple(end for end in ends if end is not None),
        repetition_penalty=None if penalty in (None, 1) else float(penalty),
        context=part.checkpoint.args.get("max_position_embeddings"),
    )


def _beside(part: Part) -> Path:
    path = part.checkpoint.path
    return path if path.is_dir() else path.parent


__all__ = ["convert_chameleon", "convert_llamagen", "convert_tar"]
