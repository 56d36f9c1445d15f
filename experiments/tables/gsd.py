"""GSD's tables (So et al. 2025, arXiv 2508.07747): PartiPrompts and MS-COCO.

python -m experiments.tables.gsd              the tables, with what has been measured
python -m experiments.tables.gsd --smoke      the whole way, on a few emoji captions

To measure one, with a converted family and its prompt set (`--size` tries it on a
small family):

python -m experiments.tables.gsd --group lumina-mgpt-partiprompts --family FOLDER \
    --prompts PartiPrompts.tsv
jaxspec evaluate score runs/tables/lumina-mgpt-partiprompts/parti/* \
    --metric clip --protocol sjd --weights FILE
"""

from experiments.tables.command import command, emoji_group
from experiments.tables.layout import Column, Group, Row, latency, passes, score
from jaxspec.methods import AR, GSD, SJD, Amplify

TITLE = "GSD's tables"
NOTE = """\
Published / measured here; a dash is neither. Published: Lumina-mGPT-7B at 768 px; 1,600
prompts of PartiPrompts, 5,000 captions of MS-COCO; CLIP and FID as SJD's code measures
them (`--protocol sjd`). Published passes count newlines and the tokens around a
picture, 2,357 for our 2,304 (docs/chameleon.md). Clusters: the codes that a group is
made of, the filters of difference and distance off but in the last row. † as read in a
summary of the paper, not in the paper. Guidance compares with the context that GSD's
code has, `unconditional="turn"`, which is not the default here. Seconds are only told
of exact methods and of runs with a score."""

READING = {"unconditional": "turn"}

# Distances between Lumina-mGPT's input embeddings.
RELEASED = {"table": "embedding"}
UNFILTERED = {**RELEASED, "max_difference": 2.0, "max_distance": 1e9}


def columns(prompts: str, *names: str) -> tuple[Column, ...]:
    known = {
        "seconds": latency,
        "passes": passes,
        "FID": score("FID"),
        "CLIP": score("CLIP score"),
    }
    return tuple(Column(name, prompts, known[name]) for name in names)


def row(name: str, method, **published: str) -> Row:
    return Row(name, method, {k: f"{v} †" for k, v in published.items()})


GROUPS = (
    Group(
        "Lumina-mGPT, PartiPrompts",
        768,
        (
            row("AR", AR(), seconds="112.29", passes="2392", CLIP="32.091"),
            row("SJD", SJD(16), seconds="52.34", passes="1035", CLIP="32.090"),
            row(
                "GSD-50",
                GSD.paper(50, **RELEASED),
                seconds="24.13",
                passes="637",
                CLIP="32.075",
            ),
            row(
                "Amplify-3",
                Amplify(k=3.0),
                seconds="31.31",
                passes="586",
                CLIP="31.774",
            ),
        ),
        columns("parti", "seconds", "passes", "CLIP"),
        READING,
    ),
    Group(
        "Lumina-mGPT, MS-COCO",
        768,
        (
            row("AR", AR(), seconds="122.45", FID="30.79", CLIP="31.308"),
            row("SJD", SJD(16), seconds="55.26", FID="30.78"),
            row(
                "GSD-25",
                GSD.paper(25, **RELEASED),
                seconds="32.52",
                FID="33.55",
                CLIP="31.24",
            ),
            row("Amplify-4", Amplify(k=4.0), FID="40.05"),
        ),
        columns("coco", "seconds", "FID", "CLIP"),
        READING,
    ),
    Group(
        "Lumina-mGPT, clusters",
        768,
        (
            row("none", SJD(16), passes="1035", CLIP="32.090"),
            row(
                "distance",
                GSD.paper(50, ranking="distance", **UNFILTERED),
                passes="913.8",
                CLIP="32.081",
            ),
            row(
                "by-q",
                GSD.paper(50, ranking="draft", **UNFILTERED),
                passes="685.3",
                CLIP="31.791",
            ),
            row("by-p", GSD.paper(50, **UNFILTERED), passes="636.2", CLIP="32.056"),
            row("all", GSD.paper(50, **RELEASED), passes="636.8", CLIP="32.075"),
        ),
        columns("parti", "passes", "CLIP"),
        READING,
    ),
)
EMOJI = emoji_group(
    (
        Row("AR", AR()),
        Row("SJD", SJD(16)),
        Row("GSD-10", GSD.paper(10)),
        Row("Amplify-3", Amplify(k=3.0)),
    )
)

if __name__ == "__main__":
    command(TITLE, NOTE, GROUPS, EMOJI)
