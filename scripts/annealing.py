"""Simulated annealing of schedules, which makes them shorter, or their memory smaller.

Neighbors in a worker's order are exchanged. Whether that lengthens the schedule, and by how much, follows from when a
task can start at the earliest (heads) and how long it takes from there to the end (tails), as in job shops (Taillard
1994, "Parallel taboo search techniques for the job shop scheduling problem"). So most moves cost next to nothing.
Computed by Python, or compiled by numba where it is installed. Both find the same, since all numbers are integers and
acceptances come from a table.
"""

import itertools
import math
from collections.abc import Callable

from jaxrlhf.numba_loops import integers, loops
from jaxrlhf.schedules.fused_schedule import NO_CAP
from jaxrlhf.schedules.instructions import Schedule
from jaxrlhf.schedules.job_shop import JobShop, Orders
from scripts import annealing_loops
from scripts.annealing_loops import BUCKETS, PER_UNIT

LEVELS = 100
"""Temperatures of a round."""


def acceptance_table(first: float, last: float) -> list[int]:
    """[level * BUCKETS + b] -> how many of 2**32 moves are accepted that are worse by b / 8 of an average.

    exp(-(b / 8) / T), with temperatures T from `first` to `last`, each the same factor lower.
    """
    temperatures = [first * (last / first) ** (level / (LEVELS - 1)) for level in range(LEVELS)]
    return [int(math.exp(-b / PER_UNIT / each) * 2**32) for each in temperatures for b in range(BUCKETS)]


def shorten(
    shop: JobShop, orders: Orders, *, cap: int, target: int, moves: int, seed: int, compiled: bool
) -> tuple[Orders, int]:
    """Anneals for the makespan, with memory within a cap in which the orders are. Ends at the target.

    Returns:
        The orders found and their makespan.
    """
    run = loops(annealing_loops, compiled=compiled)["latency_round"]
    average = max(1, sum(shop.latency) // len(shop.latency))
    return anneal(run, shop, orders, (cap, target), average, (0.6, 0.06), moves=moves, seed=seed, compiled=compiled)


def slim(
    shop: JobShop, orders: Orders, *, floor: int, limit: int, moves: int, seed: int, compiled: bool
) -> tuple[Orders, int]:
    """Anneals for the peak of memory, with the makespan within a limit in which the orders are. Ends at the floor.

    Returns:
        The orders found and their peak.
    """
    if moves == 0:
        return orders, peak(shop, orders)
    run = loops(annealing_loops, compiled=compiled)["memory_round"]
    largest = max(1, max(shop.memory))
    return anneal(run, shop, orders, (floor, limit), largest, (1.0, 0.1), moves=moves, seed=seed, compiled=compiled)


def span_of(shop: JobShop, orders: Orders) -> int:
    """The makespan of orders, in units of the shop."""
    return shorten(shop, orders, cap=NO_CAP, target=0, moves=0, seed=0, compiled=False)[1]


def anneal(
    run: Callable[..., tuple[int, int]],
    shop: JobShop,
    orders: Orders,
    bounds: tuple[int, int],
    unit: int,
    temperatures: tuple[float, float],
    *,
    moves: int,
    seed: int,
    compiled: bool,
) -> tuple[Orders, int]:
    """A round of annealing.

    Args:
        run: `annealing_loops.latency_round` or `memory_round`.
        bounds: Its two bounds on memory and on latency.
        unit: The latency or the memory that the temperatures are multiples of.
        temperatures: The first and the last.

    Returns:
        The orders found, and the latency or the memory that the round makes smaller.
    """
    num_tasks, num_workers = len(shop.tasks), len(orders)
    first = [0, *itertools.accumulate(map(len, orders))]
    order = integers(itertools.chain(*orders), compiled=compiled)
    best = integers([0] * num_tasks, compiled=compiled)
    sizes = (*[num_tasks] * 2, *[num_workers] * 3, 2 * num_workers, *[num_tasks] * 3, 2 * num_tasks)
    tables = (first, shop.before, shop.after, shop.worker, shop.latency, shop.memory, shop.lane)
    result, _ = run(
        order,
        *(integers(each, compiled=compiled) for each in tables),
        *bounds,
        unit,
        integers(acceptance_table(*temperatures), compiled=compiled),
        LEVELS,
        moves,
        (seed * 2654435761 + 88675123) % 2**32 or 1,
        best,
        tuple(integers([0] * size, compiled=compiled) for size in sizes),
    )
    found = [int(task) for task in best]
    return [found[begin:end] for begin, end in itertools.pairwise(first)], int(result)


def as_orders(shop: JobShop, schedule: Schedule) -> Orders:
    """The opposite of `as_schedule`."""
    number = {task: index for index, task in enumerate(shop.tasks)}
    return [[number[task] for task in order] for order in schedule.orders]


def peak(shop: JobShop, orders: Orders) -> int:
    """The most activation memory that a worker keeps at once."""
    levels = (itertools.accumulate(shop.memory[task] for task in order) for order in orders)
    return max(0, *itertools.chain(*levels))
