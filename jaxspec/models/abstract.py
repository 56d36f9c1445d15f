"""Parameters of models as shapes and types (float32), layers stacked, as in files.

Nothing is computed.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.chameleon import ChameleonGridConfig
from jaxspec.models.drafter import EagleConfig, head_of
from jaxspec.models.flashar import FlashConfig, FlashHead
from jaxspec.models.llama import Llama, LlamaConfig
from jaxspec.models.llama import layer_shapes as llama_layer_shapes
from jaxspec.models.lpd import LPDConfig, LPDNet
from jaxspec.models.matcher import Matcher, MatcherConfig
from jaxspec.models.qwen2 import Qwen2Config
from jaxspec.models.ssd import SSDConfig, SSDHead
from jaxspec.models.t5 import T5Config, T5Encoder
from jaxspec.models.ta_tok import TaTok, TaTokConfig, tower_shapes
from jaxspec.models.transformer import Transformer, TransformerConfig, layer_shapes
from jaxspec.models.upsampler import Resampler, UpsamplerConfig
from jaxspec.models.vq import VQ, VQConfig


def _init(init, *shapes) -> Any:
    return jax.eval_shape(init, jax.eval_shape(jax.random.key, 0), *shapes)


def transformer(config: TransformerConfig) -> Any:
    """Of `Transformer`."""
    # Any method will do: `setup` makes all parameters.
    init = partial(Transformer(config).init, method="logits")
    return _init(init, jax.ShapeDtypeStruct((1, config.width), jnp.float32))


def vq(config: VQConfig) -> Any:
    """Of `VQ`."""
    shape = (1, config.factor, config.factor, 3)
    return _init(VQ(config).init, jax.ShapeDtypeStruct(shape, jnp.float32))


def upsampler(config: UpsamplerConfig) -> Any:
    """Of `Resampler`."""
    shape = (1, config.scale, config.scale, config.code_width)
    return _init(Resampler(config).init, jax.ShapeDtypeStruct(shape, jnp.float32))


def eagle(config: EagleConfig) -> Any:
    """Of an EAGLE drafter."""
    features = jax.ShapeDtypeStruct((1, 1, config.width), jnp.float32)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return _init(head_of(config).init, features, tokens)


def flash(config: FlashConfig) -> Any:
    """Of `FlashHead`."""
    c = config.target
    x = jax.ShapeDtypeStruct((1, 1, c.width), jnp.float32)
    logits = jax.ShapeDtypeStruct((1, 1, c.vocab_size), jnp.float32)
    cells = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    init = partial(FlashHead(config).init, method="logits")
    return _init(init, x, logits, x, cells)


def lpd(config: LPDConfig) -> Any:
    """Of `LPDNet`."""
    init = partial(LPDNet(config).init, method="features")
    return _init(init, jax.ShapeDtypeStruct((1, config.width), jnp.float32))


def ssd(config: SSDConfig) -> Any:
    """Of `SSDHead`."""
    x = jax.ShapeDtypeStruct((1, 1, config.target.width), jnp.float32)
    return _init(SSDHead(config).init, x, x)


def matcher(config: MatcherConfig) -> Any:
    """Of `Matcher`."""
    side = 2 ** len(config.blocks)
    grid = jax.ShapeDtypeStruct((1, side, side, config.code_width), jnp.float32)
    caption = jax.ShapeDtypeStruct((1, 1, config.text_width), jnp.float32)
    return _init(Matcher(config).init, grid, caption)


def llama(config: LlamaConfig) -> Any:
    """Of `Llama`."""
    init = partial(Llama(config).init, method="logits")
    return _init(init, jax.ShapeDtypeStruct((1, config.width), jnp.float32))


def chameleon(config: ChameleonGridConfig) -> Any:
    """Of the language model that draws a grid."""
    return llama(config.language)


def t5(config: T5Config) -> Any:
    """Of `T5Encoder`."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    seen = jax.ShapeDtypeStruct((1, 2), jnp.bool_)
    return _init(T5Encoder(config).init, tokens, seen)


def ta_tok(config: TaTokConfig) -> Any:
    """Of `TaTok`."""
    shape = (1, config.image, config.image, 3)
    return _init(TaTok(config).init, jax.ShapeDtypeStruct(shape, jnp.float32))


_OF = {
    TransformerConfig: transformer,
    ChameleonGridConfig: chameleon,
    Qwen2Config: llama,
    T5Config: t5,
    TaTokConfig: ta_tok,
}


def network(config: Any) -> Any:
    """Of the network that a configuration is of: one that draws or reads prompts."""
    return _OF[type(config)](config)


def stacks(config: Any) -> tuple[str, ...]:
    """Names of the parameters of a network that are stacks, and apart to decode.

    Networks that run once a prompt, not once a pass, have none.
    """
    match config:
        case TransformerConfig():
            return tuple(layer_shapes(config))
        case FlashConfig():
            return tuple(layer_shapes(config.target))
        case ChameleonGridConfig():
            return stacks(config.language)
        case LlamaConfig():
            return tuple(llama_layer_shapes(config))
        case LPDConfig():
            return tuple(tower_shapes(config.width, config.hidden))
    return ()
