"""The search: its loops against the simulation, what it finds against what there is, and what it says."""

import dataclasses
import math
import random

import pytest

from jaxrlhf.planner.numba_loops import loops
from jaxrlhf.planner.peak_memory import peak_memory
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import CallChoices, Choice, Problem
from jaxrlhf.planner.search import exhaustive, search
from jaxrlhf.planner.searching import search_rounds
from jaxrlhf.planner.searching.arena import RunnerUp, SearchResult
from jaxrlhf.planner.searching.dominance import with_choices, worth_keeping
from jaxrlhf.planner.searching.flat_problem import as_integers, flat_problem
from jaxrlhf.planner.simulate import nanoseconds, steady_state
from jaxrlhf.planner.step_order import layout
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.made_up_problem import ppo_problem, random_problem, sharing_memory


def random_plan(problem: Problem, chance: random.Random) -> list[int]:
    return [chance.randrange(len(call.choices)) for call in problem.calls]


@pytest.mark.parametrize("compiled", [True, False])
def test_the_loops_say_what_the_simulation_says(compiled):
    if compiled:
        pytest.importorskip("numba")
    functions, chance, lacks = loops(search_rounds, compiled=compiled), random.Random(0), set()
    some = [ppo_problem(2, 4, seed=1, offload=True, memory=40)] + [random_problem(seed) for seed in range(60)]
    some[1::4] = [dataclasses.replace(problem, one_at_a_time=True) for problem in some[1::4]]
    some[1::3] = [sharing_memory(problem) for problem in some[1::3]]
    for problem in some:
        flat = flat_problem(problem, compiled=compiled)
        sizes = search_rounds.sizes_of_work(len(problem.calls), len(flat.before))
        work = search_rounds.Work(*(as_integers([0] * size, compiled=compiled) for size in sizes))
        for _ in range(3 if problem is not some[0] else 40):
            plan = random_plan(problem, chance)
            numbers = as_integers([int(flat.begin[c]) + k for c, k in enumerate(plan)], compiled=compiled)
            expected = nanoseconds(steady_state(problem, plan).seconds)
            assert functions["iteration_length"](flat, numbers, work) == expected
            peaks = zip(peak_memory(problem, plan), problem.capacity, strict=True)
            lacking = max(peak - capacity for peak, capacity in peaks)
            assert functions["fit"](flat, numbers, work) == lacking
            lacks.add(lacking > 0)
    assert lacks == {True, False}


@pytest.mark.parametrize("compiled", [True, False])
def test_calls_get_the_fastest_variants_for_which_there_is_room(compiled):
    if compiled:
        pytest.importorskip("numba")
    functions, chance, changed = loops(search_rounds, compiled=compiled), random.Random(0), 0
    problem = ppo_problem(1, 4, memory=75, seed=1, micro_batches=(1, 2, 4, 8))
    problem = with_choices(problem, worth_keeping(problem))
    flat = flat_problem(problem, compiled=compiled, fits=True)
    sizes = search_rounds.sizes_of_work(len(problem.calls), len(flat.before))
    work = search_rounds.Work(*(as_integers([0] * size, compiled=compiled) for size in sizes))
    for _ in range(60):
        plan = random_plan(problem, chance)
        numbers = as_integers([int(flat.begin[c]) + k for c, k in enumerate(plan)], compiled=compiled)
        lacking = functions["fit"](flat, numbers, work)
        got = [int(number) - int(flat.begin[c]) for c, number in enumerate(numbers)]
        assert [layout(c.choices[k]) for c, k in zip(problem.calls, got, strict=True)] == [
            layout(c.choices[k]) for c, k in zip(problem.calls, plan, strict=True)
        ]
        assert max(peak_memory(problem, got)) - problem.capacity[0] == lacking
        for c, call in enumerate(problem.calls):
            mine = call.choices[got[c]]
            for k, other in enumerate(call.choices):
                if layout(other) == layout(mine) and other.seconds < mine.seconds:
                    assert max(peak_memory(problem, [*got[:c], k, *got[c + 1 :]])) > problem.capacity[0]
        changed += got != plan
    assert changed > 30


def test_a_choice_in_the_middle_is_not_lost_where_the_fastest_do_not_fit_together():
    """Two trained sets on one device: the fastest choices of both are too large, the leanest needlessly slow."""
    pytest.importorskip("numba")
    ladder = [(1.0, 60), (1.1, 50), (1.2, 45), (1.3, 40), (1.4, 38), (1.5, 36), (9.0, 2)]
    choices = tuple(Choice(0, 1, Strategy(micro_batches=n), s, resting=x) for n, (s, x) in enumerate(ladder, 1))
    calls = tuple(CallChoices(f"{name}.train", "train", name, name, True, (), choices) for name in ("actor", "critic"))
    problem = Problem(calls, 1, 1, (90,), {}, {}, tokens=1)
    result = search(problem)
    assert result.seconds == pytest.approx(2.4) and result.proven


def test_compiled_or_not_it_finds_the_same():
    pytest.importorskip("numba")
    for problem in (ppo_problem(1, 4, memory=110, seed=1), random_problem(7)):
        one, other = (search(problem, steps=150, bounds=150, seed=3, compiled=compiled) for compiled in (True, False))
        assert one.plan == other.plan and one.runners_up == other.runners_up
        assert [x.evaluated for x in one.history] == [x.evaluated for x in other.history]


