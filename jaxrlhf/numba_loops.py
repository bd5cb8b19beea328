"""Inner loops that numba compiles where it is installed, and Python runs where it is not."""

import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Integers = Any
"""An array of int64 where loops are compiled, else a list: what is faster."""
_PACKAGE = __name__.partition(".")[0]


def numba_is_there() -> bool:
    """True if numba is installed, which compiles the loops."""
    try:
        import numba  # noqa: F401 (only whether it is there)
    except ImportError:
        return False
    return True


def integers(values: Iterable[int], *, compiled: bool) -> Integers:
    """A sequence as loops take it."""
    if not compiled:
        return [int(value) for value in values]
    return np.array(values if isinstance(values, np.ndarray) else list(values), np.int64)


def loops(*modules: types.ModuleType, compiled: bool) -> Mapping[str, Callable[..., Any]]:
    """The functions of some modules by name, compiled together or as they are.

    They may call each other and no other functions of this package. Compiled code is cached on disk under a digest of
    the sources of all these modules, so that it follows their changes. Private functions are compiled faster, and only
    the others can call them.
    """
    if compiled:
        return _compiled(*(module.__name__ for module in modules))
    return {name: value for module in modules for name, value in vars(module).items()}


@functools.cache
def _compiled(*modules: str) -> Mapping[str, Callable[..., Any]]:
    import numba

    sources = [sys.modules[module].__file__ or "" for module in modules]
    digest = hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[:16]
    names = {name: value for module in modules for name, value in vars(sys.modules[module]).items()}
    for name, function in list(names.items()):
        if not isinstance(function, types.FunctionType):
            continue
        if function.__module__ not in modules:
            assert function.__module__.partition(".")[0] != _PACKAGE, f"{name} of {function.__module__} must go along"
            continue
        # copies that see one another: compiled functions cannot call those that are not
        copy = types.FunctionType(function.__code__, names, name)
        copy.__qualname__ = f"{name}_{digest}"  # by which numba names its files
        private = name.startswith("_")
        options: dict[str, Any] = {"no_cpython_wrapper": private, "no_cfunc_wrapper": private}
        try:
            names[name] = numba.njit(cache=True, **options)(copy)
        except RuntimeError:  # no folder that it could write to
            names[name] = numba.njit(**options)(copy)
    return names
