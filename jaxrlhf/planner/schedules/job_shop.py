"""The search for a schedule as a job shop: instructions as numbers, and orders found by always running the most urgent.

Nodes are machines and micro-batches are jobs. All amounts are integers here, so that every computer finds the same.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxrlhf.planner.schedules.instructions import Instruction, Pipe, Schedule, instructions, needed

Orders = list[list[int]]
"""Node -> the numbers of its instructions, in order."""


@dataclass(frozen=True)
class JobShop:
    """The instructions of some pipes by number: those of one micro-batch follow one another.

    Attributes:
        tasks: Number -> instruction.
        before: Number -> the task that it needs, or -1.
        after: Number -> the task that needs it, or -1.
        node: Number -> the node that runs it.
        latency: Number -> how long it takes, in units of its own, at least 1.
        memory: Number -> by how much it changes the activation memory of its node, in units of its own.
        kind: Number -> what it has in common with other micro-batches: their pipe, stage and direction.
        latency_unit, memory_unit: What one unit of them stands for.
    """

    pipes: tuple[Pipe, ...]
    tasks: list[Instruction]
    before: list[int]
    after: list[int]
    node: list[int]
    latency: list[int]
    memory: list[int]
    kind: list[int]
    latency_unit: float
    memory_unit: float

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return max(self.node) + 1


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
    latencies, latency_unit = _integers([pipes[task.pipe].latency(forward=task.forward) for task in tasks])
    sizes = [pipes[task.pipe].activation if pipes[task.pipe].backward is not None else 0 for task in tasks]
    memory, memory_unit = _integers(sizes)
    kinds: dict[tuple[int, int, bool], int] = {}
    return JobShop(
        tuple(pipes),
        tasks,
        before,
        after,
        node=[pipes[task.pipe].nodes[task.stage] for task in tasks],
        latency=[max(1, latency) for latency in latencies],
        memory=[size if task.forward else -size for task, size in zip(tasks, memory, strict=True)],
        kind=[kinds.setdefault((task.pipe, task.stage, task.forward), len(kinds)) for task in tasks],
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
    """The most activation memory that a node keeps at once."""
    most = 0
    for order in orders:
        kept = 0
        for task in order:
            kept += shop.memory[task]
            most = max(most, kept)
    return most


Priority = Callable[[Pipe, Instruction], tuple[float, ...]]
"""How an instruction of a pipe ranks among those that can start at the same time: the least goes first."""
Limit = Callable[[int], int]
"""From the number of stages from here to the last to the most micro-batches between forward and backward here."""


def larger_model_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """The paper's greedy rule: the larger model, of it the backward."""
    return (-pipe.stages * (pipe.forward + (pipe.backward or 0)), instruction.forward)


def longest_way_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """What has the most left to be computed of its micro-batch."""
    return (-_way(pipe, instruction),)


def longest_pipe_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """What has the most left of its micro-batch, with the later micro-batches on one stage."""
    later = pipe.micro_batches - instruction.micro_batch
    return (-_way(pipe, instruction) - later * (pipe.forward + (pipe.backward or 0)),)


def _way(pipe: Pipe, instruction: Instruction) -> float:
    """Latency of what is left of a micro-batch."""
    if not instruction.forward:
        return (instruction.stage + 1) * (pipe.backward or 0)
    return (pipe.stages - instruction.stage) * pipe.forward + pipe.stages * (pipe.backward or 0)


class ListSchedule(NamedTuple):
    """Orders, and when each task finishes."""

    orders: Orders
    finish: list[int]

    @property
    def span(self) -> int:
        """The makespan."""
        return max(self.finish)


def ranks(shop: JobShop, priority: Priority) -> list[tuple[float, ...]]:
    """The rank of each task by a priority."""
    return [priority(shop.pipes[task.pipe], task) for task in shop.tasks]


