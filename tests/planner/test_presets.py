"""Fixed placements: where calls run, with which degrees, and in which algorithms."""

import dataclasses
import itertools

import pytest

from jaxrlhf.planner import presets
from jaxrlhf.planner.peak_memory import peak_memory
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import Choice, Problem
from jaxrlhf.planner.search import exhaustive, search
from jaxrlhf.planner.simulate import steady_state
from tests.planner.made_up_problem import ppo_problem

pytest.importorskip("numba")
PROBLEM = ppo_problem(2, 8, actor=7.0, critic=3.0, seed=1, micro_batches=(4,))


def chosen(problem: Problem, plan: tuple[int, ...]) -> dict[str, Choice]:
    return {call.name: call.choices[k] for call, k in zip(problem.calls, plan, strict=True)}


def without(problem: Problem, *sets: str, drop: tuple[str, ...] = ()) -> Problem:
    """A step without some sets of weights or calls."""
    left = [j for j, call in enumerate(problem.calls) if call.weights not in sets and call.name not in drop]
    names = {problem.calls[j].name for j in left}
    calls = tuple(
        dataclasses.replace(problem.calls[j], needs=tuple(n for n in problem.calls[j].needs if n in names))
        for j in left
    )
    at = {j: place for place, j in enumerate(left)}
    return dataclasses.replace(
        problem,
        calls=calls,
        reallocations={(at[i], at[j]): t for (i, j), t in problem.reallocations.items() if i in at and j in at},
        transfers={(at[i], at[j]): t for (i, j), t in problem.transfers.items() if i in at and j in at},
    )


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_gives_a_plan_that_fits(name, monkeypatch):
    monkeypatch.setattr(presets.searches, "STEPS", 5000)
    plan = presets.find(name)(PROBLEM)
    assert max(peak_memory(PROBLEM, plan)) <= PROBLEM.capacity[0]
    best = exhaustive(PROBLEM)
    assert best.proven and steady_state(PROBLEM, plan).seconds >= best.seconds
    if name in ("search", "exhaustive"):
        assert steady_state(PROBLEM, plan).seconds == best.seconds


def test_an_unknown_one_is_an_error():
    with pytest.raises(PlanError, match=r"strategy: must be one of search, .*\. Got 'serch'\. Did you mean 'search'\?"):
        presets.find("serch")


def test_heuristic_is_tensor_within_a_node_and_the_same_for_all():
    for choice in chosen(PROBLEM, presets.heuristic(PROBLEM)).values():
        strategy = choice.strategy
        assert choice.devices == range(16)
        assert (strategy.tensor, strategy.pipeline, strategy.data) == (8, 1, 2)


def test_heuristic_has_stages_where_memory_asks_for_them():
    actor = PROBLEM.calls[4]
    large = [dataclasses.replace(x, resting=(4 if x.strategy.pipeline < 2 else 1) * x.resting) for x in actor.choices]
    calls = (*PROBLEM.calls[:4], dataclasses.replace(actor, choices=tuple(large)), PROBLEM.calls[5])
    tight = dataclasses.replace(PROBLEM, calls=calls, capacity=(40 * 2**30,) * 16)
    degrees = {(x.strategy.tensor, x.strategy.pipeline) for x in chosen(tight, presets.heuristic(tight)).values()}
    assert degrees == {(8, 2)}
    with pytest.raises(PlanError, match=r"must have room for what it holds"):
        presets.heuristic(ppo_problem(2, 8, memory=5, micro_batches=(4,)))


def test_heuristic_takes_the_nearest_degrees_that_a_call_has():
    first = PROBLEM.calls[0]
    kept = [k for k, x in enumerate(first.choices) if x.strategy.tensor <= 4 and x.strategy.pipeline > 1]
    part = dataclasses.replace(first, choices=tuple(first.choices[k] for k in kept))
    problem = dataclasses.replace(
        PROBLEM,
        calls=(part, *PROBLEM.calls[1:]),
        reallocations={(i, j): t[:, kept] if j == 0 else t for (i, j), t in PROBLEM.reallocations.items()},
        transfers={(i, j): t[kept] if i == 0 else t for (i, j), t in PROBLEM.transfers.items()},
    )
    plan = chosen(problem, presets.heuristic(problem))
    assert (plan["actor.generate"].strategy.tensor, plan["actor.generate"].strategy.pipeline) == (4, 2)
    assert {x.strategy.tensor for name, x in plan.items() if name != "actor.generate"} == {8}


def test_colocate_has_all_on_all_devices_and_each_at_its_best():
    plan = presets.colocate(PROBLEM)
    assert {choice.devices for choice in chosen(PROBLEM, plan).values()} == {range(16)}
    assert steady_state(PROBLEM, plan).seconds < steady_state(PROBLEM, presets.heuristic(PROBLEM)).seconds


def test_standalone_gives_every_set_devices_of_its_own():
    devices: dict[str, set[int]] = {}
    for call, k in zip(PROBLEM.calls, presets.standalone(PROBLEM), strict=True):
        devices.setdefault(call.weights, set()).update(call.choices[k].devices)
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(devices.values(), 2))


def halves(problem: Problem) -> dict[str, range]:
    return {name: choice.devices for name, choice in chosen(problem, presets.split(problem)).items()}


def test_split_has_policies_on_one_half_and_what_scores_on_the_other():
    first, second = range(8), range(8, 16)
    assert halves(PROBLEM) == {
        "actor.generate": first,
        "reference.logprobs": first,
        "critic.values": second,
        "reward.scores": second,
        "actor.train": first,
        "critic.train": second,
    }
    no_critic = without(PROBLEM, "critic")
    assert halves(no_critic)["reward.scores"] == second and halves(no_critic)["reference.logprobs"] == first


def test_split_without_models_that_score_has_what_is_trained_apart():
    policies = without(PROBLEM, "critic", "reward")
    assert halves(policies) == {
        "actor.generate": range(8),
        "reference.logprobs": range(8, 16),
        "actor.train": range(8),
    }
    actor = without(PROBLEM, "critic", "reward", "reference")
    assert set(halves(actor).values()) == {range(16)}


def test_split_where_there_are_no_halves():
    odd = ppo_problem(3, 2, memory=1000, micro_batches=(4,))
    assert set(halves(odd).values()) in ({range(2), range(2, 6)}, {range(4), range(4, 6)})
    with pytest.raises(
        PlanError, match=r"split: all calls must have a way .*\(actor, reference \| critic, reward\). Got 1 dev"
    ):
        presets.split(ppo_problem(1, 1, memory=1000))


def test_hybridflow_is_the_mapping():
    assert search(PROBLEM, steps=2000).seconds <= steady_state(PROBLEM, presets.hybridflow(PROBLEM)).seconds
