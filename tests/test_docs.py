"""The documents: their Python code runs, and every method and knob is in them."""

import re
from pathlib import Path

import pytest

from jaxspec.methods.catalogue import entries

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    if BLOCK.search(path.read_text())
]


def test_the_pages_with_code_are_found():
    assert {"README.md", "docs/extending.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_python_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # pictures are saved
    text, names = (ROOT / page).read_text(), {"__name__": "page"}
    for block in BLOCK.finditer(text):
        # So that a traceback shows the page's own line.
        lines = "\n" * text[: block.start(1)].count("\n")
        exec(compile(lines + block[1], ROOT / page, "exec"), names)


def test_every_method_has_a_section_that_names_its_knobs():
    text = (ROOT / "docs/methods.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    for entry in entries().values():
        name = entry.cls.__name__
        own = [s for s in sections if re.search(rf"\b{name}\b", s.partition("\n")[0])]
        assert own, name
        missing = [k.name for k in entry.knobs if f"`{k.name}" not in "".join(own)]
        assert missing == [], name
        assert f"`{name}`" in (ROOT / "README.md").read_text(), name
