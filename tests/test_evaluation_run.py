"""Runs of many prompts: what they draw, what they survive and what they refuse."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import jaxspec
from jaxspec.cli import app
from jaxspec.decoding import ACCEPTED, BONUS, RESAMPLED
from jaxspec.evaluation import intact, read_prompts, read_run, read_samples
from jaxspec.evaluation.prompts import load_prompts
from jaxspec.evaluation.records import sample_lines
from jaxspec.evaluation.results import read_results
from jaxspec.evaluation.run import clear_losses, draw
from jaxspec.evaluation.writing import Manifest, opened
from jaxspec.recipe import Recipe
from tests import toy

ROOT = Path(__file__).parents[1]
BATCH = 4
TEXTS = [
    "red heart",
    "blue tree",
    "Hat ☃ 心",  # of which the hat is read
    "red heart",  # again
    "café",
    "red tree",
    "blue hat",
    "heart " * 1700,  # 10,000 characters
    "glossy tree",
    "flat woman's hat",
]


@pytest.fixture(scope="module")
def recipe():
    return Recipe.create(toy.family())


def prompts_of(folder, texts=TEXTS):
    """The prompts of a file."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return load_prompts(path)


def drawn(recipe, folder, texts=TEXTS, **how):
    """A run in folder/run: how it ended."""
    how = {"batch_size": BATCH} | how
    return draw(recipe, prompts_of(folder, texts), folder / "run", **how)


def hashes(run):
    """Of every sample, the hashes of its files; each must be as it was written."""
    samples = read_samples(run)
    assert all(intact(run, s) for s in samples.values())
    return {key: (s.sha256, s.record_sha256) for key, s in samples.items()}


