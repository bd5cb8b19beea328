"""Inner loops that numba compiles where it is installed, and Python runs where it is not."""

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


def numba_is_there() -> bool:
    """Whether loops can be compiled."""
    try:
        import numba  # noqa: F401 (only whether it is there)
    except ImportError:
        return False
    return True


def loops(module: types.ModuleType, *, compiled: bool) -> Mapping[str, Callable[..., Any]]:
    """The functions of a module by name, compiled or as they are.

    The module may import no functions of ours: code that is kept on disk would not follow their changes. What is
    private to it is compiled in less time, and can be called by the others only.
    """
    return _compiled(module.__name__) if compiled else vars(module)


@functools.cache
def _compiled(module: str) -> Mapping[str, Callable[..., Any]]:
    import numba

    names = dict(vars(sys.modules[module]))
    for name, function in list(names.items()):
        if isinstance(function, types.FunctionType) and function.__module__ == module:
            # copies that see one another: compiled functions cannot call those that are not
            copy = types.FunctionType(function.__code__, names, name)
            private = name.startswith("_")
            options: dict[str, Any] = {"no_cpython_wrapper": private, "no_cfunc_wrapper": private}
            try:
                names[name] = numba.njit(cache=True, **options)(copy)
            except RuntimeError:  # no folder that it could write to
                names[name] = numba.njit(**options)(copy)
    return names