def test_the_result_depends_on_seed_and_steps_alone():
    problem = ppo_problem(1, 4, memory=110, seed=1, micro_batches=(4,))
    results = [search(problem, steps=100, bounds=0, seed=seed, compiled=False) for seed in (0, 0, 1)]
    plans = [(result.plan, result.runners_up, result.evaluated) for result in results]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.parametrize("devices, memory", [(4, 110), (8, 80)])
def test_on_one_node_it_finds_the_best(devices, memory):
    """With few steps, after which branch and bound has something to do; and by chains alone nearly always."""
    pytest.importorskip("numba")
    apart = []
    for seed in range(20):
        problem = ppo_problem(1, devices, memory=memory, seed=seed, micro_batches=(4,))
        best = exhaustive(problem)
        assert best.proven
        assert search(problem, steps=4000, seed=seed).seconds == best.seconds
        apart.append(search(problem, steps=20_000, bounds=0, seed=seed).seconds / best.seconds)
    assert max(apart) < 1.005 and apart.count(1.0) >= 17


def test_on_two_nodes_it_comes_close():
    pytest.importorskip("numba")
    for seed in range(4):
        problem = ppo_problem(2, 8, seed=seed)
        best = exhaustive(problem)
        assert best.proven
        for found in (search(problem, steps=4000, bounds=50_000), search(problem, steps=60_000, bounds=0)):
            assert best.seconds <= found.seconds <= 1.02 * best.seconds


def test_on_random_steps_it_finds_the_best():
    pytest.importorskip("numba")
    for number in range(12):
        problem = random_problem(number)
        problem = dataclasses.replace(problem, capacity=(60,) * problem.num_devices)
        assert search(problem, steps=5000, bounds=0, seed=number).seconds == exhaustive(problem).seconds


@pytest.fixture(scope="module")
def found() -> tuple[Problem, SearchResult]:
    problem = ppo_problem(1, 4, memory=100, seed=1)
    return problem, search(problem, steps=4000, bounds=0)


def test_the_best_fits_and_is_what_the_simulation_says(found):
    problem, result = found
    assert result.simulation == steady_state(problem, result.plan)
    assert result.memory == peak_memory(problem, result.plan)
    assert all(peak <= capacity for peak, capacity in zip(result.memory, problem.capacity, strict=True))
    assert not result.proven


def test_the_history_goes_down(found):
    _, result = found
    seconds = [progress.seconds for progress in result.history]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == result.seconds
    evaluated = [progress.evaluated for progress in result.history]
    elapsed = [progress.elapsed for progress in result.history]
    assert elapsed == sorted(elapsed)
    assert evaluated == sorted(evaluated) and evaluated[-1] == result.evaluated
    assert 3000 < result.evaluated < 5600  # chains, up to half as many neighbors, branch and bound


def test_those_that_lost_are_other_plans_and_say_why(found):
    problem, result = found
    fitting = [each for each in result.runners_up if not each.lacking]
    too_large = [each for each in result.runners_up if each.lacking]
    assert fitting and too_large
    assert [each.seconds for each in fitting] == sorted(each.seconds for each in fitting)
    assert fitting[0].seconds >= result.seconds > max(each.seconds for each in too_large)
    placements = set()
    for each in (RunnerUp(result.plan, result.seconds, 0), *result.runners_up):
        assert steady_state(problem, each.plan).seconds == each.seconds
        peaks = zip(peak_memory(problem, each.plan), problem.capacity, strict=True)
        assert max(0, *(peak - capacity for peak, capacity in peaks)) == each.lacking
        chosen = [call.choices[k] for call, k in zip(problem.calls, each.plan, strict=True)]
        placements.add((each.lacking > 0, *((choice.first, choice.end) for choice in chosen)))
    assert len(placements) == 1 + len(result.runners_up)
    assert fitting[-1].why(result.seconds).endswith(" s") and " % slower, by " in fitting[-1].why(result.seconds)


def test_it_stops_when_the_time_is_up_with_what_it_has():
    result = search(ppo_problem(1, 4, memory=110), steps=10**9, bounds=0, seconds=0.2)
    assert result.evaluated < 10**8
    assert math.isfinite(result.seconds)


def test_from_plans_that_do_not_fit_it_finds_its_way():
    pytest.importorskip("numba")
    problem = ppo_problem(1, 8, memory=48)
    fastest = [min(range(len(c.choices)), key=lambda k, c=c: c.choices[k].seconds) for c in problem.calls]
    assert max(peak_memory(problem, fastest)) > 1.5 * problem.capacity[0]
    assert search(problem, steps=20_000, bounds=0).seconds < 1.05 * exhaustive(problem).seconds


def test_where_nothing_fits_it_says_what_is_lacking_and_what_takes_it():
    with pytest.raises(PlanError) as error:
        search(ppo_problem(1, 4, memory=40), steps=2000, bounds=0)
    text = str(error.value)
    assert text.startswith("plan: must fit into the 42.9 GB that a plan may fill of a device. Got ")
    assert " on device 0 during actor.train (" in text and "actor at rest" in text and "actor.train at work" in text
    assert "too much. No plan was found that needs less. Use more devices or larger ones" in text


def test_a_call_without_choices_is_an_error():
    problem = ppo_problem(1, 2)
    problem = dataclasses.replace(
        problem, calls=(*problem.calls[:5], dataclasses.replace(problem.calls[5], choices=()))
    )
    with pytest.raises(PlanError, match=r"critic.train: must have at least one way to run. Got none on 2"):
        search(problem)


@pytest.mark.parametrize("settings", [{"steps": 0}, {"chains": 0}, {"bounds": -1}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=r"search: (steps|chains|bounds) must be at least [01]. Got (0|-1)\."):
        search(ppo_problem(1, 2), **settings)
