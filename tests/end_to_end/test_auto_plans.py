"""Runs that plan for themselves, or take a plan from a file."""

import functools
import json
from pathlib import Path

import pytest

from jaxrlhf.config.device_text import devices_from_text
from jaxrlhf.config.reading import dump_yaml
from jaxrlhf.config.schema import load_run
from jaxrlhf.planner.search.methods import METHODS
from jaxrlhf.planner.search.search import search
from jaxrlhf.run import find_plan as finding

SAME = ("--set", "warm_start=null", "--set", "devices=cpu:8")


@pytest.fixture(autouse=True)
def the_same_plan_at_once(monkeypatch):
    """A short search, and costs that are the same on every machine."""
    monkeypatch.setitem(METHODS, "search", functools.partial(search, steps=5_000))  # pyright: ignore
    monkeypatch.setattr(finding, "usual_source", lambda cluster: "analytic")


def test_a_run_plans_for_itself_tells_how_right_it_was_and_goes_on_as_it_was(train):
    status, output, error = train(*SAME, "--set", "name=auto", "--set", "plan=auto", "--set", "steps=2")
    assert status == 0, error
    auto = Path("runs/latest").resolve()
    assert "Note: Planned for 1x8:cpu by search in" in output and "Predicted and measured, median of 1 step" in output

    planned, ran = (json.loads((auto / name).read_text()) for name in ("planned.json", "plan.json"))
    assert ran["step"].get("offload") == planned["plan"].get("offload")
    for call in planned["calls"]:
        planned_call, ran_call = planned["plan"]["calls"][call], ran["step"]["calls"][call]
        devices, ran_devices = (devices_from_text(each["devices"]) for each in (planned_call, ran_call))
        assert sorted(ran_devices) == list(devices)
        assert {**ran_call, "devices": planned_call["devices"]} == planned_call
    generate = ran["evaluation"]["calls"]["actor.generate"], planned["plan"]["calls"]["actor.generate"]
    assert len({tuple(sorted(devices_from_text(each["devices"]))) for each in generate}) == 1
    forecast = json.loads((auto / "outcome.json").read_text())["forecast"]
    assert forecast["steps_measured"] == 1 and set(forecast["calls"]) == set(planned["calls"])
    for name, seconds in forecast["calls"].items():
        assert seconds["predicted"] == planned["calls"][name]["seconds"] and seconds["measured"] > 0

    again = (*SAME, "--set", "name=auto", "--set", f"resume={auto}", "--set", "steps=3", "--dry-run")
    assert f"Note: Kept the plan that the run had, {auto.resolve()}" in train(*again, "--set", "plan=auto")[1]
    other = train(*again, "--set", "plan={auto: true, offload: [reference]}")[1]
    assert "Not the plan that the run had: the config asks for another." in other and "Note: Planned for" in other
    fewer = train(*again, "--set", "plan=auto", "--set", "seed=0", "--set", "settings.sampling.max_new_tokens=12")[1]
    assert "Not the plan that the run had: " in fewer and "actor.generate.response: 10 there, 12 in this run" in fewer


def test_written_calls_stay_and_the_rest_is_planned_for(train):
    calls = "{critic.train: {fsdp: 2, devices: 4-5}, critic.values: {data: 2, devices: '3,2'}}"
    status, output, error = train(*SAME, "--set", f"plan={{auto: true, calls: {calls}}}", "--dry-run")
    assert status == 0, error
    assert "fsdp 2 on 4-5" in output and "data 2 on 3,2" in output


def test_other_parts_of_a_run_fit_themselves_to_a_plan(train):
    """Rows of the warm start and the evaluation that the degrees of the step do not divide."""
    over_all = "plan={auto: true, calls: {reference.logprobs: {data: 8}}}"
    odd = ("--set", "evaluation={num_prompts: 9, scorers: [exact_match]}", "--set", "warm_start.batch_size=6")
    status, output, error = train("--set", "devices=cpu:8", "--set", over_all, *odd, "--dry-run")
    assert status == 0, error
    assert "Plan of the warm start" in output and "Plan of the evaluation" in output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan=aut", "plan: must be a mapping, auto, interleaving, interleaving-2, disaggregated, or the path"),
        ("plan=aut", "Got 'aut'. Did you mean 'auto'?"),
        (
            "plan=gone.json",
            "gone.json: must be what python -m jaxrlhf.plan --out wrote. Got a file that cannot be read",
        ),
        (
            "plan={auto: true, default: {data: 2}}",
            "plan.default: calls that the plan does not name are planned for. Got",
        ),
        (
            "plan={file: a.json, calls: {actor.train: {data: 2}}}",
            "plan.file: a file has the placements of all calls. Got also calls",
        ),
        (
            "plan={auto: true, fuse: [actor.train, critic.train]}",
            "plan.fuse: calls that are planned for run by themselve",
        ),
        (
            "plan={auto: true, calls: {actor.trian: {data: 2}}}",
            "plan.calls.actor.trian: no call of this run has that name.",
        ),
        (
            "plan={auto: true, calls: {critic.train: {data: 3}}}",
            "plan.calls.critic.train, in the step: micro_batches x data x fsdp must",
        ),
    ],
)
def test_plans_that_are_refused(train, override, message):
    status, _, error = train("--dry-run", "--set", "devices=cpu:8", "--set", override)
    assert status == 1 and message in " ".join(error.split())


@pytest.mark.parametrize(
    "plan", ["auto", "plans/mine.json", "{auto: true, offload: [reference]}", "{offload: [reference]}"]
)
def test_a_config_is_written_as_it_is_read(tmp_path, plan):
    run = load_run("ppo_arithmetic", [f"plan={plan}"])
    (tmp_path / "again.yaml").write_text(dump_yaml(run))
    assert load_run(tmp_path / "again.yaml") == run
    assert run.plan.file == (plan if plan.endswith(".json") else "") and run.plan.auto == ("auto" in plan)
    assert run.plan.offload == (("reference",) if "offload" in plan else ())
