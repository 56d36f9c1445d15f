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


def abstract_params(config: "PipelineConfig") -> dict[str, Any]:
    """Shapes and float32 types of a family's parameters, as `jaxspec.load` has them.

    Computes nothing.
    """
    return jax.eval_shape(lambda x: layers_apart(config, x), stacked_params(config))


def stacked_params(config: "PipelineConfig") -> dict[str, Any]:
    """Shapes and float32 types of a family's parameters, as files have them."""
    upsamplers = {f"{a}-{b}": abstract.upsampler(c) for a, b, c in config.upsamplers}
    drafters = {str(size): abstract.eagle(c) for size, c in config.drafters}
    heads = {str(size): abstract.flash(c) for size, c in config.flashar}
    others = {str(size): abstract.lpd(c) for size, c in config.lpd}
    spatial = {str(size): abstract.ssd(c) for size, c in config.ssd}
    matchers = {str(size): abstract.matcher(c) for size, c in config.matchers}
    return {
        "decoders": {
            size_label(size): abstract.network(c) for size, c in config.decoders
        },
        "vq": abstract.vq(config.vq),
        **config.text.parameters(config.decoders[0][1]),
        **({"upsamplers": upsamplers} if upsamplers else {}),
        **({"drafters": drafters} if drafters else {}),
        **({"flashar": heads} if heads else {}),
        **({"lpd": others} if others else {}),
        **({"ssd": spatial} if spatial else {}),
        **({"matchers": matchers} if matchers else {}),
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
