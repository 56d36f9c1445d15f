"""The proof of conversions: it passes what is right, and every known fault fails it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec.checkpoints import convert_model, parity
from jaxspec.checkpoints.assemble import convert_tar
from jaxspec.checkpoints.parity import Limits, check_parity, models_of, stages
from tests import toy
from tests.converting import DECODER, FIXTURES, reference, run, source, told, weights
from tests.parity import E2E, published


def record(path: Path, arrays: dict) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("name", FIXTURES)
def test_converted_models_compute_what_the_published_ones_did(tmp_path, name):
    """Through the command line, all of it."""
    path, out = source(tmp_path / "source", name), tmp_path / "out"
    converted = run("convert", "model", path, "--out", out, *told(FIXTURES[name][1]))
    assert converted.exit_code == 0, converted.output
    arrays = reference(name)
    file = record(tmp_path / "reference.npz", arrays)
    result = run("parity", out, "--reference", file, "--out", tmp_path / "parity.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "parity.json").read_text())
    assert found["ok"] and not found["unchecked"]
    compared = {stage["stage"]: stage for stage in found["stages"]}
    ((place, (config, _)),) = parity.open_models(out).items()
    assert compared.keys() == {f"{place}/{x.output}" for x in stages(place, config)}
    for stage in compared.values():
        assert stage["error"] is None or stage["error"] < 1e-4
        assert stage["agreement"] in (None, 1.0)
        assert stage["kl_max"] is None or stage["kl_max"] < 1e-8
        want = arrays[stage["stage"]]
        if f"{place}/seen" in arrays:
            want = want[arrays[f"{place}/seen"] > 0]
        assert stage["shape"] == list(want.shape)
        assert stage["stage"] in result.output


# Faults that convert without a complaint. Heads are 4, 16 wide, and there are 3 layers.


def swap_query_and_key(fused: np.ndarray) -> np.ndarray:
    q, k, v = np.split(fused, 3)
    return np.concatenate([k, q, v])


def half_split(fused: np.ndarray) -> np.ndarray:
    """Queries and keys in the order of half-split rotary pairs."""
    q, k, v = np.split(fused, 3)
    split = lambda x: x.reshape(4, 8, 2, -1).swapaxes(1, 2).reshape(x.shape)
    return np.concatenate([split(q), split(k), v])


def change_layers(name: str, pattern: str, change) -> dict:
    return {k: change(x) for k, x in weights(name).items() if pattern in k}


def exchange(name: str, one: str, other: str) -> dict:
    tensors = weights(name)
    pairs = {k: k.replace(one, other) for k in tensors if one in k}
    assert pairs
    return {k: tensors[p] for k, p in pairs.items()} | {
        p: tensors[k] for k, p in pairs.items()
    }


def interleaved(projection: np.ndarray) -> np.ndarray:
    """Of Qwen2's heads, 8 wide, in the order of interleaved rotary pairs."""
    return projection.reshape(-1, 2, 4, 48).swapaxes(1, 2).reshape(projection.shape)


def fault(kind: str) -> tuple[str, dict, dict]:
    """The fixture, the tensors that are wrong, and the arguments that hide it."""
    c2i, tar, qwen2 = "llamagen_c2i_tiny", "tar_ardtok_tiny", "qwen2_tiny_tied"
    wqkv, no_args = ".attention.wqkv.", {}
    faults = {
        "q and k swapped, rotary": lambda: (
            c2i, change_layers(c2i, wqkv, swap_query_and_key), no_args
        ),
        "q and k swapped, learned positions": lambda: (
            tar, change_layers(tar, wqkv, swap_query_and_key), no_args
        ),
        "rotary pairs half-split": lambda: (
            c2i, change_layers(c2i, wqkv, half_split), no_args
        ),
        "rotary pairs interleaved": lambda: (
            qwen2, change_layers(qwen2, "q_proj.weight", interleaved)
            | change_layers(qwen2, "k_proj.weight", interleaved), no_args
        ),
        "gate and up swapped": lambda: (tar, exchange(tar, ".w1.", ".w3."), no_args),
        "two layers swapped": lambda: (tar, exchange(tar, "s.0.", "s.1."), no_args),
        "the last layer dropped": lambda: (
            tar, change_layers(tar, "layers.2.", lambda x: None), {"n_layer": 2}
        ),
        "a codebook that is shifted by one": lambda: (
            "llamagen_vq16_tiny",
            change_layers(
                "llamagen_vq16_tiny", "quantize.emb", lambda x: np.roll(x, 1, 0)
            ),
            no_args,
        ),
    }  # fmt: skip
    return faults[kind]() if kind else tuple(faults)


