"""The console command: help, version, and the way to each command."""

import resource
import subprocess
import sys
import types

import pytest

import jaxrlhf
from jaxrlhf.commands import command_line
from jaxrlhf.commands.command_line import COMMANDS, main, run
from tests.subprocesses import ROOT


def test_help_lists_every_command_in_a_line(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    out = capsys.readouterr().out.splitlines()
    assert left.value.code == 0 and out[0] == "usage: jaxrlhf COMMAND [OPTIONS]"
    for name, command in COMMANDS.items():
        assert any(line.split() == [name, *command.summary.split()] for line in out)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith(f"usage: jaxrlhf {name} ")


def test_the_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"jaxrlhf {jaxrlhf.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["trian"], "Error: Unknown command 'trian'. Known: init, doctor, train, "),
        (["trian"], "Did you mean 'train'?\n"),
        (["--config", "x"], "unrecognized arguments: --config"),
        ([], "usage: jaxrlhf COMMAND [OPTIONS]"),
    ],
)
def test_what_is_no_command_ends_with_2(arguments, error, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and error in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nothing"]])
def test_jax_is_not_imported_to_say_what_there_is(arguments):
    code = (
        "import sys\nfrom jaxrlhf.commands.command_line import run\ntry: run()\nexcept SystemExit: pass\n"
        "print(sorted({'jax', 'numpy', 'rich', 'yaml'} & {*sys.modules}))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 0.3, "CPU-seconds"


@pytest.mark.parametrize(("has_leave", "status"), [(True, 143), (False, 1)])
def test_the_process_ends_as_the_module_would(has_leave, status, monkeypatch):
    """`leave` of a module may end the process without shutting down the interpreter."""
    said = []

    def leave(status):
        said.append(status)
        raise SystemExit(status)

    module = types.SimpleNamespace(main=lambda arguments: said.append(arguments) or status)
    if has_leave:
        module.leave = leave
    monkeypatch.setattr(command_line.importlib, "import_module", {"jaxrlhf.train": module}.__getitem__)
    monkeypatch.setattr(command_line, "restart_with_huge_pages", said.append)
    monkeypatch.setattr(sys, "argv", ["jaxrlhf", "train", "--config", "x"])
    with pytest.raises(SystemExit) as left:
        run()
    assert left.value.code == status
    assert said == ["jaxrlhf.train", ["--config", "x"], *([143] if has_leave else [])]
