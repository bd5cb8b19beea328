"""The command that plans a run, as it is called."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrlhf.plan import main
from jaxrlhf.planner.plans.saved_plan import read_plan


@pytest.fixture
def plan(train, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs the command on a small config; returns exit status, standard output and error."""

    def run(*arguments: str, config: str = "tiny.yaml") -> tuple[int, str, str]:
        status = main(["--config", config, "--cluster", "1x2:a100-80g", "--costs", "analytic", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_it_prints_the_plan_and_writes_it_with_pictures(plan):
    status, output, error = plan("--out", "plans/tiny.json", "--seconds", "0.2")
    assert status == 0, error
    for words in (
        "Planned for 1x2:a100-80g by search in", "Plan\n", "Memory\n", "s an iteration, ", "the heuristic plan",
        "Plans that lost", "Note: Costs: counted by formulas.", "Assumed, not measured\n",
        "Of their peaks a100-80g devices reach: large matrix products 70%, memory 85%, ", "Decoding steps take 2 us a ",
        "Note: What the config says under `plan` is not kept to",
    ):  # fmt: skip
        assert words in output, words
    saved = read_plan("plans/tiny.json")
    assert saved.devices.cluster == "1x2:a100-80g" and "ppo_batch" in saved.plan.placements
    for name in ("tiny_timeline.png", "tiny_search.png"):
        assert Path("plans", name).read_bytes().startswith(b"\x89PNG")
        assert f"plans/{name}" in output


def test_machines_get_one_document(plan):
    sizes = ("--response-tokens", "20", "--prompt-tokens", "9", "--lengths", "6,20")
    status, output, error = plan("--json", "--strategy", "heuristic", *sizes)
    assert status == 0, error
    document = json.loads(output)
    assert document["strategy"] == "heuristic" and document["times_heuristic"] == pytest.approx(1.0)
    assert document["tokens"] == 16 * (9 + 6)
    assert 0 < document["calls"]["actor.generate"]["decoding"]["steps"] < 19
    assert set(document["plan"]["calls"]) == {*document["calls"], "ppo_batch"}


def test_sizes_of_data_that_is_not_there_can_be_planned_for(plan):
    """Tokens that the settings name are of a tokenizer that is not there either."""
    gone = ("--set", "data={path: gone.jsonl}", "--set", "tokenizer={kind: file, path: gone}")
    gone += ("--set", "settings.sampling.banned_tokens=[999]")
    status, output, error = plan(
        "--json", *gone, "--prompt-tokens", "100", "--batch-size", "32", "--strategy", "colocate"
    )
    assert status == 0, error
    assert json.loads(output)["tokens"] == 32 * 110
    status, _, error = plan(*gone)
    assert status == 1 and "gone" in error


def test_calls_that_the_config_places_stay_there(plan):
    written = "plan={auto: true, calls: {critic.train: {devices: '1'}, exact_match.scores: {data: 2}}}"
    status, output, error = plan("--set", written, "--out", "plan.json", "--seconds", "0.2")
    assert status == 0, error
    assert read_plan("plan.json").plan.placements["critic.train"].devices == (1,)
    assert "Note: plan.calls.exact_match.scores: no call of the step has that name." in output


def test_the_plan_for_the_devices_that_are_here_can_be_run(plan, train, results):
    status, _, error = plan(
        "--cluster", "local", "--set", "devices=cpu:8", "--out", "plan.json", "--strategy", "colocate"
    )
    assert status == 0, error
    assert read_plan("plan.json").devices.names == (("cpu",),)
    status, output, error = train("--set", "plan=plan.json", "--dry-run")
    assert status == 0 and "Note: The plan of plan.json" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "1x8:h101"), "unknown kind of device 'h101'. Known: "),
        (("--cluster", "eight"), "cluster: must be groups of nodes. Got 'eight'."),
        (("--set", "roles.actor.model={preset: 70b}"), " GB too much, on 2 devices as tensor 2 (weights and "),
        (("--prompt-tokens", "0"), "--prompt-tokens: must be at least 1. Got 0."),
        (("--response-tokens", "-1"), "--response-tokens: must be at least 1. Got -1."),
        (("--lengths", "6,20"), "plan.lengths.p99: must be at most max_new_tokens=10, which cuts responses off."),
        (("--lengths", "6"), "plan.lengths.run: must be the folder of a run. Got '6'; 6/metrics.jsonl: No such file"),
        (("--costs", "measured"), "--costs measured: is for clusters of devices like those of this machine,"),
        (("--out", "tiny.yaml/plan.json"), "File exists: 'tiny.yaml'"),
        (("--calibration", "none.json"), "--calibration: goes with --costs measured. Got analytic. Leave one out."),
        (("--out", "plan"), "--out: must be a file whose name ends in .json. Got 'plan'."),
        (("--set", "plan={auto: true, calls: {critic.trian: {data: 2}}}"), "plan.calls.critic.trian: no call of this"),
    ],
)  # fmt: skip
def test_what_is_refused(plan, arguments, message):
    status, output, error = plan(*arguments)
    assert status == 1 and re.search(re.escape(message), " ".join(error.split())), error
    assert "Plan\n" not in output


def test_an_algorithm_that_draws_nothing_has_no_response_tokens(plan):
    Path("own.py").write_text("def step(roles, state, prompts, config):\n    return {}, state\n")
    status, _, error = plan("--response-tokens", "5", "--set", "algorithm=own.py:step", "--set", "settings={}")
    assert status == 1 and "--response-tokens: is for algorithms whose settings have max_new_tokens." in error


def test_without_matplotlib_there_are_no_pictures(plan, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    status, _, error = plan("--strategy", "colocate", "--out", "plan.json")
    assert status == 0 and Path("plan.json").exists() and not list(Path().glob("*.png")), error
    status, _, error = plan("--strategy", "colocate", "--pictures", "pictures")
    assert status == 1 and "needs matplotlib" in error


def test_tails_are_looked_for_where_lengths_are_known(plan):
    arguments = ("--cluster", "1x4:h100", "--strategy", "colocate", "--response-tokens", "64", "--lengths", "9,40")
    status, output, error = plan(*arguments, "--out", "plans/tail.json")
    assert status == 0, error
    assert "Calls in parts" in output and "95 %" in output
    fused = "With a tail an iteration takes" in output
    assert fused or "The plan stays as it is, without a tail. None takes less than 0.98" in output
    saved = read_plan("plans/tail.json")
    assert saved.plan.placements["actor.generate"].is_whole != fused == ("Plan with calls in parts" in output)
    assert plan(*arguments, "--whole", "--out", "plans/whole.json")[0] == 0
    whole = read_plan("plans/whole.json")
    assert whole.plan.placements["actor.generate"].is_whole and saved.step_seconds <= whole.step_seconds
    _, without, _ = plan(*arguments[:4])
    assert "Calls in parts" not in without
