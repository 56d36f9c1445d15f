"""Training for ZipAR's windows shows each cell what the decoder would show it."""

import jax
import numpy as np

from experiments.emoji.train_zipar import forced_logits, stand_ins
from jaxspec.decoding import Target, decode
from jaxspec.methods import ZipAR
from jaxspec.models.transformer import Transformer, TransformerConfig
from jaxspec.sampling import Sampling, image_keys

CONFIG = TransformerConfig(
    vocab_size=7,
    width=16,
    depth=2,
    heads=2,
    hidden=32,
    grid=(4, 5),
    prefix="features",
    prefix_length=2,
    prefix_width=3,
    positions="learned",
)


def test_stand_ins_by_hand():
    # Rows 1 to 3 of 4 x 5 cells. Window 1: row 1 starts when cell 0 is there, row 2
    # when row 0 has cells 0 and 1, row 3 when row 1 has its own two, 5 and 6.
    assert stand_ins((4, 5), 1).tolist() == [0, 1, 6]
    assert stand_ins((4, 5), 2).tolist() == [1, 3, 8]
    assert stand_ins((4, 5), 4).tolist() == [3, 4, 9]
    assert stand_ins((4, 5), 5).tolist() == [4, 9, 14]


def test_greedy_tokens_are_the_likeliest_in_training_too():
    """Each of a greedy decoder's tokens is what the training pass finds likeliest."""
    model = Transformer(CONFIG)
    condition = jax.random.normal(jax.random.key(1), (2, 2, 3))
    grids = np.zeros((2, CONFIG.cells), np.int32)
    params = model.init(jax.random.key(0), condition, grids)
    scaled = lambda x: x * 8  # far from ties
    params = {"params": jax.tree.map(scaled, params["params"])}
    target = Target.create(model, params, condition, Sampling.create(7, temperature=0))
    keys = image_keys(0, [0, 1], [0, 0])
    forced = jax.jit(forced_logits, static_argnums=0)
    seen = set()
    for window in (1, 2, 3, 5):
        tokens = decode(ZipAR(window), target, keys).tokens.reshape(2, -1)
        windows = np.full(2, window, np.int32)
        logits = forced(CONFIG, params, condition, tokens, windows)
        np.testing.assert_array_equal(np.argmax(logits, axis=-1), tokens)
        seen.add(tuple(np.ravel(tokens)))
    assert len(seen) == 4  # or the window would not matter
    plain = model.apply(params, condition, tokens)
    np.testing.assert_allclose(logits, plain, atol=1e-4)  # a whole row is AR
