"""Memory that a run may take of this machine: what is available, within the limits of its container.

Read from /proc and /sys/fs/cgroup (version 2 or 1), as Linux has them.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

PROCESS_BYTES = 1_000_000_000
"""Memory of a run's process beside its arrays: Python, JAX, compiled programs of small models and compiling."""
LAYER_PROGRAM_BYTES = 10_000_000
"""Memory of the compiled program of a layer. Measured as what runs of 30 layers and three to six calls took beside
their arrays (GRPO 4.2 GB, PPO 6.8 GB in all)."""
RETAINED = 0.12
"""Memory of freed arrays that the allocator retains, as a part of the arrays at their peak."""
SHARE = 0.4
"""The part of available memory that a plan may take by default. The rest is for other programs, for checkpoints, and
for what a forecast leaves out."""
UNLIMITED = 1 << 60
"""Version 1 writes larger numbers than this for no limit."""
_VERSIONS = (
    # limit, usage, and the cached files in it that are given back before anything is killed
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process could have in all, including those that it has: what is available on the machine, or left
    of a container's limit, whichever is less. None if the system does not tell. `root` has `proc` and `sys`."""
    available = [size for name, size in _meminfo(root).items() if name == "MemAvailable"]
    available += [left for _, left in _limits(root)]
    return min(available) + _resident(root) if available else _physical(root)


def with_process(arrays: int, *, num_layers: int = 0) -> int:
    """Bytes of a process that has some number of bytes in arrays on virtual devices, with programs that have so many
    layers in all.

    >>> with_process(8_000_000_000)
    9960000000
    """
    return PROCESS_BYTES + num_layers * LAYER_PROGRAM_BYTES + arrays + int(RETAINED * arrays)


def for_arrays(room: int) -> int:
    """Bytes for arrays in a process that may have some number in all; at least one.

    >>> for_arrays(9_960_000_000)
    8000000000
    """
    return max(1, round((room - PROCESS_BYTES) / (1 + RETAINED)))


def host_room(limit: int | None = None, *, root: Path = Path("/")) -> int | None:
    """Bytes that this process may have in all: `SHARE` of what it could have, or all of it up to a limit. None if the
    system does not tell and there is no limit."""
    available = host_memory(root)
    if limit is None:
        return None if available is None else int(SHARE * available)
    return limit if available is None else min(limit, available)


def total_memory(root: Path = Path("/")) -> int | None:
    """Bytes that any process could ever have here: of the machine, or a container's limit. None if not known."""
    limits = [limit for limit, _ in _limits(root)]
    whole = _meminfo(root).get("MemTotal") or _physical(root)
    return min([*limits, *([whole] if whole else [])], default=None)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) of the groups of this process, from its own up, as far as a container shows them."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            own = top / path.lstrip("/")
            for folder, files in itertools.product((own, *own.parents), _VERSIONS):
                with contextlib.suppress(OSError, ValueError):  # `max`, no such group, or a file of the other version
                    limit, used = (int((folder / name).read_text()) for name in files[:2])
                    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    if limit < UNLIMITED and folder.is_relative_to(top):
                        yield limit, max(0, limit - max(0, used - int(stat.get(files[2], 0))))


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return {}


def _resident(root: Path) -> int:
    """Bytes that this process has."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _physical(root: Path) -> int | None:
    """Bytes of the machine, on systems without /proc."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        if root == Path("/"):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