def files(run):
    """All files but those of the manifests."""
    return {
        p.relative_to(run).as_posix()
        for p in run.rglob("*")
        if p.is_file() and p.parent.name != "samples"
    }


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """A run of two pictures a prompt that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    status = drawn(recipe, folder, images=2)
    assert (status.samples, status.drawn, status.failed) == (20, 20, 0)
    return folder / "run"


def test_samples_are_those_of_generate(recipe, whole):
    samples, run = read_samples(whole), read_run(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = jaxspec.generate(toy.family(), TEXTS, num_images=2, batch_size=BATCH)
    assert run.settings == out.settings and run.images == 2 and run.dtype == "float32"
    for i, (prompt, text) in enumerate(zip(read_prompts(whole), TEXTS, strict=True)):
        assert prompt.text == text.strip()
        for number in range(2):
            row, sample = 2 * i + number, samples[prompt.id, number, 0]
            with np.load(whole / sample.record) as record:
                np.testing.assert_array_equal(record["tokens"], out.tokens[row])
                np.testing.assert_array_equal(
                    record["final_pass"], out.stats.final_pass[row]
                )
            with Image.open(whole / sample.file) as image:
                np.testing.assert_array_equal(np.asarray(image), out.images[row])
                assert image.text["id"] == prompt.id
                assert json.loads(image.text["settings"]) == out.settings
            assert (sample.target_passes, sample.prefill_passes) == (15, 1)
            assert (sample.drafted, sample.accepted, sample.bonus) == (0, 0, 0)
            assert sample.seconds > 0 and sample.stages["pictures"] > 0
            said = {
                2: ["1 unknown word(s)"],
                7: ["the prompt has"],
                9: ["the prompt has"],
            }
            assert [" ".join(x.split()[:3]) for x in sample.warnings] == said.get(i, [])
    first, again = (read_prompts(whole)[i].id for i in (0, 3))
    assert again == f"{first}-2"  # what reads alike shows the same
    assert samples[first, 1, 0].sha256 != samples[first, 0, 0].sha256
    assert len(samples) == 20 and len(files(whole)) == 2 * 20 + 3
    assert samples[first, 0, 0].compiled
    assert not samples[read_prompts(whole)[9].id, 1, 0].compiled


def test_counts_are_those_of_the_decoder(tmp_path):
    """Of a method whose passes depend on the picture; a row fills the batch."""
    method, texts = jaxspec.SJD(2), ["red heart", "blue tree", "café"]
    recipe = Recipe.create(toy.family(), size=8, method=method)
    drawn(recipe, tmp_path, texts, seed=5, check=True)
    out = jaxspec.generate(toy.family(), texts, size=8, method=method, seed=5)
    counts = {"accepted": ACCEPTED, "resampled": RESAMPLED, "bonus": BONUS}
    samples = read_samples(tmp_path / "run")
    for i, prompt in enumerate(read_prompts(tmp_path / "run")):
        sample = samples[prompt.id, 0, 5]
        for name in ("target_passes", "prefill_passes", "draft_passes", "drafted"):
            assert getattr(sample, name) == getattr(out.stats, name)[i]
        for name, origin in counts.items():
            assert getattr(sample, name) == np.sum(out.stats.origin[i] == origin)
        with np.load(tmp_path / "run" / sample.record) as record:
            np.testing.assert_array_equal(record["origin"], out.stats.origin[i])
    assert sum(s.drafted for s in samples.values()) > 0
    prompts, again = read_prompts(tmp_path / "run"), tmp_path / "again"
    draw(recipe, prompts, again, seed=5, batch_size=2, refill=True, check=True)
    for key, other in read_samples(again).items():
        assert samples[key].divergences == other.divergences == 0  # of an exact method
        assert other.log_prob == pytest.approx(samples[key].log_prob, rel=1e-4)
        assert other.log_prob < 0
        assert other.refill and not samples[key].refill
        assert other.stages["check"] > 0


def test_a_line_stands_alone(recipe, whole):
    (first, *_) = (whole / "samples/shard-0-of-1.jsonl").read_text().splitlines()
    line, run = json.loads(first), read_run(whole)
    assert line["settings"] == run.settings and line["weights"] == run.weights
    assert line["settings"]["method"] == {"name": "AR"}
    assert line["jax"] == jax.__version__ and line["jaxspec"] == jaxspec.__version__
    assert (line["device"], line["dtype"]) == ("cpu", "float32")
    assert line["divergences"] is None  # the target was not asked


def test_three_shards_draw_exactly_what_one_does(recipe, whole, tmp_path):
    ended = [drawn(recipe, tmp_path, images=2, part=f"{i}/3") for i in range(3)]
    assert [s.drawn for s in ended] == [8, 6, 6]
    assert hashes(tmp_path / "run") == hashes(whole)
    assert files(tmp_path / "run") == files(whole)
    lines = [p.read_bytes() for p in (tmp_path / "run/samples").iterdir()]
    assert sorted(text.count(b"\n") for text in lines) == [6, 6, 8]


def test_rows_that_are_handed_on_make_the_same_files(recipe, whole, tmp_path):
    texts = [*TEXTS[:3], "xyzzy", *TEXTS[3:]]
    status = drawn(recipe, tmp_path, texts, images=2, refill=True)
    assert (status.samples, status.drawn, status.failed) == (22, 20, 2)
    good = [s for s in read_samples(tmp_path / "run").values() if s.error is None]
    found = {(s.sha256, s.record_sha256) for s in good}
    assert found == set(hashes(whole).values())
    assert all(intact(tmp_path / "run", s) for s in good)


def test_another_run_compiles_nothing(recipe, whole, tmp_path):
    """Nor a short one, whose rows are filled: of 7 samples at 4 a batch."""
    with toy.compilations() as compiled:
        assert drawn(recipe, tmp_path, TEXTS[:7], seed=3).drawn == 7
    assert compiled == []
    samples = read_samples(tmp_path / "run").values()
    assert len(samples) == 7 and not any(s.compiled for s in samples)


# What runs survive.

KILLED = """
import os, signal, sys
from pathlib import Path
from PIL import Image
import jax
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_default_matmul_precision", "highest")
from tests.test_evaluation_run import drawn
from jaxspec.recipe import Recipe
from tests import toy
saved, save = [], Image.Image.save

def dies(image, path, **how):
    saved.append(path)
    if len(saved) == 11:  # in the third batch
        Path(path).write_bytes(b"half a picture")
        os.kill(os.getpid(), signal.SIGKILL)
    save(image, path, **how)

