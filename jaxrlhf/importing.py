"""A user's own Python, by the name that a config calls it: `module:name` or `path/to/file.py:name`."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from jaxrlhf.brief import brief, cut
from jaxrlhf.suggest import did_you_mean

_files: dict[str, tuple[tuple[int, int], ModuleType]] = {}
"""Path -> time and size of the file when it was imported, and its module."""


def find_function(name: str, *, what: str) -> Any:
    """What `module:name` or `path/to/file.py:name` stands for.

    A file is imported once, and again when it has changed. What it is may be anything: the caller asks for more.

    Args:
        what: What it is to be, for error messages: `Reward`.

    Raises:
        ValueError: There is no such module or file, it does not import, or it has nothing of that name.
    """
    where = f"{what} {brief(name)}"
    place, _, attribute = name.rpartition(":")
    module = _import(where, place)
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"{where}: must name a function of {place}. Got {brief(attribute)}. There: {', '.join(known) or 'none'}."
            f"{did_you_mean(attribute, known)}"
        )
    return getattr(module, attribute)


def imported_files() -> tuple[str, ...]:
    """Files that were imported by their paths: what another process must import to know their functions."""
    return tuple(_files)


def import_files(paths: Iterable[str]) -> None:
    """Import files by their paths, under the same names as in any process."""
    for path in paths:
        _import_file(pathlib.Path(path))


def last_line(error: BaseException) -> str:
    """Where an error was raised, as file:line."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def failure(error: BaseException, function: Any) -> str:
    """An error inside a user's function, and the line of the user's code where it was raised.

    That is the last line, after the call itself, outside of this package and of what Python is installed with. Where
    there is none, it is that of the function.
    """
    others = (str(pathlib.Path(__file__).parent) + os.sep, str(pathlib.Path(os.__file__).parent) + os.sep, "<")
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if not frame.filename.startswith(others) and "site-packages" not in frame.filename]
    code = getattr(inspect.unwrap(function), "__code__", None)
    at = ""
    if own or frames:
        last = (own or frames)[-1]
        at = f", at {last.filename}:{last.lineno}"
    elif code is not None:
        at = f", at {code.co_filename}:{code.co_firstlineno}"
    return f"{type(error).__name__}: {cut(str(error)).removesuffix('.')}{at}"


def _import(where: str, place: str) -> ModuleType:
    if place.endswith(".py") and not os.path.isfile(place):
        raise ValueError(f"{where}: must be in an existing file. Got {brief(place)}.")
    try:
        return _import_file(pathlib.Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{where}: its module must import. Got {type(error).__name__}: {cut(str(error))}, at {last_line(error)}."
        ) from error


def _import_file(path: pathlib.Path) -> ModuleType:
    whole, status = str(path.resolve()), path.stat()
    stamp = (status.st_mtime_ns, status.st_size)
    if whole in _files and _files[whole][0] == stamp:
        return _files[whole][1]
    digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"file_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    _files[whole] = stamp, module
    return module
