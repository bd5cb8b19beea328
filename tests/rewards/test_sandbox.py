"""Programs that try to get out of a sandbox, or to take more than it has. Limits are small, and each is set first."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from jaxrlhf.rewards import sandbox
from jaxrlhf.rewards.sandbox import Limits, Program, Result, Sandbox, SandboxError, check_sandbox

SMALL = Limits(cpu_seconds=1, seconds=4.0, memory_mb=192, folder_mb=2, processes=6)


def run(code: str, *others: str, limits: Limits = SMALL, stdin: str = "") -> list[Result]:
    """The results of programs in one sandbox, which is in order afterwards."""
    box = Sandbox(limits)
    results = box.run([Program(each, stdin, keep=2000) for each in (code, *others)], stop=False)
    (after,) = box.run([Program("print('in order')", keep=100)], stop=False)
    assert after.printed == "in order\n"
    return results


def printed(code: str, **settings) -> str:
    (result,) = run(code, **settings)
    assert result.status == 0, result
    return result.printed.strip()


def test_a_program_is_a_script_with_an_input():
    code = """
import atexit, dataclasses, sys, threading
atexit.register(lambda: sys.stdout.write("last"))
@dataclasses.dataclass
class A:
    x: int
threading.Thread(target=lambda: print(input(), A(3), __name__, sys.argv)).start()
"""
    assert printed(code, stdin="given\nmore") == "given A(x=3) __main__ ['solution.py']\nlast"
    statuses = [result.status for result in run("1 / 0", "import sys; sys.exit(4)", "print('\\0')", "x = ")]
    assert statuses == [1, 4, 0, 1]


def test_assertions_that_hold_are_reported():
    code = "def double(x):\n    return 2 * x"
    assertions = ("assert double(2) == 4", "assert double(2) == 5", "exit()", "x = double(3)\nassert x == 6", "y")
    box = Sandbox(SMALL)
    (result,) = box.run([Program(code, "", assertions, "token", 2000)], stop=True)
    assert result.status == 0 and result.report == "token 0\ntoken 3\n"
    for ends in ("import os; os._exit(0)", "raise SystemExit", "1 / 0"):
        assert box.run([Program(ends, "", ("assert True",), "token", 2000)], stop=True)[0].report == ""


def test_programs_see_the_interpreter_and_nothing_of_the_run(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    packages = [path for path in (sys.base_prefix, sysconfig.get_paths()["purelib"]) if path.startswith("/tmp/")]
    expected = sorted({"0", *(path.split("/")[2] for path in packages)})
    assert printed("import os; print(sorted(os.listdir('/tmp')), os.listdir('.'))") == f"{expected} []"
    assert printed("import numpy; print(numpy.arange(4).sum())", limits=Limits()) == "6"
    assert printed("import multiprocessing as m; print(m.Lock().acquire())") == "True"
    assert printed("import os; print('SECRET_OF_THE_RUN' in os.environ)") == "False"
    assert printed(
        f"import os; print(os.path.exists({__file__!r}), os.path.exists('/proc'), os.path.exists('/home'))"
    ) == ("False False False")


def test_a_fork_bomb():
    code = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    started = time.monotonic()
    assert all(result.status != 0 for result in run(code)), "ended by a limit, or when time was up"
    assert time.monotonic() - started < SMALL.seconds + 3
    code = """
import os, time
count = 0
try:
    while count < 50:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except BlockingIOError:
    print(count)
"""
    assert printed(code) == str(SMALL.processes - 1)  # and itself
    threads = """
import threading, time
count = 0
try:
    while count < 50:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError:
    print(count)
"""
    assert printed(threads) == str(SMALL.processes - 1)


def test_an_endless_loop():
    (busy,) = run("while True: pass")
    assert busy.status == -24  # SIGXCPU
    (stubborn,) = run("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass")
    assert stubborn.status == -9


def test_waiting_for_ever():
    started = time.monotonic()
    waits = "import signal, time\nfor n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
    results = run("print(1)", f"{waits}time.sleep(99)", "print(3)", limits=Limits(seconds=1.0))
    assert [result.printed for result in results] == ["1\n"], "time is that of all programs"
    assert time.monotonic() - started < 3


def test_gigabytes_of_output():
    (result,) = run("while True: print('x' * 1_000_000)")
    assert result.status == -25 and len(result.printed) == 2000  # SIGXFSZ
    (result,) = run("import os\nwhile True: os.write(2, b'x' * 1_000_000)")
    assert result.status == -24, "nobody reads errors, so they take time only"


def test_gigabytes_of_memory():
    (result,) = run("x = bytearray(2**30)")
    assert result.status == 1
    assert printed("x = bytearray(50 * 2**20); print(len(x))") == str(50 * 2**20)
    shared = "import mmap\ntry: mmap.mmap(-1, 2**30)\nexcept (OSError, MemoryError): print('refused')"
    assert printed(shared) == "refused"


def test_a_full_folder():
    code = """
import os
def fill(name, count):
    with open(name, "wb") as file:
        for _ in range(count):
            file.write(bytes(2**20))
try:
    for number in range(8):
        fill(str(number), 1)
except OSError as error:
    print(error.strerror, number)
"""
    assert printed(code).startswith("No space left on device")
    (result,) = run("with open('x', 'wb') as file:\n    for _ in range(9): file.write(bytes(2**20))")
    assert result.status == -25


def test_writing_outside_of_the_folder(tmp_path):
    tmp_path.chmod(0o777)
    paths = [
        str(tmp_path / "x"),
        "/x",
        "/usr/x",
        "/dev/x",
        "/etc/x",
        "/root/x",
        f"{sys.base_prefix}/x",
        "/dev/shm/../../x",
    ]
    code = f"""
