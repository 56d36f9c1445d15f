"""The VQ tokenizer: recorded outputs of VQ-16, look-ups by hand, and locality."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.vq import VQ, VQConfig, to_uint8
from tests.parity import published

pytestmark = pytest.mark.optimised

each = pytest.mark.parametrize("name", ["llamagen_vq16_tiny", "llamagen_vq16_full"])
channels_last = lambda x: np.moveaxis(x, 1, -1)


@cache
def jitted(config: VQConfig, method: str):
    return jax.jit(partial(VQ(config).apply, method=method))


@each
def test_published_encoder(name):
    model = published(name)
    image = channels_last(model.expected["image"])
    latents = jitted(model.config, "latents")(model.params, image)
    want = channels_last(model.expected["pre_quant"])
    np.testing.assert_allclose(latents, want, rtol=0, atol=1e-4)
    codes = VQ(model.config).apply(model.params, latents, method="nearest")
    assert codes.dtype == jnp.int32
    np.testing.assert_array_equal(
        codes.reshape(len(image), -1), model.expected["indices"]
    )


@each
def test_published_decoder(name):
    model = published(name)
    tokens = model.expected["indices"]
    tokens = tokens.reshape(len(tokens), 4, 4)
    got = jitted(model.config, "decode")(model.params, tokens)
    want = channels_last(model.expected["decoded"])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def random_params(config: VQConfig, seed: int = 0):
    """Weights that keep the scale of what flows through, biases among them."""
    rng = np.random.default_rng(seed)
    image = jnp.zeros((1, config.factor, config.factor, 3))
    return jax.tree.map(
        lambda x: jnp.asarray(
            rng.normal(0, np.prod(x.shape[:-1]) ** -0.5, x.shape), jnp.float32
        ),
        jax.eval_shape(VQ(config).init, jax.random.key(0), image),
    )


def test_grids_that_are_not_square():
    """2 by 3 cells, against the transposed picture through transposed kernels."""
    config = VQConfig(
        codebook_size=16,
        code_width=4,
        width=32,
        multipliers=(1, 2),
        encoder_blocks=1,
        decoder_blocks=1,
        latent_width=32,
    )
    params = random_params(config)
    turn = lambda x: jnp.swapaxes(x, 1, 2)
    turned = jax.tree.map(lambda w: jnp.swapaxes(w, 0, 1) if w.ndim == 4 else w, params)
    image = jax.random.normal(jax.random.key(0), (2, 4, 6, 3))
    latents = jitted(config, "latents")(params, image)
    assert latents.shape == (2, 2, 3, 4)
    want = turn(jitted(config, "latents")(turned, turn(image)))
    np.testing.assert_allclose(latents, want, rtol=0, atol=1e-4)

    tokens = jnp.arange(12).reshape(2, 2, 3)
    pixels = jitted(config, "decode")(params, tokens)
    assert pixels.shape == (2, 4, 6, 3)
    want = turn(jitted(config, "decode")(turned, turn(tokens)))
    np.testing.assert_allclose(pixels, want, rtol=0, atol=1e-4)


def lookup(codebook, latents, normalize: bool) -> np.ndarray:
    size, width = np.shape(codebook)
    config = VQConfig(size, width, normalize_codes=normalize)
    params = {"params": {"codebook": jnp.asarray(codebook)}}
    return VQ(config).apply(params, jnp.asarray(latents), method="nearest")


def test_lookup_by_hand():
    """(2, 2) points towards (10, 10) but lies next to (3, 0)."""
    codebook, latents = [[10.0, 10.0], [3.0, 0.0]], [[2.0, 2.0]]
    assert lookup(codebook, latents, normalize=False).tolist() == [1]
    assert lookup(codebook, latents, normalize=True).tolist() == [0]


@pytest.mark.parametrize("normalize", [True, False])
def test_lookup_by_brute_force(normalize):
    rng = np.random.default_rng(0)
    codebook = rng.normal(size=(64, 8)).astype(np.float32)
    latents = rng.normal(size=(2, 5, 7, 8)).astype(np.float32)
    a, b = latents.astype(np.float64)[..., None, :], codebook.astype(np.float64)
    if normalize:
        a = a / np.linalg.norm(a, axis=-1, keepdims=True)
        b = b / np.linalg.norm(b, axis=-1, keepdims=True)
    want = ((a - b) ** 2).sum(-1).argmin(-1)
    np.testing.assert_array_equal(lookup(codebook, latents, normalize), want)


def test_codes_of_the_local_tokenizer_depend_on_nearby_pixels_only():
    """The emoji family's plan: from one cell a change reaches at most nine others.

    1.5 of them through the full resolution, 2 through the lower level, 4 through the
    middle, 1 through the last convolution.
    """
    config = VQConfig(
        codebook_size=64,
        width=16,
        multipliers=(1, 2),
        encoder_blocks=1,
        decoder_blocks=1,
        latent_width=32,
        attention="none",
        norm="rms",
        resample="shuffle",
        patch=4,
        background=1.0,
    )
    assert config.factor == 8
    rng = np.random.default_rng(0)
    image = jnp.asarray(rng.uniform(-1, 1, (1, 128, 128, 3)), jnp.float32)
    params = random_params(config)
    latents = lambda x: jitted(config, "latents")(params, x)
    codes = lambda z: VQ(config).apply(params, z, method="nearest")

    before, after = latents(image), latents(image.at[0, 0, 0].add(-0.5))
    changed = np.argwhere(np.any(np.asarray(before != after)[0], axis=-1))
    assert [0, 0] in changed.tolist()
    assert 0 < changed.max() <= 9
    far = np.ix_([0], range(10, 16), range(10, 16))
    np.testing.assert_array_equal(codes(before)[far], codes(after)[far])


def test_to_uint8_clamps_before_the_cast():
    pixels = jnp.array([-7.0, -1.1, -1.0, -0.5, 0.0, 0.5, 1.0, 1.1, 7.0])
    want = [0, 0, 0, 64, 128, 191, 255, 255, 255]
    got = to_uint8(pixels)
    assert got.dtype == jnp.uint8
    assert got.tolist() == want
