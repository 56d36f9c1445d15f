"""Running a method: compiled in one loop, in chunks, or step by step in Python."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.decoded import Decoded
from jaxspec.decoding.target import Target
from jaxspec.sharding import placed
from jaxspec.sizes import Size


class Method(Protocol):
    """A decoding method: knobs, with these functions; see `method_class`.

    All are pure. `step` is one pass or round; an image that is finished must not change
    in it, and none may depend on the images beside it.
    """

    def start(self, target: Target, keys: jax.Array) -> Any:
        """The state before the first step, for image keys [B]."""
        ...

    def step(self, target: Target, state: Any) -> Any: ...

    def finished(self, state: Any) -> jax.Array:
        """Which images are done, bool [B]."""
        ...

    def decoded(self, state: Any) -> Decoded:
        """The result; of an unfinished state, what there is so far."""
        ...


T = TypeVar("T", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def method_class(cls: T) -> T:
    """Makes a method of a class: a frozen dataclass that `jax.jit` takes.

    Its fields are knobs: equal knobs share a compiled program. A field that holds
    arrays, such as a drafter, is marked `field(metadata={"arrays": True})`.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = {f.name: f.metadata.get("arrays", False) for f in dataclasses.fields(cls)}
    return jax.tree_util.register_dataclass(
        cls,
        data_fields=[name for name, arrays in fields.items() if arrays],
        meta_fields=[name for name, arrays in fields.items() if not arrays],
    )


def check_method(method: Method) -> None:
    """Refuses what is no method, or one that JAX does not know.

    Raises:
      ValueError: it is a class, no dataclass, or was not made by `method_class`.
    """
    if isinstance(method, type) or not dataclasses.is_dataclass(method):
        raise ValueError(f"method must be one such as AR(), not {method!r}")
    if any(leaf is method for leaf in jax.tree.leaves(method)):
        raise ValueError(
            f"JAX does not know {type(method).__name__}: put @jaxspec.method_class "
            "above its class, in place of @dataclass"
        )


def check_fits(method: Any, pipeline: Any, size: Size) -> None:
    """Refuses a method, or a part of one, that a family lacks something for.

    It is asked before anything is computed, so that no language model runs in vain. A
    method that has `bind` has a function `fits(pipeline, size)` that raises what `bind`
    and `start` would.

    Raises:
      ValueError: the method cannot draw that size.
    """
    fits = getattr(method, "fits", None)
    if fits is not None:
        fits(pipeline, size)


def bound(
    method: Method, pipeline: Any, condition: Any, sampling: Any, size: Size
) -> Method:
    """The method for images of a family, as it decodes a `Target`.

    A method that needs more of the family than its target, such as a drafter, has a
    function `bind(pipeline, condition, sampling, size)` that returns itself with that;
    `check_fits` says before whether it can.
    """
    bind = getattr(method, "bind", None)
    return bind(pipeline, condition, sampling, size) if bind else method


def describe(method: Method) -> dict[str, Any]:
    """A method's name and knobs, as JSON takes them."""

    def plain(x):
        if isinstance(x, Target):
            return "a target of its own"
        if isinstance(x, jax.tree_util.Partial):
            return plain(x.func)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            knobs = {f.name: plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
            return {"name": type(x).__name__, **knobs}
        if callable(x):
            return f"{x.__module__}.{x.__qualname__}"
        if isinstance(x, np.generic | np.ndarray | jax.Array) and x.ndim == 0:
            return x.item()
        return "arrays" if isinstance(x, dict | np.ndarray | jax.Array) else x

    return plain(method)


def decode(method: Method, target: Target, keys: jax.Array) -> Decoded:
    """Decodes a batch in one `lax.while_loop`; pure, and to be jitted.

    Args:
      method: such as `AR()`.
      target: the model to draw from, with its condition.
      keys: [B] typed keys, one an image (see `sampling.image_key`).
    """
    state = jax.lax.while_loop(
        lambda s: ~jnp.all(method.finished(s)),
        lambda s: step(method, target, s),
        _start(method, target, keys),
    )
    return method.decoded(state)


def _start(method: Method, target: Target, keys: jax.Array) -> Any:
    return placed(target.mesh, method.start(target, keys), target.batch)


def step(method: Method, target: Target, state: Any) -> Any:
    """A method's step, over the devices that the target is split over."""
    return placed(target.mesh, method.step(target, state), target.batch)


begin = jax.jit(_start)


def _advance(method: Method, target: Target, state: Any, steps: jax.Array) -> Any:
    def more(carry):
        done, s = carry
        return (done < steps) & ~jnp.all(method.finished(s))

    def body(carry):
        done, s = carry
        return done + 1, step(method, target, s)

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


# `steps` is an input, not a constant: chunks of any size share one program. The state,
# cache and all, is donated.
advance = jax.jit(_advance, donate_argnums=2)


def decode_eagerly(
    method: Method,
    target: Target,
    keys: jax.Array,
    look: Callable[[Any], None] = lambda state: None,
) -> Decoded:
    """`decode` as a Python loop, for debugging: nothing is compiled as a whole.

    `look` is called with every state, so that prints and breakpoints work.
    """
    state = method.start(target, keys)
    look(state)
    while not bool(jnp.all(method.finished(state))):
        state = method.step(target, state)
        look(state)
    return method.decoded(state)