@pytest.mark.parametrize("kind", fault(""))
def test_faults_that_convert_are_found(tmp_path, kind):
    name, tensors, args = fault(kind)
    path, out = source(tmp_path / "source", name, args, **tensors), tmp_path / "out"
    convert_model(path, out, **FIXTURES[name][1])
    file = record(tmp_path / "reference.npz", reference(name))
    result = run("parity", out, "--reference", file)
    assert result.exit_code == 1
    assert "WRONG" in result.output and "the largest error is" in result.output
    # Far outside: limits for bfloat16 would not let it through either.
    loose = check_parity(out, file, Limits(error=0.02, kl=0.01, agreement=0.9))
    (worst,) = (x for x in loose["stages"] if x["stage"].endswith(("logits", "images")))
    assert worst["error"] > 0.1 * worst["scale"]
    assert worst["kl_max"] is None or worst["kl_max"] > 0.05


def test_half_the_bits_need_wider_limits(tmp_path):
    name = "llamagen_c2i_tiny"
    path, out = source(tmp_path / "source", name), tmp_path / "out"
    convert_model(path, out, dtype="bfloat16", **DECODER)
    file = record(tmp_path / "reference.npz", reference(name))
    assert not check_parity(out, file)["ok"]
    wider = ("--max-error", "0.02", "--max-kl", "1e-3", "--min-agreement", "0.9")
    assert run("parity", out, "--reference", file, *wider).exit_code == 0
    # Running in bfloat16 too adds to it.
    own = check_parity(out, file, Limits(error=0.05), dtype=None)["stages"][0]
    assert own["error"] > check_parity(out, file)["stages"][0]["error"]


# A whole family.


def test_a_family_is_checked_by_its_models(tmp_path):
    family = toy.family()
    jaxspec.save(family, tmp_path / "toy")
    (place, (config, params)), *_, (_, (vq, codes)) = models_of(family).items()
    rng = np.random.default_rng(0)
    tokens = rng.integers(12, size=(2, *config.grid))
    shape = 2, config.prefix_length, config.prefix_width
    condition = rng.standard_normal(shape).astype(np.float32)
    inputs = {"condition": condition, "tokens": tokens.reshape(2, -1)}
    arrays = {f"{place}/{name}": x for name, x in inputs.items()}
    arrays[f"{place}/logits"] = stages(place, config)[0].run(params, **inputs)
    arrays["vq/tokens"] = tokens
    arrays["vq/images"] = stages("vq", vq)[0].run(codes, tokens=tokens)
    file = record(tmp_path / "reference.npz", arrays)
    result = run("parity", tmp_path / "toy", "--reference", file)
    assert result.exit_code == 0, result.output
    assert "nothing is recorded of decoders/16" in result.output


def test_an_assembled_folder_is_checked_as_its_models_are(tmp_path):
    part = lambda name: source(tmp_path / name, f"{E2E}_{name}")
    out, decoders = tmp_path / "tar", [part("ardtok64px")]
    convert_tar(out, ar_dtok=decoders, ta_tok=part("tatok"), vq=part("vq"))
    expected = published(f"{E2E}_tatok").expected
    arrays = {"ta_tok/indices": expected["ta_indices"]}
    arrays["ta_tok/features"] = expected["features"]
    file = record(tmp_path / "reference.npz", arrays)
    found = check_parity(out, file)
    assert found["ok"] and found["stages"][0]["error"] < 1e-4
    assert found["unchecked"] == ["decoders/64", "vq"]
    record(file, arrays | {"ta_tok/indices": np.flip(expected["ta_indices"], 1)})
    assert not check_parity(out, file)["ok"]


# Numbers by hand.


