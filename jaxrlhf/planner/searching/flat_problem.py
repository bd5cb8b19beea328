"""A problem as arrays of integers, for loops that look at many plans a second."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.simulate import NANOSECONDS, nanoseconds
from jaxrlhf.planner.step_order import layout, step_order

Integers = Any
"""An array of int64 where loops are compiled, else a list: what is faster."""


class FlatProblem(NamedTuple):
    """All that decides how long a plan takes and whether it fits. Seconds are whole nanoseconds.

    Choices have numbers: choice k of call c is `begin[c] + k`.
    """

    begin: Integers
    """[call] and the number of all choices."""
    first: Integers
    """[choice], as all that follow: fields of `Choice`."""
    end: Integers
    seconds: Integers
    load: Integers
    unload: Integers
    resting: Integers
    working: Integers
    copy: Integers
    layout: Integers
    """Equal numbers for equal layouts."""
    first_memory: Integers
    """The first memory of its devices."""
    end_memory: Integers
    """After the last."""

    before: Integers
    """[wait], as all that follow: fields of `Wait`."""
    after: Integers
    lag: Integers
    weights: Integers
    """Where in `table` the seconds of bringing weights begin; -1 where none are brought."""
    data: Integers
    """The same of outputs."""
    out_begin: Integers
    """[call] and the number of all waits: of `out`."""
    out: Integers
    """Waits by the call that is waited for."""
    sharers: Integers
    """Waits for weights, by train call and then as the readers come after it."""
    table: Integers
    """Tables of seconds one after another, row by row: rows are choices of the call that is waited for."""

    copies: Integers
    """Calls that have a copy of trained weights, by train call and then as they come after it."""
    copied_from: Integers
    """[call]: the train call that it is a copy of what is made by; -1 where it has none."""
    alive: Integers
    """[call]: the calls whose copies are there while it runs, as bits."""
    beside: Integers
    """[call]: the calls that may run while it does, on other devices that share a memory with its own, as bits."""
    resters: Integers
    """Calls that something rests with: a set's first train call, or all readers of one that never changes, by set."""
    rests: Integers
    """[call]: the number of its set where that never changes; else -1."""
    capacity: Integers
    """[memory]"""
    stretch: Integers
    """First memories of all stretches of equal capacity."""
    one_at_a_time: int
    """1: nothing runs beside anything else."""


class Groups(NamedTuple):
    """The choices of every call, those on the same devices together."""

    begin: Integers
    """[call] and the number of all groups. Those on fewer devices come first."""
    size_begin: Integers
    """[call] and the number of all of `sizes`."""
    sizes: Integers
    """The first group of each number of devices, by call."""
    first: Integers
    """[group]: the first of its devices."""
    end: Integers
    """[group]: after the last."""
    first_memory: Integers
    """[group]: the first memory of its devices."""
    end_memory: Integers
    """[group]: after the last."""
    member_begin: Integers
    """[group] and the number of all choices."""
    members: Integers
    """Choices by group, fastest first."""


