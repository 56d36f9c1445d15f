"""EAGLE's drafter for Chameleons, as LANTERN has it for Anole."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.checkpoints import LANTERN_ANOLE_DRAFTER, load_model, to_torch
from jaxspec.decoding import ACCEPTED, BONUS, DRAWN, FORCED, RESAMPLED
from jaxspec.decoding.drafting import Sequel
from jaxspec.methods import AR, EAGLE2, LANTERN
from jaxspec.models import abstract
from jaxspec.models.chameleon import ChameleonGridConfig
from jaxspec.models.drafter import ChameleonEagleHead, Eagle, eagle_config
from jaxspec.models.llama import layer_shapes
from jaxspec.pipeline import Pipeline
from jaxspec.testing import keys_of, random_weights
from tests import toy, toy_lumina
from tests.converting import run, save, source
from tests.lumina_files import raw_language_model, tokenizer_files
from tests.parity import published


def test_its_layer_is_chameleons_own():
    """Where it joins features alone, it is the first layer that transformers ran."""
    model = published("chameleon_tiny")
    config = eagle_config(model.config)
    c, inner = config.width, model.params["params"]
    own = {k: x[0] for k, x in inner.items() if k in layer_shapes(config.language)}
    own["token_embedding"] = inner["token_embedding"]
    own["join"] = np.eye(2 * c, dtype=np.float32)[:, c:]
    own["join_bias"] = np.zeros(c, np.float32)
    tokens, seen = model.expected["tokens"], model.expected["mask"] > 0
    features = inner["token_embedding"][tokens]
    head = jax.jit(ChameleonEagleHead(config).apply)
    out = head({"params": own}, features, np.zeros_like(tokens), seen)
    want = model.expected["states_1"]
    np.testing.assert_allclose(out[seen], want[seen], rtol=0, atol=1e-4)


def with_drafter(family: Pipeline, hidden: int = 40) -> Pipeline:
    """The family with a random drafter of its smallest size."""
    size, decoder = family.config.decoders[0]
    config = eagle_config(decoder, hidden)
    weights = {str(size): random_weights(abstract.eagle(config), 3)}
    drafters = ((size, config),)
    return Pipeline(
        family.params | {"drafters": weights},
        replace(family.config, drafters=drafters),
    )


@pytest.mark.parametrize("name", ["anole", "family"])
def test_it_drafts_behind_prompts_of_any_length(name):
    """Through the cache what it is teacher-forced, and what is drawn is AR's."""
    family = with_drafter(getattr(toy_lumina, name)())
    keys, sampling = keys_of(2), jaxspec.Sampling.create(8192, guidance=3.0)
    condition = family.condition(["a", "a cat on a mat"])
    target, eagle = family.target(condition, sampling, 64), family.drafter(64)
    method = EAGLE2(eagle, depth=2, top_k=2, total=4)
    out = toy.decode_jitted(method, target, keys)
    want = toy.decode_jitted(AR(), target, keys)
    np.testing.assert_array_equal(out.tokens, want.tokens)

    @jax.jit
    def both(target, eagle, tokens):
        n = target.model.config.cells
        words, visible = target.prefix_rows()
        first, cache = target.read_prefix()
        cells = jnp.broadcast_to(jnp.arange(n), (2, n))
        seen = jnp.broadcast_to(jnp.tri(n, dtype=bool), (2, n, n))
        every = jnp.ones((2, n), bool)
        read, _ = target.read(cache, tokens, cells, every, seen)
        before = jnp.concatenate([first, read], axis=1)[:, :-1]
        p = words.shape[1] - 1
        newline = target.model.config.newline or 0
        codes = jnp.where(tokens == 8192, newline, 4 + tokens)
        fed = jnp.concatenate([words[:, 1:], target.rows(codes)], axis=1)
        there = jnp.pad(visible[:, :-1], ((0, 0), (0, n)), constant_values=True)
        head = ChameleonEagleHead(eagle.config)
        forced = head.apply(eagle.params, before, fed, there)[:, p:]
        drafter = Sequel(eagle, target)
        _, got, _ = drafter.follow(
            drafter.prefill(first, 0), before[:, p:], tokens, cells, every, seen, cells
        )
        return got, forced, visible

    tokens = jnp.asarray(want.tokens.reshape(2, -1))
    got, forced, visible = both(target, eagle, tokens)
    assert not visible.all()  # some rows are padded
    np.testing.assert_allclose(got, forced, rtol=0, atol=1e-4)


