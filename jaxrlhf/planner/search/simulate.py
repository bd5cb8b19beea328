"""Simulation of iterations under a plan: their seconds, and when their tasks run.

`unroll` writes several iterations of a plan as named tasks, `simulate` times them by ReaL's Algorithm 1
(`evaluate_loops`), and `steady_state` is what they settle to.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Literal

from jaxrlhf.planner.search import evaluate_loops
from jaxrlhf.planner.search.flat_problem import NANOSECONDS, flat_problem, nanoseconds, room_for_work
from jaxrlhf.planner.search.problem import Problem
from jaxrlhf.planner.search.step_order import Wait, layout, step_order

TaskKind = Literal["call", "weights", "data", "load", "unload"]
"""`call` computes; `weights` brings new weights from where they were trained to where they are read, `data` outputs to
the call that needs them; `load` and `unload` bring weights from host memory and back. `data` takes time but no device,
since copies overlap with programs. It begins when its source has ended."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Something that takes time, on some devices or on none."""

    name: str
    devices: tuple[range, ...]
    """Positions of its devices; ranges may overlap. Empty if it occupies none."""
    seconds: float
    needs: tuple[int, ...] = ()
    """Positions of the tasks that must have ended before it."""
    kind: TaskKind = "call"
    iteration: int = 0
    call: str = ""
    """The call that runs, or that it is for."""
    slot: int = -1
    """Its place among the tasks of an iteration, as in `evaluate_loops.Workspace`."""


@dataclasses.dataclass(frozen=True)
class TaskSpan:
    """A task with its start and end, in seconds."""

    task: Task
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The steady state of consecutive iterations under a plan."""

    seconds: float
    """Seconds of one iteration; the average where several differ."""
    period: int
    """Iterations after which everything repeats. 0 if they had not settled when the simulation ended."""
    spans: tuple[TaskSpan, ...]
    """All tasks of one period, from the start of the first. They overlap with tasks of other iterations."""
    busy: tuple[float, ...]
    """Device -> the fraction of time in which it is busy."""
    critical: tuple[str, ...]
    """Names of the tasks of a cycle that never pauses: these must get faster for the iteration to get faster."""


def unroll(problem: Problem, plan: Sequence[int], iterations: int) -> tuple[Task, ...]:
    """The tasks of several iterations under a plan, iteration after iteration.

    Before each call stand those that bring its weights, on the devices of both calls, and its inputs, on none: ReaL's
    Algorithm 1 has both wait for devices. What takes no time is left out. Readers of the same weights with the same
    layout share one task that brings them. In the first iterations the weights are there.

    A call's weights are loaded from host memory once all that it waits for is there, and brought back when it ends.
    """
    order, calls = step_order(problem), problem.calls
    chosen = [call.choices[index] for call, index in zip(calls, plan, strict=True)]
    readers = sorted((wait for wait in order.waits if wait.weights), key=lambda wait: (wait.lag, wait.after))
    leaders: dict[Hashable, Wait] = {}
    shared = {wait: leaders.setdefault((wait.before, layout(chosen[wait.after])), wait) for wait in readers}
    tasks: list[Task] = []
    at: dict[tuple[TaskKind, int, int, int], int] = {}
    """(kind, iteration, call before, call) -> position among the tasks."""

    def add(kind: TaskKind, iteration: int, i: int, j: int, seconds: float, needs: list[int]) -> list[int]:
        devices = () if kind == "data" else tuple(dict.fromkeys((chosen[i].devices, chosen[j].devices)))
        if problem.one_at_a_time:
            devices = (range(problem.num_devices),)
        name = calls[j].name if kind == "call" else f"{calls[j].name}: {kind}"
        if i != j:
            name += f" from {calls[i].name}"
        at[kind, iteration, i, j] = len(tasks)
        last = len(calls) + 3
        slot = j * (last + 1) + {"weights": 0, "data": 1 + i, "load": last - 2, "call": last - 1, "unload": last}[kind]
        tasks.append(Task(name, devices, seconds, tuple(dict.fromkeys(needs)), kind, iteration, calls[j].name, slot))
        return [len(tasks) - 1]

    def weights_for(wait: Wait, iteration: int) -> list[int]:
        """The task that brings the weights that a call waits for, if that takes time; added with its first reader."""
        i, j, first = wait.before, wait.after, shared[wait].after
        seconds = problem.reallocations[i, first][plan[i], plan[first]]
        if not nanoseconds(seconds):
            return []
        if first == j:
            return add("weights", iteration, i, j, seconds, [at["call", iteration - wait.lag, i, i]])
        return [at["weights", iteration - wait.lag + shared[wait].lag, i, first]]

    def data_for(wait: Wait, iteration: int) -> list[int]:
        """The task that brings the outputs that a call waits for, if that takes time."""
        i, j = wait.before, wait.after
        seconds = problem.transfers[i, j][plan[i], plan[j]]
        return add("data", iteration, i, j, seconds, [at["call", iteration, i, i]]) if nanoseconds(seconds) else []

    for iteration in range(iterations):
        for j, choice in enumerate(chosen):
            needs: list[int] = []
            waits = [wait for wait in order.waits if wait.after == j and wait.lag <= iteration]
            brought = {wait: weights_for(wait, iteration) for wait in waits if wait.weights}
            for wait in waits:
                found = brought.get(wait, []) + (data_for(wait, iteration) if wait.data else [])
                needs += found or [at["call", iteration - wait.lag, wait.before, wait.before]]
            if iteration and nanoseconds(choice.unload):
                needs.append(at["unload", iteration - 1, j, j])
            if nanoseconds(choice.load):
                needs = add("load", iteration, j, j, choice.load, needs)
            ended = add("call", iteration, j, j, choice.seconds, needs)
            if nanoseconds(choice.unload):
                add("unload", iteration, j, j, choice.unload, ended)
    return tuple(tasks)


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The tasks of several iterations and when they run."""

    tasks: tuple[Task, ...]
    times: tuple[tuple[int, int], ...]
    """Task -> start and end in nanoseconds."""
    length: int
    """Nanoseconds of an iteration, once they have settled."""
    settled: int
    """The first iteration that, with the one before, repeats earlier ones; the last one if none does."""
    period: int
    """The number of iterations until all repeats; 0 if nothing does."""


