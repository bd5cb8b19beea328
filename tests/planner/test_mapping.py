"""HybridFlow's mapping: what it looks at, its latency, and what it gives."""

import dataclasses
import itertools

import pytest

from jaxrlhf.planner.mapping import colocations, map_sets
from jaxrlhf.planner.peak_memory import peak_memory
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import CallChoices, Choice, Problem
from jaxrlhf.planner.simulate import steady_state
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


PPO = {
    "actor.generate": 8.0,
    "reference.logprobs": 4.0,
    "critic.values": 2.0,
    "reward.scores": 2.0,
    "actor.train": 12.0,
    "critic.train": 4.0,
}


def test_a_stage_is_as_long_as_the_group_that_takes_longest():
    problem = problem_of(PPO)
    apart = map_sets(problem, [tuple((name,) for name in SETS)])
    assert apart.seconds == 8 + 4 + 12 and apart.allocations == 1
    assert map_sets(problem, [(SETS,)]).seconds == (8 + 4 + 2 + 2 + 12 + 4) / 4
    halves = map_sets(problem, [(("actor", "reference"), ("critic", "reward"))])
    assert halves.seconds == 8 / 2 + max(4 / 2, (2 + 2) / 2) + max(12 / 2, 4 / 2)
    assert halves.devices == (range(2), range(2, 4))
    assert [problem.calls[j].choices[k].devices for j, k in enumerate(halves.plan)] == [
        *(range(2), range(2), range(2, 4), range(2, 4)),
        *(range(2), range(2, 4)),
    ]


def test_the_best_of_all_is_simulated_as_other_plans_are():
    problem = problem_of(PPO)
    mapping = map_sets(problem)
    assert mapping.colocations == 15
    # all together, on 2 + 2, on 2 + 1 + 1 in any order, and each alone
    assert mapping.allocations == 1 + 7 + 6 * 3 + 1
    assert mapping.colocation == (SETS,) and mapping.seconds == 8.0
    assert mapping.simulation == steady_state(problem, mapping.plan)


def test_what_does_not_fit_together_is_kept_apart():
    problem = problem_of(PPO, resting=40)
    mapping = map_sets(problem)
    assert max(len(group) for group in mapping.colocation) == 2
    assert max(peak_memory(problem, mapping.plan)) == 80
    with pytest.raises(
        PlanError, match=r"on devices of their own. Got none that do, of the 15 ways to group actor, .* on 4"
    ):
        map_sets(problem_of(PPO, resting=101))


def test_a_leaner_way_is_taken_where_the_fastest_does_not_fit():
    problem = problem_of(PPO, resting=20)
    fast = [dataclasses.replace(x, seconds=x.seconds * 0.9, working=90) for x in problem.calls[0].choices]
    first = dataclasses.replace(problem.calls[0], choices=(*fast, *problem.calls[0].choices))
    mapping = map_sets(dataclasses.replace(problem, calls=(first, *problem.calls[1:])), [(SETS,)])
    assert mapping.plan[0] >= len(fast) and mapping.seconds == 8.0


def test_every_group_has_devices_of_its_own():
    problem = ppo_problem(2, 8, actor=7.0, critic=3.0, micro_batches=(4,))
    for colocation in colocations(SETS):
        mapping = map_sets(problem, [colocation])
        for a, b in itertools.combinations(mapping.devices, 2):
            assert set(a).isdisjoint(b)
        for call, k in zip(problem.calls, mapping.plan, strict=True):
            group = next(g for g in colocation if call.weights in g)
            assert call.choices[k].devices == mapping.devices[colocation.index(group)]
        assert max(peak_memory(problem, mapping.plan)) <= problem.capacity[0]


def test_more_groups_than_devices_are_an_error():
    with pytest.raises(PlanError, match=r"of the way actor \| reference \| critic \| reward to group"):
        map_sets(problem_of(PPO, devices=2), [tuple((name,) for name in SETS)])


def test_too_many_sets_are_an_error():
    names = [f"r{n}.scores" for n in range(9)]
    with pytest.raises(PlanError, match=r"of which there may be 8. Got 9: r0, r1"):
        map_sets(problem_of(dict.fromkeys(names, 1.0)))
