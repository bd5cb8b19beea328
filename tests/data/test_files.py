"""Rows of JSON lines, JSON lists and parquet are the same rows, and every broken file says where it is broken."""

import datetime
import gzip
import json
import os
import re

import pyarrow
import pytest
from pyarrow import parquet

from jaxrlhf.data.files import read_rows

ROWS = [
    {"prompt": "a", "answer": 1, "messages": [{"role": "user", "content": "é"}]},
    {"prompt": "b", "answer": 2, "messages": []},
]


def write_parquet(path, rows, schema=None):
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
    return str(path)


def test_all_kinds_of_files_hold_the_same_rows(tmp_path):
    (tmp_path / "lines.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)))
    (tmp_path / "lines.json").write_text("\r\n".join(map(json.dumps, ROWS)))
    (tmp_path / "list.json").write_text(json.dumps(ROWS, indent=1))
    write_parquet(tmp_path / "table.PARQUET", ROWS)
    places = {
        "lines.jsonl": (":1", ":3"),
        "lines.json": (":1", ":2"),
        "list.json": (": row 1", ": row 2"),
        "table.PARQUET": (": row 1", ": row 2"),
    }
    for name, expected in places.items():
        rows = read_rows("data.path", str(tmp_path / name))
        assert [row.columns for row in rows] == ROWS
        assert [row.source for row in rows] == [f"{tmp_path / name}{place}" for place in expected]


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path):
    (tmp_path / "level=3").mkdir()
    path = write_parquet(tmp_path / "level=3" / "x.parquet", [{"prompt": "a"}])
    assert read_rows("data.path", path)[0].columns == {"prompt": "a"}


def test_types_of_parquet_become_those_of_python(tmp_path):
    row = {"day": datetime.date(2024, 1, 2), "none": None, "number": 0.5, "tags": ["x", None], "nested": {"a": 1}}
    assert read_rows("data.path", write_parquet(tmp_path / "x.parquet", [row]))[0].columns == row


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.csv",
            b"a,b",
            r"data\.path: must be a file of a known kind \(\.jsonl, \.jsonl\.gz, \.json, \.parquet\)\. Got '.*x\.csv'",
        ),
        ("x", b"{}", r"must be a file of a known kind"),
        ("x.jsonl", b"\n \n", r"data\.path: must hold at least one row\. Got the empty file '.*x\.jsonl'"),
        ("x.json", b"[]", r"must hold at least one row"),
        ("x.json", b"[{},", r"x\.json: must be JSON in UTF-8\. Got '\[\{\},': Expecting value"),
        ("x.json", b"[{}, 3]", r"x\.json: row 2: must be a JSON object\. Got 3\."),
        ("x.jsonl", b"{}\n[", r"x\.jsonl:2: must be JSON in UTF-8\. Got '\[': Expecting value"),
        ("x.jsonl", b"{}\n" + b"[" * 100_000, r"x\.jsonl:2: must be JSON of fewer levels\. Got '\[\["),
        ("x.jsonl", b'{"a": ' + b"1" * 5000 + b"}", r"x\.jsonl:1: must be JSON in UTF-8\. .*Exceeds the limit"),
        ("x.parquet", b"", r"x\.parquet: must be a parquet file\. Got Parquet file size is 0 bytes"),
        ("x.parquet", b"PAR1" * 9, r"x\.parquet: must be a parquet file\. Got "),
        ("x.parquet", b'{"prompt": "a"}', r"x\.parquet: must be a parquet file\. Got Parquet magic bytes not found"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows("data.path", str(tmp_path / name))


def test_broken_tables(tmp_path):
    with pytest.raises(ValueError, match=re.escape("must hold at least one row. Got the empty file")):
        read_rows("x", write_parquet(tmp_path / "x.parquet", [], pyarrow.schema([("prompt", pyarrow.string())])))
    twice = pyarrow.table([["a"], ["b"]], names=["q", "q"])
    parquet.write_table(twice, tmp_path / "y.parquet")
    with pytest.raises(ValueError, match=r"y\.parquet: a column may be there once\. Got 'q' 2 times\."):
        read_rows("x", str(tmp_path / "y.parquet"))


@pytest.mark.parametrize("path", ["/nowhere/x.jsonl", "", "a\0b.jsonl", "a\0*.jsonl", "x" * 5000 + ".jsonl"])
def test_no_file(path):
    with pytest.raises(
        ValueError, match=r"data\.path: must be an existing file, a folder or a pattern of files\. Got '"
    ):
        read_rows("data.path", path)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    text = "\ufeff" + "\n".join(map(json.dumps, ROWS))
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "y.json").write_text(f"\ufeff{json.dumps(ROWS)}", encoding="utf-8")
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("x.jsonl", "y.json", "z.jsonl.gz"):
        assert [row.columns for row in read_rows("data.path", str(tmp_path / name))] == ROWS