for path in {paths}:
    try:
        open(path, "w").write("x")
    except OSError:
        continue
    print("wrote", path)
open("/tmp/x", "w").write("x")
"""
    assert printed(code) == ""
    assert not any(map(os.path.exists, paths))
    for call in (
        "os.chmod('/usr/bin', 0o777)",
        "os.mkdir('/usr/x')",
        "os.chroot('/tmp')",
        "os.setuid(0)",
        "os.nice(-5)",
    ):
        assert run(f"import os; {call}")[0].status == 1, call


def test_mounts_and_namespaces_of_its_own():
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.unshare(0x00020000), libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None))
print(libc.mount(None, b"/usr", None, 32 | 4096, None), libc.umount2(b"/usr", 2), libc.mknod(b"d", 0o020666, 0x103))
"""
    assert set(printed(code).split()) == {"-1"}


def test_symlinks_out_of_the_folder(tmp_path):
    target = tmp_path / "target"
    target.write_text("kept")
    target.chmod(0o666)
    code = f"""
import os
for link, target in (("a", {str(target)!r}), ("b", "../../../..{target}"), ("c", "/"), ("d", "/usr")):
    os.symlink(target, link)
    for path in (link, link + "/x", link + {str(target)!r}):
        try:
            open(path, "w").write("lost")
            print("wrote", path)
        except OSError:
            pass
"""
    assert printed(code) == ""
    assert target.read_text() == "kept"


def test_signals_to_other_processes():
    code = f"""
import os, signal
for pid in (os.getppid(), 1, {os.getpid()}, -1):
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM):
        if pid != -1 or number == signal.SIGALRM:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            try:
                os.kill(pid, number)
            except OSError:
                pass
print(os.getpid(), os.getppid())
"""
    pid, parent = printed(code).split()
    assert parent == "1" and int(pid) > 1
    assert printed("import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))") == "-1"  # PTRACE_ATTACH to init


def alive(mark: str) -> list[str]:
    """Processes of this machine whose name is a mark."""
    names = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            names.append(path.read_text().strip())
        except OSError:  # it has ended meanwhile
            continue
    return [name for name in names if name == mark]


@pytest.mark.parametrize("leaves", ["os._exit(0)", "time.sleep(99)"])
def test_processes_that_outlive_their_parent(leaves):
    mark = f"left{os.getpid()}"
    code = f"""
import ctypes, os, signal, time
ctypes.CDLL(None).prctl(15, b"{mark}")
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1)
        time.sleep(99)
    os._exit(0)
os.wait()
{leaves}
"""
    results = Sandbox(Limits(seconds=1.0)).run([Program(code)], stop=False)
    assert [result.status for result in results] == ([0] if leaves == "os._exit(0)" else [])
    assert alive(mark) == []
    again = "import os\nprint(os.path.exists('/tmp/0/x'))\nopen('/tmp/0/x', 'w')\n"
    assert [result.printed for result in run(again, again)] == ["False\n", "True\n"]
    assert printed(again) == "False", "folders end with their sandbox"


def test_network_access():
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import socket
for kind, address in ((socket.SOCK_STREAM, {server.getsockname()}), (socket.SOCK_DGRAM, ("192.0.2.1", 53))):
    try:
        socket.socket(socket.AF_INET, kind).connect(address)
        print("connected", address)
    except OSError as error:
        print(error.strerror)
"""
        assert printed(code) == "Network is unreachable\nNetwork is unreachable"
    name = f"\0jaxrlhf{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = f"import socket\ntry: socket.socket(socket.AF_UNIX).connect({name!r})\nexcept OSError: print('refused')"
        assert printed(code) == "refused"


def test_a_machine_without_namespaces(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match=r"A sandbox needs Linux\. Got darwin\."):
        run("")
    monkeypatch.undo()
    source = Path(sandbox.sandbox_process.__file__).read_text()
    refusing, ending = tmp_path / "refusing.py", tmp_path / "ending.py"
    refusing.write_text(source.replace("NEW_IPC | NEW_PIDS", "NEW_IPC | NEW_PIDS | 1"))
    ending.write_text("raise OSError('no room')")
    for path, message in (
        (
            refusing,
            r"Programs are run in Linux namespaces .* Got unshare: Invalid argument\. In a container, add the cap",
        ),
        (ending, r"Got a process that ended with status 1 and OSError: no room\. In a container"),
    ):
        monkeypatch.setattr(sandbox.sandbox_process, "__file__", str(path))
        with pytest.raises(SandboxError, match=message):
            check_sandbox.__wrapped__()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can become another user")
def test_all_of_it_as_an_ordinary_user():
    prefix = Path(sys.base_prefix)
    top = f"/{prefix.parts[1]}"  # perhaps root's own folder, which nobody else may enter
    script = f"""
set -e
mount --bind {prefix} /mnt
mount -t tmpfs -o mode=755 tmpfs {top}
mkdir -p {prefix}
mount --bind /mnt {prefix}
exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
"""
    become = ["unshare", "--mount", "sh", "-c", script if top == "/root" else script.splitlines()[-1], "sh"]
    tests = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-q", __file__]
    environment = {**os.environ, "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*become, *tests], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1 skipped" in done.stdout, done.stdout + done.stderr
