"""Two train calls as one pipeline, where that makes a plan faster."""

import dataclasses
from typing import Any

import pytest

from jaxrlhf.planner.choices import make_problem
from jaxrlhf.planner.cluster_text import read_cluster
from jaxrlhf.planner.cost import CostModel, PassSeconds
from jaxrlhf.planner.fused_choice import as_one, best_fused, fused_seconds
from jaxrlhf.planner.plan import Placement
from jaxrlhf.planner.problem import Choice
from jaxrlhf.planner.simulate import steady_state
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

CLUSTER = read_cluster("1x4:a100-80g")
STEP = ppo(rows=8, mini_batches=1)
A_SECOND: Any = lambda *_: PassSeconds(1.0, 0.0)  # noqa: E731
COSTS = CostModel(CLUSTER, measured=A_SECOND)
"""A layer takes a second in every pass."""
PIPELINE = Strategy(pipeline=4, micro_batches=4)


def test_fused_calls_fill_the_bubbles_of_one_another():
    calls = STEP.workload.call("actor.train"), STEP.workload.call("critic.train")
    seconds = COSTS.seconds(calls[0], range(4), PIPELINE)
    assert (seconds.passes, seconds.bubbles) == (4.0, 3.0)
    choice = Choice(0, 4, PIPELINE, seconds.total)
    fused = fused_seconds(calls, (choice, choice), COSTS)
    assert fused is not None
    assert 8.0 <= fused < 2 * seconds.total  # the work of both on a stage; what they take one after the other


def plan_over_stages():
    fixed = {name: Placement((0, 1, 2, 3), PIPELINE) for name in ("actor.train", "critic.train")}
    problem = make_problem(STEP.workload, CLUSTER, COSTS, fixed=fixed)
    plan = tuple(0 for _ in problem.calls)
    return problem, plan, steady_state(problem, plan).seconds


def test_a_plan_becomes_faster_by_what_fusing_saves():
    problem, plan, seconds = plan_over_stages()
    found = best_fused(problem, STEP.workload, COSTS, [plan], beat=seconds)
    assert found is not None
    assert found.fuse == ("actor.train", "critic.train")
    assert found.simulation.seconds == pytest.approx(seconds - (found.apart - found.seconds), rel=1e-3)


def test_nothing_is_fused_where_it_does_not_fit_or_gains_nothing():
    problem, plan, seconds = plan_over_stages()
    assert best_fused(problem, STEP.workload, COSTS, [plan], beat=seconds / 100) is None
    full = dataclasses.replace(problem, capacity=(1,) * 4)
    assert best_fused(full, STEP.workload, COSTS, [plan], beat=seconds) is None
    assert TINY.num_layers == 4


def test_a_generation_and_the_inference_on_its_rows_are_one_task():
    """Whatever fuses calls enters the simulation by the seconds of both."""
    problem, plan, seconds = plan_over_stages()
    names = [call.name for call in problem.calls]
    i, j = names.index("actor.generate"), names.index("critic.values")
    apart = [problem.calls[k].choices[plan[k]].seconds for k in (i, j)]
    merged = as_one(problem, i, j, plan, sum(apart) - 0.5)
    assert steady_state(merged, plan).seconds == pytest.approx(seconds - 0.5, abs=0.01)
