"""TA-Tok's towers against transformers' SigLIP and SigLIP2, and its resizing."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from jaxspec.checkpoints.convert import CONV, Entry, Layout, Table, convert
from jaxspec.checkpoints.tables import POINTWISE, tower_entries
from jaxspec.models.ta_tok import Tower, TowerConfig, resize

WIDTH, HEADS, HIDDEN, DEPTH = 24, 4, 40, 3
SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": DEPTH,
}
CONFIG = TowerConfig(
    width=WIDTH,
    depth=DEPTH,
    heads=HEADS,
    hidden=HIDDEN,
    channels=5,
    patch=1,
    places=4,
    final_norm=True,
)


def randomize(model):
    """Random weights that keep the scale of what flows through."""
    torch.manual_seed(0)
    for name, x in model.named_parameters():
        if "norm" in name and "weight" in name:
            torch.nn.init.uniform_(x, 0.5, 1.5)
        elif x.ndim > 1:
            torch.nn.init.normal_(x, std=x[0].numel() ** -0.5)
        else:
            torch.nn.init.normal_(x, std=0.1)
    return model.eval()


@dataclass(frozen=True)
class Converted:
    """A tower with the weights of transformers' model."""

    config: TowerConfig
    model: torch.nn.Module
    patch: Layout

    def __call__(self, x: torch.Tensor) -> np.ndarray:
        """States [B, h, w, C] of channels-last input."""
        x = x.numpy()
        weights = {f"its.{k}": v.numpy() for k, v in self.model.state_dict().items()}

        def entries(config):
            for entry in tower_entries("our", "its", self.patch):
                path = entry.path.removeprefix("our/")
                yield Entry(path, entry.keys, entry.layout)

        init = lambda config: jax.eval_shape(Tower(config).init, jax.random.key(0), x)
        last = lambda config: (
            f"its.encoder.layers.{config.depth}.*",
            "its.head.*",
            *(() if config.final_norm else ("its.post_layernorm.*",)),
        )
        params = convert(weights, self.config, Table(entries, init, unused=last))
        return np.asarray(Tower(self.config).apply(params, x))


@pytest.mark.parametrize("side", [4, 3, 6])  # of a table of 4: as it is, fewer, more
def test_decoder_tower(side):
    config = transformers.Siglip2VisionConfig(
        **SIZES, num_channels=CONFIG.channels, num_patches=16, patch_size=1
    )
    model = randomize(transformers.Siglip2VisionModel(config))
    x = torch.randn(2, side, side, CONFIG.channels)
    with torch.inference_mode():
        want = model(
            x.reshape(2, side * side, -1),
            torch.ones(2, side * side, dtype=torch.int),
            torch.tensor([[side, side]] * 2),
        ).last_hidden_state
    got = Converted(CONFIG, model, POINTWISE)(x)
    assert want.std() > 0.5
    want = want.reshape(2, side, side, WIDTH)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_encoder_tower(depth):
    """States after each layer; 59 pixels are four patches of 14 and a rest."""
    config = transformers.SiglipVisionConfig(**SIZES, image_size=59, patch_size=14)
    model = randomize(transformers.SiglipVisionModel(config))
    model = without_layers_after(model, depth)
    images = torch.randn(2, 3, 59, 59)
    with torch.inference_mode():
        states = model(images, output_hidden_states=True).hidden_states
    ours = replace(CONFIG, depth=depth, channels=3, patch=14, final_norm=False)
    got = Converted(ours, model, CONV)(images.permute(0, 2, 3, 1))
    want = states[depth].reshape(2, 4, 4, WIDTH)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def without_layers_after(model, depth: int):
    """Keeps one layer more than are read, as the published file does."""
    model.encoder.layers = model.encoder.layers[: depth + 1]
    return model


@pytest.mark.parametrize("side", [27, 16, 13, 9])
def test_position_table(side):
    table = torch.randn(16, 16, 6)
    shape = torch.tensor([[side, side]])
    want = Siglip2VisionEmbeddings.resize_positional_embeddings(
        table, shape, max_length=side * side
    )
    got = resize(jax.numpy.asarray(table.numpy())[None], (side, side))
    want = want.reshape(1, side, side, 6)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(30, 70), (59, 59), (200, 45)])
def test_resized_pictures(shape):
    """As torchvision's Resize, which calls this."""
    image = torch.rand(1, 3, *shape)
    want = F.interpolate(
        image, (59, 59), mode="bilinear", antialias=True, align_corners=False
    )
    got = resize(jax.numpy.asarray(image.permute(0, 2, 3, 1).numpy()), (59, 59))
    np.testing.assert_allclose(got, want.permute(0, 2, 3, 1), rtol=0, atol=1e-5)
