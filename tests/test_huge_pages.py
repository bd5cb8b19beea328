"""Commands on CPUs start once more with huge pages: once, on Linux with glibc, where nobody chose otherwise."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrlhf import huge_pages
from jaxrlhf.huge_pages import wants_huge_pages

TRAIN = ["python", "-X", "utf8", "-m", "jaxrlhf.train", "--config", "ppo_arithmetic"]
SHOWN = """
import jax, os, sys
from pathlib import Path
Path("shown").write_text(repr((sys.orig_argv[1:], os.environ.get("GLIBC_TUNABLES"), sys.flags.utf8_mode, os.getpid())))
raise SystemExit(7)
"""


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A machine without accelerators that gives huge pages to those that ask."""
    monkeypatch.setattr(huge_pages, "_has_tunable", lambda: True)
    pages(tmp_path, "always [madvise] never")
    return tmp_path


def pages(root: Path, text: str) -> None:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_command_on_cpus_wants_them(root):
    assert wants_huge_pages(TRAIN, {}, root)
    assert wants_huge_pages(["python", "-mjaxrlhf.calibrate"], {"GLIBC_TUNABLES": "glibc.malloc.check=1"}, root)


@pytest.mark.parametrize(
    "environment",
    [
        {"JAXRLHF_HUGE_PAGES": "0"},
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"},
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        {"PYTEST_CURRENT_TEST": "x"},
    ],
)
def test_not_where_somebody_chose_nor_twice_nor_in_a_test(root, environment):
    assert not wants_huge_pages(TRAIN, environment, root)


def test_not_for_commands_that_compute_nothing_nor_for_a_users_own(root):
    assert not wants_huge_pages(["python", "-m", "jaxrlhf.timeline"], {}, root)
    assert not wants_huge_pages(["python", "-m", "somebody", "--train"], {}, root)


def test_not_on_other_systems(root, monkeypatch):
    for text in ("[always] madvise never", "always madvise [never]"):
        pages(root, text)
        assert not wants_huge_pages(TRAIN, {}, root), text
    pages(root, "always [madvise] never")
    monkeypatch.setattr(huge_pages, "_has_tunable", lambda: False)
    assert not wants_huge_pages(TRAIN, {}, root)


@pytest.mark.parametrize("libc", [("", ""), ("musl", "1.2"), ("glibc", "2.34")])
def test_musl_and_old_versions_of_glibc_have_no_tunable(monkeypatch, libc):
    monkeypatch.setattr(huge_pages.platform, "libc_ver", lambda: libc)
    assert not huge_pages._has_tunable()


def test_not_with_a_gpu_unless_jax_is_told_to_leave_it(root):
    (root / "dev").mkdir()
    (root / "dev/nvidiactl").touch()
    assert wants_huge_pages(TRAIN, {}, root), "no GPU"
    (root / "dev/nvidia0").touch()
    assert not wants_huge_pages(TRAIN, {}, root)
    assert wants_huge_pages(TRAIN, {"JAX_PLATFORMS": "cpu"}, root)


@pytest.mark.skipif(not wants_huge_pages(TRAIN, {"JAX_PLATFORMS": "cpu"}), reason="this machine has no use for them")
def test_the_command_starts_again_as_it_was_started(tmp_path):
    """In a process, with its module replaced by one that writes down what it sees."""
    package = tmp_path / "jaxrlhf"
    (package / "commands").mkdir(parents=True)
    source = Path(huge_pages.__file__)
    of_command = ("__main__.py", "brief.py", "commands/__init__.py", "commands/command_line.py")
    for name in ("__init__.py", "huge_pages.py", *of_command):
        (package / name).write_text((source.parent / name).read_text())
    (package / "train.py").write_text(SHOWN)
    started = {key: value for key, value in os.environ.items() if key not in ("PYTEST_CURRENT_TEST", "GLIBC_TUNABLES")}
    cases = itertools.product((["jaxrlhf.train"], ["jaxrlhf", "train"]), (("1", "glibc.malloc.hugetlb=1"), ("0", None)))
    for command, (switch, tunables) in cases:
        arguments = ["-X", "utf8=0", "-m", *command, "--set", "a b='c'"]
        environment = {**started, "JAX_PLATFORMS": "cpu", "JAXRLHF_HUGE_PAGES": switch}
        process = subprocess.Popen([sys.executable, *arguments], cwd=tmp_path, env=environment)
        assert process.wait(timeout=120) == 7
        assert eval((tmp_path / "shown").read_text()) == (arguments, tunables, 0, process.pid)
