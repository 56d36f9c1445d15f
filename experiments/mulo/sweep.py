"""What is compared: MuLo with one knob changed at a time, and what it competes with."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from experiments.methods.contestants import REFERENCE, Contestant
from jaxspec.acceptance import Amplified, Grouped, Ratio
from jaxspec.decoding import Method
from jaxspec.methods import AR, GSD, PJD, SCD, FlashAR, MuLo, ZipAR
from jaxspec.methods.upsampled import Upsampled
from jaxspec.upsampling import Latents, Nearest, Pixels

# Where each knob is changed from; the smaller of two sizes is drafted row by row.
BASE = MuLo(draft_method=ZipAR(4), radius=1, window=4)
GROUPED = Grouped(below=7, above=6, max_difference=0.15, max_distance=0.5)

KNOBS: dict[str, list[dict[str, Any]]] = {
    "threshold": [{"threshold": x} for x in (0.002, 0.01, 0.02, 0.1, 0.2, 0.5)],
    "neighbours": [{"neighbours": k} for k in (1, 10, 100)],
    "radius": [{"radius": r} for r in (0, 2, 3, 5)],
    "expansion": [
        {"expand": "forward"},
        {"clip": "block"},
        {"expand": "raster"},
        {"expand": "raster", "threshold": 0.002},
    ],
    "window": [{"window": w} for w in (1, 2, 8, 16)],
    "order": [{"order": "rows"}, {"order": "raster"}],
    "context": [{"context": "stale"}, {"refresh": "before"}],
    "rounds": [
        *({"rows": n} for n in (1, 2, 4)),
        {"rows": 2, "refresh": "after"},
    ],
    "draft": [
        {"draft_method": AR()},
        {"draft_method": ZipAR(2)},
        {"draft_method": SCD(16)},
    ],
    "upsampler": [
        {"upsampler": Nearest()},
        {"upsampler": Pixels("lanczos3")},
        {"upsampler": Latents()},
    ],
    "rule": [
        {"rule": GROUPED},
        {"rule": GROUPED, "test": "chance"},
        {"rule": Ratio(), "test": "chance"},
        *({"relative": True, "threshold": x} for x in (0.05, 0.2, 0.5)),
    ],
}
OTHERS: dict[str, Method] = {
    "ZipAR-8": ZipAR(8),
    "ZipAR-4": ZipAR(4),
    "ZipAR-3": ZipAR(3),
    "ZipAR-2": ZipAR(2),
    "SCD-32": SCD(32),
    "GSD": GSD(),
    "PJD-4": PJD(window=8, context=4, coupling="maximal"),
    "PJD-3": PJD(window=8, context=3, coupling="maximal"),
}
DRAFTS = Upsampled(method=ZipAR(4))
BEYOND: dict[str, Method] = {
    "SCD-64": SCD(64),
    "SCD, upsampled": SCD(32, initial="upsampled", upsampled=DRAFTS),
    "SCD, upsampled by Latents": SCD(
        32, initial="upsampled", upsampled=replace(DRAFTS, upsampler=Latents())
    ),
    "SCD, amplified 1.5": SCD(32, rule=Amplified(1.5)),
    "SCD, amplified 3": SCD(32, rule=Amplified(3.0)),
    "SCD, grouped": SCD(32, rule=GROUPED),
    "PJD-4, upsampled": PJD(8, 4, "maximal", initial="upsampled", upsampled=DRAFTS),
    "PJD-2": PJD(window=8, context=2, coupling="maximal"),
    "cascade": replace(BASE, draft_method=replace(BASE, draft_method=ZipAR(2))),
}
EXACT = ("SCD-32", "SCD-64", "SCD, upsampled", "SCD, upsampled by Latents")


def _shown(value: Any) -> str:
    """A knob's value as the table names it."""
    if isinstance(value, int | float | str):
        return f"{value}"
    return type(value).__name__ if value in (Nearest(), Latents()) else repr(value)


def sections(
    sizes: Sequence[int], size: int, heads: Sequence[int] = ()
) -> dict[str, list[Contestant]]:
    """All contestants by what they are to show.

    Args:
      sizes: of the family.
      size: of the target; drafters of all smaller sizes but the next one are tried,
        too.
      heads: sizes for which the family has a FlashAR head, which may draft.
    """
    smaller = [s for s in sizes if s < size and size % s == 0]
    further, knobs = smaller[:-1], dict(KNOBS)
    if set(smaller[-1:]) & set(heads):
        knobs["draft"] = [*KNOBS["draft"], {"draft_method": FlashAR()}]
    out = {"reference": [Contestant(REFERENCE, AR(), "exact")]}
    out["MuLo"] = [Contestant("MuLo", BASE, "biased")]
    for knob, changes in knobs.items():
        out[knob] = []
        for change in changes:
            name = ", ".join(f"{k} {_shown(x)}" for k, x in change.items())
            out[knob].append(Contestant(name, replace(BASE, **change), "biased"))
    out["ratio"] = [
        Contestant(f"drafter of {s} px", replace(BASE, draft=s), "biased")
        for s in further
    ]
    for title, methods in {"others": OTHERS, "beyond": BEYOND}.items():
        out[title] = [
            Contestant(name, method, "exact" if name in EXACT else "biased")
            for name, method in methods.items()
        ]
    return out


def select(
    patterns: str, among: dict[str, list[Contestant]]
) -> dict[str, list[Contestant]]:
    """The sections and contestants whose name fits a pattern; AR and MuLo always.

    Raises:
      ValueError: a pattern fits none.
    """
    wanted = [pattern.strip() for pattern in patterns.split(";")]

    def fits(title: str, each: Contestant, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(x, p) for p in patterns for x in (title, each.name))

    for pattern in wanted:
        if not any(fits(t, e, [pattern]) for t, es in among.items() for e in es):
            raise ValueError(f"nothing is called {pattern!r}; sections: {list(among)}")
    out = {
        title: [e for e in each if title == "reference" or fits(title, e, wanted)]
        for title, each in among.items()
    }
    return {title: each for title, each in out.items() if each}
