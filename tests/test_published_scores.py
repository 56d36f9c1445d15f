"""FID, CLIP score, GenEval and DPG-Bench with networks and files that are known."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from jaxspec.cli import app
from jaxspec.evaluation import published
from jaxspec.evaluation.imported import dpg, geneval
from jaxspec.evaluation.published import Network, fid, text_score
from jaxspec.evaluation.results import read_results
from jaxspec.figures import save_png
from tests import runs


def blue(image):
    """By what pictures of `runs` differ."""
    return float(np.asarray(image)[0, 0, 2])


def number(text):
    return float(text.rsplit(" ", 1)[1])


def turned(degrees):
    return np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], -1)


# A picture and its prompt are vectors that are 10 degrees apart for prompt i, times i.
NETWORK = Network(
    name="toy",
    weights="w",
    resize="none",
    images=lambda images: turned(np.array([blue(x) / 40 * 10 for x in images])),
    texts=lambda texts: 3 * turned(np.zeros(len(texts))),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ar"
    return runs.made(folder, of=runs.prompts(6), missing=[("p2", 0)])


def test_text_score_pairs_by_id(run):
    found = text_score(
        read_results(run), NETWORK, name="CLIP", protocol="toy", scale=100, force=True
    )
    want = {f"p{i}/0": 100 * np.cos(np.radians(10 * i)) for i in (0, 1, 3, 4, 5)}
    assert found.values == pytest.approx(want)
    assert found.value == pytest.approx(np.mean(list(want.values())))
    assert found.missing == ["p2/0"] and found.count == 5
    assert (found.network, found.weights, found.resize) == ("toy", "w", "none")
    with pytest.raises(ValueError, match="CLIP needs 30 pictures or more, .* has 5"):
        text_score(read_results(run), NETWORK, name="CLIP", protocol="toy")


def test_text_score_reads_prefix_and_own_prompt(run):
    heard = []

    def texts(words):
        heard.extend(words)
        return np.ones((len(words), 2))

    network = Network("toy", "", "", NETWORK.images, texts)
    options = {"name": "CLIP", "protocol": "", "prefix": "A photo depicts "}
    text_score(read_results(run), network, **options, force=True)
    assert heard[2] == "A photo depicts a thing with number 3"


def test_fid_by_hand(run, tmp_path):
    """On one axis: the squared difference of means and of deviations."""
    flat = Network("toy", "w", "", lambda x: np.array([[blue(i), 0.0] for i in x]))
    for k, value in enumerate([10, 30]):
        save_png(tmp_path / f"{k}.png", np.full((8, 8, 3), value, np.uint8), {})
    found = fid(read_results(run), tmp_path, flat, protocol="toy", force=True)
    ours = np.array([0.0, 40, 120, 160, 200])
    want = (ours.mean() - 20) ** 2 + (ours.std(ddof=1) - np.sqrt(200)) ** 2
    assert found.value == pytest.approx(want)
    assert found.reference == f"{tmp_path.name}, 2 pictures" and found.missing == [
        "p2/0"
    ]
    np.savez(tmp_path / "real.npz", mu=np.array([20.0, 0]), sigma=np.diag([200.0, 0]))
    again = fid(read_results(run), tmp_path / "real.npz", flat, protocol="", force=True)
    assert again.value == pytest.approx(want)
    with pytest.raises(ValueError, match="FID needs 2,048 pictures or more"):
        fid(read_results(run), tmp_path, flat, protocol="toy")
    with pytest.raises(ValueError, match="and .*nothing has 0"):
        fid(read_results(run), tmp_path / "nothing", flat, protocol="", force=True)


@pytest.mark.parametrize(
    ("options", "name", "asked", "value"),
    [
        (["clip"], "CLIP score", "ViT-B-32, lanczos 256", 0.9),
        (["clip", "--protocol", "sjd"], "CLIP score", "ViT-B-16, bilinear 299", 90),
        (["hpsv2"], "HPSv2", "ViT-H-14, ", 90),
        (["fid"], "FID", "lantern", None),
        (["fid", "--protocol", "sjd"], "FID", "sjd", None),
    ],
)
def test_every_published_score_goes_its_way_from_the_command(
    run, tmp_path, monkeypatch, options, name, asked, value
):
    """With a network of three random features in place of the published one."""
    fixed = np.random.default_rng(0).normal(size=(1, 3))
    images = lambda pictures: np.stack([[blue(x), 1, 2] for x in pictures]) * fixed
    ours = np.stack([[40 * i, 1, 2] for i in (0, 1, 3, 4, 5)]) * fixed
    # At a cosine of 0.9 from its picture, whichever prompt is asked for.
    heard, asked_for = [], []

    def texts(words):
        heard.extend(words)
        unit = ours / np.linalg.norm(ours, axis=1, keepdims=True)
        beside = np.cross(unit, [1.0, 2.0, 3.0])
        beside /= np.linalg.norm(beside, axis=1, keepdims=True)
        return 0.9 * unit + np.sqrt(1 - 0.81) * beside

    def network(weights, *how):
        asked_for.append(", ".join(how))
        return Network(f"random {how[0]}", "a" * 64, "none", images, texts)

    monkeypatch.setattr(published, "clip", network)
    monkeypatch.setattr(published, "inception", network)
    moments = {"mu": ours.mean(0), "sigma": np.cov(ours.T)}
    np.savez(tmp_path / "real.npz", **moments)
    given = ["--weights", "w", "--reference", str(tmp_path / "real.npz"), "--force"]
    said = CliRunner().invoke(
        app, ["evaluate", "score", str(run), "--metric", *options, *given, "--json"]
    )
    assert said.exit_code == 0, said.output
    (found,) = json.loads(said.stdout)
    assert asked_for == [asked] and found["name"] == name
    assert found["missing"] == ["p2/0"] and found["count"] == 5
    assert found["weights"] == "a" * 64 and found["low"] is not None
    assert found["value"] == pytest.approx(0 if value is None else value, abs=1e-6)
    if name == "CLIP score" and "sjd" not in options:
        assert heard[0] == "A photo depicts a animal with number 0"


def test_pictures_are_cropped_in_the_middle():
    image = np.zeros((2, 6, 3), np.uint8)
    image[:, 2:4] = 200
    square = published._square(Image.fromarray(image), 4)
    assert square.size == (4, 4) and (np.asarray(square) == 200).all()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """As GenEval wants them: four pictures of each of three prompts."""
    from jaxspec.evaluation.records import Prompt

    tags = "counting", "colors", "colors"
    of = [Prompt(f"{i:05d}", f"prompt {i}", tag) for i, tag in enumerate(tags)]
    folder = tmp_path_factory.mktemp("four") / "ar"
    return runs.made(folder, of=of, images=4, missing=[("00002", 3)])


def test_geneval_is_the_mean_over_tasks(four, tmp_path):
    tags = {"00000": "counting", "00001": "colors", "00002": "colors"}
    correct = {("00000", k): k == 0 for k in range(4)}
    correct |= {("00001", k): True for k in range(4)}
    correct |= {("00002", k): False for k in range(3)}
    rows = [
        {
            "filename": f"out/{prompt}/samples/{k:04d}.png",
            "tag": tags[prompt],
            "correct": value,
        }
        for (prompt, k), value in reversed(correct.items())
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = {
        score.name: score for score in geneval(read_results(four), path, force=True)
    }
    # Of tasks: 1 of 4, and of its two prompts 4 of 4 and 0 of 3.
    assert found["GenEval"].value == pytest.approx((1 / 4 + 4 / 7) / 2)
    assert found["GenEval counting"].values["00000/0"] == 1
    assert found["GenEval"].missing == ["00002/3"] and found["GenEval"].count == 11
    assert found["GenEval colors"].missing == ["00002/3"]
    assert found["GenEval counting"].missing == []
    with pytest.raises(ValueError, match="GenEval needs 2,212 pictures .* has 11"):
        geneval(read_results(four), path)
    path.write_text(json.dumps(rows[0] | {"filename": "x/00009/samples/0000.png"}))
    with pytest.raises(ValueError, match="no such picture: is it of another run"):
        geneval(read_results(four), path, force=True)
    path.write_text(json.dumps(rows[0] | {"prompt": "another"}))
    with pytest.raises(ValueError, match="is of 'another', and prompt 00002 of .* is"):
        geneval(read_results(four), path, force=True)
    path.write_text('{"filename": "x"}')
    with pytest.raises(ValueError, match="line 1 of .* is none of GenEval's"):
        geneval(read_results(four), path, force=True)


def test_dpg_is_read_line_by_line(four, tmp_path):
    path = tmp_path / "dpg.txt"
    lines = [
        "a, b/00001.png, 1.0, 0.5, 0.5, 1.0, 0.75",
        "a, b/00000.png, 0.25, 0.25, 0.25, 0.25, 0.25",
        "Model: x",
        "L1 category scores:",
        "\tglobal: 50.0",
        "DPG-Bench score: 50.0",
    ]
    path.write_text("\n".join(lines))
    found = dpg(read_results(four), path, force=True)
    assert found.value == pytest.approx(50)
    assert found.values["00001/1"] == 50 and found.count == 8
    with pytest.raises(ValueError, match="DPG-Bench needs 4,260 pictures .* has 8"):
        dpg(read_results(four), path)
    path.write_text("\n".join(lines[1:]))
    with pytest.raises(ValueError, match="says 50.00, .* mean of 25.00: is it whole"):
        dpg(read_results(four), path, force=True)
    path.write_text("nothing")
    with pytest.raises(ValueError, match="holds no result"):
        dpg(read_results(four), path, force=True)


def test_what_is_missing_is_named_in_a_line(run, tmp_path, monkeypatch):
    def said(*options):
        ran = CliRunner().invoke(app, ["evaluate", "score", str(run), *options])
        assert ran.exit_code == 2 and ran.output.count("\n") == 1
        return ran.output

    assert "fid wants --weights: the network's file" in said("--metric", "fid")
    assert "clip wants --weights" in said("--metric", "clip")
    assert "geneval wants --import" in said("--metric", "geneval")
    alone = ["--metric", "dpg", "--import", "f", str(run)]
    assert "--import is of one run" in said(*alone)
    some = ["--metric", "fid", "--weights", "w", "--reference", "r"]
    assert "--protocol is lantern or sjd, not 'x'" in said(*some, "--protocol", "x")
    assert "no file of weights at w" in said(*some)
    weights = tmp_path / "w.pt"
    weights.touch()
    some = ["--metric", "clip", "--weights", str(weights)]
    monkeypatch.setitem(sys.modules, "torch", None)  # not installed
    assert "torch cannot be imported" in said(*some)
    for name in ("torch", "open_clip"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    refuse = lambda *_, **__: {}["no weights\nat all"]
    monkeypatch.setattr(
        sys.modules["open_clip"], "create_model_and_transforms", refuse, False
    )
    assert "w.pt cannot be read as open_clip's ViT-B-32 weights" in said(*some)