def test_shards_are_read_in_the_order_of_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    for name in ("b.jsonl", "a.jsonl", ".hidden.jsonl", "README.md", "c.jsonl"):
        (tmp_path / "shards" / name).write_text(f'{{"prompt": "{name[0]}"}}\n' * (name != "c.jsonl"))
    (tmp_path / "shards" / "folder.jsonl").mkdir()
    write_parquet(tmp_path / "more.parquet", [{"prompt": "m"}])
    every = ["shards/a.jsonl:1", "shards/b.jsonl:1"]
    assert [row.source for row in read_rows("data.path", "shards")] == every
    assert [row.source for row in read_rows("data.path", "sha*/?.jsonl")] == every
    assert [row.source for row in read_rows("data.path", "**/[ab].jsonl")] == every
    several = read_rows("data.path", ["more.parquet", "shards/b.jsonl"])
    assert [row.source for row in several] == ["more.parquet: row 1", "shards/b.jsonl:1"]
    (tmp_path / "x[1].jsonl").write_text('{"prompt": "a name, no pattern"}')
    assert [row.source for row in read_rows("data.path", "x[1].jsonl")] == ["x[1].jsonl:1"]


def test_what_stands_for_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed").mkdir()
    write_parquet(tmp_path / "mixed" / "x.parquet", [{"prompt": "a"}])
    for name in ("x.jsonl", "y.jsonl"):
        (tmp_path / "mixed" / name).write_text("")
    (tmp_path / "none").mkdir()
    for paths, message in {
        "mixed": "data.path: the files of a folder must be of one kind. Got .jsonl and .parquet in 'mixed'. Name those "
        "that are meant by a pattern, as in 'mixed/*.jsonl'.",
        "none": "data.path: a folder must have files of a known kind (.jsonl, .jsonl.gz, .json, .parquet). Got 'none', "
        "with nothing in it.",
        "none/*": "data.path: a pattern must match at least one file. Got 'none/*'.",
        ("mixed/x.parquet", "mixed/*.parquet"): "data.path: must name each file once. Got 'mixed/x.parquet' 2 times.",
        ("mixed/x.jsonl", "mixed/y.jsonl"): "data.path: must hold at least one row. Got 2 empty files.",
        (): "data.path: must name at least one file. Got [].",
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            read_rows("data.path", paths)


def test_packed_and_plain_lines_are_of_one_kind(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}'))
    rows = read_rows("data.path", str(tmp_path))
    assert [row.source for row in rows] == [f"{tmp_path}/a.jsonl.gz:1", f"{tmp_path}/b.jsonl:1"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["test.jsonl", "train.jsonl"],
            "data.path: the files of a folder must be of one split. Got test and train in 'x'. Name the files of one "
            "by a pattern, as in 'x/train*'.",
        ),
        (["dev_1.jsonl", "eval.jsonl"], "Got dev and eval in 'x'. Name the files of one by a pattern, as in 'x/dev*'."),
        (
            ["train_a-00000-of-00001.jsonl", "train_b-00000-of-00001-0f3.jsonl"],
            "must be of one split. Got train_a and train_b in 'x'.",
        ),
        (
            ["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"],
            "data.path: a folder must have all shards of its files. Got no shard 00001 of 00003 in 'x'. Add the "
            "missing ones, or name those that are meant by a pattern.",
        ),
        (["train-00000-of-00001.jsonl", "train-00001-of-00002.jsonl"], "Got shards of several such sets in 'x'."),
    ],
)
def test_what_a_folder_must_not_mix(tmp_path, monkeypatch, names, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    for name in names:
        (tmp_path / "x" / name).write_text('{"prompt": "a"}')
    with pytest.raises(ValueError, match=re.escape(message)):
        read_rows("data.path", "x")
    assert len(read_rows("data.path", f"x/{names[-1]}")) == 1


def test_splits_and_shards_that_go_together(tmp_path):
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "training.jsonl", "more.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a"}')
    assert len(read_rows("data.path", str(tmp_path))) == 4


def test_folders_of_folders_and_links_to_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x" / "inner").mkdir(parents=True)
    (tmp_path / "x" / "inner" / "a.jsonl").write_text("{}")
    message = "Got 'x', with inner. Name the files of its folders by a pattern, as in 'x/**/*.jsonl'."
    with pytest.raises(ValueError, match=re.escape(message)):
        read_rows("data.path", "x")
    (tmp_path / "x" / "b.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    message = "data.path: must be files that can be read. Got 'x/b.jsonl', a link that leads nowhere."
    with pytest.raises(ValueError, match=re.escape(message)):
        read_rows("data.path", "x")


def test_a_folder_that_may_not_be_listed(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ValueError, match=r"^data\.path: must be a folder that can be read\. Got '.*': .*Permission"):
        read_rows("data.path", str(tmp_path))


def test_a_broken_file_of_a_folder_is_named_with_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "b"}\n{"prompt": '))
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz:2: must be JSON in UTF-8\. Got '\{\"prompt\": '"):
        read_rows("data.path", str(tmp_path))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "b"}' * 99)[:-9])
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz: must be a file that gzip packed\. Got "):
        read_rows("data.path", str(tmp_path))
