"""Counts of compiled programs on disk, under keys made of all that decides them.

key = fingerprint({"subject": call, "target": "A100 ...", "sources": source_digest()})
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrlhf.writing import write_atomically

_ROOMS = ("generation", "models", "planner/compiled", "programs", "schedules", "sharding")
"""Rooms whose sources decide what a program is, how it is compiled, and how it is counted."""


class CostCache:
    """A folder with a file for each key. Several processes may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> dict[str, Any] | None:
        """The value of a key; None if there is none, or if its file is damaged."""
        try:
            return json.loads((self.folder / f"{key}.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            return None

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Saves a value, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"{key}.json", json.dumps(value))


def default_folder(name: str = "costs") -> Path:
    """The folder for a user's cached data."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrlhf" / name


def fingerprint(value: Any) -> str:
    """A digest of a value, the same in every process. Raises TypeError if the content of a part of it is not known."""
    digest = hashlib.sha256()
    for text in _texts(value, "value"):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:32]


@functools.cache
def source_digest() -> str:
    """A digest of the sources that decide what programs are, and how they are counted."""
    folder = Path(__file__).parents[2]
    digest = hashlib.sha256()
    paths = [path for room in _ROOMS for path in (folder / room).rglob("*.py")]
    for path in sorted(paths):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _texts(value: Any, where: str) -> Iterable[str]:
    """A value in pieces of text. `where` is its place in the whole, for errors."""
    yield f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, bool | int | float | str | bytes | np.dtype):
        yield repr(value)
    elif isinstance(value, enum.Enum):
        yield value.name
    elif isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__}"
        yield _source_of(value.__module__)
    elif isinstance(value, jax.ShapeDtypeStruct):
        yield f"{value.dtype}{value.shape}"
    elif isinstance(value, functools.partial):
        yield from _texts((value.func, value.args, value.keywords), where)
    elif dataclasses.is_dataclass(value):
        yield _source_of(type(value).__module__)
        for field in dataclasses.fields(value):
            yield field.name
            yield from _texts(getattr(value, field.name), f"{where}.{field.name}")
    elif isinstance(value, Mapping):
        yield str(len(value))
        for key, item in value.items():
            yield from _texts(key, f"{where}, key {key!r}")
            yield from _texts(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield str(len(value))
        for i, item in enumerate(value):
            yield from _texts(item, f"{where}[{i}]")
    elif isinstance(value, set | frozenset):
        yield from sorted(fingerprint(item) for item in value)
    elif inspect.isfunction(value) and not value.__closure__:
        yield f"{value.__module__}.{value.__qualname__}"
        yield _source_of(value.__module__)
    else:
        raise TypeError(
            f"{where}: must be data, or a function of a module, to be found again. Got {type(value).__name__}."
        )


@functools.cache
def _source_of(module: str) -> str:
    """A digest of the file of a module, which may be a user's own."""
    found = sys.modules.get(module)
    path = getattr(found, "__file__", None)
    if path is None or not os.path.isfile(path):
        return module
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
