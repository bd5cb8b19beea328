"""HybridFlow's mapping: what it looks at, its latency, and what it gives."""

import dataclasses
import itertools

import pytest

from jaxrlhf.planner.plans.plan import PlanError
from jaxrlhf.planner.search.mappings import Colocation, best_mapping, colocations, hybridflow
from jaxrlhf.planner.search.peak_memory import peak_memory
from jaxrlhf.planner.search.problem import CallChoices, Choice, Problem
from jaxrlhf.planner.search.search_result import SearchResult
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.made_up_problem import INFERENCE, ppo_problem

SETS = ("actor", "reference", "critic", "reward")


def test_four_sets_share_devices_in_fifteen_ways():
    found = list(colocations(SETS))
    assert len({frozenset(map(frozenset, each)) for each in found}) == len(found) == 15
    assert all(sorted(name for group in each for name in group) == sorted(SETS) for each in found)
    assert (SETS,) in found and tuple((name,) for name in SETS) in found


def problem_of(seconds: dict[str, float], devices: int = 4, resting: int = 1, capacity: int = 100) -> Problem:
    """Seconds of each call on one device; on more, as many times less."""
    places = [(first, first + size) for size in (1, 2, 4) if size <= devices for first in range(0, devices, size)]
    calls = []
    for name, time in seconds.items():
        role, method = name.split(".")
        choices = tuple(
            Choice(first, end, Strategy(data=end - first), time / (end - first), resting=resting)
            for first, end in places
        )
        needs = {"generate": (), "train": INFERENCE}.get(method, ("actor.generate",))
        calls.append(
            CallChoices(name, "train" if method == "train" else "infer", role, role, method == "train", needs, choices)
        )
    return Problem(tuple(calls), devices, devices, (capacity,) * devices, {}, {}, tokens=1)


def best(problem: Problem, *among: Colocation) -> SearchResult:
    return best_mapping(problem, among, "test")


def devices(problem: Problem, result: SearchResult) -> dict[str, range]:
    return {call.name: call.choices[k].devices for call, k in zip(problem.calls, result.plan, strict=True)}


APART = tuple((name,) for name in SETS)
PPO = {
    "actor.generate": 8.0,
    "reference.logprobs": 4.0,
    "critic.values": 2.0,
    "reward.scores": 2.0,
    "actor.train": 12.0,
    "critic.train": 4.0,
}


def test_groups_are_side_by_side():
    problem = problem_of(PPO)
    apart = best(problem, APART)
    assert apart.evaluated == 1 and len(set(devices(problem, apart).values())) == 4
    assert best(problem, (SETS,)).seconds == (8 + 4 + 2 + 2 + 12 + 4) / 4
    halves = best(problem, (("actor", "reference"), ("critic", "reward")))
    assert devices(problem, halves) == {
        "actor.generate": range(2),
        "reference.logprobs": range(2),
        "critic.values": range(2, 4),
        "reward.scores": range(2, 4),
        "actor.train": range(2),
        "critic.train": range(2, 4),
    }
    assert halves.seconds == 8 / 2 + max(4 / 2, (2 + 2) / 2) + max(12 / 2, 4 / 2)


def test_the_larger_part_goes_to_those_that_take_longest():
    problem = problem_of({**PPO, "actor.train": 24.0})
    groups = (("critic",), ("actor", "reference"), ("reward",))
    found = devices(problem, best(problem, groups))
    assert found["actor.train"] == found["reference.logprobs"] == range(2)
    assert {found["critic.train"], found["reward.scores"]} == {range(2, 3), range(3, 4)}


def test_the_best_of_all_is_simulated_as_other_plans_are():
    problem = problem_of(PPO)
    found = hybridflow(problem)
    # all together, on 2 + 2, on 2 + 1 + 1 in any order, and each alone
    assert found.evaluated == 1 + 7 + 6 * 3 + 1
    assert found.seconds == steady_state(problem, found.plan).seconds == 8.0


def test_what_does_not_fit_together_is_kept_apart():
    problem = problem_of(PPO, resting=40)
    found = hybridflow(problem)
    assert max(found.memory) == max(peak_memory(problem, found.plan)) == 80
    assert len(set(devices(problem, found).values())) >= 2
    with pytest.raises(PlanError, match=r"hybridflow: sets of weights must fit .*, of 15 ways to group them. Got 4 d"):
        hybridflow(problem_of(PPO, resting=101))


def test_a_leaner_way_is_taken_where_the_fastest_does_not_fit():
    problem = problem_of(PPO, resting=20)
    fast = [dataclasses.replace(x, seconds=x.seconds * 0.9, working=90) for x in problem.calls[0].choices]
    first = dataclasses.replace(problem.calls[0], choices=(*fast, *problem.calls[0].choices))
    found = best(dataclasses.replace(problem, calls=(first, *problem.calls[1:])), (SETS,))
    assert found.plan[0] >= len(fast) and found.seconds == 8.0


def test_every_group_has_devices_of_its_own():
    problem = ppo_problem(2, 8, actor=7.0, critic=3.0, micro_batches=(4,))
    for colocation in colocations(SETS):
        found = best(problem, colocation)
        of_sets = {call.weights: call.choices[k].devices for call, k in zip(problem.calls, found.plan, strict=True)}
        for call, k in zip(problem.calls, found.plan, strict=True):
            assert call.choices[k].devices == of_sets[call.weights]
        for group in colocation:
            assert len({of_sets[name] for name in group}) == 1
        for a, b in itertools.combinations(colocation, 2):
            assert set(of_sets[a[0]]).isdisjoint(of_sets[b[0]])
        assert max(found.memory) <= problem.capacity[0]


def test_more_groups_than_devices_are_an_error():
    with pytest.raises(PlanError, match=r"test: .*, in groups actor \| reference \| critic \| reward. Got 2 devices"):
        best(problem_of(PPO, devices=2), APART)


def test_too_many_sets_are_an_error():
    names = [f"r{n}.scores" for n in range(9)]
    with pytest.raises(PlanError, match=r"of which there may be 8. Got 9: r0, r1"):
        hybridflow(problem_of(dict.fromkeys(names, 1.0)))
