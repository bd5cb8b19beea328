"""The search for a schedule as a job shop: instructions as numbers, and orders found by always running the most urgent.

Workers are machines and micro-batches are jobs. All amounts are integers here, so that every computer finds the same.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxrlhf.numba_loops import Integers, integers, loops
from jaxrlhf.schedules import search_loops
from jaxrlhf.schedules.instructions import Instruction, Pipe, Schedule, instructions, needed

Orders = list[list[int]]
"""Worker -> the numbers of its instructions, in order."""
_UNLIMITED = 2**62


@dataclass(frozen=True)
class JobShop:
    """The instructions of some pipes, numbered so that those of one micro-batch follow one another.

    Attributes:
        tasks: Number -> instruction.
        before: Number -> the task that it needs, or -1.
        after: Number -> the task that needs it, or -1.
        worker: Number -> the worker that runs it.
        latency: Number -> how long it takes, in units of its own, at least 1.
        memory: Number -> by how much it changes the activation memory of its worker, in units of its own.
        lane: Number -> its pipe, stage and direction, as a number. Micro-batches go through a lane in their order.
        latency_unit, memory_unit: What one unit of them stands for.
    """

    pipes: tuple[Pipe, ...]
    tasks: list[Instruction]
    before: list[int]
    after: list[int]
    worker: list[int]
    latency: list[int]
    memory: list[int]
    lane: list[int]
    latency_unit: float
    memory_unit: float

    @functools.cached_property
    def num_workers(self) -> int:
        """The number of workers."""
        return max(self.worker) + 1

    @functools.cached_property
    def read_backwards(self) -> "JobShop":
        """The job shop with time running backwards: the last task is the first, and needs what needed it."""
        last = len(self.tasks) - 1

        def turned(links: list[int]) -> list[int]:
            return [last - link if link >= 0 else -1 for link in reversed(links)]

        return dataclasses.replace(
            self,
            tasks=self.tasks[::-1],
            before=turned(self.after),
            after=turned(self.before),
            worker=self.worker[::-1],
            latency=self.latency[::-1],
            memory=[-amount for amount in reversed(self.memory)],
            lane=self.lane[::-1],
        )

    @functools.cached_property
    def tables(self) -> "Tables":
        """The tables of list scheduling, as lists."""
        queues: list[list[int]] = [[] for _ in range(max(self.lane) + 1)]
        lanes: list[list[int]] = [[] for _ in range(self.num_workers)]
        numbers = {}
        for number, (task, lane) in enumerate(zip(self.tasks, self.lane, strict=True)):
            if not queues[lane]:
                lanes[self.worker[number]].append(lane)
                numbers[task.pipe, task.stage, task.forward] = lane
            queues[lane].append(number)
        partner = [-1] * len(queues)
        for (pipe, stage, forward), lane in numbers.items():
            if forward:
                partner[lane] = numbers.get((pipe, stage, False), -1)
        return Tables(
            *_flat(lanes), *_flat(queues), partner, self.before, self.after, self.worker, self.lane, self.latency,
            self.memory,
        )  # fmt: skip

    @functools.cached_property
    def arrays(self) -> "Tables":
        """The same as arrays."""
        return Tables(*(integers(table, compiled=True) for table in self.tables))


class Tables(NamedTuple):
    """The job shop as `search_loops.list_round` takes it."""

    lanes: Integers
    lanes_first: Integers
    queue: Integers
    queue_first: Integers
    partner: Integers
    """Lane -> the lane of its backwards, or -1."""
    before: Integers
    after: Integers
    worker: Integers
    lane: Integers
    latency: Integers
    memory: Integers


def _flat(parts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Sequences one after another, and where each begins."""
    return [x for part in parts for x in part], [0, *itertools.accumulate(map(len, parts))]


def job_shop(pipes: Sequence[Pipe]) -> JobShop:
    """Numbers the instructions of some pipes."""
    # one after another as a micro-batch goes: forwards up, backwards down
    tasks = sorted(
        instructions(pipes), key=lambda x: (x.pipe, x.micro_batch, not x.forward, x.stage if x.forward else -x.stage)
    )
    number = {task: index for index, task in enumerate(tasks)}
    before = [-1 if (need := needed(pipes, task)) is None else number[need] for task in tasks]
    after = [-1] * len(tasks)
    for index, need in enumerate(before):
        if need >= 0:
            after[need] = index
    latencies, latency_unit = _integers([pipes[task.pipe].latency(task.stage, forward=task.forward) for task in tasks])
    memory, memory_unit = _integers([pipes[task.pipe].kept(task.stage) for task in tasks])
    lanes: dict[tuple[int, int, bool], int] = {}
    return JobShop(
        tuple(pipes),
        tasks,
        before,
        after,
        worker=[pipes[task.pipe].workers[task.stage] for task in tasks],
        latency=[max(1, latency) for latency in latencies],
        memory=[size if task.forward else -size for task, size in zip(tasks, memory, strict=True)],
        lane=[lanes.setdefault((task.pipe, task.stage, task.forward), len(lanes)) for task in tasks],
        latency_unit=latency_unit,
        memory_unit=memory_unit,
    )


def _integers(values: Sequence[float]) -> tuple[list[int], float]:
    """The values in units of which they are multiples, or nearly so, and the unit."""
    least = min((value for value in values if value > 0), default=1)
    for decimals in range(4):
        scaled = [value * 10**decimals for value in values]
        if least >= 1e-3 and all(abs(value - round(value)) < 1e-6 for value in scaled):
            break
    else:
        decimals = 3 - math.floor(math.log10(least))
    return [round(value * 10.0**decimals) for value in values], 10.0**-decimals


