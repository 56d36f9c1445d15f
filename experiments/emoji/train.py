"""Trains the emoji family, stage by stage; each can be killed and started again.

python -m experiments.emoji.train --stage all

Stages: prepare (render the drawings), text (tables of word pieces), vq, codes, 32, 64,
128, 128-long, 128-varied, 256, networks that enlarge codes (upsampler-64-128 ...) and
make them small (downsampler-128-64 ...), drafter (of 128 px), drafter-256, FlashAR's
heads (flashar-128 ...), LPD's models (lpd-64, lpd-128), SSD's head (ssd-128), the
network that chooses among pictures (matcher-128), export. All goes to `runs/emoji`;
`export` writes the family's folder. `--smoke` is a run of a
minute that shows that all of it works.

To train a part again, start from the package: `--stage unpack` writes what its stages
trained into `runs/emoji`. Then that part, those that stand on it, and `export`.
"""

import os
from collections import ChainMap
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

STAGES = (
    *("prepare", "text", "vq", "codes"),
    *("32", "64", "128", "128-long", "128-varied", "256"),
    *("upsampler-64-128", "downsampler-128-64", "upsampler-128-256"),
    *("upsampler-64-128-pixels", "upsampler-64-128-patches"),
    *("drafter", "drafter-256", "flashar-128", "flashar-128-unfrozen"),
    *("flashar-256", "flashar-256-unfrozen", "zipar-128", "zipar-256"),
    *("lpd-64", "lpd-128", "ssd-128", "matcher-128", "export"),
)


def use_every_core() -> None:
    """One single-threaded device a core: a third faster here than one device on all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    flags = "--xla_cpu_multi_thread_eigen=false"
    flags += f" --xla_force_host_platform_device_count={cores}"
    # A stopped process (Ctrl-Z, a sleeping laptop) is not a deadlock.
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=86400"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def run_stage(stage: str, folder: Path, smoke: bool, out: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file

    import jaxspec
    from experiments.emoji import (
        augment,
        codes,
        data,
        export,
        text_table,
        train_ar,
        train_drafter,
        train_flashar,
        train_lpd,
        train_matcher,
        train_ssd,
        train_upsampler,
        train_vq,
        train_zipar,
        unpack,
    )
    from jaxspec.models.vq import VQ
    from jaxspec.training import load_params

    if stage == "unpack":
        unpack.unpack(jaxspec.load(out), folder)
        return
    if stage == "text":
        text_table.write(folder / "text", *text_table.build_family())
        return
    of_one_size = (
        *(train_ar, train_drafter, train_flashar, train_lpd),
        *(train_matcher, train_ssd, train_zipar),
    )
    settings = ChainMap(*(module.STAGES for module in of_one_size)).get(stage)
    between = train_upsampler.STAGES.get(stage)
    sizes = [settings.size] if settings else data.SIZES
    sizes = [between.source, between.wanted] if between else sizes
    drawings = data.load(folder, sizes)  # renders them the first time
    if stage == "prepare":
        return
    vq = train_vq.VQTraining()
    if smoke:
        drawings = drawings.every(40)
        vq = replace(vq, steps=12, cycle=((32, False, 8),))
    if stage == "vq":
        train_vq.train(vq, drawings, folder / "vq")
        return
    vq_params = load_params(folder / "vq")
    if stage == "codes":
        for size in data.SIZES:
            codes.load(folder, size, vq.model, vq_params, drawings)
        return
    codebook = np.asarray(VQ(vq.model).apply(vq_params, method="codes"))
    load_codes = lambda size: codes.load(folder, size, vq.model, vq_params, drawings)
    if between is not None:
        if smoke:
            between = replace(between, steps=12, batch=4)
        both = load_codes(between.source), load_codes(between.wanted)
        start = load_params(folder / between.start) if between.start else None
        train_upsampler.train(
            between, both, drawings, vq.model, vq_params, folder / stage, start
        )
        return
    text = codes.reader(folder)
    table = load_file(folder / "text" / "text.safetensors")["table"]
    parts = vq.model, vq_params, codebook, text, table
    if stage == "export":
        export.export(folder, out, *parts)
        return
    assert settings is not None
    if smoke:
        settings = replace(settings, steps=12, batch=4)
    corpus = train_ar.Corpus.create(
        drawings,
        load_codes(settings.size),
        text,
        table,
        codebook,
    )

    if variants := getattr(settings, "variants", ()):
        made = augment.load(
            folder / f"variants-{settings.size}.npz",
            drawings.images[settings.size],
            codes.may_mirror(drawings),
            partial(codes.encode, vq.model, vq_params),
            variants,
        )
        corpus = corpus.with_variants(made, text, drawings)
    if isinstance(settings, train_matcher.MatcherTraining):
        pairs = train_matcher.Pairs.create(corpus, drawings, codebook)
        train_matcher.train(settings, pairs, drawings, folder / stage)
        return
    smaller = load_params(folder / settings.start) if settings.start else None
    if isinstance(settings, train_drafter.DrafterTraining):
        family = export.assemble(folder, *parts)
        train_drafter.train(settings, family, corpus, drawings, folder / stage, smaller)
        return
    if isinstance(settings, train_ssd.SSDTraining):
        settings = replace(settings, pictures=4) if smoke else settings
        family = export.assemble(folder, *parts)
        train_ssd.train(settings, family, corpus, drawings, folder / stage)
        return
    of_family = lambda: export.assemble(folder, *parts).params["decoders"]
    if isinstance(settings, train_flashar.FlashTraining):
        target = of_family()[str(settings.size)]
        train_flashar.train(settings, target, corpus, drawings, folder / stage, smaller)
        return
    if isinstance(settings, train_lpd.LPDTraining):
        target = of_family()[str(settings.size)]
        train_lpd.train(settings, target, corpus, drawings, folder / stage)
        return
    if isinstance(settings, train_zipar.WindowTraining):
        target = of_family()[str(settings.size)]
        train_zipar.train(settings, target, corpus, drawings, folder / stage)
        return
    train_ar.train(settings, corpus, drawings, codebook, folder / stage, smaller)


def main(
    stage: Annotated[
        str, typer.Option(help=f"One of {', '.join(STAGES)}, all, or unpack.")
    ],
    folder: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path(
        "runs/emoji"
    ),
    smoke: Annotated[bool, typer.Option(help="A few steps of everything.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where `export` writes the family: by default jaxspec/families/emoji, "
            "or `family` in the folder of a smoke run."
        ),
    ] = None,
) -> None:
    """Trains the emoji family, stage by stage; each resumes where it was stopped."""
    if stage not in (*STAGES, "all", "unpack"):
        names = ", ".join(STAGES)
        raise typer.BadParameter(f"stage must be one of {names}, all, or unpack")
    if out is None:
        out = folder / "family" if smoke else Path("jaxspec/families/emoji")
    use_every_core()
    for each in STAGES if stage == "all" else (stage,):
        run_stage(each, folder, smoke, out)


if __name__ == "__main__":
    typer.run(main)
