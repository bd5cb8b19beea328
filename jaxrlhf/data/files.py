"""The rows of files, each with the place where it was read: JSON lines, a JSON list, or parquet."""

import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from jaxrlhf.brief import brief
from jaxrlhf.suggest import did_you_mean


@dataclasses.dataclass(frozen=True)
class Row:
    """A row as it was read."""

    source: str
    """Where, for error messages: 'train.jsonl:3', 'train.parquet: row 3'. Counted from 1."""
    columns: dict[str, Any]

    def require_column(self, name: str, remedy: str) -> None:
        """Raises ValueError, with `remedy` at its end, unless the row has a value under this name."""
        if self.columns.get(name) is None:
            has = ", ".join(self.columns) or "nothing"
            near = did_you_mean(name, (key for key in self.columns if key != name))
            raise ValueError(f"{self.source}: must have the column {brief(name)}. Got {has}.{near} {remedy}".rstrip())

    def text(self, what: str, value: Any, *, may_be_empty: bool = False) -> str:
        """`value`, if it is text that can be tokenized. `what` is its name in the ValueError that says it is not."""
        if not isinstance(value, str):
            remedy = "Set data.chat to 'messages'." if isinstance(value, list) else "Write it in quotes."
            raise ValueError(f"{self.source}: {what} must be a string. Got {repr(value)[:60]}. {remedy}")
        if not value and not may_be_empty:
            raise ValueError(f"{self.source}: {what} must not be empty. Got ''. Remove the row or fill it in.")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{self.source}: {what} must be valid Unicode. Got {value[:60]!r}: {error}.") from error
        return value


def read_rows(field: str, path: str) -> list[Row]:
    """The rows of a file, read by its suffix. `field` is the key of the config that names the file.

    Raises:
        ValueError: The file is missing, empty, of an unknown kind or malformed: says the file and the row.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{field}: must be an existing file. Got {brief(path)}.")
    suffix = "".join(Path(path).suffixes[-2:] if path.lower().endswith(".gz") else Path(path).suffixes[-1:]).lower()
    if suffix not in READERS:
        raise ValueError(
            f"{field}: must be a file of a known kind ({', '.join(READERS)}). Got {brief(path)}. Unpack or convert it."
        )
    try:
        rows = list(READERS[suffix](path))
    except OSError as error:
        raise ValueError(f"{field}: must be a file that can be read. Got {brief(path)}: {error}.") from error
    if not rows:
        raise ValueError(f"{field}: must hold at least one row. Got the empty file {brief(path)}.")
    return rows


def _read_json_lines(path: str) -> Iterator[Row]:
    """The objects of a file, one per line. Blank lines are skipped."""
    yield from _json_lines(path, Path(path).read_bytes())


def _read_packed_json_lines(path: str) -> Iterator[Row]:
    """The same, out of a file that gzip packed."""
    try:
        text = gzip.decompress(Path(path).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: must be a file that gzip packed. Got {_first_line(error)}.") from error
    yield from _json_lines(path, text)


def _json_lines(path: str, text: bytes) -> Iterator[Row]:
    for number, line in enumerate(text.split(b"\n"), start=1):
        if line.strip():
            yield _row(f"{path}:{number}", _parsed(f"{path}:{number}", line))


def _read_json(path: str) -> Iterator[Row]:
    """The objects of a JSON list; a file that does not begin with one has an object per line."""
    text = Path(path).read_bytes()
    if not text.lstrip().startswith(b"["):
        yield from _read_json_lines(path)
        return
    for number, item in enumerate(_parsed(path, text), start=1):
        yield _row(f"{path}: row {number}", item)


def _read_parquet(path: str) -> Iterator[Row]:
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read()
        columns = [column.to_pylist() for column in table.columns]
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: must be a parquet file. Got {_first_line(error)}.") from error
    names = table.column_names
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path}: a column may be there once. Got {brief(twice[0])} {names.count(twice[0])} times.")
    for number in range(table.num_rows):
        columns_here = {name: column[number] for name, column in zip(names, columns, strict=True)}
        yield Row(f"{path}: row {number + 1}", columns_here)


READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_packed_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
"""Suffix of a file -> how it is read."""


def _parsed(source: str, text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{source}: must be JSON in UTF-8. Got {_start(text)}: {error}.") from error
    except RecursionError:
        raise ValueError(f"{source}: must be JSON of fewer levels. Got {_start(text)}.") from None


def _row(source: str, item: Any) -> Row:
    if not isinstance(item, dict):
        raise ValueError(f'{source}: must be a JSON object. Got {repr(item)[:60]}. Write {{"prompt": ...}}.')
    return Row(source, item)


def _start(text: bytes) -> str:
    """The start of a line, for error messages."""
    return repr(text[:60].decode(errors="replace"))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