def as_schedule(shop: JobShop, orders: Orders) -> Schedule:
    """Orders of numbers as a schedule."""
    return Schedule(shop.pipes, tuple(tuple(shop.tasks[task] for task in order) for order in orders))


def as_orders(shop: JobShop, schedule: Schedule) -> Orders:
    """The opposite of `as_schedule`."""
    number = {task: index for index, task in enumerate(shop.tasks)}
    return [[number[task] for task in order] for order in schedule.orders]


def peak(shop: JobShop, orders: Orders) -> int:
    """The most activation memory that a worker keeps at once."""
    levels = (itertools.accumulate(shop.memory[task] for task in order) for order in orders)
    return max(0, *itertools.chain(*levels))


Priority = Callable[[Pipe, Instruction], tuple[float, ...]]
"""The rank of an instruction of a pipe among those that can start at the same time: the least runs first."""
Limit = Callable[[int], int]
"""From the number of stages from here to the last to the most micro-batches between forward and backward here."""


def larger_model_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """The paper's greedy rule: the larger model, of it the backward."""
    before, after = pipe.before_and_after[0, True]
    return (-(before + pipe.latency(0, forward=True) + after), instruction.forward)


def longest_way_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """The instruction with the most left to be computed of its micro-batch."""
    return (-_way(pipe, instruction),)


def longest_pipe_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """The instruction with the most left of its micro-batch, with the later micro-batches on one stage."""
    later = pipe.micro_batches - instruction.micro_batch
    return (-_way(pipe, instruction) - later * pipe.slowest,)


def longest_backward_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """A backward; of these, and of forwards, what has the most left."""
    return (instruction.forward, -_way(pipe, instruction))


def oldest_backward_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """A backward; of these, and of forwards, the first micro-batches of either pipe."""
    return (instruction.forward, instruction.micro_batch / pipe.micro_batches)


def _way(pipe: Pipe, instruction: Instruction) -> float:
    """Latency of what is left of a micro-batch."""
    _, after = pipe.before_and_after[instruction.stage, instruction.forward]
    return pipe.latency(instruction.stage, forward=instruction.forward) + after


class ListSchedule(NamedTuple):
    """Orders, and when each task finishes."""

    orders: Orders
    finish: list[int]

    @property
    def span(self) -> int:
        """The makespan."""
        return max(self.finish)


def ranks(shop: JobShop, priority: Priority) -> list[int]:
    """The rank of each task by a priority, from 0 on."""
    values = [priority(shop.pipes[task.pipe], task) for task in shop.tasks]
    number = {value: index for index, value in enumerate(sorted(set(values)))}
    return [number[value] for value in values]


def list_schedule(
    shop: JobShop, ranks: Sequence[int], *, cap: int | None = None, limit: Limit | None = None, compiled: bool = False
) -> ListSchedule | None:
    """Always runs next the task that can start earliest, among those the one of the least rank.

    Args:
        cap: The most memory that a worker may keep.
        limit: By how many micro-batches a stage may be ahead.
        compiled: Run the loop compiled by numba, which must be installed. It finds the same.

    Returns:
        The schedule. None if nothing can start within the cap although something is left.
    """

    tables = shop.arrays if compiled else shop.tables
    limits = [_UNLIMITED] * len(tables.partner)
    if limit is not None:
        for task, lane in zip(shop.tasks, shop.lane, strict=True):
            limits[lane] = limit(shop.pipes[task.pipe].stages - task.stage)
    num_tasks, num_workers = len(shop.tasks), shop.num_workers
    sizes = (num_tasks, num_tasks, num_workers, num_workers, num_workers, len(limits), 2 * num_workers)
    work = tuple(integers([0] * size, compiled=compiled) for size in sizes)
    most = _UNLIMITED if cap is None else cap
    run = loops(search_loops, compiled=compiled)["list_round"]
    if run(tables, integers(limits, compiled=compiled), integers(ranks, compiled=compiled), most, work) < 0:
        return None
    order, finish = ([int(x) for x in result] for result in work[:2])
    counts = collections.Counter(shop.worker)
    ends = [0, *itertools.accumulate(counts[worker] for worker in range(num_workers))]
    return ListSchedule([order[begin:end] for begin, end in itertools.pairwise(ends)], finish)


def back_and_forth(
    shop: JobShop, start: ListSchedule, *, cap: int | None = None, passes: int = 8, compiled: bool = False
) -> ListSchedule:
    """The shortest of what list scheduling makes of a schedule read backwards, of that read forwards again, and so on.

    In each pass that ranks first which finished last in the one before: what is urgent has become known.

    Reference:
        Li and Willis 1992, "An iterative scheduling technique for resource-constrained project scheduling".
    """
    both = (shop, shop.read_backwards)
    best = current = start
    shortest = start.span
    for index in range(1, passes + 1):
        latest_first = [-finish for finish in reversed(current.finish)]
        found = list_schedule(both[index % 2], latest_first, cap=cap, compiled=compiled)
        if found is None:
            break
        current, span = found, found.span
        if span < shortest:
            shortest = span
            if index % 2:
                last = len(shop.tasks) - 1
                orders = [[last - task for task in reversed(order)] for order in found.orders]
                began = [finish - latency for finish, latency in zip(found.finish, both[1].latency, strict=True)]
                found = ListSchedule(orders, [span - start for start in reversed(began)])
            best = found
    return best
