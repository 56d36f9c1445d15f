"""Prompt sets in the forms that they are published in, with ids that stay.

`emoji` is the captions that the emoji family is scored on. What a file is, is seen from
its content:

    a folder of .txt files    DPG-Bench; a file is a prompt, its name the id
    JSON with "annotations"   COCO captions; an image is a prompt, its longest caption
                              the text, its number the id
    JSON lines, a JSON list   GenEval (a "tag" each; the id is the place in the file,
                              as its scorer counts), or any with a "prompt"
    CSV, TSV                  PartiPrompts, or any with a column "Prompt"
    plain text                a prompt a line; empty lines are none

An id is the set's own, where it has one. Else it is a hash of the text, with a number
behind it from the second prompt of the same text on: prompts that are added or removed
elsewhere in the file change no id.
"""

import csv
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.folder import FAMILIES
from jaxspec.evaluation.records import Prompt, Source, prompts_hash

# What the parts of a prompt are called, in lower letters.
TEXTS = ("prompt", "text", "caption")
IDS = ("id", "prompt_id", "item_id", "image_id")
CATEGORIES = ("category", "tag")

Rows = Iterator[tuple[str, Prompt]]  # where it stands, such as "line 3"; "" is no id


def load_prompts(path: str | os.PathLike) -> list[Prompt]:
    """All prompts of a file or folder, or those that a packaged family is scored on.

    Raises:
      FileNotFoundError: there is none.
      ValueError: a line is not what the file seemed to hold; no prompt is left out.
    """
    path = Path(path)
    own = FAMILIES / path / "captions.tsv"
    if not path.exists() and str(path) == path.name and own.is_file():
        path = own
    if path.is_dir():
        return _identified(path, _folder(path))
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder of prompts {path}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(
            f"line {line} of {path} is not UTF-8: save the file as UTF-8"
        ) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # lines of any system
    prompts = _identified(path, _rows(path, text))
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def shard(prompts: Sequence[Prompt], part: str) -> tuple[list[Prompt], int, int]:
    """The prompts of shard "I/N", I from 0 to N - 1, and both numbers.

    Every N-th prompt, from number I on: each is in exactly one shard.

    Raises:
      ValueError: there is no such shard.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    if not found or not int(found[1]) < int(found[2]):
        raise ValueError(f"a shard is I/N, with I from 0 to N - 1, and not {part!r}")
    which, shards = int(found[1]), int(found[2])
    return list(prompts[which::shards]), which, shards


def source_of(path: str | os.PathLike, prompts: Sequence[Prompt]) -> Source:
    """What a run notes of where its prompts came from."""
    return Source(str(path), prompts_hash(prompts), len(prompts))


def _identified(path: Path, rows: Rows) -> list[Prompt]:
    """The prompts, each with an id."""
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}  # id to place
    texts: Counter[str] = Counter()
    for where, prompt in rows:
        if not prompt.id:
            digest = hashlib.sha256(prompt.text.encode()).hexdigest()[:12]
            texts[digest] += 1
            number = f"-{texts[digest]}" if texts[digest] > 1 else ""
            prompt = replace(prompt, id=digest + number)
        if prompt.id in seen:
            raise ValueError(
                f"{where} of {path} has the id {prompt.id!r}, as has "
                f"{seen[prompt.id]}: ids must differ"
            )
        seen[prompt.id] = where
        prompts.append(prompt)
    return prompts


def _rows(path: Path, text: str) -> Rows:
    """The prompts of a file's text."""
    if re.match(r'\s*(\{\s*["}]|\[\s*[\[{"\]])', text):
        yield from _json(path, text)
        return
    first = text.lstrip().partition("\n")[0]
    delimiter = "\t" if "\t" in first else ","
    columns = [cell.strip().strip('"').lower() for cell in first.split(delimiter)]
    if any(name in columns for name in TEXTS):
        yield from _table(path, text, delimiter)
    elif delimiter == "\t" or path.suffix.lower() in (".csv", ".tsv"):
        raise ValueError(
            f"{path} has the columns {', '.join(columns)}: one must be "
            f"{', '.join(TEXTS[:-1])} or {TEXTS[-1]}, separated by commas or tabs "
            "(prompts without columns, a line each, have no tabs and end in .txt)"
        )
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"line {number}", Prompt("", _checked(line, path, number))


