"""Fused pipelines: two models trained at once on the same workers in opposite directions, each in the other's bubbles.

Reference: Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, 5.2.
"""

import itertools
import math
import operator
import random
from collections.abc import Sequence

from jaxrlhf.schedules.instructions import Pipe, Schedule, ScheduleError
from jaxrlhf.schedules.job_shop import (
    JobShop,
    ListSchedule,
    as_schedule,
    back_and_forth,
    job_shop,
    list_schedule,
    longest_pipe_first,
    oldest_backward_first,
    ranks,
)
from jaxrlhf.schedules.schedule import makespan
from jaxrlhf.schedules.schedule_bounds import lower_bound, serial_peak, serial_schedule

NO_CAP = 2**62
_RULES = ((longest_pipe_first, 0), (oldest_backward_first, 4), (longest_pipe_first, 1))
"""Rules of list scheduling: a priority, and the micro-batches that a stage may be ahead (`list_schedule`). The best
first, as measured over the paper's instances and some with a slower last stage."""
_LISTED = 200_000
"""Instructions that list scheduling places in all: about a second."""
_PASSES = 4
"""Passes of each list schedule back and forth."""
_PATIENCE = (0.5, 1.0)
"""Of workers, in list schedules by starts with random delays: one of these each."""
_DELAY = 10
"""The most that such a delay may be is the makespan divided by this."""


def fuse_quickly(pipes: Sequence[Pipe], *, memory_cap: float | None = None) -> Schedule:
    """A short schedule of several pipes within a memory cap, in about a second at most.

    List schedules by several rules, then by the starts of the shortest so far with random delays, each made shorter
    back and forth, until one is as short as the lower bound. `docs/pipelines.md` has how near to the bound they come.

    The result depends on the pipes and the cap alone, so every process finds the same.

    Args:
        memory_cap: The most activation memory that a worker may keep.

    Raises:
        ScheduleError: There are no pipes, or not even serial 1F1B keeps within the cap.
    """
    check_room(pipes, memory_cap)
    shop, serial = job_shop(pipes), serial_schedule(pipes)
    listed = shortest_listed(shop, cap_in_units(shop, memory_cap), target_in_units(shop, pipes))
    if listed is None:
        return serial
    return min(serial, as_schedule(shop, listed.orders), key=makespan)


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


def shortest_listed(shop: JobShop, cap: int, target: int) -> ListSchedule | None:
    """The shortest schedule that list scheduling finds within a cap. None means that nothing ends within the cap.

    Args:
        target: A makespan at which the search ends.
    """
    best: ListSchedule | None = None
    chance, left, size = random.Random(0), _LISTED, len(shop.tasks)
    for attempt in itertools.count():
        if attempt < len(_RULES):
            priority, ahead = _RULES[attempt]
            rank, patience = ranks(shop, priority), 0.0
        elif best is None:
            return None
        else:
            ahead, patience = None, chance.choice(_PATIENCE)
            starts = map(operator.sub, best.finish, shop.latency)
            rank = [start + chance.randrange(1 + best.span // _DELAY) for start in starts]
        found = list_schedule(shop, rank, cap=cap, ahead=ahead, patience=patience)
        left -= size
        if found is not None:
            passes = max(0, min(_PASSES, left // size))
            found = back_and_forth(shop, found, cap=cap, passes=passes, patience=patience)
            left -= passes * size
            if best is None or found.span <= best.span:
                best = found
        if best is not None and (best.span <= target or left < size):
            break
    return best
