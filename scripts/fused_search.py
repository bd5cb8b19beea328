"""The full search for a fused schedule: list schedules, annealed for latency and then for memory.

`jaxrlhf.schedules.fused_schedule` has the quick search that plans use, which keeps within a memory cap. This one also
makes the memory small, as in RLHFuse's Table 3.

Reference: Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, 5.2.
"""

import contextlib
import functools
import math
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxrlhf.numba_loops import numba_is_there
from jaxrlhf.schedules.fused_schedule import (
    NO_CAP,
    cap_in_units,
    check_room,
    shortest_listed,
    target_in_units,
)
from jaxrlhf.schedules.instructions import Pipe, Schedule, ScheduleError
from jaxrlhf.schedules.job_shop import JobShop, Orders, as_schedule, job_shop
from jaxrlhf.schedules.schedule import makespan, peak_activations
from jaxrlhf.schedules.schedule_bounds import lower_bound, serial_peak, serial_schedule
from scripts.annealing import as_orders, peak, shorten, slim, span_of
from scripts.fused_models import serial_latency

WORK = 300_000_000
"""Moves of a round of annealing times instructions, where nobody says how many moves; but no more than MOVES."""
MOVES = 200_000
_SLIM = 5
"""Factor of the moves in the round for memory, most of which cost next to nothing."""
_CAPS = (1.6, math.inf, 2.0, 1.3)
"""The memory that orders to start from may take, in peaks of serial 1F1B, beside the cap. Seeds take them in turn."""
_SLACKS = (1.05, 1.15, 1.4)
"""A seed's further attempts: the latency that lower memory may cost at first, the later ones to get within a cap."""


@dataclass(frozen=True)
class FusedResult:
    """A fused schedule, and what it is measured by.

    Attributes:
        schedule: It, valid.
        latency: Its makespan.
        lower_bound: Below which no makespan can be.
        peak: The most activation memory that a worker keeps.
        serial_latency: That of the models trained one after another by 1F1B.
        serial_peak: The peak of the same.
    """

    schedule: Schedule
    latency: float
    lower_bound: float
    peak: float
    serial_latency: float
    serial_peak: float


