"""Programs of calls with described arguments are those that run."""

import jax
import pytest

from jaxrlhf.programs.ahead_of_time import call_program
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import ppo

STEP = ppo()


@pytest.mark.parametrize("name", [call.name for call in STEP.workload.calls])
def test_every_call_can_be_lowered(name):
    layout = Layout.over((0, 1), Strategy(tensor=2))
    call = STEP.workload.call(name)
    program = call_program(call.require_described(), layout, num_layers=1, rows=4)
    shapes = [x.shape for x in jax.tree.leaves(program.arguments) if x.sharding == layout.rows]
    assert {shape[0] for shape in shapes} == {4}
    lowered = program.lower()
    outputs = jax.tree.leaves(lowered.out_info)
    if call.kind != "train":
        assert {x.shape[0] for x in outputs} == {4}


def test_rows_are_split_over_shards():
    layout = Layout.over((0, 1, 2, 3), Strategy(data=2, fsdp=2))
    program = call_program(STEP.workload.call("critic.train").require_described(), layout, num_layers=2, rows=8)
    params, *_ = program.arguments
    assert len(params["layers"]) == 2
    assert params["layers"][0]["gate"].sharding.shard_shape((32, 64)) == (16, 64)


def test_a_train_program_may_make_several_updates():
    layout, call = Layout.over((0, 1), Strategy(data=2)), STEP.workload.call("actor.train").require_described()
    once, twice = (call_program(call, layout, num_layers=1, rows=4, updates=updates) for updates in (1, 2))
    rows = {x.shape[0] for x in jax.tree.leaves(twice.arguments) if x.sharding == layout.rows}
    assert rows == {8}
    assert "stablehlo.while" in twice.lower().as_text() and "stablehlo.while" not in once.lower().as_text()
