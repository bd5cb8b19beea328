"""Completion: what a shell is answered, asked through bash itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrlhf.commands import completion, completion_words
from jaxrlhf.commands.command_line import COMMANDS
from tests.subprocesses import ROOT

ASK = """
eval "$(jaxrlhf completion bash)"
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete jaxrlhf
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def words() -> completion.Words:
    return json.loads(json.dumps(completion_words.words()))


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """The candidates of bash for a command line, in a folder with two runs and a config."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "bin").mkdir()
    shim = folder / "bin" / "jaxrlhf"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxrlhf "$@"\n')
    shim.chmod(0o755)
    for name in ("one", "two"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.yaml").touch()
    (folder / "runs/one/checkpoints/steps/40").mkdir(parents=True)
    (folder / "runs/other").mkdir()
    (folder / "mine.yaml").write_text("base: grpo_lora_hf\nroles: {judge: {init: x}}\n")
    variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "PYTHONPATH": str(ROOT)}

    def ask(line: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", ASK, "bash", line],
            cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280, check=True,
        )  # fmt: skip
        return [word.strip() for word in done.stdout.splitlines()]

    return ask


def test_bash_is_answered(ask):
    assert set(COMMANDS) <= set(ask("jaxrlhf "))
    assert ask("jaxrlhf trai") == ["train"]
    assert {"--config", "--set", "--resume", "--dry-run"} <= set(ask("jaxrlhf train --"))
    assert ask("jaxrlhf plan --costs me") == ["measured"]
    assert {"ppo_arithmetic", "ppo_hf"} <= set(ask("jaxrlhf train --config ppo_"))
    assert "mine.yaml" in ask("jaxrlhf train --config ")
    assert ask("jaxrlhf train --resume ") == ["auto", "runs/one", "runs/two"]
    assert ask("jaxrlhf timeline runs/t") == ["runs/two"]
    assert ask("jaxrlhf train --set batch") == ["batch_size="]
    # bash splits words at "=", and is given what comes after it
    assert ask("jaxrlhf train --set roles.actor.optimizer.schedule=co") == ["constant", "cosine"]


def test_keys_are_those_of_the_roles_and_the_algorithm_of_the_config(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("base: grpo_lora_hf\nroles: {judge: {init: x}}\n")
    keys = words["keys"]
    assert completion.settings("roles.j", keys, "mine.yaml") == completion.settings("roles.judge.", keys, "mine.yaml")
    assert completion.settings("roles.judge.lora.r", keys, "mine.yaml") == ["roles.judge.lora.rank="]
    assert completion.settings("roles.c", keys, "mine.yaml") == [], "GRPO has no critic"
    assert "roles.critic." in completion.settings("roles.", keys, None)
    assert completion.settings("settings.sampling.num_s", keys, "mine.yaml") == ["settings.sampling.num_samples="]
    assert completion.settings("settings.critic_update.m", keys, "mine.yaml") == []
    assert completion.settings("settings.critic_update.m", keys, None) == ["settings.critic_update.mini_batches="]
    assert completion.settings("plan.calls.actor.t", keys, None) == completion.settings(
        "plan.calls.actor.train.", keys, None
    )
    assert completion.settings("plan=", keys, None) == ["plan=auto"]
    assert completion.settings("output.tensorboard=t", keys, None) == ["output.tensorboard=true"]
    assert completion.names_in("nowhere.yaml") == (completion.ROLES, "ppo")


def test_checkpoints_follow_a_run_that_is_written_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (40, 80):
        Path(f"runs/one/checkpoints/steps/{number}").mkdir(parents=True)
    Path("runs/one/config.yaml").touch()
    assert completion._runs("ru") == ["runs/one"]
    steps = [f"runs/one/checkpoints/steps/{number}" for number in (40, 80)]
    assert completion._runs("runs/one/") == steps
    assert completion._runs(str(tmp_path / "runs") + "/") == [str(tmp_path / "runs/one")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_for_each_shell(shell, capsys):
    assert completion.main([shell]) == 0
    out = capsys.readouterr().out
    assert ("complete --command jaxrlhf" if shell == "fish" else "compdef _python_argcomplete jaxrlhf") in out


def test_words_are_collected_once_for_a_state_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(completion, "CACHE", str(tmp_path / "folder" / "words.json"))
    started = []

    def run(command, **settings):
        assert "_ARGCOMPLETE" not in settings["env"]
        started.append(command[1:])
        return subprocess.CompletedProcess(command, 0, stdout='{"options": {}}')

    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setattr(completion.subprocess, "run", run)
    assert completion.known_words() == completion.known_words() == {"options": {}}
    assert started == [["-m", "jaxrlhf.commands.completion_words"]]
    monkeypatch.setattr(completion, "__version__", "9.9")
    completion.known_words()
    assert len(started) == 2
