"""The XLA flags that the installed XLA knows.

Flags change with versions of XLA. An unknown one in XLA_FLAGS ends the process at the first use of a device; as an
option of a compilation it makes that fail. XLA has no list of its flags, but each is registered under its name, a
string in jaxlib's shared library.
"""

import functools
import importlib.util
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def known_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags, by name without dashes, that the installed XLA knows. The others only tune, and are left out.

    A plugin for GPUs has its own XLA, of the same version as jaxlib's.
    """
    return {name: value for name, value in flags.items() if _is_known(name)}


@functools.cache
def _is_known(name: str) -> bool:
    # With the zero at the end of a C string, which names of protobuf fields, kept longer than flags, do not have.
    for library in _libraries():
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(name.encode() + b"\0") >= 0:
                return True
    return False


@functools.cache
def _libraries() -> tuple[Path, ...]:
    """jaxlib's shared libraries, the largest first, since it has XLA. JAX is not imported: it may read XLA_FLAGS."""
    spec = importlib.util.find_spec("jaxlib")
    assert spec and spec.submodule_search_locations, "jaxlib comes with JAX"
    files = (file for folder in spec.submodule_search_locations for file in Path(folder).iterdir())
    libraries = [file for file in files if file.suffix in (".so", ".dylib", ".pyd", ".dll")]
    return tuple(sorted(libraries, key=lambda file: file.stat().st_size, reverse=True))
