"""Tails: what they are expected to bring, and what a simulation of a rollout in parts says."""

import dataclasses
import re

import numpy as np
import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.plan_config import Placement, ResponseLengths, Tail
from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.rollout_steps import RolloutSpan, steps_in_slots, steps_of_span
from jaxrlhf.planner.fusion import fused_generation
from jaxrlhf.planner.fusion.fused_generation import WORTH, fuse_generation, refined_tails
from jaxrlhf.planner.fusion.parts_forecast import PlanInParts
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.parts import in_parts
from jaxrlhf.planner.plans.plan import Plan, resolve
from jaxrlhf.planner.workload import step_workload
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import ppo

MODEL = ModelConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_layers=24, num_heads=16, num_kv_heads=16,
    max_position_embeddings=2048, dtype="bfloat16",
)  # fmt: skip
STEP = ppo(MODEL, rows=512, prompt=256, response=1024, mini_batches=4)
EIGHT = read_cluster("1x8:a100-80g")
LONG_TAILED = ResponseLengths(mean=130, p99=600)
EVERYWHERE, DATA = tuple(range(8)), Strategy(data=8)
INFERENCES = ("reference.logprobs", "critic.values", "reward.scores")


def planned(generation: Strategy = DATA) -> Plan:
    """All calls on all devices."""
    default = Placement(EVERYWHERE, Strategy(fsdp=8, micro_batches=4))
    return resolve(STEP.graph, default, {"actor.generate": Placement(EVERYWHERE, generation)})


def found(plan: Plan, lengths: ResponseLengths | None = LONG_TAILED) -> PlanInParts:
    return fuse_generation(STEP.graph, STEP.roles, plan, CostModel(EIGHT), lengths)


def test_a_tail_makes_a_long_tailed_step_faster():
    plan = planned()
    fused = found(plan)
    assert fused.plan is not None and fused.seconds_in_parts <= WORTH * fused.seconds, fused.rows
    check(fused.plan, STEP.graph, STEP.models, 8, 8)
    tail = fused.plan.placements["actor.generate"].tail
    assert tail is not None and set(tail.devices) < set(EVERYWHERE)
    assert not set(tail.devices) & set(fused.plan.placements["reference.logprobs"].devices)
    assert fused.seconds_in_parts == min(row["seconds"] for row in fused.rows)
    untouched = [name for name in plan.placements if name not in ("actor.generate", *INFERENCES)]
    assert all(fused.plan.placements[name] == plan.placements[name] for name in untouched)
    assert fused.to_json()["plan"] == fused.plan.to_json()
    assert re.search(
        rf"With a tail an iteration takes .* The last {tail.rows:.0%} of the sequences take .* s of actor.generate, on "
        rf"{len(tail.devices)} of its devices; meanwhile reference.logprobs, critic.values, reward.scores \(.* s\)",
        fused.summary(),
    )
    assert set(fused.calls) == {call.name for call in STEP.workload.calls}
    assert fused.calls["actor.train"].seconds > 0 < fused.calls["actor.generate"].memory_bytes


def test_tails_follow_the_lengths_of_responses():
    """Where nearly all responses are short and a few are long, fewer sequences move."""
    fused = found(planned())
    assert fused.plan is not None
    args = (STEP.graph, STEP.roles, fused.plan, CostModel(EIGHT))
    same, seconds, before = refined_tails(*args, LONG_TAILED)
    assert same is fused.plan and seconds == before == pytest.approx(fused.seconds_in_parts)
    other = ResponseLengths(mean=500, p99=1000)
    refined, seconds, before = refined_tails(*args, other)
    tails = [plan.placements["actor.generate"].tail for plan in (fused.plan, refined)]
    assert tails[0] is not None and tails[1] is not None
    assert tails[0].rows != tails[1].rows and seconds < WORTH * before
    assert dataclasses.replace(tails[1], rows=tails[0].rows) == tails[0], "nothing else"


@pytest.mark.parametrize(
    ("plan", "lengths", "reason"),
    [
        (planned(), None, "All responses are taken to be equally long. Give their lengths."),
        (planned(Strategy(tensor=8)), LONG_TAILED, "actor.generate has one row shard"),
    ],
)
def test_where_there_can_be_no_tail_it_says_why(plan, lengths, reason):
    fused = found(plan, lengths)
    assert fused.plan is None and not fused.rows and reason in fused.summary()


@pytest.mark.parametrize("generation", [Strategy(data=8, micro_batches=2), Strategy(pipeline=2, data=4)])
def test_a_generation_with_stages_or_micro_batches_gets_a_tail_without_them(generation):
    fused = found(planned(generation))
    assert fused.plan is not None, fused.rows
    on = fused.plan.placements["actor.generate"]
    assert on.strategy.pipeline == on.strategy.micro_batches == 1 and on.tail is not None
    check(fused.plan, STEP.graph, STEP.models, 8, 8)


