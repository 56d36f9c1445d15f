"""Choosing among several pictures of a prompt, by how well they match it."""

from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxspec.models.matcher import Matcher, MatcherConfig
from jaxspec.pipeline import Pipeline, Prompts
from jaxspec.pixels import codebook
from jaxspec.sharding import on_host

AT_ONCE = 256  # pictures


def match(params: Pipeline, tokens: ArrayLike, prompts: Prompts) -> np.ndarray:
    """How well pictures match their prompts, by the family's own matcher.

    Args:
      params: from `jaxspec.load`.
      tokens: code grids int32 [n, h, w] of a size that the family has a matcher for.
      prompts: of each, n of them.

    Returns:
      Cosines float32 [n], -1 to 1. They compare pictures of one prompt; pictures of
      different prompts they hardly compare.

    Raises:
      ValueError: no grids of codes, not a prompt each, or there is no matcher.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 3 or not tokens.size:
        raise ValueError(f"tokens must be grids [n, h, w], not {list(tokens.shape)}")
    condition, ids = params.read(prompts)
    if len(ids) != len(tokens):
        raise ValueError(f"{len(tokens)} pictures have {len(ids)} prompts")
    params.check_codes(tokens)
    return match_shown(params, tokens, condition)


def match_shown(params: Pipeline, tokens: np.ndarray, condition: Any) -> np.ndarray:
    """`match`, of what prompts were read as: vectors [n, P, width]."""
    pictures, captions = towers(params, tokens, condition)
    return (pictures * captions).sum(-1)


def towers(
    params: Pipeline, tokens: np.ndarray, condition: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors [n, shared] of code grids and of captions (see `Matcher`)."""
    factor = params.config.vq.factor
    h, w = (side * factor for side in tokens.shape[1:])
    weights, config = params.trained("matchers", h if h == w else (h, w))
    latents = on_host(codebook(params.config.vq, params.params["vq"]))[tokens]
    condition = np.asarray(condition)
    chunks = [slice(i, i + AT_ONCE) for i in range(0, len(tokens), AT_ONCE)]
    parts = [
        on_host(_towers(config, weights, latents[some], condition[some]))
        for some in chunks
    ]
    pictures, captions = zip(*parts, strict=True)
    return np.concatenate(pictures), np.concatenate(captions)


@partial(jax.jit, static_argnums=0)
def _towers(config: MatcherConfig, params, latents, condition):
    return Matcher(config).apply(params, latents, condition)


def best(scores: ArrayLike, each: int, keep: int) -> np.ndarray:
    """Rows of the `keep` highest of scores [n] among each `each` in a row, best first.

    Raises:
      ValueError: a score is not finite, or there are fewer than are to be kept.
    """
    scores = np.asarray(scores, float)
    if not np.isfinite(scores).all():
        raise ValueError(f"score {np.argmin(np.isfinite(scores))} is not finite")
    if not 0 < keep <= each:
        raise ValueError(f"keep must be 1 to {each}, the pictures of each prompt")
    groups = scores.reshape(-1, each)
    order = np.argsort(-groups, axis=1, kind="stable")[:, :keep]
    return (order + each * np.arange(len(groups))[:, None]).reshape(-1)
