"""What a search may choose from."""

import dataclasses

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.models.config import PRESETS, ModelConfig
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError
from jaxrlhf.planner.search.choices import make_problem, strategies
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

STEP = ppo()
CLUSTER = read_cluster("1x8:a100-80g")


def problem(step=STEP, cluster=CLUSTER, **options):
    return make_problem(step.workload, cluster, CostModel(cluster), **options)


def test_every_choice_is_a_plan_that_is_accepted():
    everything = problem(cluster=read_cluster("2x4:a100-80g"))
    compute = {call.plan_name: Placement((0,), Strategy()) for call in STEP.graph.calls if call.kind == "compute"}
    longest = max(len(call.choices) for call in everything.calls)
    for i in range(longest):
        picks = {call.name: call.choices[i % len(call.choices)] for call in everything.calls}
        placements = {name: Placement(tuple(c.devices), c.strategy) for name, c in picks.items()}
        check(Plan({**compute, **placements}), STEP.graph, STEP.models, 8, 4)


def test_choices_have_seconds_bytes_and_tables():
    everything = problem()
    names = [call.name for call in everything.calls]
    assert names == [call.name for call in STEP.workload.calls]
    train, generate = names.index("actor.train"), names.index("actor.generate")
    assert everything.reallocations[train, generate].shape == (
        len(everything.calls[train].choices), len(everything.calls[generate].choices),
    )  # fmt: skip
    assert set(everything.reallocations) == {
        (train, generate), (names.index("critic.train"), names.index("critic.values")),
    }  # fmt: skip
    for i, source in enumerate(everything.calls[train].choices):
        for j, target in enumerate(everything.calls[generate].choices):
            same = (source.devices, source.strategy.tensor, source.strategy.data, source.strategy.fsdp) == (
                target.devices, target.strategy.tensor, target.strategy.data, target.strategy.fsdp,
            )  # fmt: skip
            if same and source.strategy.pipeline == target.strategy.pipeline:
                assert everything.reallocations[train, generate][i, j] == 0
    for call in everything.calls:
        assert all(c.seconds > 0 and c.working > 0 for c in call.choices)
        assert any(len(c.devices) == 8 for c in call.choices)
        assert any(c.strategy.tensor == 2 and c.strategy.pipeline == 1 for c in call.choices) or TINY.num_kv_heads < 2


def test_more_devices_along_tensor_than_key_value_heads_are_considered():
    call = ppo(dataclasses.replace(TINY, num_kv_heads=1, vocab_size=97)).workload.call("actor.generate")
    assert {s.tensor for s in strategies(call, 8, 8)} == {1, 2, 4}, "what divides the 4 query heads"


def test_pipelines_that_could_be_fused_are_kept_however_slow_they_are_alone():
    cluster = read_cluster("1x4:a100-80g")
    calls = {call.name: call for call in problem(cluster=cluster).calls}
    for call in STEP.workload.calls:
        there = {c.strategy.pipeline for c in calls[call.name].choices if len(c.devices) == 4}
        possible = {s.pipeline for s in strategies(call, 4, 4)}
        assert call.kind != "train" or there >= possible - {1} != set(), call.name


def test_in_a_cluster_of_many_nodes_devices_lie_on_a_grid():
    large = problem(ppo(rows=80, mini_batches=1), read_cluster("40x1:a100-80g"))
    ranges = {(len(choice.devices), choice.first) for call in large.calls for choice in call.choices}
    assert (40, 0) in ranges
    pairs = {(size, first) for size, first in ranges if size == 2}
    assert pairs and all(first % 2 == 0 for _, first in pairs)
    assert all(size % 4 == first % 4 == 0 for size, first in ranges - pairs)
    small = problem(ppo(rows=80, mini_batches=1), read_cluster("10x1:a100-80g"))
    assert {(5, 3), (2, 7)} <= {(len(c.devices), c.first) for call in small.calls for c in call.choices}


def test_degrees_divide_what_they_split():
    call = ppo(rows=12, mini_batches=1).workload.call("critic.values")
    found = list(strategies(call, 8, 8))
    assert {s.tensor for s in found} == {1, 2, 4}  # 4 query heads
    assert {s.pipeline for s in found if s.tensor == 1} == {1, 2, 4}
    assert {s.num_row_shards * s.micro_batches for s in found} == {1, 2, 4, 8}  # 12 rows in 8 parts: 4 are copies
    train = list(strategies(ppo(rows=12, mini_batches=1).workload.call("critic.train"), 8, 8))
    assert {s.pipeline for s in train if s.tensor == 1} == {2, 4}  # 12 rows over 8 devices do not divide
    assert all(12 % (s.num_row_shards * s.micro_batches) == 0 for s in train)


def test_a_fixed_call_has_one_choice():
    placement = Placement((4, 5, 6, 7), Strategy(data=2, tensor=2))
    everything = problem(fixed={"actor.generate": placement})
    (choice,) = everything.calls[0].choices
    assert (choice.devices, choice.strategy) == (range(4, 8), placement.strategy)


def test_what_never_changes_may_rest_in_host_memory():
    everything = {call.name: call.choices for call in problem(offload=["reference"]).calls}
    assert all(c.offloaded and c.load > 0 and c.resting == 0 for c in everything["reference.logprobs"])
    assert not any(c.offloaded for c in everything["actor.train"])


def test_a_cluster_that_is_too_small_says_by_how_much():
    large = ModelConfig(**PRESETS["70b"])
    step = ppo(large, rows=64, prompt=1024, response=1024)
    with pytest.raises(PlanError, match=r"plan.calls.actor.train: must fit into the 76.6 GB .* Got 144 GB at the"):
        problem(step)


def test_rows_that_nothing_divides_are_refused():
    step = ppo(dataclasses.replace(TINY, num_kv_heads=1, num_layers=1), rows=6, mini_batches=2)
    cluster = read_cluster("2x8:a100-80g")
    fewest = make_problem(step.workload, cluster, CostModel(cluster))
    assert all(len(c.devices) < 8 for call in fewest.calls if call.name == "actor.train" for c in call.choices)