def test_lantern_takes_no_code_for_a_newline():
    """Of 8,192 codes and a newline; 4 rows of 4 cells, and what ends them."""
    family = with_drafter(toy_lumina.family())
    sampling = jaxspec.Sampling.create(8192, guidance=3.0)
    condition = family.condition("a cat")
    target = family.target(condition, sampling, 64)
    method = LANTERN(depth=3, top_k=3, total=9, neighbours=4, delta=1.0)
    method = method.bind(family, condition, sampling, 64)
    assert method.table.shape == (8193, 4)
    assert np.max(method.table[:-1]) < 8192  # a newline is nobody's neighbour
    out = toy.decode_jitted(method, target, keys_of(1))
    np.testing.assert_array_equal(out.tokens[..., -1], 8192)
    assert np.max(out.tokens[..., :-1]) < 8192
    np.testing.assert_array_equal(out.count(FORCED), 4)
    parts = [out.count(x) for x in (DRAWN, ACCEPTED, RESAMPLED, BONUS)]
    assert int(sum(parts)[0]) == 16


def drafter_file(folder, config: ChameleonGridConfig):
    """A drafter under the published names; its parameters."""
    params = random_weights(abstract.eagle(config))
    tensors = to_torch(params, config, LANTERN_ANOLE_DRAFTER)
    save(folder / "model.safetensors", tensors)
    return folder, params


def test_a_released_drafter_converts_alone_and_with_its_target(tmp_path):
    target = ChameleonGridConfig(toy_lumina.language(), (32, 32), newline=None)
    each_head = replace(target.language, head_norms=(2, 2))  # as released
    config = eagle_config(replace(target, language=each_head), 40)
    folder, params = drafter_file(tmp_path / "drafter", config)
    keys = to_torch(params, config, LANTERN_ANOLE_DRAFTER)
    assert keys["layers.0.self_attn.q_norm.weight"].shape == (2, 8)
    assert keys["layers.0.input_layernorm.weight"].shape == (16,)
    assert keys["fc.weight"].shape == (16, 32) and len(keys) == 16

    said = run("convert", "model", folder, "--out", tmp_path / "alone")
    assert "LANTERN drafter for Anole" in said.stdout, said.output
    got, loaded = load_model(tmp_path / "alone")
    assert got == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    Eagle(loaded, got).check(target)

    words = ["--model", raw_language_model(tmp_path / "anole.safetensors")]
    for option, path in tokenizer_files(tmp_path / "tokenizer").items():
        words += [option, path]
    convert = lambda out, drafter: run(
        "convert", "anole", *words, "--drafter", drafter, "--out", tmp_path / out
    )
    said = convert("whole", folder)
    assert said.exit_code == 0, said.output
    family = jaxspec.load(tmp_path / "whole")
    assert family.config.drafters == ((512, config),)
    jax.tree.map(np.testing.assert_array_equal, family.drafter(512).params, params)

    wide, _ = drafter_file(
        tmp_path / "wide",
        eagle_config(replace(target, language=replace(each_head, width=24))),
    )
    llamagen = source(tmp_path / "llamagen", "lantern_drafter_llamagen_t2i_tiny")
    for drafter, line in [
        (wide, "wide is no drafter of anole.safetensors: the drafter was made for"),
        (llamagen, "llamagen holds LANTERN drafter for LlamaGen t2i, not LANTERN dr"),
    ]:
        said = convert("none", drafter)
        assert said.exit_code == 2 and line in said.stderr, said.output
        assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="made for another kind of target"):
        Eagle(loaded, got).check(published("llamagen_t2i_tiny").config)
