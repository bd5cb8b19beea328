import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrlhf.run import run_folder
from jaxrlhf.run.run_folder import RunFolder, collect_versions, git_commit, write_atomically
from jaxrlhf.writing import UnwritableError


def test_create_makes_the_folder_and_points_latest_at_it(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", "ppo")
    assert folder.path.parent == tmp_path / "runs"
    assert re.fullmatch(r"ppo-\d{8}-\d{6}", folder.path.name)
    assert folder.checkpoints.is_dir()
    # A relative link survives a move of the root.
    assert os.readlink(tmp_path / "runs" / "latest") == folder.path.name
    assert (tmp_path / "runs" / "latest").resolve() == folder.path


def test_create_never_reuses_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20250102-030405")
    folders = [RunFolder.create(tmp_path, "ppo") for _ in range(3)]
    assert [folder.path.name for folder in folders] == [
        "ppo-20250102-030405",
        "ppo-20250102-030405-2",
        "ppo-20250102-030405-3",
    ]
    assert (tmp_path / "latest").resolve() == folders[-1].path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *sorted(f.path.name for f in folders)]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "a\nb", "a:b"])
def test_create_refuses_names_that_are_no_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"plain file name, such as 'ppo_math'\. Got {re.escape(repr(name))}\."):
        RunFolder.create(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_create_leaves_a_real_folder_named_latest_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(ValueError, match="kept for a symlink to the newest run"):
        RunFolder.create(tmp_path, "ppo")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_create_replaces_a_dangling_latest(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    folder = RunFolder.create(tmp_path, "ppo")
    assert (tmp_path / "latest").resolve() == folder.path


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write_text("config.yaml", "größe: 1\n")
    assert folder.config.read_text(encoding="utf-8") == "größe: 1\n"
    folder.write_json("plan.json", {"b": 1, "a": ["ü"]})
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")) == {"b": 1, "a": ["ü"]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.write_json("plan.json", {"b": float("nan")})

    def fail(source: Path, target: Path) -> None:
        assert source.read_text(encoding="utf-8") == "new"
        assert source.parent == target.parent
        raise OSError("no")

    monkeypatch.setattr(run_folder.os, "replace", fail)
    with pytest.raises(UnwritableError, match=r"config.yaml: must be writable. Got OSError: no. Make room"):
        folder.write_text("config.yaml", "new")
    assert folder.config.read_text(encoding="utf-8") == "größe: 1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "plan.json"]


def test_a_replaced_file_gets_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    write_atomically(tmp_path / "atomic", "x")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_collect_versions_is_plain_data_and_keeps_the_host_to_itself() -> None:
    versions = collect_versions()
    assert json.loads(json.dumps(versions)) == versions
    assert versions["python"] == platform.python_version()
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "platform"} < set(versions)
    assert versions["jaxrlhf"] == __import__("jaxrlhf").__version__
    assert versions["jax"] == __import__("jax").__version__
    assert versions["numpy"] == __import__("numpy").__version__
    assert versions["command"] == sys.orig_argv
    assert set(versions["git"]) == {"commit", "dirty"}
    assert platform.node() not in json.dumps({**versions, "command": []})


def test_a_missing_package_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_PACKAGES", ("numpy", "surely-not-installed"))
    versions = collect_versions()
    assert versions["surely-not-installed"] is None and versions["numpy"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, which holds `package/__init__.py`."""
    for variable in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{variable}_NAME", "someone")
        monkeypatch.setenv(f"{variable}_EMAIL", "someone@example.com")
    for variable in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "notes").write_text("")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_git_commit_and_whether_the_package_differs_from_it(checkout: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, check=True, capture_output=True, text=True)
    commit = head.stdout.strip()
    package = checkout / "package"
    assert git_commit(package) == (commit, False)
    (checkout / "notes").write_text("not of the package")
    assert git_commit(package) == (commit, False)
    (package / "new.py").write_text("")
    assert git_commit(package) == (commit, True)
    (package / "new.py").unlink()
    (package / "__init__.py").write_text("x = 1\n")
    assert git_commit(package) == (commit, True)


def test_git_commit_ignores_the_repository_of_a_hook(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = git_commit(checkout / "package")
    monkeypatch.setenv("GIT_DIR", str(checkout / "elsewhere"))
    assert git_commit(checkout / "package") == expected


def test_git_commit_of_a_package_that_the_checkout_does_not_track(checkout: Path) -> None:
    installed = checkout / "site-packages" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert git_commit(installed) == (None, None)


def test_git_commit_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert git_commit(checkout / "package") == (None, None)
