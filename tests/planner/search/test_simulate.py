"""Algorithm 1 against a simulation from event to event, steps worked out by hand, and what iterations settle to."""

import dataclasses
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from jaxrlhf.planner.search import evaluate_loops
from jaxrlhf.planner.search.flat_problem import NANOSECONDS, nanoseconds
from jaxrlhf.planner.search.problem import CallChoices, Choice, PairSeconds, Problem
from jaxrlhf.planner.search.simulate import Simulation, Task, simulate, steady_state, unroll
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.made_up_problem import ppo_problem, random_problem


def event_by_event(tasks: Sequence[Task]) -> list[tuple[float, float]]:
    """Lets time go by, from one end of a task to the next. Every device has a queue; who is first in all of its own
    queues begins."""
    queues: dict[int, list[int]] = {d: [] for task in tasks for part in task.devices for d in part}
    begun: dict[int, float] = {}
    over: set[int] = set()
    queued: set[int] = set()
    now = 0.0
    while len(over) < len(tasks):
        over |= {i for i, start in begun.items() if start + tasks[i].seconds <= now}
        for queue in queues.values():
            queue[:] = [i for i in queue if i not in over]
        for i, task in enumerate(tasks):
            if i not in queued and set(task.needs) <= over:
                queued.add(i)
                for device in {d for part in task.devices for d in part}:
                    queues[device].append(i)
        for i in queued - set(begun):
            if all(queues[d][0] == i for part in tasks[i].devices for d in part):
                begun[i] = now
        now = min((start + tasks[i].seconds for i, start in begun.items() if i not in over), default=now)
    return [(begun[i], begun[i] + task.seconds) for i, task in enumerate(tasks)]


def random_plan(problem: Problem, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(len(call.choices)) for call in problem.calls]


def test_as_an_event_simulation_says():
    """In whole seconds, so that many tasks get ready at the same time."""
    waited = 0
    for seed in range(80):
        problem = dataclasses.replace(random_problem(seed), one_at_a_time=seed % 5 == 0)
        plan = random_plan(problem, seed)
        found, tasks = simulate(problem, plan), unroll(problem, plan, 9)
        assert found.tasks[: len(tasks)] == tasks
        for task, (start, end), times in zip(tasks, event_by_event(tasks), found.times, strict=False):
            if task.iteration < 9 - evaluate_loops.RUN_AHEAD:  # later ones, which are not there, do not hold it up
                assert times == (start * NANOSECONDS, end * NANOSECONDS)
                waited += times[0] > max((found.times[need][1] for need in task.needs), default=0)
    assert waited > 200  # for devices


INFERENCE = ("reference.logprobs", "critic.values", "reward.scores")
NEEDS: Mapping[str, tuple[str, ...]] = {
    "actor.generate": (),
    **dict.fromkeys(INFERENCE, ("actor.generate",)),
    "actor.train": ("actor.generate", *INFERENCE),
    "critic.train": ("actor.generate", *INFERENCE),
}
CALLS = tuple(NEEDS)


def one_way(
    where: Mapping[str, tuple[int, int, float]],
    *,
    reallocations: Mapping[tuple[str, str], float] = {},
    transfers: Mapping[tuple[str, str], float] = {},
    needs: Mapping[str, tuple[str, ...]] = NEEDS,
    loads: Mapping[str, tuple[float, float]] = {},
) -> Problem:
    """A step with one way to run each call: call -> first device, end, seconds."""
    calls = []
    for name, (first, end, seconds) in where.items():
        role, method = name.split(".")
        load, unload = loads.get(name, (0.0, 0.0))
        choice = Choice(first, end, Strategy(data=end - first), seconds, load=load, unload=unload)
        trains = method.startswith("train")
        kind = "train" if trains else "generate" if method == "generate" else "infer"
        calls.append(CallChoices(name, kind, role, role, trains, needs.get(name, ()), (choice,)))
    names = list(where)

    def tables(given: Mapping[tuple[str, str], float]) -> dict[tuple[int, int], PairSeconds]:
        return {
            (names.index(a), names.index(b)): PairSeconds.of(np.full((1, 1), seconds))
            for (a, b), seconds in given.items()
        }

    devices = max(end for _, end, _ in where.values())
    return Problem(tuple(calls), devices, devices, (1,) * devices, tables(reallocations), tables(transfers), tokens=1)


def settled(problem: Problem) -> Simulation:
    return steady_state(problem, [0] * len(problem.calls))


def times(simulation: Simulation) -> dict[str, tuple[float, float]]:
    return {span.task.name: (span.start, span.end) for span in simulation.spans}


APART = {
    "actor.generate": (0, 1, 3.0),
    "reference.logprobs": (0, 1, 2.0),
    "critic.values": (1, 2, 1.0),
    "reward.scores": (1, 2, 0.5),
    "actor.train": (0, 1, 4.0),
    "critic.train": (1, 2, 5.0),
}
"""The actor and its reference on one device, critic and reward on another one."""


