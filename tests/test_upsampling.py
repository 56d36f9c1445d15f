"""Upsamplers: by hand, against Pillow, row by row; and what trains the learned ones."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import jaxspec
from experiments import upsamplers
from experiments.emoji import train_upsampler
from jaxspec.methods.catalogue import named
from jaxspec.models.upsampler import Resampler, UpsamplerConfig
from jaxspec.models.vq import VQ, VQConfig, from_uint8, nearest, unit
from jaxspec.pipeline import Pipeline
from jaxspec.training import TrainState
from jaxspec.training.loop import PARAMS, save_params
from jaxspec.upsampling import Latents, Nearest, Pixels
from jaxspec.weight_shapes import stacked_params
from tests import toy


def test_nearest_by_hand():
    tokens = jnp.array([[[1, 2], [3, 4]]])
    got = Nearest()(tokens, (2, 6))
    np.testing.assert_array_equal(got, [[[1, 1, 1, 2, 2, 2], [3, 3, 3, 4, 4, 4]]])
    np.testing.assert_array_equal(Nearest()(got, (2, 2)), tokens)


@pytest.mark.parametrize(
    ("filter", "pillow", "grid"),
    [("bicubic", "BICUBIC", (4, 12)), ("lanczos3", "LANCZOS", (2, 4))],
)
def test_pixels_are_resized_as_pillow_does(filter, pillow, grid):
    """Up and down; Pillow rounds to whole pixel values, so a code may differ."""
    family = jaxspec.load("emoji")
    rows, columns = np.mgrid[:32, :64] - np.array([15.5, 31.5])[:, None, None]
    disc = np.hypot(rows, columns / 2) < 12
    picture = np.where(disc[..., None], [200, 30, 40], 255).astype(np.uint8)[None]
    tokens = jnp.asarray(family.encode(picture))
    image = Image.fromarray(family.images(tokens)[0])
    got = family.images(Pixels(filter).bind(family)(tokens, grid))

    def gap(how):
        resized = image.resize((8 * grid[1], 8 * grid[0]), Image.Resampling[how])
        want = family.images(family.encode(np.asarray(resized)[None]))
        return np.abs(got.astype(float) - want).mean()

    assert gap(pillow) < 0.5 < 1.5 < gap("NEAREST")


def test_an_unknown_filter_is_refused():
    with pytest.raises(ValueError, match="filter must be one of bicubic, .*'cubical'"):
        Pixels("cubical")


# Learned ones.

WIDTH = 3
UP = UpsamplerConfig(WIDTH, "up", width=8, blocks=1, large_width=6, large_blocks=1)
DOWN = replace(UP, direction="down")
CODES = jnp.asarray(np.random.default_rng(0).normal(size=(10, WIDTH)), jnp.float32)


def shapes(config: UpsamplerConfig):
    key, grid = jax.random.key(0), jnp.zeros((1, 4, 4, WIDTH))
    return jax.eval_shape(Resampler(config).init, key, grid)


def random_network(config: UpsamplerConfig, seed: int):
    return config, toy.randomly(shapes(config), seed)


def depends(config: UpsamplerConfig, rows: int) -> np.ndarray:
    """Whether each row that comes out, [rows out, rows in], changes with one put in."""
    _, params = random_network(config, 0)
    rng = np.random.default_rng(1)
    plain = np.broadcast_to(rng.normal(size=(rows, 6, WIDTH)), (rows, rows, 6, WIDTH))
    plain = plain.astype(np.float32)
    changed = plain + np.eye(rows, dtype=np.float32)[..., None, None]
    run = jax.jit(Resampler(config).apply)
    return np.any(run(params, changed) != run(params, plain), axis=(2, 3)).T


@pytest.mark.parametrize("config", [UP, DOWN], ids=lambda c: c.direction)
def test_no_row_depends_on_one_below_its_place(config):
    out, into = {"up": (8, 4), "down": (2, 4)}[config.direction]
    first, last = np.arange(out)[:, None] * into // out, np.arange(into)
    if config.direction == "down":  # a row is made of two
        first = first + 1
    got = depends(config, into)
    assert not got[last > first].any()
    # It depends on its own place, and on the row above, so that this says something.
    assert got[(last <= first) & (last >= first - 1)].all()
    free = depends(replace(config, row_causal=False), into)
    assert free[last == first + 1].all()


def test_without_training_it_copies():
    """The last layer is zero: codes are copied, or those of the mean of four."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 10, (2, 4, 6)))

    @jax.jit
    def made(key):
        start = {
            way: (config, Resampler(config).init(key, CODES[tokens]))
            for way, config in {(4, 8): UP, (4, 2): DOWN}.items()
        }
        latents = Latents.create(start, CODES)
        return latents(tokens, (8, 12)), latents(tokens, (2, 3))

    up, down = made(jax.random.key(0))
    np.testing.assert_array_equal(up, Nearest()(tokens, (8, 12)))
    mean = CODES[tokens].reshape(2, 2, 2, 3, 2, WIDTH).mean((2, 4))
    np.testing.assert_array_equal(down, nearest(mean, CODES))


