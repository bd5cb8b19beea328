"""Rows that do not divide over devices, micro-batches or stages: the same tokens, losses and weights."""

from typing import Any

import numpy as np
import pytest

from jaxrlhf.planner.plans.splits import copied_rows
from jaxrlhf.run.assembly import assemble
from jaxrlhf.sharding import mesh
from jaxrlhf.testing import DEVICES_PER_NODE, NUM_DEVICES, _Trial, mean_of_characters, small_run

ROWS = 8
PLANS: dict[str, dict[str, Any]] = {
    "three shards": {
        "actor.generate": {"data": 3},
        "reference.logprobs": {"data": 3, "devices": "4-6"},
        "ppo_batch": {"data": 3},
        "critic.values": {"fsdp": 1, "data": 3, "micro_batches": 2, "balance": True},
    },
    "stages and micro-batches": {
        "actor.generate": {"pipeline": 2, "data": 3, "devices": "0-5"},
        "reference.logprobs": {"pipeline": 2, "micro_batches": 3, "devices": "4-5"},
        "critic.values": {"pipeline": 2, "data": 2, "micro_batches": 3, "balance": True, "devices": "0-3"},
    },
}


def steps(plan: dict[str, Any], num_samples: int, first_weights: Any = None) -> _Trial:
    settings = {"sampling": {"num_samples": num_samples}} if num_samples > 1 else {}
    run = small_run(
        "ppo" if num_samples == 1 else "grpo",
        steps=2, batch_size=ROWS, reward=mean_of_characters, settings=settings,
        plan={"default": {"data": 1}, "calls": plan},
    )  # fmt: skip
    mesh.use_virtual_cpu_devices(NUM_DEVICES, or_more=True)
    assembly = assemble(run, NUM_DEVICES, NUM_DEVICES if "devices" in str(plan) else DEVICES_PER_NODE)
    copied = sum(
        copied_rows(c, assembly.train.plan[c].strategy) for c in assembly.train.graph.calls if c.kind != "host"
    )
    assert (copied > 0) == bool(plan)
    return _Trial(run, assembly.train, assembly.train_rows, first_weights)


@pytest.fixture(scope="module")
def on_one_device():
    return steps({}, 1)


@pytest.mark.parametrize("name", PLANS)
def test_they_change_nothing(name, on_one_device):
    got = steps(PLANS[name], 1, on_one_device.first_weights)
    got.assert_same(on_one_device, name)
    assert on_one_device.moved
    assert all(tokens["actor.generate"].shape[0] == ROWS for tokens in got.sampled)


def test_several_samples_of_a_prompt():
    alone = steps({}, 2)
    got = steps({"actor.generate": {"data": 3}, "reference.logprobs": {"data": 3}}, 2, alone.first_weights)
    got.assert_same(alone, "three shards")
    drawn = got.sampled[0]["actor.generate"]
    assert drawn.shape[0] == 2 * ROWS and len(np.unique(drawn, axis=0)) > ROWS
