"""Tiny random models of Lumina-mGPT and Anole as files, laid out as published."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoints import CHAMELEON, CHAMELEON_RAW, CHAMELEON_VQ, to_torch
from jaxspec.models import abstract
from jaxspec.models.chameleon import ChameleonConfig, ChameleonGridConfig
from jaxspec.models.vq import VQConfig
from jaxspec.reading.lumina import code_name
from jaxspec.testing import random_weights
from tests import toy_lumina
from tests.converting import save, save_sharded

VQ = VQConfig(
    codebook_size=8192,
    code_width=4,
    normalize_codes=False,
    width=32,  # of as many groups as channels, the least there can be
    multipliers=(1, 1, 1, 1, 1),  # 16 pixels a cell
    encoder_blocks=1,
    decoder_blocks=2,
    latent_width=8,
    attention="middle",
)


def language_params(seed: int = 0) -> Any:
    """Of `toy_lumina.language()`."""
    config = ChameleonGridConfig(toy_lumina.language(), (1, 1))
    return random_weights(abstract.chameleon(config), seed)


def vq_params() -> Any:
    return random_weights(abstract.vq(VQ))


def language_model(folder: Path, seed: int = 0, **args) -> Path:
    """A folder of Hugging Face's, in shards; `args` change its config.json."""
    grid = ChameleonGridConfig(toy_lumina.language(), (1, 1))
    tensors = to_torch(language_params(seed), grid, CHAMELEON)
    # As published, with the encoder of its tokenizer.
    tensors["model.vqmodel.encoder.conv_in.weight"] = np.ones((4, 3, 3, 3), np.float32)
    save_sharded(folder, tensors)
    language = grid.language
    config = {
        "architectures": ["ChameleonXLLMXForConditionalGeneration"],
        "model_type": "chameleon",
        "vocab_size": language.vocab_size,
        "hidden_size": language.width,
        "intermediate_size": language.hidden,
        "num_hidden_layers": language.depth,
        "num_attention_heads": language.heads,
        "num_key_value_heads": language.key_heads,
        "rms_norm_eps": language.norm_epsilon,
        "rope_theta": language.rotary_base,
        "swin_norm": language.output_norms,
        "mask_image_logits": False,
        "vocabulary_map": {code_name(code): 4 + code for code in range(200)},
        "tie_word_embeddings": False,
    }
    config = {k: x for k, x in (config | args).items() if x is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def raw_language_model(path: Path, seed: int = 0) -> Path:
    """One file under Meta's names, in Meta's layout, as Anole came first."""
    grid = ChameleonGridConfig(toy_lumina.language(), (1, 1))
    return save(path, to_torch(language_params(seed), grid, CHAMELEON_RAW))


def sliced_language_model(folder: Path, language: ChameleonConfig, slices: int) -> Any:
    """Meta's layout of a model in slices, in a folder; returns its parameters."""
    grid = ChameleonGridConfig(language, (1, 1))
    params = random_weights(abstract.chameleon(grid))
    parts = [{} for _ in range(slices)]
    for key, x in to_torch(params, grid, CHAMELEON_RAW).items():
        name = key.removesuffix(".weight").rpartition(".")[2]
        by_input = name in ("wo", "w2", "tok_embeddings")
        whole = name in ("attention_norm", "ffn_norm", "norm")
        split = [x] * slices if whole else np.split(x, slices, axis=int(by_input))
        for part, own in zip(parts, split, strict=True):
            part[key] = own[0] if "normalization" in key else own
    for i, part in enumerate(parts):
        save(folder / f"consolidated.{i:02d}.safetensors", part)
    told = {"n_heads": language.heads, "swin_norm": language.output_norms}
    told |= {"norm_eps": language.norm_epsilon}
    (folder / "params.json").write_text(
        json.dumps({"model": told, "model_parallel_size": slices})
    )
    return params


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The options `--vq` and `--tokenizer` of Meta's files."""
    tensors = to_torch(vq_params(), VQ, CHAMELEON_VQ)
    tensors["loss.discriminator.main.0.weight"] = np.ones((2, 3), np.float32)
    vocabulary = folder / "text_tokenizer.json"
    vocabulary.parent.mkdir(parents=True, exist_ok=True)
    vocabulary.write_text(toy_lumina.vocabulary(), encoding="utf8")
    return {"--vq": save(folder / "vqgan.safetensors", tensors)} | {
        "--tokenizer": vocabulary
    }
