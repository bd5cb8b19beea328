"""Algorithm 1 against a simulation from event to event, steps worked out by hand, and what iterations settle to."""

import dataclasses
import random
from collections.abc import Mapping

import numpy as np
import pytest

from jaxrlhf.planner.problem import CallChoices, Choice, PairSeconds, Problem
from jaxrlhf.planner.simulate import (
    ITERATIONS,
    NANOSECONDS,
    Simulation,
    Task,
    nanoseconds,
    simulate,
    steady_state,
    unroll,
)
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.made_up_problem import ppo_problem, random_problem


def random_tasks(chance: random.Random) -> list[Task]:
    """Whole seconds, so that many tasks get ready at the same time; names in any order. Some take no devices."""
    tasks = []
    places = list(range(chance.randint(1, 12)))
    chance.shuffle(places)  # needs go from any position to any other, without circles
    for place in places:
        parts = []
        for _ in range(chance.choice((1, 1, 1, 2, 0))):
            first = chance.randrange(6)
            parts.append(range(first, first + chance.randint(1, 3)))
        needs = tuple(other for other, rank in enumerate(places) if rank < place and chance.random() < 0.3)
        tasks.append(Task(str(place), tuple(parts), float(chance.randint(1, 4)), needs))
    return tasks


def event_by_event(tasks: list[Task]) -> list[tuple[float, float]]:
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


def test_as_an_event_simulation_says():
    chance, waited = random.Random(0), 0
    for _ in range(400):
        tasks = random_tasks(chance)
        expected = event_by_event(tasks)
        assert simulate(tasks) == [(start * NANOSECONDS, end * NANOSECONDS) for start, end in expected]
        waited += any(
            start > max((expected[n][1] for n in t.needs), default=0)
            for (start, _), t in zip(expected, tasks, strict=True)
        )
    assert waited > 200  # for devices


def test_of_tasks_ready_at_once_the_first_goes_first():
    tasks = [Task("a", (range(2),), 1.0), Task("b", (range(1, 3),), 1.0), Task("c", (range(2),), 1.0)]
    assert [start // NANOSECONDS for start, _ in simulate(tasks)] == [0, 1, 2]


def test_a_task_that_is_ready_keeps_later_ones_off_its_devices():
    tasks = [
        Task("long", (range(1),), 5.0),
        Task("both", (range(2),), 1.0),
        Task("short", (range(2, 3),), 1.0),
        Task("later", (range(1, 2),), 1.0, (2,)),
    ]
    assert [start // NANOSECONDS for start, _ in simulate(tasks)] == [0, 5, 0, 6]


def test_tasks_in_a_circle_are_an_error():
    with pytest.raises(ValueError, match=r"wait for each other in a circle. Got a, b\."):
        simulate([Task("a", (range(1),), 1.0, (1,)), Task("b", (range(1),), 1.0, (0,)), Task("c", (range(1),), 1.0)])


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
    starts = {(t.name, t.iteration): start for t, (start, _) in zip(*both(where, 5), strict=True)}
    ends = {(t.name, t.iteration): end for t, (_, end) in zip(*both(where, 5), strict=True)}
    assert starts["a.generate", 3] == ends["b.scores", 1]


def both(where: Mapping[str, tuple[int, int, float]], iterations: int) -> tuple[list[Task], list[tuple[int, int]]]:
    tasks = list(unroll(one_way(where, needs={"b.scores": ("a.generate",)}), [0, 0], iterations))
    return tasks, simulate(tasks)


@pytest.mark.parametrize("seed", range(60))
def test_what_it_settles_to_goes_on(seed):
    problem, chance = random_problem(seed), random.Random(seed)
    plan = [chance.randrange(len(call.choices)) for call in problem.calls]
    simulation = steady_state(problem, plan)
    tasks = unroll(problem, plan, 2 * ITERATIONS)
    starts: dict[int, int] = {}
    for task, (start, _) in zip(tasks, simulate(tasks), strict=True):
        starts.setdefault(task.iteration, start)
    assert simulation.period > 0
    periods = (ITERATIONS // simulation.period - 1) * simulation.period
    late = 2 * ITERATIONS - 4
    assert nanoseconds(simulation.seconds) == (starts[late] - starts[late - periods]) // periods
    assert max(simulation.busy) <= 1 + 1e-9
    assert simulation.critical


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
