"""From prompts to pictures in one call."""

import base64
import io
import json
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from jaxspec.decoding import Decoded, Method
from jaxspec.figures import atomically, labelled_grid, save_png
from jaxspec.maps import BLANK, blanked, map_sheet, moments
from jaxspec.matching import best, match_shown
from jaxspec.pipeline import Pipeline, Prompts
from jaxspec.recipe import Progress, Recipe, faults, filled, whole_number
from jaxspec.sampling import image_keys
from jaxspec.sharding import mesh_of, shard
from jaxspec.sizes import Size

PIXELS = 2**21  # made of tokens at once, at most: 32 pictures of 256 px


@dataclass(frozen=True)
class Generated:
    """Pictures, and all that is needed to draw them again; n of them, prompt by prompt.

    Attributes:
      images: uint8 [n, H, W, 3].
      tokens: int32 [n, h, w].
      stats: counts and per-cell records, numpy arrays [n, ...] (see `Decoded`).
      prompts: the prompt of each picture, or what stands for it.
      seeds: the seed of each picture.
      numbers: its number among the pictures of its prompt.
      settings: family, method, size, sampling, and how prompts were read.
      seconds: wall time of reading prompts, of the models that do so, of decoding and
        of making pictures, compilation included where something compiled.
      stages: what was made on the way and can be given to `generate` again, [n, ...],
        such as Tar's "semantic_tokens".
      published_tokens: what papers count for a picture in place of its cells, where
        that is more: newlines and what stands around them.
      num_images: pictures of each prompt.
      scores: float [n], by which these were chosen from others; None if they were not.
    """

    images: np.ndarray
    tokens: np.ndarray
    stats: Decoded
    prompts: list[str]
    seeds: list[int]
    numbers: list[int]
    settings: dict[str, Any]
    seconds: dict[str, float]
    stages: dict[str, np.ndarray] = field(default_factory=dict)
    published_tokens: int | None = None
    num_images: int = 1
    scores: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.images)

    def pil(self, i: int = 0):
        """Picture i as a `PIL.Image`."""
        from PIL import Image

        return Image.fromarray(self.images[i])

    def label(self, i: int) -> str:
        """Prompt, seed and number of picture i in a line."""
        return f"{self.prompts[i]}, seed {self.seeds[i]}, image {self.numbers[i]}"

    def metadata(self, i: int) -> dict[str, str]:
        """What a file of picture i says of itself."""
        return {
            "prompt": self.prompts[i],
            "seed": str(self.seeds[i]),
            "image": str(self.numbers[i]),
            "settings": json.dumps(self.settings),
        }

    def grid(self, images: np.ndarray | None = None) -> np.ndarray:
        """All pictures on one sheet, labelled; uint8 [H, W, 3].

        With `images` [n, H, W, 3], these in their places.
        """
        several = self.num_images
        labels = [
            f"{prompt} ({number})" if several > 1 else prompt
            for prompt, number in zip(self.prompts, self.numbers, strict=True)
        ]
        columns = several if 1 < several < len(self) else None
        images = self.images if images is None else images
        return labelled_grid(list(images), labels, columns)

    def map(self, i: int | None = None, params: Pipeline | None = None) -> np.ndarray:
        """Where each cell came from, and the pass that made it final; uint8 [H, W, 3].

        Args:
          i: picture i with its two maps; None is all pictures with theirs on a sheet.
          params: the family that drew them; with it a whole picture that was drafted
            first, as by `MuLo`, stands before its result.

        Raises:
          ValueError: another family drew the pictures.
        """
        drafts = None
        if params is not None and self.stats.drafts is not None:
            self._check_family(params)
            drafts = decode_tokens(params, self.stats.drafts[self._chosen(i)])
        chosen = self._chosen(i)
        name = self.settings["method"]["name"]
        passes = np.asarray(self.stats.target_passes) + 1
        labels = [f"{self.label(k)}: {name}, {passes[k]} passes" for k in chosen]
        stats = jax.tree.map(lambda x: x[chosen], self.stats)
        columns = math.ceil(math.sqrt(len(chosen) / 3))
        return map_sheet(
            self.images[chosen], stats, labels, columns, drafts, islands=name == "MuLo"
        )

    def frames(
        self, params: Pipeline, i: int | None = None, *, most: int = 60
    ) -> np.ndarray:
        """The picture filling in, from blank to done; uint8 [F, H, W, 3].

        Each frame is what the tokens that are final after some pass decode to; cells
        that are not are grey. (`jaxspec.maps.save_animation` writes them as a file.)

        Args:
          params: the family that drew the pictures.
          i: picture i alone; None is all, on a sheet, at the same passes.
          most: frames at most, 2 or more; passes are left out evenly.

        Raises:
          ValueError: `most` is less than 2, or another family drew the pictures.
        """
        self._check_family(params)
        chosen = self._chosen(i)
        final = np.asarray(self.stats.final_pass)[chosen]
        images = self.images[chosen]
        # Cells that are not there stand for grey, so that the decoder, which looks at
        # neighbours, brings no other colour in from them.
        empty = params.encode(np.full_like(images[:1], BLANK))
        shown = moments(final, most)
        there = final <= shown[:, None, None, None]  # [F, n, h, w]
        tokens = np.where(there, self.tokens[chosen], empty)
        pictures = blanked(
            decode_tokens(params, tokens.reshape(-1, *tokens.shape[2:])),
            there.reshape(-1, *there.shape[2:]),
        ).reshape(len(shown), *images.shape)
        pictures[-1] = images  # whatever rounding another batch size brings
        if i is not None:
            return pictures[:, 0]
        return np.stack([self.grid(frame) for frame in pictures])

    def _check_family(self, params: Pipeline) -> None:
        """Raises ValueError if another family drew the pictures."""
        if params.config.name != self.settings["family"]:
            raise ValueError(
                f"the pictures were drawn by {self.settings['family']!r}, and params "
                f"are of {params.config.name!r}: give those that drew them"
            )

    def _chosen(self, i: int | None) -> list[int]:
        return list(range(len(self))) if i is None else [range(len(self))[i]]

    def best(self, scores: ArrayLike, keep: int = 1) -> "Generated":
        """Of each prompt the `keep` pictures with the highest scores, best first.

        Args:
          scores: [n], such as `jaxspec.match` gives, or any other measure of yours.
          keep: pictures of each prompt.

        Raises:
          ValueError: not a finite score for each picture, or fewer than are kept.
        """
        if np.shape(scores) != (len(self),):
            raise ValueError(
                f"scores must be one a picture, [{len(self)}], not "
                f"{list(np.shape(scores))}"
            )
        rows = best(scores, self.num_images, keep)
        return replace(
            self,
            images=self.images[rows],
            tokens=self.tokens[rows],
            stats=jax.tree.map(lambda x: x[rows], self.stats),
            prompts=[self.prompts[i] for i in rows],
            seeds=[self.seeds[i] for i in rows],
            numbers=[self.numbers[i] for i in rows],
            stages={name: x[rows] for name, x in self.stages.items()},
            num_images=keep,
            scores=np.asarray(scores, np.float32)[rows],
        )

    def save(self, folder) -> list[Path]:
        """Writes `000.png`, `001.png` ... and `generated.json`; returns the pictures.

        Each PNG carries its prompt, seed and settings as text. Files are replaced, each
        in one step.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{i:03d}.png" for i in range(len(self))]
        for i, path in enumerate(paths):
            save_png(path, self.images[i], self.metadata(i))
        with atomically(folder / "generated.json") as draft:
            draft.write_text(self.to_json() + "\n")
        return paths

    def summary(self) -> dict[str, float]:
        """Counts of all pictures that were kept (see `Decoded.summary`).

        And `published_tokens`, and `best_of` how many draws each was chosen.
        """
        counts = self.stats.summary()
        if self.published_tokens is not None:
            counts["published_tokens"] = self.published_tokens
        if "best_of" in self.settings:
            counts["best_of"] = self.settings["best_of"]
        return counts

    def to_json(self) -> str:
        """Everything but the pixels."""
        record = {
            "settings": self.settings,
            "seconds": self.seconds,
            "summary": self.summary(),
            "images": [
                {
                    "prompt": self.prompts[i],
                    "seed": self.seeds[i],
                    "image": self.numbers[i],
                    "target_passes": int(self.stats.target_passes[i]),
                    "draft_passes": int(self.stats.draft_passes[i]),
                    **({} if self.scores is None else {"score": float(self.scores[i])}),
                    "tokens": self.tokens[i].tolist(),
                    **{name: x[i].tolist() for name, x in self.stages.items()},
                }
                for i in range(len(self))
            ],
        }
        return json.dumps(record)

    def _repr_html_(self) -> str:
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(self.grid()).save(buffer, "PNG")
        data = base64.b64encode(buffer.getvalue()).decode()
        return f'<img alt="generated pictures" src="data:image/png;base64,{data}">'


def generate(
    params: Pipeline,
    prompts: Prompts | None = None,
    *,
    semantic_tokens: ArrayLike | None = None,
    features: Any = None,
    size: Size | str | None = None,
    method: Method | None = None,
    num_images: int = 1,
    best_of: int = 1,
    seed: int = 0,
    guidance: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    batch_size: int = 32,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    **options,
) -> Generated:
    """Draws pictures of prompts.

    A picture depends on its prompt's meaning, the seed, its number and the settings:
    not on the prompts beside it, nor on `batch_size`.

    Args:
      params: from `jaxspec.load`.
      prompts: one or several: text, or class labels for a family of those.
      semantic_tokens: TA-Tok's indices int32 [n, indices] in place of prompts, for Tar.
      features: in place of prompts, what the transformer is conditioned on: TA-Tok's
        features [n, indices, width] for Tar; for LlamaGen each caption's states of the
        text encoder, a list of [tokens, width].
      size: pixels of a side, (height, width) or "HEIGHTxWIDTH", of those that the
        family draws.
      method: how to decode; plain AR by default.
      num_images: pictures of each prompt.
      best_of: draws so many for each picture that is kept, and keeps those that match
        their prompts best (see `jaxspec.match`). Each is what it is without: its number
        says which one it was.
      seed: 0 to 2**32 - 1.
      guidance: 1 is off and costs half; 0 ignores the prompt.
      temperature: 0 is argmax.
      top_k: 0 is off.
      top_p: 1 is off.
      batch_size: most pictures drawn at once.
      mesh: of devices to draw on together (see `jaxspec.sharding`); by default the one
        that `params` were loaded for, if there is one.
      progress: called now and then with the cells done, all cells, and the tokens
        [B, h, w] of the batch so far, 0 where nothing is drawn yet.
      **options: how the family reads prompts, such as `scale=1` for Tar; `jaxspec info`
        lists them.

    Returns:
      The pictures with counts and settings, all pictures of the first prompt first.

    Raises:
      ValueError: a prompt or a setting is not usable; nothing was computed.
      FloatingPointError: the network returned something that is not a number.
    """
    began = time.perf_counter()
    num_images = whole_number("num_images", num_images, 1)
    best_of = whole_number("best_of", best_of, 1)
    batch_size = whole_number("batch_size", batch_size, 1)
    seed = whole_number("seed", seed, 0, 2**32 - 1)
    recipe = Recipe.create(
        params,
        size=size,
        method=method,
        guidance=guidance,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        **options,
    )
    if mesh is not None and mesh_of(params) != mesh:
        recipe = replace(recipe, params=shard(recipe.params, mesh))
    params = recipe.params
    asked = params.ask(prompts, semantic_tokens=semantic_tokens, features=features)
    if best_of > 1:
        params.trained("matchers", recipe.size)  # raises where there is none
    drawn = num_images * best_of
    asked = asked.take(np.arange(len(asked.names)).repeat(drawn))
    numbers = np.tile(np.arange(drawn), len(asked.names) // drawn)
    seconds = {"prompts": time.perf_counter() - began}

    recipe, batches = recipe.unstacked(), []
    for first in range(0, len(numbers), batch_size):
        rows = np.arange(first, min(first + batch_size, len(numbers)))
        report = _offset(progress, first, len(numbers))
        batch = recipe.decode(asked.take(rows), numbers[rows], seed, progress=report)
        for stage, passed in batch.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + passed
        batches.append(batch)
    stats = jax.tree.map(lambda *x: np.concatenate(x), *(b.stats for b in batches))
    for fault in faults(stats, numbers, asked.names).values():
        raise fault
    rows, scores = np.arange(len(numbers)), None
    if best_of > 1:
        began = time.perf_counter()
        shown = params.show(asked, image_keys(seed, asked.ids, numbers))
        scores = match_shown(params, stats.tokens, shown.condition)
        rows = best(scores, drawn, num_images)
        stats, scores = jax.tree.map(lambda x: x[rows], stats), scores[rows]
        seconds["matching"] = time.perf_counter() - began
    decoded = time.perf_counter()
    images = decode_tokens(params, stats.tokens)
    published = params.config.text.generated(*stats.tokens.shape[1:])
    seconds["pictures"] = time.perf_counter() - decoded
    return Generated(
        images=images,
        tokens=stats.tokens,
        stats=stats,
        prompts=asked.take(rows).names,
        seeds=[seed] * len(rows),
        numbers=numbers[rows].tolist(),
        settings=recipe.settings | ({"best_of": best_of} if best_of > 1 else {}),
        seconds=seconds,
        stages={
            k: np.concatenate([b.stages[k] for b in batches])[rows]
            for k in batches[0].stages
        },
        published_tokens=published if published > stats.tokens[0].size else None,
        num_images=num_images,
        scores=scores,
    )


def decode_tokens(params: Pipeline, tokens: ArrayLike) -> np.ndarray:
    """Pictures uint8 [n, H, W, 3] of code grids [n, h, w], a batch at a time.

    Raises:
      ValueError: a token is not a code, or these are no grids.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 3 or not tokens.size:
        raise ValueError(f"tokens must be grids [n, h, w], not {list(tokens.shape)}")
    n, cells = len(tokens), tokens[0].size
    most = at_once(cells * params.config.vq.factor**2)
    parts = [
        params.images(tokens[filled(np.arange(i, min(i + most, n)))])
        for i in range(0, n, most)
    ]
    return np.concatenate([p[: n - most * i] for i, p in enumerate(parts)])


def at_once(pixels: int) -> int:
    """How many pictures of so many pixels are made of tokens at once: a power of 2.

    The tokenizer's decoder holds hundreds of numbers a pixel.
    """
    return 1 << (max(1, PIXELS // pixels).bit_length() - 1)


def _offset(progress: Progress | None, first: int, images: int) -> Progress | None:
    """A batch's own view of `progress`: counts run over all batches."""
    if progress is None:
        return None

    def report(done: int, cells: int, tokens: np.ndarray) -> None:
        per_image = cells // len(tokens)
        progress(first * per_image + done, images * per_image, tokens)

    return report


__all__ = ["Generated", "decode_tokens", "generate", "image_keys"]
