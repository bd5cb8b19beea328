"""A problem as arrays of integers, for loops that look at many plans a second."""

from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.numba_loops import Integers, integers
from jaxrlhf.planner.search.evaluate_loops import Workspace, sizes_of_work
from jaxrlhf.planner.search.problem import PairSeconds, Problem
from jaxrlhf.planner.search.step_order import Wait, layout, step_order

NANOSECONDS = 1_000_000_000
"""In a second. All is simulated in whole nanoseconds, so that ties and repetitions are exact."""


def nanoseconds(seconds: float) -> int:
    """Seconds in whole nanoseconds."""
    return round(float(seconds) * NANOSECONDS)


class FlatProblem(NamedTuple):
    """All that decides the time of a plan and whether it fits. Seconds are whole nanoseconds.

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
    shared_with_training: Integers
    base: Integers
    layout: Integers
    """Equal numbers for equal layouts."""
    fastest: Integers
    """The fastest of those that differ from it in nothing but seconds and working memory (in micro-batches and remat,
    that is): its variants, where calls get what fits; else itself."""
    leaner: Integers
    """The next slower of its variants, which has less working memory; -1 if there is none."""
    first_memory: Integers
    """The first memory of its devices."""
    end_memory: Integers
    """After the last."""

    before: Integers
    """[wait], as all that follow: fields of `Wait`."""
    after: Integers
    lag: Integers
    weights: Integers
    """Seconds of bringing weights from choice x to choice y stand in `table`, at
    `at[weights + x] + at[weights_to + y]`. -1 where none are brought."""
    weights_to: Integers
    data: Integers
    """The same of outputs."""
    data_to: Integers
    out_begin: Integers
    """[call] and the number of all waits: of `out`."""
    out: Integers
    """Waits by the call that is waited for."""
    sharers: Integers
    """Waits for weights, by train call and then as the readers come after it."""
    at: Integers
    """The places of rows in `table`, and of columns in rows, by choice."""
    table: Integers
    """Tables of seconds one after another, row by row."""

    copies: Integers
    """Calls that have a copy of trained weights, by train call and then as they come after it."""
    copied_from: Integers
    """[call]: the train call that it is a copy of what is made by; -1 where it has none."""
    alive: Integers
    """[call]: the calls whose copies are there while it runs, as bits."""
    beside: Integers
    """[call]: the calls that may run while it does, on other devices that share a memory with its own, as bits."""
    resters: Integers
    """Calls that something rests with: all readers of a set that never changes, by set, and then the first train call
    of every set that is trained. One that reads weights with adapters may be there twice."""
    rests: Integers
    """[rester]: the number of a set that never changes; else -1."""
    of_base: Integers
    """[rester]: 1 where what rests is what adapters adapt, else 0."""
    capacity: Integers
    """[memory]"""
    stretch: Integers
    """First memories of all stretches of equal capacity."""
    one_at_a_time: int
    """1 if nothing runs at the same time as anything else."""
    fits: int
    """1 if every call has the fastest of its variants that fits beside weights at rest and copies."""


class ChoiceGroups(NamedTuple):
    """The choices of every call, those on the same devices together; where calls get the variant that fits, the fastest
    ones alone."""

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
    member_begin: Integers
    """[group] and the number of all choices."""
    members: Integers
    """Choices by group, fastest first."""


def flat_problem(problem: Problem, *, compiled: bool, fits: bool = False) -> FlatProblem:
    """A problem as arrays, or as lists where nothing is compiled.

    Args:
        fits: Give calls the fastest of their variants that fits. Only where every device has a memory of its own, so
            that this does not depend on the working memory of other calls.
    """
    order, calls = step_order(problem), problem.calls
    choices = [choice for call in calls for choice in call.choices]
    begin = [sum(len(call.choices) for call in calls[:c]) for c in range(len(calls) + 1)]
    layouts: dict[Hashable, int] = {}
    tables: list[np.ndarray] = []
    at = [np.zeros(begin[-1], np.int64)]  # so that no place in it is negative

    def add(wait: Wait, seconds: PairSeconds) -> tuple[int, int]:
        begins = sum(len(each) for each in tables), sum(len(each) for each in at)
        tables.append(np.rint(np.asarray(seconds.values, np.float64) * NANOSECONDS).astype(np.int64).reshape(-1))
        at.append(begins[0] + seconds.row * seconds.values.shape[1])
        at.append(seconds.column)
        return begins[1] - begin[wait.before], begins[1] + len(seconds.row) - begin[wait.after]

    waits, nowhere = order.waits, (-1, -1)
    weights = [add(w, problem.reallocations[w.before, w.after]) if w.weights else nowhere for w in waits]
    data = [add(w, problem.transfers[w.before, w.after]) if w.data else nowhere for w in waits]
    fastest, leaner = _variants(problem, fits=fits)
    out = sorted(range(len(waits)), key=lambda w: waits[w].before)
    sharers = sorted(
        (w for w in range(len(waits)) if waits[w].weights), key=lambda w: (waits[w].before, waits[w].lag, w)
    )
    made_by = [each or (-1, 0) for each in order.made_by]
    # those that share one have the times at which the first of them is alive: a stale one's is, always
    copies = [j for j, alive in enumerate(order.alive) if alive]
    copies.sort(key=lambda j: (not calls[j].stale, *made_by[j], j))
    sets = sorted({name for call in calls for name in (call.weights, call.base)})
    never = [(calls[j].weights, j, 0) for j, home in enumerate(order.homes) if home is None]
    never += [(call.base, j, 1) for j, call in enumerate(calls) if call.base]
    resters = [(j, sets.index(name), of_base) for name, j, of_base in sorted(never)]
    resters += [(j, -1, 0) for j in sorted({j for j in order.homes if j is not None})]
    capacity, shared = problem.capacity, problem.devices_per_memory > 1

    def of_choices(value: Callable[[Any], int]) -> Integers:
        return integers(map(value, choices), compiled=compiled)

    seconds = ("seconds", "load", "unload")
    sizes = ("first", "end", "resting", "working", "copy", "shared_with_training", "base")
    lists: dict[str, Iterable[int]] = dict(
        begin=begin,
        fastest=fastest,
        leaner=leaner,
        before=[wait.before for wait in waits],
        after=[wait.after for wait in waits],
        lag=[wait.lag for wait in waits],
        weights=[row for row, _ in weights],
        weights_to=[column for _, column in weights],
        data=[row for row, _ in data],
        data_to=[column for _, column in data],
        out_begin=[sum(wait.before < c for wait in waits) for c in range(len(calls) + 1)],
        out=out,
        sharers=sharers,
        at=np.concatenate(at),
        table=np.concatenate(tables) if tables else (),
        copies=copies,
        copied_from=[made_by[j][0] if order.alive[j] else -1 for j in range(len(calls))],
        alive=[sum(1 << j for j in copies if c in order.alive[j]) for c in range(len(calls))],
        beside=[sum(1 << j for j in (order.beside[c] if shared else ())) for c in range(len(calls))],
        resters=[j for j, _, _ in resters],
        rests=[number for _, number, _ in resters],
        of_base=[of_base for _, _, of_base in resters],
        capacity=capacity,
        stretch=[m for m in range(len(capacity)) if m == 0 or capacity[m] != capacity[m - 1]],
    )
    return FlatProblem(
        **{name: integers(values, compiled=compiled) for name, values in lists.items()},
        **{name: of_choices(attrgetter(name)) for name in sizes},
        **{name: of_choices(lambda x, name=name: nanoseconds(getattr(x, name))) for name in seconds},
        layout=of_choices(lambda x: layouts.setdefault(layout(x), len(layouts))),
        first_memory=of_choices(lambda x: problem.memories(x.devices).start),
        end_memory=of_choices(lambda x: problem.memories(x.devices).stop),
        one_at_a_time=int(problem.one_at_a_time),
        fits=int(fits),
    )


def _variants(problem: Problem, *, fits: bool) -> tuple[list[int], list[int]]:
    """`fastest` and `leaner` of all choices."""
    fastest, leaner = [], []
    for j, call in enumerate(problem.calls):
        begin = len(fastest)
        alike: dict[tuple[Hashable, ...], list[int]] = {}
        for k in range(len(call.choices)):
            alike.setdefault(_all_but_speed(problem, j, k) if fits else (k,), []).append(k)
            fastest.append(begin + k)
            leaner.append(-1)
        for group in alike.values():
            group.sort(key=lambda k: (call.choices[k].seconds, call.choices[k].working))
            last = group[0]
            for k in group:
                fastest[begin + k] = begin + group[0]
                if call.choices[k].working < call.choices[last].working:
                    leaner[begin + last] = begin + k
                    last = k
    return fastest, leaner


def _all_but_speed(problem: Problem, j: int, k: int) -> tuple[Hashable, ...]:
    """The properties that a choice shares with its variants."""
    x = problem.calls[j].choices[k]
    tables = (*problem.reallocations.items(), *problem.transfers.items())
    rows = (int(table.row[k]) for (i, _), table in tables if i == j)
    columns = (int(table.column[k]) for (_, i), table in tables if i == j)
    held = (x.resting, x.base, x.copy, x.shared_with_training)
    return layout(x), x.offloaded, held, nanoseconds(x.load), nanoseconds(x.unload), *rows, *columns


def groups_of(problem: Problem, flat: FlatProblem, *, compiled: bool) -> ChoiceGroups:
    """The groups of a problem's choices. Choices are numbered as in its `FlatProblem`."""
    begin, ranges, member_begin, members, number = [0], [], [0], [], 0
    size_begin, sizes = [0], []
    for call in problem.calls:
        by_devices: dict[tuple[int, int], list[int]] = {}
        for k, choice in enumerate(call.choices):
            if flat.fastest[number + k] == number + k:
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
    lists = (begin, size_begin, sizes, firsts, ends, member_begin, members)
    return ChoiceGroups(*(integers(each, compiled=compiled) for each in lists))


def room_for_work(flat: FlatProblem, *, compiled: bool) -> Workspace:
    """The working arrays of the loops that evaluate the plans of a problem, one at a time."""
    sizes = sizes_of_work(len(flat.begin) - 1, len(flat.before))
    return Workspace(*(integers([0] * size, compiled=compiled) for size in sizes))
