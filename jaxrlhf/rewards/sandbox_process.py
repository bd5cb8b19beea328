"""What the process of a sandbox runs: programs in Linux namespaces, within limits. It imports nothing of the package.

For each request it forks

    outside ── has namespaces made, kills all within them when time is up
      init ── first process of the namespaces; sees nothing but the interpreter and /tmp
        program ── one for each test, without privileges, within the limits of its own

and replies when the last process of them has ended. With init, the kernel ends whatever is left in its PID namespace.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

NEW_MOUNTS, NEW_HOST_NAME, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
READ_ONLY, NO_SETUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
DETACH, NO_NEW_PRIVILEGES, AT_WORKING_FOLDER, AT_RECURSIVE, SET_MOUNT_ATTRIBUTES = 2, 38, -100, 0x8000, 442
CAPABILITIES_VERSION = 0x20080522

SYSTEM = ("/bin", "/etc/alternatives", "/etc/ld.so.cache", "/lib", "/lib32", "/lib64", "/nix/store", "/usr")
"""What programs see of the machine, read-only, beside the interpreter and its packages."""
DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
ROOT, JAIL = "/proc", "/proc/jail"
"""Where the file system of programs is put together: on top of a folder that every machine has and programs lack."""
OPEN_FILES = 64
REPORT = 3
"""The file descriptor to which a program reports the assertions that hold."""
ENDED, LATE = 0, 3
"""Exit statuses of `outside`: init has ended, or time was up."""

_C = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of the C library. Raises OSError, which names the function, if it fails."""
    if getattr(_C, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str | None, target: str, flags: int, kind: str | None = None, data: str | None = None) -> None:
    texts = [text if text is None else text.encode() for text in (source, target, kind, data)]
    try:
        _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, of {source or 'a change'} on {target}") from error


def serve() -> None:
    """Replies to requests, one JSON object a line, until there are no more."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for line in requests:
        request, results = json.loads(line), os.memfd_create("results")
        outside = os.fork()
        if outside == 0:
            _outside(request, results)
        status = os.waitstatus_to_exitcode(os.waitpid(outside, 0)[1])
        os.lseek(results, 0, os.SEEK_SET)
        with os.fdopen(results, "rb") as file:
            each = [json.loads(line) for line in file if line.endswith(b"\n")]
        replies.write(json.dumps({"results": each, "late": status == LATE}).encode() + b"\n")
        replies.flush()


def _outside(request: Mapping[str, Any], results: int) -> NoReturn:
    """Makes the namespaces, and waits for init for as long as the request allows."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory is short, the kernel ends programs before the run
        user, group, root = os.getuid(), os.getgid(), os.geteuid() == 0
        namespaces = NEW_MOUNTS | NEW_HOST_NAME | NEW_IPC | NEW_PIDS | NEW_NETWORK
        _call("unshare", namespaces if root else namespaces | NEW_USER)
        if root:  # a user of their own, so that the kernel counts its processes; it does not limit those of root
            user = group = 20_000 + os.getpid() % 40_000
        else:
            maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
            for name, text in maps.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        init = os.fork()
    except Exception as error:
        _fail(results, error)
    if init == 0:
        _init(request, results, user, group)
    ready, _, _ = select.select([os.pidfd_open(init)], [], [], request["seconds"])
    if not ready:
        os.kill(init, signal.SIGKILL)
    os.waitpid(init, 0)  # returns when all processes of the namespace have ended
    os._exit(ENDED if ready else LATE)


def _init(request: Mapping[str, Any], results: int, user: int, group: int) -> NoReturn:
    """Runs the programs of a request one after another. What one of them leaves running ends with it."""
    try:
        _build_root(request["visible"], request["folder_bytes"])
        for index, each in enumerate(request["programs"]):
            given, printed, report = files = tuple(os.memfd_create("program") for _ in range(3))
            os.write(given, each["stdin"].encode())
            os.lseek(given, 0, os.SEEK_SET)
            folder = f"/tmp/{index}"
            os.mkdir(folder)
            os.chmod(folder, 0o777)
            program = os.fork()
            if program == 0:
                os.chdir(folder)
                _become_program(files, request, user, group)
                _run(each)
            status = _end_of(program)
            _end_all()
            texts = [os.pread(file, each["keep"], 0).decode(errors="replace") for file in (printed, report)]
            for file in files:
                os.close(file)
            _write(results, {"status": status, "printed": texts[0], "report": texts[1]})
            if status != 0 and request["stop"]:
                break
    except Exception as error:
        if os.getpid() != 1:
            raise  # the program's own
        _fail(results, error)
    os._exit(0)


