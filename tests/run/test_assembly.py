"""What is said of a plan before anything compiles."""

import re

import pytest

from jaxrlhf.planner.plans.plan import PlanError
from jaxrlhf.run.assembly import assemble
from jaxrlhf.testing import SMALL_MODEL, small_run

ROLES = {
    "actor": {"model": {**SMALL_MODEL, "num_layers": 2}, "optimizer": {"learning_rate": 1e-3}},
    "critic": {"init": "actor", "head": "scalar", "optimizer": {"learning_rate": 1e-3}},
}


def assembled(plan):
    return assemble(small_run("ppo", roles=ROLES, plan=plan), 8, 4)


def test_a_call_with_too_few_micro_batches_is_noted_once():
    warned = assembled(
        {"default": {"pipeline": 2, "micro_batches": 2}, "calls": {"actor.train": {"pipeline": 2}}}
    ).warnings
    (note,) = [warning for warning in warned if "bubble" in warning]
    assert note.startswith(
        "plan.calls.actor.train: 1 micro-batch for 2 pipeline stages: the devices wait 50% of the time"
    )


def test_arrays_have_no_stages_of_their_own():
    with pytest.raises(
        PlanError, match=re.escape("plan.calls.ppo_batch.pipeline: must be 1, since a `compute` call has")
    ):
        assembled({"default": {"data": 1}, "calls": {"ppo_batch": {"pipeline": 2}}})


def test_generation_takes_no_chunks_from_the_default():
    roles = {**ROLES, "actor": {**ROLES["actor"], "model": {**SMALL_MODEL, "num_layers": 4}}}
    run = small_run("ppo", roles=roles, plan={"default": {"pipeline": 2, "chunks": 2}})
    with pytest.raises(PlanError, match=re.escape("give the call an entry of its own, {pipeline: 2, data: 1, fsdp: 1")):
        assemble(run, 8, 4)


def test_an_order_of_admission_without_slots_is_noted():
    def notes(generate):
        warned = assembled({"longest_first": True, "calls": {"actor.generate": generate}}).warnings
        return [warning for warning in warned if "longest_first" in warning]

    assert notes({"data": 2, "slots": 2}) == []
    assert notes({"data": 2}) == ["plan.longest_first changes nothing: no call of the step generates in slots."]
