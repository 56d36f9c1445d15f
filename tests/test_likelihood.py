"""What a target says of pictures, against teacher forcing."""

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import testing
from jaxspec.decoding.likelihood import likelihood


@pytest.mark.parametrize("newline", [False, True])
def test_it_is_what_teacher_forcing_says(newline):
    how = {"guidance": 2.0, "temperature": 0.8, "top_k": 3}
    target = testing.toy_target((3, 4), 6, 3, newline=newline, **how)
    tokens = np.random.default_rng(0).integers(0, 6, (3, 3, 4))
    found = likelihood(target, tokens)
    grids = np.asarray(target.grammar.written(tokens))
    logits = testing._guided_logits(target, grids.reshape(3, -1))
    p = testing._probabilities(logits, target.sampling)
    chosen = np.take_along_axis(p, grids.reshape(3, -1, 1), -1)[..., 0]
    chosen = np.asarray(target.grammar.without(chosen.reshape(grids.shape)))
    never = chosen.reshape(3, -1) == 0
    assert 0 < never.sum() < never.size
    np.testing.assert_array_equal(found.divergences, never.sum(1))
    logs = [np.log(row[row > 0]).mean() for row in chosen.reshape(3, -1)]
    np.testing.assert_allclose(found.log_prob, logs, rtol=1e-4)


def test_of_an_exact_method_nothing_diverges_and_another_code_does():
    target = testing.toy_target((3, 4), 6, 2, temperature=0)
    keys = testing.keys_of(2)
    drawn = testing.decode_jitted(jaxspec.SCD(window=3), target, keys)
    found = likelihood(target, drawn.tokens)
    assert found.divergences.tolist() == [0, 0] and found.log_prob.tolist() == [0, 0]
    last = drawn.tokens.at[1, 2, 3].set((drawn.tokens[1, 2, 3] + 1) % 6)
    assert likelihood(target, last).divergences.tolist() == [0, 1]
    sampled = testing.toy_target((3, 4), 6, 2, temperature=1.0, top_k=2)
    drawn = testing.decode_jitted(jaxspec.SCD(window=3), sampled, keys)
    found = jax.tree.map(np.asarray, likelihood(sampled, drawn.tokens))
    assert found.divergences.tolist() == [0, 0] and (found.log_prob < 0).all()
