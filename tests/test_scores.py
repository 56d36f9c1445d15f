"""Scores of runs: what they carry, how pictures are paired, what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxspec.cli import app
from jaxspec.evaluation import prompts, records
from jaxspec.evaluation.emoji import emoji_scores, load_measures
from jaxspec.evaluation.measures import frechet, frechet_estimate
from jaxspec.evaluation.results import read_results
from jaxspec.methods import AR
from tests import runs

COUNT = 30  # pictures whose colours tell them apart


@pytest.fixture(scope="module")
def captions():
    return prompts.load_prompts("emoji")


@pytest.fixture(scope="module")
def emoji_run(tmp_path_factory, captions):
    """Pictures of every tenth caption; one is missing, and one failed."""
    of = captions[::10][:COUNT]
    return runs.made(
        tmp_path_factory.mktemp("emoji") / "ar",
        AR(),
        of=of,
        settings={"family": "emoji", "size": 128},
        missing=[(of[3].id, 0)],
        failed={(of[7].id, 0): "out of memory"},
    )


def real_features(images):
    """Those of the drawing whose caption a picture of `runs` is of."""
    known = load_measures().features
    blue = images[:, 0, 0, 2].astype(int)
    which = [next(i for i in range(32) if 40 * i % 256 == b) for b in blue]
    return known[[10 * i for i in which]]


def test_captions_are_those_that_are_scored(captions):
    known = load_measures()
    assert [p.text for p in captions] == known.captions.tolist()
    assert len({p.id for p in captions}) == len(captions) == 311
    assert set(known.label) == set(known.texts)


def test_emoji_scores_pair_by_id_whatever_is_missing(emoji_run, captions):
    found = {
        s.name: s
        for s in emoji_scores(
            read_results(emoji_run), force=True, features=real_features, weights="w"
        )
    }
    missing = [f"{captions[10 * i].id}/0" for i in (3, 7)]
    for score in found.values():
        assert score.missing == missing and score.count == COUNT - 2
        assert score.weights == "w" and score.low <= score.value <= score.high
    # Each picture is the real drawing of its own caption.
    assert found["emoji FD"].value == pytest.approx(0, abs=1e-6)
    assert found["emoji KID"].value == pytest.approx(0, abs=1e-6)
    assert found["emoji R@5"].value > 0.8  # of drawings; by chance 0.2
    assert set(found["emoji R@1"].values) == {
        f"{p.id}/0" for p in captions[::10][:COUNT]
    } - set(missing)
    # The missing pictures' labels are candidates all the same.
    labels = {str(load_measures().label[10 * i]) for i in range(COUNT)}
    assert found["emoji R@1"].reference.startswith(f"{len(labels)} labels, chance ")
    # One row further, and nothing fits any more.
    shifted = emoji_scores(
        read_results(emoji_run),
        force=True,
        features=lambda images: np.roll(real_features(images), 1, axis=0),
        weights="w",
    )
    assert next(s for s in shifted if s.name == "emoji R@5").value < 0.5


def test_emoji_scores_refuse_what_they_cannot_say(emoji_run, tmp_path):
    results = read_results(emoji_run)
    options = {"features": real_features, "weights": "w"}
    with pytest.raises(ValueError, match="emoji FD needs 128 pictures or more, .* 28"):
        emoji_scores(results, **options)
    few = replace(results, prompts=results.prompts[:3])
    with pytest.raises(ValueError, match="emoji FD needs 4 pictures at the very least"):
        emoji_scores(few, force=True, **options)
    other = runs.made(tmp_path / "other", of=runs.prompts(3))
    with pytest.raises(ValueError, match="3 of 3 prompts are no captions"):
        emoji_scores(read_results(other), **options)
    small = replace(results.run, settings=results.run.settings | {"size": 64})
    with pytest.raises(ValueError, match="of 128 px or more, and .* has 64 px"):
        emoji_scores(replace(results, run=small), force=True, **options)


def test_distance_of_the_bootstrap_has_the_width_of_chance():
    rng = np.random.default_rng(0)
    draw = lambda: rng.normal(size=(100, 2)) + [1, 0]
    b = rng.normal(size=(5000, 2))
    found = frechet_estimate(draw(), b, 300)
    truth = np.std([frechet(draw(), b) for _ in range(200)])
    width = (found.high - found.low) / 2 / 1.96
    assert width == pytest.approx(truth, rel=0.3)


def test_command_says_what_it_scored_and_what_it_refuses(emoji_run, tmp_path):
    run = lambda *args: CliRunner().invoke(app, ["evaluate", "score", *map(str, args)])
    ran = run(emoji_run)
    assert ran.exit_code == 2 and ran.output.startswith("error: emoji FD needs 128")
    ran = run(emoji_run, "--metric", "nothing")
    assert ran.output.startswith("error: no score is called 'nothing': emoji, ")
    other = runs.made(tmp_path / "other", of=runs.prompts(3))
    ran = run(other)
    assert ran.output.startswith("error: choose with --metric what to score")
    assert not (other / "scores.json").exists()
    # A picture that changed since is not scored.
    file = next((other / "images").rglob("*.png"))
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="is not as it was written"):
        read_results(other).image((records.read_prompts(other)[0].id, 0))
    assert json.loads((emoji_run / "run.json").read_text())["seed"] == 0