def starts(problem: Problem, iteration: int = 0) -> list[float]:
    found = simulate(problem, [0] * len(problem.calls))
    each = zip(found.tasks, found.times, strict=True)
    return [start / NANOSECONDS for task, (start, _) in each if task.iteration == iteration]


def test_of_tasks_ready_at_once_the_first_goes_first():
    where = {"a.scores": (0, 2, 1.0), "b.scores": (1, 3, 1.0), "c.scores": (0, 2, 1.0)}
    assert starts(one_way(where, needs={})) == [0, 1, 2] and starts(one_way(where, needs={}), 1) == [3, 4, 5]


def test_a_task_that_is_ready_keeps_later_ones_off_its_devices():
    where = {"a.long": (0, 1, 5.0), "b.both": (0, 2, 1.0), "c.short": (2, 3, 1.0), "d.later": (1, 2, 1.0)}
    problem = one_way(where, needs={"d.later": ("c.short",)})
    assert starts(problem) == [0, 5, 0, 12]  # `both` of the next iteration, which is ready, begins at 11
    assert starts(problem, 1) == [6, 11, 1, 13]


def test_calls_of_one_place_take_turns():
    simulation = settled(one_way({name: (0, 2, seconds) for name, (_, _, seconds) in APART.items()}))
    assert simulation.seconds == 15.5 and simulation.period == 1
    assert simulation.busy == (1.0, 1.0)
    assert simulation.critical == CALLS


def test_generation_overlaps_with_the_critics_training_of_the_iteration_before():
    simulation = settled(one_way(APART))
    assert simulation.seconds == 9.0  # 3 + 2 + 4 on the actor's device; the critic's has 6.5
    assert times(simulation) == {
        "actor.generate": (0, 3),
        "reference.logprobs": (3, 5),
        "critic.values": (3, 4),
        "reward.scores": (4, 4.5),
        "actor.train": (5, 9),
        "critic.train": (5, 10),  # one second into the next generation
    }
    assert simulation.busy == (1.0, pytest.approx(6.5 / 9))
    assert simulation.critical == ("actor.generate", "reference.logprobs", "actor.train")


def test_where_the_critic_trains_longest_its_values_wait_for_it():
    simulation = settled(one_way({**APART, "critic.train": (1, 2, 10.0)}))
    assert simulation.seconds == 11.5  # its device: 1 + 0.5 + 10
    assert simulation.busy == (pytest.approx(9 / 11.5), 1.0)
    assert simulation.critical == ("critic.values", "critic.train", "reward.scores")  # scores do not wait for weights


def test_new_weights_are_brought_on_the_devices_of_both_calls_and_outputs_beside_them():
    brought = one_way(
        {**APART, "actor.train": (1, 2, 4.0), "critic.train": (2, 3, 5.0), "critic.values": (2, 3, 1.0)},
        reallocations={("actor.train", "actor.generate"): 2.0, ("critic.train", "critic.values"): 0.0},
        transfers={("actor.generate", "reward.scores"): 0.5, ("actor.generate", "critic.values"): 0.5},
    )
    simulation = settled(brought)
    assert times(simulation) == {
        "actor.generate: weights from actor.train": (0, 2),
        "actor.generate": (2, 5),
        "critic.values: data from actor.generate": (5, 5.5),
        "reward.scores: data from actor.generate": (5, 5.5),
        "reference.logprobs": (5, 7),  # nobody waits for it but training
        "critic.values": (5.5, 6.5),
        "reward.scores": (5.5, 6),
        "actor.train": (7, 11),
        "critic.train": (7, 12),
    }
    assert simulation.seconds == 11
    tasks = {task.name: task for task in unroll(brought, [0] * 6, 2)}
    assert tasks["reward.scores: data from actor.generate"].devices == ()
    assert tasks["actor.generate: weights from actor.train"].devices == (range(1, 2), range(1))
    assert tasks["actor.generate: weights from actor.train"].kind == "weights"
    assert not any("weights from critic" in name for name in tasks)


def test_where_nothing_runs_beside_anything_else_outputs_take_their_turn():
    where = {"a.generate": (0, 1, 3.0), "b.logprobs": (0, 1, 2.0), "c.scores": (1, 2, 1.0)}
    needs: dict[str, tuple[str, ...]] = dict.fromkeys(("b.logprobs", "c.scores"), ("a.generate",))
    problem = one_way(where, transfers={("a.generate", "c.scores"): 0.5}, needs=needs)
    assert settled(problem).seconds == 5.0
    assert settled(dataclasses.replace(problem, one_at_a_time=True)).seconds == 6.5


