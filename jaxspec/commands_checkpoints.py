"""The commands for published checkpoints: `inspect`, and `convert` for one model."""

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

app = typer.Typer(rich_markup_mode=None)
convert = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Convert published PyTorch checkpoints.",
)
app.add_typer(convert, name="convert")

Source = Annotated[
    str, typer.Argument(metavar="FILE_OR_FOLDER", help="Of a published model.")
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which of several sets, such as model or ema."),
]
Size = Annotated[
    int | None,
    typer.Option(help="Pixels a side, where a LlamaGen or Lumina-mGPT does not tell."),
]
Heads = Annotated[
    int | None,
    typer.Option(help="Of a LlamaGen transformer of a size that was not published."),
]
Out = Annotated[
    str, typer.Option(metavar="FOLDER", help="New; it appears when all is written.")
]
Type = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="Cast to float32, float16 or bfloat16.  [default: as the file has it]",
    ),
]
Drafter = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE_OR_FOLDER",
        help="LANTERN's drafter of the model, for EAGLE and LANTERN; of several, in "
        "their order.",
    ),
]
VQ = Annotated[str, typer.Option(metavar="FILE", help="The VQ tokenizer.")]
Format = Annotated[
    str, typer.Option(metavar="FORMAT", help="Of the weights: safetensors or orbax.")
]


@app.command(
    epilog="""\b
Examples:
  jaxspec inspect ar_dtok_lp_256px.pth
  jaxspec inspect c2i_B_256.pt --tensors
  jaxspec inspect Tar-1.5B/ --json"""
)
def inspect(
    path: Source,
    weights: Weights = None,
    size: Size = None,
    heads: Heads = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with every tensor.")
    ] = False,
) -> None:
    """Tell what a checkpoint holds, without loading it or running code of it."""
    with one_line_errors():
        from jaxspec.checkpoints.inspect import inspect_checkpoint
        from jaxspec.checkpoints.writer import to_json

        found = inspect_checkpoint(path, weights=weights, size=size, heads=heads)
        if as_json:
            typer.echo(to_json(found))
            return
        for line in _told(found):
            typer.echo(line)
        if tensors:
            for line in _listed(found["tensors"]):
                typer.echo(line)


@convert.command(
    epilog="""\b
Examples:
  jaxspec convert model vq_ds16_t2i.pt --out vq
  jaxspec convert model c2i_B_384.pt --out c2i-b --dtype bfloat16"""
)
def model(
    path: Source,
    out: Out,
    weights: Weights = None,
    size: Size = None,
    heads: Heads = None,
    dtype: Type = None,
    format: Format = "safetensors",
) -> None:
    """Convert one model into a folder, strictly: all of it fits, or none is written."""
    how = {"size": size, "heads": heads, "weights": weights, "dtype": dtype}
    _one_model(path, out, None, format=format, **how)


@convert.command(
    epilog="""\b
Examples:
  jaxspec convert drafter llamagen_drafter/ --out eagle --size 256"""
)
def drafter(
    path: Source,
    out: Out,
    weights: Weights = None,
    size: Size = None,
    heads: Heads = None,
    dtype: Type = None,
    format: Format = "safetensors",
) -> None:
    """Convert one of LANTERN's drafters into a folder, and nothing but a drafter.

    `convert llamagen --drafter` and `convert anole --drafter` put it into a family's
    folder, and check it against its target. Alone it is for Python: a method takes it,
    as in `jaxspec.EAGLE2(Eagle(params, config))` with what
    `jaxspec.checkpoints.load_model` returns (`jaxspec.models.drafter.Eagle`).
    """
    from jaxspec.checkpoints.published import DRAFTERS

    how = {"size": size, "heads": heads, "weights": weights, "dtype": dtype}
    _one_model(path, out, DRAFTERS, format=format, **how)


def _one_model(path: str, out: str, part: str | None, **how) -> None:
    with one_line_errors():
        from jaxspec.checkpoints.single import convert_model

        with _byte_bar() as progress:
            provenance = convert_model(path, out, part=part, progress=progress, **how)
        _tell(out, provenance)