def simulate(problem: Problem, plan: Sequence[int]) -> Timetable:
    """The times of all tasks, by ReaL's Algorithm 1, until iterations repeat; the repetition is then extended to
    `ITERATIONS` of them."""
    flat = flat_problem(problem.with_choices([[index] for index in plan]), compiled=False)
    work = room_for_work(flat, compiled=False)
    length, last, period = evaluate_loops.steady_iteration(flat, list(range(len(plan))), work)
    tasks = unroll(problem, plan, evaluate_loops.ITERATIONS if period else last + 1)
    num_slots = len(work.starts) // evaluate_loops.ITERATIONS
    times: list[tuple[int, int]] = []
    for task in tasks:
        if task.devices:
            rounds = -(-max(0, task.iteration - last) // max(1, period))
            start = work.starts[(task.iteration - rounds * period) * num_slots + task.slot]
            if rounds:
                here = last * num_slots + task.slot
                start += rounds * (work.starts[here] - work.starts[here - period * num_slots])
        else:
            start = times[task.needs[0]][1]
        times.append((start, start + nanoseconds(task.seconds)))
    return Timetable(tasks, tuple(times), length, last, period)


def steady_state(problem: Problem, plan: Sequence[int]) -> Simulation:
    """The steady state of consecutive iterations under a plan; the average of the later half if they do not settle."""
    timetable = simulate(problem, plan)
    tasks, times, last, period = timetable.tasks, timetable.times, timetable.settled, timetable.period
    shown = range(last - max(1, period) + 1, last + 1)
    seconds = timetable.length / NANOSECONDS
    timed = [(task, *time) for task, time in zip(tasks, times, strict=True) if task.iteration in shown]
    origin = min(start for _, start, _ in timed)
    spans = [TaskSpan(task, (start - origin) / NANOSECONDS, (end - origin) / NANOSECONDS) for task, start, end in timed]
    busy = [0.0] * problem.num_devices
    for span in spans:
        for device in {device for part in span.task.devices for device in part}:
            busy[device] += span.end - span.start
    length = seconds * len(shown)
    return Simulation(
        seconds,
        period,
        tuple(sorted(spans, key=lambda span: span.start)),
        tuple(each / length if length else 0.0 for each in busy),
        _critical(tasks, times, period),
    )


def _critical(tasks: Sequence[Task], times: Sequence[tuple[int, int]], period: int) -> tuple[str, ...]:
    """The tasks of a cycle in which each starts when the one before ends, because it waits for it or for its devices.

    Found by going back from the end of a late iteration until a task is met for the second time, a period earlier.
    """
    late = [i for i, task in enumerate(tasks) if (task.kind, task.iteration) == ("call", evaluate_loops.LAST_SETTLED)]
    here = max(late, key=lambda i: times[i][1])
    ending: dict[int, list[int]] = {}
    for index, (_, end) in enumerate(times):
        ending.setdefault(end, []).append(index)
    way: list[int] = []
    met: dict[tuple[int, int], int] = {}
    while tasks[here].iteration > 1:
        key = (tasks[here].slot, tasks[here].iteration % period if period else tasks[here].iteration)
        if key in met:
            way = way[met[key] :]
            break
        met[key] = len(way)
        way.append(here)
        start = times[here][0]
        devices = {device for part in tasks[here].devices for device in part}
        ended = [
            index
            for index in ending.get(start, ())
            if (times[index][0], index) < (start, here)
            and (index in tasks[here].needs or any(not devices.isdisjoint(part) for part in tasks[index].devices))
        ]
        if not ended:
            break
        here = max(ended, key=lambda index: (index in tasks[here].needs, index))
    way.reverse()
    first = min(range(len(way)), key=lambda at: (tasks[way[at]].slot, at), default=0)
    return tuple(dict.fromkeys(tasks[index].name for index in way[first:] + way[:first]))
