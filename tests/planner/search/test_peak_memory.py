"""The memory of devices under a plan, worked out by hand."""

import dataclasses
import random
from collections.abc import Iterable

from jaxrlhf.planner.search.peak_memory import in_gb, memory_at_peak, memory_during, peak_memory
from jaxrlhf.planner.search.problem import CallChoices, Choice, Problem
from jaxrlhf.planner.search.step_order import layout, step_order
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.made_up_problem import ppo_problem, random_problem, sharing_memory

Way = tuple[int, int, int, int, int]
"""First device, end, resting, working, copy."""


def step(*calls: tuple[str, Way]) -> Problem:
    """Calls named by their set and what they do."""
    made = []
    for name, (first, end, resting, working, copy) in calls:
        weights, method = name.split(".")
        choice = Choice(first, end, Strategy(data=end - first), 1.0, resting, working, copy)
        trains = method.startswith("train")
        made.append(CallChoices(name, "train" if trains else "infer", weights, weights, trains, (), (choice,)))
    return Problem(tuple(made), 4, 4, (100,) * 4, {}, {}, tokens=1)


def plan(problem: Problem) -> list[int]:
    return [0] * len(problem.calls)


def test_what_rests_and_the_call_that_takes_most():
    problem = step(("a.read", (0, 2, 0, 30, 5)), ("b.read", (1, 3, 7, 10, 0)), ("a.train", (0, 1, 50, 20, 0)))
    #            a.read              b.read        a.train
    # device 0   50 + 30 + 5         50 + 5        50 + 20
    # device 1   7 + 30 + 5          7 + 10 + 5    7
    # device 2   7                   7 + 10        7
    assert peak_memory(problem, plan(problem)) == (85, 42, 17, 0)
    first, second, third, _ = memory_at_peak(problem, plan(problem))
    assert (first.call, first.resting, first.copies, first.working) == ("a.read", {"a": 50}, {"a.read": 5}, 30)
    assert (second.call, second.resting, third.call) == ("a.read", {"b": 7}, "b.read")
    parts = "a at rest 50 bytes, a.read at work 30 bytes, a copy for a.read 5 bytes"
    assert str(first) == f"85 bytes on device 0 during a.read ({parts})"


def test_a_copy_is_gone_when_its_weights_are_trained():
    before = step(("a.read", (0, 1, 0, 1, 10)), ("a.train", (0, 1, 20, 5, 0)), ("b.read", (0, 1, 0, 4, 0)))
    assert peak_memory(before, plan(before))[0] == 20 + 1 + 10
    after = step(("a.train", (0, 1, 20, 5, 0)), ("a.read", (0, 1, 0, 1, 10)), ("b.read", (0, 1, 0, 4, 0)))
    assert peak_memory(after, plan(after))[0] == 20 + 4 + 10
    # made at the end of a step, it is there at the beginning of the next one
    around = step(("b.read", (0, 1, 0, 9, 0)), ("a.train", (0, 1, 20, 5, 0)), ("a.read", (0, 1, 0, 1, 10)))
    assert peak_memory(around, plan(around))[0] == 20 + 9 + 10


def test_a_copy_lies_on_devices_that_do_nothing():
    problem = step(("a.read", (0, 2, 0, 1, 10)), ("a.look", (1, 2, 0, 1, 8)), ("a.train", (2, 3, 20, 5, 0)))
    assert peak_memory(problem, plan(problem))[:2] == (11, 10 + 8 + 1)


def test_a_copy_in_the_layout_and_precision_of_training_is_what_is_trained():
    problem = step(("a.read", (0, 2, 0, 1, 10)), ("a.look", (2, 4, 0, 1, 10)), ("a.train", (0, 2, 20, 5, 0)))
    calls = tuple(
        dataclasses.replace(call, choices=(dataclasses.replace(call.choices[0], shared_with_training=8),))
        for call in problem.calls
    )
    assert peak_memory(problem, plan(problem)) == (31, 31, 11, 11)
    shared = dataclasses.replace(problem, calls=calls)
    assert peak_memory(shared, plan(shared)) == (25, 25, 11, 11)  # 20 + 1 + 2 while it reads, 20 + 5 while it trains


def test_calls_of_one_layout_have_one_copy():
    same = step(("a.read", (0, 2, 0, 1, 10)), ("a.look", (0, 2, 0, 2, 11)), ("a.train", (2, 3, 20, 5, 0)))
    assert peak_memory(same, plan(same))[:2] == (13, 13)
    assert memory_at_peak(same, plan(same))[0].copies == {"a.read": 11}


def test_weights_that_never_change_rest_once_in_every_layout():
    same = step(("r.read", (0, 2, 10, 1, 0)), ("r.look", (0, 2, 10, 1, 0)), ("r.see", (1, 2, 20, 1, 0)))
    assert peak_memory(same, plan(same))[:2] == (11, 31)
    assert memory_at_peak(same, plan(same))[1].resting == {"r": 30}


def test_what_adapters_adapt_rests_once_with_those_that_read_it_as_it_is():
    """Wherever its layout is the same: actor and critic train adapters of it, the reference reads it on their devices,
    and generation has it, on more devices, in another form."""
    own = step(
        ("r.read", (0, 2, 30, 1, 0)), ("a.train", (0, 2, 4, 0, 0)), ("c.train", (0, 2, 5, 0, 0)),
        ("a.read", (0, 4, 0, 2, 7)),
    )  # fmt: skip
    adapting = tuple(
        dataclasses.replace(call, base="r", choices=(dataclasses.replace(call.choices[0], base=size, layers=form),))
        for call, size, form in zip(own.calls[1:], (30, 30, 31), ("list", "list", "stacked"), strict=True)
    )
    problem = dataclasses.replace(own, calls=(own.calls[0], *adapting))
    assert peak_memory(problem, plan(problem)) == (30 + 4 + 5 + 31 + 7 + 2,) * 2 + (31 + 7 + 2,) * 2
    first, *_ = memory_at_peak(problem, plan(problem))
    assert first.resting == {"r": 30 + 31, "a": 4, "c": 5}


