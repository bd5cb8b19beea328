"""Parts of schedules: pipes, their instructions, what each of these needs, and when it can run."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxrlhf.brief import brief

PerStage = float | tuple[float, ...]
"""A number of every virtual stage, or one for each."""


class ScheduleError(ValueError):
    """A schedule, or the description of a pipeline, that cannot be."""


class Instruction(NamedTuple):
    """One micro-batch's forward or backward on one virtual stage of one pipe."""

    pipe: int
    micro_batch: int
    stage: int
    forward: bool

    def __str__(self) -> str:
        direction = "forward" if self.forward else "backward"
        return f"the {direction} of micro-batch {self.micro_batch} on stage {self.stage} of pipe {self.pipe}"


@dataclass(frozen=True)
class Pipe:
    """One pipeline group of one model.

    Attributes:
        workers: Virtual stage -> the worker that runs it. One may run several: interleaved, (0, 1, 2, 3, 0, 1, 2, 3).
        micro_batches: How many go through it.
        forward: Latency of one micro-batch's forward on a virtual stage.
        backward: The same of its backward. None means that the pipe computes forwards only.
        activation: Memory that is saved for a micro-batch on a virtual stage from its forward to its backward.
        model: Pipes with equal numbers are data-parallel groups of one model.

    Raises:
        ScheduleError: There are no stages or no micro-batches, a latency or a size is negative, or there are not as
            many of them as stages.
    """

    workers: tuple[int, ...]
    micro_batches: int
    forward: PerStage = 1
    backward: PerStage | None = 2
    activation: PerStage = 1
    model: int = 0

    def __post_init__(self) -> None:
        if not self.workers or min(self.workers) < 0:
            raise ScheduleError(
                f"workers of a pipe: must be one worker or more, counted from 0. Got {brief(self.workers)}. "
                "Give the worker of every stage, such as (0, 1)."
            )
        if self.micro_batches < 1:
            raise ScheduleError(
                f"micro_batches of a pipe: must be at least 1. Got {self.micro_batches}. Give each pipe some."
            )
        sizes = {"forward": self.forward, "backward": self.backward, "activation": self.activation}
        for name, size in sizes.items():
            if isinstance(size, tuple) and len(size) != len(self.workers):
                raise ScheduleError(
                    f"{name} of a pipe: must be one number, or one for each of its {len(self.workers)} stages. Got "
                    f"{len(size)}. Give what each stage takes."
                )
            for each in size if isinstance(size, tuple) else () if size is None else (size,):
                if not 0 <= each < float("inf"):
                    raise ScheduleError(
                        f"{name} of a pipe: must be a number that is not negative. Got {each}. Give what a stage takes."
                    )

    @property
    def stages(self) -> int:
        """The number of its virtual stages."""
        return len(self.workers)

    def latency(self, stage: int, *, forward: bool) -> float:
        """The latency of one instruction on a virtual stage."""
        latency = self.forward if forward else self.backward or 0
        return latency[stage] if isinstance(latency, tuple) else latency

    def kept(self, stage: int) -> float:
        """The memory that is saved for a micro-batch on a virtual stage: 0 if there are no backwards."""
        if self.backward is None:
            return 0
        return self.activation[stage] if isinstance(self.activation, tuple) else self.activation

    def work(self, stage: int) -> float:
        """The latency of a micro-batch's forward and backward on a virtual stage."""
        return self.latency(stage, forward=True) + self.latency(stage, forward=False)

    @functools.cached_property
    def slowest(self) -> float:
        """The most `work` of a virtual stage."""
        return max(self.work(stage) for stage in range(self.stages))

    @functools.cached_property
    def before_and_after(self) -> dict[tuple[int, bool], tuple[float, float]]:
        """(Virtual stage, forward) -> the latency of a micro-batch before that instruction, and after it."""
        forwards = [self.latency(stage, forward=True) for stage in range(self.stages)]
        backwards = [self.latency(stage, forward=False) for stage in range(self.stages)]
        found = {}
        for stage in range(self.stages):
            found[stage, True] = sum(forwards[:stage]), sum(forwards[stage + 1 :]) + sum(backwards)
            if self.backward is not None:
                found[stage, False] = sum(forwards) + sum(backwards[stage + 1 :]), sum(backwards[:stage])
        return found


@dataclass(frozen=True)
class Schedule:
    """The pipes, and worker -> its instructions in their order."""

    pipes: tuple[Pipe, ...]
    orders: tuple[tuple[Instruction, ...], ...]


