"""From prompts to pictures: what they depend on, what is refused, what is kept."""

import base64
import io
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import jaxspec
from jaxspec.maps import BLANK, map_sheet
from jaxspec.sampling import image_key
from tests import toy

PROMPTS = ["red heart", "blue tree", "a hat"]


@pytest.fixture(scope="module")
def family():
    return toy.family()


@pytest.fixture(scope="module")
def alone(family):
    """The tokens of one picture of the second prompt."""
    return jaxspec.generate(family, "blue tree", seed=3).tokens


def test_alone_at_row_2_of_4_and_in_7_padded_to_8(family, alone):
    four = [*PROMPTS[:1], "cafe", "blue tree", "red tree"]
    seven = [*four[:2], "red hat", "blue hat", "red heart", "blue tree", "hat"]
    for prompts in (four, seven):
        out = jaxspec.generate(family, prompts, seed=3)
        row = prompts.index("blue tree")
        np.testing.assert_array_equal(out.tokens[row], alone[0])
        assert len(np.unique(out.tokens, axis=0)) == len(set(prompts))


def test_batch_size_changes_nothing_and_pictures_come_prompt_by_prompt(family):
    whole = jaxspec.generate(family, PROMPTS, num_images=2, seed=3)
    assert whole.prompts == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2 + [PROMPTS[2]] * 2
    assert whole.numbers == [0, 1] * 3 and whole.seeds == [3] * 6 and len(whole) == 6
    parts = jaxspec.generate(family, PROMPTS, num_images=2, seed=3, batch_size=4)
    jax.tree.map(np.testing.assert_array_equal, parts.stats, whole.stats)
    np.testing.assert_array_equal(parts.images, whole.images)
    assert whole.images.shape == (6, 16, 16, 3) and whole.images.dtype == np.uint8
    np.testing.assert_array_equal(whole.tokens, whole.stats.tokens)
    np.testing.assert_array_equal(family.images(whole.tokens), whole.images)
    (second,) = jaxspec.generate(family, PROMPTS[1], num_images=2, seed=3).tokens[1:]
    np.testing.assert_array_equal(second, whole.tokens[3])


def test_by_the_lower_level(family, alone):
    """The same picture by a target and keys, as the README shows."""
    vectors, ids = family.read(["blue tree"])
    settings = {"guidance": 2.0, "temperature": 0.9, "top_k": 8}
    target = family.target(vectors, jaxspec.Sampling.create(12, **settings))
    keys = jaxspec.image_keys(3, ids, [0])
    assert keys[0] == image_key(3, int(ids[0]), 0)
    decoded = toy.decode_jitted(jaxspec.AR(), target, keys)
    np.testing.assert_array_equal(decoded.tokens, alone)


def test_seed_prompt_and_number_each_make_another_picture(family, alone):
    out = jaxspec.generate(family, "blue tree", seed=3, num_images=2)
    np.testing.assert_array_equal(out.tokens[0], alone[0])
    others = [
        out.tokens[1],
        *(
            jaxspec.generate(family, "blue tree", seed=s).tokens[0]
            for s in (4, 2**32 - 1)
        ),
        # At guidance 0 the prompt changes the key alone.
        *(jaxspec.generate(family, p, seed=3, guidance=0.0).tokens[0] for p in PROMPTS),
    ]
    assert len(np.unique([alone[0], *others], axis=0)) == 7