def flat_problem(problem: Problem, *, compiled: bool) -> FlatProblem:
    """A problem as arrays, or as lists where nothing is compiled."""
    order, calls = step_order(problem), problem.calls
    choices = [choice for call in calls for choice in call.choices]
    begin = [sum(len(call.choices) for call in calls[:c]) for c in range(len(calls) + 1)]
    layouts: dict[tuple[int, ...], int] = {}
    tables: list[np.ndarray] = []

    def add(table: np.ndarray) -> int:
        tables.append(np.rint(np.asarray(table, np.float64) * NANOSECONDS).astype(np.int64).reshape(-1))
        return sum(len(each) for each in tables[:-1])

    waits = order.waits
    weights = [add(problem.reallocations[w.before, w.after]) if w.weights else -1 for w in waits]
    data = [add(problem.transfers[w.before, w.after]) if w.data else -1 for w in waits]
    out = sorted(range(len(waits)), key=lambda w: waits[w].before)
    sharers = sorted(
        (w for w in range(len(waits)) if waits[w].weights), key=lambda w: (waits[w].before, waits[w].lag, w)
    )
    made_by = [each or (-1, 0) for each in order.made_by]
    copies = sorted((j for j, alive in enumerate(order.alive) if alive), key=lambda j: (*made_by[j], j))
    sets = sorted({call.weights for call in calls})
    never = {j for j, home in enumerate(order.homes) if home is None}
    resters = sorted(never, key=lambda j: (calls[j].weights, j)) + sorted({j for j in order.homes if j is not None})
    capacity, shared = problem.capacity, problem.devices_per_memory > 1

    def integers(values: Iterable[int]) -> Integers:
        return as_integers(values, compiled=compiled)

    def of_choices(value: Callable[[Any], int]) -> Integers:
        return integers([value(choice) for choice in choices])

    table = np.concatenate(tables) if tables else np.zeros(0, np.int64)
    return FlatProblem(
        integers(begin),
        of_choices(lambda x: x.first),
        of_choices(lambda x: x.end),
        of_choices(lambda x: nanoseconds(x.seconds)),
        of_choices(lambda x: nanoseconds(x.load)),
        of_choices(lambda x: nanoseconds(x.unload)),
        of_choices(lambda x: x.resting),
        of_choices(lambda x: x.working),
        of_choices(lambda x: x.copy),
        of_choices(lambda x: layouts.setdefault(layout(x), len(layouts))),
        of_choices(lambda x: problem.memories(x.devices).start),
        of_choices(lambda x: problem.memories(x.devices).stop),
        integers([wait.before for wait in waits]),
        integers([wait.after for wait in waits]),
        integers([wait.lag for wait in waits]),
        integers(weights),
        integers(data),
        integers([sum(wait.before < c for wait in waits) for c in range(len(calls) + 1)]),
        integers(out),
        integers(sharers),
        table if compiled else table.tolist(),
        integers(copies),
        integers([made_by[j][0] if order.alive[j] else -1 for j in range(len(calls))]),
        integers([sum(1 << j for j in copies if c in order.alive[j]) for c in range(len(calls))]),
        integers([sum(1 << j for j in (order.beside[c] if shared else ())) for c in range(len(calls))]),
        integers(resters),
        integers([sets.index(call.weights) if j in never else -1 for j, call in enumerate(calls)]),
        integers(capacity),
        integers([m for m in range(len(capacity)) if m == 0 or capacity[m] != capacity[m - 1]]),
        int(problem.one_at_a_time),
    )


def groups_of(problem: Problem, *, compiled: bool) -> Groups:
    """The groups of a problem's choices. Choices are numbered as in its `FlatProblem`."""
    begin, ranges, member_begin, members, number = [0], [], [0], [], 0
    size_begin, sizes = [0], []
    for call in problem.calls:
        by_devices: dict[tuple[int, int], list[int]] = {}
        for k, choice in enumerate(call.choices):
            by_devices.setdefault((choice.first, choice.end), []).append(k)
        for (first, end), found in sorted(by_devices.items(), key=lambda item: (item[0][1] - item[0][0], item[0])):
            if len(ranges) == begin[-1] or end - first > ranges[-1][1] - ranges[-1][0]:
                sizes.append(len(ranges))
            ranges.append((first, end))
            members += [number + k for k in sorted(found, key=lambda k: (call.choices[k].seconds, k))]
            member_begin.append(len(members))
        begin.append(len(ranges))
        size_begin.append(len(sizes))
        number += len(call.choices)
    firsts, ends = [first for first, _ in ranges], [end for _, end in ranges]
    memories = [problem.memories(range(first, end)) for first, end in ranges]
    first_memories, end_memories = [each.start for each in memories], [each.stop for each in memories]
    lists = (begin, size_begin, sizes, firsts, ends, first_memories, end_memories, member_begin, members)
    return Groups(*(as_integers(each, compiled=compiled) for each in lists))


def as_integers(values: Iterable[int], *, compiled: bool) -> Integers:
    """A sequence as loops take it."""
    return np.array(list(values), np.int64) if compiled else [int(value) for value in values]
