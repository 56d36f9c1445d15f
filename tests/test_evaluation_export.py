"""Folders for scorers of benchmarks: counts first, pairs by id, the same pixels."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from jaxspec.cli import app
from jaxspec.evaluation.export import export
from jaxspec.evaluation.prompts import source_of
from jaxspec.evaluation.records import (
    Prompt,
    Run,
    Sample,
    read_samples,
    sample_lines,
    sha256,
    write_run,
)
from jaxspec.figures import save_png, save_webp

IMAGES = 4


def picture(prompt, number):
    """2 by 2 pixels of a colour of their own."""
    colour = (prompt % 256, prompt // 256, 50 * number)
    return np.full((2, 2, 3), colour, np.uint8)


def geneval(count):
    for i in range(count):
        tag = {"tag": "counting", "include": [{"class": "cow", "count": i}]}
        prompt = {**tag, "prompt": f"{i} cows"}
        yield Prompt(f"{i:05d}", prompt["prompt"], "counting", prompt)


def run_of(folder, prompts, images=IMAGES, save=save_png):
    """A finished run without models; the samples stand in another order."""
    prompts = list(prompts)
    source = source_of("prompts", prompts)
    settings = {"size": 2, "method": {"name": "AR"}}
    run = Run(settings, "weights", 7, images, source, "float32")
    folder.mkdir()
    write_run(folder, run, prompts)
    suffix = {save_png: "png", save_webp: "webp"}[save]
    samples = []
    for i, prompt in reversed(list(enumerate(prompts))):
        (folder / "images" / prompt.id).mkdir(parents=True)
        for k in range(images):
            file = f"images/{prompt.id}/{k}.{suffix}"
            save(folder / file, picture(i, k), {})
            digest = sha256(folder / file)
            of = {"settings": settings, "weights": "weights"}
            samples.append(Sample(prompt.id, k, 7, file=file, sha256=digest, **of))
    (folder / "samples").mkdir()
    (folder / "samples/shard-0-of-1.jsonl").write_bytes(sample_lines(samples))
    return folder


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


def refused(run, out, layout, said, **how):
    with pytest.raises(ValueError, match=said) as error:
        export(run, out, layout, **how)
    assert "\n" not in str(error.value)
    assert not out.exists() and not list(out.parent.glob(".*"))


def test_geneval_of_553_prompts_with_4_pictures_each(tmp_path):
    run, out = run_of(tmp_path / "run", geneval(553)), tmp_path / "out"
    done = export(run, out, "geneval")
    assert (done.prompts, done.pictures, done.missing) == (553, 2212, 0)
    assert sorted(p.name for p in out.iterdir()) == [f"{i:05d}" for i in range(553)]
    for i in (0, 7, 552):
        own = out / f"{i:05d}"
        names = sorted(p.relative_to(own).as_posix() for p in own.rglob("*.*"))
        assert names == ["metadata.jsonl", *(f"samples/000{k}.png" for k in range(4))]
        said = json.loads((own / "metadata.jsonl").read_text())
        assert said["prompt"] == f"{i} cows" and said["include"][0]["count"] == i
        for k in range(4):
            got = pixels(own / f"samples/000{k}.png")
            np.testing.assert_array_equal(got, picture(i, k))
    refused(run, tmp_path / "x", "dpg", "has 1065 prompts, and the run has 553")
    refused(run, tmp_path / "x", "fiid", "must be geneval, dpg, fid, not 'fiid'")


def test_dpg_grids_have_the_four_in_reading_order(tmp_path):
    prompts = [Prompt("0", "a"), Prompt("COCOval2014000000010363", "b")]
    run = run_of(tmp_path / "run", prompts, save=save_webp)
    refused(run, tmp_path / "x", "dpg", "1065 prompts, and the run has 2 .--partial")
    export(run, tmp_path / "out", "dpg", partial=True)
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["0.png", "COCOval2014000000010363.png"]
    grid = pixels(tmp_path / "out" / names[1])
    assert grid.shape == (4, 4, 3)
    for k, (row, column) in enumerate(((0, 0), (0, 2), (2, 0), (2, 2))):
        cell = grid[row : row + 2, column : column + 2]
        np.testing.assert_array_equal(cell, picture(1, k))


def test_pictures_that_are_missing_or_damaged_are_named_and_never_shift(tmp_path):
    run = run_of(tmp_path / "run", geneval(3))
    (run / "images/00000/2.png").unlink()
    save_png(run / "images/00001/0.png", picture(9, 9), {})
    failed = next(s for s in read_samples(run).values() if s.key == ("00001", 3, 7))
    failed = dataclasses.replace(failed, file=None, error="a NaN", time="2999")
    with (run / "samples/shard-0-of-1.jsonl").open("ab") as file:
        file.write(sample_lines([failed]))
    said = (
        "lacks 3 of 12 pictures: image 2 of 00000 .damaged., image 0 of 00001 "
        ".damaged., image 3 of 00001 .a NaN.; "
    )
    refused(run, tmp_path / "x", "fid", said)
    done = export(run, tmp_path / "geneval", "geneval", partial=True)
    assert (done.prompts, done.pictures, done.missing) == (3, 9, 3)
    kept = {p.name for p in (tmp_path / "geneval/00001/samples").iterdir()}
    assert kept == {"0001.png", "0002.png"}
    got = pixels(tmp_path / "geneval/00000/samples/0003.png")
    np.testing.assert_array_equal(got, picture(0, 3))
    done = export(run, tmp_path / "dpg", "dpg", partial=True)  # of whole ones only
    assert [p.name for p in (tmp_path / "dpg").iterdir()] == ["00002.png"]


def test_a_flat_folder_for_fid_has_pictures_and_nothing_else(tmp_path):
    prompts = [Prompt("139", "a"), Prompt("285", "b")]
    run = run_of(tmp_path / "run", prompts, images=1)
    export(run, tmp_path / "out", "fid")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "139-0.png",
        "285-0.png",
    ]
    same = (tmp_path / "out/285-0.png").read_bytes()
    assert same == (run / "images/285/0.png").read_bytes()
    refused(run, tmp_path / "x", "dpg", "takes 4 pictures a prompt, and the run has 1")
    refused(run, tmp_path / "x", "geneval", "prompt 139 is not of", partial=True)
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        export(run, tmp_path / "out", "fid")


def test_four_pictures_that_are_one_are_no_grid(tmp_path):
    run = run_of(tmp_path / "run", [Prompt("0", "a")])
    first = next(s for s in read_samples(run).values() if s.image == 0)
    again = dataclasses.replace(first, image=3, time="2999")
    with (run / "samples/shard-0-of-1.jsonl").open("ab") as file:
        file.write(sample_lines([again]))
    said = "images 0 and 3 of 0 are the same picture"
    refused(run, tmp_path / "x", "dpg", said, partial=True)


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_of(Path("run"), geneval(2))
    do = ["evaluate", "export", "run", "--layout", "geneval", "--out", "out"]
    said = CliRunner().invoke(app, do)
    assert said.exit_code == 2 and said.stderr.startswith("error: geneval has 553 ")
    Path("run/images/00000/2.png").unlink()
    said = CliRunner().invoke(app, [*do, "--partial"])
    assert said.stdout == "wrote out: 7 pictures of 2 prompts\n"
    assert said.stderr == "warning: 1 pictures are missing\n" and said.exit_code == 0
    said = CliRunner().invoke(app, ["evaluate", "export", "none", *do[3:]])
    assert said.exit_code == 2 and "there is no folder none" in said.stderr
