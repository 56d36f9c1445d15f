"""Families whose matrices are int8: less memory, and less to read in every pass."""

from dataclasses import replace
from typing import Any

from jaxspec.models import llama
from jaxspec.models.int8 import Int8, has_int8
from jaxspec.pipeline import Pipeline, network_of
from jaxspec.sharding import NO_INT8, mesh_of
from jaxspec.sizes import size_label

# Of a layer; the head is one beside them. Norms, embeddings and what makes a prefix
# stay: they are small, or only some of their rows are read.
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

    Raises:
      ValueError: they are split over several devices, or int8 already.
    """
    if mesh_of(params) is not None:
        raise ValueError(NO_INT8)
    if has_int8(params):
        raise ValueError(f"the weights of {params.config.name} are int8 already")
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
        return {k: Int8.of(x) if k in names else x for k, x in weights.items()}

    inner = of(params["params"], ("head",))
    layers = tuple(of(layer, MATRICES) for layer in inner["layers"])
    return {"params": {**inner, "layers": layers}}


__all__ = ["check_weights", "quantised", "quantised_network"]
