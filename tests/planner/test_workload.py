"""The work of a step, from its graph."""

import dataclasses

import pytest

from jaxrlhf.planner.workload import ModelCall, Workload
from tests.planner.described_step import TINY, ppo


def test_the_work_of_ppo():
    workload = ppo(rows=16, prompt=8, response=8, mini_batches=2).workload
    judged = ("reference.logprobs", "critic.values", "reward.scores")
    assert {call.name: set(call.needs) for call in workload.calls} == {
        "actor.generate": set(),
        **{name: {"actor.generate"} for name in judged},
        "actor.train": {"actor.generate", *judged},
        "critic.train": {"actor.generate", *judged},
    }
    assert workload.trained == {"actor", "critic"}
    assert [call.name for call in workload.readers("critic")] == ["critic.values"]
    assert workload.tokens == 16 * 16
    train = workload.call("actor.train")
    assert (train.rows, train.columns, train.outputs, train.updates, train.divisible) == (16, 16, 8, 2, (8,))
    assert workload.call("reward.scores").outputs == 1


def test_samples_of_a_prompt_are_sequences_of_their_own():
    workload = ppo(rows=4, num_samples=4, mini_batches=1).workload
    generate = workload.call("actor.generate")
    assert (generate.rows, generate.sequences, workload.call("critic.values").rows) == (4, 16, 16)


def test_what_a_workload_written_by_hand_must_be():
    call = ModelCall("a.generate", "a", "generate", TINY, "a", rows=4, prompt=4, response=4)
    with pytest.raises(ValueError, match=r"a name of its own. Got 'a.generate' twice"):
        Workload((call, call))
    with pytest.raises(ValueError, match=r"calls that stand before it. Got 'b.infer'. Before it: none"):
        Workload((dataclasses.replace(call, needs=("b.infer",)),))
