"""What is said of a run that does not fit, before it starts."""

import dataclasses
import re
import shlex

import pytest

from jaxrlhf.config.reading import ConfigError, apply_overrides, to_tree
from jaxrlhf.config.schema import RunConfig, build_run, load_run
from jaxrlhf.planner import memory_forecast
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.memory_remedies import OutOfMemoryError, check_room, forecast_step
from jaxrlhf.testing import SMALL_MODEL, small_run

GB = 10**9
LARGE = {**SMALL_MODEL, "hidden_size": 512, "intermediate_size": 2048, "num_layers": 8}
ROLES = {
    "actor": {"model": LARGE, "optimizer": {}},
    "critic": {"init": "actor", "head": "scalar", "optimizer": {}},
    "reference": {"init": "actor"},
}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A machine of 64 GB, all of them available."""
    for name in ("host_memory", "total_memory"):
        monkeypatch.setattr(memory_forecast, name, lambda: 64 * GB)


def large_run(memory: str, **config) -> RunConfig:
    return small_run(
        "ppo", roles=ROLES, batch_size=64, settings={"sampling": {"max_new_tokens": 200}}, devices_memory=memory,
        **{"plan": {"calls": {"critic.train": {"data": 4}}}, **config},
    )  # fmt: skip


def assembled(config: RunConfig) -> Assembly:
    return assemble(config, 8)


def refusal(config: RunConfig) -> str:
    made = assembled(config)
    with pytest.raises(OutOfMemoryError) as caught:
        check_room(made, forecast_step(made))
    return str(caught.value)


def remedies(text: str) -> dict[str, tuple[float, list[str]]]:
    """What -> (GB with it, its overrides)."""
    found = re.findall(r"\n  (\S.*): about (\S+) GB.*\n    (.*)", text)
    return {what: (float(size), shlex.split(command.replace("--set ", ""))) for what, size, command in found}


def test_a_run_that_does_not_fit_is_refused_with_what_helps_the_cheapest_first():
    text = refusal(large_run("5 GB"))
    rule = "plan: a step must fit into the 5 GB that devices_memory allows. Got about "
    assert text.startswith(rule) and "in the memory that devices 0-7 share during actor.train (" in text
    assert text.endswith("To go on with it: --set devices_memory.may_exceed=true")
    found = list(remedies(text))
    order = ["activations computed again in the backward pass", "weights split over devices",
             "optimizer state in bfloat16", "adapters in place of all weights", "shorter responses"]  # fmt: skip
    assert [what for what in found if what in order] == order
    assert "weights that rest in host memory" not in found, "the devices share the host's memory"


def test_each_remedy_is_a_change_that_the_run_takes_and_that_does_what_it_says():
    config = large_run("5 GB")
    text = refusal(config)
    before = float(text.partition("Got about ")[2].split()[0])
    for what, (size, overrides) in remedies(text).items():
        changed = build_run(apply_overrides(to_tree(config), overrides), where="test")
        forecast = forecast_step(assembled(changed))
        assert forecast.needed / GB == pytest.approx(size, rel=0.01), what
        assert size < before, what
        assert (", which fits" in text.partition(f"  {what}: ")[2].splitlines()[0]) == (not forecast.excess)


def test_where_no_change_is_enough_all_of_them_together_are_tried():
    assert "None of this is enough" in refusal(large_run("2 GB", seed=1))
    text = refusal(large_run("3.3 GB", seed=1))
    size, overrides = remedies(text)["together"]
    alone = [each for what, (each, _) in remedies(text).items() if what != "together"]
    assert size <= 3.3 < min(alone) and len(overrides) > 2 and "None of this is enough" not in text
    changed = build_run(apply_overrides(to_tree(large_run("3.3 GB", seed=1)), overrides), where="test")
    assert not forecast_step(assembled(changed)).excess


def test_a_run_may_go_on_in_spite_of_the_forecast_with_a_note():
    config = load_run("ppo_arithmetic", ["devices_memory=20 GB", "devices_memory.may_exceed=true"])
    assert config.devices_memory.may_exceed and config.devices_memory.host_bytes == 20 * GB
    config = large_run("5 GB")
    made = assembled(
        dataclasses.replace(config, devices_memory=dataclasses.replace(config.devices_memory, may_exceed=True))
    )
    (note,) = check_room(made, forecast_step(made))
    assert note.endswith("It goes on, since devices_memory.may_exceed is set.")


def test_what_is_known_to_the_byte_cannot_be_let_pass(monkeypatch):
    monkeypatch.setattr(memory_forecast, "total_memory", lambda: 2 * GB)
    config = large_run("")
    made = assembled(
        dataclasses.replace(config, devices_memory=dataclasses.replace(config.devices_memory, may_exceed=True))
    )
    with pytest.raises(OutOfMemoryError, match="at rest must fit into the 2 GB of the host") as caught:
        check_room(made, forecast_step(made))
    assert "may_exceed" not in str(caught.value) and "adapters" in str(caught.value)


def test_a_run_that_fits_is_let_alone():
    made = assembled(large_run("60 GB"))
    assert check_room(made, forecast_step(made)) == []


def test_a_plan_that_was_looked_for_is_made_leaner_by_a_limit():
    made = assembled(large_run("", plan={"auto": True}))
    text = _said(dataclasses.replace(forecast_step(made), excess="plan: too large."), made)
    assert "The planner finds a leaner plan under a limit: --set 'devices_memory=" in text


def _said(forecast, made: Assembly) -> str:
    with pytest.raises(OutOfMemoryError) as caught:
        check_room(made, forecast)
    return str(caught.value)


def test_a_key_of_a_short_form_can_be_set():
    run = load_run("ppo_gsm8k", ["roles.actor.model.logits_chunk_tokens=512"])
    actor = run.roles["actor"].stated
    assert actor is not None and actor["logits_chunk_tokens"] == 512 and "preset" not in actor
    with pytest.raises(ConfigError, match=r"--set seed\.x: seed has no keys\. Got 0\. Set it whole\."):
        load_run("ppo_gsm8k", ["seed=0", "seed.x=1"])