def list_schedule(
    shop: JobShop, ranks: Sequence[tuple[float, ...]], *, cap: int | None = None, limit: Limit | None = None
) -> ListSchedule | None:
    """Always that runs next which can start earliest, among those what ranks least.

    Args:
        cap: The most memory that a node may keep.
        limit: By how many micro-batches a stage may be ahead.

    Returns:
        None: nothing can start within the cap, though something is left.
    """
    queues: list[dict[int, list[int]]] = [{} for _ in range(shop.num_nodes)]
    for task, (node, kind) in enumerate(zip(shop.node, shop.kind, strict=True)):
        queues[node].setdefault(kind, []).append(task)
    head = [0] * (max(shop.kind) + 1)
    backward_kind = {}
    for task, kind in zip(shop.tasks, shop.kind, strict=True):
        backward_kind[task.pipe, task.stage, task.forward] = kind
    finish = [-1] * len(shop.tasks)
    clock, kept = [0] * shop.num_nodes, [0] * shop.num_nodes
    orders: Orders = [[] for _ in range(shop.num_nodes)]

    def next_of(node: int) -> tuple[int, tuple[float, ...], int] | None:
        """The start, the rank and the number of what the node would run next."""
        best = None
        for kind, queue in queues[node].items():
            if head[kind] == len(queue):
                continue
            task = queue[head[kind]]
            before = shop.before[task]
            if before >= 0 and finish[before] < 0:
                continue
            pipe, _, stage, forward = shop.tasks[task]
            if shop.memory[task] > 0 and cap is not None and kept[node] + shop.memory[task] > cap:
                continue
            if forward and limit is not None and shop.pipes[pipe].backward is not None:
                ahead = head[kind] - head[backward_kind[pipe, stage, False]]
                if ahead >= limit(shop.pipes[pipe].stages - stage):
                    continue
            choice = (max(clock[node], finish[before] if before >= 0 else 0), ranks[task], task)
            if best is None or choice < best:
                best = choice
        return best

    choices = [next_of(node) for node in range(shop.num_nodes)]
    for _ in shop.tasks:
        found = min((choice for choice in choices if choice is not None), default=None)
        if found is None:
            return None
        start, _, task = found
        node, after = shop.node[task], shop.after[task]
        finish[task] = clock[node] = start + shop.latency[task]
        head[shop.kind[task]] += 1
        kept[node] += shop.memory[task]
        orders[node].append(task)
        choices[node] = next_of(node)
        if after >= 0:
            choices[shop.node[after]] = next_of(shop.node[after])
    return ListSchedule(orders, finish)


def back_and_forth(shop: JobShop, start: ListSchedule, *, cap: int | None = None, passes: int = 8) -> ListSchedule:
    """The shortest of what list scheduling makes of a schedule read backwards, of that read forwards again, and so on.

    In each pass that ranks first which finished last in the one before: what is urgent has become known.

    Reference:
        Li and Willis 1992, "An iterative scheduling technique for resource-constrained project scheduling".
    """
    both = (shop, _read_backwards(shop))
    best = current = start
    for index in range(1, passes + 1):
        found = list_schedule(both[index % 2], [(-finish,) for finish in reversed(current.finish)], cap=cap)
        if found is None:
            break
        current = found
        if found.span < best.span:
            if index % 2:
                last = len(shop.tasks) - 1
                orders = [[last - task for task in reversed(order)] for order in found.orders]
                began = [finish - latency for finish, latency in zip(found.finish, both[1].latency, strict=True)]
                found = ListSchedule(orders, [found.span - start for start in reversed(began)])
            best = found
    return best


def _read_backwards(shop: JobShop) -> JobShop:
    """The same with time running backwards: the last task is the first, and needs what needed it."""
    last = len(shop.tasks) - 1

    def turned(links: list[int]) -> list[int]:
        return [last - link if link >= 0 else -1 for link in reversed(links)]

    return dataclasses.replace(
        shop,
        tasks=shop.tasks[::-1],
        before=turned(shop.after),
        after=turned(shop.before),
        node=shop.node[::-1],
        latency=shop.latency[::-1],
        memory=[-amount for amount in reversed(shop.memory)],
        kind=shop.kind[::-1],
    )
