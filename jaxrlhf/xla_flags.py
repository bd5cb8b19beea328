"""XLA's flags, and which of them the installed XLA knows.

Flags come and go with versions of XLA. One that it does not know, in XLA_FLAGS, ends the process at the first use of a
device; as an option of a compilation, it fails the compilation. XLA lists its flags nowhere, but each is registered
under its name, a string that jaxlib's shared library holds.
"""

import functools
import importlib.util
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


def known_flags(flags: Mapping[str, Value]) -> dict[str, Value]:
    """Those flags, by name without dashes, that the installed XLA knows. Others only tune, and are left out.

    A plugin for GPUs brings its own XLA, which is of jaxlib's version.
    """
    return {name: value for name, value in flags.items() if _is_known(name)}


@functools.cache
def _is_known(name: str) -> bool:
    # With the zero that ends a string in C: names of a message's fields, which outlive the flags, have none.
    return any(_holds(library, name.encode() + b"\0") for library in _libraries())


def _holds(library: Path, wanted: bytes) -> bool:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(wanted) >= 0


@functools.cache
def _libraries() -> tuple[Path, ...]:
    """jaxlib's shared libraries, the largest first: XLA is in it. JAX is not imported, since it may read XLA_FLAGS."""
    spec = importlib.util.find_spec("jaxlib")
    assert spec and spec.submodule_search_locations, "jaxlib comes with JAX"
    files = (file for folder in spec.submodule_search_locations for file in Path(folder).iterdir())
    libraries = [file for file in files if file.suffix in (".so", ".dylib", ".pyd", ".dll")]
    return tuple(sorted(libraries, key=lambda file: file.stat().st_size, reverse=True))
