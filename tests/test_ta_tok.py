"""TA-Tok against the published PyTorch model; `test_tar` goes on to pixels."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import TA_TOK, convert, ta_tok_config, to_torch
from jaxspec.models.ta_tok import TaTok, TaTokConfig, pool_mean, resize
from jaxspec.models.vq import to_uint8_truncated
from tests.fixtures import synthetic
from tests.parity import E2E, FOLDER, published

TINY = "tar_tatok_tiny"


@cache
def jitted(config: TaTokConfig, method: str, **static):
    return jax.jit(partial(TaTok(config).apply, method=method, **static))


def features(name: str, indices: np.ndarray) -> np.ndarray:
    model = published(name)
    return np.asarray(jitted(model.config, "decode")(model.params, indices))


@pytest.mark.parametrize("pool", [1, 2, 3])
def test_encode(pool):
    model = published(TINY)
    images = model.expected["image"].transpose(0, 2, 3, 1)
    got = jitted(model.config, "encode", pool=pool)(model.params, images)
    want = model.expected[f"indices_scale{pool}"]
    assert want.shape[1] == model.config.indices(pool)
    np.testing.assert_array_equal(got, want)
    # What the published model calls encoded is what it decodes from these indices.
    encoded = model.expected[f"encoded_scale{pool}"]
    np.testing.assert_allclose(features(TINY, want), encoded, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", ["", "_scale2"])
def test_decode(scale):
    expected = published(TINY).expected
    got = features(TINY, expected[f"decode_indices{scale}"])
    assert got.std() > 0.1
    np.testing.assert_allclose(got, expected[f"decoded{scale}"], rtol=0, atol=1e-4)


def test_features_from_indices_end_to_end():
    expected = published(f"{E2E}_tatok").expected
    got = features(f"{E2E}_tatok", expected["ta_indices"])
    np.testing.assert_allclose(got, expected["features"], rtol=0, atol=1e-4)


def test_to_uint8_by_hand():
    """Fractions are cut, as Tar does, and what is out of range is clamped."""
    x = jnp.array([-1.5, -1.0, 0.0, 254.99 / 127.5 - 1, 1.0, 1.5])
    np.testing.assert_array_equal(to_uint8_truncated(x), [0, 0, 127, 254, 255, 255])


@pytest.mark.parametrize("side", [27, 13, 9])
def test_position_table_is_resized_as_published(side):
    with np.load(FOLDER / "expected" / "siglip2_positions.npz") as file:
        table, want = jnp.asarray(file["table"])[None], file[f"side{side}"]
    got = resize(table, (side, side))[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    # bfloat16 tables are resized in float32.
    half = resize(table.astype(jnp.bfloat16), (side, side))
    exact = resize(table.astype(jnp.bfloat16).astype(jnp.float32), (side, side))
    np.testing.assert_array_equal(half, exact.astype(jnp.bfloat16))


def test_pooling_drops_what_is_left_over():
    """27 rows pooled by 2 are 13, as published."""
    x = jnp.arange(3 * 5, dtype=jnp.float32).reshape(1, 3, 5, 1)
    np.testing.assert_array_equal(pool_mean(x, 2)[0, :, :, 0], [[3.0, 5.0]])
    assert pool_mean(x, 1).shape == x.shape


def test_resize_by_hand():
    """Halves of neighbours going up; going down, twice as wide, so edges weigh more."""
    x = jnp.array([0.0, 4.0, 8.0, 16.0]).reshape(1, 1, 4, 1)
    np.testing.assert_allclose(
        resize(x, (1, 8))[0, 0, :, 0], [0, 1, 3, 5, 7, 10, 14, 16]
    )
    # Weights 3, 3, 1 of the first output and 1, 3, 3 of the last.
    np.testing.assert_allclose(
        resize(x, (1, 2))[0, 0, :, 0], [20 / 7, 76 / 7], rtol=1e-6
    )


def test_pictures_of_other_sides_are_resized_not_cropped():
    model = published(TINY)
    image = np.random.default_rng(0).uniform(size=(1, 30, 60, 3)).astype(np.float32)
    encode = jitted(model.config, "encode", pool=1)
    want = encode(model.params, resize(jnp.asarray(image), (84, 84)))
    np.testing.assert_array_equal(encode(model.params, image), want)


def test_indices_that_are_no_grid():
    with pytest.raises(ValueError, match="35 indices are not a square grid"):
        features(TINY, np.zeros((1, 35), np.int32))


def test_bfloat16_weights():
    """Computed in their own type, the codebook in float32; features stay close."""
    model = published(TINY)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    indices = model.expected["decode_indices"]
    got = jitted(model.config, "decode")(half, indices)
    assert got.dtype == jnp.bfloat16
    want = model.expected["decoded"]
    assert np.abs(np.asarray(got, np.float32) - want).mean() < 0.02 * want.std()
    codes = jitted(model.config, "codes")(half)
    norms = jnp.linalg.norm(codes, axis=1)
    np.testing.assert_allclose(norms, jnp.ones_like(norms), atol=1e-6)


# Conversion.


def state_dict() -> dict[str, np.ndarray]:
    return dict(published(TINY).state_dict)


def test_what_is_not_run_is_dropped_by_name():
    model = published(TINY)
    kept = to_torch(model.params, model.config, TA_TOK)
    dropped = {key for key in state_dict() if key not in kept}
    last = {k for k in state_dict() if k.startswith("encoder.encoder.layers.3.")}
    heads = {k for k in state_dict() if ".head." in k}
    norm = {"encoder.post_layernorm.weight", "encoder.post_layernorm.bias"}
    assert dropped == last | heads | norm and len(last) == 16
    extra = state_dict() | {"encoder.encoder.layers.4.mlp.fc1.bias": np.zeros(96)}
    with pytest.raises(ValueError, match=r"unexpected encoder.encoder.layers.4.mlp"):
        convert(extra, model.config, TA_TOK)


def test_swapped_projections_fail_loudly():
    """The shapes do not tell; the features, compared at 1e-4, do."""
    model, weights = published(TINY), state_dict()
    for i in range(model.config.decoder.depth):
        layer = f"decoder.vision_model.encoder.layers.{i}.self_attn."
        for part in ("weight", "bias"):
            a, b = f"{layer}q_proj.{part}", f"{layer}k_proj.{part}"
            weights[a], weights[b] = weights[b], weights[a]
    params = convert(weights, model.config, TA_TOK)
    decode = jitted(model.config, "decode")
    got = decode(params, model.expected["decode_indices"])
    assert np.abs(np.asarray(got) - model.expected["decoded"]).max() > 0.05


def published_args() -> dict:
    """As they stand in the published file, which says nothing of the towers."""
    args = synthetic.load_manifest(FOLDER / "manifests" / f"{E2E}_tatok.json")["args"]
    return {k: v for k, v in args.items() if k != "vision"}


def test_configuration_of_the_published_size():
    tensor = lambda *shape: np.broadcast_to(np.float32(0), shape)
    shapes = {
        "encoder.embeddings.patch_embedding.weight": tensor(1152, 3, 14, 14),
        "encoder.embeddings.position_embedding.weight": tensor(729, 1152),
        "encoder.encoder.layers.0.mlp.fc1.weight": tensor(4304, 1152),
        "decoder.vision_model.embeddings.patch_embedding.weight": tensor(1152, 16),
        "decoder.vision_model.embeddings.position_embedding.weight": tensor(256, 1152),
        "decoder.vision_model.encoder.layers.0.mlp.fc1.weight": tensor(3072, 1152),
    }
    args = published_args() | {"input_size": 384}
    config = ta_tok_config(args, shapes)
    encoder, decoder = config.encoder, config.decoder
    assert (encoder.depth, encoder.heads, encoder.hidden) == (26, 16, 4304)
    assert (decoder.depth, decoder.heads, decoder.places) == (3, 12, 16)
    assert [config.indices(scale + 1) for scale in range(3)] == [729, 169, 81]
    with pytest.raises(ValueError, match="places is 27, but the other parts need 18"):
        ta_tok_config(args | {"input_size": 256}, shapes)
    with pytest.raises(ValueError, match="select_layer_id -1 is not supported"):
        ta_tok_config(args | {"select_layer_id": -1}, shapes)
    with pytest.raises(ValueError, match="args lack 'bottleneck'"):
        ta_tok_config({}, shapes)
    with pytest.raises(ValueError, match="no SigLIP2 tower has width 48"):
        ta_tok_config(published_args(), state_dict())
    with pytest.raises(ValueError, match="decoder.width is 48"):
        replace(config, decoder=published(TINY).config.decoder)
