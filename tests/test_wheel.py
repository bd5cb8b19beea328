"""The wheel: what is in it, and a run from it alone, in an environment and a folder that hold nothing else of ours."""

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import jaxrlhf
from jaxrlhf.commands.command_line import COMMANDS
from tests.subprocesses import ROOT, environment

INFO = f"jaxrlhf-{jaxrlhf.__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the tree, so that nothing is left in it."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jaxrlhf", "tests", "scripts", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip(["wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(folder)])
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of a bare environment with the wheel. What it needs comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    pip(["--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-compile", str(wheel)])
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder / "bin"


def pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def execute(program: Path, *arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program in a folder, as a user starts it."""
    others = ("PYTHONPATH", "PYTEST_CURRENT_TEST")
    given = {name: value for name, value in environment(**variables).items() if name not in others}
    return subprocess.run(
        [str(program), *arguments], cwd=folder, env=given, capture_output=True, text=True, timeout=280, check=False
    )


def test_it_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        scripts = configparser.ConfigParser()
        scripts.read_string(file.read(f"{INFO}/entry_points.txt").decode())
    package = {
        path for path in (ROOT / "jaxrlhf").rglob("*") if path.suffix in (".py", ".yaml", ".typed", ".css", ".js")
    }
    assert {name for name in names if not name.startswith(f"{INFO}/")} == {str(p.relative_to(ROOT)) for p in package}
    assert f"{INFO}/licenses/LICENSE" in names
    assert dict(scripts["console_scripts"]) == {"jaxrlhf": "jaxrlhf.commands.command_line:run"}


def test_the_command_runs_from_the_wheel_alone(installed, tmp_path):
    done = execute(installed / "jaxrlhf", "--version", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jaxrlhf {jaxrlhf.__version__}\n", "")
    where = execute(installed / "python", "-c", "import jaxrlhf; print(jaxrlhf.__file__)", folder=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)
    as_module = execute(installed / "python", "-m", "jaxrlhf", "trian", folder=tmp_path)
    assert as_module.returncode == 2 and "Did you mean 'train'?" in as_module.stderr
    unknown = execute(installed / "jaxrlhf", "train", "--config", "ppo_arithmetc", folder=tmp_path)
    assert unknown.returncode == 1 and "Did you mean 'ppo_arithmetic'?" in unknown.stderr


def test_a_run_from_the_wheel_alone(installed, tmp_path):
    """A shipped config, with huge pages where the machine has them."""
    small = {
        "steps": "2", "batch_size": "16", "warm_start": "null", "evaluation.num_prompts": "16",
        "roles.actor.model": "{preset: tiny, hidden_size: 32, num_layers: 1}",
    }  # fmt: skip
    overrides = [x for key, value in small.items() for x in ("--set", f"{key}={value}")]
    done = execute(installed / "jaxrlhf", "train", "--config", "ppo_arithmetic", *overrides, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in " ".join(done.stdout.split())
    assert os.listdir(tmp_path) == ["runs"] and (tmp_path / "runs/latest/metrics.jsonl").is_file()


def test_every_command_is_in_the_wheel(installed, tmp_path):
    code = f"import importlib\nfor name in {[c.module for c in COMMANDS.values()]}: importlib.import_module(name)"
    done = execute(installed / "python", "-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
