"""What published files wrap their state dicts in, taken off and reported.

Tar saves `{"model": {"name", "args", "sd"}}`, LlamaGen `{"model": ...}`, `{"module":
...}`, `{"state_dict": ...}` or the bare dictionary; its training scripts add "ema",
"optimizer" and "args". DDP puts `module.` before every name, torch.compile `_orig_mod.`
within names, and they come in any order.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SETS = ("model", "module", "state_dict", "sd", "ema")
DEPTH = 16  # a hostile file may hold itself


@dataclass(frozen=True)
class Peeled:
    """A state dict without its wrappers, and what they were; see `Checkpoint`."""

    tensors: dict[str, Any]
    containers: tuple[str, ...]
    args: Mapping[str, Any]
    name: str | None
    left_out: tuple[str, ...]


def peel(content: Any, weights: str | None = None) -> Peeled:
    """The state dict within `content`.

    Args:
      content: nested dictionaries with tensors (anything with shape and dtype).
      weights: the name of the set to take where there are several; it may be a name
        that is not among the usual ones.

    Raises:
      ValueError: there are several sets and none is chosen, or none of that name, or no
        tensors.
    """
    containers: list[str] = []
    left_out: list[str] = []
    about: dict[str, Any] = {}
    for _ in range(DEPTH):
        if not isinstance(content, Mapping):
            raise ValueError(f"holds a {type(content).__name__}, not tensors by name")
        if not all(isinstance(key, str) for key in content):
            raise ValueError("holds a dictionary whose keys are not all names")
        about |= {k: content[k] for k in ("args", "name") if k in content}
        chosen = _choose(content, weights)
        if chosen is None:
            break
        left_out += [k for k in content if k not in (chosen, "args", "name")]
        containers.append(chosen)
        content = content[chosen]
    else:
        raise ValueError(f"holds dictionaries more than {DEPTH} deep")
    if weights is not None and weights not in containers:
        raise ValueError(f"holds no set of weights {weights!r}: {_listed(content)}")
    tensors = {k: x for k, x in content.items() if _is_tensor(x)}
    if not tensors:
        raise ValueError(
            f"holds no tensors, alone or as {', '.join(SETS)}: {_listed(content)}"
        )
    left_out += [k for k in content if k not in tensors and k not in ("args", "name")]
    tensors, prefixes = _without_prefixes(tensors)
    args, name = about.get("args"), about.get("name")
    if isinstance(args, Namespace):  # of a training script
        args = vars(args)
    return Peeled(
        tensors=tensors,
        containers=(*containers, *prefixes),
        args=args if isinstance(args, Mapping) else {},
        name=name if isinstance(name, str) else None,
        left_out=tuple(left_out),
    )


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _choose(content: Mapping[str, Any], weights: str | None) -> str | None:
    """The name of the set of weights to go into; None where the tensors are here."""
    names = (*SETS, weights)
    inner = {k: x for k, x in content.items() if isinstance(x, Mapping) and x}
    sets = [k for k in inner if k in names]
    if len(sets) > 1 and weights not in sets:
        names = " and ".join(sets)
        none = "" if weights is None else f", and none called {weights!r}"
        raise ValueError(
            f"holds several sets of weights, {names}{none}: choose by `weights`"
        )
    return weights if weights in sets else next(iter(sets), None)


def _listed(content: Mapping[str, Any]) -> str:
    """What a dictionary holds, in a few words."""

    def kind(x):
        if isinstance(x, Mapping):
            return f"a dictionary of {len(x)}"
        return "a tensor" if _is_tensor(x) else type(x).__name__

    shown = [f"{k} ({kind(x)})" for k, x in list(content.items())[:8]]
    more = [f"{len(content) - 8} more"] * (len(content) > 8)
    return f"it holds {', '.join(shown + more) or 'nothing'}"


def _without_prefixes(tensors: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Names as the model's class gives them; what was taken off, outermost first."""
    found = []
    while True:
        if all(key.startswith("module.") for key in tensors):
            names = {key: key.removeprefix("module.") for key in tensors}
            found.append("module.")
        elif any("_orig_mod" in key.split(".") for key in tensors):
            names = {key: _without(key, "_orig_mod") for key in tensors}
            found.append("_orig_mod.")
        else:
            return tensors, found
        if len(set(names.values())) < len(names):
            raise ValueError(f"names collide without {found[-1]}")
        tensors = {names[key]: x for key, x in tensors.items()}


def _without(key: str, part: str) -> str:
    return ".".join(p for p in key.split(".") if p != part)
