"""Families as folders: bit-equal round trips, damaged folders, saves that fail."""

import gc
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec.checkpoints import folder as folder_module
from jaxspec.evaluation.run import weights_hash
from jaxspec.models.stacks import restack
from tests import toy

FORMATS = ("safetensors", "orbax")


@pytest.fixture(scope="module")
def family():
    return toy.family()


@pytest.fixture(scope="module")
def saved(family, tmp_path_factory) -> dict[str, Path]:
    """A sound folder of each format; tests damage copies of them."""
    paths = {f: tmp_path_factory.mktemp("families") / f for f in FORMATS}
    for format, path in paths.items():
        jaxspec.save(family, path, format=format)
    return paths


def assert_same(got, want):
    assert got.config == want.config and hash(got.config) == hash(want.config)
    assert jax.tree.structure(got.params) == jax.tree.structure(want.params)

    def same(a, b):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(same, got.params, want.params)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_round_trip_is_bit_equal(family, tmp_path, format, dtype):
    cast = jax.tree.map(lambda x: np.asarray(x).astype(dtype), family.params)
    jaxspec.save(family, tmp_path / "toy", dtype=dtype, format=format)
    kept = jaxspec.load(tmp_path / "toy", dtype=None)
    assert_same(kept, replace(family, params=cast))
    # In memory float32 unless asked otherwise, and nothing else is in the way.
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), cast)
    assert_same(jaxspec.load(str(tmp_path / "toy")), replace(family, params=widened))
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


@pytest.mark.parametrize("format", FORMATS)
def test_layers_are_loaded_apart_and_no_target_copies_them(saved, format):
    """Files have stacks, as they are of a family that was trained."""
    loaded = jaxspec.load(saved[format])
    stacked = jax.tree.map(lambda x: x, loaded.params)
    stacked["decoders"] = {k: restack(x) for k, x in stacked["decoders"].items()}
    trained = replace(loaded, params=stacked)
    assert trained.params["decoders"]["16"]["params"]["qkv"].shape == (2, 16, 48)
    assert weights_hash(trained.params) == weights_hash(loaded.params)
    assert_same(trained.unstacked(), loaded)
    own = loaded.params["decoders"]["16"]
    assert own["params"]["layers"][1]["qkv"].shape == (16, 3, 16)
    target = loaded.target(loaded.condition(["hat"]), jaxspec.Sampling(), 16)
    assert target.params is own
    assert loaded.unstacked().params["decoders"]["8"] is loaded.params["decoders"]["8"]


def test_a_family_of_stacks_is_saved_as_one_of_layers(family, saved, tmp_path):
    params = dict(family.params)
    params["decoders"] = {k: restack(x) for k, x in params["decoders"].items()}
    jaxspec.save(replace(family, params=params), tmp_path / "stacks")
    for path in saved["safetensors"].iterdir():
        assert path.read_bytes() == (tmp_path / "stacks" / path.name).read_bytes()


def test_loading_compiles_nothing(saved):
    with toy.compilations() as compiled:
        jaxspec.load(saved["safetensors"], dtype=jnp.bfloat16)
    assert compiled == []


def test_who_can_read_a_folder_can_read_all_of_it(saved):
    files = list(saved["safetensors"].iterdir())
    assert len(files) == 6 and len({f.stat().st_mode for f in files}) == 1


def test_a_family_kept_in_16_bits_draws(family, saved):
    small = jaxspec.load(saved["safetensors"], dtype=jnp.bfloat16)
    out = jaxspec.generate(small, "red heart", size=8)
    assert out.images.shape == (1, 8, 8, 3) and len(np.unique(out.tokens)) > 1