def instructions(pipes: Sequence[Pipe]) -> Iterator[Instruction]:
    """All instructions of some pipes."""
    for index, pipe in enumerate(pipes):
        for micro_batch in range(pipe.micro_batches):
            for stage in range(pipe.stages):
                yield Instruction(index, micro_batch, stage, True)
                if pipe.backward is not None:
                    yield Instruction(index, micro_batch, stage, False)


def needed(pipes: Sequence[Pipe], instruction: Instruction) -> Instruction | None:
    """The instruction that one needs: the same micro-batch's forward a stage before, or its backward a stage after.

    The backward of the last stage needs its forward; the forward of the first one needs nothing.
    """
    pipe, micro_batch, stage, forward = instruction
    if forward:
        return Instruction(pipe, micro_batch, stage - 1, True) if stage else None
    last = stage == pipes[pipe].stages - 1
    return Instruction(pipe, micro_batch, stage, True) if last else Instruction(pipe, micro_batch, stage + 1, False)


def _follower(pipes: Sequence[Pipe], instruction: Instruction) -> Instruction | None:
    """The instruction that needs one."""
    pipe, micro_batch, stage, forward = instruction
    last = stage == pipes[pipe].stages - 1
    if forward and not last:
        return Instruction(pipe, micro_batch, stage + 1, True)
    if pipes[pipe].backward is None or (not forward and stage == 0):
        return None
    return Instruction(pipe, micro_batch, stage if forward else stage - 1, False)


def spans(schedule: Schedule, *, send: float = 0.0) -> dict[Instruction, tuple[float, float]]:
    """Instruction -> when it starts and when it finishes, if each starts as early as it can.

        start(x) = max(finish of the one before x on its worker, arrival of what x needs), or 0
        finish(x) = start(x) + latency(x)

    Args:
        send: Duration of sending an instruction's output to another worker, which overlaps with computation. Sends
            from one worker to another follow one another.

    Raises:
        ScheduleError: The orders deadlock: workers wait for one another in a circle.
    """
    pipes, orders = schedule.pipes, schedule.orders
    found: dict[Instruction, tuple[float, float]] = {}
    done = [0] * len(orders)
    clock: list[float] = [0] * len(orders)
    arrival: dict[Instruction, float] = {}
    links: dict[tuple[int, int], float] = {}
    waiting: dict[Instruction, list[int]] = {}
    ready = list(range(len(orders)))
    while ready:
        worker = ready.pop()
        while done[worker] < len(orders[worker]):
            instruction = orders[worker][done[worker]]
            before = needed(pipes, instruction)
            if before is not None and before not in found:
                waiting.setdefault(before, []).append(worker)
                break
            start = clock[worker] if before is None else max(clock[worker], arrival[instruction])
            clock[worker] = start + pipes[instruction.pipe].latency(instruction.stage, forward=instruction.forward)
            found[instruction] = (start, clock[worker])
            if (after := _follower(pipes, instruction)) is not None:
                link = worker, pipes[after.pipe].workers[after.stage]
                sent = clock[worker] if link[0] == link[1] else max(clock[worker], links.get(link, 0.0)) + send
                arrival[after] = links[link] = sent
            done[worker] += 1
            ready += waiting.pop(instruction, [])
    if waiting:
        raise ScheduleError(_deadlock(schedule, done))
    return found


def _deadlock(schedule: Schedule, done: Sequence[int]) -> str:
    """The cycle in which workers wait, as a message. `done`: the number of instructions that each worker could run."""
    position = {x: (worker, index) for worker, order in enumerate(schedule.orders) for index, x in enumerate(order)}
    worker = next(worker for worker, order in enumerate(schedule.orders) if done[worker] < len(order))
    path: list[int] = []
    while worker not in path:
        path.append(worker)
        wanted = needed(schedule.pipes, schedule.orders[worker][done[worker]])
        assert wanted is not None
        if wanted not in position:
            return (
                f"A schedule: what an instruction needs must be in it. Got {schedule.orders[worker][done[worker]]} on "
                f"worker {worker}, and nowhere {wanted}. Add it to the worker of its stage."
            )
        worker = position[wanted][0]
    parts = []
    for waits in path[path.index(worker) :]:
        head = schedule.orders[waits][done[waits]]
        parts.append(f"worker {waits} waits before {head} for {needed(schedule.pipes, head)}")
    return (
        f"A schedule: workers must not wait for one another in a circle. Got {'; '.join(parts)}. Let each worker run "
        "what another one waits for before what it waits for itself."
    )