def fuse(
    pipes: Sequence[Pipe],
    *,
    memory_cap: float | None = None,
    seeds: Sequence[int] = range(2),
    moves: int | None = None,
    processes: int = 1,
    compiled: bool = True,
) -> FusedResult:
    """A short schedule of several pipes that keeps little memory.

    List schedules of several rules are made first, and made shorter back and forth. Each seed then anneals one of
    them for latency, and what it finds for the peak of activation memory, at the same latency; and both again a few
    times, from there. The best is the shortest one, then the one that keeps the least. Once a seed has found one as
    short as the lower bound that keeps no more than serial 1F1B, later ones are not asked.

    The result depends on what is given here alone: not on `processes`, `compiled`, or how fast anything is.

    Args:
        memory_cap: The most activation memory that a worker may keep.
        seeds: Of the annealing. None at all: list schedules only.
        moves: How many exchanges each seed tries in a round for latency; in one for memory, five times as many. By
            default as many as for `WORK`.
        processes: How many seeds are tried at once.
        compiled: Compile with numba, if it is installed. That takes seconds the first time, and is far faster after.

    Raises:
        ScheduleError: There are no pipes, not even serial 1F1B keeps within the cap, or moves are negative.
    """
    check_room(pipes, memory_cap)
    if (moves is not None and moves < 0) or processes < 1:
        raise ScheduleError(
            f"moves and processes of a search: must be at least 0 and 1. Got {moves} and {processes}. Use more."
        )
    shop, serial = job_shop(pipes), serial_peak(pipes)
    cap, target, compiled = cap_in_units(shop, memory_cap), target_in_units(shop, pipes), compiled and numba_is_there()
    search = _Search(
        shop,
        starts=_starts(shop, serial, cap, target),
        target=target,
        floor=math.floor(serial / shop.memory_unit + 1e-6),
        cap=cap,
        moves=min(MOVES, WORK // len(shop.tasks)) if moves is None else moves,
        compiled=compiled,
    )
    one_after_another = as_orders(shop, serial_schedule(pipes))
    found = [_Found(span, peak(shop, orders), orders) for orders, span, _ in search.starts]
    found.append(_Found(span_of(shop, one_after_another), peak(shop, one_after_another), one_after_another))
    if not any(each.latency <= search.target and each.peak <= search.floor for each in found):
        found += _anneal(search, seeds, processes)
    for each in sorted(found, key=lambda each: (each.latency, each.peak)):
        schedule = as_schedule(shop, each.orders)
        if memory_cap is None or max(peak_activations(schedule)) <= memory_cap:
            break  # the serial schedule is one that fits
    return measured(pipes, schedule)


def measured(pipes: Sequence[Pipe], schedule: Schedule) -> FusedResult:
    """A schedule with what it is measured by."""
    return FusedResult(
        schedule,
        latency=makespan(schedule),
        lower_bound=lower_bound(pipes),
        peak=max(peak_activations(schedule)),
        serial_latency=serial_latency(pipes),
        serial_peak=serial_peak(pipes),
    )


@dataclass(frozen=True)
class _Search:
    """The arguments of every seed. Amounts in the units of the shop."""

    shop: JobShop
    starts: Sequence[tuple[Orders, int, int]]
    target: int
    floor: int
    cap: int
    moves: int
    compiled: bool


class _Found(NamedTuple):
    latency: int
    peak: int
    orders: Orders


def _starts(shop: JobShop, serial: float, most: int, target: int) -> list[tuple[Orders, int, int]]:
    """For each of the caps, `most` first: orders to start from, their makespan, and the cap. Some may allow none."""
    factors = [NO_CAP if f == math.inf else math.floor(f * serial / shop.memory_unit + 1e-6) for f in _CAPS]
    starts = []
    for cap in dict.fromkeys([most, *factors] if most < NO_CAP else factors):
        found = shortest_listed(shop, cap, target)
        if found is not None:
            starts.append((found.orders, found.span, cap))
    return starts


def _anneal(search: _Search, seeds: Sequence[int], processes: int) -> list[_Found]:
    """The schedules that the seeds find, up to the first that finds the best that there can be."""
    found: list[_Found] = []
    with contextlib.ExitStack() as stack:
        if processes > 1 and len(seeds) > 1:
            # spawned, since a fork of a process with threads, such as those of JAX, may hang
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(min(processes, len(seeds))))
            results = pool.imap(functools.partial(_anneal_one, search), enumerate(seeds))
        else:
            results = map(functools.partial(_anneal_one, search), enumerate(seeds))
        for each in results:
            if each.peak <= search.cap:
                found.append(each)
                if each.latency <= search.target and each.peak <= search.floor:
                    break
    return found  # leaving the pool ends what still runs in it


def _anneal_one(search: _Search, which: tuple[int, int]) -> _Found:
    """One seed: both rounds, and again with memory lowered first at the price of latency, which is then won back."""
    index, seed = which
    shop, compiled, moves = search.shop, search.compiled, search.moves
    orders, _, cap = search.starts[index % len(search.starts)]
    found = _both_rounds(search, orders, cap, seed)
    for again, slack in enumerate(_SLACKS):
        if found.latency <= search.target and found.peak <= search.floor:
            break
        seed_here = seed + 1000 * (again + 1)
        orders, top = found.orders, found.peak
        if found.peak > search.cap or found.latency <= search.target:
            goal = min(search.cap, found.peak - max(1, (found.peak - search.floor) // 2))
            limit = math.floor((slack if found.peak > search.cap else _SLACKS[0]) * found.latency)
            orders, top = slim(
                shop, orders, floor=goal, limit=limit, moves=_SLIM * moves, seed=seed_here, compiled=compiled
            )
            cap = (top + found.peak) // 2
        else:
            cap = 13 * max(found.peak, search.floor) // 10
        if search.cap < NO_CAP:
            cap = max(top, min(cap, search.cap))
        other = _both_rounds(search, orders, cap, seed_here)
        found = min(found, other, key=lambda each: (each.peak > search.cap, each.latency, each.peak))
    return found


def _both_rounds(search: _Search, orders: Orders, cap: int, seed: int) -> _Found:
    """Shorter within a cap, then lower at that latency."""
    shop, compiled, moves = search.shop, search.compiled, search.moves
    orders, span = shorten(shop, orders, cap=cap, target=search.target, moves=moves, seed=seed, compiled=compiled)
    orders, top = slim(shop, orders, floor=search.floor, limit=span, moves=_SLIM * moves, seed=seed, compiled=compiled)
    return _Found(span_of(shop, orders), top, orders)
