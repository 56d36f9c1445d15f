"""MuLo-SD's main table (Peruzzo et al. 2026, arXiv 2601.05149v2), Tar's part of it.

python -m experiments.tables.mulo                 the table, with what has been measured
python -m experiments.tables.mulo --smoke         the whole way, on a few emoji captions

To measure a group of it, with a converted family (docs/converting.md) and each of the
prompt sets, such as

python -m experiments.tables.mulo --group tar-1.5b-512-px --family tar-1.5b/ \
    --prompts captions_val2017.json --name coco
jaxspec evaluate score runs/tables/tar-1.5b-512-px/coco/* --metric fid ...

for `coco` (FID, HPSv2, speed), `geneval` and `dpg` (four pictures a prompt, exported
and scored by the official scorers, docs/evaluation.md).
"""

from experiments.tables.command import command, emoji_group
from experiments.tables.layout import Column, Group, Row, score, speed
from jaxspec.methods import AR, LANTERN, MuLo, ZipAR

TITLE = "MuLo-SD's main table"
NOTE = """\
Published / measured here; a dash is neither. Published: A100, batch 1, the time of
plain decoding over the method's; GenEval and DPG-Bench; FID and HPSv2 on the 5,000
captions of MS-COCO 2017 val; as read in summaries of the paper, not in the paper. There
FIDs of different methods are at different thresholds. Speed-ups are only told of exact
methods and of runs with a score, on equal devices, without what compiled."""

COLUMNS = (
    Column("speed-up", "coco", speed),
    Column("GenEval", "geneval", score("GenEval", 100)),
    Column("DPG", "dpg", score("DPG-Bench")),
    Column("FID", "coco", score("FID")),
    Column("HPSv2", "coco", score("HPSv2")),
)
NAMES = [column.name for column in COLUMNS]


def group(model: str, size: int, numbers: dict[str, tuple[str, ...]]) -> Group:
    """A model at a size; numbers of each method in the order of the columns."""
    factor = size // 256  # the drafter's pictures have 256 px
    ours = {
        "AR": AR(),
        # As released: the first row is drawn alone.
        "ZipAR-16": ZipAR(16, first_row_alone=True),
        "LANTERN": LANTERN(neighbours=1000, delta=0.4),
        f"MuLo-SD {factor}x": MuLo.paper(draft=256),
    }
    rows = [
        Row(name, method, dict(zip(NAMES, numbers.get(name, ()), strict=False)))
        for name, method in ours.items()
    ]
    return Group(f"{model}, {size} px", size, rows, COLUMNS)


GROUPS = (
    group(
        "Tar-1.5B",
        512,
        {
            "AR": ("1.00", "77.7", "82.8", "33.0"),
            "ZipAR-16": ("1.88", "76.6", "82.8", "33.0", "28.5"),
            "LANTERN": ("1.08", "75.9", "82.1", "32.7", "27.7"),
            "MuLo-SD 2x": ("1.94", "76.4", "82.6", "33.4", "28.3"),
        },
    ),
    group(
        "Tar-7B",
        512,
        {
            "AR": ("1.00", "85.1"),
            "LANTERN": ("1.20", "84.9", "80.5", "36.9", "28.7"),
            "MuLo-SD 2x": ("2.03", "85.1", "80.8", "38.2", "29.5"),
        },
    ),
    group(
        "Tar-1.5B",
        1024,
        {
            "AR": ("1.00", "77.1", "82.3", "32.4"),
            "ZipAR-16": ("3.65", "76.6", "82.5", "32.4", "29.6"),
            "LANTERN": ("1.42", "75.4", "82.3", "31.1", "28.5"),
            "MuLo-SD 4x": ("3.90", "76.8", "82.2", "31.3", "28.7"),
        },
    ),
    group(
        "Tar-7B",
        1024,
        {
            "AR": ("1.00", "85.2"),
            "LANTERN": ("1.45", "82.9", "80.5", "34.6", "29.4"),
            "MuLo-SD 4x": ("5.33", "85.4", "80.8", "34.8", "29.5"),
        },
    ),
)
# A grid of 16 x 16 cells and 512 codes: windows and neighbourhoods are smaller.
EMOJI = emoji_group(
    (
        Row("AR", AR()),
        Row("ZipAR-4", ZipAR(4)),
        Row("LANTERN", LANTERN(neighbours=32, delta=0.4)),
        Row("MuLo-SD 2x", MuLo()),
    )
)

if __name__ == "__main__":
    command(TITLE, NOTE, GROUPS, EMOJI)
