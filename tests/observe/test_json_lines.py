import contextlib
from pathlib import Path

import pytest

from jaxrlhf.observe.json_lines import JsonLinesWriter, read_json_lines, split_non_finite, truncate


def test_each_line_is_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with contextlib.closing(JsonLinesWriter(path)) as writer:
        writer.write({"a": 1})
        assert read_json_lines(path) == [{"a": 1}]
        writer.write({"a": "é\u2028\n"})
        assert read_json_lines(path) == [{"a": 1}, {"a": "é\u2028\n"}]
    assert path.read_bytes() == '{"a": 1}\n{"a": "é\u2028\\n"}\n'.encode()


def test_half_a_character_survives(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with contextlib.closing(JsonLinesWriter(path)) as writer:
        writer.write({"a": "x\udce9y"})
    assert read_json_lines(path) == [{"a": "x\udce9y"}]


def test_nan_is_refused(tmp_path: Path) -> None:
    with (
        contextlib.closing(JsonLinesWriter(tmp_path / "x")) as writer,
        pytest.raises(ValueError, match="not JSON compliant"),
    ):
        writer.write({"a": float("nan")})


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b'{"a": 1}\n{"a": 2', [{"a": 1}]),
        (b'{"a": 1}\n{"a": "\xc3', [{"a": 1}]),
        (b'{"a": 1}\n7', [{"a": 1}]),
        (b'{"a": 1}\n{"a": 2}', [{"a": 1}, {"a": 2}]),
        (b'{"a', []),
        (b"", []),
    ],
)
def test_what_a_killed_run_left_is_read(tmp_path: Path, left: bytes, kept: list[dict[str, int]]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(left)
    assert read_json_lines(path) == kept


@pytest.mark.parametrize("line", ["{'a': 1}", "[1]", ""])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: "):
        read_json_lines(path)


def test_split_non_finite() -> None:
    values, names = split_non_finite({"a": 1, "b": float("nan"), "c": -0.5, "d": float("-inf")})
    assert values == {"a": 1.0, "b": None, "c": -0.5, "d": None}
    assert names == {"non_finite": ["b", "d"]}


LONG = "ü" * 70_000
"""Longer than any buffer on the way."""


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b'{"a": 1}\n{"a": 2}\n{"a": 3}\n', b'{"a": 1}\n{"a": 2}\n'),
        # Half a last line goes; a whole one without its line break gets it.
        (b'{"a": 1}\n{"a": 3}\n{"a": 2, "b', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"a": "\xc3', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"a": 2}', b'{"a": 1}\n{"a": 2}\n'),
        (b'{"a": 3}', b""),
        (b'{"a', b""),
        (b"", b""),
        # Kept lines stay byte for byte.
        ('{"a":1,  "é": "四\u2028\\n"}\n{"a": 4}\n'.encode(), '{"a":1,  "é": "四\u2028\\n"}\n'.encode()),
        (f'{{"a": 9, "b": "{LONG}"}}\n{{"a": 0, "b": "{LONG}"}}\n'.encode(), f'{{"a": 0, "b": "{LONG}"}}\n'.encode()),
    ],
)
def test_truncate_drops_records_and_mends_the_end(tmp_path: Path, left: bytes, kept: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(left)
    truncate(path, lambda record: record["a"] <= 2)
    assert path.read_bytes() == kept
    assert list(tmp_path.iterdir()) == [path]
    with contextlib.closing(JsonLinesWriter(path)) as writer:
        writer.write({"a": 3})
    assert path.read_bytes() == kept + b'{"a": 3}\n'


def test_truncate_without_a_file_makes_none(tmp_path: Path) -> None:
    truncate(tmp_path / "x.jsonl", lambda record: True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ['{"a": 1}\nbroken\n{"a": 2}\n', '{"a": 1}\n{"b": 2}\n'])
def test_a_truncation_that_fails_leaves_everything_as_it_was(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises((ValueError, KeyError)):
        truncate(path, lambda record: record["a"] <= 2)
    assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]
