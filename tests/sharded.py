"""What tests/test_sharding.py runs in processes of its own, with more devices.

`python -m tests.sharded FOLDER` draws on eight virtual devices, `python -m
tests.sharded FOLDER ADDRESS ID` as one of two processes that have a device each; FOLDER
holds the family of `family()`. What was found is printed as JSON.
"""

import errno
import json
import sys
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from PIL import Image
from typer.testing import CliRunner

import jaxspec
from jaxspec import sharding
from jaxspec.checkpoints.trees import flatten
from jaxspec.cli import app
from jaxspec.evaluation.prompts import load_prompts
from jaxspec.evaluation.run import draw as draw_set
from jaxspec.evaluation.run import weights_hash
from jaxspec.pipeline import Pipeline
from jaxspec.recipe import Recipe
from jaxspec.weight_shapes import stacked_params
from tests import toy

PROMPTS = ["red heart", "blue tree", "a hat"]
METHODS = {
    "AR": jaxspec.AR(),
    "ZipAR": jaxspec.ZipAR(window=2),
    "SCD": jaxspec.SCD(window=4),
    "MuLo": jaxspec.MuLo(threshold=0.3, neighbours=2, radius=1),
}
MESHES = {
    "AR": [(1, 1), (2, 1)],
    "ZipAR": [(2, 2)],
    "SCD": [(1, 8)],
    "MuLo": [(2, 4)],
}


def family() -> Pipeline:
    """The toy family with eight heads, so that eight devices can share them."""
    config = toy.family_config()
    decoders = tuple((size, replace(c, heads=8)) for size, c in config.decoders)
    config = replace(config, decoders=decoders)
    return Pipeline(toy.randomly(stacked_params(config)), config).unstacked()


def draw(params: Pipeline, method: str, **how) -> jaxspec.Generated:
    return jaxspec.generate(params, PROMPTS, method=METHODS[method], seed=3, **how)


def same(drawn: jaxspec.Generated, wanted: jaxspec.Generated) -> bool:
    """Tokens, counts and records of all images, and pictures but for rounding."""
    records = [flatten(vars(x.stats)).values() for x in (drawn, wanted)]
    equal = all(map(np.array_equal, *records))
    off = np.abs(drawn.images.astype(int) - wanted.images.astype(int)).max()
    return equal and off <= 1 and drawn.images.shape == wanted.images.shape


def on_eight_devices(folder: str) -> dict:
    params, found = family(), {}
    for method, meshes in MESHES.items():
        wanted = draw(params, method)
        for shape in meshes:
            mesh = sharding.make_mesh(*shape)
            name = f"{method} {shape[0]}x{shape[1]}"
            found[name] = same(draw(params, method, mesh=mesh), wanted)
    found |= in_int8(params, folder)
    mesh = sharding.make_mesh(2, 4)
    split = jaxspec.load(folder, mesh=mesh)
    draw(split, "SCD")
    with toy.compilations() as compiled:
        again = draw(split, "SCD", batch_size=4)
    found["loaded"] = same(again, draw(params, "SCD"))
    found["compiled"] = compiled
    weights = split.params["decoders"]["16"]["params"]
    layer = weights["layers"][1]
    found["parts"] = {
        name: [
            str(part.data.shape) for part in x.addressable_shards if not part.replica_id
        ]
        for name, x in (layer | {"head": weights["head"]}).items()
        if name in ("qkv", "down", "head")
    }
    target = split.target(split.condition(PROMPTS), jaxspec.Sampling.create(12))
    found["kept"] = target.params["params"]["layers"][1] is layer
    found["layer"] = {k: str(x.sharding.shard_shape(x.shape)) for k, x in layer.items()}
    found["equal"] = weights_hash(params.params) == weights_hash(split.params)
    found["orbax"] = saved_and_loaded(params, split, f"{folder}-orbax", (1, 8))
    return found | {"refused": refused(params)}


def in_int8(params: Pipeline, folder: str) -> dict:
    """Whether int8 weights draw the same that were split and turned, or read so.

    And the parts of a layer of those that were read.
    """
    wanted, found = draw(jaxspec.quantised(params), "SCD"), {}
    for shape in ((1, 2), (2, 2)):
        mesh = sharding.make_mesh(*shape)
        small = jaxspec.quantised(sharding.shard(params, mesh))
        found[f"int8 {shape[0]}x{shape[1]}"] = same(draw(small, "SCD"), wanted)
    read = jaxspec.load(folder, weights="int8", mesh=mesh)
    for x, y in zip(*map(jax.tree.leaves, (read, small)), strict=True):
        assert x.sharding == y.sharding
        np.testing.assert_array_equal(x, y)
    layer = read.params["decoders"]["16"]["params"]["layers"][0]
    parts = {k: x.sharding.shard_shape(x.shape) for k, x in flatten(layer).items()}
    return found | {"int8 parts": {k: str(x) for k, x in parts.items()}}


