"""The files of a path, and their rows with their sources: JSON lines, a JSON list, or parquet."""

import codecs
import dataclasses
import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.require import require


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a file."""

    source: str
    """Its place for error messages, counted from 1: 'train.jsonl:3', 'train.parquet: row 3'."""
    columns: dict[str, Any]

    def require_column(self, name: str, remedy: str) -> None:
        """Raises a ValueError, which ends with `remedy`, unless the row has a value in this column."""
        if self.columns.get(name) is None:
            has = ", ".join(self.columns) or "nothing"
            near = did_you_mean(name, (key for key in self.columns if key != name))
            raise ValueError(f"{self.source}: must have the column {brief(name)}. Got {has}.{near} {remedy}".rstrip())

    def text(self, what: str, value: Any, *, may_be_empty: bool = False) -> str:
        """Returns `value` if it is text that can be tokenized; else raises a ValueError that calls it `what`."""
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


def read_rows(field: str, paths: str | Sequence[str]) -> list[Row]:
    """The rows of the files of `find_files`, whose suffixes name their formats.

    Errors begin with `field`, the key of the config that names the files. They are ValueErrors, which name the file and
    the row, for one that is missing, of an unknown kind or malformed, or if all are empty.
    """
    files = find_files(field, paths)
    rows = [row for path in files for row in _read_file(field, path)]
    if not rows:
        got = f"the empty file {brief(files[0])}" if len(files) == 1 else f"{len(files)} empty files"
        raise ValueError(f"{field}: must hold at least one row. Got {got}.")
    return rows


def find_files(field: str, paths: str | Sequence[str]) -> list[str]:
    """The files that paths stand for: a file, the files of a folder, or those that match a pattern, sorted by name.

    The files of several paths come in the order of the paths. In a folder, hidden files, unknown formats and folders
    are left out. Raises ValueError if there are none, one is named twice, or those of a folder are of several formats
    or splits, or lack a shard.
    """
    files = [file for path in ([paths] if isinstance(paths, str) else paths) for file in _files_of(field, path)]
    require(bool(files), field, "must name at least one file", files)
    if twice := [path for path in files if files.count(path) > 1]:
        raise ValueError(f"{field}: must name each file once. Got {brief(twice[0])} {files.count(twice[0])} times.")
    return files


def _files_of(field: str, path: str) -> list[str]:
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path) and path:
        return _files_of_folder(field, path)
    if glob.has_magic(path) and "\0" not in path:
        files = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        require(bool(files), field, "a pattern must match at least one file", path)
        return files
    raise ValueError(f"{field}: must be an existing file, a folder or a pattern of files. Got {brief(path)}.")


def _files_of_folder(field: str, folder: str) -> list[str]:
    """The files of a folder, of one kind and one split, without a missing shard."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise ValueError(f"{field}: must be a folder that can be read. Got {brief(folder)}: {error}.") from error
    paths = {name: os.path.join(folder, name) for name in names if _suffix(name) in READERS}
    for path in paths.values():
        if not os.path.exists(path):
            raise ValueError(f"{field}: must be files that can be read. Got {brief(path)}, a link that leads nowhere.")
    paths = {name: path for name, path in paths.items() if os.path.isfile(path)}
    if not paths:
        inner = any(os.path.isdir(os.path.join(folder, name)) for name in names)
        remedy = f" Name the files of its folders by a pattern, as in '{os.path.join(folder, '**/*.jsonl')}'."
        raise ValueError(
            f"{field}: a folder must have files of a known kind ({', '.join(READERS)}). Got {brief(folder)}, with "
            f"{', '.join(names[:5]) or 'nothing in it'}.{remedy if inner else ''}"
        )
    kinds = {_suffix(name).removesuffix(".gz"): _suffix(name) for name in reversed(paths)}
    if len(kinds) > 1:
        raise ValueError(
            f"{field}: the files of a folder must be of one kind. Got {' and '.join(sorted(kinds))} in "
            f"{brief(folder)}. Name those that are meant by a pattern, as in "
            f"'{os.path.join(folder, '*' + kinds[min(kinds)])}'."
        )
    splits = sorted({split for split in map(_split, paths) if split})
    if len(splits) > 1:
        named = "train" if "train" in splits else splits[0]
        raise ValueError(
            f"{field}: the files of a folder must be of one split. Got {' and '.join(splits)} in {brief(folder)}. Name "
            f"the files of one by a pattern, as in '{os.path.join(folder, named + '*')}'."
        )
    _check_shards(field, folder, list(paths))
    return list(paths.values())


_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(?=[-.])")
"""The name of a shard, as Hugging Face's datasets write them: train-00000-of-00002.parquet."""
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?=[-_.\d])")


def _split(name: str) -> str:
    """The split that the name of a file begins with, such as 'train'; empty if it does not say."""
    found = _SHARD.match(name) or _SPLIT.match(name)
    return found[1] if found else ""


def _check_shards(field: str, folder: str, names: Sequence[str]) -> None:
    """Checks that all shards of a split are there."""
    shards = [found for name in names if (found := _SHARD.match(name))]
    counts = {int(found[3]) for found in shards}
    missing = sorted(set(range(max(counts, default=0))) - {int(found[2]) for found in shards})
    if len(counts) > 1 or missing:
        got = f"no shard {missing[0]:05d} of {max(counts):05d}" if missing else "shards of several such sets"
        raise ValueError(
            f"{field}: a folder must have all shards of its files. Got {got} in {brief(folder)}. Add the missing ones, "
            "or name those that are meant by a pattern."
        )


def _suffix(path: str) -> str:
    suffixes = Path(path).suffixes
    return "".join(suffixes[-2:] if path.lower().endswith(".gz") else suffixes[-1:]).lower()


def _read_file(field: str, path: str) -> list[Row]:
    suffix = _suffix(path)
    rule = f"must be a file of a known kind ({', '.join(READERS)})"
    require(suffix in READERS, field, rule, path, "Unpack or convert it.")
    try:
        return list(READERS[suffix](path))
    except OSError as error:
        raise ValueError(f"{field}: must be a file that can be read. Got {brief(path)}: {error}.") from error


def _read_json_lines(path: str) -> Iterator[Row]:
    """The objects of a file with one per line, which gzip may have packed. Blank lines are skipped."""
    text = Path(path).read_bytes()
    if path.lower().endswith(".gz"):
        try:
            text = gzip.decompress(text)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: must be a file that gzip packed. Got {_first_line(error)}.") from error
    for number, line in enumerate(text.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            yield _row(f"{path}:{number}", _parsed(f"{path}:{number}", line))


def _read_json(path: str) -> Iterator[Row]:
    """The objects of a JSON list, or of a file with one per line."""
    text = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
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
    ".jsonl.gz": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
"""Suffix of a file -> its reader."""


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