@convert.command(
    epilog="""\b
Examples:
  jaxspec convert tar --llm Tar-1.5B/ --ta-tok ta_tok.pth --vq vq_ds16_t2i.pt \\
    --ar-dtok ar_dtok_lp_256px.pth --ar-dtok ar_dtok_lp_1024px.pth --out tar
  jaxspec generate "A photo of a macaw" --family tar --size 1024 --method mulo"""
)
def tar(
    ta_tok: Annotated[str, typer.Option(metavar="FILE", help="TA-Tok.")],
    ar_dtok: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="AR-DTok; once for each size."),
    ],
    vq: VQ,
    out: Out,
    llm: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="The language model; without it, drawing starts from semantic tokens.",
        ),
    ] = None,
    weights: Weights = None,
    dtype: Type = None,
    format: Format = "safetensors",
) -> None:
    """Convert the models of Tar into one folder that draws from prompts."""
    with one_line_errors():
        from jaxspec.checkpoints.assemble import convert_tar

        with _byte_bar() as progress:
            provenance = convert_tar(
                out,
                ar_dtok=ar_dtok,
                ta_tok=ta_tok,
                vq=vq,
                llm=llm,
                weights=weights,
                dtype=dtype,
                format=format,
                progress=progress,
            )
        _tell(out, provenance)


@convert.command(
    epilog="""\b
Examples:
  jaxspec convert llamagen --gpt c2i_B_256.pt --vq vq_ds16_c2i.pt --out c2i-b
  jaxspec generate 207 "golden retriever" --family c2i-b
  jaxspec convert llamagen --gpt t2i_XL_stage1_256.pt --t5 flan-t5-xl/ \\
    --vq vq_ds16_t2i.pt --drafter llamagen_drafter/ --out t2i
  jaxspec generate "a red bicycle" --family t2i --method eagle2"""
)
def llamagen(
    gpt: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="The transformer; once for each size."),
    ],
    vq: VQ,
    out: Out,
    t5: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="The text encoder, for captions; without it, drawing starts from its "
            "features.",
        ),
    ] = None,
    drafter: Drafter = None,
    weights: Weights = None,
    size: Size = None,
    heads: Heads = None,
    dtype: Type = None,
    format: Format = "safetensors",
) -> None:
    """Convert the models of LlamaGen into one folder that draws."""
    with one_line_errors():
        from jaxspec.checkpoints.assemble import convert_llamagen

        with _byte_bar() as progress:
            provenance = convert_llamagen(
                out,
                gpt=gpt,
                vq=vq,
                t5=t5,
                drafter=drafter or (),
                size=size,
                heads=heads,
                weights=weights,
                dtype=dtype,
                format=format,
                progress=progress,
            )
        _tell(out, provenance)


Model = Annotated[
    list[str],
    typer.Option(metavar="FOLDER", help="The language model; once for each size."),
]
VQGAN = Annotated[str, typer.Option(metavar="FILE", help="Meta's vqgan.ckpt.")]
Vocabulary = Annotated[
    str, typer.Option(metavar="FILE", help="Meta's text_tokenizer.json.")
]
Draws = Annotated[
    str | None,
    typer.Option(
        metavar="REASON",
        help="Why the model can draw, where its files do not say so; recorded.",
    ),
]


@convert.command(
    epilog="""\b
Examples:
  jaxspec convert lumina --model Lumina-mGPT-7B-768/ --vq vqgan.ckpt \\
    --tokenizer text_tokenizer.json --out lumina
  jaxspec generate "A photo of a macaw" --family lumina --method gsd --dtype file"""
)
def lumina(
    model: Model,
    vq: VQGAN,
    tokenizer: Vocabulary,
    out: Out,
    size: Size = None,
    draws: Draws = None,
    dtype: Type = None,
    format: Format = "safetensors",
) -> None:
    """Convert the models of Lumina-mGPT into one folder that draws."""
    settings = dict(size=size, draws=draws, dtype=dtype, format=format)
    _chameleon("Lumina-mGPT", model, vq, tokenizer, out, **settings)


