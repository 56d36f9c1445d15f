"""What is known of methods by their classes, and methods made of text."""

import re
from typing import Literal

import pytest

import jaxspec
from jaxspec import methods
from jaxspec.decoding import method_class
from jaxspec.methods import catalogue
from jaxspec.methods.catalogue import entries, entry, named


def test_every_method_says_what_it_promises_where_it_is_from_and_its_knobs():
    known = entries()
    assert {e.cls.__name__ for e in known.values()} == set(methods.__all__)
    assert next(iter(known)) == "ar" and known["ar"].knobs == ()
    for name, e in known.items():
        assert name == e.name == e.cls.__name__.lower()
        assert re.match(r"(exact|biased)\b", e.guarantee), name
        assert name == "ar" or re.search(r"\d{4}, arXiv \d{4}\.\d{5}", e.source), name
        assert [k.name for k in e.knobs if not k.meaning] == [], name
    assert known["sjd"].source == "Teng et al. 2024, arXiv 2410.01699, algorithm 1"
    assert known["sjd"].guarantee.startswith("exact; with another rule")
    # "As for `SJD`" is looked up there.
    window = known["sjd"].knobs[0].meaning
    assert window.startswith("inputs of a pass")
    assert known["gsd"].knobs[0].meaning == window


def test_knobs_of_text_make_the_method():
    assert named("AR").make({}) == jaxspec.AR()
    text = {"window": "7", "unfilled": "zero", "first_row_alone": "True"}
    assert named("zipar").make(text) == jaxspec.ZipAR(7, True, "zero")
    made = named("GSD").make({"max_distance": "inf", "below": " 3 "})
    assert made == jaxspec.GSD(max_distance=float("inf"), below=3)


@method_class
class Mine:
    """Mine.

    Guarantee: none at all. A second sentence.

    Attributes:
      size, other: two
        at once: with a colon.
      way: as for `GSD`.
    """

    size: int | None
    other: float = 0.5
    way: Literal["a", 2] = "a"
    rule: jaxspec.methods.sjd.Rule = methods.sjd.Ratio()


def test_a_method_of_your_own_is_described_alike():
    mine = entry(Mine)
    assert mine.guarantee == "none at all" and mine.source == ""
    meanings = [k.meaning for k in mine.knobs]
    assert meanings == ["two at once: with a colon."] * 2 + ["", ""]
    assert [str(k) for k in mine.knobs] == [
        "size (must be given)",
        "other=0.5",
        "way=a",
        "rule=Ratio()",
    ]
    wants = ["a whole number or none", "a number", "a or 2", None]
    assert [k.wants for k in mine.knobs] == wants
    assert mine.make({"size": "none", "way": "2"}) == Mine(None, way=2)
    assert mine.make({"size": "3"}) == Mine(3)
    with pytest.raises(ValueError, match="mine needs its size: give it too"):
        mine.make({})


@pytest.mark.parametrize(
    ("name", "knobs", "said"),
    [
        ("sjdd", {}, "there is no method 'sjdd'; there is: ar, addition, "),
        ("ar", {"window": "3"}, "ar has no knob 'window'; it has: none"),
        ("scd", {"size": "3"}, "scd has no knob 'size'; it has: window, initial, "),
        ("scd", {"window": "3.0"}, "scd: window must be a whole number, not '3.0'"),
        ("scd", {"window": "0"}, "scd: window must be 1 or more, not 0"),
        ("scd", {"coupling": "Max"}, "coupling must be maximal or gumbel, not 'Max'"),
        ("scd", {"rule": "Ratio"}, "rule cannot be given as text: set it in Python"),
        ("gsd", {"max_distance": "nan"}, "max_distance must be a number, not 'nan'"),
        ("zipar", {"first_row_alone": "1"}, "must be true or false, not '1'"),
    ],
)
def test_what_makes_no_method_is_refused_in_a_line(name, knobs, said):
    with pytest.raises(ValueError, match=f"^[^\n]*{re.escape(said)}[^\n]*$"):
        named(name).make(knobs)


def test_a_method_that_needs_more_than_text_says_so(monkeypatch):
    @method_class
    class Needy:
        """Needy."""

        draft: jaxspec.Target

    monkeypatch.setattr(methods, "Needy", Needy, raising=False)
    monkeypatch.setattr(methods, "__all__", ["AR", "Needy"])
    assert list(catalogue.entries()) == ["ar", "needy"]
    with pytest.raises(ValueError, match="needy needs its draft: make .* in Python"):
        named("needy").make({})
