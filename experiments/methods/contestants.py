"""The methods that are compared, by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

from jaxspec.acceptance import Cooled
from jaxspec.decoding import Method, check_fits
from jaxspec.methods import (
    AR,
    EAGLE,
    EAGLE2,
    GSD,
    LANTERN,
    LANTERNPP,
    LPD,
    PJD,
    SCD,
    SJD,
    SSD,
    Addition,
    Amplify,
    FlashAR,
    MuLo,
    ZipAR,
)
from jaxspec.methods.upsampled import Upsampled
from jaxspec.pipeline import Pipeline
from jaxspec.upsampling import Nearest

REFERENCE = "AR"
CELL = 8  # pixels a side
OTHER_SEED = 1000  # of all methods but AR, so that no draw is shared with AR's


@dataclass(frozen=True)
class Contestant:
    name: str
    method: Method
    guarantee: Literal["exact", "biased"]


CONTESTANTS = (
    Contestant(REFERENCE, AR(), "exact"),
    Contestant("ZipAR-8", ZipAR(8), "biased"),
    Contestant("ZipAR-4", ZipAR(4), "biased"),
    Contestant("ZipAR-3", ZipAR(3), "biased"),
    Contestant("ZipAR-2", ZipAR(2), "biased"),
    Contestant("ZipAR-1", ZipAR(1), "biased"),
    Contestant("ZipAR-adaptive", ZipAR(4, adaptive=True), "biased"),
    Contestant("SJD", SJD(16), "exact"),
    Contestant("SJD-left", SJD(16, initial="sample-left"), "exact"),
    Contestant("SCD", SCD(32), "exact"),
    Contestant("SCD-gumbel", SCD(32, coupling="gumbel"), "exact"),
    Contestant("GSD", GSD(), "biased"),
    Contestant("GSD-3", GSD.paper(3), "biased"),
    Contestant("GSD-10", GSD.paper(10), "biased"),
    Contestant("GSD-25", GSD.paper(25), "biased"),
    Contestant("Amplify", Amplify(k=3.0), "biased"),
    Contestant("Addition", Addition(c=0.1), "biased"),
    Contestant("PJD-8", PJD(window=8, context=8), "biased"),
    Contestant("PJD-4", PJD(window=8, context=4, coupling="maximal"), "biased"),
    Contestant("PJD-3", PJD(window=8, context=3, coupling="maximal"), "biased"),
    Contestant("PJD-2", PJD(window=8, context=2, coupling="maximal"), "biased"),
    Contestant("MuLo", MuLo(draft_method=ZipAR(16), radius=1, window=4), "biased"),
    Contestant("SJD-cooled", SJD(16, rule=Cooled()), "biased"),
    Contestant("EAGLE-2", EAGLE2(), "exact"),
    Contestant("EAGLE-2-12", EAGLE2(depth=4, top_k=4, total=12), "exact"),
    Contestant("EAGLE", EAGLE(), "exact"),
    # A neighbourhood of the share of the codes that 1000 are of LlamaGen's 16,384.
    Contestant("LANTERN", LANTERN(neighbours=32, delta=0.1), "biased"),
    Contestant("LANTERN-0.4", LANTERN(neighbours=32, delta=0.4), "biased"),
    Contestant("LANTERN++", LANTERNPP(), "biased"),
    Contestant("LANTERN++optimal", LANTERNPP(residual="optimal"), "biased"),
    Contestant("FlashAR", FlashAR(), "biased"),
    Contestant("SSD", SSD(rounds=2), "biased"),
    Contestant("SSD-1", SSD(rounds=1), "biased"),
    Contestant("SSD-0", SSD(rounds=0), "biased"),
    Contestant("LPD-10", LPD(steps=10), "biased"),
    Contestant("LPD-16", LPD(steps=16), "biased"),
    Contestant("LPD-20", LPD(steps=20), "biased"),
    Contestant("SSD-upsampled", SSD(upsampled=Upsampled()), "biased"),
    Contestant(
        "MuLo-LPD", MuLo(draft_method=LPD(steps=10), radius=1, window=4), "biased"
    ),
)


def joined(size: int) -> tuple[Contestant, ...]:
    """What becomes of FlashAR's picture of the target's own size, as a draft."""
    drafts = Upsampled(draft=size, upsampler=Nearest(), method=FlashAR())
    judged = {"draft": size, "upsampler": "nearest", "draft_method": FlashAR()}
    mulo = partial(MuLo, **judged, radius=1, window=4)
    rounds = partial(SSD, upsampled=drafts, rows=size // CELL)
    return (
        Contestant("FlashAR-MuLo", mulo(), "biased"),
        Contestant("FlashAR-MuLo-0.01", mulo(threshold=0.01), "biased"),
        Contestant("FlashAR-MuLo-0.2", mulo(threshold=0.2), "biased"),
        Contestant(
            "FlashAR-SCD", SCD(32, initial="upsampled", upsampled=drafts), "exact"
        ),
        Contestant("FlashAR-round", rounds(rounds=1), "biased"),
        Contestant("FlashAR-2-rounds", rounds(rounds=2), "biased"),
        Contestant("FlashAR-4-rounds", rounds(rounds=4), "biased"),
    )


def for_family(pipeline: Pipeline) -> list[Contestant]:
    """All but those that the family cannot draw with, for lack of a network."""
    size = pipeline.config.defaults.size

    def fits(method: Method) -> bool:
        try:
            check_fits(method, pipeline, size)
        except ValueError:
            return False
        return True

    return [each for each in (*CONTESTANTS, *joined(size)) if fits(each.method)]


def select(
    patterns: str, among: Sequence[Contestant] = CONTESTANTS
) -> list[Contestant]:
    """Those whose name fits one of the comma-separated patterns, and AR, in order.

    Raises:
      ValueError: a pattern fits none.
    """
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    names = [each.name for each in among]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(names)
            raise ValueError(f"no method is called {pattern!r}; there are {known}")
    return [
        each
        for each in among
        if each.name == REFERENCE or any(fnmatchcase(each.name, p) for p in wanted)
    ]
