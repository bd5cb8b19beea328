"""Files of JSON lines: one strict JSON object per line, appended and flushed, readable while a run is writing."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class JsonLinesWriter:
    """Appends records to a file; whoever reads it sees only whole lines, each at once.

    A killed run may leave half a line at the end of its file. Appending to such a file removes the half line first.
    """

    def __init__(self, path: Path) -> None:
        _mend_last_line(path)
        # A lone surrogate, as a tokenizer may give for half a character, is written as its JSON escape.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one line. NaN and infinity are not JSON and raise a ValueError: see `split_non_finite`."""
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a file, in the order of writing. A last line that is still being written is left out.

    Raises:
        ValueError: A line is not a JSON object.
    """
    *lines, last = path.read_bytes().split(b"\n")
    if _parses(last):
        lines.append(last)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}). Got {line[:80]!r}.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: every line must be a JSON object. Got {line[:80]!r}.")
        records.append(record)
    return records


def split_non_finite(values: Mapping[str, float]) -> tuple[dict[str, float | None], list[str]]:
    """The values with null for NaN and infinity, which JSON cannot say, and the names of those."""
    non_finite = [name for name, value in values.items() if not math.isfinite(value)]
    return {name: float(value) if math.isfinite(value) else None for name, value in values.items()}, non_finite


def _mend_last_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    last = content[content.rfind(b"\n") + 1 :]
    if not last:
        return
    with path.open("r+b") as file:
        if _parses(last):
            file.seek(0, 2)
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(last))


def _parses(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