def saved_and_loaded(
    params: Pipeline, split: Pipeline, folder: str, shape: tuple[int, int]
) -> list:
    """Saves split weights and loads them on another mesh: the parts of one, if right.

    The values that this process has must be those of `params`.
    """
    jaxspec.save(split, folder, format="orbax")
    again = jaxspec.load(folder, mesh=sharding.make_mesh(*shape))

    def check(x, whole):
        for part in x.addressable_shards:
            np.testing.assert_array_equal(part.data, np.asarray(whole)[part.index])

    jax.tree.map(check, again.params, params.params)
    weight = again.params["decoders"]["16"]["params"]["layers"][0]["qkv"]
    return [str(x.data.shape) for x in weight.addressable_shards]


def refused(params: Pipeline) -> dict[str, str]:
    """What is said of meshes and rules that do not fit."""
    mesh, weights = sharding.make_mesh(1, 8), {"vq": {"a": np.ones((4, 6))}}
    attempts = {
        "devices": lambda: sharding.make_mesh(3, 4),
        "number": lambda: sharding.make_mesh(0),
        "heads": lambda: sharding.shard(toy.family(), mesh),
        "axes": lambda: sharding.layout(weights, mesh, [("a", P(None, "model"))]),
        "match": lambda: sharding.layout({"new": np.ones(3)}, mesh),
        "mesh": lambda: sharding.layout(weights, jax.make_mesh((8,), ("model",))),
        "images": lambda: uneven(params),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            found[name] = str(error)
    return found


def uneven(params: Pipeline) -> None:
    """Decoding at the lower level, where no one fills the batch up."""
    split = sharding.shard(params, sharding.make_mesh(2, 1))
    vectors, ids = split.read(PROMPTS)
    target = split.target(vectors, jaxspec.Sampling.create(12))
    jaxspec.decode(jaxspec.AR(), target, jaxspec.image_keys(3, ids, [0, 0, 0]))


def as_one_of_two(folder: str, address: str, number: int) -> dict:
    found = {"evaluated": evaluated_together(folder, address, number)}
    assert len(jax.devices()) == 2 and len(jax.local_devices()) == 1
    params = jaxspec.load(folder)
    own = jaxspec.generate(params, PROMPTS[number::2], seed=3)
    split = jaxspec.load(folder, mesh=sharding.make_mesh(1, 2))
    weight = split.params["decoders"]["16"]["params"]["layers"][0]["qkv"]
    together = {method: draw(split, method) for method in ("AR", "SCD")}
    return found | {
        "own": own.tokens.tolist(),
        "part": weight.addressable_data(0).shape,
        "together": {k: x.tokens.tolist() for k, x in together.items()},
        "images": together["AR"].images.sum().item(),
        "interrupted": interrupted_run(folder, number),
        "orbax": saved_and_loaded(family(), split, f"{folder}-orbax2", (2, 1)),
    }


def evaluated_together(folder: str, address: str, number: int) -> list:
    """A run that both draw by the command, the model split: status and output."""
    how = ["--method", "scd", "--window", "4", "--batch-size", "4", "--seed", "3"]
    how += ["--num-images", "2"]  # two batches
    join = ["--coordinator", address, "--processes", "2", "--process-id", str(number)]
    run = ["evaluate", "run", f"{folder}.txt", "--out", f"{folder}-run", *how]
    shared = ["--family", folder, "--mesh", "1,2", *join]
    said = CliRunner().invoke(app, [*run, *shared])
    return [said.exit_code, said.output]


def interrupted_run(folder: str, number: int) -> list:
    """What is said of a run whose first process finds the disk full, and how it ends.

    Each process draws images of its own, in rows that are handed on.
    """
    split = jaxspec.load(folder, mesh=sharding.make_mesh(2, 1))
    recipe = Recipe.create(split)
    prompts, out = load_prompts(f"{folder}.txt"), f"{folder}-refilled"
    how = {"batch_size": 2, "refill": True}
    save, saved, said = Image.Image.save, [], []

    def full(image, path, **options):
        saved.append(path)
        if len(saved) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(image, path, **options)

    Image.Image.save = full
    # The second process is told the first time that it draws something else.
    for seed in (3 + number, 3, 3):
        try:
            status = draw_set(recipe, prompts, out, seed=seed, **how)
            said.append([status.there, status.drawn])
        except (OSError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    Image.Image.save = save
    assert bool(saved) == (number == 0)
    return said


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    folder, *rest = sys.argv[1:]
    if rest:
        print(json.dumps(as_one_of_two(folder, rest[0], int(rest[1]))))
    else:
        print(json.dumps(on_eight_devices(folder)))
