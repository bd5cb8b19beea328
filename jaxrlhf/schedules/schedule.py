"""Pipeline schedules: the order in which workers run forwards and backwards of micro-batches; times, memory, checks.

The data types, and when each instruction can run, are in `instructions`.

A schedule is a table for one or several pipelines over the same workers. A worker is the group of devices that runs a
stage. Latencies and activation sizes are in whatever units the pipes have. As plain data, which JSON can hold, it has
one line of instructions per worker:

    {"version": 2,
     "pipes": [{"workers": [0, 1], "micro_batches": 2, "forward": 1, "backward": 2, "activation": 1, "model": 0}],
     "orders": ["F0.0.0 F0.1.0 B0.0.0 B0.1.0", "F0.0.1 B0.0.1 F0.1.1 B0.1.1"]}

`B0.1.1` is the backward of pipe 0, micro-batch 1, stage 1.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.schedules.instructions import (
    Instruction,
    Pipe,
    Schedule,
    ScheduleError,
    instructions,
    needed,
    spans,
)

VERSION = 2
"""The version of the form of plain data."""
_INSTRUCTION = re.compile(r"([FB])(\d{1,9})\.(\d{1,9})\.(\d{1,9})")


def gpipe(
    stages: int, micro_batches: int, *, forward: float = 1, backward: float = 2, activation: float = 1
) -> Schedule:
    """All forwards, then all backwards. Every worker keeps the activations of all micro-batches.

    Reference:
        Huang et al. 2019, arXiv:1811.06965.
    """
    ahead = [micro_batches + stages] * stages
    return _single(stages, 1, micro_batches, ahead, forward, backward, activation)


def interleaved_1f1b(
    stages: int, chunks: int, micro_batches: int, *, forward: float = 1, backward: float = 2, activation: float = 1
) -> Schedule:
    """1F1B over `chunks` virtual stages of each worker: virtual stage v runs on worker v % stages.

    With one chunk, as many forwards as there are stages below, then forward and backward in turn: stage s of S keeps
    the activations of S - s micro-batches at most. With several, micro-batches go in groups of as many as there are
    stages: a group's forwards on one chunk, then on the next. The last group may be smaller, which leaves bubbles where
    its missing members would run.

    Args:
        forward, backward, activation: Of a virtual stage.

    Reference:
        Narayanan et al. 2021, arXiv:2006.09503 (PipeDream-Flush), and arXiv:2104.04473, 2.2.
    """
    below = [stages - worker - 1 for worker in range(stages)]
    ahead = below if chunks == 1 else [2 * each + (chunks - 1) * stages for each in below]
    return _single(stages, chunks, micro_batches, ahead, forward, backward, activation)


def forward_only(
    stages: int, chunks: int, micro_batches: int, *, forward: float = 1, activation: float = 1
) -> Schedule:
    """The forwards of `interleaved_1f1b` alone, for inference. Nothing is kept for a backward."""
    return _single(stages, chunks, micro_batches, (0,) * stages, forward, None, activation)


def bubble_warning(stages: int, chunks: int, micro_batches: int) -> str | None:
    """A warning of fewer micro-batches than stages: the waiting time of workers if a backward takes two forwards."""
    if micro_batches >= stages:
        return None
    fraction = bubble_fraction(interleaved_1f1b(stages, chunks, micro_batches))
    return (
        f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} for {stages} pipeline stages: the devices "
        f"wait {fraction:.0%} of the time (the bubble fraction). Use {stages} micro-batches or more, or fewer stages."
    )


def _single(
    stages: int,
    chunks: int,
    micro_batches: int,
    ahead: Sequence[int],
    forward: float,
    backward: float | None,
    activation: float,
) -> Schedule:
    """One pipe's schedule: a worker runs `ahead[worker]` forwards, then forward and backward in turn, then backwards.

    If the last group of micro-batches is not whole, it is the schedule of a whole one without what is not there: what
    remains can run as early as before, so nothing deadlocks.
    """
    for name, count in (("stages", stages), ("chunks", chunks), ("micro_batches", micro_batches)):
        if count < 1:
            raise ScheduleError(f"{name} of a schedule: must be at least 1. Got {count}. Use 1 or more.")
    pipe = Pipe(tuple(range(stages)) * chunks, micro_batches, forward, backward, activation)
    orders = []
    for worker in range(stages):
        own = range(worker, stages * chunks, stages)
        forwards, backwards = [], []
        for first in range(0, micro_batches, stages):
            group = range(first, first + stages)
            forwards += [Instruction(0, micro_batch, stage, True) for stage in own for micro_batch in group]
            backwards += [Instruction(0, micro_batch, stage, False) for stage in own[::-1] for micro_batch in group]
        order = forwards
        if backward is not None:
            lead = min(ahead[worker], len(forwards))
            turns = zip(forwards[lead:], backwards, strict=False)
            order = [*forwards[:lead], *(x for turn in turns for x in turn), *backwards[len(forwards) - lead :]]
        orders.append(tuple(x for x in order if x.micro_batch < micro_batches))
    return Schedule((pipe,), tuple(orders))


def makespan(schedule: Schedule, *, send: float = 0.0) -> float:
    """The time at which the last instruction finishes. See `spans`."""
    return max((finish for _, finish in spans(schedule, send=send).values()), default=0)


def bubble_fraction(schedule: Schedule) -> float:
    """The share of all workers' time up to the makespan in which they wait.

    For N stages, M micro-batches and K chunks it is (N-1) / (N-1 + M) under GPipe and 1F1B, and, if N divides M,
    (N-1) / (N-1 + K M) under interleaved 1F1B.

    Reference:
        Zhong et al. 2024, arXiv:2409.13221, 2.2.
    """
    found = spans(schedule)
    end = max((finish for _, finish in found.values()), default=0)
    busy = sum(finish - start for start, finish in found.values())
    return 1 - busy / (end * len(schedule.orders)) if end else 0.0


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Worker -> the most activation memory that it keeps at once. It depends on the order alone, not on latencies."""
    return tuple(max(levels, default=0) for levels in activation_levels(schedule))