def test_networks_are_chained_the_furthest_first():
    far = replace(UP, scale=4)
    ways = {(2, 4): UP, (4, 8): UP, (8, 4): DOWN, (2, 8): far, (8, 16): UP}
    networks = {way: random_network(c, i) for i, (way, c) in enumerate(ways.items())}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 10, (2, 2, 3)))
    run = jax.jit(Latents.__call__, static_argnums=2)

    def alone(way, tokens):
        latents = Resampler(ways[way]).apply(networks[way][1], CODES[tokens])
        return np.asarray(nearest(latents, CODES))

    without = {way: x for way, x in networks.items() if way != (2, 8)}
    two_steps = alone((4, 8), alone((2, 4), tokens))
    one_step = alone((2, 8), tokens)
    assert (one_step != two_steps).any()
    some, every = Latents.create(without, CODES), Latents.create(networks, CODES)
    np.testing.assert_array_equal(run(some, tokens, (8, 12)), two_steps)
    np.testing.assert_array_equal(run(every, tokens, (8, 12)), one_step)
    down = alone((8, 4), one_step)
    np.testing.assert_array_equal(run(every, one_step, (4, 6)), down)
    np.testing.assert_array_equal(run(every, tokens, (2, 3)), tokens)
    for grid, said in (
        ((6, 9), "no trained network from 4 rows towards 6; there are: 2 to 4, 2 to 8"),
        ((1, 1), "no trained network from 2 rows towards 1"),
    ):
        with pytest.raises(ValueError, match=said):
            every(tokens, grid)
    with pytest.raises(ValueError, match="Latents needs its networks: "):
        Latents()(tokens, (4, 6))
    with pytest.raises(ValueError, match="a network from 2 to 8 rows .* scale is 2"):
        Latents.create({(2, 8): networks[2, 4]}, CODES)


# In the library.


def test_upsamplers_have_names():
    mulo = named("mulo")
    for name, kind in (("latents", Latents), ("pixels", Pixels), ("nearest", Nearest)):
        method = mulo.make({"upsampler": name, "downsampler": name})
        assert type(method.upsampler) is type(method.downsampler) is kind
    assert mulo.make({}) == jaxspec.MuLo(upsampler=Pixels()) and mulo.make({}) != method
    assert jaxspec.MuLo(downsampler=None).downsampler is None
    said = "upsampler must be pixels or latents or nearest, not 'bicubic'"
    with pytest.raises(ValueError, match=said):
        jaxspec.MuLo(upsampler="bicubic")


def test_the_emoji_family_enlarges_a_disc():
    """Its network comes nearer to the large disc's codes than a filter does."""
    family = jaxspec.load("emoji")

    def disc(size):
        rows, columns = np.mgrid[:size, :size] - (size - 1) / 2
        inside = np.hypot(rows, columns) < 0.35 * size
        picture = np.where(inside[..., None], [250, 200, 60], 255)
        return family.encode(picture.astype(np.uint8)[None])

    small, want = jnp.asarray(disc(64)), disc(128)
    right = lambda x: (np.asarray(x.bind(family)(small, (16, 16))) == want).mean()
    assert right(Latents()) > 1.2 * right(Pixels())


@pytest.fixture(scope="module")
def family():
    """The toy family with networks between its two sizes."""
    plain = toy.family()
    up = replace(UP, code_width=plain.config.vq.code_width)
    ways = ((8, 16, up), (16, 8, replace(up, direction="down")))
    config = replace(plain.config, upsamplers=ways)
    return Pipeline(toy.randomly(stacked_params(config)), config).unstacked()