Image.Image.save = dies
drawn(Recipe.create(toy.family()), Path(sys.argv[1]), images=2)
"""


def test_killed_and_damaged_it_ends_as_if_nothing_had_been(recipe, whole, tmp_path):
    """By kill -9 amid a picture; then by hand; on another number of processes."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    run = tmp_path / "run"
    there = read_samples(run)
    assert len(there) == 8  # two whole batches
    assert list(run.rglob(".*.tmp"))
    cut, lost, swapped = list(there.values())[:3]
    picture = run / cut.file
    picture.write_bytes(picture.read_bytes()[:-20])
    (run / lost.record).unlink()
    (run / swapped.file).write_bytes(picture.read_bytes())
    (manifest,) = (run / "samples").iterdir()
    manifest.write_bytes(manifest.read_bytes()[:-30])  # the last line
    # And the lock of the dead process is none.
    ended = [drawn(recipe, tmp_path, images=2, part=f"{i}/2") for i in (1, 0)]
    assert sum(s.there for s in ended) == 4 and sum(s.drawn for s in ended) == 16
    assert hashes(run) == hashes(whole) and files(run) == files(whole)
    again = drawn(recipe, tmp_path, images=2)  # which ends the half line
    assert (again.there, again.drawn) == (20, 0)
    assert manifest.read_bytes().endswith(b"\n")


def test_a_full_disk_is_one_line_and_what_is_there_is_whole(
    recipe, tmp_path, monkeypatch
):
    saved, save = [], Image.Image.save

    def full(image, path, **how):
        saved.append(path)
        if len(saved) > 6:
            Path(path).write_bytes(b"half a picture")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(image, path, **how)

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(
        OSError, match="no space left for .*run: what is there is whole"
    ):
        drawn(recipe, tmp_path)
    run = tmp_path / "run"
    assert len(hashes(run)) == BATCH
    assert not list(run.rglob(".*.tmp"))
    monkeypatch.undo()
    assert drawn(recipe, tmp_path).there == BATCH and len(hashes(run)) == 10


def test_a_device_without_room_stops_the_run_and_says_so(recipe, tmp_path, monkeypatch):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\n of 9 GB")

    monkeypatch.setattr(Recipe, "decode", full)
    with pytest.raises(MemoryError, match="no room for a batch of 4: take a smaller"):
        drawn(recipe, tmp_path)


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_process_that_is_lost_is_told_in_a_line(kind):
    several = SimpleNamespace(is_multi_process=True)
    lost = kind("UNKNOWN: Gloo AllGather failed: Connection reset by peer")
    with pytest.raises(ConnectionError, match="goes on .*reset by peer"):
        with clear_losses(several):
            raise lost
    with pytest.raises(kind, match="^UNKNOWN"), clear_losses(None):
        raise lost
    with pytest.raises(ValueError, match="^seed must be"), clear_losses(several):
        raise ValueError("seed must be 0")


def test_lines_are_all_added_or_none(whole):
    class Full:
        """A file with room for 100 bytes more."""

        def __init__(self):
            self.content = bytearray(b"before\n")

        def seek(self, offset, whence):
            return len(self.content)

        def write(self, data):
            room = max(0, 107 - len(self.content))
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.content += data[:room]
            return min(room, len(data))

        def truncate(self, size):
            del self.content[size:]

    file, samples = Full(), list(read_samples(whole).values())
    with pytest.raises(OSError, match="No space"):
        Manifest(file).append(samples)
    assert file.content == b"before\n"


def test_a_folder_that_cannot_be_written(recipe, tmp_path):
    prompts = prompts_of(tmp_path)
    with pytest.raises(OSError, match="^cannot write to /proc/run: "):
        draw(recipe, prompts, "/proc/run")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write to .*file: "):
        draw(recipe, prompts, tmp_path / "file")


# What fails.


def test_prompts_that_fail_are_samples_with_errors(recipe, whole, tmp_path):
    texts = ["xyzzy", *TEXTS[:2], "", *TEXTS[2:]]
    status = drawn(recipe, tmp_path, texts, images=2)
    assert (status.drawn, status.failed, status.done) == (20, 4, 24)
    samples, prompts = read_samples(tmp_path / "run"), read_prompts(tmp_path / "run")
    errors = {p.text: samples[p.id, 1, 0].error for p in prompts}
    assert "nothing in the prompt 'xyzzy' is known" in errors.pop("xyzzy")
    assert errors.pop("") == "the prompt is empty"
    assert set(errors.values()) == {None}
    good = {k: s.sha256 for k, s in samples.items() if s.error is None}
    assert good == {k: s.sha256 for k, s in read_samples(whole).items()}
    again = drawn(recipe, tmp_path, texts, images=2)  # tried again
    assert (again.there, again.drawn, again.failed) == (20, 0, 4)


