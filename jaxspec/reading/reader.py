"""What every family answers for itself: how a prompt becomes a condition.

By word pieces, class labels, a text encoder or a language model. `read` and `start` run
on the host, check everything and compute nothing; `show` runs the models, once there is
a key for each image.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np

from jaxspec.models import abstract
from jaxspec.sizes import size_label


@dataclass(frozen=True)
class Asked:
    """What is to be drawn, before there are images of it; n prompts.

    Attributes:
      names: a line on each, for labels and records.
      ids: uint32 [n], equal for what reads alike: the keys of its images are made of
        them (see `sampling.image_key`).
      values: what the reader made of each, [n, ...].
    """

    names: list[str]
    ids: np.ndarray
    values: dict[str, np.ndarray]

    def take(self, rows: np.ndarray) -> "Asked":
        """Some of them, in this order, also repeatedly."""
        return Asked(
            [self.names[i] for i in rows],
            self.ids[rows],
            {name: x[rows] for name, x in self.values.items()},
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Padded:
    """A condition that does not fill its prefix.

    Attributes:
      vectors: [B, P, width], or tokens int32 [B, P]; anything where it is padding.
      visible: bool [B, P], False there.
      null: what guidance compares with, where it is the image's own.
    """

    vectors: Any
    visible: Any
    null: "Padded | None" = None


@dataclass(frozen=True)
class Shown:
    """What B images show.

    Attributes:
      condition: as `Pipeline.target` takes it: labels [B], vectors [B, P, width],
        `Padded`, or where it tells the size of pictures a dictionary of these, by
        `size_label`.
      stages: what was made on the way and can be given again, [B, ...].
      seconds: wall time of each stage, compilation included.
    """

    condition: Any
    stages: dict[str, np.ndarray] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Reader(ABC):
    """How a family reads what it is asked for: a frozen dataclass, static.

    Attributes:
      kind: its name in `config.json`.
      options: fields that a caller may set for one call of `generate`.
      starts: what may be given in place of prompts, as `generate` calls it.

    A field `spec`, if it has one, is its `tokenizer.json`.
    """

    kind: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    starts: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def wants(self) -> dict[str, Any]:
        """Fields of the `TransformerConfig` that it conditions, as they must be."""

    def networks(self) -> dict[str, Any]:
        """Configurations of its own networks, by the part of the family."""
        return {}

    def parameters(self, decoder: Any) -> dict[str, Any]:
        """Shapes and types of its own parameters, by the part of the family."""
        return {place: abstract.network(c) for place, c in self.networks().items()}

    def sized(self, size: tuple[int, int]) -> "tuple[int, Reader]":
        """The trained size whose model draws another size, and a reader that knows it.

        Raises:
          ValueError: no model does.
        """
        raise ValueError(f"there is no model for {size_label(size)} px, only squares")

    def generated(self, rows: int, columns: int) -> int:
        """How many tokens published code generates for a picture, as papers count."""
        return rows * columns

    @abstractmethod
    def read(self, prompts: Sequence[Any]) -> Asked:
        """What prompts ask for; warns of what is not read.

        Raises:
          ValueError: a prompt cannot be read.
        """

    def start(self, name: str, values: Any) -> Asked:
        """What is asked for by one of `starts`, given in place of prompts.

        Raises:
          ValueError: it is of another kind, shape or range.
        """
        raise ValueError(f"there is no start from {name} here")

    @abstractmethod
    def show(self, params: dict[str, Any], asked: Asked, keys: jax.Array) -> Shown:
        """What images show.

        Args:
          params: of the family.
          asked: of each image.
          keys: of the images, [B].
        """

    def programs(self, batch: int) -> list[tuple[str, Callable, tuple[Any, ...]]]:
        """What `show` runs for so many images: to plan memory by, not to run.

        Returns:
          Of each program its name, a function of the family's parameters and more, and
          shapes and types of what more.
        """
        return []

    def describe(self) -> dict[str, Any]:
        """What people should know of it."""
        return {}


def check_texts(prompts: Sequence[Any]) -> None:
    """Raises ValueError for prompts that are no text, or have none."""
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ValueError(f"a prompt must be text, not {prompt!r}")
        if not prompt.strip():
            raise ValueError("the prompt is empty")


def ids_of(rows: np.ndarray | Sequence[np.ndarray]) -> np.ndarray:
    """Ids uint32 [n] of arrays: equal for equal ones."""
    digests = [hashlib.sha256(np.ascontiguousarray(x).tobytes()) for x in rows]
    return np.array([int.from_bytes(d.digest()[:4], "big") for d in digests], np.uint32)


def timed(seconds: dict[str, float], stage: str, compute: Callable[[], Any]) -> Any:
    """The result of a stage, once it is there; its wall time is added."""
    began = time.perf_counter()
    out = jax.block_until_ready(compute())
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began
    return out


__all__ = ["Asked", "Padded", "Reader", "Shown", "check_texts", "ids_of", "timed"]
