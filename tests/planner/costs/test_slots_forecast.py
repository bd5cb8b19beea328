"""Seconds of rollouts by the lengths of their responses, and whether a plan has slots."""

import dataclasses
from typing import Any

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.generation.rollout_settings import mean_columns
from jaxrlhf.planner.costs.cost_model import CostModel, PassSeconds
from jaxrlhf.planner.make_plan import Planned, plan_workload
from jaxrlhf.planner.report import call_rows, plan_json, summary_lines
from jaxrlhf.planner.search.choices import strategies
from jaxrlhf.planner.workload import Workload
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

STEP = ppo(
    dataclasses.replace(TINY, hidden_size=256, intermediate_size=512, num_heads=8), rows=512, prompt=64, response=256
)
CALL = STEP.workload.call("actor.generate")
CPU, GPU = read_cluster("cpu:1"), read_cluster("1x1:a100-80g")
AT_ONCE = Strategy()
TAILED, EQUAL = ResponseLengths(mean=33, p99=150), ResponseLengths(mean=256, p99=256)


def seconds(lengths: ResponseLengths | None, strategy: Strategy = AT_ONCE, cluster: Any = CPU, **model: Any) -> float:
    call = dataclasses.replace(CALL, lengths=lengths)
    return CostModel(cluster, **model).seconds(call, range(1), strategy).passes


def planned(lengths: ResponseLengths | None) -> Planned:
    calls = tuple(
        dataclasses.replace(c, lengths=lengths if c.kind == "generate" else None) for c in STEP.workload.calls
    )
    return plan_workload(Workload(calls), CPU, seconds=1.0)


@pytest.mark.parametrize("cluster", [CPU, GPU], ids=str)
def test_responses_of_full_length_take_what_they_take_without_lengths(cluster):
    for strategy in (Strategy(), Strategy(micro_batches=4)):
        assert seconds(EQUAL, strategy, cluster) == pytest.approx(seconds(None, strategy, cluster))
    for slots in (16, 128):
        strategy = Strategy(slots=slots)
        assert seconds(EQUAL, strategy, cluster) == pytest.approx(seconds(None, strategy, cluster), rel=1e-6)


def test_short_responses_take_less_and_those_in_slots_least():
    in_slots = Strategy(slots=128)
    assert seconds(TAILED, in_slots) < seconds(TAILED) / 2 < seconds(None) / 2
    assert seconds(None, in_slots) == pytest.approx(seconds(None), rel=0.01)


def test_measured_phases_of_slots_add_up():
    of_phase = {
        "slot_prefill": PassSeconds(1.0, 2.0),
        "slot_step": PassSeconds(0.1, 0.0),
        "slot_column": PassSeconds(0, 1e-3),
    }
    measured: Any = lambda call, phase, strategy, rows: of_phase.get(phase)  # noqa: E731
    strategy = Strategy(slots=128, prefill_rows=4)
    # 512 prompts in groups of 4; four times 256 steps over 224 columns, all but one of a part
    expected = 128 * (4 * 1.0 + 2.0) + 1024 * (4 * 0.1 + 223 * 1e-3)
    assert seconds(None, strategy, measured=measured) == pytest.approx(expected)


def test_a_step_costs_no_less_than_its_columns_say():
    """Of a measured step, at most what reading the cache could be of it is taken off."""
    measured: Any = lambda call, phase, *_: PassSeconds(1.0, 0.0) if phase == "decode" else None  # noqa: E731
    model = CostModel(CPU, measured=measured)
    call = dataclasses.replace(CALL, lengths=TAILED)
    usual = model.of(call, range(1), Strategy()).step(512, mean_columns(64, 256))
    few = model.of(call, range(1), Strategy()).step(512, 64.0)
    assert usual == pytest.approx(4.0, rel=1e-6) and 4 * 64 / 224 <= few < usual


def test_a_long_tail_gets_slots_and_equal_lengths_do_not():
    tailed, equal = planned(TAILED), planned(EQUAL)
    strategy = tailed.choices["actor.generate"].strategy
    assert strategy.slots in (16, 32, 64, 128, 256) and equal.choices["actor.generate"].strategy.slots == 0
    assert tailed.plan_for(STEP.graph).placements["actor.generate"].strategy == strategy
    rollout = tailed.rollouts["actor.generate"]
    line = next(line for line in summary_lines(tailed) if line.startswith("actor.generate: about"))
    assert f"about {rollout.steps:,.0f} decoding steps for at most 256 new tokens, in {strategy.slots} slots" in line
    assert any("all rows at once, until the longest" in line for line in summary_lines(equal))
    assert {row["call"]: row["slots"] for row in call_rows(tailed)}["actor.generate"] == strategy.slots
    decoding = plan_json(tailed, tailed.plan_for(STEP.graph))["calls"]["actor.generate"]["decoding"]
    assert decoding == dataclasses.asdict(rollout)
    assert any("33 tokens on average, half of them at most 24, 99 % at most 150" in line for line in tailed.assumed)
    assert tailed.tokens_per_second == pytest.approx(512 * (64 + 33) / tailed.seconds)


def test_without_lengths_nothing_else_is_looked_at():
    assert not any(strategy.slots for strategy in strategies(CALL, 8, 8))
    known = list(strategies(dataclasses.replace(CALL, lengths=TAILED), 8, 8))
    assert [s for s in known if not s.slots] == list(strategies(CALL, 8, 8)) and any(s.slots for s in known)
    assert not planned(None).rollouts


def test_over_stages_the_ring_fills_and_empties_in_every_turn():
    """512 rows of 256 tokens in 128 slots, 64 of each of two stages; 128 groups of prompts, two of them at a time."""
    measured: Any = lambda call, phase, *_: PassSeconds(1.0, 0.0) if phase in ("prefill", "decode") else None  # noqa: E731
    model = CostModel(read_cluster("cpu:2"), measured=measured)
    strategy = Strategy(pipeline=2, slots=128, prefill_rows=4)
    steps = model.of(CALL, range(2), strategy).rollout_steps()
    assert (steps.steps, steps.groups) == (1024, 128)
    costs = model.of(CALL, range(2), strategy)
    step, found = costs.step(64, steps.columns), costs.generate()
    assert found.passes == pytest.approx(2 * (1024 * step + 64 * 2.0))
    assert found.bubbles == pytest.approx(1024 / 8 * step + 64 * 2.0)
    in_chunks = model.of(CALL, range(2), dataclasses.replace(strategy, prefill_tokens=16)).generate()
    assert in_chunks.passes == found.passes and in_chunks.sends > found.sends
    assert in_chunks.bubbles == pytest.approx(1024 / 8 * step + 64 * 2.0 / 4)
