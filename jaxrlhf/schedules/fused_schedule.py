"""Fused pipelines: two models trained at once on the same workers in opposite directions, each in the other's bubbles.

Reference: Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, 5.2.
"""

import math
from collections.abc import Sequence

from jaxrlhf.numba_loops import numba_is_there
from jaxrlhf.schedules.annealing import shorten
from jaxrlhf.schedules.instructions import Pipe, Schedule, ScheduleError
from jaxrlhf.schedules.job_shop import (
    JobShop,
    Limit,
    ListSchedule,
    Orders,
    Priority,
    as_orders,
    as_schedule,
    back_and_forth,
    job_shop,
    larger_model_first,
    list_schedule,
    longest_backward_first,
    longest_pipe_first,
    longest_way_first,
    oldest_backward_first,
    ranks,
)
from jaxrlhf.schedules.schedule_bounds import lower_bound, serial_peak, serial_schedule

NO_CAP = 2**62
_RULES: tuple[tuple[Priority, Limit | None], ...] = (
    (longest_pipe_first, lambda below: below),
    (oldest_backward_first, lambda below: below + 4),
    (longest_pipe_first, lambda below: below + 1),
    (longest_way_first, lambda below: below + 3),
    (oldest_backward_first, lambda below: below + 2),
    (longest_backward_first, lambda below: below),
    (longest_pipe_first, lambda below: below + 2),
    (larger_model_first, lambda below: below),
    (longest_pipe_first, None),
    (longest_way_first, None),
    (longest_way_first, lambda below: below + 1),
    (longest_way_first, lambda below: -(-3 * below // 2)),
)
"""Rules of list scheduling, the best first, as measured over the paper's instances and nine with a
slower last stage, under memory caps of 1.25 and about 1.5 times serial 1F1B."""
_LISTED = 400_000
"""Instructions that list scheduling by these rules places: two to three seconds in Python."""
_QUICK = 1_000_000
"""Moves of annealing times instructions in `fuse_quickly`: a second in Python."""
_FEW = 1000
"""Instructions below which `fuse_quickly` compiles nothing: Python is done before compiled loops are loaded."""
_PASSES = 8
"""Passes of each list schedule back and forth."""


def fuse_quickly(pipes: Sequence[Pipe], *, memory_cap: float | None = None, compiled: bool = True) -> Schedule:
    """A short schedule of several pipes within a memory cap, in a few seconds of Python at most.

    List schedules by several rules, each made shorter back and forth, until one is as short as the lower bound; the
    best is annealed for latency where none is. `docs/pipelines.md` has how near to the bound they come.

    The result depends on the pipes and the cap alone, so every process finds the same. numba makes it faster, where it
    is installed.

    Args:
        memory_cap: The most activation memory that a worker may keep.
        compiled: Compile with numba, if it is installed and there are more than a few instructions.

    Raises:
        ScheduleError: There are no pipes, or not even serial 1F1B keeps within the cap.
    """
    check_room(pipes, memory_cap)
    shop = job_shop(pipes)
    compiled = compiled and len(shop.tasks) > _FEW and numba_is_there()
    cap, target = cap_in_units(shop, memory_cap), target_in_units(shop, pipes)
    orders = as_orders(shop, serial_schedule(pipes))
    span = span_of(shop, orders)
    listed = shortest_listed(shop, cap, target, compiled=compiled)
    if listed is not None and listed.span < span:
        orders, span = listed.orders, listed.span
    if span > target:
        moves = _QUICK // len(shop.tasks)
        orders, _ = shorten(shop, orders, cap=cap, target=target, moves=moves, seed=0, compiled=compiled)
    return as_schedule(shop, orders)


def check_room(pipes: Sequence[Pipe], memory_cap: float | None) -> None:
    """Checks that there is something to schedule, and room for it.

    Raises:
        ScheduleError: There are no pipes, or not even serial 1F1B keeps within the cap.
    """
    if not pipes:
        raise ScheduleError("pipes of a fused schedule: must be at least one. Got none. Give the pipes of both models.")
    serial = serial_peak(pipes)
    if memory_cap is not None and serial > memory_cap:
        raise ScheduleError(
            "memory_cap of a fused schedule: must leave room for one model after another by 1F1B, which keeps "
            f"{serial:g}. Got {memory_cap:g}. Use smaller micro-batches or more stages, or raise the cap."
        )


def cap_in_units(shop: JobShop, memory_cap: float | None) -> int:
    """A memory cap in units of the shop."""
    return NO_CAP if memory_cap is None else math.floor(memory_cap / shop.memory_unit + 1e-6)


def target_in_units(shop: JobShop, pipes: Sequence[Pipe]) -> int:
    """The lower bound, in units of the shop."""
    return math.ceil(lower_bound(pipes) / shop.latency_unit - 1e-6)


def shortest_listed(shop: JobShop, cap: int, target: int, *, compiled: bool) -> ListSchedule | None:
    """The shortest schedule that list scheduling finds within a cap, by each of the rules and from there back and
    forth. None means that nothing ends within the cap.

    Args:
        target: A makespan at which the search ends.
    """
    best, left = None, _LISTED
    by_priority = {priority: ranks(shop, priority) for priority, _ in _RULES}
    for priority, limit in _RULES:
        if best is not None and (left < len(shop.tasks) or best.span <= target):
            break
        found = list_schedule(shop, by_priority[priority], cap=cap, limit=limit, compiled=compiled)
        left -= len(shop.tasks)
        if found is None:
            continue
        passes = max(0, min(_PASSES, left // len(shop.tasks)))
        found = back_and_forth(shop, found, cap=cap, passes=passes, compiled=compiled)
        left -= passes * len(shop.tasks)
        if best is None or found.span < best.span:
            best = found
    return best


def span_of(shop: JobShop, orders: Orders) -> int:
    """The makespan of orders, in units of the shop."""
    return shorten(shop, orders, cap=NO_CAP, target=0, moves=0, seed=0, compiled=False)[1]
