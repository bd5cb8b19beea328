"""Two train calls as one pipeline, where that makes a plan faster."""

import dataclasses
import math
from typing import Any

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.planner.costs.cost_model import CostModel, PassSeconds
from jaxrlhf.planner.costs.stage_costs import stage_costs
from jaxrlhf.planner.fusion import fused_choice
from jaxrlhf.planner.fusion.fused_choice import FusedCalls, as_one, best_fused, fused_calls
from jaxrlhf.planner.fusion.fusible import find_schedules
from jaxrlhf.planner.plans.plan import Placement
from jaxrlhf.planner.search.choices import make_problem
from jaxrlhf.planner.search.problem import Choice
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.schedules.instructions import Schedule
from jaxrlhf.schedules.schedule import makespan, peak_activations
from jaxrlhf.schedules.schedule_bounds import added_peaks
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
    fused = fused_calls(calls, (choice, choice), COSTS)
    assert fused is not None and fused.apart == 2 * seconds.total
    taken = fused.seconds(fused.schedules())
    assert 8.0 <= fused.bound <= taken < fused.apart  # the work of both on a stage; one after the other
    assert taken == pytest.approx(makespan(Schedule(fused.pipes, fused.schedules()[0].orders)) + fused.around)
    assert max(peak_activations(Schedule(fused.pipes, fused.schedules()[0].orders))) <= added_peaks(fused.pipes) * 1.001


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
    assert found.seconds < found.apart
    up, down = Placement((0, 1, 2, 3), PIPELINE), Placement((3, 2, 1, 0), PIPELINE)
    stages = stage_costs([STEP.workload.call(name) for name in found.fuse], (up, down), COSTS)
    assert found.schedules == find_schedules(up, down, stages)
    assert found.simulation.seconds == pytest.approx(seconds - (found.apart - found.seconds), rel=1e-3)


def test_nothing_is_fused_where_the_schedule_that_would_run_is_longer_than_one_call_after_the_other(monkeypatch):
    """However short it could be by its lower bound, and however slow the plan to be beaten is."""
    problem, plan, seconds = plan_over_stages()
    monkeypatch.setattr(FusedCalls, "seconds", lambda both, schedules: both.apart)
    assert best_fused(problem, STEP.workload, COSTS, [plan], beat=10 * seconds) is None


def test_schedules_are_looked_for_of_few_pairs_those_with_the_least_bound_first(monkeypatch):
    problem = make_problem(STEP.workload, CLUSTER, COSTS)
    monkeypatch.setattr(fused_choice, "SCHEDULED", 2)
    looked_for: list[FusedCalls] = []
    found = FusedCalls.schedules

    def schedules(both: FusedCalls) -> tuple[Schedule, ...]:
        looked_for.append(both)
        return found(both)

    monkeypatch.setattr(FusedCalls, "schedules", schedules)
    plan = tuple(0 for _ in problem.calls)
    best = best_fused(problem, STEP.workload, COSTS, [plan], beat=math.inf)
    assert best is not None and len(looked_for) == len(set(looked_for)) <= 2
    assert looked_for[0].bound <= looked_for[-1].bound


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