def test_a_row_that_is_no_number_fails_alone(recipe, whole, tmp_path):
    """The vector of one word is NaN: its prompts fail, beside others that do not."""
    table = recipe.params.params["text"]["table"]
    hat = recipe.params.config.text.tokenizer.token_to_id("hat")
    broken = {**recipe.params.params, "text": {"table": table.at[hat].set(jnp.nan)}}
    params = dataclasses.replace(recipe.params, params=broken)
    status = drawn(dataclasses.replace(recipe, params=params), tmp_path)
    assert (status.drawn, status.failed) == (8, 2)
    samples, before = read_samples(tmp_path / "run"), read_samples(whole)
    for prompt in read_prompts(tmp_path / "run"):
        sample = samples[prompt.id, 0, 0]
        if prompt.text in ("Hat ☃ 心", "blue hat"):  # the last one's does not fit
            assert "not finite in pass 0" in sample.error and sample.file is None
        else:
            assert sample.sha256 == before[sample.key].sha256


def test_of_a_batch_that_fails_as_a_whole_the_guilty_are_found(
    recipe, whole, tmp_path, monkeypatch
):
    decode, batches = Recipe.decode, []

    def spoilt(self, asked, numbers, seed, **how):
        batches.append(asked.names)
        if "café" in asked.names:
            raise FloatingPointError("the language model\nreturned a NaN")
        return decode(self, asked, numbers, seed, **how)

    monkeypatch.setattr(Recipe, "decode", spoilt)
    status = drawn(recipe, tmp_path)
    assert (status.drawn, status.failed) == (9, 1)
    assert [len(names) for names in batches] == [4, 4, 1, 1, 1, 1, 2]
    (failed,) = (s for s in read_samples(tmp_path / "run").values() if s.error)
    assert failed.error == "the language model returned a NaN"
    before = read_samples(whole)
    for sample in read_samples(tmp_path / "run").values():
        assert sample.error or sample.sha256 == before[sample.key].sha256


# What is refused.


def test_other_settings_are_refused_by_name_with_both_values(recipe, whole, tmp_path):
    family = dataclasses.replace(
        toy.family(), params=toy.randomly(toy.family().params, seed=5)
    )
    others = Recipe.create(family, method=jaxspec.SCD(2), temperature=0.5)
    prompts = prompts_of(tmp_path, ["tree"])
    before = files(whole)
    with pytest.raises(ValueError, match="was drawn with other settings") as error:
        draw(others, prompts, whole, images=3, seed=9)
    for said in (
        "settings.method.name: AR -> SCD",
        "settings.method.window: None -> 2",
        "settings.temperature: 0.9 -> 0.5",
        "weights: ",
        "prompts.count: 10 -> 1",
        "prompts.sha256: ",
        "images: 2 -> 3",
        "seed: 0 -> 9",
    ):
        assert said in str(error.value)
    assert "guidance" not in str(error.value) and files(whole) == before


