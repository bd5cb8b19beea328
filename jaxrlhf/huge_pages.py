"""Huge pages for the memory of a command on CPUs. glibc reads its tunables when a process starts, so the command starts
once more, before JAX is imported."""

import os
import platform
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

SWITCH = "JAXRLHF_HUGE_PAGES"
"""0 in this variable leaves a command as it is."""
_COMMANDS = ("jaxrlhf.train", "jaxrlhf.calibrate")
"""Those that compute, or measure computing."""
_TUNABLE = "glibc.malloc.hugetlb"
_FIRST_GLIBC = (2, 35)
"""The first version that has it."""
_ACCELERATORS = ("dev/nvidia[0-9]*", "dev/kfd", "dev/dxg", "dev/accel*")


def restart_with_huge_pages(command: str | None = None) -> None:
    """Replaces a process that has just started by the same with huge pages, where they may help. Its id, arguments,
    options of Python and environment stay. `command`: the module that it is to run; None for that of `python -m`."""
    environment = dict(os.environ)
    if wants_huge_pages(sys.orig_argv if command is None else [command], environment):
        add_tunable(environment)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def wants_huge_pages(arguments: Sequence[str], environment: MutableMapping[str, str], root: Path = Path("/")) -> bool:
    """True for a command that computes on the CPUs of a Linux machine which gives huge pages to those that ask
    (`madvise`; with `always` they are there, with `never` they are not), unless a user chose or this is a test."""
    if not any(argument.removeprefix("-m") in _COMMANDS for argument in arguments):
        return False
    if environment.get(SWITCH) == "0" or _TUNABLE in environment.get("GLIBC_TUNABLES", ""):
        return False
    if "PYTEST_CURRENT_TEST" in environment or not sys.executable:
        return False
    pages = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if not _has_tunable() or not pages.is_file() or "[madvise]" not in pages.read_text():
        return False
    has_accelerator = any(next(root.glob(pattern), None) for pattern in _ACCELERATORS)
    return environment.get("JAX_PLATFORMS") == "cpu" or not has_accelerator


def add_tunable(environment: MutableMapping[str, str]) -> None:
    """Asks glibc for huge pages, beside what it is told already.

    >>> environment = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    >>> add_tunable(environment)
    >>> environment
    {'GLIBC_TUNABLES': 'glibc.malloc.check=1:glibc.malloc.hugetlb=1'}
    """
    others = environment.get("GLIBC_TUNABLES")
    environment["GLIBC_TUNABLES"] = ":".join([*([others] if others else []), f"{_TUNABLE}=1"])


def _has_tunable() -> bool:
    name, version = platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    return sys.platform == "linux" and name == "glibc" and numbers >= _FIRST_GLIBC
