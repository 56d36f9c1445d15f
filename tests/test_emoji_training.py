"""Training of the emoji family: folding, growing, batches, and a smoke run."""

import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from experiments.emoji import (
    codes,
    data,
    text_table,
    train,
    train_ar,
    train_matcher,
    train_vq,
)
from jaxspec.models.cache import Cache
from jaxspec.models.transformer import (
    Transformer,
    TransformerConfig,
    rms_norm,
    unstacked,
)
from jaxspec.models.vq import unit
from jaxspec.training import load_params
from tests import toy

# Folding and growing.

CODES, CODE_WIDTH = 12, 5


def config(grid=(2, 2), depth=2) -> TransformerConfig:
    """A toy with the prefix of the family."""
    return replace(toy.transformer(grid, CODES), prefix_length=codes.SLOTS, depth=depth)


def trained(config: TransformerConfig, seed: int = 0) -> dict:
    """Parameters in training form, none of them at its start."""
    settings = SimpleNamespace(model=config, seed=0)
    shapes = jax.eval_shape(lambda: train_ar.init(settings, CODE_WIDTH))
    return toy.randomly(shapes, seed)


def grow(params: dict, config: TransformerConfig) -> dict:
    run = jax.jit(lambda small, start: train_ar.grow(small, config, start))
    return run(params, trained(config))


@pytest.fixture(scope="module")
def codebook():
    return unit(jax.random.normal(jax.random.key(0), (CODES, CODE_WIDTH)))


def logits(config, params, codebook, condition, tokens):
    folded = train_ar.fold(config, params, codebook)
    return jax.jit(Transformer(config).apply)(folded, condition, tokens)


def test_fold_is_the_sum_of_the_parts_it_replaces(codebook):
    """Each input is a free vector, plus its code mapped, plus its row and column."""
    c = config((2, 3))
    params = trained(c)
    condition, n = toy.conditions(c, 2), c.cells - 1
    tokens = jnp.array([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])
    cells = jnp.broadcast_to(jnp.arange(n), (2, n))
    slots = jnp.broadcast_to(jnp.arange(c.slots), (2, c.slots))[:, :-1]
    visible = slots[..., None] >= jnp.arange(c.slots)[None, None]

    @jax.jit
    def unfolded(params, codebook, condition, fed):
        model = lambda *x, method: Transformer(c).apply(
            {"params": params["model"]}, *x, method=method
        )
        place = params["row"][cells // 3] + params["column"][cells % 3]
        code = codebook[fed] @ params["embed_code"]
        x = model(fed, cells, method="embed") + code + place
        x = jnp.concatenate([model(condition, method="prefix"), x], axis=1)
        x, _ = model(x, slots, Cache.empty(c, 2), visible, method="extend")
        h = x[:, codes.SLOTS - 1 :]
        h = rms_norm(h, params["model"]["norm"], c.norm_epsilon)
        return h @ params["model"]["head"] + (h @ params["head_code"]) @ codebook.T

    want = unfolded(params, codebook, condition, tokens[:, :-1])
    got = logits(c, params, codebook, condition, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_unfolding_undoes_folding(codebook):
    """The layers as they were; of tables, all that codes or places alone explain."""
    c = config((2, 3))
    plain = train_ar.fold(c, trained(c), codebook)
    parts = train_ar.unfold(c, unstacked(c, plain), np.asarray(codebook))
    shapes = jax.tree.map(jnp.shape, parts)
    assert shapes == jax.tree.map(jnp.shape, trained(c))
    again = train_ar.fold(c, parts, codebook)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), plain, again)
    left = codebook.T @ parts["model"]["token_embedding"]
    np.testing.assert_allclose(left, 0, atol=1e-4)
    places = parts["model"]["position_embedding"][codes.SLOTS :]
    np.testing.assert_allclose(places[:3].sum(0), 0, atol=1e-5)  # the first row's