def test_a_run_without_samples_binds_no_one(recipe, tmp_path, monkeypatch):
    """Its method did not fit the family, say."""

    def misfit(*_, **__):
        raise ValueError("the drafter must have the target's grid")

    monkeypatch.setattr(Recipe, "decode", misfit)
    with pytest.raises(ValueError, match="drafter"):
        drawn(recipe, tmp_path, seed=1)
    monkeypatch.undo()
    (tmp_path / "run/.0123.tmp").touch()  # of a process that was killed
    assert drawn(recipe, tmp_path, TEXTS[:4], seed=2).drawn == 4
    assert ".0123.tmp" not in files(tmp_path / "run")
    assert read_run(tmp_path / "run").seed == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    prompts = prompts_of(tmp_path)
    with pytest.raises(ValueError, match="is not empty and holds no run.json"):
        draw(recipe, prompts, tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").rglob("*")] == ["notes.txt"]
    for twice in (prompts[:1] * 2, [dataclasses.replace(prompts[0], id="")]):
        with pytest.raises(ValueError, match="must have its own id: . have '"):
            draw(recipe, twice, tmp_path / "new")


def test_a_shard_is_drawn_by_one_process_at_a_time(recipe, whole):
    prompts, run = read_prompts(whole), read_run(whole)
    how = {"images": 2, "batch_size": BATCH}
    with opened(whole, run, prompts, 0, 1):
        with pytest.raises(ValueError, match="another process is drawing shard 0/1"):
            draw(recipe, prompts, whole, **how)
        with pytest.raises(ValueError, match="in other shares .*shard-0-of-1"):
            draw(recipe, prompts, whole, part="1/2", **how)
    with opened(whole, run, prompts, 1, 2):
        assert draw(recipe, prompts, whole, part="0/2", **how).there == 10
    assert draw(recipe, prompts, whole, **how).there == 20


def test_prompts_that_were_changed_are_refused_and_written_again(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    prompts, path = read_prompts(run), run / "prompts.jsonl"
    path.write_text(path.read_text().replace("blue hat", "red tree"))
    with pytest.raises(ValueError, match="does not hold the prompts of run.json"):
        read_results(run)
    for damage in (lambda: None, path.unlink):
        damage()
        with opened(run, read_run(run), prompts, 0, 1):
            pass
        assert read_results(run).prompts == prompts


def test_another_version_is_warned_of(whole):
    prompts, run = read_prompts(whole), read_run(whole)
    later = dataclasses.replace(run, version="9.9")
    with pytest.warns(UserWarning, match="begun with .*, and this is 9.9"):
        with opened(whole, later, prompts, 0, 1):
            pass


def test_the_newest_line_counts_whoever_wrote_it(whole, tmp_path):
    (tmp_path / "samples").mkdir()
    sample = next(iter(read_samples(whole).values()))
    later = dataclasses.replace(sample, time="2999-01-01", error="later")
    for name, content in (
        ("a", sample_lines([later])),
        ("b", sample_lines([sample]) + b'{"prompt": 1'),
        ("c", b'\n[]\n{"image": 0}\nnonsense\n{"prompt": [], "image": 0, "seed": 0}\n'),
    ):
        (tmp_path / f"samples/{name}.jsonl").write_bytes(content)
    assert read_samples(tmp_path) == {sample.key: later}
    # Whoever put folders together: what was drawn otherwise is none of the run.
    for name, other in (("d", {"weights": "x"}), ("e", {"settings": {"size": 8}})):
        other = dataclasses.replace(sample, time="3000", **other)
        (tmp_path / f"samples/{name}.jsonl").write_bytes(sample_lines([other]))
        assert read_samples(tmp_path) == {sample.key: other}
    assert read_samples(tmp_path, read_run(whole)) == {sample.key: later}


# The command.


def command(*arguments, code=0, **env):
    result = CliRunner().invoke(app, ["evaluate", "run", *arguments], env=env)
    assert result.exit_code == code, result.output
    return result


def test_the_command(monkeypatch, tmp_path, recipe, whole):
    monkeypatch.setattr(jaxspec, "load", lambda name: toy.family())
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("red heart\nxyzzy\nblue tree\nred hat hat hat hat\nhat")
    settings = ("p.txt", "--out", "r", "--batch-size", "4", "--limit", "4")
    said = command(*settings, "--format", "webp", code=1)
    assert said.stdout.splitlines()[0] == "drew 3 pictures into r"
    assert said.stdout.splitlines()[1].startswith("1 are of prompts that were not")
    assert (
        said.stderr.startswith("error: 1 pictures failed")
        and len(read_prompts("r")) == 4
    )
    first = read_samples(whole)[read_prompts(whole)[0].id, 0, 0]  # a red heart
    sample = read_samples("r")[read_prompts("r")[0].id, 0, 0]
    assert sample.file.endswith(".webp")
    with (
        Image.open(Path("r", sample.file)) as image,
        Image.open(whole / first.file) as x,
    ):
        np.testing.assert_array_equal(np.asarray(image), np.asarray(x))
        assert json.loads(image.getexif()[270])["prompt"] == "red heart"
    terminal = {"TTY_COMPATIBLE": "1", "NO_COLOR": "1", "COLUMNS": "100"}
    shown = command(*settings, code=1, **terminal)
    assert "drew 0 pictures into r, 3 were there" in shown.stdout
    assert "4 of 4 images" in shown.stderr and "1 failed" in shown.stderr
    refused = command(*settings, "--seed", "4", code=2)
    assert refused.stderr.startswith("error: r was drawn with other settings (seed: 0")
    for wrong in ("none.txt",), ("r",), ("p.txt", "--shard", "4/4"):
        said = command(*wrong, "--out", "x", code=2)
        assert said.stderr.count("\n") == 1 and said.stderr.startswith("error: ")
    assert not os.path.exists("x")


def test_records_can_be_left_out(recipe, tmp_path):
    status = drawn(recipe, tmp_path, TEXTS[:4], keep_records=False)
    assert status.drawn == 4 and not (tmp_path / "run/records").exists()
    assert drawn(recipe, tmp_path, TEXTS[:4]).there == 4
