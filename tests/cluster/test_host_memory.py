"""What is available of a machine's memory, read from files as Linux writes them."""

from pathlib import Path

import pytest

from jaxrlhf.cluster.host_memory import SHARE, host_memory, host_room, total_memory

GIB = 2**30
PAGE = 4096


def machine(root: Path, *, available: int = 20, cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    """A root of files with so many GiB available of 24, and one resident."""
    everything = {
        "proc/meminfo": f"MemTotal: {24 * 2**20} kB\nMemAvailable: {available * 2**20} kB\nHugePages: 0\n",
        "proc/self/statm": f"999999 {GIB // PAGE} 7 1 0 9 0\n",
        "proc/self/cgroup": cgroup,
        **(files or {}),
    }
    for name, text in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(autouse=True)
def pages(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: PAGE)


def group(folder: str, limit: object, used: int, cached: int, *, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return {
        f"{folder}/{names[0]}": f"{limit}\n",
        f"{folder}/{names[1]}": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\n{names[2]} {cached}\n",
    }


def test_what_the_machine_has_available_and_what_the_process_has(tmp_path):
    root = machine(tmp_path)
    assert (host_memory(root), total_memory(root)) == (21 * GIB, 24 * GIB)


def test_the_limit_of_a_container(tmp_path):
    """Of 8 GiB, 5 are used, 2 of these by cached files, which make room."""
    files = group("sys/fs/cgroup", 8 * GIB, 5 * GIB, 2 * GIB)
    root = machine(tmp_path, cgroup="0::/\n", files=files)
    assert (host_memory(root), total_memory(root)) == (6 * GIB, 8 * GIB)


def test_of_groups_in_one_another_that_with_least_room(tmp_path):
    files = group("sys/fs/cgroup/a", 8 * GIB, 7 * GIB, 0) | group("sys/fs/cgroup/a/b", "max", GIB, 0)
    root = machine(tmp_path, cgroup="0::/a/b\n", files=files)
    assert (host_memory(root), total_memory(root)) == (2 * GIB, 8 * GIB)


@pytest.mark.parametrize("folder", ["docker/c0ffee", ""])
def test_the_limit_of_a_container_of_version_1(tmp_path, folder):
    """Such a container may see its group under the machine's path, or at the top."""
    files = group(f"sys/fs/cgroup/memory/{folder}", 8 * GIB, 5 * GIB, 2 * GIB, version=1)
    cgroup = "9:cpu,cpuacct:/docker/c0ffee\n4:memory:/docker/c0ffee\n0::/\n"
    assert host_memory(machine(tmp_path, cgroup=cgroup, files=files)) == 6 * GIB


def test_no_limit_of_version_1_is_a_very_large_one(tmp_path):
    files = group("sys/fs/cgroup/memory", 9223372036854771712, 5 * GIB, 0, version=1)
    root = machine(tmp_path, cgroup="4:memory:/\n", files=files)
    assert (host_memory(root), total_memory(root)) == (21 * GIB, 24 * GIB)


def test_a_system_that_tells_nothing(tmp_path):
    assert host_memory(tmp_path) is host_room(root=tmp_path) is total_memory(tmp_path) is None
    assert host_room(5, root=tmp_path) == 5


def test_a_run_takes_a_part_of_it_or_what_it_is_told(tmp_path):
    root = machine(tmp_path)
    assert host_room(root=root) == int(SHARE * 21 * GIB)
    assert [host_room(n * GIB, root=root) for n in (3, 30)] == [3 * GIB, 21 * GIB]
