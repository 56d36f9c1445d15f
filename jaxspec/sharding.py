"""Models split over devices, and processes that work together.

A mesh has two axes: images are split over "data", weights over "model". What is split
over "model" are heads and hidden units, so that a layer adds up its parts twice, behind
its attention and behind its feed-forward half (Shoeybi et al. 2019, "Megatron-LM",
section 3); everything between stays where it is. XLA inserts that communication: the
models do not know of it.

Weights say where they are, so nothing else has to be told: what `shard` or
`jaxspec.load(..., mesh=mesh)` returns is drawn from on its mesh.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.core
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import SequenceKey

from jaxspec.models.cache import Cache
from jaxspec.models.int8 import has_int8

if TYPE_CHECKING:
    from jaxspec.pipeline import Pipeline, PipelineConfig

T = TypeVar("T")

DATA, MODEL = "data", "model"
SPLIT_FIRST = (
    "int8 weights are split before they are turned: jaxspec.load(..., mesh=..., "
    'weights="int8"), or jaxspec.quantised of a family that is split'
)

# A pattern that is looked for in a parameter's path, and how the parameter is split.
Rule = tuple[str, P]

# The first that matches wins. They are of stacked layers, also where layers are apart
# (see `of_layer`). Matrices side by side in one, such as "qkv", are split by their
# rows, which are whole in each, until they come apart.
RULES: tuple[Rule, ...] = (
    (r"^(vq|upsamplers|matchers|text)/", P()),  # small
    # One layer each, not stacked.
    (
        r"^(drafters|ssd)/.*/(qkv|query|key_value|attention_out|gate_up|down)$",
        P(MODEL, None),
    ),
    (r"/(qkv|key_value|gate_up|attention_out|down|fc2)$", P(None, MODEL, None)),
    (r"^lpd/[^/]*/params/query$", P()),  # one vector
    (r"/(query|fc1)$", P(None, None, MODEL)),
    (r"/(query|fc1)_bias$", P(None, MODEL)),
    # Words are many. Split by width, what follows is whole again on every device.
    (r"^(llm|t5)/.*/token_embedding$", P(None, MODEL)),
    (r"^llm/.*/head$", P(MODEL, None)),
    # Codes are few, and sampling wants to see all of them on the device.
    (r"/((token|position|class)_embedding|null_class|positions)$", P()),
    (r"/(prefix_(proj|bias|in|out|null)|head)$", P()),
    (r"/(join|gate_in|gate_out)(_bias)?$", P()),  # of drafters and FlashAR's heads
    (r"norm(\d?_(scale|bias))?$", P()),
    (r"/(qkv|key_value|attention_out|fc2|position)_bias$", P()),
    (r"^ta_tok/.*/(pixel_shift|pixel_scale|codebook|kernel|bias)$", P()),
)


def make_mesh(
    data: int | None = None,
    model: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of `data` by `model` devices.

    Args:
      data: groups of devices that draw images of their own; by default as many as there
        are devices for.
      model: devices that share the weights of one model.
      devices: to take from; by default all, those of other processes among them.
        `jax.local_devices()` are those of this one.

    Raises:
      ValueError: there are fewer devices, a number is less than 1, or a process would
        have none of the mesh's devices.
    """
    devices = jax.devices() if devices is None else devices
    data = max(len(devices) // max(model, 1), 1) if data is None else data
    for name, number in ((DATA, data), (MODEL, model)):
        if number < 1:
            raise ValueError(f"{name} must be 1 or more devices, not {number}")
    if data * model > len(devices):
        raise ValueError(
            f"a mesh of {data} x {model} needs {data * model} devices, and there are "
            f"{len(devices)} ({devices[0].platform})"
        )
    chosen = devices[: data * model]
    idle = {d.process_index for d in devices} - {d.process_index for d in chosen}
    if idle:
        raise ValueError(
            f"a mesh of {data} x {model} leaves process {min(idle)} without a device: "
            f"there are {len(devices)} in all"
        )
    return jax.make_mesh(
        (data, model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=chosen
    )


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that arrays are split over; None if they are not, or not known yet."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            sharding = x.sharding
            if isinstance(sharding, NamedSharding) and _ours(sharding.mesh):
                return sharding.mesh
    return None


def _ours(mesh: Any) -> bool:
    return isinstance(mesh, Mesh) and mesh.axis_names == (DATA, MODEL)


# Weights.


def layout(weights: Any, mesh: Mesh, rules: Sequence[Rule] = RULES) -> Any:
    """How parameters are split: a tree of shardings.

    Args:
      weights: arrays or shapes; a parameter's path is the keys to it, joined by
        slashes, the same for layers that are stacked and for those that are apart.
      mesh: from `make_mesh`.
      rules: patterns and how what they match is split, the first match wins.

    Raises:
      ValueError: a parameter matches no rule, or an axis of one cannot be divided; all
        of them are named.
    """
    if not _ours(mesh):
        raise ValueError(f"mesh must be one of jaxspec.sharding.make_mesh, not {mesh}")
    faults = []

    def place(path, x) -> NamedSharding:
        apart = any(isinstance(key, SequenceKey) for key in path)
        if apart:  # ..., "layers", number, name
            path = (*path[:-3], path[-1])
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((spec for pattern, spec in rules if re.search(pattern, name)), None)
        if apart and spec is not None:
            spec = of_layer(spec, joined=x.ndim == 3)
        if spec is None:
            faults.append(f"{name} {list(x.shape)} matches no rule")
            return NamedSharding(mesh, P())
        if len(spec) > x.ndim:
            faults.append(f"{name} {list(x.shape)} has not the axes of {spec}")
            return NamedSharding(mesh, P())
        for axis, over in enumerate(spec):
            names = () if over is None else over if isinstance(over, tuple) else (over,)
            count = math.prod(mesh.shape[n] for n in names)
            if x.shape[axis] % count:
                faults.append(
                    f"{name} {list(x.shape)} has axis {axis} of {x.shape[axis]}, which "
                    f"{count} devices ({', '.join(names)}) cannot share"
                )
        return NamedSharding(mesh, spec)

    out = jax.tree.map_with_path(place, weights)
    if faults:
        named = "; ".join(dict.fromkeys(faults))  # once, though each layer has it
        raise ValueError(f"weights cannot be split: {named}")
    return out


def check_heads(config: "PipelineConfig", mesh: Mesh) -> None:
    """Refuses a mesh over which a family's caches cannot be split.

    Raises:
      ValueError: the heads of a transformer cannot be shared out.
    """
    count = mesh.shape[MODEL]
    for size, network in (*config.decoders, *config.lpd):
        if network.key_heads % count:
            raise ValueError(
                f"the transformer for {size} px has {network.key_heads} heads, which "
                f"{count} devices ({MODEL}) cannot share"
            )


def shard(params: "Pipeline", mesh: Mesh, rules: Sequence[Rule] = RULES) -> "Pipeline":
    """A family whose weights are split over a mesh.

    `jaxspec.load(..., mesh=mesh)` reads them there, for what no device has room for.

    Raises:
      ValueError: they cannot be split (see `layout`), or are int8 already.
    """
    if has_int8(params):
        raise ValueError(SPLIT_FIRST)
    check_heads(params.config, mesh)
    where = layout(params.params, mesh, rules)
    return replace(params, params=jax.tree.map(_put, params.params, where))


def of_layer(stack: P, joined: bool) -> P:
    """How a single layer is split whose stack is split so.

    As its stack; but matrices side by side come apart, [C, parts, F], and are split
    along F, each as if it stood alone.
    """
    axes = stack[1:]
    if joined:
        axes = (None, None, next((a for a in axes if a is not None), None))
    return P(*axes)


def of_int8(matrix: jax.Array, mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """How the columns and their scales in int8 are split of a matrix [C, ...] that is.

    Columns are [..., C].
    """
    sharding: Any = matrix.sharding
    inputs, *outputs = (*sharding.spec, *[None] * (matrix.ndim - len(sharding.spec)))
    split = lambda *spec: NamedSharding(mesh, P(*spec))
    return split(*outputs, inputs), split(*outputs)


def of_layers(
    stacks: Mapping[str, tuple[jax.Array, bool]],
) -> tuple[dict[str, NamedSharding], ...] | None:
    """How single layers are split whose stacks are; None if those are on no mesh.

    `stacks` are parameters [L, ...], and whether they are matrices side by side.
    """
    mesh = mesh_of(stacks)
    if mesh is None:
        return None
    layer = {}
    for name, (x, joined) in stacks.items():
        spec = of_layer(getattr(x.sharding, "spec", P()), joined)
        layer[name] = NamedSharding(mesh, spec)
    return (layer,) * len(next(iter(stacks.values()))[0])


# Batches and what belongs to their images.


def filled_size(size: int, mesh: Mesh | None) -> int:
    """The size of a batch with as many rows more as the mesh needs to share it out."""
    groups = 1 if mesh is None else mesh.shape[DATA]
    return -(-size // groups) * groups


def by_image(mesh: Mesh | None, batch: Any) -> Any:
    """Arrays [B, ...] of the host or a device, split over a mesh by their images.

    Without a mesh they stay as they are. All processes of a mesh give the same values.
    """
    if mesh is None:
        return batch
    where = NamedSharding(mesh, P(DATA))
    return jax.tree.map(lambda x: _put(x, where), batch)


def _put(x: Any, where: NamedSharding) -> jax.Array:
    """An array split; to devices of other processes it goes by way of the host."""
    here = isinstance(x, jax.Array) and x.is_fully_addressable
    if here and not where.is_fully_addressable:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = _put(jax.random.key_data(x), where)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        x = np.asarray(x)
    return jax.device_put(x, where)


def placed(mesh: Mesh | None, state: Any, images: int) -> Any:
    """Inside `jax.jit`: a state, split by images and its caches by heads too.

    Whatever has a row or two for each of so many images is split; the rest is not.

    Raises:
      ValueError: the mesh cannot share out so many images.
    """
    if mesh is None:
        return state
    if images % mesh.shape[DATA]:
        raise ValueError(
            f"{images} images cannot be shared by {mesh.shape[DATA]} groups of devices "
            f"({DATA}): fill the batch up"
        )

    def place(x: Any, *more: str) -> Any:
        if not x.ndim or x.shape[0] not in (images, 2 * images):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(DATA, *more)))

    def one(x: Any) -> Any:
        return jax.tree.map(lambda y: place(y, MODEL), x) if _is_cache(x) else place(x)

    return jax.tree.map(one, state, is_leaf=_is_cache)


def _is_cache(x: Any) -> bool:
    return isinstance(x, Cache)


def on_host(tree: Any) -> Any:
    """Arrays as numpy's, whole, in every process."""
    mesh = mesh_of(tree)
    if mesh is not None and mesh.is_multi_process:
        tree = _whole(mesh)(tree)
    return jax.tree.map(np.asarray, tree)


@cache
def _whole(mesh: Mesh) -> Callable[[T], T]:
    """Puts arrays together on every device; one function, or each call compiles."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def pieces(x: jax.Array, most: int = 1 << 26) -> Iterator[np.ndarray]:
    """An array's values in their order, as numpy's, in every process.

    What several processes share is put together on each device, so it comes in pieces
    of about `most` bytes along the first axis.
    """
    split = isinstance(x, jax.Array) and not x.is_fully_addressable
    if not split or x.is_fully_replicated:
        yield np.asarray(x)
        return
    rows = max(1, most * len(x) // max(x.nbytes, 1))
    for first in range(0, len(x), rows):
        yield on_host(x[first : first + rows])


# Processes.


def is_first(mesh: Mesh | None) -> bool:
    """Whether this process speaks for those of a mesh, as the first of them does."""
    return mesh is None or mesh.devices.flat[0].process_index == jax.process_index()


def of_each(mesh: Mesh | None, value: Any) -> list[Any]:
    """What each process of a mesh has, as JSON takes it, in all of them; little of it.

    All call it at the same point of the same program.
    """
    if mesh is None or not mesh.is_multi_process:
        return [value]
    text = json.dumps(value).encode()
    longest = int(_gathered(mesh, np.array([len(text)], np.int32)).max())
    # Of few lengths, so that little compiles.
    padded = text.ljust(1 << longest.bit_length())
    rows = _gathered(mesh, np.frombuffer(padded, np.uint8))
    owners = [device.process_index for device in mesh.devices.flat]
    own = {process: rows[i] for i, process in enumerate(owners)}
    return [json.loads(row.tobytes()) for row in own.values()]


def _gathered(mesh: Mesh, row: np.ndarray) -> np.ndarray:
    """Rows [n] of a mesh's devices, each that of its process, [devices, n]."""
    shape, where = (mesh.size, row.size), NamedSharding(mesh, P((DATA, MODEL)))
    return on_host(jax.make_array_from_callback(shape, where, lambda _: row[None]))


def from_first(mesh: Mesh | None, make: Callable[[], T]) -> T:
    """What `make` returns in the first process of a mesh, in all; it runs there alone.

    The others get it by way of JSON. All call it at the same point of the same program,
    and what is raised in the first is raised in all.
    """
    if mesh is None or not mesh.is_multi_process:
        return make()
    told, raised = {}, None
    if is_first(mesh):
        try:
            told = {"made": make()}
        except Exception as error:
            kinds = [kind for kind in _RAISED if isinstance(error, _RAISED[kind])]
            told, raised = {"error": str(error), "kind": kinds[0]}, error
    told = of_each(mesh, told)[0]
    if raised is not None:
        raise raised
    if "error" in told:
        raise _RAISED[told["kind"]](told["error"])
    return told["made"]


# What one process tells the others of, by its name.
_RAISED = {
    kind.__name__: kind
    for kind in (ValueError, OSError, MemoryError, FloatingPointError, Exception)
}


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the processes of a run, before anything else is asked of JAX.

    Under Slurm, MPI or Kubernetes JAX finds out by itself how many there are and which
    one this is; elsewhere all three are given. Afterwards `jax.devices()` are the
    devices of all, and `jax.process_index()` is this one's number.

    Args:
      coordinator: address and port of the first process, such as "10.0.0.1:1234".
      processes: how many there are.
      process_id: this one's number, from 0.

    Raises:
      ValueError: some are given and others are not, or none is and JAX finds nothing.
      RuntimeError: JAX was used before, or the others did not come.
    """
    given = (coordinator, processes, process_id)
    if any(x is None for x in given) and any(x is not None for x in given):
        raise ValueError("give coordinator, processes and process_id, or none of them")
    if processes is not None and process_id is not None:
        if not 0 <= process_id < processes:
            raise ValueError(
                f"process_id must be 0 to {processes - 1}, not {process_id}"
            )
    # The default of later versions: collectives between CPUs of several hosts.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, processes, process_id)
    except ValueError as error:
        if coordinator is not None:
            raise
        raise ValueError(
            "no Slurm, MPI or Kubernetes was found here: give coordinator, processes "
            f"and process_id ({error})"
        ) from None