def test_a_family_brings_its_networks(family, tmp_path):
    jaxspec.save(family, tmp_path / "toy")
    names = {p.name for p in (tmp_path / "toy").glob("upsamplers-*.safetensors")}
    assert names == {"upsamplers-8-16.safetensors", "upsamplers-16-8.safetensors"}
    loaded = jaxspec.load(tmp_path / "toy")
    assert loaded.config == family.config
    codes = jnp.asarray(family.params["vq"]["params"]["codebook"])
    codes /= jnp.linalg.norm(codes, axis=-1, keepdims=True)
    latents = Latents().bind(loaded)
    assert latents.bind(toy.family()) is latents
    # Pictures of 8 and 16 px are 2 and 4 rows.
    for before, after, config in family.config.upsamplers:
        rows, wanted = before // 4, after // 4
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 12, (2, rows, rows)))
        params = family.params["upsamplers"][f"{before}-{after}"]
        want = nearest(Resampler(config).apply(params, codes[tokens]), codes)
        np.testing.assert_array_equal(latents(tokens, (wanted, wanted)), want)
    with pytest.raises(ValueError, match="toy has no learned upsamplers: take Pixels"):
        Latents().bind(toy.family())
    with pytest.raises(ValueError, match="8 to 16 px has codes of width 3, its token"):
        replace(family.config, upsamplers=((8, 16, UP),))


def test_networks_of_the_family_and_of_further_stages_are_measured(
    family, tmp_path, monkeypatch
):
    """Of those that were trained; how far, if not to the end."""
    network = family.config.upsamplers[0][2]
    other = jax.tree.map(lambda x: x + 1, family.params["upsamplers"]["8-16"])
    wanted = {"source": 8, "wanted": 16, "steps": 60, "model": network}
    whole, half = "upsampler-8-16-pixels", "upsampler-8-16-patches"
    stages = ("upsampler-8-16", whole, half, "upsampler-8-16-never")
    stages = {stage: SimpleNamespace(**wanted) for stage in stages}
    monkeypatch.setattr(train_upsampler, "STAGES", stages)
    for stage in (whole, half):
        (tmp_path / stage / "checkpoints" / "40").mkdir(parents=True)
        save_params(tmp_path / stage / PARAMS, {"network": other})
    (tmp_path / whole / "checkpoints" / "60").mkdir()
    codes = Latents().bind(family).codes
    held = SimpleNamespace(family=family, codes=codes, low_size=8, high_size=16)
    held.low, held.high = np.zeros((1, 2, 2)), np.zeros((1, 4, 4))
    found = upsamplers.upsamplers(held, tmp_path)
    own, back = "upsampler-8-16", "downsampler-16-8"
    assert [*found][3:] == [own, back, whole, f"{half}, 40 of 60 steps"]
    assert upsamplers.direction(found[back]) == {"down"}
    tokens = jnp.arange(4).reshape(1, 2, 2)
    for name, params in ((own, family.params["upsamplers"]["8-16"]), (whole, other)):
        want = nearest(Resampler(network).apply(params, codes[tokens]), codes)
        np.testing.assert_array_equal(found[name](tokens, (4, 4)), want)


# Training.


class Training(train_upsampler.UpsamplerTraining):
    """Of a network that compiles fast."""

    @property
    def model(self):
        return replace(super().model, width=16, blocks=1, large_width=16)


SETTINGS = Training(16, 32, steps=60, batch=8, rate=2e-2)


def test_pairs_are_of_one_drawing_and_of_train_alone():
    """Drawing m has code m everywhere, at both sizes, and m + 10 where mirrored."""
    m = np.arange(20, dtype=np.int16).reshape(2, 10, 1, 1)
    images = np.zeros((10, 4, 4, 3), np.uint8) + m[0, :, :, :, None].astype(np.uint8)
    images[:, :, 2:] += 100
    pairs = train_upsampler.Pairs(
        source=m + np.zeros((2, 2), np.int16),
        wanted=m + np.zeros((4, 4), np.int16),
        images=images,
        nearest=np.full((20, 8), 99),
    )
    corrupted, seen = [], set()
    for step in range(50):
        got = train_upsampler.make_batch(SETTINGS, pairs, np.arange(2, 10), step)
        again = train_upsampler.make_batch(SETTINGS, pairs, np.arange(2, 10), step)
        jax.tree.map(np.testing.assert_array_equal, got, again)
        code = got["wanted"][:, 0, 0]
        drawing, mirrored = code % 10, code >= 10
        same = got["source"] == code[:, None, None]
        assert (same | (got["source"] == 99)).all() and (drawing >= 2).all()
        assert (got["wanted"] == code[:, None, None]).all()
        left = got["images"][:, 0, 0, 0]
        np.testing.assert_array_equal(left, drawing + 100 * mirrored)
        corrupted.append(1 - same.mean())
        seen |= {*code.tolist()}
    # Shares are between 0 and 0.1; eight of the ten drawings, and mirrored.
    assert 0.03 < np.mean(corrupted) < 0.07 and len(seen) == 16
    np.testing.assert_array_equal(images[:, 0, 0, 0], np.arange(10))


