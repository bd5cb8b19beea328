"""The folder of one run: its files, whole-file writes, and the versions with which the run was started."""

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from jaxrlhf import __version__
from jaxrlhf.brief import brief
from jaxrlhf.name_rules import check_file_name
from jaxrlhf.writing import replacing, write_atomically, writing

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
OWN_FOLDERS = ("checkpoints", "exports", "tensorboard", "wandb")
"""Subfolders of a run's folder that are not those of exported roles."""


class RunFolderError(ValueError):
    """A run's folder that is in use."""


class _Inside:
    """The path of a name inside a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", owner: type["RunFolder"]) -> Path:
        return folder.path / self._name


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of one run. `RunFolder(path)` is an existing one; `create` makes a new one."""

    path: Path

    config = _Inside("config.yaml")
    planned = _Inside("planned.json")
    """The plan of the step that was found, with its forecast; missing if the config has the whole plan."""
    metrics = _Inside("metrics.jsonl")
    samples = _Inside("samples.jsonl")
    timeline = _Inside("timeline.json")
    reward_error = _Inside("reward_error.txt")
    """The traceback of a reward function that raised."""
    checkpoints = _Inside("checkpoints")
    exports = _Inside("exports")
    """Weights exported between steps, in a folder for each such step."""

    @classmethod
    def create(cls, root: Path, name: str) -> "RunFolder":
        """Makes `root/<name>-<YYYYmmdd-HHMMSS>` and points the symlink `root/latest` at it. Raises as
        `check_run_folder`.

        If that name is taken, `-2`, `-3` and so on is added. In a run of several processes, one of them calls this.
        """
        check_run_folder(root, name)
        stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for ordinal in itertools.count(1):
            path = root / (f"{stem}-{ordinal}" if ordinal > 1 else stem)
            with writing(path), contextlib.suppress(FileExistsError):
                path.mkdir(parents=True)
                break
        folder = cls(path)
        with writing(path):
            folder.checkpoints.mkdir()
            folder.become_latest()
        return folder

    def become_latest(self) -> None:
        """Points the symlink `latest`, beside this folder, at it."""
        latest = self.path.parent / "latest"
        with replacing(latest) as link:
            link.symlink_to(self.path.name, target_is_directory=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps all other processes from running this run, or raises RunFolderError if one is."""
        with self._lock_file.open("a+") as file:
            self._lock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
            yield

    def check_free(self) -> None:
        """Raises RunFolderError if another process is running this run. Changes nothing."""
        if self._lock_file.exists():
            with self._lock_file.open() as file:
                self._lock(file, fcntl.LOCK_SH)

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    def _lock(self, file: TextIO, how: int) -> None:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunFolderError(
                f"{self.path}: one process at a time can run a run. Got another one that is running it: "
                f"{file.read() or 'unknown'}. Wait until it has ended, or end it."
            ) from error

    def write_text(self, name: str, text: str) -> None:
        """Writes a file of this folder, such as 'config.yaml', whole or not at all."""
        write_atomically(self.path / name, text)

    def write_json(self, name: str, data: Any) -> None:
        """Writes plain data as strict JSON, whole or not at all."""
        self.write_text(name, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def check_run_folder(root: Path, name: str) -> None:
    """Checks that a run of this name can have its folder in `root`: raises ValueError if `name` is no plain file name,
    `root` cannot be a folder, or `root/latest` is no symlink.
    """
    check_file_name(name, "Name of the run", example="ppo_math")
    latest = root / "latest"
    if os.path.exists(latest) and not latest.is_symlink():
        raise ValueError(
            f"{latest}: this name is kept for a symlink to the newest run. Got a file or folder of that name. "
            "Rename it, or choose another root."
        )
    existing = next(path for path in (root, *root.absolute().parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(
            f"output.folder: must be a folder that can be written to, or made. Got {brief(str(root))}; {existing} is "
            "none."
        )


def collect_versions() -> dict[str, Any]:
    """The versions, platform, git commit and command line of a run. Unknown values are None."""
    commit, dirty = git_commit(Path(__file__).parents[1])
    return {
        "python": platform.python_version(),
        "jaxrlhf": __version__,
        **{name: next((x.version for x in importlib.metadata.distributions(name=name)), None) for name in _PACKAGES},
        "platform": platform.platform(),
        "git": {"commit": commit, "dirty": dirty},
        "command": list(sys.orig_argv),
    }


def git_commit(package: Path) -> tuple[str | None, bool | None]:
    """The commit of the checkout that tracks a package's folder, and whether the folder differs from that commit.

    Both are None without git, and for a package inside of another project's checkout, as in a virtual environment.
    """
    # Inside a git hook, GIT_DIR and similar variables point at the hook's repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--verify", "HEAD"), bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None, None
