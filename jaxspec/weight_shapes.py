"""Shapes of a family's weights: as files have them, and as passes take them.

Files stack the layers of a network; decoding wants them apart (`models.stacks`).
"""

from typing import TYPE_CHECKING, Any

import jax

from jaxspec.models import abstract
from jaxspec.models.stacks import unstack
from jaxspec.sizes import size_label

if TYPE_CHECKING:
    from jaxspec.pipeline import PipelineConfig

# Networks beside the decoders, by part of the configuration.
_BESIDE = {
    "drafters": abstract.eagle,
    "flashar": abstract.flash,
    "lpd": abstract.lpd,
    "ssd": abstract.ssd,
    "matchers": abstract.matcher,
}


def abstract_params(config: "PipelineConfig") -> dict[str, Any]:
    """Shapes and float32 types of a family's parameters, as `jaxspec.load` has them.

    Computes nothing.
    """
    return jax.eval_shape(lambda x: layers_apart(config, x), stacked_params(config))


def stacked_params(config: "PipelineConfig") -> dict[str, Any]:
    """Shapes and float32 types of a family's parameters, as files have them."""
    upsamplers = {f"{a}-{b}": abstract.upsampler(c) for a, b, c in config.upsamplers}
    beside = {
        part: {str(size): shapes(c) for size, c in getattr(config, part)}
        for part, shapes in _BESIDE.items()
    }
    return {
        "decoders": {
            size_label(size): abstract.network(c) for size, c in config.decoders
        },
        "vq": abstract.vq(config.vq),
        **config.text.parameters(config.decoders[0][1]),
        **({"upsamplers": upsamplers} if upsamplers else {}),
        **{part: networks for part, networks in beside.items() if networks},
    }


def layers_apart(config: "PipelineConfig", params: dict[str, Any]) -> dict[str, Any]:
    """A family's parameters with the layers apart of all networks that decode."""
    params = dict(params)
    for place, names in _stacks(config).items():
        part, _, size = place.partition("/")
        if size:
            apart = unstack(params[part][size], names)
            params[part] = {**params[part], size: apart}
        else:
            params[part] = unstack(params[part], names)
    return params


def _stacks(config: "PipelineConfig") -> dict[str, tuple[str, ...]]:
    """The parameters that are stacks of layers, by the place of their network."""
    networks = {
        f"{part}/{size_label(size)}": network
        for part in ("decoders", "flashar", "lpd")
        for size, network in getattr(config, part)
    }
    found = {
        k: abstract.stacks(c) for k, c in (networks | config.text.networks()).items()
    }
    return {place: names for place, names in found.items() if names}
