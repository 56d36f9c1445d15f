"""Between pictures and codes: the tokenizer's two ways, compiled."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspec.models.vq import VQ, VQConfig, from_uint8, to_uint8, to_uint8_truncated

# How pixels become bytes: as LlamaGen's evaluation does it, or as Tar.
Bytes = Literal["rounded", "truncated"]
TO_UINT8 = {"rounded": to_uint8, "truncated": to_uint8_truncated}


@jax.jit(static_argnums=(0, 1))
def pictures(
    config: VQConfig, pixels: Bytes, params: Any, tokens: jax.Array
) -> jax.Array:
    """Pictures uint8 of code grids [B, h, w], which are not checked."""
    images: Any = VQ(config).apply(params, tokens, method="decode")
    return TO_UINT8[pixels](images.astype(jnp.float32))


@jax.jit(static_argnums=0)
def codes_of_pictures(config: VQConfig, params: Any, images: jax.Array) -> jax.Array:
    """Code grids [B, h, w] of pictures uint8, which are not checked."""
    codes: Any = VQ(config).apply(params, from_uint8(images), method="encode")
    return codes


@jax.jit(static_argnums=0)
def codebook(config: VQConfig, params: Any) -> jax.Array:
    """What codes look like [V, d], as the tokenizer looks them up."""
    looked_up: Any = VQ(config).apply(params, method="codes")
    return looked_up
