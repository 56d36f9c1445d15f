"""A tiny random Lumina-mGPT and its vocabulary, of the real tokens' numbers."""

import json
from functools import cache

from tokenizers.pre_tokenizers import ByteLevel

from jaxspec.models.chameleon import ChameleonConfig, ChameleonGridConfig
from jaxspec.models.vq import VQConfig
from jaxspec.pipeline import Defaults, Pipeline, PipelineConfig
from jaxspec.reading.lumina import CODES, FIRST, AnoleReader, LuminaReader, code_name
from jaxspec.testing import random_weights
from jaxspec.weight_shapes import stacked_params

LETTERS = 8900  # the token of the first letter; those before it are no words


@cache
def vocabulary() -> str:
    """A `tokenizer.json` in which every byte is a word."""
    names = {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>", 8196: "<eoss>"}
    names |= {FIRST + code: code_name(code) for code in range(CODES)}
    names |= {8197: "<racm3:break>"}
    names |= {k: f"<reserved{k - 4:05d}>" for k in range(8198, LETTERS)}
    names |= dict(enumerate(sorted(ByteLevel.alphabet()), LETTERS))
    special = [k for k, name in names.items() if name.startswith("<") and name != "<"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    flags |= {"normalized": False, "special": True}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": k, "content": names[k], **flags} for k in special],
            "normalizer": None,
            "pre_tokenizer": {**bytes_, "use_regex": True},
            "post_processor": None,
            "decoder": {**bytes_, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {name: k for k, name in names.items()},
                "merges": [],
            },
        }
    )


def language() -> ChameleonConfig:
    return ChameleonConfig(
        vocab_size=LETTERS + 256,
        width=16,
        depth=2,
        heads=2,
        key_heads=2,
        head_width=8,
        hidden=24,
    )


def _family(name, decoders, reader, side: int) -> Pipeline:
    config = PipelineConfig(
        name=name,
        decoders=decoders,
        vq=VQConfig(
            codebook_size=CODES,
            code_width=4,
            width=8,
            multipliers=(1, 2),
            encoder_blocks=1,
            decoder_blocks=1,
            latent_width=8,
            attention="none",
            norm="rms",
            resample="shuffle",
            patch=8,  # 16 pixels a cell, as the real one
        ),
        text=reader,
        defaults=Defaults(side, guidance=3.0, temperature=1.0, top_k=2000, top_p=1.0),
        pixels="truncated",
    )
    return Pipeline(random_weights(stacked_params(config)), config).unstacked()


@cache
def family() -> Pipeline:
    """Lumina-mGPT of 64 and of 128 px: 4 by 4 and 8 by 8 cells."""
    grids = {64: (4, 5), 128: (8, 9)}
    decoders = [
        (s, ChameleonGridConfig(language(), grid, 0)) for s, grid in grids.items()
    ]
    reader = LuminaReader(vocabulary(), tuple(grids))
    return _family("toy Lumina", tuple(decoders), reader, 128)


@cache
def anole() -> Pipeline:
    """Anole of 64 px: 4 by 4 cells, no newlines."""
    decoder = ChameleonGridConfig(language(), (4, 4), 0, newline=None)
    return _family("toy Anole", ((64, decoder),), AnoleReader(vocabulary(), (64,)), 64)
