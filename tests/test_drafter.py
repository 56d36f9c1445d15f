"""EAGLE's drafter: the released one's outputs, its cache, and decoding with it."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxspec
from jaxspec import Sampling
from jaxspec.checkpoints import convert_model, load_model
from jaxspec.checkpoints.published import DRAFTERS
from jaxspec.decoding import Target
from jaxspec.decoding.drafting import Sequel
from jaxspec.methods import AR, EAGLE, EAGLE2, LANTERN, MuLo
from jaxspec.models import abstract
from jaxspec.models.cache import Cache
from jaxspec.models.drafter import Eagle, EagleHead, eagle_config
from jaxspec.models.transformer import Transformer
from jaxspec.pipeline import Pipeline
from jaxspec.testing import keys_of, random_weights, toy_target
from jaxspec.upsampling import Nearest
from tests import toy
from tests.parity import published

RELEASED = "lantern_drafter_llamagen_t2i_tiny"


@pytest.fixture(scope="module")
def released():
    return published(RELEASED)


def test_the_released_drafter(released):
    hidden, tokens = released.expected["hidden"], released.expected["tokens"]
    out = jax.jit(EagleHead(released.config).apply)(released.params, hidden, tokens)
    np.testing.assert_allclose(out, released.expected["output"], atol=1e-4)


def test_the_released_drafter_through_its_cache(released):
    """The prefix at once, then three at a time."""
    hidden, tokens = released.expected["hidden"], released.expected["tokens"]
    config, (b, t) = released.config, tokens.shape

    @jax.jit
    def feed(cache, features, tokens, first):
        slots = first + jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        visible = jnp.arange(cache.slots)[None, None] <= slots[..., None]
        args = features, tokens, slots, cache, visible, slots
        return EagleHead(config).apply(released.params, *args, method="extend")

    cache, found = Cache.empty(config, b), []
    p = config.prefix_length
    for a, z in [(0, p), *((i, i + 3) for i in range(p, t, 3))]:
        out, cache = feed(cache, hidden[:, a:z], tokens[:, a:z], np.int32(a))
        found.append(out)
    out = np.concatenate(found, axis=1)
    np.testing.assert_allclose(out, released.expected["output"], atol=1e-4)


def test_a_released_drafter_converts(released, tmp_path):
    """From a file of its tensors to one that fits its target and no other."""
    save_file(released.state_dict, tmp_path / "drafter.safetensors")
    with pytest.raises(ValueError, match="the weights do not tell the grid: pass size"):
        convert_model(tmp_path / "drafter.safetensors", tmp_path / "none", heads=4)
    of_stage_2 = tmp_path / "llamagen2_drafter" / "model.safetensors"
    of_stage_2.parent.mkdir()
    save_file(released.state_dict, of_stage_2)
    with pytest.raises(ValueError, match=r"by size, 32x32 \(512 px\) by its name"):
        convert_model(of_stage_2, tmp_path / "none", size=256, heads=4)
    lost = {k: x for k, x in released.state_dict.items() if k != "fc.bias"}
    save_file(lost, tmp_path / "lost.safetensors")
    with pytest.raises(ValueError, match=r"missing fc\.bias \[64\]"):
        convert_model(
            tmp_path / "lost.safetensors", tmp_path / "none", size=256, heads=4
        )
    other = published("llamagen_c2i_tiny").state_dict
    save_file(other, tmp_path / "other.safetensors")
    settings: dict[str, Any] = {"size": 256, "heads": 4, "part": DRAFTERS}
    for told in ({"part": DRAFTERS}, settings):
        with pytest.raises(ValueError, match="it is of LlamaGen c2i, not of LANTERN d"):
            convert_model(tmp_path / "other.safetensors", tmp_path / "none", **told)
    told = convert_model(
        tmp_path / "drafter.safetensors", tmp_path / "ours", **settings
    )
    assert told["parts"]["drafters/256"]["family"] == "LANTERN drafter for LlamaGen t2i"
    config, params = load_model(tmp_path / "ours")
    assert config == released.config
    jax.tree.map(np.testing.assert_array_equal, params, released.params)
    llamagen = published("llamagen_t2i_tiny").config
    Eagle(params, config).check(replace(llamagen, grid=(16, 16)))
    with pytest.raises(ValueError, match="made for another target: its grid is"):
        Eagle(params, config).check(llamagen)


def rotary_target(batch: int, **sampling) -> Target:
    """A toy whose positions are rotary."""
    target = toy_target((3, 4), 12, batch)
    config = replace(target.model.config, positions="rotary")
    settings = Sampling.create(12, **sampling)
    weights = random_weights(abstract.transformer(config))
    return Target.create(Transformer(config), weights, target.condition, settings)


def eagle_of(target: Target, seed: int = 5) -> Eagle:
    """A random drafter of a target."""
    config = eagle_config(target.model.config, hidden=24)
    return Eagle(random_weights(abstract.eagle(config), seed), config)


def test_it_drafts_from_the_targets_features_of_both_rows():
    """Through the cache what it is teacher-forced, with guidance on both rows."""
    target = toy_target((3, 4), 12, 2, guidance=2.0)
    eagle = eagle_of(target)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 12, (2, 12)))

    @jax.jit
    def both(target, eagle):
        first, cache = target.read_prefix()
        cells = jnp.broadcast_to(jnp.arange(12), (2, 12))
        seen = jnp.broadcast_to(jnp.tri(12, dtype=bool), (2, 12, 12))
        every = jnp.ones((2, 12), bool)
        read, _ = target.read(cache, tokens, cells, every, seen)
        features = jnp.concatenate([first, read], axis=1)[:, :-1]
        before = jnp.pad(target.rows(tokens), ((0, 0), (eagle.config.prefix_length, 0)))
        forced = EagleHead(eagle.config).apply(eagle.params, features, before)[:, 3:]
        drafter = Sequel(eagle, target)
        log_q, out, _ = drafter.follow(
            drafter.prefill(first, 0),
            features[:, 3:],
            tokens,
            cells,
            every,
            seen,
            cells,
        )
        return forced, out, target.log_probs(forced, cells + 1), log_q

    forced, out, want, log_q = both(target, eagle)
    np.testing.assert_allclose(out, forced, atol=1e-4)
    np.testing.assert_allclose(log_q, want, atol=1e-4)


def test_decoding_with_it_draws_what_ar_draws():
    """With rotary positions, which belong to cells, not to slots of a cache."""
    target, keys = rotary_target(2, guidance=2.0), keys_of(2)
    method = EAGLE2(eagle_of(target), depth=3, top_k=3, total=8)
    out = toy.decode_jitted(method, target, keys)
    want = toy.decode_jitted(AR(), target, keys).tokens
    np.testing.assert_array_equal(out.tokens, want)
    np.testing.assert_array_equal(out.prefill_passes, 2)
    # Another drafter compiles nothing.
    with toy.compilations() as compiled:
        other = replace(method, draft=eagle_of(target, seed=6))
        again = toy.decode_jitted(other, target, keys)
    assert compiled == []
    np.testing.assert_array_equal(again.tokens, want)


def test_a_drafter_of_another_target_is_refused():
    eagle, keys = eagle_of(toy_target((3, 4), 12)), keys_of(1)
    for other, said in [
        (
            toy_target((4, 3), 12),
            r"its grid is \(3, 4\), and this target needs \(4, 3\)",
        ),
        (toy_target((3, 4), 9), "its vocab_size is 12, and this target needs 9"),
        (toy_target((3, 4), 12, width=8), "its width is 16, and this target needs 8"),
        (rotary_target(1), "its positions is learned, and this target needs rotary"),
    ]:
        with pytest.raises(ValueError, match=f"made for another target: {said}"):
            EAGLE2(eagle).start(other, keys)


def with_drafter(size: int) -> Pipeline:
    """The toy family with a random drafter of one size."""
    plain = toy.family()
    config = eagle_config(dict(plain.config.decoders)[size], hidden=24)
    weights = {str(size): random_weights(abstract.eagle(config))}
    drafters = ((size, config),)
    return Pipeline(
        plain.params | {"drafters": weights}, replace(plain.config, drafters=drafters)
    )


def test_mulo_drafts_with_a_drafter_of_the_smaller_size():
    """EAGLE-2 is exact: the draft, and so the picture, is the one that AR makes."""
    family = with_drafter(8)
    mulo = MuLo(
        draft_method=EAGLE2(depth=2, top_k=2, total=4),
        upsampler=Nearest(),
        neighbours=2,
        threshold=0.2,
    )
    out, want = (
        jaxspec.generate(family, "red heart", size=16, method=method)
        for method in (mulo, replace(mulo, draft_method=AR()))
    )
    np.testing.assert_array_equal(out.tokens, want.tokens)
    np.testing.assert_array_equal(out.stats.origin, want.stats.origin)
    with pytest.raises(ValueError, match="a drafter for 8 px, and none for 16 px"):
        jaxspec.generate(family, "red heart", size=16, method=EAGLE2())


def test_drafters_and_tables_of_another_model_are_refused_first(monkeypatch):
    family = with_drafter(16)
    monkeypatch.setattr(Pipeline, "show", lambda *_: pytest.fail("it ran"))
    draw = lambda method: jaxspec.generate(family, "red heart", size=16, method=method)
    others = np.arange(1, 37).reshape(12, 3) % 12
    for method, said in [
        (EAGLE2(eagle_of(toy_target((4, 3), 12))), r"its grid is \(4, 3\), and"),
        (LANTERN(neighbours=3, table=others[:, :2]), r"must be \[12, 3 or more\]"),
        (LANTERN(neighbours=3, table=others / 1), "has whole numbers, not float64"),
        (LANTERN(neighbours=3, table=others + 1), "codes 1 to 12, and there are 0 to"),
        (LANTERN(neighbours=3, table=others * 0), "nearest others, not the code"),
        (EAGLE(tree=tuple((i,) for i in range(13))), "13 children .* are 12 codes"),
    ]:
        with pytest.raises(ValueError, match=said):
            draw(method)


def test_a_family_brings_its_drafter(tmp_path):
    plain, made = toy.family(), with_drafter(16)
    ((_, config),) = drafters = made.config.drafters
    params = made.params
    jaxspec.save(made, tmp_path)
    assert (tmp_path / "drafters-16.safetensors").is_file()
    family = jaxspec.load(tmp_path)
    assert family.config.drafters == drafters
    assert family.describe()["trained"] == {"drafters": [16]}

    condition = jnp.asarray(family.condition(["red heart"]))
    bind = family, condition, Sampling.create(12), 16
    method = LANTERN(neighbours=3).bind(*bind)
    jax.tree.map(
        np.testing.assert_array_equal, method.draft.params, params["drafters"]["16"]
    )
    assert method.table.shape == (12, 3)
    own = EAGLE2(eagle_of(toy_target((4, 4), 12)))
    assert own.bind(*bind) is own
    with pytest.raises(ValueError, match="a drafter for 16 px, and none for 8 px"):
        family.drafter(8)
    with pytest.raises(ValueError, match="a drafter for no size, and none for 16 px"):
        plain.drafter(16)
    with pytest.raises(ValueError, match="made for another target: its grid"):
        replace(plain.config, drafters=((8, config),))
    with pytest.raises(ValueError, match="a drafter for 32 px has no target"):
        replace(plain.config, drafters=((32, config),))
