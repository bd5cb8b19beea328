"""Pruning of choices that no good plan needs: those that another dominates, and those too slow for any fast plan."""

from collections.abc import Hashable, Sequence

import numpy as np

from jaxrlhf.planner.search.problem import CallChoices, Choice, Problem
from jaxrlhf.planner.search.step_order import layout, step_order

_ROUNDING = 1 + 1e-9


def undominated(choices: Sequence[Choice]) -> list[Choice]:
    """The choices, on devices that are alike, that no other dominates by being as fast with no more memory of any kind.
    Of equal ones, the first."""
    seconds = np.array([x.busy for x in choices])
    sizes = np.array([(x.resting, x.base, x.working, x.copy, x.copy - x.shared_with_training) for x in choices])
    return [choices[k] for k in _undominated(list(range(len(choices))), seconds, sizes, [])]


def worth_keeping(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Call -> the choices that a good plan may need, in their order. Left out are:

    - choices whose own weights, working memory and copies are more than a memory holds: no plan with one of them
      fits;
    - choices for which there is another on the same devices that needs no more memory of any kind, and is faster by at
      least as much as moving weights and outputs can take longer with it. Where other calls read the same weights,
      which are moved once for all calls with one layout, the other one must have an equal layout too.

    The second rule may lose a better plan unless both are equally fast: a call that is ready earlier may get a device
    before a more urgent one (Graham 1966).
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
        seconds = np.array([x.busy for x in call.choices])
        tables = _tables_of(problem, j)
        kept.append(tuple(sorted(k for group in alike.values() for k in _undominated(group, seconds, sizes, tables))))
    return tuple(kept)


def within_reach(problem: Problem, seconds: float) -> tuple[tuple[int, ...], ...]:
    """Call -> the choices with which an iteration could take no longer than `seconds`, in their order. All of them for
    a call that would have none left.

    Lower bounds of an iteration, with all other calls at their fastest: every cycle of calls that wait for each other;
    all device-seconds divided by the number of devices; where calls run one at a time, all calls together.
    """
    busy = [np.array([x.busy for x in call.choices]) for call in problem.calls]
    waited = [np.array([x.load + x.seconds for x in call.choices]) for call in problem.calls]
    devices = [np.array([len(x.devices) for x in call.choices]) for call in problem.calls]
    least = np.array([each.min() for each in waited])
    area = np.array([(b * n).min() for b, n in zip(busy, devices, strict=True)])
    others = _circles(problem, least)
    kept = []
    for j in range(len(problem.calls)):
        shared = (busy[j] * devices[j] + area.sum() - area[j]) / problem.num_devices
        bounds = [waited[j] + others[j], busy[j], shared]
        if problem.one_at_a_time:
            bounds.append(busy[j] + least.sum() - least[j])
        some = np.flatnonzero(np.max(bounds, axis=0) <= seconds * _ROUNDING)
        kept.append(tuple(int(k) for k in some) or tuple(range(len(busy[j]))))
    return tuple(kept)


def own_bytes(problem: Problem) -> list[np.ndarray]:
    """Call -> [choice, 4]: bytes on its devices of weights that rest there because of it, of working memory, of its
    copy less what that shares with training, and of the weights that its adapters adapt."""
    order, found = step_order(problem), []
    for j, call in enumerate(problem.calls):
        sizes = np.array([(x.resting, x.working, x.copy - x.shared_with_training, x.base) for x in call.choices])
        found.append(sizes.reshape(-1, 4) * (order.homes[j] in (None, j), True, bool(order.alive[j]), True))
    return found


def _read(call: CallChoices) -> set[str]:
    """The sets of weights that a call reads: its own, and the one that its adapters adapt."""
    return {call.weights, call.base} - {""}


def _tables_of(problem: Problem, j: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Seconds of moving weights and outputs from and to a call: (seconds [row, column], choice -> row)."""
    tables = [*problem.reallocations.items(), *problem.transfers.items()]
    from_call = [(table.values, table.row) for (i, _), table in tables if i == j]
    return from_call + [(table.values.T, table.column) for (_, i), table in tables if i == j]


def _undominated(
    group: list[int], seconds: np.ndarray, sizes: np.ndarray, tables: list[tuple[np.ndarray, np.ndarray]]
) -> list[int]:
    """The choices that no other dominates, being as good in everything. Of equal ones, the first.

    Args:
        seconds: [choice] with loading and unloading.
        sizes: [choice, ...] bytes of every kind.
        tables: From `_tables_of`.
    """
    seconds, sizes = seconds[group], sizes[group]
    beats = (sizes[:, None] <= sizes[None]).all(-1)  # [one, other]
    gained = seconds[None] - seconds[:, None]
    beats &= gained >= 0
    for values, row in tables:
        rows, number = np.unique(row[group], return_inverse=True)
        if len(rows) == 1 or not (beats & ~np.eye(len(group), dtype=bool)).any():
            continue
        longer = np.array([(values[one] - values[rows]).max(1) for one in rows])  # [one, other], at the most
        gained = gained - np.maximum(longer, 0.0)[number][:, number]
        beats &= gained >= 0
    equal = beats & beats.T
    first = np.tril(np.ones_like(equal), -1).T.astype(bool)  # of equal ones, the first beats the others
    beaten = (beats & (~equal | first)).any(0)
    return [group[k] for k in np.flatnonzero(~beaten)]


def _circles(problem: Problem, least: np.ndarray) -> np.ndarray:
    """Call -> the least seconds of the others in the longest cycle within one iteration that it is part of."""
    waits, num_calls = step_order(problem).waits, len(least)
    path = np.full((num_calls, num_calls), -np.inf)  # from the start of the one to the end of the other
    np.fill_diagonal(path, least)
    for wait in waits:
        if wait.lag == 0:
            path[wait.before, wait.after] = least[wait.before] + least[wait.after]
    for via in range(num_calls):  # calls stand in the order of the step
        path = np.maximum(path, path[:, via : via + 1] + path[via] - least[via])
    longest = np.zeros(num_calls)
    for wait in waits:
        if wait.lag == 1:  # from the start of `after` to the end of `before`, and around
            through = path[wait.after] + path[:, wait.before] - least
            longest = np.maximum(longest, through)
    return np.maximum(0.0, longest - least)