def activation_levels(schedule: Schedule) -> list[list[float]]:
    """Worker -> the activation memory kept after each of its instructions. From counts: rounding does not add up."""
    found = []
    for order in schedule.orders:
        kept = {(pipe, stage): 0 for pipe, _, stage, _ in order}
        sizes = {(pipe, stage): schedule.pipes[pipe].kept(stage) for pipe, stage in kept}
        levels = []
        for pipe, _, stage, forward in order:
            kept[pipe, stage] += 1 if forward else -1
            levels.append(sum(count * sizes[key] for key, count in kept.items()))
        found.append(levels)
    return found


def topological_order(schedule: Schedule) -> tuple[Instruction, ...]:
    """All instructions by their start, each after what it needs and every worker's in that worker's order.

    Ties are broken by worker, so that all processes find the same order. A process that dispatches in this order,
    without waiting for results, lets every worker run as the schedule says.

    Raises:
        ScheduleError: The orders deadlock.
    """
    found, given = spans(schedule), dict[Instruction, None]()
    needs = {instruction: needed(schedule.pipes, instruction) for instruction in found}
    left = [list(reversed(order)) for order in schedule.orders]
    for _ in found:
        heads = [(own[-1], worker) for worker, own in enumerate(left) if own]
        ready = [(found[x][0], worker) for x, worker in heads if needs[x] is None or needs[x] in given]
        _, worker = min(ready)
        given[left[worker].pop()] = None
    return tuple(given)