def test_a_set_rests_where_it_is_trained_first():
    problem = step(("a.train", (0, 1, 50, 0, 0)), ("a.train#2", (1, 2, 60, 0, 0)))
    assert peak_memory(problem, plan(problem))[:2] == (50, 0)


def test_against_a_list_of_all_that_lies_about():
    for seed in range(100):
        problem, chance = random_problem(seed), random.Random(seed)
        problem = sharing_memory(problem) if seed % 3 == 0 else problem
        choice = [chance.randrange(len(call.choices)) for call in problem.calls]
        order, every = step_order(problem), range(len(problem.calls))
        things: dict[object, tuple[range, set[int], int]] = {}
        """What it is -> its devices, the calls during which it is there, its bytes."""

        def put(key: object, devices: range, during: Iterable[int], size: int, things=things) -> None:
            _, calls, before = things.get(key, (devices, set(), 0))
            things[key] = (devices, calls | set(during), max(size, before))

        homes = {}
        for j, call in enumerate(problem.calls):
            x = call.choices[choice[j]]
            put(("working", j), x.devices, [j], x.working)
            if call.trains:
                homes.setdefault(call.weights, j)
            if homes.get(call.weights) == j:
                put(call.weights, x.devices, every, x.resting)
            if not any(other.trains for other in problem.calls if other.weights == call.weights):
                put((call.weights, layout(x)), x.devices, every, x.resting)
            if call.base:
                put((call.base, layout(x)), x.devices, every, x.base)
            made_by = order.made_by[j]
            if order.alive[j] and made_by is not None:
                trained = problem.calls[made_by[0]].choices[choice[made_by[0]]]
                is_there = x.shared_with_training if layout(trained) == layout(x) else 0
                put((made_by[0], layout(x)), x.devices, order.alive[j], x.copy - is_there)
        expected = tuple(
            max(
                sum(x for devices, calls, x in things.values() if memory in problem.memories(devices) and c in calls)
                + most_beside(problem, choice, c, memory)
                for c in every
            )
            for memory in range(len(problem.capacity))
        )
        assert peak_memory(problem, choice) == expected


def most_beside(problem: Problem, choice: list[int], c: int, memory: int) -> int:
    """The most that a call on other devices of a memory works with while one of its calls runs."""
    picks = [call.choices[k] for call, k in zip(problem.calls, choice, strict=True)]
    there = [j for j, x in enumerate(picks) if memory in problem.memories(x.devices)]
    others = [j for j in step_order(problem).beside[c] if not set(picks[j].devices) & set(picks[c].devices)]
    return max((picks[j].working for j in others if j in there and c in there), default=0)


def test_what_is_there_during_each_call():
    """Never more than the peak of its device, and that where the device is fullest while the call runs on it."""
    problem = ppo_problem(1, 4)
    rng = random.Random(3)
    for _ in range(50):
        plan = [rng.randrange(len(call.choices)) for call in problem.calls]
        during = memory_during(problem, plan)
        assert set(during) == {call.name for call in problem.calls}
        for call, index in zip(problem.calls, plan, strict=True):
            choice, there = call.choices[index], during[call.name]
            assert there.call == call.name and there.devices[0] in choice.devices
            assert choice.working <= there.total <= peak_memory(problem, plan)[there.devices[0]]
        devices = {c.name: c.choices[i].devices for c, i in zip(problem.calls, plan, strict=True)}
        for fullest in memory_at_peak(problem, plan):
            if fullest.devices[0] in devices[fullest.call]:
                assert during[fullest.call].total >= fullest.total


def test_devices_that_share_a_memory_fill_it_together():
    calls = ("a.read", (0, 1, 0, 1, 10)), ("r.read", (1, 2, 30, 2, 0)), ("a.train", (0, 1, 20, 5, 0))
    problem = step(*calls)
    assert peak_memory(problem, plan(problem)) == (31, 32, 0, 0)
    shared = dataclasses.replace(problem, capacity=(100, 100), devices_per_memory=2)
    assert peak_memory(shared, plan(shared)) == (20 + 30 + 10 + 2 + 5, 0)  # reading r may run beside training a
    (first, _) = memory_at_peak(shared, plan(shared))
    assert str(first).startswith("67 bytes in the memory that devices 0-1 share during")


def test_calls_that_run_beside_each_other_in_one_memory_add_up():
    """Two that train different weights do; one that reads what the other trains takes turns with it."""
    apart = step(("a.train", (0, 1, 20, 5, 0)), ("b.train", (1, 2, 30, 7, 0)))
    shared = dataclasses.replace(apart, capacity=(100, 100), devices_per_memory=2)
    assert peak_memory(shared, plan(shared)) == (50 + 5 + 7, 0) and peak_memory(apart, plan(apart))[:2] == (25, 37)
    together = step(("a.train", (0, 1, 20, 5, 0)), ("b.train", (0, 1, 30, 7, 0)))
    shared = dataclasses.replace(together, capacity=(100, 100), devices_per_memory=2)
    assert peak_memory(shared, plan(shared)) == (50 + 7, 0)
    assert step_order(step(("a.read", (0, 1, 0, 1, 2)), ("a.train", (0, 1, 20, 5, 0)))).beside == ((), ())
    assert step_order(apart).beside == ((1,), (0,))


def test_bytes_in_words():
    assert [in_gb(n) for n in (1700, 1_500_000_000, 80e9)] == ["1,700 bytes", "1.5 GB", "80 GB"]
