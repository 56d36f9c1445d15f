"""Small random models that say something: their logits depend on what they were fed."""

import json
from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding import Target, decode
from jaxspec.methods import AR
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.models.vq import VQConfig
from jaxspec.pipeline import Defaults, Pipeline, PipelineConfig, abstract_params
from jaxspec.sampling import Sampling
from jaxspec.text import PieceText

decode_jitted = jax.jit(decode)


def transformer(grid: tuple[int, int], codes: int) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=codes,
        width=16,
        depth=2,
        heads=2,
        hidden=24,
        grid=grid,
        prefix="features",
        prefix_length=4,
        prefix_width=8,
        positions="learned",
    )


def randomly(abstract, seed: int = 0, dtype=jnp.float32):
    """Random weights that keep the scale of what flows through; norms stay near one."""
    rng = np.random.default_rng(seed)

    def fill(path, x):
        if "norm" in jax.tree_util.keystr(path):
            return jnp.asarray(rng.uniform(0.5, 1.5, x.shape), dtype)
        scale = max(x.shape[-2:-1] + (1,)) ** -0.5
        return jnp.asarray(rng.normal(0, 1.5 * scale, x.shape), dtype)

    return jax.tree.map_with_path(fill, abstract)


def params(config: TransformerConfig, seed: int = 0):
    shapes = jax.eval_shape(
        Transformer(config).init,
        jax.random.key(0),
        jnp.zeros((1, config.prefix_length, config.prefix_width)),
        jnp.zeros((1, config.cells), jnp.int32),
    )
    return randomly(shapes, seed)


def conditions(config: TransformerConfig, batch: int, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    shape = (batch, config.prefix_length, config.prefix_width)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def target(config: TransformerConfig, batch: int, **settings) -> Target:
    """A conditioned toy; the conditions of its images differ."""
    sampling = Sampling.create(config.vocab_size, **settings)
    condition = conditions(config, batch)
    codes = conditions(config, config.vocab_size)[:, 0, :2]
    model = Transformer(config)
    return Target.create(model, params(config), condition, sampling, codes=codes)


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
    return Pipeline(randomly(abstract_params(config)), config)


# Counting compilations.

_compiled: list[str] = []


def _note(event: str, duration: float, **about) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(str(about.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(_note)


@contextmanager
def compilations():
    """The names of what is compiled inside (or read from the compile cache)."""
    before, names = len(_compiled), []
    yield names
    names.extend(_compiled[before:])


__all__ = ["AR", "compilations", "decode_jitted", "family", "target", "transformer"]
