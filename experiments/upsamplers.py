"""What each upsampler makes of held-out drawings, and what the target thinks of it.

python -m experiments.upsamplers

From codes of drawings at the small size: how many become the drawing's codes at the
large size, or come next to them; PSNR of the decoded picture to the drawing. From those
and from drafts that the small model draws: the probability that the target gives each
cell in one pass over all of them, as MuLo verifies. Networks are those of the family,
and those of further stages of `experiments.emoji.train` that were trained here.
"""

import datetime
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxspec
from experiments.bench_ar import machine
from experiments.emoji import data, metrics, train_upsampler
from experiments.emoji.train_vq import psnr
from jaxspec.acceptance import at
from jaxspec.decoding import Target, blocks
from jaxspec.decoding.blocks import Block
from jaxspec.generation import image_keys
from jaxspec.methods.upsampled import draft_keys
from jaxspec.models.upsampler import UpsamplerConfig
from jaxspec.neighbours import neighbour_table
from jaxspec.pipeline import Pipeline
from jaxspec.sampling import Sampling
from jaxspec.testing import decode_jitted
from jaxspec.training.loop import PARAMS, load_params
from jaxspec.upsampling import Latents, Nearest, Pixels, Upsampler, resized

POOLED = 16  # codes whose mass MuLo pools by default
THRESHOLD = 0.05  # MuLo's default
BATCH = 50

enlarged = jax.jit(resized, static_argnums=2)


def in_batches(run: Callable, *arrays: np.ndarray) -> Any:
    """What `run` makes of the rows of some arrays, a batch at a time, on the host."""
    parts = []
    for i in range(0, len(arrays[0]), BATCH):
        parts.append(jax.tree.map(np.asarray, run(*(x[i : i + BATCH] for x in arrays))))
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


