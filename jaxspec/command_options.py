"""Options that several commands share, what they mean, and how commands fail."""

import json
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

Size = Annotated[
    str | None,
    typer.Option(
        metavar="PIXELS",
        help="Pixels a side, one of the family's sizes, or HEIGHTxWIDTH where it draws "
        "such.  [default: the family's own]",
    ),
]
Guidance = Annotated[
    float | None,
    typer.Option(help="How much the prompt counts; 1 is off, 0 ignores it."),
]
Temperature = Annotated[
    float | None, typer.Option(help="0 always takes the likeliest code.")
]
TopK = Annotated[
    int | None, typer.Option(help="Draw from the k likeliest codes; 0 is off.")
]
TopP = Annotated[
    float | None,
    typer.Option(help="Draw from the likeliest codes of this sum; 1 is off."),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="How to decode; `jaxspec methods` lists them.  [default: ar]",
    ),
]
Window = Annotated[int | None, typer.Option(help="Window of a method that has one.")]
Knob = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Another knob of the method; may be given several times.",
    ),
]
Family = Annotated[
    str, typer.Option(metavar="NAME_OR_FOLDER", help="Which models draw.")
]
Reading = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="How the family reads prompts; `jaxspec info` lists its options.  May "
        "be given several times.",
    ),
]
WeightType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="Of the weights: float32, bfloat16, float16, or file for what the "
        "files have.  [default: float32]",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="int8: the transformers' matrices as such, a quarter of float32's bytes.  "
        "[default: as --dtype]",
    ),
]
MeshShape = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="DATA,MODEL",
        help="Devices: so many groups draw pictures of their own, and so many share "
        "the weights in each.  [default: one device]",
    ),
]

Cluster = Annotated[
    bool,
    typer.Option(
        "--cluster", help="Join the processes that Slurm, MPI or Kubernetes began."
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Or those that have this address of the first of them in common;",
    ),
]
Processes = Annotated[int | None, typer.Option(metavar="N", help="there are so many,")]
ProcessId = Annotated[
    int | None, typer.Option(metavar="I", help="and this is number I, from 0.")
]


def mesh_shape(text: str | None) -> tuple[int, int] | None:
    """`--mesh` as the numbers that `jaxspec.sharding.make_mesh` takes.

    Raises:
      ValueError: these are not two whole numbers.
    """
    if text is None:
        return None
    numbers = text.split(",")
    if len(numbers) != 2 or not all(x.strip().isdecimal() for x in numbers):
        raise ValueError(f"--mesh must be DATA,MODEL, such as 4,2, not {text!r}")
    return int(numbers[0]), int(numbers[1])


def devices(
    shape: tuple[int, int] | None,
    cluster: bool,
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
) -> dict[str, Any]:
    """Joins the processes of a run, if so told; its mesh, as an argument of `load`.

    Raises:
      ValueError: there are no such processes or devices, the others did not come, or no
        mesh is to be shared.
    """
    from jaxspec import sharding

    if cluster or (coordinator, processes, process_id) != (None,) * 3:
        if shape is None:
            raise ValueError(
                "processes that join share a mesh: give --mesh DATA,MODEL of the "
                "devices of all"
            )
        try:
            sharding.initialize(coordinator, processes, process_id)
        except RuntimeError as error:
            raise ValueError(f"the processes did not come together: {error}") from error
    return {} if shape is None else {"mesh": sharding.make_mesh(*shape)}


def _pairs(option: str, texts: list[str]) -> Iterator[tuple[str, str]]:
    """Names and values of an option that is given as NAME=VALUE."""
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError(f"{option} must be NAME=VALUE, not {text!r}")
        yield name, value


def weight_type(name: str | None, weights: str | None) -> dict[str, Any]:
    """`--dtype` and `--weights` as arguments of `load`.

    Raises:
      ValueError: there is no such type.
    """
    known = ("float32", "bfloat16", "float16", "file")
    if name is not None and name not in known:
        raise ValueError(f"--dtype must be {', '.join(known)}, not {name!r}")
    if weights not in (None, "int8"):
        raise ValueError(f"--weights must be int8, not {weights!r}")
    given = {} if name is None else {"dtype": None if name == "file" else name}
    return given if weights is None else given | {"weights": weights}


def reading(texts: list[str] | None) -> dict[str, Any]:
    """Options of the family's reader; numbers, true and false as JSON has them.

    Raises:
      ValueError: one is not NAME=VALUE.
    """
    given = {}
    for name, text in _pairs("--option", texts or []):
        try:
            given[name] = json.loads(text)
        except ValueError:
            given[name] = text
    return given


def chosen_method(name: str | None, window: int | None, knobs: list[str] | None) -> Any:
    """The method that the options ask for; None is the library's default.

    Raises:
      ValueError: there is none of that name, or it has no such knob or value.
    """
    given = {} if window is None else {"window": str(window)}
    for knob, value in _pairs("--knob", knobs or []):
        if knob in given:
            raise ValueError(f"{knob} is given twice")
        given[knob] = value
    if name is None:
        for knob in given:
            raise ValueError(f"{knob} is a knob of a method: choose one with --method")
        return None
    from jaxspec.methods import catalogue

    return catalogue.named(name).make(given)


@contextmanager
def one_line_errors() -> Generator[None]:
    """What the library refuses is the user's to mend: one line, no traceback."""
    try:
        yield
    except BrokenPipeError:
        raise  # as by `| head`: nothing went wrong, and the framework ends quietly
    except (
        ValueError,
        OSError,
        FloatingPointError,
        MemoryError,
        ModuleNotFoundError,  # of an extra
    ) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            text = f"{error.filename}: {error.strerror}"  # without its number
        typer.echo(f"error: {' '.join(text.split())}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def one_line_warnings() -> Generator[None]:
    """Warnings as lines on stderr."""

    def show(message, *_):
        typer.echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        # Put back by catch_warnings.
        warnings.showwarning = show  # ty: ignore[invalid-assignment]
        yield


def pixels(size: str | None) -> int | tuple[int, int] | None:
    """What `--size` says.

    Raises:
      ValueError: it is no size.
    """
    from jaxspec.sizes import checked_size

    return None if size is None else checked_size(size)
