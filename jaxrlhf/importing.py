"""A user's own Python, by its name in a config: `module:name` or `path/to/file.py:name`."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
from collections.abc import Iterable
from types import CodeType, ModuleType
from typing import Any

from jaxrlhf.brief import brief, cut, did_you_mean

_files: dict[str, tuple[tuple[int, int], ModuleType]] = {}
"""Path -> time and size of the file at its import, and its module."""
_given: dict[str, Any] = {}
"""Name -> an object from Python code, which no other process can find."""
GIVEN = "python"
"""The prefix of names of objects from Python code: `python:name`."""


def find_function(name: str, *, what: str) -> Any:
    """The object that `module:name` or `path/to/file.py:name` names, of any type.

    A file is imported once, and again when it has changed. Raises ValueError, which begins with the purpose of the
    object (`what`: `Reward`), if there is no such module or file, it does not import, or has nothing of that name.
    """
    where = f"{what} {brief(name)}"
    place, _, attribute = name.rpartition(":")
    if place == GIVEN:
        if attribute not in _given:
            raise ValueError(
                f"{where}: must have been handed over by Python in this process. Got {', '.join(_given) or 'none'}. "
                "Go on with the run from there, or put the function into a file: path/to/file.py:name."
            )
        return _given[attribute]
    module = _import(where, place)
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"{where}: must name a function of {place}. Got {brief(attribute)}. There: {', '.join(known) or 'none'}."
            f"{did_you_mean(attribute, known)}"
        )
    return getattr(module, attribute)


def name_of(function: Any, name: str | None = None) -> str:
    """The name by which `find_function` finds a function, or an object that is to be called `name`.

    It is `module:name` if the module has the function under its name, so that any process finds it. Functions of a
    notebook or script, nested functions and objects without a name are stored here, the latest one under its name.
    """
    module = getattr(function, "__module__", None)
    name = str(name or getattr(function, "__qualname__", type(function).__name__))
    if module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is function:
        return f"{module}:{name}"
    _given[name] = function
    return f"{GIVEN}:{name}"


def imported_files() -> tuple[str, ...]:
    """The files that were imported by their paths, which another process must import to have their functions."""
    return tuple(_files)


def import_files(paths: Iterable[str]) -> None:
    """Imports files by their paths, under the same module names in every process."""
    for path in paths:
        _import_file(pathlib.Path(path))


def failure(error: BaseException, function: Any = None) -> str:
    """An error of a user's code as text, with the line of that code where it was raised.

    That is the last line of the traceback outside of this package and of Python's installed packages, or else the last
    one in the file of the function that was called, or else the last of all.
    """
    others = (str(pathlib.Path(__file__).parent) + os.sep, str(pathlib.Path(os.__file__).parent) + os.sep, "<")
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if not frame.filename.startswith(others) and "site-packages" not in frame.filename]
    code = _code(function)
    at = ""
    if isinstance(error, SyntaxError) and error.filename:
        at = f", at {error.filename}:{error.lineno}"
    elif own or frames:
        last = (own or [frame for frame in frames if code and frame.filename == code.co_filename] or frames)[-1]
        at = f", at {last.filename}:{last.lineno}"
    elif code is not None:
        at = f", at {code.co_filename}:{code.co_firstlineno}"
    said = cut(" ".join(str(error).split())).removesuffix(".")
    return f"{type(error).__name__}{': ' if said else ''}{said}{at}"


def _code(function: Any) -> CodeType | None:
    """The code of a function, inside of partials and decorators, or of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(function):
        return None
    function = inspect.unwrap(function)
    return getattr(function if hasattr(function, "__code__") else type(function).__call__, "__code__", None)


def _import(where: str, place: str) -> ModuleType:
    if place.endswith(".py") and not os.path.isfile(place):
        raise ValueError(f"{where}: must be in an existing file. Got {brief(place)}.")
    try:
        return _import_file(pathlib.Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{where}: its module must import. Got {failure(error)}.") from error


def _import_file(path: pathlib.Path) -> ModuleType:
    whole, status = str(path.resolve()), path.stat()
    stamp = (status.st_mtime_ns, status.st_size)
    if whole in _files and _files[whole][0] == stamp:
        return _files[whole][1]
    digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"file_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up in it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    _files[whole] = stamp, module
    return module
