"""The environments that scripts make."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def find_version(tmp_path):
    """`find_version` of scripts/environment, where all that PATH and pyenv have is in a folder."""
    (tmp_path / "bin").mkdir()
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv")}

    def run(version: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", f"source scripts/environment; find_version {version}"]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    return run


def write_program(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_a_name_that_starts_no_python_is_passed_over(find_version, tmp_path):
    write_program(tmp_path / "bin" / f"python{VERSION}", "echo 'pyenv: command not found' >&2; exit 127")
    write_program(tmp_path / "pyenv" / "versions" / f"{VERSION}.99" / "bin" / "python", f'exec {sys.executable} "$@"')
    found = find_version(VERSION)
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)


def test_a_python_of_another_version_is_passed_over(find_version, tmp_path):
    write_program(tmp_path / "bin" / "python3.99", f'exec {sys.executable} "$@"')
    found = find_version("3.99")
    assert (found.returncode, found.stdout) == (1, "")