def _build_root(visible: Iterable[str], folder_bytes: int) -> None:
    """Makes a file system that has some files of the machine, read-only, and an empty /tmp the root."""
    _mount(None, "/", RECURSIVE | PRIVATE)
    _mount("tmpfs", ROOT, NO_SETUID | NO_DEVICES, "tmpfs", "size=1m,mode=755")
    os.umask(0o022)
    os.makedirs(f"{JAIL}/dev")
    os.mkdir(f"{JAIL}/tmp")
    os.symlink("/tmp", f"{JAIL}/dev/shm")
    paths = [path for path in sorted({*SYSTEM, *visible}) if os.path.exists(path)]
    beneath_tmp = [path for path in paths if path.startswith("/tmp/")]
    _bind([path for path in paths if path not in beneath_tmp])
    devices = [path for path in DEVICES if os.path.exists(path)]
    for path in devices:
        os.mknod(JAIL + path)
    _restrict(ROOT)
    for path in devices:
        _mount(path, JAIL + path, BIND)
    _mount("tmpfs", f"{JAIL}/tmp", NO_SETUID | NO_DEVICES, "tmpfs", f"size={folder_bytes},mode=1777")
    for path in _bind(beneath_tmp):  # an interpreter, or packages, in the machine's /tmp
        _restrict(JAIL + path)
    os.chdir(ROOT)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", DETACH)
    os.chroot("/jail")  # beneath the root of the mounts, where no program may make another user namespace
    os.chdir("/tmp")


def _bind(paths: Iterable[str]) -> list[str]:
    """Has files and folders of the machine appear in the new file system. Returns those that are not in another."""
    bound: list[str] = []
    for path in paths:
        if any(path.startswith(f"{folder}/") for folder in bound):
            continue
        os.makedirs(os.path.dirname(JAIL + path), exist_ok=True)
        if os.path.islink(path) and path in SYSTEM:
            os.symlink(os.readlink(path), JAIL + path)
            continue
        os.mkdir(JAIL + path) if os.path.isdir(path) else os.mknod(JAIL + path)
        _mount(path, JAIL + path, BIND | RECURSIVE)
        bound.append(path)
    return bound


def _restrict(target: str) -> None:
    """Makes a mount, and all beneath it, read-only, without privileged programs and devices."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY | NO_SETUID | NO_DEVICES, 0, 0, 0)
    _call(
        "syscall", ctypes.c_long(SET_MOUNT_ATTRIBUTES), AT_WORKING_FOLDER, target.encode(), AT_RECURSIVE,
        ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)),
    )  # fmt: skip


def _become_program(files: Iterable[int], request: Mapping[str, Any], user: int, group: int) -> None:
    """Leaves this process with the files of a program, its limits, and no privileges."""
    os.setsid()
    given, printed, report = files
    error = os.open("/dev/null", os.O_WRONLY)
    for file, number in ((given, 0), (printed, 1), (error, 2), (report, REPORT)):
        os.dup2(file, number)
    os.closerange(REPORT + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    counted = request["processes"] + (0 if os.getuid() == 0 else 2)  # `outside` and init are the same user's
    for limit, most in (
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, request["folder_bytes"]),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, counted),
    ):
        resource.setrlimit(limit, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"], request["cpu_seconds"] + 1))
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
    _call("prctl", NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    _call("capset", (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)())
    for number in (signal.SIGXFSZ, signal.SIGPIPE):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)


def _run(program: Mapping[str, Any]) -> NoReturn:
    """Runs a program as a script, or as a module in which assertions run after it."""
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w", encoding="utf-8"), open(2, "w", encoding="utf-8")  # noqa: SIM115
    sys.argv = ["solution.py"]
    assertions = program["assertions"]
    module = types.ModuleType("__main__" if assertions is None else "solution")
    sys.modules[module.__name__] = module
    exec(compile(program["code"], "solution.py", "exec"), module.__dict__)
    for index, assertion in enumerate(assertions or ()):
        try:
            exec(compile(assertion, f"test_{index}.py", "exec"), module.__dict__)
        except BaseException:  # SystemExit too
            continue
        os.write(REPORT, f"{program['token']} {index}\n".encode())
    if assertions is not None:
        os._exit(0)
    sys.exit()  # the interpreter ends as usual: it waits for threads, and flushes


def _end_of(program: int) -> int:
    """The exit status of a program, once it has ended; negative if by a signal."""
    while True:
        ended, status = os.wait()  # orphans too
        if ended == program:
            return os.waitstatus_to_exitcode(status)


def _end_all() -> None:
    """Ends all other processes of the namespace, and waits for them."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.wait()
    except (ProcessLookupError, ChildProcessError):
        return


def _fail(results: int, error: Exception) -> NoReturn:
    _write(results, {"error": (isinstance(error, OSError) and error.strerror) or repr(error)})
    os._exit(1)


def _write(results: int, result: Mapping[str, Any]) -> None:
    with os.fdopen(os.dup(results), "wb") as file:
        file.write(json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    sys.path += json.loads(sys.argv[1])
    serve()