def test_growing_in_depth_alone_changes_nothing(codebook):
    small, deep = config(), config(depth=5)
    params = trained(small)
    grown = grow(params, deep)
    assert grown["model"]["qkv"].shape[0] == 5
    condition = toy.conditions(small, 2)
    tokens = jnp.array([[3, 1, 4, 1], [2, 7, 1, 8]])
    want = logits(small, params, codebook, condition, tokens)
    got = logits(deep, grown, codebook, condition, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    # But a new layer learns: what it reads is not zero.
    assert grown["model"]["gate_up"][2:].any() and not grown["model"]["down"][2:].any()


def test_growing_in_size_stretches_positions():
    """Cells of twice as fine a grid lie a quarter off the old ones, edges held."""
    small, large = config((2, 2)), config((4, 4), depth=3)
    params = trained(small)
    ramp = jnp.broadcast_to(jnp.array([0.0, 1.0])[:, None], (2, small.width))
    params["row"], params["column"] = ramp, 10 * ramp
    # The table as a ramp over rows; the last cell has none and takes its neighbour's.
    table = params["model"]["position_embedding"]
    cells = jnp.array([0.0, 0.0, 1.0])[:, None]
    table = table.at[codes.SLOTS :].set(jnp.broadcast_to(cells, (3, small.width)))
    params["model"]["position_embedding"] = table
    grown = grow(params, large)
    want = np.array([0, 0.25, 0.75, 1])
    np.testing.assert_allclose(grown["row"][:, 0], want, atol=1e-6)
    np.testing.assert_allclose(grown["column"][:, 3], 10 * want, atol=1e-5)
    got = grown["model"]["position_embedding"]
    np.testing.assert_array_equal(got[: codes.SLOTS], table[: codes.SLOTS])
    np.testing.assert_allclose(got[codes.SLOTS :, 0], want.repeat(4)[:-1], atol=1e-6)
    for name in ("token_embedding", "head", "prefix_proj", "norm"):
        np.testing.assert_array_equal(grown["model"][name], params["model"][name])


def test_growing_into_other_shapes_is_refused():
    with pytest.raises(AssertionError, match="shapes"):
        train_ar.grow(trained(config()), config(), trained(config((2, 3))))


# Batches. Drawing m has the tokens 10 m and 10 m + 1 (mirrored), and piece m + 1.

TRAIN = np.array([0, 2, 3, 5, 6, 7, 9])  # the other three are for tests
SETTINGS = train_ar.ARTraining(size=32, depth=1, steps=1, batch=3, rate=0.0)


def corpus(**changes) -> train_ar.Corpus:
    m = np.arange(10)
    tokens = np.broadcast_to(
        10 * m[None, :, None] + np.arange(2)[:, None, None], (2, 10, 16)
    )
    pieces = np.zeros((10, codes.SLOTS), np.int32)
    pieces[:, 0] = m + 1
    parts = dict(
        tokens=tokens.astype(np.int16),
        mirrors=m != 3,
        pieces=pieces,
        tags=[[[50 + i, 60 + i]] for i in m],
        table=np.arange(100, dtype=np.float32)[:, None],
        nearest=np.full((100, 8), 99, np.int16),
    )
    return train_ar.Corpus(**{**parts, **changes})


def test_batches_are_functions_of_the_step_and_of_train_alone():
    seen, share = [], []
    for step in range(200):
        got = train_ar.make_batch(SETTINGS, corpus(), TRAIN, step)
        again = train_ar.make_batch(SETTINGS, corpus(), TRAIN, step)
        jax.tree.map(np.testing.assert_array_equal, got, again)
        inputs, targets, condition = got
        drawing, mirrored = np.divmod(targets[:, 0], 10)
        assert (targets == targets[:, :1]).all() and not mirrored[drawing == 3].any()
        assert np.isin(drawing, TRAIN).all() and len(set(drawing)) == 3
        pieces = condition[..., 0]
        null = ~pieces.any(1)
        assert (pieces[:, 0] == np.where(null, 0, drawing + 1)).all()
        tags = pieces[:, 1:3] == drawing[:, None] + [50, 60]
        assert (tags.all(1) | ~pieces[:, 1:].any(1)).all() and not pieces[:, 3:].any()
        assert np.isin(inputs[inputs != targets], 99).all()
        seen.append(drawing)
        share.append([null.mean(), mirrored.mean(), (inputs != targets).mean()])
    # An epoch is two batches: every drawing but one, once, in an order of its own.
    epochs = np.reshape(seen, (100, 6))
    assert all(len(set(e)) == 6 for e in epochs) and len(np.unique(epochs, axis=0)) > 90
    assert (np.bincount(np.ravel(seen), minlength=10)[TRAIN] > 70).all()
    # 0.1 without a caption, half of 6 in 7 mirrored, 0.1 / 2 corrupted; deviations are
    # a fifth of the tolerance.
    np.testing.assert_allclose(np.mean(share, 0), [0.1, 0.43, 0.05], atol=0.08)


def test_tags_fill_free_slots_only():
    row = np.array([7, 8, 9, 0, 0, 0])
    train_ar.append_tags(row, [[1, 2]] * 3, np.random.default_rng(0))
    assert row[:3].tolist() == [7, 8, 9] and row[3:5].tolist() == [1, 2]
    full = np.array([7, 8, 9])
    train_ar.append_tags(full, [[1, 2]], np.random.default_rng(0))
    train_ar.append_tags(full, [], np.random.default_rng(0))
    assert full.tolist() == [7, 8, 9]


def drawings(count: int, splits: list[str], label="red heart") -> data.Drawings:
    """Drawing m is of grey m on its left half and white on its right."""
    images = {}
    for size in data.SIZES:
        x = np.full((count, size, size, 3), 255, np.uint8)
        x[:, :, : size // 2] = np.arange(count, dtype=np.uint8)[:, None, None, None]
        images[size] = x
    column = lambda *values: np.resize(np.array(values), count)
    return data.Drawings(
        images,
        split=column(*splits),
        style=column(*data.STYLES),
        label=column(label),
        tags=column("blue,hat", ""),
        subgroup=column("heart"),
    )


def test_pictures_of_the_vq_are_of_train_alone():
    some = drawings(40, ["train", "test_pair", "train", "val_concept", "test_concept"])
    cycle = ((32, False, 8), (64, True, 8))
    settings = train_vq.VQTraining(cycle=cycle)
    before = some.images[32].copy()
    left = []
    for step in range(20):
        got = train_vq.make_batch(settings, some, step)
        np.testing.assert_array_equal(got, train_vq.make_batch(settings, some, step))
        size = cycle[step % 2][0]
        assert got.shape == (8, size, size, 3) and got.dtype == np.uint8
        grey = got.min((1, 2, 3))
        whole = grey < 255  # a crop may show the white half alone
        assert (some.split[grey[whole]] == "train").all()
        if step % 2 == 0:
            left.append((got[:, 0, 0, 0] < 255).mean())
    assert 0.25 < np.mean(left) < 0.75
    np.testing.assert_array_equal(some.images[32], before)


@pytest.mark.parametrize(
    ("label", "subgroup", "may"),
    [
        ("red heart", "heart", True),
        ("right arrow", "symbol", False),
        ("twelve o’clock", "sky", False),
        ("copyright", "symbol", True),
        ("input numbers", "alphanum", False),
    ],
)
def test_what_may_be_mirrored(label, subgroup, may):
    one = SimpleNamespace(label=[label], subgroup=[subgroup])
    assert codes.may_mirror(one).tolist() == [may]


def test_codes_of_another_tokenizer_or_other_drawings_are_made_anew(
    tmp_path, monkeypatch
):
    """A run that kept them would train on noise."""
    encoded = []

    def encode(config, params, images):
        encoded.append(len(images))
        return np.zeros((len(images), 1), np.int16)

    monkeypatch.setattr(codes, "encode", encode)
    some, few = drawings(4, ["train"]), drawings(2, ["train"])
    for params, x in [({"w": 1.0}, some), ({"w": 2.0}, some), ({"w": 2.0}, few)]:
        for _ in range(2):
            got = codes.load(tmp_path, 32, None, params, x)
            assert got.tokens.shape == (2, len(x.label), 1)
    assert encoded == [4] * 2 + [4] * 2 + [2] * 2  # the drawings, and mirrored


# All stages but `text`, which needs MiniLM.


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """Runs a stage of the smoke run in a folder, on a dozen drawings."""
    vq = replace(train_vq.CONFIG, patch=8, multipliers=(1,), width=16, latent_width=16)
    monkeypatch.setattr(train_vq, "CONFIG", vq)
    full = train_ar.model_config
    small = lambda *a: replace(full(*a), width=16, heads=2, hidden=16)
    monkeypatch.setattr(train_ar, "model_config", small)
    monkeypatch.setattr(train, "use_every_core", lambda: None)
    # The smoke run takes every 40th; all splits are among those.
    count = 12 * 40
    some = drawings(
        count, [s for s in ["train"] * 3 + ["val_concept"] for _ in range(40)]
    )
    fields = ("split", "style", "label", "tags", "subgroup")
    columns = zip(*(getattr(some, f).tolist() for f in fields), strict=True)
    rows = [dict(zip(fields, row, strict=True)) for row in columns]
    monkeypatch.setattr(data, "metadata", lambda: rows)
    np.savez(tmp_path / "drawings.npz", **{f"x{s}": x for s, x in some.images.items()})
    spec = json.loads(toy.tokenizer_spec(data.STYLES))
    table = np.random.default_rng(0).normal(size=(len(spec["model"]["vocab"]), 64))
    text_table.write(tmp_path / "text", table.astype(np.float16), spec)

    def run(stage: str):
        train.main(stage=stage, folder=tmp_path, smoke=True)

    return run


def last_row(folder) -> dict:
    (line,) = (folder / "log.jsonl").read_text().splitlines()
    return json.loads(line)


def test_smoke_run_from_drawings_to_a_family(stages, tmp_path, monkeypatch):
    matcher = replace(train_matcher.STAGES["matcher-128"], size=32)
    monkeypatch.setitem(train_matcher.STAGES, "matcher-128", matcher)
    for stage in ("vq", "codes", "32", "matcher-128", "export"):
        stages(stage)
    for stage, name in {"vq": "psnr_64", "32": "val_concept_shuffled"}.items():
        row = last_row(tmp_path / stage)
        assert row["step"] == 12 and np.isfinite([row["loss"], row[name]]).all()
    family = jaxspec.load(tmp_path / "family")
    assert family.config.sizes == (32,) and family.config.defaults.size == 32
    # What was exported is what was trained, to 16 bits.
    small = load_params(tmp_path / "32")
    codebook = np.asarray(unit(family.params["vq"]["params"]["codebook"]))
    model = train_ar.STAGES["32"].model
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3),
        family.params["decoders"]["32"],
        unstacked(model, train_ar.fold(model, small, codebook)),
    )
    out = jaxspec.generate(family, "blue hat", best_of=2)
    assert out.images.shape == (1, 32, 32, 3) and np.isfinite(out.scores).all()
    assert last_row(tmp_path / "matcher-128")["train_r5"] > 0

    # Unpacked and exported it is the same.
    again = tmp_path / "again"
    for stage, out in (("unpack", tmp_path / "family"), ("export", again / "family")):
        train.main(stage=stage, folder=again, smoke=True, out=out)
        shutil.copy(tmp_path / "drawings.npz", again)
    same = jaxspec.load(again / "family")
    assert same.config == family.config
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)  # 16 bits
    jax.tree.map(close, family.params, same.params)
    with pytest.raises(FileExistsError, match="again has runs of vq, 32, matcher-128"):
        train.main(stage="unpack", folder=again, smoke=True, out=tmp_path / "family")

    varied = replace(train_ar.STAGES["128-varied"], size=32, depth=2, start="32")
    monkeypatch.setitem(train_ar.STAGES, "128-varied", varied)
    stages("128-varied")
    assert np.isfinite(last_row(tmp_path / "128-varied")["loss"])
    stages("32")  # done already: nothing is added
    last_row(tmp_path / "32")
    # The next size starts from this one's average.
    started = []
    monkeypatch.setattr(train_ar, "fit", lambda state, *_, **__: started.append(state))
    stages("64")
    grown, c = started[0].params, train_ar.STAGES["64"].model
    assert grown["model"]["qkv"].shape[0] == c.depth == 4 and len(grown["row"]) == 8
    for name in ("token_embedding", "head", "prefix_proj"):
        np.testing.assert_array_equal(grown["model"][name], small["model"][name])
