"""Small random models that say something: their logits depend on what they were fed."""

import json
from functools import cache

import jax
import jax.numpy as jnp

from jaxspec.compile_cache import compilations
from jaxspec.decoding import Target
from jaxspec.models.transformer import TransformerConfig
from jaxspec.models.vq import VQConfig
from jaxspec.pipeline import Defaults, Pipeline, PipelineConfig
from jaxspec.testing import decode_jitted, toy_target
from jaxspec.testing import random_weights as randomly
from jaxspec.testing import toy_conditions as conditions
from jaxspec.testing import toy_config as transformer
from jaxspec.testing import toy_params as params
from jaxspec.text import PieceText
from jaxspec.weight_shapes import stacked_params


def target(config: TransformerConfig, batch: int, **settings) -> Target:
    """A conditioned toy; the conditions of its images differ."""
    assert config == transformer(config.grid, config.vocab_size)
    return toy_target(config.grid, config.vocab_size, batch, **settings)


def take(x, rows: list[int]):
    """Some images of a target, or of the targets within a method."""
    rows = jnp.array(rows)

    def some(x):
        return x.of_images(lambda y: y[rows]) if isinstance(x, Target) else x

    return jax.tree.map(some, x, is_leaf=lambda x: isinstance(x, Target))


# A family.

WORDS = ("red", "blue", "heart", "tree", "woman", "’", "s", "hat", "cafe", "##s")
STYLES = ("flat", "glossy")


def tokenizer_spec(styles: tuple[str, ...] = STYLES) -> str:
    vocab = {w: i for i, w in enumerate(("[PAD]", "[UNK]", *WORDS, *styles))}
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": vocab,
    }
    bert = {"type": "BertNormalizer", "clean_text": True, "lowercase": True}
    bert |= {"handle_chinese_chars": True, "strip_accents": None}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": bert,
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": None,
            "decoder": None,
            "model": model,
        }
    )


def text() -> PieceText:
    return PieceText(tokenizer_spec(), 4, STYLES, "glossy")


def family_config() -> PipelineConfig:
    """Sizes 8 and 16 px, of 2 by 2 and 4 by 4 cells; 12 codes."""
    return PipelineConfig(
        name="toy",
        decoders=((8, transformer((2, 2), 12)), (16, transformer((4, 4), 12))),
        vq=VQConfig(
            codebook_size=12,
            code_width=4,
            width=8,
            multipliers=(1, 2),
            encoder_blocks=1,
            decoder_blocks=1,
            latent_width=8,
            attention="none",
            norm="rms",
            resample="shuffle",
            patch=2,
            background=1.0,
        ),
        text=text(),
        defaults=Defaults(size=16, guidance=2.0, temperature=0.9, top_k=8, top_p=1.0),
        about="random weights",
    )


@cache
def family() -> Pipeline:
    config = family_config()
    return Pipeline(randomly(stacked_params(config)), config).unstacked()


__all__ = [
    "compilations",
    "conditions",
    "decode_jitted",
    "family",
    "params",
    "randomly",
    "take",
    "target",
    "transformer",
]
