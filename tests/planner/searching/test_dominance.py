"""Choices that are left out are not missed."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrlhf.planner.peak_memory import peak_memory
from jaxrlhf.planner.problem import CallChoices, Choice, PairSeconds, Problem
from jaxrlhf.planner.search import exhaustive
from jaxrlhf.planner.searching.dominance import prune, worth_keeping
from jaxrlhf.planner.simulate import steady_state
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.made_up_problem import ppo_problem, random_problem

CHOICE = Choice(0, 2, Strategy(data=2), 2.0, resting=10, working=5)


def kept(*choices: Choice, exact: bool = True, table: list[float] | None = None) -> tuple[int, ...]:
    """Of the choices of a call whose outputs another one needs."""
    first = CallChoices("a.scores", "infer", "a", "a", False, (), choices)
    second = CallChoices("b.scores", "infer", "b", "b", False, ("a.scores",), (CHOICE,))
    column = np.zeros((len(choices), 1)) if table is None else np.array(table)[:, None]
    problem = Problem((first, second), 2, 2, (20, 20), {}, {(0, 1): PairSeconds.of(column)}, tokens=1)
    return worth_keeping(problem, exact=exact)[0]


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


def test_what_is_slower_in_anything_is_left_out_unless_exact():
    slower = (but(seconds=3.0), but(load=1.0), but(unload=1.0))
    assert kept(CHOICE, *slower, exact=False) == (0,)
    assert kept(CHOICE, *slower) == (0, 1, 2, 3)
    assert kept(CHOICE, but(seconds=3.0, working=4), exact=False) == (0, 1)
    assert kept(CHOICE, but(), table=[1.0, 0.0], exact=False) == (1,)
    assert kept(CHOICE, but(seconds=1.0), table=[0.0, 1.5], exact=False) == (0, 1)
    assert kept(CHOICE, but(seconds=1.0), table=[0.0, 1.0], exact=False) == (1,)  # it gains what is then lost


def test_other_devices_and_shared_layouts_are_another_matter():
    assert kept(CHOICE, but(end=1, strategy=Strategy()), exact=False) == (0, 1)
    first = CallChoices("r.scores", "infer", "r", "r", False, (), (CHOICE, but(strategy=Strategy(tensor=2), working=4)))
    second = CallChoices("r.values", "infer", "r", "r", False, (), (CHOICE,))
    problem = Problem((first, second), 2, 2, (20, 20), {}, {}, tokens=1)
    assert worth_keeping(problem) == ((0, 1), (0,))  # in the layout of the other call, weights rest but once


def test_tables_go_with_choices():
    problem = ppo_problem(1, 4, memory=110, seed=1)
    part, choices = prune(problem), worth_keeping(problem)
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


def with_twins(table: PairSeconds) -> PairSeconds:
    """Of problems whose calls have their first choice again at the end."""
    return table.of_choices([*range(table.shape[0]), 0], [*range(table.shape[1]), 0])


def test_exact_rules_lose_nothing():
    left_out = 0
    for seed in range(100):
        problem = random_problem(seed, most_choices=3)
        calls = tuple(  # twins, some of which are leaner
            dataclasses.replace(
                c, choices=(*c.choices, *(dataclasses.replace(x, working=x.working // 2) for x in c.choices[:1]))
            )
            for c in problem.calls
        )
        problem = dataclasses.replace(
            problem,
            calls=calls,
            reallocations={key: with_twins(t) for key, t in problem.reallocations.items()},
            transfers={key: with_twins(t) for key, t in problem.transfers.items()},
        )
        if problem.size > 40:
            continue
        part = prune(problem, exact=True)
        left_out += problem.size > part.size
        assert best(part) == best(problem)
    assert left_out > 5


def test_the_other_rule_loses_nothing_here():
    pytest.importorskip("numba")
    for problem in (ppo_problem(1, 4, memory=110), ppo_problem(1, 8), ppo_problem(1, 8, memory=60, seed=1)):
        assert exhaustive(prune(problem)).seconds == exhaustive(problem).seconds