def test_prompts_that_read_alike_are_the_same_picture(family):
    alike = [
        "glossy red heart",
        "glossy emoji of a red heart",
        "red heart",
        "red heart!",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = jaxspec.generate(family, [*alike, "red heart xyzzy"])
        assert len(np.unique(out.images, axis=0)) == 1
        # And so is one that is too long, cut.
        long = jaxspec.generate(family, ["red heart hat", "red heart hat hat hat"])
    np.testing.assert_array_equal(long.images[0], long.images[1])
    flat = jaxspec.generate(family, "flat red heart")
    assert not np.array_equal(flat.tokens, out.tokens[:1])


def test_temperature_0_is_argmax_whatever_the_seed(family):
    runs = [
        jaxspec.generate(family, "red heart", temperature=0, seed=seed).tokens
        for seed in (0, 1)
    ]
    np.testing.assert_array_equal(*runs)


def test_guidance_1_is_no_guidance_and_0_ignores_the_prompt(family):
    """By argmax: u + 1 (c - u) is c up to rounding, u + 0 (c - u) is u."""

    def tokens(prompt, guidance):
        out = jaxspec.generate(family, prompt, temperature=0, guidance=guidance)
        return out.tokens

    off, on = tokens("red heart", 1.0), tokens("red heart", 1.0 + 1e-6)
    np.testing.assert_array_equal(off, on)
    assert not np.array_equal(tokens("blue tree", 1.0), off)
    null = tokens("red heart", 0.0)
    np.testing.assert_array_equal(null, tokens("blue tree", 0.0))
    assert not np.array_equal(null, off)


# Compilations.


def test_what_compiles_nothing_new(family):
    noop = lambda done, total, tokens: None
    jaxspec.generate(family, PROMPTS, progress=noop)
    with toy.compilations() as compiled:
        jaxspec.generate(family, ["cafe", "red", "blue"], seed=8, guidance=4.0)
        # Four are the bucket of three.
        jaxspec.generate(family, [*PROMPTS, "cafe"], temperature=0.4, top_k=2)
        jaxspec.generate(family, "hat", num_images=3, progress=noop)
    assert compiled == []


def test_progress_counts_cells_to_the_end(family):
    calls = []
    out = jaxspec.generate(
        family,
        ["red heart"] * 5,
        batch_size=3,
        progress=lambda done, total, tokens: calls.append((done, total, tokens)),
    )
    done = [c[0] for c in calls]
    # 8 passes and the prefill of 3 images (in a bucket of 4), then all of them; then 2.
    assert done == [27, 48, 66, 80] and {c[1] for c in calls} == {80}
    assert [len(c[2]) for c in calls] == [3, 3, 2, 2]
    np.testing.assert_array_equal(calls[1][2], out.tokens[:3])
    np.testing.assert_array_equal(calls[3][2], out.tokens[3:])
    first = calls[0][2].reshape(3, -1)
    np.testing.assert_array_equal(first[:, :9], out.tokens[:3].reshape(3, -1)[:, :9])
    assert not first[:, 9:].any()


# Refusals.

BAD = [
    ({"prompts": ""}, "prompt is empty"),
    ({"prompts": "  \t"}, "prompt is empty"),
    ({"prompts": []}, "no prompt"),
    ({"prompts": ["red heart", ""]}, "prompt is empty"),
    ({"prompts": ["red heart", None]}, "must be text, not None"),
    ({"prompts": "红色"}, "红色"),
    ({"size": 32}, "toy has no model for 32 px; trained sizes: 8, 16"),
    ({"size": "large"}, "size must be pixels, or (height, width), not 'large'"),
    ({"size": (8, 16)}, "no model for 8x16 px, only squares"),
    ({"seed": -1}, "seed must be 0 to 4294967295, not -1"),
    ({"seed": 2**32}, "seed must be 0 to 4294967295"),
    ({"seed": 0.5}, "seed must be a whole number, not 0.5"),
    ({"num_images": 0}, "num_images must be 1 or more, not 0"),
    ({"num_images": 1.0}, "num_images must be a whole number"),
    ({"batch_size": 0}, "batch_size must be 1 or more"),
    ({"guidance": -1}, "guidance must be 0"),
    ({"guidance": float("nan")}, "guidance must be"),
    ({"temperature": -0.1}, "temperature must be"),
    ({"top_k": -1}, "top_k must be"),
    ({"top_k": float("inf")}, "top_k must be"),
    ({"top_p": 1.5}, "top_p must be between 0 and 1"),
    ({"method": "AR"}, "method must be one such as AR()"),
    ({"method": jaxspec.AR}, "method must be one such as AR()"),
]


@pytest.mark.parametrize(("settings", "said"), BAD, ids=str)
def test_bad_input_is_refused_in_a_line_before_anything_compiles(
    family, settings, said
):
    prompts = settings.get("prompts", "red heart")
    settings = {k: v for k, v in settings.items() if k != "prompts"}
    line = f"^[^\n]*{re.escape(said)}[^\n]*$"
    with toy.compilations() as compiled, pytest.raises(ValueError, match=line):
        jaxspec.generate(family, prompts, **settings)
    assert compiled == []


def test_more_codes_than_there_are_is_said_and_all(family):
    with pytest.warns(UserWarning, match="top_k 13 is more than the 12 codes"):
        got = jaxspec.generate(family, "red heart", top_k=13)
    want = jaxspec.generate(family, "red heart", top_k=0)
    np.testing.assert_array_equal(got.tokens, want.tokens)


@pytest.mark.parametrize("tokens", [[[0, 12]], [[-1, 3]]])
def test_tokens_that_are_no_codes_are_refused(family, tokens):
    with pytest.raises(
        ValueError, match="tokens run from .*; the codebook has codes 0 to 11"
    ):
        family.images(np.array([tokens]))


def test_pictures_of_another_shape_are_refused(family):
    with pytest.raises(ValueError, match="multiples of 4, not 8 x 6"):
        family.encode(np.zeros((1, 8, 6, 3), np.uint8))
    with pytest.raises(
        ValueError, match=r"must be uint8 .* not float32 \[1, 8, 8, 3\]"
    ):
        family.encode(np.zeros((1, 8, 8, 3), np.float32))
    assert family.encode(np.zeros((2, 8, 12, 3), np.uint8)).shape == (2, 2, 3)


def test_weights_that_are_no_numbers_are_found(family):
    """Slot 4 + 6 of the position table is read in pass 7."""
    params = jax.tree.map(lambda x: x, family.params)
    weights = params["decoders"]["16"]["params"]
    weights["position_embedding"] = weights["position_embedding"].at[10].set(jnp.nan)
    with pytest.raises(FloatingPointError, match="image 0 of 'red heart' .* in pass 7"):
        jaxspec.generate(replace(family, params=params), ["red heart", "hat"])


def test_parts_that_do_not_belong_together_are_refused():
    config = toy.family_config()
    decoder = toy.transformer((4, 4), 12)
    for wrong, said in [
        ((8, decoder), r"8 px has grid \(4, 4\)"),
        ((18, decoder), r"18 px has grid \(4, 4\)"),
        ((16, replace(decoder, vocab_size=13)), "vocab_size 13, .* needs 12"),
        ((16, replace(decoder, prefix_length=5)), "prefix_length 5, .* needs 4"),
    ]:
        with pytest.raises(ValueError, match=said):
            replace(config, decoders=(wrong,))


# The record.

HAT = "hat ☃"  # no Latin-1, which is what plain text chunks hold


@pytest.fixture(scope="module")
def out(family):
    # Numbers of every kind are written as numbers.
    settings = {"guidance": np.float32(1.5), "top_k": np.int64(5), "seed": np.uint8(7)}
    return jaxspec.generate(family, ["red heart", HAT], num_images=2, **settings)


SETTINGS = {
    "family": "toy",
    "size": 16,
    "method": {"name": "AR"},
    "guidance": 1.5,
    "temperature": 0.9,
    "top_k": 5,
    "top_p": 1.0,
}


def test_saved_pictures_say_what_made_them(out, family, tmp_path):
    paths = out.save(tmp_path / "new" / "folder")
    assert [p.name for p in paths] == ["000.png", "001.png", "002.png", "003.png"]
    for i, path in enumerate(paths):
        with Image.open(path) as image:
            np.testing.assert_array_equal(np.asarray(image), out.images[i])
            assert image.text == out.metadata(i)
    assert out.metadata(3)["prompt"] == HAT and out.metadata(3)["image"] == "1"
    assert json.loads(out.metadata(3)["settings"]) == SETTINGS
    # Which is enough to draw it again.
    said = out.metadata(3)
    chosen = {k: v for k, v in SETTINGS.items() if k not in ("family", "method")}
    again = jaxspec.generate(
        family,
        said["prompt"],
        seed=int(said["seed"]),
        num_images=int(said["image"]) + 1,
        **chosen,
    )
    np.testing.assert_array_equal(again.images[-1], out.images[3])
    kept = json.loads((paths[0].parent / "generated.json").read_text())
    assert kept == json.loads(out.to_json())


def test_json_has_everything_but_pixels(out):
    record = json.loads(out.to_json())
    assert record["settings"] == SETTINGS
    assert record["summary"]["passes_per_image"] == 16
    assert record["seconds"].keys() == {"prompts", "decode", "pictures"}
    assert [(r["prompt"], r["seed"], r["image"]) for r in record["images"]] == [
        ("red heart", 7, 0),
        ("red heart", 7, 1),
        (HAT, 7, 0),
        (HAT, 7, 1),
    ]
    tokens = [r["tokens"] for r in record["images"]]
    np.testing.assert_array_equal(tokens, out.tokens)
    assert {r["target_passes"] for r in record["images"]} == {15}


def test_what_cannot_be_written_leaves_the_old_record(out, tmp_path, monkeypatch):
    def fail(self, text):
        with open(self, "w") as file:
            file.write(text[:5])
        raise OSError("disk full")

    (tmp_path / "generated.json").touch()
    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        out.save(tmp_path)
    assert (tmp_path / "generated.json").read_bytes() == b""
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".png"] == [
        "generated.json"
    ]


