"""What there is to choose from: methods by name, with what their classes say of them.

Nothing is listed twice: names, knobs and types are those of the classes, meanings,
guarantees and sources those of their docstrings.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jaxspec.methods
from jaxspec.decoding import Method

# Types that text can say, beside choices.
_SIMPLE: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    NoneType: "none",
}
_WORDS = {bool: {"true": True, "false": False}, NoneType: {"none": None}}


@dataclass(frozen=True)
class Knob:
    """A field of a method.

    Attributes:
      name: of the field.
      type: its annotation.
      default: its default; `dataclasses.MISSING` if it must be given.
      meaning: from the docstring, "" if it says nothing.
    """

    name: str
    type: Any
    default: Any
    meaning: str

    @property
    def wants(self) -> str | None:
        """What its value looks like as text; None if text cannot say any."""
        return _wants(self.type)

    def read(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
          ValueError: it stands for none of the knob's type.
        """
        if self.wants is None:
            raise ValueError(f"{self.name} cannot be given as text: set it in Python")
        for part in _parts(self.type):
            with suppress(ValueError):
                return _read(part, text.strip())
        raise ValueError(f"{self.name} must be {self.wants}, not {text!r}")

    def __str__(self) -> str:
        """Name and default, as a command line writes them."""
        if self.default is dataclasses.MISSING:
            return f"{self.name} (must be given)"
        return f"{self.name}={_written(self.default)}"


@dataclass(frozen=True)
class Entry:
    """A method, as its class describes it.

    Attributes:
      name: in lower case, as the command line has it.
      cls: the class.
      about: its docstring up to the knobs.
      guarantee: the sentence of the docstring after "Guarantee:".
      source: the paper with its arXiv number, "" if there is none.
      knobs: in their order.
    """

    name: str
    cls: type
    about: str
    guarantee: str
    source: str
    knobs: tuple[Knob, ...]

    def make(self, knobs: Mapping[str, str]) -> Method:
        """The method with knobs given as text.

        Raises:
          ValueError: a knob is not known, or its value is of the wrong type or out of
            its range, or one that must be given is not.
        """
        known = {knob.name: knob for knob in self.knobs}
        for name in knobs.keys() - known.keys():
            its = ", ".join(known) or "none"
            raise ValueError(f"{self.name} has no knob {name!r}; it has: {its}")
        for knob in self.knobs:
            if knob.default is dataclasses.MISSING and knob.name not in knobs:
                how = "give it too" if knob.wants else "make the method in Python"
                raise ValueError(f"{self.name} needs its {knob.name}: {how}")
        try:
            return self.cls(**{k: known[k].read(text) for k, text in knobs.items()})
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None


def entries() -> dict[str, Entry]:
    """All methods of `jaxspec.methods` by their names in lower case, AR first."""
    classes = [getattr(jaxspec.methods, name) for name in jaxspec.methods.__all__]
    classes.sort(key=lambda cls: (cls.__name__ != "AR", cls.__name__.lower()))
    return {cls.__name__.lower(): entry(cls) for cls in classes}


def entry(cls: Any) -> Entry:
    """What a method's class says; your own may be described like ours."""
    about, meanings = _split(inspect.getdoc(cls) or "")
    types = get_type_hints(cls)
    knobs = tuple(
        Knob(f.name, types[f.name], f.default, _meaning(meanings, f.name))
        for f in sorted(dataclasses.fields(cls), key=lambda f: f.kw_only is True)
    )
    guarantee = re.search(r"Guarantee: (.+?)\.(?=\s|$)", about, re.DOTALL)
    source = re.search(r"\(([^()]*arXiv \d{4}\.\d{4,5}[^()]*)\)", about)
    return Entry(
        name=cls.__name__.lower(),
        cls=cls,
        about=about,
        guarantee=_line(guarantee[1]) if guarantee else "",
        source=_line(source[1]) if source else "",
        knobs=knobs,
    )


def named(name: str) -> Entry:
    """The method of that name, in whatever case.

    Raises:
      ValueError: there is none.
    """
    known = entries()
    if name.lower() not in known:
        raise ValueError(f"there is no method {name!r}; there is: {', '.join(known)}")
    return known[name.lower()]


def _split(doc: str) -> tuple[str, dict[str, str]]:
    """A docstring before its attributes, and what it says of each of them."""
    about, _, section = doc.partition("\nAttributes:\n")
    attribute = re.compile(r"^  (\w[\w, ]*): (.*(?:\n   .*)*)", re.MULTILINE)
    meanings = {}
    for names, text in attribute.findall(section):
        meanings |= dict.fromkeys(re.split(r",\s*", names), _line(text))
    return about.strip(), meanings


def _meaning(meanings: dict[str, str], name: str) -> str:
    """What a knob is, also where the docstring says "as for" another method."""
    text = meanings.get(name, "")
    other = re.fullmatch(r"as for `(\w+)`\.?", text)
    if other is None:
        return text
    cls = getattr(jaxspec.methods, other[1])
    return _meaning(_split(inspect.getdoc(cls) or "")[1], name)


def _line(text: str) -> str:
    return " ".join(text.split())


def _parts(kind: Any) -> tuple[Any, ...]:
    """The types that a union joins; else the type alone."""
    union = get_origin(kind) in (Union, UnionType)
    return get_args(kind) if union else (kind,)


def _wants(kind: Any) -> str | None:
    parts = []
    for part in _parts(kind):
        if get_origin(part) is Literal:
            parts.append(" or ".join(map(str, get_args(part))))
        elif isinstance(part, type) and part in _SIMPLE:
            parts.append(_SIMPLE[part])
    # Where "none" is all that text can say, the knob is not for text.
    return None if parts in ([], ["none"]) else " or ".join(parts)


def _read(kind: Any, text: str) -> Any:
    """The value of a text; ValueError if it has none."""
    if kind in (int, float):
        value = kind(text)
        if value != value:  # NaN is no number
            raise ValueError(text)
        return value
    if kind in (bool, NoneType):
        text, values = text.lower(), _WORDS[kind]
    else:  # a Literal
        values = {str(value): value for value in get_args(kind)}
    if text not in values:
        raise ValueError(text)
    return values[text]


def _written(value: Any) -> str:
    """A default as `read` takes it, where it can be read."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)
