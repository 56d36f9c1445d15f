"""Families whose matrices are int8: less memory, and less to read in every pass."""

from dataclasses import replace
from typing import Any, cast

import jax

from jaxspec.models import llama
from jaxspec.models.int8 import Int8, has_int8
from jaxspec.pipeline import Pipeline, network_of
from jaxspec.sharding import mesh_of, of_int8
from jaxspec.sizes import size_label

# Of a layer; the head is one beside them. Norms, embeddings and what makes a prefix
# stay: they are small, or only some of their rows are read.
PARTS = ("decoders", "llm")
MATRICES = ("qkv", "query", "key_value", "attention_out", "gate_up", "down")


def check_weights(weights: str | None) -> None:
    """Raises ValueError if weights can be of no such kind: "int8", or None as given."""
    if weights not in (None, "int8"):
        raise ValueError(f"weights must be 'int8' or None, not {weights!r}")


def quantised(params: Pipeline) -> Pipeline:
    """The same family with the transformers' matrices in int8 (see `models.int8`).

    Those of every size, and of the language model that writes for them, if there is
    one. What was trained beside them (drafters, heads, LPD's models), the tokenizer and
    encoders of text stay as they are.

    Where they are split over a mesh, so are these.

    Raises:
      ValueError: they are int8 already.
    """
    if has_int8(params):
        raise ValueError(f"the weights of {params.config.name} are int8 already")
    return with_int8(params)


def with_int8(params: Pipeline) -> Pipeline:
    """`quantised`, of a family whose layers may be so already."""
    weights, config = dict(params.params), params.config
    networks = {size_label(size): network_of(x) for size, x in config.decoders}
    weights["decoders"] = {
        size: quantised_network(networks[size].prepared(x))
        for size, x in weights["decoders"].items()
    }
    if "llm" in weights:
        language = config.text.networks()["llm"]
        weights["llm"] = quantised_network(llama.unstacked(language, weights["llm"]))
    return replace(params, params=weights)


def quantised_network(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a network, `prepared`: its layers are apart."""

    def of(weights: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        float_ = lambda k, x: k in names and not isinstance(x, Int8)
        return {k: turned(x) if float_(k, x) else x for k, x in weights.items()}

    inner = of(params["params"], ("head",))
    layers = tuple(of(layer, MATRICES) for layer in inner["layers"])
    return {"params": {**inner, "layers": layers}}


def turned(matrix: jax.Array) -> Int8:
    """A matrix in int8, split over a mesh as it is."""
    mesh = mesh_of(matrix)
    if mesh is None:
        # Matrices side by side as one: XLA's CPU backend would copy more axes.
        return Int8.of(matrix.reshape(len(matrix), -1))
    where = Int8(*cast(Any, of_int8(matrix, mesh)))
    return jax.jit(Int8.of, out_shardings=where)(matrix)


def turned_layer(name: str, weight: jax.Array) -> jax.Array | Int8:
    """A weight of one layer, `turned` if it is a matrix of those that are.

    `name` is as `jaxspec.checkpoints.trees.flatten` has it.
    """
    part, *_, last = name.split("/")
    return turned(weight) if part in PARTS and last in MATRICES else weight


__all__ = [
    "check_weights",
    "quantised",
    "quantised_network",
    "turned_layer",
    "with_int8",
]