# How they came about.


@pytest.fixture(scope="module")
def jacobi(family):
    prompts = ["red heart", "blue tree"]
    return jaxspec.generate(family, prompts, method=jaxspec.SJD(4), num_images=2)


def test_frames_fill_in_from_blank_to_the_picture(jacobi, family):
    frames, final = jacobi.frames(family, 1), jacobi.stats.final_pass[1]
    assert frames.dtype == np.uint8
    assert frames.shape == (1 + jacobi.stats.target_passes[1] + 1, 16, 16, 3)
    assert (frames[0] == BLANK).all()
    np.testing.assert_array_equal(frames[-1], jacobi.images[1])
    for k, frame in enumerate(frames):  # frame k + 1 is of pass k
        grey = (frame == BLANK).all(-1).reshape(4, 4, 4, 4).all((1, 3))
        np.testing.assert_array_equal(grey, final > k - 1)
    # What is there is what its tokens decode to.
    tokens = np.where(final <= 3, jacobi.tokens[1], family.encode(frames[:1])[0])
    cells = (final <= 3).repeat(4, 0).repeat(4, 1)
    want = family.images(tokens[None])[0]
    np.testing.assert_allclose(frames[4][cells], want[cells], atol=1)


def test_fewer_frames_and_sheets_of_them(jacobi, family):
    few = jacobi.frames(family, 1, most=3)
    whole = jacobi.frames(family, 1)
    np.testing.assert_array_equal(few, whole[[0, 1, -1]])
    sheets = jacobi.frames(family, most=5)
    assert sheets.shape == (5, *jacobi.grid().shape)
    np.testing.assert_array_equal(sheets[-1], jacobi.grid())
    with pytest.raises(ValueError, match="2 frames or more"):
        jacobi.frames(family, 0, most=1)
    with pytest.raises(IndexError):
        jacobi.frames(family, 4)
    config = replace(family.config, name="other")
    with pytest.raises(ValueError, match="drawn by 'toy', and params are of 'other'"):
        jacobi.frames(replace(family, config=config), 0)


def test_maps_of_one_and_of_all(jacobi):
    one, all_four = jacobi.map(2), jacobi.map()
    stats = jax.tree.map(lambda x: x[2:3], jacobi.stats)
    passes = jacobi.stats.target_passes[2] + 1
    label = f"blue tree, seed 0, image 0: SJD, {passes} passes"
    want = map_sheet(jacobi.images[2:3], stats, [label])
    np.testing.assert_array_equal(one, want)
    assert all_four.shape[1] == 2 * (one.shape[1] - 8) + 8  # two a row


def test_in_a_notebook_and_as_pil(out):
    data = re.search(r'base64,([^"]+)"', out._repr_html_())
    with Image.open(io.BytesIO(base64.b64decode(data[1]))) as image:
        np.testing.assert_array_equal(np.asarray(image), out.grid())
    np.testing.assert_array_equal(np.asarray(out.pil(2)), out.images[2])
    assert out.label(3) == f"{HAT}, seed 7, image 1"
    height, width, _ = out.grid().shape
    assert width > 2 * 96 and height > 2 * 16  # a row a prompt