def test_a_generation_that_has_no_other_way_than_stages_gets_no_tail(monkeypatch):
    monkeypatch.setattr(fused_generation, "strategies", lambda *_: [Strategy(pipeline=8), Strategy(tensor=8)])
    fused = found(planned(Strategy(pipeline=2, data=4)))
    assert fused.plan is None and "micro-batches or stages, and runs on its devices in no other way" in fused.summary()


def test_responses_that_hardly_differ_gain_nothing():
    fused = found(planned(), ResponseLengths(mean=1000, p99=1024))
    assert fused.plan is None or fused.seconds_in_parts > 0.9 * fused.seconds


def span(first: int, last: int, *, stay: int = 0, tail: int = 0, slots: int = 16) -> RolloutSpan:
    return RolloutSpan(64, 1, 4, Slots(slots, 8), (first, last), stay, tail)


def test_parts_of_a_rollout_add_up_to_all_of_it():
    whole = steps_in_slots(LONG_TAILED, 256, 1024, 64, 1, 4, Slots(16, 8), True)
    parts = [steps_of_span(LONG_TAILED, 256, 1024, span(a, b), True) for a, b in ((0, 20), (20, 50), (50, 64))]
    assert sum(part.steps for part in parts) == pytest.approx(whole.steps)
    assert sum(part.groups for part in parts) == pytest.approx(whole.groups, rel=0.1)
    assert parts[0].groups > parts[-1].groups == 0, "what waits longest enters long before the last ends"


def test_a_tail_takes_as_long_as_its_longest_sequence_is_left():
    """It decodes what the share would have gone on to decode, in as many steps."""
    whole = steps_in_slots(LONG_TAILED, 256, 1024, 64, 1, 4, Slots(64, 64), True)
    before = steps_of_span(LONG_TAILED, 256, 1024, span(0, 52, slots=64), True)
    tail = [
        steps_of_span(LONG_TAILED, 256, 1024, span(*each, stay=12, tail=2, slots=64), True)
        for each in ((0, 8), (8, 24))
    ]
    assert before.steps + sum(part.steps for part in tail) == pytest.approx(whole.steps, rel=0.02)
    assert tail[1].columns >= tail[0].columns >= before.columns


def test_equal_lengths_leave_nothing_to_a_tail():
    equal = ResponseLengths(mean=80, p99=80)
    assert steps_of_span(equal, 8, 100, span(0, 48, slots=64), True).steps == 80
    assert steps_of_span(equal, 8, 100, span(0, 16, stay=16, tail=4, slots=64), True).steps == 0


def test_costs_of_parts_add_up_to_that_of_the_call():
    """Of a rollout in slots: the same steps and groups, but that each part is a program of its own."""
    slots = Strategy(data=8, slots=32)
    costs = CostModel(EIGHT)

    def seconds(parts: int) -> list[float]:
        plan = planned()
        generation = Placement(EVERYWHERE, slots, parts=parts)
        plan = dataclasses.replace(plan, placements={**plan.placements, "actor.generate": generation})
        graph, plan = in_parts(STEP.graph, plan)
        strategies = {name: placement.strategy for name, placement in plan.placements.items()}
        workload = step_workload(graph, STEP.roles, LONG_TAILED, strategies)
        calls = [call for call in workload.calls if call.kind == "generate"]
        return [costs.seconds(call, range(8), slots).total for call in calls]

    (whole,), parts = seconds(1), seconds(4)
    assert len(parts) == 4 and sum(parts) == pytest.approx(whole, rel=0.03)


@pytest.mark.parametrize("migrate", ["cache", "prefill"])
def test_migration_takes_time(migrate):
    plan = planned()
    tail = Tail((0, 1), Strategy(data=2), rows=0.25, migrate=migrate)
    generation = dataclasses.replace(plan.placements["actor.generate"], parts=2, tail=tail)
    plan = dataclasses.replace(plan, placements={**plan.placements, "actor.generate": generation})
    graph, plan = in_parts(STEP.graph, plan)
    strategies = {name: placement.strategy for name, placement in plan.placements.items()}
    workload = step_workload(graph, STEP.roles, LONG_TAILED, strategies)
    (call,) = (c for c in workload.calls if c.part is not None and c.part.migrate)
    costs = CostModel(EIGHT).of(call, range(2), Strategy(data=2))
    assert call.sequences == 128 and costs.generate().sends >= costs.migration(64) > 0
    cache_bytes = 64 * 1280 * 2 * 24 * 2048 * 2
    link = EIGHT.groups[0].kind.link.bandwidth
    if migrate == "cache":
        assert costs.migration(64) == pytest.approx(cache_bytes / link, rel=0.5)
    assert np.isfinite(costs.seconds().total)
