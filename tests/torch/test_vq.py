"""The VQ against Janus's in transformers, which is LlamaGen's VQ-16."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import JanusVQVAE
from transformers.models.janus.configuration_janus import JanusVQVAEConfig

from jaxspec.checkpoints import LLAMAGEN_VQ, convert
from jaxspec.models.vq import VQ, VQConfig

SIDE = 6  # of the code grid
CONFIG = VQConfig(codebook_size=64, width=32, multipliers=(1, 1, 2), latent_width=32)
KEYS = {  # transformers' part of a name, LlamaGen's
    r"\.(down|up)\.(\d)\.": r".conv_blocks.\2.",
    r"\.block\.": ".res.",
    r"\.mid\.block_1\.": ".mid.0.",
    r"\.mid\.attn_1\.": ".mid.1.",
    r"\.mid\.block_2\.": ".mid.2.",
}


def published_name(key: str) -> str:
    for theirs, published in KEYS.items():
        key = re.sub(theirs, published, key)
    return key


@pytest.fixture(scope="module")
def janus():
    torch.manual_seed(0)
    model = JanusVQVAE(
        JanusVQVAEConfig(
            embed_dim=CONFIG.code_width,
            num_embeddings=CONFIG.codebook_size,
            latent_channels=CONFIG.latent_width,
            base_channels=CONFIG.width,
            channel_multiplier=list(CONFIG.multipliers),
            num_res_blocks=CONFIG.encoder_blocks,
            num_patches=SIDE,
        )
    )
    for name, x in model.named_parameters():
        if x.ndim == 4:  # convolutions that keep the scale of what flows through
            torch.nn.init.normal_(x, std=x[0].numel() ** -0.5)
        elif "norm" in name and "weight" in name:
            torch.nn.init.uniform_(x, 0.5, 1.5)
        else:
            torch.nn.init.normal_(x, std=0.1 if "bias" in name else 1.0)
    # transformers normalises codes to decode, but not to encode as LlamaGen does: with
    # codes of length one that changes no distance's order.
    codes = model.quantize.embedding.weight.data
    codes /= codes.norm(dim=-1, keepdim=True)
    return model


@pytest.fixture(scope="module")
def apply(janus):
    state_dict = {published_name(k): x.numpy() for k, x in janus.state_dict().items()}
    params = jax.tree.map(jnp.asarray, convert(state_dict, CONFIG, LLAMAGEN_VQ))
    return lambda x, method: jax.jit(VQ(CONFIG).apply, static_argnames="method")(
        params, x, method=method
    )


def test_encode(janus, apply):
    # A colour a cell: what varies within cells is lost on random weights.
    pictures = torch.rand(2, 3, SIDE, SIDE) * 2 - 1
    pictures = torch.nn.functional.interpolate(pictures, scale_factor=CONFIG.factor)
    with torch.inference_mode():
        want = janus.encode(pictures).image_tokens.reshape(2, SIDE, SIDE).numpy()
    got = apply(pictures.permute(0, 2, 3, 1).numpy(), "encode")
    assert len(np.unique(want)) > CONFIG.codebook_size / 4
    np.testing.assert_array_equal(got, want)


def test_decode(janus, apply):
    tokens = torch.randint(CONFIG.codebook_size, (2, SIDE * SIDE))
    with torch.inference_mode():
        want = janus.decode(tokens).permute(0, 2, 3, 1).numpy()
    got = apply(tokens.reshape(2, SIDE, SIDE).numpy(), "decode")
    assert want.std() > 0.1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