@jax.jit
def masses(
    target: Target, tokens: jax.Array, table: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Probability of each token [B, H, W], and of its pool, given those before it."""
    b, h, w = tokens.shape
    first, cache = target.prefill()
    raster, every = tokens.reshape(b, -1), jnp.ones((b, h * w), bool)
    block = Block.create(every[:, 0], jnp.zeros(b, jnp.int32), h, target.grid)

    def look(cells, log_p):
        log_p = jnp.where(cells[..., None] == 0, first[:, None], log_p)
        token = jnp.take_along_axis(raster, cells, axis=1)
        pool = jnp.exp(at(log_p, table[token])).sum(-1)
        return jnp.exp(at(log_p, token)), pool

    _, out = blocks.sweep(target, cache, raster, every, block, look=look)
    own, pool = (x.reshape(b, h, w) for x in out)
    return own, pool


class HeldOut:
    """Drawings of `test_pair` as codes at two sizes, and drafts of their captions."""

    def __init__(self, family: Pipeline, folder: Path, low: int, high: int, count: int):
        drawings = data.load(folder, [low, high])
        chosen = metrics.evaluation_set(drawings, "test_pair", count)
        self.family, self.low_size, self.high_size = family, low, high
        self.captions = [drawings.caption(i) for i in chosen]
        images = {size: drawings.images[size][chosen] for size in (low, high)}
        self.images = images[high], images[low]
        self.high, self.low = (in_batches(family.encode, x) for x in self.images)
        self.codes = family.target(self.condition[:1], self.sampling, high).codes
        self.table = neighbour_table(self.codes, POOLED)
        self.drafts = in_batches(self.draft, np.arange(len(chosen)))
        white = np.full((1, low, low, 3), 255, np.uint8)
        self.background = np.unique(family.encode(white))

    @property
    def grid(self) -> tuple[int, int]:
        return self.high.shape[1:]

    @property
    def sampling(self) -> Sampling:
        settings = asdict(self.family.config.defaults)
        del settings["size"]
        return Sampling.create(self.family.config.vq.codebook_size, **settings)

    @property
    def condition(self) -> np.ndarray:
        return self.family.condition(self.captions)

    def target(self, rows: np.ndarray, size: int) -> Target:
        return self.family.target(self.condition[rows], self.sampling, size)

    def draft(self, rows: np.ndarray) -> np.ndarray:
        """As the small model draws them for MuLo, cell by cell."""
        ids = self.family.read([self.captions[i] for i in rows])[1]
        keys = draft_keys(image_keys(0, ids, np.zeros(len(ids))))
        target = self.target(rows, self.low_size)
        return decode_jitted(jaxspec.AR(), target, keys).tokens

    def acceptance(self, tokens: np.ndarray, source: np.ndarray) -> dict[str, float]:
        """What the target thinks of tokens made of a source."""

        def run(rows, tokens):
            return masses(self.target(rows, self.high_size), tokens, self.table)

        own, pool = in_batches(run, np.arange(len(tokens)), tokens)
        shown = ~np.isin(source, self.background)
        ink = np.asarray(enlarged(Nearest(), shown.astype(np.int32), self.grid)) > 0
        return {
            "probability": float(own.mean()),
            "pooled": float(pool.mean()),
            "accepted": float((own >= THRESHOLD).mean()),
            "accepted_pooled": float((pool >= THRESHOLD).mean()),
            "accepted_pooled_ink": float((pool >= THRESHOLD)[ink].mean()),
        }

    def likeness(
        self, tokens: np.ndarray, wanted: np.ndarray, images: np.ndarray
    ) -> dict[str, float]:
        """How near tokens come to those of drawings, and their pictures to these."""
        near = np.asarray(self.table)[tokens] == wanted[..., None]
        decoded = in_batches(self.family.images, tokens)
        decibels = psnr(decoded / 127.5 - 1, images / 127.5 - 1)
        shares = {
            f"within_{k}": float(near[..., :k].any(-1).mean()) for k in (1, 4, 16)
        }
        return shares | {"psnr": float(decibels.mean())}


def upsamplers(held: HeldOut, folder: Path) -> dict[str, Upsampler]:
    """Those without training, those of the family, and others trained in `folder`."""
    out: dict[str, Upsampler] = {
        "Nearest": Nearest(),
        "Pixels bicubic": Pixels("bicubic").bind(held.family),
        "Pixels lanczos3": Pixels("lanczos3").bind(held.family),
    }
    rows = {held.low_size: held.low.shape[1], held.high_size: held.high.shape[1]}

    def network(before: int, after: int, config: UpsamplerConfig, params: Any):
        way = rows[before], rows[after]
        return Latents.create({way: (config, params)}, held.codes)

    family = held.family
    for before, after, config in family.config.upsamplers:
        if {before, after} == set(rows):
            params = family.params["upsamplers"][f"{before}-{after}"]
            name = f"{config.direction}sampler-{before}-{after}"
            out[name] = network(before, after, config, params)
    for stage, settings in train_upsampler.STAGES.items():
        before, after = settings.source, settings.wanted
        trained = (folder / stage / PARAMS).exists()
        if {before, after} == set(rows) and trained and stage not in out:
            params = load_params(folder / stage)["network"]
            name = f"{stage}{_so_far(folder / stage, settings.steps)}"
            out[name] = network(before, after, settings.model, params)
    return out


def _so_far(run: Path, steps: int) -> str:
    """How far a network was trained, if it was not to its end."""
    saved = [int(x.name) for x in run.glob("checkpoints/*") if x.name.isdigit()]
    done = max(saved, default=steps)
    return "" if done >= steps else f", {done} of {steps} steps"


def direction(upsampler: Upsampler) -> set[str]:
    if isinstance(upsampler, Latents):
        return {config.direction for *_, config in upsampler.configs}
    return {"up", "down"}


def measure(held: HeldOut, folder: Path) -> dict[str, Any]:
    """A row of each upsampler, one of each downsampler, and what could be reached."""
    true = held.likeness(held.high, held.high, held.images[0])
    true["from_codes"] = held.acceptance(held.high, held.low)
    rows, down = {"the drawing's own codes": true}, {}
    for name, upsampler in upsamplers(held, folder).items():
        resize = lambda x, grid, up=upsampler: in_batches(
            lambda part: enlarged(up, jnp.asarray(part), grid), x
        )
        if "up" in direction(upsampler):
            made, drafted = (resize(x, held.grid) for x in (held.low, held.drafts))
            row: dict[str, Any] = held.likeness(made, held.high, held.images[0])
            row["from_codes"] = held.acceptance(made, held.low)
            row["from_drafts"] = held.acceptance(drafted, held.drafts)
            rows[name] = row
        if "down" in direction(upsampler):
            made = resize(held.high, held.low.shape[1:])
            down[name] = held.likeness(made, held.low, held.images[1])
        print(name, json.dumps(rows.get(name, {}) | {"down": down.get(name)}))
    return {"up": rows, "down": down}


# The tables.

HEADS = ("", "right", "within 4", "within 16", "PSNR")
JUDGED = ("p", "p of 16", "accepted", "of 16", "of 16, ink")
LEGEND = f"""\
- **right**: cells whose code is that of the drawing at the large size; **within k**:
  whose k nearest codes, itself first, hold it. **PSNR**: of the decoded codes to the
  drawing, dB, mean over drawings.
- **p**: what the target gives the code of a cell given those before it and the caption,
  under the distribution that it samples from; mean over cells. **p of 16**: summed over
  the {POOLED} codes nearest to it. **accepted**: cells whose p reaches {THRESHOLD};
  **of 16**: whose sum does, as MuLo tests by default; **ink**: of the cells made of
  codes that background does not have.
- **codes**: made of the drawing's codes at the small size; **drafts**: of what the
  small model drew for the caption.
"""


def table(heads: list[str], body: list[list[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (heads, *body)]
    lines.insert(1, "|" + "---|" * len(heads))
    return "\n".join(lines) + "\n"


def likeness_cells(name: str, row: dict) -> list[str]:
    shares = [f"{row[f'within_{k}']:.3f}" for k in (1, 4, 16)]
    return [name, *shares, f"{row['psnr']:.1f}"]


def judged_cells(row: dict | None) -> list[str]:
    return [f"{x:.3f}" for x in row.values()] if row else [""] * len(JUDGED)


def markdown(record: dict[str, Any]) -> str:
    small, large = record["sizes"]
    sources = ("codes", "drafts")
    heads = [*HEADS, *(f"{source}: {name}" for source in sources for name in JUDGED)]
    body = [
        likeness_cells(name, row)
        + [x for s in sources for x in judged_cells(row.get(f"from_{s}"))]
        for name, row in record["up"].items()
    ]
    down = [likeness_cells(name, row) for name, row in record["down"].items()]
    settings = ", ".join(f"{k} {x}" for k, x in record["settings"].items())
    return (
        f"# Upsamplers: {small} to {large} px\n\n"
        f"`{record['command']}`, {record['date']}.\n\n"
        f"Family {record['family']} ({settings}); {record['count']} drawings of "
        f"test_pair.\n\n{table(heads, body)}\n{LEGEND}\n"
        f"## Back, {large} to {small} px\n\n{table(list(HEADS), down)}"
    )


def main(
    low: Annotated[int, typer.Option(help="The small size, in pixels.")] = 64,
    high: Annotated[int, typer.Option(help="The large one.")] = 128,
    count: Annotated[int, typer.Option(help="Drawings of test_pair.")] = 200,
    family: Annotated[str, typer.Option(help="A packaged one or a folder.")] = "emoji",
    folder: Annotated[
        Path, typer.Option(help="Where drawings and trained networks are kept.")
    ] = Path("runs/emoji"),
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path(
        "docs/results"
    ),
) -> None:
    """Writes upsamplers.json and upsamplers.md (of other sizes, with them named)."""
    held = HeldOut(jaxspec.load(family), folder, low, high, count)
    arguments = shlex.join(sys.argv[1:])
    record = {
        "command": f"python -m experiments.upsamplers {arguments}".strip(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "family": held.family.config.name,
        "settings": asdict(held.family.config.defaults) | {"size": high},
        "sizes": [low, high],
        "count": len(held.captions),
        **measure(held, folder),
    }
    name = "upsamplers" if (low, high) == (64, 128) else f"upsamplers-{low}-{high}"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / f"{name}.md").write_text(markdown(record))


if __name__ == "__main__":
    typer.run(main)
