"""Prompt sets as they are published, their ids, and what is refused in a line."""

import json

import pytest

from jaxspec.evaluation.prompts import load_prompts, shard, source_of
from jaxspec.evaluation.records import Prompt

# Lines of the published files: PartiPrompts (Apache-2.0), GenEval (MIT).
PARTI = """\
Prompt\tCategory\tChallenge\tNote
bond\tAbstract\tBasic\tBiology-inspired concepts with multiple meanings
Dogs playing poker\tAnimals\tImagination\tDescription of "Dogs Playing Poker"
"G I G G L E" painted in thick colorful lettering as graffiti on a faded red brick \
wall with a splotch of exploding white paint.\tIllustrations\tWriting & Symbols\t
"""
GENEVAL = """\
{"tag": "single_object", "include": [{"class": "bench", "count": 1}], \
"prompt": "a photo of a bench"}
{"tag": "single_object", "include": [{"class": "cow", "count": 1}], \
"prompt": "a photo of a cow"}
"""


def read(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_prompts(path)


def test_partiprompts_keep_their_quotes_and_categories(tmp_path):
    first, poker, giggle = read(tmp_path, "PartiPrompts.tsv", PARTI)
    assert (first.text, first.category) == ("bond", "Abstract")
    assert poker.extra["note"] == 'Description of "Dogs Playing Poker"'
    assert giggle.text.startswith('"G I G G L E" painted in thick')
    assert giggle.extra == {"challenge": "Writing & Symbols"}


def test_geneval_is_numbered_as_its_scorer_counts_and_kept_whole(tmp_path):
    bench, cow = read(tmp_path, "any.name", GENEVAL)
    assert (bench.id, cow.id) == ("00000", "00001")
    assert (cow.text, cow.category) == ("a photo of a cow", "single_object")
    assert cow.extra == json.loads(GENEVAL.splitlines()[1])


def test_a_folder_of_text_files_has_their_names_in_natural_order(tmp_path):
    for name, text in ("10", "ten\n"), ("9", " nine"), ("COCOval2014", "chairs"):
        (tmp_path / f"{name}.txt").write_text(text)
    prompts = [(p.id, p.text) for p in load_prompts(tmp_path)]
    assert prompts == [("9", "nine"), ("10", "ten"), ("COCOval2014", "chairs")]


def test_coco_has_the_longest_caption_of_every_image(tmp_path):
    """Of each image anew: the second's first caption is shorter than the first's."""
    rows = [
        (9, 1, "a very long caption of one"),
        (4, 2, "short"),
        (9, 3, "brief"),
        (4, 4, "a bit longer"),
        (4, 5, "equally long"),
    ]
    notes = [{"image_id": i, "id": k, "caption": c} for i, k, c in rows]
    found = read(tmp_path, "coco.json", json.dumps({"annotations": notes}))
    assert found == [
        Prompt("9", "a very long caption of one", None, {"annotation": 1}),
        Prompt("4", "a bit longer", None, {"annotation": 4}),
    ]


def test_tables_lists_and_plain_text(tmp_path):
    bom = b'\xef\xbb\xbfid,Text,style\r\n7,"a cat, a ""dog""",flat\r\n8,,\r\n'
    assert read(tmp_path, "a.csv", bom) == [
        Prompt("7", 'a cat, a "dog"', None, {"style": "flat"}),
        Prompt("8", ""),  # which the run refuses, as a sample of its own
    ]
    lines = '{"prompt": "x", "id": 3, "category": "c", "n": 1}\n\n{"caption": 207}\n'
    first, second = read(tmp_path, "b", lines)
    assert first == Prompt("3", "x", "c", {"n": 1}) and second.text == "207"
    texts = [p.text for p in read(tmp_path, "c", '["a", {"text": "b"}]')]
    assert texts == ["a", "b"]
    plain = "a cat, a dog\n\n  [red] 心 ☃\u2028tree \r\n{red} heart"
    texts = [p.text for p in read(tmp_path, "d", plain)]
    assert texts == ["a cat, a dog", "[red] 心 ☃\u2028tree", "{red} heart"]
    assert [p.text for p in read(tmp_path, "e", "a\rb\r")] == ["a", "b"]


def test_ids_are_of_the_text_and_stay_when_others_come_and_go(tmp_path):
    ids = [p.id for p in read(tmp_path, "a", "tree\nheart\ntree\nhat\ntree\n")]
    assert len(set(ids)) == 5 and [ids[2], ids[4]] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    assert [p.id for p in read(tmp_path, "b", "hat\nnew\n tree\n")][::2] == [
        ids[3],
        ids[0],
    ]


@pytest.mark.parametrize("shards", [1, 3, 7, 12])
def test_every_prompt_is_in_exactly_one_shard(shards):
    prompts = [Prompt(str(i), "x") for i in range(10)]
    parts = [shard(prompts, f"{i}/{shards}")[0] for i in range(shards)]
    ids = sorted(int(p.id) for part in parts for p in part)
    assert ids == list(range(10))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("part", ["3/3", "1", "-1/3", "0/0", "a/b", ""])
def test_shards_that_there_are_not(part):
    with pytest.raises(ValueError, match="a shard is I/N, with I from 0 to N - 1"):
        shard([], part)


def test_the_source_is_of_what_was_chosen(tmp_path):
    path = tmp_path / "a"
    prompts = read(tmp_path, "a", "tree\nheart\n")
    whole, one = source_of(path, prompts), source_of(path, prompts[:1])
    assert (whole.source, whole.count, one.count) == (str(path), 2, 1)
    assert whole.sha256 != one.sha256
    assert (
        whole.sha256 == source_of("copy", read(tmp_path, "b", "tree\n\nheart")).sha256
    )


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.txt", b"ok\n\xff\xfe\n", "line 2 of .*a.txt is not UTF-8"),
        ("a.txt", "\n \n", "holds no prompt"),
        ("a.csv", "foo,bar\n1,2\n", "has the columns foo, bar: one must be prompt"),
        ("a", "foo\tbar\n1\t2\n", "has the columns foo, bar: one must be prompt"),
        ("a.csv", "prompt,x\na,b\nc\n", "line 3 of .* has 1 cells, and the header 2"),
        ("a.csv", 'prompt\n"a b\n', "line 2 of .*a.csv: unexpected end of data"),
        ("a", '{"prompt": "a"}\nnope\n', "line 2 of .* is no JSON: .*'nope'"),
        ("a", '[\n "a",\n oops]', "line 3 of .* is no JSON"),
        ("a", '{"id": 1}\n{"id": 2}', "line 1 of .* must have a text as prompt or"),
        ("a", '{"prompt": ["a"]}', r"line 1 of .* and has \['a'\]"),
        ("a", '{"foo": 1}', "is a JSON object with foo, and has neither"),
        ("a", '{"annotations": [{"id": 1}]}', "annotation 1 of .* must have image_id"),
        ("a", '{"id":1,"text":"x"}\n{"id":1,"text":"y"}', "id '1', as has line 1: ids"),
        ("a", r'{"prompt": "\ud800"}', "line 1 of .* has half a character"),
        ("a", r'{"prompt": "a", "id": "\ud800"}', "line 1 of .* has half a character"),
        (
            "a",
            '{"annotations": [{"image_id": 1, "caption": 5}]}',
            "annotation 1 of .* m",
        ),
        ("a.csv", "prompt,Prompt\na,b\n", "a.csv has two columns 'prompt'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_line(tmp_path, name, content, said):
    with pytest.raises(ValueError, match=said) as error:
        read(tmp_path, name, content)
    assert "\n" not in str(error.value)


def test_a_place_without_prompts(tmp_path):
    with pytest.raises(ValueError, match="holds no .txt file"):
        load_prompts(tmp_path)
    with pytest.raises(FileNotFoundError, match="no file or folder of prompts .*none"):
        load_prompts(tmp_path / "none")