def test_measures_by_hand():
    """A half and a half, recorded, against a quarter and three quarters."""
    want = np.log([[[0.5, 0.5], [0.2, 0.8]]]).astype(np.float32)
    got = np.log([[[0.25, 0.75], [0.2, 0.8]]]).astype(np.float32)
    shift = np.array([[[3.0], [0.0]]], np.float32)  # changes no distribution
    found = parity._compared("x", "logits", got + shift, want, Limits())
    kl = 0.5 * math.log(4 / 3)
    assert math.isclose(found.kl_max, kl, rel_tol=1e-5)
    assert math.isclose(found.kl_mean, kl / 2, rel_tol=1e-5)
    assert found.agreement == 0.5  # of equals, the first is the likeliest
    assert math.isclose(found.error, 3 + math.log(1.5), rel_tol=1e-6)
    assert math.isclose(found.scale, math.log(5), rel_tol=1e-6)
    assert len(found.problems) == 3
    found = parity._compared("x", "logits", want, want, Limits(0, 0, 1))
    assert (found.error, found.kl_max, found.agreement) == (0, 0, 1)
    assert found.problems == ()
    nan = np.full_like(want, np.nan)
    found = parity._compared("x", "values", nan, want, Limits())
    assert found.problems == ("ours is not finite",)
    three = np.array([0, 1, 2, 2])
    codes = parity._compared("x", "codes", np.arange(4), three, Limits())
    assert codes.agreement == 0.75 and codes.error is None
    assert codes.problems == ("75.00% of the codes agree, less than 99.90%",)


# References that do not fit.


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm")
    convert_model(source(folder / "source", "qwen2_tiny"), folder / "out")
    return folder / "out"


def without(name: str):
    return lambda x: {k: v for k, v in x.items() if k != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("llm/tokens"), r"llm/logits is recorded, but not \['llm/tokens'\]"),
        (without("llm/logits"), "no stage of these models uses .*llm/tokens"),
        (lambda x: {}, "holds none of the stages llm/logits"),
        (lambda x: x | {"llm/logit": x["llm/logits"]}, r"uses \['llm/logit'\]"),
        (lambda x: x | {"vq/tokens": x["llm/tokens"]}, r"uses \['vq/tokens'\]"),
        (lambda x: x | {"llm/tokens": x["llm/tokens"] + 90}, "numbers from 0 to 95"),
        (lambda x: x | {"llm/tokens": x["llm/tokens"] - 9}, "numbers from 0 to 95"),
        (lambda x: x | {"llm/tokens": x["llm/tokens"] / 2}, "numbers from 0 to 95"),
        (lambda x: x | {"llm/tokens": x["llm/tokens"][0]}, r"the model takes \[\*, \*"),
        (lambda x: x | {"llm/tokens": x["llm/tokens"][:1]}, "differ in their first"),
        (lambda x: x | {"llm/seen": x["llm/seen"][:, :4]}, "must show some of|not fit"),
        (lambda x: x | {"llm/seen": 0 * x["llm/seen"]}, "must show some of"),
        (lambda x: x | {"llm/logits": x["llm/logits"][:, 1:]}, "the model gives"),
        (lambda x: x | {"llm/logits": 0 * x["llm/logits"]}, "0.0 everywhere, which"),
        (lambda x: x | {"llm/logits": np.inf * x["llm/logits"]}, "finite float values"),
    ],
)
def test_references_that_do_not_fit(llm, tmp_path, change, message):
    file = record(tmp_path / "x.npz", change(reference("qwen2_tiny")))
    with pytest.raises(ValueError, match=rf"x\.npz: .*{message}"):
        check_parity(llm, file)


def test_what_cannot_be_compared_says_so(llm, tmp_path):
    file = tmp_path / "x.npz"
    result = run("parity", llm, "--reference", file)
    assert result.exit_code == 2 and "No such file" in result.stderr
    record(file, {"llm/tokens": np.array([{}])})  # objects are pickles
    result = run("parity", llm, "--reference", file)
    assert result.exit_code == 2 and "Object arrays cannot be loaded" in result.stderr
    file.write_bytes(b"PK\x03\x04 and no more")
    result = run("parity", llm, "--reference", file)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {file}: ")
    result = run("parity", tmp_path, "--reference", file)
    assert result.exit_code == 2 and "config.json" in result.stderr
    for option, value in {"--max-error": -1, "--min-agreement": 2, "--max-kl": "nan",
                          "--dtype": "int8"}.items():  # fmt: skip
        result = run("parity", llm, "--reference", file, option, value)
        assert result.exit_code == 2 and "error: " in result.stderr
