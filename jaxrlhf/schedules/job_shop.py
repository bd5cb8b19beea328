"""The search for a schedule as a job shop: instructions as numbers, and orders found by always running the most urgent.

Workers are machines and micro-batches are jobs. All amounts are integers here, so that every computer finds the same.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        lane: Number -> its pipe, stage and direction, as a number. Micro-batches go through a lane in their order. The
            lane of a stage's backwards is the next one after that of its forwards.
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
    def queues(self) -> list[list[int]]:
        """Lane -> its tasks, in the order in which they must run."""
        queues: list[list[int]] = [[] for _ in range(max(self.lane) + 2)]
        for task, lane in enumerate(self.lane):
            queues[lane].append(task)
        return queues


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
    first_stage = [0, *itertools.accumulate(pipe.stages for pipe in pipes)]
    return JobShop(
        tuple(pipes),
        tasks,
        before,
        after,
        worker=[pipes[task.pipe].workers[task.stage] for task in tasks],
        latency=[max(1, latency) for latency in latencies],
        memory=[size if task.forward else -size for task, size in zip(tasks, memory, strict=True)],
        lane=[2 * (first_stage[task.pipe] + task.stage) + (not task.forward) for task in tasks],
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


Priority = Callable[[Pipe, Instruction], tuple[float, ...]]
"""The rank of an instruction of a pipe among those that can start at the same time: the least runs first."""


def longest_pipe_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """The instruction with the most left of its micro-batch, with the later micro-batches on one stage."""
    _, after = pipe.before_and_after[instruction.stage, instruction.forward]
    later = pipe.micro_batches - instruction.micro_batch
    return (-pipe.latency(instruction.stage, forward=instruction.forward) - after - later * pipe.slowest,)


def oldest_backward_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """A backward; of these, and of forwards, the first micro-batches of either pipe."""
    return (instruction.forward, instruction.micro_batch / pipe.micro_batches)


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
    shop: JobShop, ranks: Sequence[int], *, cap: int = _UNLIMITED, ahead: int | None = None, patience: float = 0.0
) -> ListSchedule | None:
    """Always runs next the task that can start earliest, among those the one of the least rank, then of the least
    number.

    Args:
        cap: The most memory that a worker may keep.
        ahead: By how many micro-batches the forwards of a stage may be ahead of its backwards, beside one for each
            stage from there to the last. None means any number.
        patience: A worker waits for a task of lower rank, up to this part of the time to when it could have finished
            something. At 1, schedules are active (Giffler and Thompson 1960).

    Returns:
        The schedule. None if nothing can start within the cap although something is left.
    """
    queues, before, latency, memory = shop.queues, shop.before, shop.latency, shop.memory
    lanes: list[list[int]] = [[] for _ in range(max(shop.worker) + 1)]
    most = [math.inf] * len(queues)
    for lane, queue in enumerate(queues):
        if queue:
            lanes[shop.worker[queue[0]]].append(lane)
            task = shop.tasks[queue[0]]
            if ahead is not None and task.forward and shop.pipes[task.pipe].backward is not None:
                most[lane] = shop.pipes[task.pipe].stages - task.stage + ahead
    head, finish = [0] * len(queues), [-1] * len(before)
    orders: Orders = [[] for _ in lanes]
    clock, kept = [0] * len(lanes), [0] * len(lanes)
    nothing = (math.inf, 0, 0)

    def next_of(worker: int) -> tuple[float, int, int]:
        """When a worker would start which task next, of which rank."""
        can_start = []
        for lane in lanes[worker]:
            place = head[lane]
            if place == len(queues[lane]) or place - head[lane + 1] >= most[lane]:
                continue
            task = queues[lane][place]
            start = clock[worker]
            if before[task] >= 0:
                arrival = finish[before[task]]
                if arrival < 0:
                    continue
                start = max(start, arrival)
            if memory[task] <= 0 or kept[worker] + memory[task] <= cap:
                can_start.append((start, ranks[task], task))
        first = min(can_start, default=nothing)
        if not patience or first is nothing:
            return first
        end = first[0] + patience * (min(start + latency[task] for start, _, task in can_start) - first[0])
        waits = [each for each in can_start if each[0] < end]
        return min(waits, key=lambda each: (each[1], each[2]), default=first)

    found = [next_of(worker) for worker in range(len(lanes))]
    for _ in before:
        start, _, task = min(found)
        if start == math.inf:
            return None
        worker, follower = shop.worker[task], shop.after[task]
        finish[task] = clock[worker] = int(start) + latency[task]
        head[shop.lane[task]] += 1
        kept[worker] += memory[task]
        orders[worker].append(task)
        found[worker] = next_of(worker)
        if follower >= 0 and shop.worker[follower] != worker:
            found[shop.worker[follower]] = next_of(shop.worker[follower])
    return ListSchedule(orders, finish)


def back_and_forth(
    shop: JobShop, start: ListSchedule, *, cap: int = _UNLIMITED, passes: int = 8, patience: float = 0.0
) -> ListSchedule:
    """The shortest of what list scheduling makes of a schedule read backwards, of that read forwards again, and so on.

    In each pass that ranks first which finished last in the one before: what is urgent has become known.

    Reference:
        Li and Willis 1992, "An iterative scheduling technique for resource-constrained project scheduling".
    """
    both = (shop, shop.read_backwards)
    best = current = start
    for index in range(1, passes + 1):
        latest_first = [-finish for finish in reversed(current.finish)]
        current = list_schedule(both[index % 2], latest_first, cap=cap, patience=patience)
        if current is None:
            break
        if current.span < best.span:
            best = _read_forwards(both[1], current) if index % 2 else current
    return best


def _read_forwards(backwards: JobShop, found: ListSchedule) -> ListSchedule:
    """A schedule of a job shop that was read backwards, as it runs."""
    last, span = len(backwards.tasks) - 1, found.span
    orders = [[last - task for task in reversed(order)] for order in found.orders]
    began = [finish - latency for finish, latency in zip(found.finish, backwards.latency, strict=True)]
    return ListSchedule(orders, [span - start for start in reversed(began)])
