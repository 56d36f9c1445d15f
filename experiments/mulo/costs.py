"""What a pass of one cell costs at each size of a family, beside the largest's."""

import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding import advance, begin
from jaxspec.figures import atomically
from jaxspec.methods import AR
from jaxspec.pipeline import Pipeline
from jaxspec.sampling import Sampling, image_key

PASSES, ROUNDS = 15, 15  # the smallest grid has 16 cells


def pass_costs(pipeline: Pipeline, folder: Path) -> dict[str, float]:
    """Seconds of a pass of AR, batch 1, by size; all take turns, medians.

    Measured once: kept in `folder`.
    """
    path = folder / "costs.json"
    if path.exists():
        return json.loads(path.read_text())
    settings = dict(vars(pipeline.config.defaults))
    del settings["size"]
    sampling = Sampling.create(pipeline.config.vq.codebook_size, **settings)
    condition = jnp.asarray(pipeline.condition(["red heart"]))
    keys = jnp.stack([image_key(0, 0, 0)])
    times: dict[str, list[float]] = {str(size): [] for size in pipeline.config.sizes}
    targets = {s: pipeline.target(condition, sampling, int(s)) for s in times}
    for trial in range(ROUNDS + 1):  # the first compiles
        for size, target in targets.items():
            state = jax.block_until_ready(begin(AR(), target, keys))
            began = time.perf_counter()
            jax.block_until_ready(advance(AR(), target, state, np.int32(PASSES)))
            if trial:
                times[size].append((time.perf_counter() - began) / PASSES)
    costs = {size: statistics.median(each) for size, each in times.items()}
    with atomically(path) as draft:
        draft.write_text(json.dumps(costs))
    return costs