def test_readers_of_one_layout_share_what_is_brought():
    where = {"a.generate": (0, 2, 3.0), "a.logprobs": (0, 2, 1.0), "a.values": (0, 1, 1.0), "a.train": (2, 4, 4.0)}
    brought = {("a.train", name): 2.0 for name in where if name != "a.train"}
    needs = {"a.logprobs": ("a.generate",), "a.values": ("a.generate",), "a.train": tuple(where)[:3]}
    problem = one_way(where, reallocations=brought, needs=needs)
    names = [task.name for task in unroll(problem, [0] * 4, 2) if task.kind == "weights"]
    assert names == ["a.generate: weights from a.train", "a.values: weights from a.train"]
    assert settled(problem).seconds == 4 + 2 + 2 + 3 + 1 + 1  # both need the first device


def test_a_reader_after_training_reads_what_was_just_trained():
    where = {"a.train": (0, 1, 3.0), "a.loss": (1, 2, 1.0), "b.loss": (1, 2, 1.0)}
    problem = one_way(where, reallocations={("a.train", "a.loss"): 1.0}, needs={"a.loss": ("a.train",)})
    tasks = unroll(problem, [0] * 3, 2)
    named = {(task.name, task.iteration): i for i, task in enumerate(tasks)}
    weights = tasks[named["a.loss: weights from a.train", 0]]
    assert weights.needs == (named["a.train", 0],)
    # and training waits until the version before is read no more
    assert named["a.loss", 0] in tasks[named["a.train", 1]].needs
    assert settled(problem).seconds == 3 + 1 + 1


def test_weights_from_host_memory_come_before_a_call_and_go_after_it():
    simulation = settled(one_way(APART, loads={"reference.logprobs": (1.0, 0.5)}))
    expected = {
        "reference.logprobs: load": (3, 4),
        "reference.logprobs": (4, 6),
        "reference.logprobs: unload": (6, 6.5),
    }
    assert {name: span for name, span in times(simulation).items() if "reference" in name} == expected
    assert times(simulation)["actor.train"] == (6.5, 10.5)  # ready as early, but it stands later
    assert simulation.seconds == 10.5


def test_no_iteration_begins_before_the_last_but_one_has_ended():
    where = {"a.generate": (0, 1, 1.0), "b.scores": (1, 2, 5.0)}
    simulation = settled(one_way(where, needs={"b.scores": ("a.generate",)}))
    assert simulation.seconds == 5.0
    found = simulate(one_way(where, needs={"b.scores": ("a.generate",)}), [0, 0])
    times = {(task.name, task.iteration): time for task, time in zip(found.tasks, found.times, strict=True)}
    assert times["a.generate", 3][0] == times["b.scores", 1][1]


@pytest.mark.parametrize("seed", range(60))
def test_what_it_settles_to_goes_on(seed, monkeypatch):
    problem = random_problem(seed)
    plan = random_plan(problem, seed)
    simulation, settled = steady_state(problem, plan), simulate(problem, plan)
    assert simulation.period > 0 and max(simulation.busy) <= 1 + 1e-9 and simulation.critical
    monkeypatch.setattr(evaluate_loops, "FIRST_SETTLED", 10**9)  # so that all is simulated, and twice as much
    monkeypatch.setattr(evaluate_loops, "LAST_SETTLED", 2 * evaluate_loops.ITERATIONS - 3)
    monkeypatch.setattr(evaluate_loops, "ITERATIONS", 2 * evaluate_loops.ITERATIONS)
    longer = simulate(problem, plan)
    assert longer.times[: len(settled.times)] == settled.times
    firsts: dict[int, int] = {}
    for task, (start, _) in zip(longer.tasks, longer.times, strict=True):
        firsts.setdefault(task.iteration, start)
    periods = 20 // simulation.period * simulation.period
    late = longer.settled
    assert nanoseconds(simulation.seconds) == (firsts[late] - firsts[late - periods]) // periods


def test_a_period_may_be_longer_than_an_iteration():
    periods = set()
    for seed in range(40):
        problem, chance = random_problem(seed), random.Random(seed)
        simulation = steady_state(problem, [chance.randrange(len(call.choices)) for call in problem.calls])
        periods.add(simulation.period)
        assert len({span.task.iteration for span in simulation.spans}) == simulation.period
    assert {1, 2} <= periods


def test_what_is_critical_is_what_makes_it_longer():
    """A little more of a critical call makes the iteration longer, and a little more of any other does not."""
    problem, chance = ppo_problem(1, 4, memory=1000.0, seed=3), random.Random(1)
    for _ in range(20):
        plan = [chance.randrange(len(call.choices)) for call in problem.calls]
        before = steady_state(problem, plan)
        for c, call in enumerate(problem.calls):
            choice = call.choices[plan[c]]
            longer = dataclasses.replace(choice, seconds=choice.seconds + 1e-6)
            choices = (*call.choices[: plan[c]], longer, *call.choices[plan[c] + 1 :])
            calls = (*problem.calls[:c], dataclasses.replace(call, choices=choices), *problem.calls[c + 1 :])
            after = steady_state(dataclasses.replace(problem, calls=calls), plan)
            assert (after.seconds > before.seconds) == (call.name in before.critical)
