"""The papers' tables: cells come from the runs that they name."""

import json
import re
from dataclasses import replace

import pytest

import jaxspec
from experiments.tables import gsd, mulo
from experiments.tables.command import command
from experiments.tables.layout import (
    draw_group,
    folder_of,
    markdown,
    measured,
    read_group,
)
from jaxspec.evaluation.prompts import load_prompts
from jaxspec.evaluation.scores import write_scores
from jaxspec.methods import ZipAR
from tests import runs, toy_lumina


def test_measured_stands_beside_published(tmp_path):
    group = next(g for g in mulo.GROUPS if g.name == "Tar-1.5B, 512 px")
    assert group.slug == "tar-1.5b-512-px"
    ar, zipar, *_ = group.rows
    of = runs.prompts(4)
    base = runs.made(folder_of(tmp_path, group, "coco", ar), of=of)
    fast = {"cells": runs.rows, "drafted": 10, "seconds": 0.25}
    other = runs.made(folder_of(tmp_path, group, "coco", zipar), ZipAR(), of=of, **fast)
    cells = measured(group, read_group(group, tmp_path))
    assert cells[0] == ["1.00", "–", "–", "–", "–"]
    assert cells[1][0] == "withheld"  # nothing is known of its quality
    for folder, value in ((base, 30.0), (other, 33.0)):
        write_scores(folder, [runs.score("FID", {"p0/0": value})])
    told = runs.made(folder_of(tmp_path, group, "geneval", ar), of=of)
    write_scores(told, [runs.score("GenEval", {"p0/0": 0.75})])
    text = markdown(group, tmp_path)
    assert (
        "| AR | 1.00 / 1.00 | 77.7 / 75.0 [70.0, 80.0] | 82.8 / – "
        "| 33.0 / 30.0 [29.9, 30.1] | – / – |"
    ) in text
    assert "| ZipAR-16 | 1.88 / 2.00 | 76.6 / – | 82.8 / – | 33.0 / 33.0" in text
    assert (
        "| MuLo-SD 2x | 1.94 / – | 76.4 / – | 82.6 / – | 33.4 / – | 28.3 / – |" in text
    )


def test_groups_are_those_of_the_papers():
    assert [(g.name, len(g.rows)) for g in mulo.GROUPS] == [
        ("Tar-1.5B, 512 px", 4),
        ("Tar-7B, 512 px", 4),
        ("Tar-1.5B, 1024 px", 4),
        ("Tar-7B, 1024 px", 4),
    ]
    best = mulo.GROUPS[3].rows[3]
    assert (best.name, best.published["speed-up"]) == ("MuLo-SD 4x", "5.33")
    assert [(g.name, len(g.rows)) for g in gsd.GROUPS] == [
        ("Lumina-mGPT, PartiPrompts", 4),
        ("Lumina-mGPT, MS-COCO", 4),
        ("Lumina-mGPT, clusters", 5),
    ]
    coco = gsd.GROUPS[1]
    assert coco.rows[2].published == {
        "seconds": "32.52 †",
        "FID": "33.55 †",
        "CLIP": "31.24 †",
    }


def test_a_group_is_drawn_and_read(tmp_path):
    small = replace(gsd.EMOJI, size=32, rows=gsd.EMOJI.rows[:1])
    draw_group(small, tmp_path, "emoji", "emoji", load_prompts("emoji")[:2])
    assert measured(small, read_group(small, tmp_path)) == [["1.00", "16.0", "–", "–"]]


def table(monkeypatch, capsys, module, *words) -> str:
    monkeypatch.setattr("sys.argv", ["table", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        command(module.TITLE, module.NOTE, module.GROUPS, module.EMOJI)
    return f"{stopped.value.code or capsys.readouterr().out}"


def test_tables_of_lumina_are_measured_on_a_tiny_one(tmp_path, monkeypatch, capsys):
    """Table 1 and the clusters, from a folder and a file of prompts."""
    family, prompts = tmp_path / "lumina", tmp_path / "prompts.txt"
    jaxspec.save(toy_lumina.family(), family)
    prompts.write_text("a red heart\na cat on a mat\n")
    words = ["--family", family, "--prompts", prompts, "--size", 64]
    words += ["--runs", tmp_path / "runs"]
    for group in ("lumina-mgpt-partiprompts", "lumina-mgpt-clusters"):
        text = table(monkeypatch, capsys, gsd, "--group", group, *words)
    measured_on = "Measured on parti: toy Lumina, 64 px, 2 pictures.\n\n| method |"
    _, partiprompts, coco, clusters, _ = text.split("\n## ")
    assert measured_on in partiprompts and measured_on in clusters
    drawn = (tmp_path / "runs").glob("lumina-*/parti/*/run.json")
    asked = [json.loads(x.read_text())["settings"]["unconditional"] for x in drawn]
    assert asked == ["turn"] * 9  # as in the papers' code
    assert "Measured" not in coco
    # Of our 4 x 4 cells and no newlines; the second picture was timed.
    assert re.search(r"\| AR \| 112.29 † / 0.+ \| 2392 † / 16.0", partiprompts)
    assert "| Amplify-3 | 31.31 † / withheld | 586 † / " in partiprompts
    names = {"none": "1035", "distance": "913.8", "by-q": "685.3", "by-p": "636.2"}
    for name, published in (names | {"all": "636.8"}).items():
        found = re.search(rf"\| {name} \| {published} † / ([0-9.]+)", clusters)
        assert found and 1 <= float(found[1]) <= 16, clusters


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        (gsd, ["nothing"], "--group is one of lumina-mgpt-partiprompts"),
        (gsd, ["lumina-mgpt-clusters"], "--prompts is missing: the file of parti's"),
        (
            gsd,
            ["lumina-mgpt-clusters", "--name", "emoji"],
            "--name is one of parti, not 'emoji': no column of lumina-mgpt-clusters",
        ),
        (mulo, ["tar-7b-512-px"], "--name is missing: .* one of coco, geneval, dpg"),
    ],
)
def test_what_no_column_would_show_is_refused(module, words, said, monkeypatch, capsys):
    assert re.search(said, table(monkeypatch, capsys, module, "--group", *words))
