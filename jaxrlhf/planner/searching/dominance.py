"""Choices that no good plan needs."""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from jaxrlhf.planner.problem import CallChoices, Choice, PairSeconds, Problem
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

    - The same where the other one is faster by at least as much as bringing weights and outputs can take longer with
      it. As a rule that makes no plan slower, but there are exceptions: what is ready earlier may get a device before
      something that is more urgent (Graham 1966).
    """
    kept, own = [], own_bytes(problem)
    for j, call in enumerate(problem.calls):
        sizes = np.column_stack([own[j], [x.copy for x in call.choices]])
        room = [min(problem.capacity[memory] for memory in problem.memories(x.devices)) for x in call.choices]
        same = [other for other in problem.calls if _read(other) & _read(call)]
        shared = len(same) - any(other.trains for other in same) > 1
        alike: dict[Hashable, list[int]] = {}
        for k, choice in enumerate(call.choices):
            if own[j][k].sum() <= room[k]:
                alike.setdefault(layout(choice) if shared else (choice.first, choice.end), []).append(k)
        parts = np.array([(x.seconds, x.load, x.unload) for x in call.choices])
        tables = _tables_of(problem, j)
        kept.append(
            tuple(sorted(k for group in alike.values() for k in _undominated(group, parts, sizes, tables, exact=exact)))
        )
    return tuple(kept)


def _read(call: CallChoices) -> set[str]:
    """The sets of weights that a call reads: its own, and what its adapters adapt."""
    return {call.weights, call.base} - {""}


def _tables_of(problem: Problem, j: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """What it takes to bring weights and outputs to and from a call: (seconds [row, column], choice -> row)."""

    def from_call(table: PairSeconds) -> tuple[np.ndarray, np.ndarray]:
        return table.values, table.row

    def to_call(table: PairSeconds) -> tuple[np.ndarray, np.ndarray]:
        return table.values.T, table.column

    tables = [*problem.reallocations.items(), *problem.transfers.items()]
    return [from_call(table) for (i, _), table in tables if i == j] + [
        to_call(table) for (_, i), table in tables if i == j
    ]


def undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Those of some choices on devices that are alike than which no other is as fast and needs no more memory of any
    sort. Of equal ones, the first."""
    parts = np.array([(x.seconds, x.load, x.unload) for x in choices])
    sizes = np.array([(x.resting, x.base, x.working, x.copy, x.copy - x.shared_with_training) for x in choices])
    return [choices[k] for k in _undominated(list(range(len(choices))), parts, sizes, [], exact=False)]


def _undominated(
    group: list[int],
    parts: np.ndarray,
    sizes: np.ndarray,
    tables: list[tuple[np.ndarray, np.ndarray]],
    *,
    exact: bool,
) -> list[int]:
    """Those of some choices than which no other is as good in everything. Of equal ones, the first.

    Args:
        parts: [choice, 3] seconds, loading, unloading.
        sizes: [choice, ...] bytes of every sort.
        tables: As `_tables_of` gives them.
    """
    parts, sizes = parts[group], sizes[group]
    beats = (sizes[:, None] <= sizes[None]).all(-1)  # [one, other]
    if exact:
        beats &= (parts[:, None] == parts[None]).all(-1)
    gained = parts.sum(1)[None] - parts.sum(1)[:, None]
    beats &= gained >= 0
    for values, row in tables:
        rows, number = np.unique(row[group], return_inverse=True)
        if len(rows) == 1 or not (beats & ~np.eye(len(group), dtype=bool)).any():
            continue
        longer = np.array([(values[one] - values[rows]).max(1) for one in rows])  # [one, other], at the most
        if exact:
            longer = np.where((longer == 0) & (longer.T == 0), 0.0, np.inf)
        gained = gained - np.maximum(longer, 0.0)[number][:, number]
        beats &= gained >= 0
    equal = beats & beats.T
    first = np.tril(np.ones_like(equal), -1).T.astype(bool)  # of equal ones, the first beats the others
    beaten = (beats & (~equal | first)).any(0)
    return [k for k, lost in zip(group, beaten, strict=True) if not lost]


def with_choices(problem: Problem, kept: tuple[tuple[int, ...], ...]) -> Problem:
    """A problem with some of its choices: call -> those to keep."""
    calls = [
        dataclasses.replace(call, choices=tuple(call.choices[k] for k in some))
        for call, some in zip(problem.calls, kept, strict=True)
    ]
    return dataclasses.replace(
        problem,
        calls=tuple(calls),
        reallocations={(i, j): t.of_choices(kept[i], kept[j]) for (i, j), t in problem.reallocations.items()},
        transfers={(i, j): t.of_choices(kept[i], kept[j]) for (i, j), t in problem.transfers.items()},
    )