def validate(schedule: Schedule, memory_cap: float | None = None) -> None:
    """Checks that every instruction occurs exactly once, on the worker of its stage, that nothing deadlocks, and that
    memory suffices.

    Args:
        memory_cap: The most activation memory that a worker may keep.

    Raises:
        ScheduleError: A check fails.
    """
    needs_workers = max(max(pipe.workers) for pipe in schedule.pipes) + 1 if schedule.pipes else 0
    if len(schedule.orders) < needs_workers:
        raise ScheduleError(
            f"A schedule: every worker of its pipes must have an order. Got {len(schedule.orders)} orders for workers "
            f"0 to {needs_workers - 1}. Add the others."
        )
    missing = set(instructions(schedule.pipes))
    seen: set[Instruction] = set()
    for worker, order in enumerate(schedule.orders):
        for instruction in order:
            known = instruction in missing or instruction in seen
            if known and worker != (home := schedule.pipes[instruction.pipe].workers[instruction.stage]):
                raise ScheduleError(
                    f"Worker {worker} of a schedule: must run its own stages. Got {instruction}, of worker {home}. "
                    "Move it there."
                )
            if instruction not in missing:
                raise ScheduleError(
                    f"Worker {worker} of a schedule: every instruction of its pipes must stand once, and no other. Got "
                    f"{instruction}{' a second time' if known else ', which they do not have'}. Take it out."
                )
            missing.remove(instruction)
            seen.add(instruction)
    if missing:
        raise ScheduleError(
            f"A schedule: every instruction of its pipes must stand once. Got none that is {min(missing)}, and "
            f"{len(missing)} missing in all. Add them to the workers of their stages."
        )
    spans(schedule)
    for worker, peak in enumerate(peak_activations(schedule)):
        if memory_cap is not None and peak > memory_cap:
            raise ScheduleError(
                f"Worker {worker} of a schedule: must keep activations of at most memory_cap={memory_cap:g}. Got "
                f"{peak:g}. Let backwards come earlier, use more stages or smaller micro-batches, or raise the cap."
            )


def to_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON can hold it."""
    return {
        "version": VERSION,
        "pipes": [
            {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(pipe).items()}
            for pipe in schedule.pipes
        ],
        "orders": [
            " ".join(f"{'F' if x.forward else 'B'}{x.pipe}.{x.micro_batch}.{x.stage}" for x in order)
            for order in schedule.orders
        ],
    }


def from_data(data: Any) -> Schedule:
    """The schedule that `to_data` wrote, checked.

    Raises:
        ScheduleError: It is not a valid schedule.
    """
    try:
        if data["version"] != VERSION:
            raise ValueError(f"version must be {VERSION}. Got {brief(data['version'])}.")
        if unknown := [key for key in data if key not in ("version", "pipes", "orders")]:
            raise ValueError(f"unknown key {brief(unknown[0])}")
        pipes = tuple(_pipe(pipe) for pipe in data["pipes"])
        orders = tuple(tuple(_instruction(word) for word in order.split()) for order in data["orders"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ScheduleError(
            f"Data of a schedule: must have 'version', 'pipes' and 'orders' as to_data writes them. Got {brief(data)}, "
            f"with a fault: {reason} Write it anew."
        ) from error
    schedule = Schedule(pipes, orders)
    validate(schedule)
    return schedule


def _pipe(data: Mapping[str, Any]) -> Pipe:
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list | tuple) else value for key, value in data.items()
    }
    for key, value in given.items():
        whole = key in ("workers", "micro_batches", "model")
        for each in value if isinstance(value, tuple) else (value,):
            if type(each) is not int and (whole or (type(each) is not float and each is not None)):
                raise ValueError(f"{key}: must be {'whole ' if whole else ''}numbers. Got {brief(each)}.")
    return Pipe(**given)


def _instruction(word: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(word)
    if match is None:
        raise ValueError(f"an instruction must be such as F0.1.2. Got {brief(word)}.")
    return Instruction(int(match[2]), int(match[3]), int(match[4]), match[1] == "F")
