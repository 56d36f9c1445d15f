"""The command line with a stand-in for the models, and with the real family."""

import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import jaxspec
from jaxspec.cli import app
from tests import toy


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Runs in an empty folder with a fake library; what it was asked, call by call."""
    calls = []

    def generate(pipeline, prompts, *, num_images, **settings):
        calls.append((pipeline, prompts, {"num_images": num_images, **settings}))
        if "long" in prompts:
            warnings.warn("kept 16 of 20 word pieces", UserWarning, stacklevel=2)
        if "nonsense" in prompts:
            raise ValueError("no known word\nin 'nonsense'")
        if settings["progress"]:
            settings["progress"](128, 256, None)
        n = len(prompts) * num_images
        return jaxspec.Generated(
            images=np.stack([np.full((32, 32, 3), 9 * i, np.uint8) for i in range(n)]),
            tokens=np.zeros((n, 4, 4), np.int32),
            stats=SimpleNamespace(summary=lambda: {"target_passes": np.int64(1024)}),
            prompts=[prompt for prompt in prompts for _ in range(num_images)],
            seeds=[settings["seed"]] * n,
            numbers=list(range(num_images)) * len(prompts),
            settings={"size": settings["size"]},
            seconds={},
        )

    def load(name):
        if name != "emoji":
            raise FileNotFoundError(f"no family {name!r}; there is: emoji")
        sizes = {"32 px": {"parameters": 1234567}}
        return SimpleNamespace(
            describe=lambda: {"name": name, "sizes": sizes, "R@5": np.float32(0.28)}
        )

    monkeypatch.setattr(jaxspec, "load", load)
    monkeypatch.setattr(jaxspec, "generate", generate)
    monkeypatch.chdir(tmp_path)
    return calls


def run(*arguments, code=0, env=None):
    """Output of the command, whose exit code must be `code`."""
    result = CliRunner().invoke(app, arguments, env=env)
    assert result.exit_code == code, result.output
    return result


def refused(*arguments):
    """The one line on stderr of a command that must fail as bad input does."""
    result = run(*arguments, code=2)
    assert result.stdout == "" and result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith("error: ")
    return result.stderr


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


def test_one_picture_says_where_it_is_and_what_made_it(calls):
    said = run("generate", "A red Heart!", "--seed", "7", "--size", "32")
    assert said.stdout == "wrote a-red-heart-seed7.png\n" and said.stderr == ""
    with Image.open("a-red-heart-seed7.png") as image:
        assert image.text["prompt"] == "A red Heart!"
        assert (image.text["seed"], image.text["image"]) == ("7", "0")
        assert json.loads(image.text["settings"]) == {"size": 32}
    np.testing.assert_array_equal(pixels("a-red-heart-seed7.png"), 0)


def test_names_made_here_never_replace_a_file_and_names_given_do(calls):
    for expected in "heart-seed0.png", "heart-seed0-2.png", "heart-seed0-3.png":
        assert run("generate", "heart").stdout == f"wrote {expected}\n"
    Path("mine.png").write_text("old")
    run("generate", "heart", "--out", "mine.png")
    assert pixels("mine.png").shape == (32, 32, 3)


def test_settings_reach_the_library_and_defaults_stay_its_own(calls):
    run("generate", "a", "b", "--seed", "3", "--guidance", "2.5", "--top-k", "50")
    run("generate", "a", "--temperature", "0", "--top-p", "0.9", "--num-images", "2")
    unset = dict.fromkeys(["size", "guidance", "temperature", "top_k", "top_p"])
    unset |= {"num_images": 1, "seed": 0, "progress": None, "method": None}
    unset |= {"best_of": 1}
    assert [prompts for _, prompts, _ in calls] == [["a", "b"], ["a"]]
    assert calls[0][2] == unset | {"seed": 3, "guidance": 2.5, "top_k": 50}
    assert calls[1][2] == unset | {"temperature": 0, "top_p": 0.9, "num_images": 2}


def test_several_pictures_make_one_labelled_sheet(calls):
    two, out = ("generate", "heart", "tree"), "new/sheet.png"
    said = run(*two, "--num-images", "3", "--out", out)
    assert said.stdout == f"wrote {out}\n" and os.listdir("new") == ["sheet.png"]
    for i in range(6):
        assert (pixels(out) == 9 * i).all(-1).sum() >= 32 * 32
    with Image.open(out) as image:
        assert image.text["prompt"] == "heart\ntree" and image.text["seed"] == "0"
    assert run(*two).stdout == "wrote heart-and-1-more-seed0-sheet.png\n"


def test_a_folder_gets_each_picture_and_the_sheet(calls):
    run("generate", "heart", "--num-images", "2", "--out", "hearts/")
    names = [f"heart-seed0-{what}.png" for what in ("image0", "image1", "sheet")]
    assert sorted(os.listdir("hearts")) == names
    np.testing.assert_array_equal(pixels(Path("hearts", names[1])), 9)
    run("generate", "tree", "--out", "hearts")
    assert sorted(os.listdir("hearts")) == [*names, "tree-seed0.png"]


def test_what_the_library_refuses_is_one_line(calls):
    assert refused("generate", "nonsense") == "error: no known word in 'nonsense'\n"
    for command in ["generate", "x", "--family", "none"], ["info", "none"]:
        assert refused(*command) == "error: no family 'none'; there is: emoji\n"
    assert os.listdir() == []


@pytest.mark.parametrize(
    "out, said",
    [
        ("heart.jpg", "'heart.jpg' is neither"),
        ("", "'' is neither"),
        ("file/heart.png", "cannot write to file/heart.png: Not a directory"),
        ("file/", "cannot write to file: Not a directory"),
        ("/proc/heart.png", "cannot write to /proc/heart.png"),
    ],
)
def test_places_that_cannot_be_written_are_refused_before_drawing(calls, out, said):
    Path("file").touch()
    assert said in refused("generate", "heart", "--out", out)
    assert not calls and os.listdir() == ["file"]


def test_warnings_are_one_line_and_the_picture_is_drawn(calls):
    said = run("generate", "long")
    assert said.stderr == "warning: kept 16 of 20 word pieces\n"
    assert said.stdout == "wrote long-seed0.png\n"


def test_progress_is_shown_on_a_terminal_only(calls):
    terminal = {"TTY_COMPATIBLE": "1", "NO_COLOR": "1", "COLUMNS": "100"}
    shown = run("generate", "heart", env=terminal)
    assert "128/256 cells" in shown.stderr and shown.stdout == "wrote heart-seed0.png\n"
    assert run("generate", "heart").stderr == ""


def test_stats_info_and_version(calls):
    said = run("generate", "heart", "--stats").stdout
    assert said.splitlines() == ["wrote heart-seed0.png", "target_passes: 1,024"]
    lines = ["name: emoji", "sizes:", "  32 px:", "    parameters: 1,234,567"]
    assert run("info").stdout.splitlines() == [*lines, "R@5: 0.28"]
    assert run("--version").stdout == f"jaxspec {jaxspec.__version__}\n"
    assert 'jaxspec generate "red heart"' in run("generate", "--help").stdout


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--method", "sjdd"], "no method 'sjdd'; there is: ar, "),
        (["--method", "ar", "--window", "3"], "ar has no knob 'window'"),
        (["--method", "scd", "--window", "0"], "window must be 1 or more, not 0"),
        (["--method", "scd", "--knob", "coupling=no"], "maximal or gumbel, not 'no'"),
        (["--method", "scd", "--knob", "coupling"], "NAME=VALUE, not 'coupling'"),
        (["--method", "sjd", "--knob", "window=2", "--window", "3"], "given twice"),
        (["--window", "3"], "choose one with --method"),
    ],
)
def test_methods_that_cannot_be_are_refused_before_anything_loads(
    calls, arguments, said
):
    assert said in refused("generate", "heart", "--family", "none", *arguments)
    assert not calls


def test_methods_are_listed_and_explained():
    table = run("methods", env={"COLUMNS": "100"}).stdout.splitlines()
    assert table[0].split() == ["method", "guarantee", "knobs", "source"]
    (row,) = (line for line in table if line.startswith("zipar "))
    assert row.split()[:4] == [
        "zipar",
        "biased",
        "window=16,",
        "first_row_alone=false,",
    ]
    assert row.endswith("He et al. 2024, arXiv 2412.04062")
    assert max(map(len, table)) <= 100
    told = run("methods", "SCD").stdout
    assert "\n  coupling=maximal  (maximal or gumbel)\n      " in told
    assert "Guarantee: exact;" in told and "arXiv 2510.24211" in told
    assert "no method 'none'; there is: ar, " in refused("methods", "none")


@pytest.fixture
def toy_family(monkeypatch, tmp_path):
    monkeypatch.setattr(jaxspec, "load", lambda name: toy.family())
    monkeypatch.chdir(tmp_path)


SJD4 = ("--method", "sjd", "--window", "4", "--map", "--animate", "--stats")


def test_a_picture_with_map_and_animation_end_to_end(toy_family):
    Path("x-map.png").write_text("mine")
    said = run("generate", "red heart", "--out", "x.png", *SJD4).stdout.splitlines()
    # A file that was there is replaced only if its name was given.
    assert said[:3] == ["wrote x.png", "wrote x-map-2.png", "wrote x.webp"]
    assert Path("x-map.png").read_text() == "mine"
    out = jaxspec.generate(toy.family(), "red heart", method=jaxspec.SJD(4))
    np.testing.assert_array_equal(pixels("x.png"), out.images[0])
    np.testing.assert_array_equal(pixels("x-map-2.png"), out.map(0))
    frames = len(out.frames(toy.family(), 0))
    with Image.open("x.webp") as read, Image.open("x-map-2.png") as beside:
        assert (read.n_frames, read.size) == (frames, (16, 16))
        kept = json.loads(read.getexif()[270])
        assert kept == beside.text == out.metadata(0)
    assert json.loads(kept["settings"])["method"]["window"] == 4
    counts = dict(line.split(": ") for line in said[3:])
    assert counts["drawn"] == "1"
    assert int(counts["accepted"]) == out.stats.count(jaxspec.decoding.ACCEPTED)[0]


def test_each_picture_of_a_folder_has_its_map_and_so_has_the_sheet(toy_family):
    run("generate", "red heart", "blue tree", "--out", "both/", *SJD4)
    stems = "red-heart-seed0", "blue-tree-seed0", "red-heart-and-1-more-seed0-sheet"
    names = {f"{s}{end}" for s in stems for end in (".png", "-map.png", ".webp")}
    assert set(os.listdir("both")) == names
    one, sheet = (pixels(f"both/{stems[k]}-map.png").shape for k in (1, 2))
    assert sheet[0] > 1.8 * one[0] and sheet[1] == one[1]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([""], "prompt"),
        (["  \t"], "prompt"),
        (["红色"], "红色"),
        (["red heart", "--size", "48"], "32, 64"),
        (["red heart", "--seed", "-1"], "-1"),
        (["red heart", "--num-images", "0"], "0"),
        (["red heart", "--guidance", "-1"], "guidance"),
        (["red heart", "--guidance", "nan"], "guidance"),
        (["red heart", "--temperature", "-1"], "temperature"),
        (["red heart", "--top-k", "-1"], "top_k"),
        (["red heart", "--top-p", "1.5"], "top_p"),
        (["red heart", "--family", "none"], "none"),
        (["red heart", "--family", "broken"], "broken"),
    ],
)
def test_real_family_refuses_bad_input(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken").mkdir()  # a folder without a model
    assert said in refused("generate", *arguments)
    assert os.listdir() == ["broken"]


def test_real_family_draws_and_warns_of_what_it_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompt = "red heart " * 30
    said = run("generate", prompt, "--size", "32", "--out", "long.png", "--stats")
    assert said.stderr.startswith("warning: ") and said.stderr.count("\n") == 1
    assert "15" in said.stderr and "60" in said.stderr  # the style takes a slot
    assert pixels("long.png").shape == (32, 32, 3)
    assert "passes_per_image: 16\n" in said.stdout
    assert "wrote long.png" in said.stdout
