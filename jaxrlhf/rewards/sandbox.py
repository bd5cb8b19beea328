"""Runs programs that nobody has read: within limits, without network, and out of reach of files and other processes.

The process of a sandbox, `sandbox_process.py`, serves one request after another. It takes Linux namespaces.
"""

import dataclasses
import functools
import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

from jaxrlhf.require import errors_as
from jaxrlhf.rewards import sandbox_process
from jaxrlhf.rewards.line_process import LineProcesses, ProcessEnded

MIB = 2**20
_FOLDERS = tuple(dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")))
"""The packages of this interpreter, which programs may import."""
_VISIBLE = (sys.base_prefix, sys.base_exec_prefix, *_FOLDERS)
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same order of sets in every run
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

_SPARE_SECONDS = 60.0
"""How much longer than its programs a sandbox may take, on a machine that is busy with others."""


class SandboxError(RuntimeError):
    """The machine has no sandbox to run a program in."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a sandbox."""

    cpu_seconds: int = 5
    """CPU time of each process."""
    seconds: float = 15.0
    """Wall time of all programs of a request together."""
    memory_mb: int = 1024
    """Address space of each process."""
    folder_mb: int = 64
    """Everything that is written: files together, and what each program prints."""
    processes: int = 16
    """Processes and threads at a time."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to run: code, and what it is given."""

    code: str
    stdin: str = ""
    assertions: tuple[str, ...] | None = None
    """Statements to run after the code, in its module. None means that the code is a script."""
    token: str = ""
    """Marks the reports of assertions that hold. The code of a program must not know it."""
    keep: int = 0
    """The most bytes of its output that come back."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a program."""

    status: int
    """0 if it ended without an exception; negative if by a signal."""
    printed: str
    """The start of its standard output."""
    report: str
    """A line for each assertion that holds: token and index."""


class Sandbox:
    """Runs programs in namespaces of their own. Threads may share it.

    Programs see the interpreter and its packages, read-only, and an empty folder, which goes when they end. They have
    no network, no privileges, and no other processes in sight.
    """

    def __init__(self, limits: Limits) -> None:
        if sys.platform != "linux":
            raise SandboxError(f"A sandbox needs Linux. Got {sys.platform}.")
        inherited = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
        arguments = ["-S", "-P", "-s", sandbox_process.__file__, json.dumps(_FOLDERS)]
        self._limits, self._processes = limits, LineProcesses(arguments, {**inherited, **_ENVIRONMENT})

    def run(self, programs: Sequence[Program], *, stop: bool) -> list[Result]:
        """The results of programs, in their order: fewer than programs if time was up, or, with `stop`, if one failed.

        Raises SandboxError if the machine lets no sandbox be made.
        """
        limits = self._limits
        request: dict[str, Any] = {
            "programs": [dataclasses.asdict(program) for program in programs],
            "stop": stop,
            "visible": _VISIBLE,
            "cpu_seconds": limits.cpu_seconds,
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_mb * MIB,
            "folder_bytes": limits.folder_mb * MIB,
            "processes": limits.processes,
        }
        with errors_as(SandboxError, caught=ProcessEnded):
            reply = self._processes.ask(request, seconds=limits.seconds + _SPARE_SECONDS)
        results = reply["results"] if reply is not None else []
        if failed := [each["error"] for each in results if "error" in each]:
            raise SandboxError(failed[0])
        return [Result(**each) for each in results]


@functools.cache
def check_sandbox() -> None:
    """Checks that this machine lets a sandbox be made. Raises SandboxError, which says how to have it do so."""
    program = Program("import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint(input())", "works", keep=9)
    try:
        results = Sandbox(Limits()).run([program], stop=True)
    except SandboxError as error:
        got = str(error)
    else:
        if [(each.status, each.printed) for each in results] == [(0, "works\n")]:
            return
        got = f"{results} of a program that should print 'works'"
    raise SandboxError(
        "Programs are run in Linux namespaces (5.14 or later), which root may make, and users where the kernel allows "
        f"it. Got {got.rstrip('.')}. In a container, add the capability SYS_ADMIN, or allow unshare and mount in its "
        "seccomp and AppArmor profiles; elsewhere see sysctl kernel.unprivileged_userns_clone, "
        "user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns."
    )
