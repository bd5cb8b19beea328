"""Branch and bound: whether any plan is faster than those that are known.

First every call gets devices, then a way to run on them. What is chosen so far says how short an iteration can get at
the best; where that is not below the fastest plan known, all plans that begin so are left out. What is not chosen yet
counts with the least of all that it could be. No iteration that plans settle to is shorter than

- all that occupies one device: the calls that are on it, with loading and unloading, and the weights that are brought
  to it;
- all device-seconds of all calls, divided by the number of devices; or all that there is, where nothing runs beside
  anything else;
- a circle of calls that wait for each other, divided by the iterations that it takes: generation, inference, training,
  and generation again, say. A way from one call to another takes at least all calls that are on one device and come
  after the one and before the other, since they take turns.

These hold for any order in which calls get their devices. So no plan is lost, whatever Algorithm 1 of ReaL makes of it,
but one that settles to nothing in as many iterations as are simulated, whose average may be below the bounds.
"""

from collections.abc import Iterable

import numpy as np

from jaxrlhf.planner.numba_loops import loops
from jaxrlhf.planner.searching import bound_rounds
from jaxrlhf.planner.searching.arena import Arena
from jaxrlhf.planner.searching.bound_rounds import Leasts, State, sizes_of_state
from jaxrlhf.planner.searching.flat_problem import Integers, as_integers
from jaxrlhf.planner.searching.search_rounds import NEVER
from jaxrlhf.planner.step_order import Wait, step_order

_PLANS = 256
"""Plans judged at a time."""
_BOUNDS = 20_000
"""Bounds computed before the clock is looked at."""
_BOUNDS_OF_LACK = 1_000_000
"""Bounds computed for the least memory that any plan needs."""


def go_through(arena: Arena, *, bounds: float) -> bool:
    """Goes through all plans of an arena that could be better than those found, and notes those that are.

    Where none fits, goes through all that could lack less memory.

    Args:
        bounds: To compute at the most.

    Returns:
        Whether it has gone through all, before the bounds or the time of the search were used up.
    """
    branches = _Branches(arena)
    while not branches.at_end and branches.looked < bounds and not arena.time_is_up():
        branches.go_on(arena.best, 1, int(min(_BOUNDS, bounds - branches.looked)))
    if branches.at_end and arena.best == NEVER:
        branches = _Branches(arena)
        while not branches.at_end and branches.looked < min(bounds, _BOUNDS_OF_LACK) and not arena.time_is_up():
            branches.go_on(NEVER, arena.found(arena.lacking)[0][0], _BOUNDS)
    return branches.at_end


class _Branches:
    """All plans of an arena, gone through once."""

    def __init__(self, arena: Arena) -> None:
        self._arena, size = arena, len(arena.problem.calls)
        self._state = State(*(arena.room(n) for n in sizes_of_state(size, len(arena.flat.before))))
        for c in range(size):
            self._state.group[c] = self._state.choice[c] = -1
        self._leasts = _leasts(arena)
        self._found, self._plan = arena.room(_PLANS * size), arena.room(size)
        self._next_plans = loops(bound_rounds, compiled=arena.compiled)["next_plans"]
        self.at_end = False

    @property
    def looked(self) -> int:
        """Bounds computed."""
        return int(self._state.looked[0])

    def go_on(self, limit: int, limit_of_lack: int, bounds: int) -> None:
        """Judges the next plans that could be below a limit of nanoseconds and lack fewer bytes than another."""
        arena = self._arena
        number, at_end = self._next_plans(
            *(arena.flat, arena.groups, self._leasts, self._state, arena.problem.num_devices),
            *(limit, limit_of_lack, self._found, bounds),
        )
        arena.loops["judge_each"](
            *(arena.flat, self._found, number, self._plan, arena.work, arena.fitting, arena.lacking)
        )
        arena.looked_at(int(number))
        self.at_end = bool(at_end)


def _leasts(arena: Arena) -> Leasts:
    """The least of what the choices of every group take."""
    flat, groups, order = arena.flat, arena.groups, step_order(arena.problem)
    num_calls, members, tables = len(arena.problem.calls), np.array(groups.members), []
    at, entries = np.array(flat.at), np.array(flat.table)

    def integers(values: Iterable[int]) -> Integers:
        return as_integers(values, compiled=arena.compiled)

    def of_calls(values: np.ndarray) -> Integers:
        return integers(np.minimum.reduceat(values, flat.begin[:-1]))

    def of_groups(values: np.ndarray) -> Integers:
        return integers(np.minimum.reduceat(values[members], groups.member_begin[:-1]))

    def members_of(c: int) -> tuple[np.ndarray, np.ndarray]:
        """A call's choices by group, and where each group begins."""
        begins = np.array(groups.member_begin)[groups.begin[c] : groups.begin[c + 1] + 1]
        return members[begins[0] : begins[-1]], begins[:-1] - begins[0]

    def add(rows_at: int, columns_at: int, wait: Wait) -> int:
        """Where the least of a table begins among those; -1 where there is none."""
        if rows_at < 0:
            return -1
        (rows, row_begins), (columns, column_begins) = members_of(wait.before), members_of(wait.after)
        table = entries[at[rows_at + rows][:, None] + at[columns_at + columns]]
        table = np.minimum.reduceat(table, row_begins, axis=0)
        least = np.minimum.reduceat(table, column_begins, axis=1)
        tables.append(least.reshape(-1))
        return sum(len(each) for each in tables[:-1])

    seconds = np.array(flat.seconds) + np.array(flat.load)
    busy = seconds + np.array(flat.unload)
    shortest = np.minimum.reduceat(seconds, flat.begin[:-1])
    weights = [add(*each) for each in zip(flat.weights, flat.weights_to, order.waits, strict=True)]
    data = [add(*each) for each in zip(flat.data, flat.data_to, order.waits, strict=True)]
    sharing = [wait.before for wait in order.waits if wait.weights]
    return Leasts(
        of_calls(seconds),
        of_calls(busy * (np.array(flat.end) - np.array(flat.first))),
        of_groups(seconds),
        of_groups(busy),
        of_groups(np.array(flat.resting)),
        of_groups(np.array(flat.least_working)),
        of_groups(np.array(flat.copy) - np.array(flat.shared_with_training)),
        of_groups(np.array(flat.base)),
        integers(_between(order.waits, num_calls)),
        integers(weights),
        integers(data),
        integers(wait.weights and sharing.count(wait.before) == 1 for wait in order.waits),
        integers(np.concatenate(tables)) if tables else integers([]),
        integers(sorted(range(num_calls), key=lambda c: -shortest[c])),
    )


def _between(waits: Iterable[Wait], num_calls: int) -> list[int]:
    """[call, call]: the calls that come after the one and before the other in an iteration, as bits; -1 where the other
    one does not wait for the one."""
    after = np.zeros((num_calls, num_calls), bool)
    for wait in waits:
        after[wait.before, wait.after] |= wait.lag == 0
    for c in range(num_calls):
        after |= after[:, c : c + 1] & after[c]
    return [
        sum(1 << c for c in range(num_calls) if after[a, c] and after[c, b]) if after[a, b] else -1
        for a in range(num_calls)
        for b in range(num_calls)
    ]
