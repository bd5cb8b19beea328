"""What waits for what in consecutive iterations."""

import dataclasses

from jaxrlhf.planner.search.problem import CallChoices, Choice, Problem
from jaxrlhf.planner.search.step_order import Wait, layout, step_order
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.made_up_problem import ppo_problem

CHOICE = Choice(0, 1, Strategy(), 1.0)


def step(*calls: tuple[str, bool, tuple[str, ...]]) -> Problem:
    """Calls named by their set and a number, whether they train it, and what they need."""
    made = [
        CallChoices(name, "train" if trains else "infer", name[0], name[0], trains, needs, (CHOICE,))
        for name, trains, needs in calls
    ]
    return Problem(tuple(made), 1, 1, (1,), {}, {}, tokens=1)


def waits(problem: Problem) -> set[tuple[str, str, int]]:
    names = [call.name for call in problem.calls]
    return {(names[wait.before], names[wait.after], wait.lag) for wait in step_order(problem).waits}


def test_of_ppo():
    problem = ppo_problem(1, 1)
    names = [call.name for call in problem.calls]
    order = step_order(problem)
    inference = {"reference.logprobs", "critic.values", "reward.scores"}
    expected = {("actor.generate", name, 0) for name in inference}
    expected |= {(name, train, 0) for name in inference for train in ("actor.train", "critic.train")}
    expected |= {("actor.generate", train, 0) for train in ("actor.train", "critic.train")}
    expected |= {("actor.train", "actor.generate", 1), ("critic.train", "critic.values", 1)}
    expected |= {("actor.train", "actor.train", 1), ("critic.train", "critic.train", 1)}
    assert waits(problem) == expected  # and none for the trainer: two iterations wait for each other anyway
    assert [wait for wait in order.waits if wait.weights] == [
        Wait(4, 0, 1, weights=True),
        Wait(5, 2, 1, weights=True),
    ]
    assert sum(wait.data for wait in order.waits) == 11
    assert order.homes == (4, None, 5, None, 4, 5)
    copies = {names[j]: [names[c] for c in alive] for j, alive in enumerate(order.alive) if alive}
    assert copies == {
        "actor.generate": ["actor.generate", "reference.logprobs", "critic.values", "reward.scores"],
        "critic.values": ["critic.values", "reward.scores", "actor.train"],
    }


def test_training_waits_for_those_that_read_what_it_changes():
    order = step(("a1", True, ()), ("b1", False, ("a1",)), ("a2", False, ("a1",)))
    assert ("a2", "a1", 1) in waits(order)
    assert step_order(order).alive == ((), (), (2,))
    assert step_order(order).made_by == ((0, 1), None, (0, 0))


def test_stale_generation_waits_for_the_training_of_the_step_before_the_last():
    problem = step(("a1", False, ()), ("b1", False, ("a1",)), ("a2", True, ("b1",)))
    stale = dataclasses.replace(problem.calls[0], stale=1)
    problem = dataclasses.replace(problem, calls=(stale, *problem.calls[1:]))
    assert {wait for wait in waits(problem) if wait[1] == "a1"} == {("a2", "a1", 2)}
    assert step_order(problem).alive[0] == (0, 1, 2), "its copies stay while others are trained"
    older = dataclasses.replace(problem, calls=(dataclasses.replace(stale, stale=5), *problem.calls[1:]))
    assert waits(older) == waits(problem), "a run is never more than two steps ahead"


def test_a_set_that_is_trained_twice():
    problem = step(("a1", False, ()), ("a2", True, ("a1",)), ("a3", False, ("a2",)), ("a4", True, ("a2", "a3")))
    assert waits(problem) == {
        ("a4", "a1", 1),
        ("a1", "a2", 0),
        ("a4", "a2", 1),
        ("a2", "a3", 0),
        ("a3", "a4", 0),
        ("a2", "a4", 0),
    }
    assert step_order(problem).homes == (1, 1, 1, 1)
    assert step_order(problem).alive == ((0,), (), (2,), ())


def test_where_nothing_is_trained_the_trainer_holds_the_next_iteration_but_one():
    assert waits(step(("a1", False, ()), ("b1", False, ("a1",)), ("c1", False, ("a1",)))) == {
        ("a1", "b1", 0),
        ("a1", "c1", 0),
        ("b1", "a1", 2),
        ("c1", "a1", 2),
    }


def test_a_layout_is_devices_and_degrees():
    same = dataclasses.replace(CHOICE, strategy=Strategy(micro_batches=4, remat="layer"), seconds=2.0)
    assert layout(CHOICE) == layout(same)
    others = [
        dataclasses.replace(CHOICE, first=2, end=4, strategy=strategy)
        for strategy in (Strategy(data=2), Strategy(tensor=2), Strategy(fsdp=2), Strategy(pipeline=2))
    ]
    others.append(dataclasses.replace(CHOICE, first=2, end=4, strategy=Strategy(pipeline=2, chunks=2)))
    assert len({layout(choice) for choice in (CHOICE, *others)}) == 6
