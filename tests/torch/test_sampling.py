"""Sampling against LlamaGen's published sampler, written down here in torch.

Sun et al. 2024, `autoregressive/models/generate.py`: `decode_one_token`, `sample` and
`top_k_top_p_filtering`. Random logits have no ties, on which the two differ.
"""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxspec.sampling import Sampling, guide, log_probs

BATCH, CODES = 5, 300


def llamagen(pair, guidance: float, temperature: float, top_k: int, top_p: float):
    """Log-probabilities [B, V] of conditional and null logits [2, B, V]."""
    conditional, null = pair
    logits = conditional if guidance == 1 else null + guidance * (conditional - null)
    logits = logits / temperature
    if top_k > 0:
        kth = logits.topk(min(top_k, CODES)).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        removed = ordered.softmax(-1).cumsum(-1) > top_p
        removed = removed.roll(1, dims=-1)  # the first to pass p stays
        removed[:, 0] = False
        logits = logits.masked_fill(removed.scatter(1, order, removed), -torch.inf)
    return logits.log_softmax(-1)


@pytest.mark.filterwarnings("ignore:top_k 400 is more than:UserWarning")
@pytest.mark.parametrize("guidance", [1.0, 0.0, 0.5, 4.0])
@pytest.mark.parametrize("top_k", [0, 1, 20, 400])  # there are fewer codes than 400
def test_log_probs(guidance, top_k):
    pair = torch.randn(2, BATCH, CODES, generator=torch.Generator().manual_seed(0)) * 2
    # Ours has the two rows of an image side by side, and cells on an axis of their own.
    rows = jnp.asarray(pair.transpose(0, 1).numpy())
    rows = (rows[:, :1] if guidance == 1 else rows).reshape(-1, 1, CODES)
    cells = jnp.zeros((BATCH, 1), jnp.int32)
    for temperature, top_p in product((1.0, 0.3, 1.7), (1.0, 0.0, 0.6, 0.95)):
        settings = dict(
            guidance=guidance, temperature=temperature, top_k=top_k, top_p=top_p
        )
        want = llamagen(pair, **settings).numpy()
        sampling = Sampling.create(CODES, **settings)
        got = log_probs(guide(rows, cells, sampling), sampling)[:, 0]
        np.testing.assert_allclose(
            got, want, rtol=1e-5, atol=1e-5, err_msg=str(settings)
        )
