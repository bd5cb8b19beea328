"""Files of JSON lines: one strict JSON object per line, appended and flushed, readable while a run is writing."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrlhf.writing import replacing, writing


class JsonLinesWriter:
    """Appends records to a file. Readers see each line as soon as it is written, and whole.

    A killed run may leave half a line at the end of its file, which `truncate` removes before the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            # unbuffered: a buffer would be flushed, and fail, once more when the file is closed
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one line, at worst a part of it. NaN and infinity raise ValueError: see `split_non_finite`."""
        # A lone surrogate, as a tokenizer may give for half a character, is written as its JSON escape.
        line = f"{json.dumps(record, ensure_ascii=False, allow_nan=False)}\n".encode("utf-8", "backslashreplace")
        with writing(self._path):
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Returns when every line is on the disk, so that none is lost if the machine stops."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a file; raises ValueError if a line, but for half a last one, is not a JSON object."""
    return [record for _, record in _lines_and_records(path)]


def truncate(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Drops the records for which `keep` is False, and a half-written last line. Other lines stay byte for byte. Raises
    ValueError if a line other than the last is not a JSON object.

    The file is replaced in one move, so that readers, also after a kill, find the old file or the new one. No writer
    may have it open. A file that does not exist is left so.
    """
    if not path.exists():
        return
    kept = [line for line, record in _lines_and_records(path) if keep(record)]
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())


def split_non_finite(values: Mapping[str, float]) -> tuple[dict[str, float | None], dict[str, list[str]]]:
    """The values with None for NaN and infinity, which JSON does not have, and the names of these as `non_finite`."""
    names = [name for name, value in values.items() if not math.isfinite(value)]
    whole = {name: None if name in names else float(value) for name, value in values.items()}
    return whole, {"non_finite": names} if names else {}


def _lines_and_records(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """All lines with their records, without a half-written last line."""
    *lines, last = path.read_bytes().split(b"\n")
    if _parses(last):
        lines.append(last)
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}). Got {line[:80]!r}.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: every line must be a JSON object. Got {line[:80]!r}.")
        found.append((line, record))
    return found


def _parses(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
