"""Errors in a config with the lines that they are about."""

from pathlib import Path

import pytest

from jaxrlhf.calibrate import main as calibrate
from jaxrlhf.config.excerpts import WIDTH, with_excerpt
from jaxrlhf.plan import main as plan
from jaxrlhf.train import InputError, main, read

BASE = """\
name: small
steps: 2
batch_size: 8
algorithm: ppo
devices: cpu:8
data: {task: arithmetic}
roles:
  actor:
    model: tiny
    optimizer: &optimizer
      learning_rate: 1.0e-3
  critic: {init: actor, head: scalar, optimizer: *optimizer}
  reference: {init: actor}
  reward: {function: exact_answer}
plan:
  calls:
    actor.train: {data: 3}
compilation_cache: ""
"""


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """What `train` says of `run.yaml` over `base.yaml`, below its message."""
    monkeypatch.chdir(tmp_path)

    def say(text: str, *overrides: str, base: str = BASE, command=main) -> tuple[str, str]:
        Path("base.yaml").write_text(base)
        Path("run.yaml").write_text(text)
        more = [x for override in overrides for x in ("--set", override)]
        assert command(["--config", "run.yaml", *more, *(["--dry-run"] if command is main else [])]) == 1
        message, _, excerpt = capsys.readouterr().err.partition("\n")
        assert message.startswith("Error: ")
        return message, excerpt

    return say


def test_yaml_that_is_not_valid(said):
    message, excerpt = said("name: x\nsteps: [1,\nseed: 0\nbatch_size: 8\n")
    assert message == "Error: run.yaml, line 4, column 11: expected ',' or ']', but got ':'."
    assert (
        excerpt
        == """
run.yaml, line 4, column 11
  2 | steps: [1,
  3 | seed: 0
> 4 | batch_size: 8
    |           ^
"""
    )


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        # an unknown key
        ("base: base.yaml\nroles:\n  actor: {lora: {rnk: 16}}\n", ["run.yaml, line 3, column 18", "{rnk: 16}", "^^^"]),
        # a wrong type
        ("base: base.yaml\nsteps: many\n", ["run.yaml, line 2, column 8", "steps: many", "^^^^"]),
        # a rule of a dataclass
        ("base: base.yaml\nsettings:\n  gae_lambda: 2.0\n", ["run.yaml, line 3, column 15", "gae_lambda: 2.0", "^^^"]),
        # an item of a list
        ("base: base.yaml\nevaluation: {scorers: [a, 7]}\n", ["run.yaml, line 2, column 27", "[a, 7]", "^"]),
        # something that is missing: the section
        ("base: base.yaml\nwarm_start:\n  steps: 2\n", ["run.yaml, line 2, column 1", "warm_start:", "^^^^^^^^^^"]),
        # known only when the step is drafted
        ("base: base.yaml\n", ["base.yaml, line 17, column 5", "    actor.train: {data: 3}", "^^^^^^^^^^^"]),
        # markup is text
        ("base: base.yaml\nstepz: '[bold]x[/bold]'\n", ["run.yaml, line 2, column 1", "'[bold]x[/bold]'", "^^^^^"]),
    ],
)  # fmt: skip
def test_keys_of_files(text, marked, said):
    message, excerpt = said(text)
    place, line, mark = marked
    lines = excerpt.splitlines()
    assert lines[1] == place, message
    (at,) = [i for i, shown in enumerate(lines) if shown.startswith("> ")]
    assert line in lines[at] and lines[at + 1].endswith(f" {mark}")
    column = len(lines[at + 1]) - len(mark) - lines[at + 1].index("|") - 1
    assert place.endswith(f"column {column}")


def test_a_key_of_the_base_and_one_behind_an_alias(said):
    _, excerpt = said("base: base.yaml\n", base=BASE.replace("batch_size: 8", "batch_size: 0"))
    assert excerpt.splitlines()[1] == "base.yaml, line 3, column 13"
    _, excerpt = said("base: base.yaml\n", base=BASE.replace("1.0e-3", "fast"))
    assert excerpt.splitlines()[1] == "base.yaml, line 11, column 22"
    _, excerpt = said("base: base.yaml\nbatch_size: 0\n", base=BASE.replace("batch_size: 8", "batch_size: -1"))
    assert excerpt.splitlines()[1] == "run.yaml, line 2, column 13", "which lies over the base"
    _, excerpt = said("base: base.yaml\n", base="steps: [\n")
    assert excerpt.splitlines()[1].startswith("base.yaml, line ")


@pytest.mark.parametrize(
    ("override", "mark"),
    [
        ("stepz=3", "^^^^^"),
        ("steps=many", "^^^^^"),
        ("roles.actor.lora={rnk: 16}", "^^^^^^^^^^^^^^^^"),
        ("settings.sampling={", "                   ^"),
    ],
)
def test_overrides(override, mark, said):
    _, excerpt = said("base: base.yaml\nsteps: 1\n", override)
    assert excerpt.splitlines() == ["", "on the command line", f"> --set {override}", f"        {mark}"]


def test_a_rule_of_a_section_shows_what_is_laid_over_it_and_the_section(said):
    text = "base: base.yaml\nwarm_start:\n  steps: 4\n  batch_size: 8\n  optimizer: {}\n"
    message, excerpt = said(text, "warm_start.updates_per_step=3")
    assert message.startswith(
        "Error: run.yaml over base.yaml with --set: warm_start: steps, batch_size, updates_per_step"
    )
    lines = excerpt.splitlines()
    assert lines[1:3] == ["on the command line", "> --set warm_start.updates_per_step=3"]
    assert lines[4] == "run.yaml, line 2, column 1"


def test_the_folder_of_all_roles_stands_for_their_origin(said):
    text = BASE.replace("model: tiny", "lora: null").replace("name: small", "name: small\nmodel: nowhere/model")
    message, excerpt = said(text)
    assert "nowhere/model" in message and excerpt.splitlines()[1] == "run.yaml, line 2, column 8", message


def test_long_lines_are_cut_around_the_place(said):
    text = "base: base.yaml\nroles: {reward: {options: {long: " + "x" * 500 + "}, functoin: f}}\n"
    _, excerpt = said(text)
    (line,) = [line for line in excerpt.splitlines() if line.startswith("> ")]
    assert "functoin: f}}" in line and len(line) < WIDTH + 20
    _, excerpt = said("base: base.yaml\n", "name=" + "/" * 500)
    assert max(map(len, excerpt.splitlines()), default=0) < WIDTH + 20


@pytest.mark.parametrize(
    "message",
    ["data.jsonl: must be there.", "Name of the run: must be plain.", "nowhere: x.", "x.yaml, line 3, column 1: y"],
)
def test_messages_that_name_no_place_stay_as_they_are(message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("data: {task: arithmetic}\n")
    assert with_excerpt(message, "run.yaml", ["steps=2"]) == message
    assert with_excerpt(message, None, []) == message


@pytest.mark.parametrize(
    "text", ["base: run.yaml\nsteps: x\n", "", "- 1\n", "base: [1]\n", "base: nowhere.yaml\n", "\t"]
)
def test_files_that_are_no_config(text, said):
    assert "Traceback" not in said(text)[1]


def test_the_error_itself_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("stepz: 1\n")
    with pytest.raises(InputError) as raised:
        read("run.yaml", [])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("command", [plan, calibrate])
def test_other_commands_show_them_too(command, said):
    _, excerpt = said("base: base.yaml\nstepz: 1\n", command=command)
    assert excerpt.splitlines()[1] == "run.yaml, line 2, column 1"