@convert.command(
    epilog="""\b
Examples:
  jaxspec convert anole --model Anole-7b-v0.1-hf/ --vq vqgan.ckpt \\
    --tokenizer text_tokenizer.json --out anole
  jaxspec convert anole --model consolidated.pth --vq vqgan.ckpt \\
    --tokenizer text_tokenizer.json --out anole"""
)
def anole(
    model: Model,
    vq: VQGAN,
    tokenizer: Vocabulary,
    out: Out,
    drafter: Drafter = None,
    draws: Draws = None,
    dtype: Type = None,
    format: Format = "safetensors",
) -> None:
    """Convert the models of Anole into one folder that draws."""
    settings = dict(drafter=drafter or (), draws=draws, dtype=dtype, format=format)
    _chameleon("Anole", model, vq, tokenizer, out, **settings)


@convert.command(
    epilog="""\b
Examples:
  jaxspec convert chameleon --model tuned/ --vq vqgan.ckpt \\
    --tokenizer text_tokenizer.json --draws "image head trained on LAION" --out mine"""
)
def chameleon(
    model: Model,
    vq: VQGAN,
    tokenizer: Vocabulary,
    out: Out,
    draws: Draws = None,
    dtype: Type = None,
    format: Format = "safetensors",
) -> None:
    """Convert another Chameleon that was trained to draw, as Anole draws."""
    settings = dict(draws=draws, dtype=dtype, format=format)
    _chameleon("Chameleon", model, vq, tokenizer, out, **settings)


def _chameleon(family, model, vq, tokenizer, out, **settings) -> None:
    with one_line_errors():
        from jaxspec.checkpoints.assemble import convert_chameleon

        files = {"model": model, "vq": vq, "tokenizer": tokenizer}
        with _byte_bar() as progress:
            provenance = convert_chameleon(
                out, family=family, progress=progress, **files, **settings
            )
        _tell(out, provenance)


def _tell(out: str, provenance: dict[str, Any]) -> None:
    for place, part in provenance["parts"].items():
        typer.echo(f"wrote {out}: {part['family']}, {part['size']}, as {place}")


def _told(found: dict[str, Any]) -> Iterator[str]:
    """The record of a checkpoint as aligned lines."""
    files = [f"{file['name']} ({_bytes(file['bytes'])})" for file in found["files"]]
    types = [f"{count} {kind}" for kind, count in found["types"].items()]
    family = [found["family"], found["size"]] if found["family"] else ["unknown"]
    count = f"{len(found['tensors']):,}, {found['values']:,} values"
    facts = {
        "files": ", ".join(files),
        "containers": " > ".join(found["containers"]) or "none",
        "family": ", ".join(family),
        "tensors": f"{count}, {_bytes(found['bytes'])}",
        "types": ", ".join(types),
        "left out": ", ".join(found["left_out"]),
        "arguments": json.dumps(found["arguments"], default=str, skipkeys=True),
        "converts": "yes" if found["converts"] else "no: " + found["problems"][0],
    }
    for name, fact in facts.items():
        if fact and fact != "{}":
            yield f"{name:<11} {fact}"
    for problem in found["problems"][1:]:
        yield f"{'':<11} {problem}"


def _listed(tensors: list[dict[str, Any]]) -> Iterator[str]:
    """A line a tensor, in columns."""
    rows = [(x["name"], str(x["shape"]), x["type"], f"{x['bytes']:,}") for x in tensors]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, shape, kind, size in rows:
        yield (
            f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {kind:<{widths[2]}}  "
            f"{size:>{widths[3]}}"
        )


def _bytes(count: float) -> str:
    """Such as "2.53 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,} bytes" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError


@contextmanager
def one_line_errors() -> Generator[None]:
    """As in `jaxspec.cli`, and a torch that is not installed; problems keep lines."""
    try:
        yield
    except BrokenPipeError:
        raise  # as by `| head`
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _byte_bar() -> Generator[Callable[[int, int], None] | None]:
    """A `progress` for conversions; None where no one watches stderr."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        progress.TextColumn("converting"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
