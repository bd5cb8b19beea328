"""Choices that no good plan needs."""

import dataclasses

import numpy as np

from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.searching.lean_plans import own_bytes
from jaxrlhf.planner.step_order import layout


def prune(problem: Problem, *, exact: bool = False) -> Problem:
    """A problem without the choices that `worth_keeping` leaves out."""
    return with_choices(problem, worth_keeping(problem, exact=exact))


def worth_keeping(problem: Problem, *, exact: bool = False) -> tuple[tuple[int, ...], ...]:
    """Call -> the choices that a good plan may need, in their order.

    These rules lose nothing:

    - A choice that takes more than a memory has by itself, of what rests, works and is copied because of it, is in no
      plan that fits.
    - Of two choices that take the same time, on the same devices, in every respect (seconds, loading, unloading, and
      bringing weights and outputs from and to every choice of other calls), one that needs no less memory in any is
      left out: any plan is as fast with the other one, and needs no more. Where other calls read the same weights,
      which are brought but once for all that have one layout, this goes for choices with equal layouts.

    This one may lose something, unless `exact`:

    - The same where the other one takes no more time in any respect, but not the same. As a rule that makes no plan
      slower, but there are exceptions: what is ready earlier may get a device before something that is more urgent
      (Graham 1966).
    """
    kept, own = [], own_bytes(problem)
    for j, call in enumerate(problem.calls):
        sizes = own[j]
        room = [min(problem.capacity[memory] for memory in problem.memories(x.devices)) for x in call.choices]
        seconds = [np.array([(x.seconds, x.load, x.unload) for x in call.choices])]
        seconds += [table for (i, _), table in problem.reallocations.items() if i == j]
        seconds += [table.T for (_, i), table in problem.reallocations.items() if i == j]
        seconds += [table for (i, _), table in problem.transfers.items() if i == j]
        seconds += [table.T for (_, i), table in problem.transfers.items() if i == j]
        times = np.concatenate(seconds, axis=1)
        same = [other for other in problem.calls if other.weights == call.weights]
        shared = len(same) - any(other.trains for other in same) > 1
        alike: dict[tuple[int, ...], list[int]] = {}
        for k, choice in enumerate(call.choices):
            if sizes[k].sum() <= room[k]:
                alike.setdefault(layout(choice) if shared else (choice.first, choice.end), []).append(k)
        kept.append(
            tuple(sorted(k for group in alike.values() for k in _undominated(group, times, sizes, exact=exact)))
        )
    return tuple(kept)


def _undominated(group: list[int], times: np.ndarray, sizes: np.ndarray, *, exact: bool) -> list[int]:
    """Those of some choices than which no other is as good in everything. Of equal ones, the first."""
    kept: list[int] = []
    for k in sorted(group, key=lambda k: (times[k].sum(), sizes[k].sum(), k)):
        others_times, others_sizes = times[kept], sizes[kept]
        as_fast = (others_times == times[k] if exact else others_times <= times[k]).all(1)
        if not (as_fast & (others_sizes <= sizes[k]).all(1)).any():
            kept.append(k)
    return kept


def with_choices(problem: Problem, kept: tuple[tuple[int, ...], ...]) -> Problem:
    """A problem with some of its choices: call -> those to keep."""
    calls = [
        dataclasses.replace(call, choices=tuple(call.choices[k] for k in some))
        for call, some in zip(problem.calls, kept, strict=True)
    ]
    return dataclasses.replace(
        problem,
        calls=tuple(calls),
        reallocations={(i, j): table[np.ix_(kept[i], kept[j])] for (i, j), table in problem.reallocations.items()},
        transfers={(i, j): table[np.ix_(kept[i], kept[j])] for (i, j), table in problem.transfers.items()},
    )
