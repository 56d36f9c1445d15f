"""Qwen2: the language model of Tar-1.5B and Tar-7B.

Yang et al. 2024, "Qwen2 Technical Report", section 2.2.1: a Llama with biases on
queries, keys and values. Tar (Han et al. 2025) adds image tokens to its vocabulary and
changes nothing else.
"""

from dataclasses import dataclass

from jaxspec.models.llama import LlamaConfig


@dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """Static shape of a `Llama`; its defaults are Qwen2's."""

    norm_epsilon: float = 1e-6
    rotary_base: float = 1e6
    biases: bool = True