def test_the_likeliest_code_is_the_nearest():
    latents = np.random.default_rng(1).normal(size=(5, 4, WIDTH)).astype(np.float32)
    got = train_upsampler.logits({"log_factor": 1.0}, jnp.asarray(latents), CODES)
    np.testing.assert_array_equal(got.argmax(-1), nearest(latents, CODES))
    gap = np.square(latents[..., None, :] - np.asarray(CODES)).sum(-1)
    want = np.exp(-np.e * gap) / np.exp(-np.e * gap).sum(-1, keepdims=True)
    np.testing.assert_allclose(jax.nn.softmax(got), want, rtol=1e-4)


VQ_CONFIG = VQConfig(
    codebook_size=10,
    code_width=8,
    width=8,
    multipliers=(1,),
    encoder_blocks=1,
    decoder_blocks=1,
    latent_width=8,
    attention="none",
    norm="rms",
    resample="shuffle",
    patch=4,
    background=1.0,
)


@pytest.fixture(scope="module")
def tokenizer():
    picture = jnp.zeros((1, 8, 8, 3))
    shapes = jax.eval_shape(VQ(VQ_CONFIG).init, jax.random.key(0), picture)
    params = toy.randomly(shapes)
    codes = VQ(VQ_CONFIG).apply(params, method="codes")
    return train_upsampler.Tokenizer(VQ_CONFIG, params, codes)


def trained(settings, tokenizer, batches):
    """What each step says of itself, and the state after the last."""
    optimizer = train_upsampler.make_optimizer(settings)
    extra = train_upsampler.judge(settings, optimizer)
    state = TrainState.create(train_upsampler.init(settings), optimizer, extra)
    step = jax.jit(train_upsampler.make_step(settings, tokenizer, optimizer))
    said = []
    for batch in batches:
        state, parts = step(state, batch)
        said.append(jax.tree.map(float, parts))
    return said, state


def test_a_rule_is_learned(tokenizer):
    """Each code becomes four others."""
    source = np.random.default_rng(0).integers(0, 10, (SETTINGS.steps, 8, 3, 3))
    rows, columns = np.mgrid[:6, :6] % 2
    wanted = (source.repeat(2, 2).repeat(2, 3) + 3 * columns + 5 * rows) % 10
    batches = [
        {"source": a, "wanted": b}
        for a, b in zip(source.astype(np.int32), wanted.astype(np.int32), strict=True)
    ]
    said, _ = trained(SETTINGS, tokenizer, batches)
    # At first it copies, which is right where nothing is added.
    assert said[0]["right"] == 0.25 and said[-1]["right"] > 0.9
    assert said[-1]["loss"] == said[-1]["tokens"]


def test_terms_of_the_ladder(tokenizer):
    weights = dict(tokens=0.0, pixels=2.0, perceptual=3.0, commitment=0.5, patches=0.1)
    settings = replace(SETTINGS, **weights)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 24, 24, 3)).astype(np.uint8)
    apply = jax.jit(tokenizer.apply, static_argnums=1)
    wanted = apply(from_uint8(images), "encode")
    batch = {"source": wanted[:, ::2, ::2], "wanted": wanted, "images": images}
    said, state = trained(settings, tokenizer, [batch] * 3)
    # At first the network copies: all is known of what it makes.
    copies = Nearest()(batch["source"], (6, 6))
    got = apply(copies, "decode")
    features = [unit(apply(x, "latents")) for x in (got, from_uint8(images))]
    want = {
        "right": (copies == wanted).mean(),
        "pixels": jnp.square(got - from_uint8(images)).mean(),
        "perceptual": jnp.square(features[0] - features[1]).sum(-1).mean(),
        "commitment": 0.0,
    }
    for name, value in want.items():
        np.testing.assert_allclose(said[0][name], value, atol=1e-5, err_msg=name)
    assert "tokens" not in said[0]
    total = sum(weight * said[0].get(name, 0) for name, weight in weights.items())
    np.testing.assert_allclose(said[0]["loss"], total, rtol=1e-5)
    # Pixels tell the network, through the codes, and the discriminator learns.
    out = state.params["network"]["params"]["out"]["kernel"]
    assert jnp.abs(out).max() > 1e-3
    assert said[2]["discriminator"] < said[0]["discriminator"]