def _folder(path: Path) -> Rows:
    files = sorted(path.glob("*.txt"), key=lambda p: _natural(p.stem))
    if not files:
        raise ValueError(f"the folder {path} holds no .txt file, a prompt each")
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not UTF-8: save it as UTF-8") from None
        yield file.name, Prompt(file.stem, text.strip())


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts 2 before 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def _table(path: Path, text: str, delimiter: str) -> Rows:
    # In PartiPrompts a prompt begins with a word in quotes, which are part of it.
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    names: list[str] = []
    try:
        for row in reader:
            number = reader.line_num
            if not names:
                names = [name.strip().lower() for name in row]
                twice = [name for name in names if name and names.count(name) > 1]
                if twice:
                    raise ValueError(f"{path} has two columns {twice[0]!r}")
            elif row and len(row) != len(names):
                raise ValueError(
                    f"line {number} of {path} has {len(row)} cells, and the header "
                    f"{len(names)}"
                )
            elif row:
                values = dict(zip(names, row, strict=False))
                yield f"line {number}", _prompt(values, path, number)
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} of {path}: {error}") from None


def _json(path: Path, text: str) -> Rows:
    """A JSON document, or one a line."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":  # which is the next line
            raise ValueError(
                f"line {error.lineno} of {path} is no JSON: {error.msg}"
            ) from None
        yield from _json_lines(path, text)
        return
    if isinstance(values, dict) and isinstance(values.get("annotations"), list):
        yield from _coco(path, values)
    elif isinstance(values, dict) and any(name in values for name in TEXTS):
        yield from _json_lines(path, text)  # of one line
    elif isinstance(values, list):
        for number, value in enumerate(values, 1):
            yield f"entry {number}", _entry(value, path, number, "entry")
    else:
        raise ValueError(
            f"{path} is a JSON object with {', '.join(list(values)[:5]) or 'nothing'}, "
            'and has neither "annotations", as COCO captions, nor a "prompt"'
        )


def _json_lines(path: Path, text: str) -> Rows:
    place = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"line {number} of {path} is no JSON: {error.msg}: {line[:40]!r}"
            ) from None
        prompt = _entry(value, path, number)
        if isinstance(value, dict) and {"tag", "include", "prompt"} <= value.keys():
            prompt = Prompt(f"{place:05d}", prompt.text, prompt.category, value)
        yield f"line {number}", prompt
        place += 1


def _entry(value: Any, path: Path, number: int, kind: str = "line") -> Prompt:
    if isinstance(value, str):
        return Prompt("", _checked(value, path, number, kind))
    if not isinstance(value, dict):
        raise ValueError(f"{kind} {number} of {path} is no JSON object: {value!r:.40}")
    return _prompt(value, path, number, kind)


def _prompt(
    values: dict[str, Any], path: Path, number: int, kind: str = "line"
) -> Prompt:
    """The prompt of a row with names; what has no part in it is kept as `extra`."""
    # All of it is written into the folder of a run.
    _checked(json.dumps(values, ensure_ascii=False), path, number, kind)
    names = {name.lower(): name for name in values}

    def take(known: Sequence[str]) -> Any:
        name = next((names[x] for x in known if x in names), None)
        return None if name is None else rest.pop(name)

    rest = dict(values)
    text, own, category = take(TEXTS), take(IDS), take(CATEGORIES)
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)  # a class label
    if not isinstance(text, str):
        found = "none" if text is None else f"{text!r:.40}"
        raise ValueError(
            f"{kind} {number} of {path} must have a text as {' or '.join(TEXTS)}, and "
            f"has {found}"
        )
    return Prompt(
        id="" if own is None else str(own).strip(),
        text=_checked(text, path, number, kind),
        category=str(category) if category not in (None, "") else None,
        extra={k: x for k, x in rest.items() if x not in (None, "")},
    )


def _coco(path: Path, values: dict[str, Any]) -> Rows:
    """The longest caption of every image, of equally long ones the first."""
    longest: dict[Any, tuple[int, str, Any]] = {}
    for number, note in enumerate(values["annotations"], 1):
        try:
            image, caption = note["image_id"], note["caption"]
            if not (isinstance(image, int | str) and isinstance(caption, str)):
                raise TypeError
        except (KeyError, TypeError):
            raise ValueError(
                f"annotation {number} of {path} must have image_id and caption: "
                f"{note!r:.60}"
            ) from None
        caption = _checked(caption, path, number, "annotation")
        if image not in longest or len(caption) > len(longest[image][1]):
            longest[image] = (number, caption, note.get("id"))
    for image, (number, caption, note) in longest.items():
        extra = {} if note is None else {"annotation": note}
        yield f"annotation {number}", Prompt(str(image), caption, None, extra)


def _checked(text: str, path: Path, number: int, kind: str = "line") -> str:
    """The text without blanks around it; an empty one is for the run to refuse."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{kind} {number} of {path} has half a character: {text!r:.40}"
        ) from None
    return text.strip()


__all__ = ["load_prompts", "shard", "source_of"]
