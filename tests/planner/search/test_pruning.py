"""Choices that are left out are not missed: those that others beat, and those that a known plan rules out."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrlhf.planner.search.peak_memory import peak_memory
from jaxrlhf.planner.search.problem import CallChoices, Choice, PairSeconds, Problem
from jaxrlhf.planner.search.pruning import within_reach, worth_keeping
from jaxrlhf.planner.search.search import search
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.made_up_problem import ppo_problem, random_problem

CHOICE = Choice(0, 2, Strategy(data=2), 2.0, resting=10, working=5)


def kept(*choices: Choice, table: list[float] | None = None) -> tuple[int, ...]:
    """The choices that are kept of a call whose outputs another one needs."""
    first = CallChoices("a.scores", "infer", "a", "a", False, (), choices)
    second = CallChoices("b.scores", "infer", "b", "b", False, ("a.scores",), (CHOICE,))
    column = np.zeros((len(choices), 1)) if table is None else np.array(table)[:, None]
    problem = Problem((first, second), 2, 2, (20, 20), {}, {(0, 1): PairSeconds.of(column)}, tokens=1)
    return worth_keeping(problem)[0]


def but(**changes: float | Strategy) -> Choice:
    return dataclasses.replace(CHOICE, **changes)


def test_what_takes_more_than_a_device_has_is_left_out():
    assert kept(CHOICE, but(working=10)) == (0,)
    assert kept(CHOICE, but(seconds=1.0, working=11)) == (0,)
    assert kept(CHOICE, but(seconds=1.0, working=10)) == (0, 1)


def test_of_equal_ones_the_first_and_of_equally_fast_ones_the_leanest_is_kept():
    assert kept(CHOICE, CHOICE) == (0,)
    assert kept(CHOICE, but(working=4), but(resting=9)) == (1, 2)
    assert kept(CHOICE, but(strategy=Strategy(tensor=2), working=4)) == (1,)


def test_what_is_slower_in_anything_is_left_out():
    assert kept(CHOICE, but(seconds=3.0), but(load=1.0), but(unload=1.0)) == (0,)
    assert kept(CHOICE, but(seconds=3.0, working=4)) == (0, 1)
    assert kept(CHOICE, but(), table=[1.0, 0.0]) == (1,)
    assert kept(CHOICE, but(seconds=1.0), table=[0.0, 1.5]) == (0, 1)
    assert kept(CHOICE, but(seconds=1.0), table=[0.0, 1.0]) == (1,)  # it gains what is then lost


def test_other_devices_and_shared_layouts_are_another_matter():
    assert kept(CHOICE, but(end=1, strategy=Strategy())) == (0, 1)
    first = CallChoices("r.scores", "infer", "r", "r", False, (), (CHOICE, but(strategy=Strategy(tensor=2), working=4)))
    second = CallChoices("r.values", "infer", "r", "r", False, (), (CHOICE,))
    problem = Problem((first, second), 2, 2, (20, 20), {}, {}, tokens=1)
    assert worth_keeping(problem) == ((0, 1), (0,))  # in the layout of the other call, weights rest but once


def test_tables_go_with_choices():
    problem = ppo_problem(1, 4, memory=110, seed=1)
    choices = worth_keeping(problem)
    part = problem.with_choices(choices)
    assert part.size < problem.size / 100
    for (i, j), table in part.transfers.items():
        assert table.shape == (len(part.calls[i].choices), len(part.calls[j].choices))
        assert table[-1, 0] == problem.transfers[i, j][choices[i][-1], choices[j][0]]
    assert part.calls[0].choices[-1] is problem.calls[0].choices[choices[0][-1]]


def best(problem: Problem) -> float | None:
    plans = itertools.product(*(range(len(call.choices)) for call in problem.calls))
    fitting = [
        steady_state(problem, plan).seconds
        for plan in plans
        if all(peak <= room for peak, room in zip(peak_memory(problem, plan), problem.capacity, strict=True))
    ]
    return min(fitting, default=None)


def test_what_is_beaten_is_not_missed():
    left_out = 0
    for seed in range(200):
        problem = random_problem(seed, most_choices=4)
        if problem.size <= 60:
            part = problem.with_choices(worth_keeping(problem))
            left_out += problem.size > part.size
            assert best(part) == best(problem), seed
    assert left_out > 5


# -- what a known plan rules out: no choice of any plan that is as fast ------------------------------------------------

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
    best = search(problem)
    kept = within_reach(problem, best.seconds)
    assert problem.with_choices(kept).size < problem.size / 20
    assert all(choice in some for choice, some in zip(best.plan, kept, strict=True))


def test_a_call_keeps_its_choices_where_none_is_fast_enough():
    problem = ppo_problem(1, 2)
    assert within_reach(problem, 0.0) == tuple(tuple(range(len(call.choices))) for call in problem.calls)
