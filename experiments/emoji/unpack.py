"""The family's folder as the runs that it came from: `export` undone, to 16 bits.

To train a part of the family again without training all that it stands on.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.emoji import text_table, train_ar
from experiments.emoji.export import BESIDE, UPSAMPLERS
from jaxspec.models.stacks import restack
from jaxspec.pipeline import Pipeline
from jaxspec.pixels import codebook
from jaxspec.training.loop import PARAMS, save_params


def unpack(family: Pipeline, folder: Path) -> None:
    """Writes what the family's stages trained into `folder`; of a size the last one.

    Raises:
      FileExistsError: a stage was trained there; nothing is written.
    """
    runs = all_runs(family)
    if taken := [stage for stage in runs if (folder / stage / PARAMS).exists()]:
        raise FileExistsError(
            f"{folder} has runs of {', '.join(taken)}: remove them, or choose another"
        )
    text = family.config.text
    table = np.asarray(family.params["text"]["table"])
    text_table.write(folder / "text", table, json.loads(text.spec))
    for stage, params in runs.items():
        (folder / stage).mkdir(parents=True, exist_ok=True)
        save_params(folder / stage / PARAMS, params)


def all_runs(family: Pipeline) -> dict[str, Any]:
    """Parameters by stage, as trained."""
    params = family.params
    codes = codebook(family.config.vq, params["vq"])
    last = {settings.size: stage for stage, settings in train_ar.STAGES.items()}
    runs = {"vq": params["vq"]}
    for size, config in family.config.decoders:
        decoder = params["decoders"][str(size)]
        runs[last[size]] = train_ar.unfold(config, decoder, np.asarray(codes))
    for name, networks in BESIDE.items():
        for stage, settings in networks.stages.items():
            network = params.get(name, {}).get(str(settings.size))
            if network is not None:
                network = restack(network)
                runs[stage] = {networks.part: network} if networks.part else network
    for stage in UPSAMPLERS:
        way = stage.removeprefix("upsampler-")
        if way in params.get("upsamplers", {}):
            runs[stage] = {"network": params["upsamplers"][way]}
    return runs
