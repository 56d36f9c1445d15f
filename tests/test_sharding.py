"""Drawing on several devices and in several processes is drawing on one."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec import sharding
from jaxspec.checkpoints.folder import load_config
from jaxspec.evaluation import intact, read_run, read_samples
from jaxspec.evaluation.prompts import load_prompts
from jaxspec.evaluation.run import draw
from jaxspec.models import abstract
from jaxspec.models.drafter import eagle_config
from jaxspec.models.flashar import FlashConfig
from jaxspec.models.llama import LlamaConfig
from jaxspec.models.lpd import LPDConfig
from jaxspec.models.t5 import T5Config
from jaxspec.models.ta_tok import TaTokConfig, TowerConfig
from jaxspec.recipe import Recipe
from jaxspec.weight_shapes import abstract_params, stacked_params
from tests import sharded, toy

ONE = {"prefix_length": 1, "prefix_width": 8}


def start(folder, devices: int, *arguments: str) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.sharded", str(folder), *arguments],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen) -> dict:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families") / "toy"
    jaxspec.save(sharded.family(), folder)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return result(start(folder, 8))


@pytest.mark.parametrize(
    "name", [f"{m} {d}x{k}" for m, shapes in sharded.MESHES.items() for d, k in shapes]
)
def test_a_mesh_changes_no_token(found, name):
    assert found[name]


def test_a_folder_is_read_part_by_part_and_a_batch_compiles_nothing(found):
    assert found["loaded"] and found["compiled"] == []
    assert found["parts"] == {
        "qkv": ["(16, 3, 4)"] * 4,
        "down": ["(6, 16)"] * 4,
        "head": ["(16, 12)"],
    }
    assert found["equal"] and found["kept"]
    assert found["layer"] == {
        "attention_norm": "(16,)",
        "qkv": "(16, 3, 4)",
        "attention_out": "(4, 16)",
        "ffn_norm": "(16,)",
        "gate_up": "(16, 2, 6)",
        "down": "(6, 16)",
    }


def test_int8_matrices_are_split_as_floats_are_and_change_no_token(found):
    assert found["int8 1x2"] and found["int8 2x2"]
    assert found["int8 parts"] == {
        "attention_norm": "(16,)",
        "qkv/values": "(3, 8, 16)",
        "qkv/scale": "(3, 8)",
        "attention_out/values": "(16, 8)",
        "attention_out/scale": "(16,)",
        "ffn_norm": "(16,)",
        "gate_up/values": "(2, 12, 16)",
        "gate_up/scale": "(2, 12)",
        "down/values": "(16, 12)",
        "down/scale": "(16,)",
    }


def test_an_orbax_checkpoint_is_written_on_one_mesh_and_read_on_another(found):
    assert found["orbax"] == ["(16, 3, 2)"] * 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("devices", "a mesh of 3 x 4 needs 12 devices, and there are 8 (cpu)"),
        ("number", "data must be 1 or more devices, not 0"),
        ("heads", "the transformer for 8 px has 2 heads, which 8 devices (model)"),
        ("axes", "vq/a [4, 6] has axis 1 of 6, which 8 devices (model) cannot share"),
        ("match", "new [3] matches no rule"),
        ("mesh", "mesh must be one of jaxspec.sharding.make_mesh"),
        ("images", "3 images cannot be shared by 2 groups of devices (data)"),
    ],
)
def test_what_does_not_fit_is_named(found, name, message):
    assert message in found["refused"][name]


def test_the_rules_know_every_network():
    grid = toy.transformer((4, 4), 12)
    tower = TowerConfig(16, 2, 2, 32, 3, 4, 4, True)
    llama = LlamaConfig(40, 16, 2, 4, 2, 4, 32, False, biases=True, head_norms=(2, 2))
    target = replace(grid, prefix="class", positions="rotary")
    lpd = dict(vocab_size=12, width=16, depth=2, heads=2, hidden=32, grid=(4, 4))
    networks = {
        "decoders": {
            "16": abstract.transformer(grid),
            "17": abstract.transformer(target),
            "18": abstract.transformer(replace(grid, prefix="caption")),
        },
        "drafters": {"16": abstract.eagle(eagle_config(grid))},
        "flashar": {"16": abstract.flash(FlashConfig(grid, 1))},
        "lpd": {
            "16": abstract.lpd(LPDConfig(**lpd, prefix="class", **ONE)),
            "17": abstract.lpd(LPDConfig(**lpd, prefix="features", **ONE)),
        },
        "llm": abstract.llama(llama),
        "t5": abstract.t5(T5Config(40, 16, 2, 2, 8, 32)),
        "ta_tok": abstract.ta_tok(
            TaTokConfig(16, 12, 4, True, tower, replace(tower, channels=4))
        ),
    }
    known = load_config("emoji")
    for weights in (networks, stacked_params(known), abstract_params(known)):
        sharding.layout(weights, sharding.make_mesh(1, 1))


def test_two_processes_share_a_model_or_the_prompts(folder, tmp_path):
    Path(f"{folder}.txt").write_text("\n".join(sharded.PROMPTS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [start(folder, 1, address, str(i)) for i in range(2)]
    try:
        both = [result(process) for process in processes]
    finally:
        for process in processes:  # one that waits for another that failed
            process.kill()
            process.communicate()
    params = sharded.family()
    for method in ("AR", "SCD"):
        wanted = sharded.draw(params, method).tokens
        for one in both:
            np.testing.assert_array_equal(one["together"][method], wanted)
    wanted = sharded.draw(params, "AR").tokens
    for number, one in enumerate(both):
        np.testing.assert_array_equal(one["own"], wanted[number::2])
        assert one["part"] == [16, 3, 8] and one["orbax"] == ["(16, 3, 16)"]
    assert both[0]["images"] == both[1]["images"]

    # Sets of prompts: the same files as in one process.
    for method, name, images in (("SCD", "run", 2), ("AR", "refilled", 1)):
        recipe = Recipe.create(params, method=sharded.METHODS[method])
        prompts, one = load_prompts(f"{folder}.txt"), tmp_path / name
        draw(recipe, prompts, one, seed=3, batch_size=4, images=images)
        assert len(hashes(one)) == 3 * images and hashes(f"{folder}-{name}") == hashes(
            one
        )
        assert read_run(f"{folder}-{name}").weights == read_run(one).weights
    (status, said), quiet = (one["evaluated"] for one in both)
    compiled = [s.compiled for s in read_samples(f"{folder}-run").values()]
    assert sorted(compiled) == [False, False, True, True, True, True]
    assert status == 0 and f"drew 6 pictures into {folder}-run" in said
    assert quiet == [0, ""]
    told = [one["interrupted"] for one in both]
    assert told[0] == told[1]
    other, full, (there, drawn) = told[0]
    assert other == (
        "ValueError: process 1 was told otherwise than the first (seed: 3 -> 4): give "
        "all the same"
    )
    assert full.startswith(f"OSError: no space left for {folder}-refilled: what is")
    assert there > 0 and there + drawn == 3
    lines = Path(f"{folder}-refilled/samples/shard-0-of-1.jsonl").read_text()
    assert lines.count("\n") == 3
    assert json.loads(lines.splitlines()[0])["device"] == "cpu, 2 x 1"


def hashes(run) -> dict:
    """Of every sample of a run, the hashes of its files; they are as they were."""
    samples = read_samples(run)
    assert all(intact(run, s) for s in samples.values())
    return {key: (s.sha256, s.record_sha256) for key, s in samples.items()}


def test_processes_are_given_whole_or_found():
    for given, message in (
        ((None, 2, 0), "give coordinator, processes and process_id, or none"),
        (("127.0.0.1:1", 2, 2), "process_id must be 0 to 1, not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            sharding.initialize(*given)
