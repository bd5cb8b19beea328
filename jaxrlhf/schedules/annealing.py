"""Simulated annealing of schedules: a round that makes them shorter, and one that makes them keep less memory.

Both exchange neighbors in a node's order. Whether that lengthens the schedule, and by how much, is known without
computing it anew, from when each task can start at the earliest (heads) and how long it takes from there to the end
(tails), as in job shops (Taillard 1994, "Parallel taboo search techniques for the job shop scheduling problem"). So
most moves cost next to nothing. Computed by Python, or compiled by numba where it is installed; both find the same,
since all is done in integers and from a table of acceptances.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrlhf.numba_loops import loops
from jaxrlhf.schedules import search_loops
from jaxrlhf.schedules.job_shop import JobShop, Orders, peak
from jaxrlhf.schedules.search_loops import BUCKETS, PER_UNIT

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
    temperatures = (0.6, 0.06)
    unit = max(1, sum(shop.latency) // len(shop.latency))
    return _run("latency_round", shop, orders, cap, target, unit, temperatures, moves, seed, compiled)


def slim(
    shop: JobShop, orders: Orders, *, floor: int, limit: int, moves: int, seed: int, compiled: bool
) -> tuple[Orders, int]:
    """Anneals for the peak of memory, with the makespan within a limit in which the orders are. Ends at the floor.

    Returns:
        The orders found and their peak.
    """
    if moves == 0:
        return orders, peak(shop, orders)
    temperatures = (1.0, 0.1)
    unit = max(1, max(shop.memory))
    return _run("memory_round", shop, orders, floor, limit, unit, temperatures, moves, seed, compiled)


def _run(
    round_name: str,
    shop: JobShop,
    orders: Orders,
    memory_amount: int,
    latency_amount: int,
    unit: int,
    temperatures: tuple[float, float],
    moves: int,
    seed: int,
    compiled: bool,
) -> tuple[Orders, int]:
    def array(values: Sequence[int]) -> Any:
        """An array where compiled, else a list, which is faster in Python."""
        return np.array(values, np.int64) if compiled else list(values)

    num_tasks, num_nodes = len(shop.tasks), len(orders)
    first = [0]
    for each in orders:
        first.append(first[-1] + len(each))
    order = array([task for each in orders for task in each])
    best = array([0] * num_tasks)
    sizes = (num_tasks, num_tasks, num_nodes, num_nodes, num_nodes, 2 * num_nodes, *[num_tasks] * 3, 2 * num_tasks)
    result, _ = loops(search_loops, compiled=compiled)[round_name](
        order,
        array(first),
        *(array(each) for each in (shop.before, shop.after, shop.node, shop.latency, shop.memory, shop.lane)),
        memory_amount,
        latency_amount,
        unit,
        array(acceptance_table(*temperatures)),
        LEVELS,
        moves,
        (seed * 2654435761 + 88675123) % 2**32 or 1,
        best,
        tuple(array([0] * size) for size in sizes),
    )
    found = [int(task) for task in best]
    return [found[first[i] : first[i + 1]] for i in range(num_nodes)], int(result)