def test_through_jit_and_device_put(family):
    """A pipeline is a pytree; its configuration is static and compared by value."""
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))
    with toy.compilations() as compiled:
        got = doubled(family)
        doubled(replace(family, config=toy.family_config()))
    assert len(compiled) == 1
    want = jax.tree.map(lambda x: 2 * np.asarray(x), family.params)
    assert_same(got, replace(family, params=want))
    assert_same(jax.device_put(family, jax.devices()[0]), family)

    @jax.jit
    def draw(pipeline, vectors, keys):
        target = pipeline.target(vectors, jaxspec.Sampling(), 8)
        return jaxspec.decode(jaxspec.AR(), target, keys).tokens

    vectors, ids = family.read(["red heart", "hat"])
    tokens = draw(family, vectors, jaxspec.image_keys(0, ids, [0, 0]))
    plain = {"guidance": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    want = jaxspec.generate(family, ["red heart", "hat"], size=8, **plain)
    np.testing.assert_array_equal(tokens, want.tokens)


def test_description(family):
    about = family.describe()
    assert list(about["sizes"]) == ["8", "16"]
    assert about["sizes"]["16"]["grid"] == [4, 4]
    leaves = jax.tree.leaves(family.params["decoders"]["8"])
    assert about["sizes"]["8"]["parameters"] == sum(x.size for x in leaves)
    assert about["vq"]["codes"] == 12 and about["vq"]["pixels_per_cell"] == 4
    json.dumps(about)


# Damage. What each does to a folder, and what the error says.


def edit_json(path: Path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def config(change):
    return lambda folder: edit_json(folder / "config.json", change)


def tensors(change):
    def damage(folder):
        path = folder / "decoders-16.safetensors"
        flat = load_file(path)
        change(flat)
        save_file(flat, path)

    return damage


def truncate(name: str):
    def damage(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return damage


HEAD = "decoders/16/params/head"
DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "no weights": (lambda f: (f / "vq.safetensors").unlink(), "vq.safetensors"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    "half a config": (truncate("config.json"), "config.json cannot be read"),
    "half the weights": (truncate("text.safetensors"), "text.safetensors cannot be"),
    "half a tokenizer": (truncate("tokenizer.json"), "tokenizer.json cannot be read"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "config.json cannot be"),
    "unknown field": (
        config(lambda c: c["vq"].update(depth=3)),
        r"VQConfig: unknown fields \['depth'\], missing \[\]",
    ),
    "missing field": (
        config(lambda c: c["defaults"].pop("size")),
        r"Defaults: unknown fields \[\], missing \['size'\]",
    ),
    "missing part": (config(lambda c: c.pop("vq")), "config.json .* 'vq'"),
    "wrong kind": (
        config(lambda c: c["decoders"]["16"].update(width="wide")),
        "config.json cannot be read",
    ),
    "other depth": (
        config(lambda c: c["decoders"]["16"].update(depth=3)),
        r"misshapen \[.*decoders/16/params/qkv is \[2, 16, 48\], not \[3, 16, 48\]",
    ),
    "other positions": (
        config(lambda c: c["decoders"]["8"].update(positions="rotary")),
        r"unexpected \['decoders/8/params/position_embedding'\]",
    ),
    "other grid": (
        config(lambda c: c["decoders"]["16"].update(grid=[2, 2])),
        r"model for 16 px has grid \(2, 2\)",
    ),
    "other codebook": (
        config(lambda c: c["vq"].update(codebook_size=16)),
        "vocab_size 12, .* needs 16",
    ),
    "missing tensor": (tensors(lambda t: t.pop(HEAD)), rf"missing \['{HEAD}'\]"),
    "extra tensor": (
        tensors(lambda t: t.update(more=np.zeros(3))),
        r"unexpected \['more'\]",
    ),
    "misshapen tensor": (
        tensors(lambda t: t.update({HEAD: t[HEAD].T.copy()})),
        rf"misshapen \['{HEAD} is \[12, 16\], not \[16, 12\]'\]",
    ),
    "other vocabulary": (
        lambda f: edit_json(
            f / "tokenizer.json", lambda t: t["model"]["vocab"].update(more=14)
        ),
        r"text/table is \[14, 8\], not \[15, 8\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_refused_in_a_line(saved, tmp_path, damage):
    change, said = DAMAGE[damage]
    path = shutil.copytree(saved["safetensors"], tmp_path / "toy")
    change(path)
    with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$") as error:
        jaxspec.load(path)
    assert str(path) in str(error.value)


def drop_orbax_data(folder: Path):
    for path in (folder / "orbax").rglob("d"):
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (config(lambda c: c["decoders"]["16"].update(depth=3)), "misshapen .*qkv"),
        (
            config(lambda c: c["decoders"].pop("8")),
            "unexpected .*decoders/8/params/head",
        ),
        (drop_orbax_data, "orbax cannot be read"),
        (lambda f: (f / "orbax" / "_METADATA").unlink(), "not a whole orbax"),
    ],
)
# Orbax leaves coroutines behind when it fails, and each complains when collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_orbax_folders_are_refused_in_a_line(saved, tmp_path, change, said):
    path = shutil.copytree(saved["orbax"], tmp_path / "toy")
    change(path)
    with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
        jaxspec.load(path)
    gc.collect()


def test_unknown_names_list_the_known(monkeypatch, saved, tmp_path):
    monkeypatch.setattr(folder_module, "FAMILIES", saved["safetensors"].parent)
    assert jaxspec.families() == ["safetensors"]
    assert jaxspec.load("safetensors").config.name == "toy"
    for name in ("emojis", tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="come with jaxspec: safetensors$"):
            jaxspec.load(name)
    with pytest.raises(ValueError, match="holds no config.json"):
        jaxspec.load(tmp_path)


# Saves that fail leave nothing.


def test_a_save_that_fails_leaves_nothing_and_the_next_one_works(
    family, tmp_path, monkeypatch
):
    def fail(flat, path):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(folder_module, "save_file", fail)
        jaxspec.save(family, tmp_path / "toy")
    assert not list(tmp_path.iterdir())
    jaxspec.save(family, tmp_path / "toy")
    assert_same(jaxspec.load(tmp_path / "toy"), family)


def test_a_killed_save_is_in_nobody_s_way(family, tmp_path, monkeypatch):
    """Nothing is cleaned up, as after SIGKILL."""
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        patched.setattr(folder_module.os, "replace", lambda *_: interrupt())
        jaxspec.save(family, tmp_path / "toy")
    assert len(list(tmp_path.iterdir())) == 1 and not (tmp_path / "toy").exists()
    jaxspec.save(family, tmp_path / "toy")
    assert_same(jaxspec.load(tmp_path / "toy"), family)


def interrupt():
    raise KeyboardInterrupt


def test_no_save_over_something_and_none_of_another_kind(family, saved, tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (saved["safetensors"], tmp_path / "file"):
        with pytest.raises(ValueError, match="exists and is not an empty folder"):
            jaxspec.save(family, path)
    with pytest.raises(ValueError, match="must be safetensors or orbax, not 'pt'"):
        jaxspec.save(family, tmp_path / "toy", format="pt")
    (tmp_path / "empty").mkdir()
    jaxspec.save(family, tmp_path / "empty")
    assert_same(jaxspec.load(tmp_path / "empty"), family)


@pytest.mark.parametrize(("value", "dtype"), [(1e5, jnp.float16), (np.nan, None)])
def test_weights_that_do_not_survive_are_not_saved(family, tmp_path, value, dtype):
    """1e5 is infinite in float16."""
    params = {**family.params, "text": {"table": jnp.full((14, 8), value)}}
    said = "not finite( as float16)?: text/table$"
    with pytest.raises(ValueError, match=said):
        jaxspec.save(replace(family, params=params), tmp_path / "toy", dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_the_real_families_are_sound():
    """Whatever comes with the package loads, and its sizes draw."""
    for name in jaxspec.families():
        family = jaxspec.load(name)
        assert re.fullmatch(r"\w+", name) and family.config.name == name
        assert family.config.defaults.size in family.config.sizes
