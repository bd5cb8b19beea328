"""What a known plan rules out: no choice of any plan that is as fast."""

import dataclasses
import itertools

import pytest

from jaxrlhf.planner.search import exhaustive
from jaxrlhf.planner.searching.dominance import with_choices
from jaxrlhf.planner.searching.within_reach import within_reach
from jaxrlhf.planner.simulate import steady_state
from tests.planner.made_up_problem import ppo_problem, random_problem

SMALL = [seed for seed in range(60) if random_problem(seed, most_choices=3).size <= 60]


@pytest.mark.parametrize("seed", SMALL[:16])
def test_no_choice_of_a_plan_as_fast_is_left_out(seed):
    problem = dataclasses.replace(random_problem(seed, most_choices=3), one_at_a_time=seed % 4 == 0)
    for plan in itertools.product(*(range(len(call.choices)) for call in problem.calls)):
        simulation = steady_state(problem, plan)
        if simulation.period:  # else its average may be below what it would settle to
            kept = within_reach(problem, simulation.seconds)
            assert all(choice in some for choice, some in zip(plan, kept, strict=True))


def test_much_is_left_out_and_the_best_plan_stays():
    pytest.importorskip("numba")
    problem = ppo_problem(1, 8, memory=60)
    best = exhaustive(problem)
    part = with_choices(problem, within_reach(problem, best.seconds))
    assert part.size < problem.size / 20
    assert exhaustive(part).seconds == best.seconds


def test_a_call_keeps_its_choices_where_none_is_fast_enough():
    problem = ppo_problem(1, 2)
    assert within_reach(problem, 0.0) == tuple(tuple(range(len(call.choices))) for call in problem.calls)
