"""Branch and bound against all plans, one by one."""

import dataclasses
import itertools
import math

import pytest

from jaxrlhf.planner.peak_memory import peak_memory
from jaxrlhf.planner.plan import NoRoomError
from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.search import exhaustive, search
from jaxrlhf.planner.simulate import steady_state
from tests.planner.made_up_problem import ppo_problem, random_problem, sharing_memory

SMALL = [seed for seed in range(80) if random_problem(seed, most_choices=3).size <= 60]


def every_plan(problem: Problem) -> list[tuple[float, int]]:
    """(seconds, bytes that the fullest device lacks) of all."""
    found = []
    for plan in itertools.product(*(range(len(call.choices)) for call in problem.calls)):
        peaks = zip(peak_memory(problem, plan), problem.capacity, strict=True)
        found.append((steady_state(problem, plan).seconds, max(peak - capacity for peak, capacity in peaks)))
    return found


@pytest.mark.parametrize("seed", SMALL[:24])
def test_against_every_plan_there_is(seed):
    problem = dataclasses.replace(random_problem(seed, most_choices=3), one_at_a_time=seed % 5 == 0)
    problem = sharing_memory(problem) if seed % 3 == 0 else problem
    plans = every_plan(problem)
    best = min((seconds for seconds, lacking in plans if lacking <= 0), default=math.inf)
    compiled = seed % 2 == 0
    if best < math.inf:
        result = exhaustive(problem, compiled=compiled)
        assert result.seconds == best and result.proven
    else:
        with pytest.raises(
            NoRoomError, match=rf", {min(lacking for _, lacking in plans)} bytes too much\. No plan needs less"
        ):
            exhaustive(problem, compiled=compiled)


def test_of_these_some_fit_and_some_do_not():
    fit = [any(lacking <= 0 for _, lacking in every_plan(random_problem(s, most_choices=3))) for s in SMALL[:24:3]]
    assert True in fit


def test_it_says_whether_it_went_through_all():
    problem = ppo_problem(1, 4, memory=100, seed=2, micro_batches=(4,))
    assert not exhaustive(problem, bounds=50, compiled=False).proven
    assert not exhaustive(problem, seconds=0.0, compiled=False).proven


def test_a_search_goes_on_where_its_chains_end():
    pytest.importorskip("numba")
    problem = ppo_problem(1, 8, memory=80, seed=0)
    chains = search(problem, steps=1000, bounds=0)
    result = search(problem, steps=1000)
    assert result.proven and result.seconds < chains.seconds
    assert [x.seconds for x in result.history[: len(chains.history) - 1]] == [x.seconds for x in chains.history[:-1]]
    assert result.history[-1].seconds == result.seconds == exhaustive(problem).seconds


def test_the_least_memory_that_any_plan_needs():
    pytest.importorskip("numba")
    with pytest.raises(
        NoRoomError, match=r"fit into the 42.9 GB .* Got 47.\d GB on device .* 4.\d+ GB too much. No plan needs less."
    ):
        exhaustive(ppo_problem(1, 8, memory=40))
    assert exhaustive(ppo_problem(1, 8, memory=44.3)).proven
