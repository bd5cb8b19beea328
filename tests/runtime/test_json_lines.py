from pathlib import Path

import pytest

from jaxrlhf.runtime.json_lines import JsonLinesWriter, read_json_lines, split_non_finite


def test_each_line_is_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with JsonLinesWriter(path) as writer:
        writer.write({"a": 1})
        assert read_json_lines(path) == [{"a": 1}]
        writer.write({"a": "é\u2028\n"})
        assert read_json_lines(path) == [{"a": 1}, {"a": "é\u2028\n"}]
    assert path.read_bytes() == '{"a": 1}\n{"a": "é\u2028\\n"}\n'.encode()


def test_half_a_character_survives(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with JsonLinesWriter(path) as writer:
        writer.write({"a": "x\udce9y"})
    assert read_json_lines(path) == [{"a": "x\udce9y"}]


def test_nan_is_refused(tmp_path: Path) -> None:
    with JsonLinesWriter(tmp_path / "x") as writer, pytest.raises(ValueError, match="not JSON compliant"):
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
def test_what_a_killed_run_left_is_mended(tmp_path: Path, left: bytes, kept: list[dict[str, int]]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(left)
    assert read_json_lines(path) == kept
    with JsonLinesWriter(path) as writer:
        writer.write({"a": 9})
    assert read_json_lines(path) == [*kept, {"a": 9}]


@pytest.mark.parametrize("line", ["{'a': 1}", "[1]", ""])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: "):
        read_json_lines(path)


def test_split_non_finite() -> None:
    values, names = split_non_finite({"a": 1, "b": float("nan"), "c": -0.5, "d": float("-inf")})
    assert values == {"a": 1.0, "b": None, "c": -0.5, "d": None}
    assert names == ["b", "d"]
