"""How long an iteration takes under a plan, and when everything in it runs.

`simulate` is ReaL's Algorithm 1 for any tasks; `unroll` writes several iterations of a plan as tasks; `steady_state`
finds what they settle to. All is computed in whole nanoseconds, so that ties are ties and what repeats is seen to.

Reference:
    Mei et al. 2024 (ReaL), arXiv:2406.14088, 5.1 and Algorithm 1.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Literal

from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.step_order import RUN_AHEAD, Wait, layout, step_order

TaskKind = Literal["call", "weights", "data", "load", "unload"]
"""`call` computes; `weights` brings new weights from where they were trained to where they are read, `data` outputs to
the call that needs them; `load` and `unload` bring weights from host memory and back. `data` takes time but no device:
copies run beside programs. It begins when its source has ended."""

ITERATIONS = 24
"""So many are simulated. Nearly all plans repeat after two or three."""
FIRST_SETTLED = RUN_AHEAD + 1
"""The first iteration that can be seen to repeat: only from the second on do iterations have the same tasks."""
LAST_SETTLED = ITERATIONS - 1 - RUN_AHEAD
"""The last one that calls of later iterations, which are not simulated, cannot hold up."""
NANOSECONDS = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Task:
    """Something that occupies all of its devices for a while, or takes time without any."""

    name: str
    devices: tuple[range, ...]
    """Positions of its devices; ranges may overlap. Empty: it waits for no device, and keeps none from others."""
    seconds: float
    needs: tuple[int, ...] = ()
    """Positions of the tasks that must have ended before it."""
    kind: TaskKind = "call"
    iteration: int = 0
    call: str = ""
    """The call that runs, or that it is for."""


@dataclasses.dataclass(frozen=True)
class Span:
    """When a task runs, in seconds."""

    task: Task
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What consecutive iterations settle to under a plan."""

    seconds: float
    """Of one iteration: the average where several differ."""
    period: int
    """Iterations after which everything happens again. 0: they had not settled when the simulation ended."""
    spans: tuple[Span, ...]
    """All tasks of as many consecutive iterations, from when the first of them starts. They overlap with tasks of the
    iterations before and after, which are the same so many seconds later."""
    busy: tuple[float, ...]
    """Device -> the part of the time in which it does something."""
    critical: tuple[str, ...]
    """Names of the tasks of a circle that never pauses: what has to be faster for the iteration to be faster."""


def nanoseconds(seconds: float) -> int:
    return round(float(seconds) * NANOSECONDS)


def simulate(tasks: Sequence[Task]) -> list[tuple[int, int]]:
    """ReaL's Algorithm 1: tasks in the order in which they get ready, each when all of its devices are free.

    Of tasks that get ready at the same time, the one that stands first goes first. A task that is ready keeps later
    ones off its devices, even where it cannot start yet and they could.

    Returns:
        Task -> start and end in nanoseconds.

    Raises:
        ValueError: Tasks wait for each other in a circle.
    """
    children: list[list[int]] = [[] for _ in tasks]
    missing = [len(set(task.needs)) for task in tasks]
    for index, task in enumerate(tasks):
        for need in set(task.needs):
            children[need].append(index)
    times = [(0, 0)] * len(tasks)
    ready_at = [0] * len(tasks)
    free: dict[int, int] = {}
    queue = [(0, index) for index, number in enumerate(missing) if number == 0]
    heapq.heapify(queue)
    done = 0
    while queue:
        ready, index = heapq.heappop(queue)
        task = tasks[index]
        devices = {device for part in task.devices for device in part}
        start = max(ready, max((free.get(device, 0) for device in devices), default=0))
        end = start + nanoseconds(task.seconds)
        times[index] = (start, end)
        free.update(dict.fromkeys(devices, end))
        done += 1
        for child in children[index]:
            ready_at[child] = max(ready_at[child], end)
            missing[child] -= 1
            if missing[child] == 0:
                heapq.heappush(queue, (ready_at[child], child))
    if done < len(tasks):
        circle = [task.name for task, number in zip(tasks, missing, strict=True) if number > 0]
        raise ValueError(f"simulate: tasks must not wait for each other in a circle. Got {', '.join(circle)}.")
    return times


def unroll(problem: Problem, plan: Sequence[int], iterations: int) -> tuple[Task, ...]:
    """The tasks of several iterations under a plan, those of one after those of the other.

    Before each call stand those that bring its weights, on the devices of both calls, and its inputs, on none: ReaL's
    Algorithm 1 has both wait for devices. What takes no time is left out. Readers of the same weights with the same
    layout share one task that brings them. In the first iterations the weights are there.

    A call's weights are loaded from host memory once all that it waits for is there, and brought back when it ends.
    """
    order, calls = step_order(problem), problem.calls
    chosen = [call.choices[index] for call, index in zip(calls, plan, strict=True)]
    layouts = [layout(choice) for choice in chosen]
    shared = order.first_readers(layouts, [wait.after for wait in order.waits if wait.weights])
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
        tasks.append(Task(name, devices, seconds, tuple(dict.fromkeys(needs)), kind, iteration, calls[j].name))
        return [len(tasks) - 1]

    def weights_for(wait: Wait, iteration: int) -> list[int]:
        """The task that brings the weights that a call waits for, if that takes time; added with its first reader."""
        i, j, first = wait.before, wait.after, shared[wait.after]
        seconds = problem.reallocations[i, first][plan[i], plan[first]]
        if not nanoseconds(seconds):
            return []
        if first == j:
            return add("weights", iteration, i, j, seconds, [at["call", iteration - wait.lag, i, i]])
        return [at["weights", iteration - wait.lag + order.lag(first), i, first]]

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


def steady_state(problem: Problem, plan: Sequence[int]) -> Simulation:
    """What consecutive iterations settle to under a plan.

    They have settled once two consecutive iterations repeat two earlier ones, every task later by the same time: as no
    task waits for more than the two iterations before its own, all that follows then repeats too. The period can be
    longer than an iteration, where calls of two iterations take turns on a device in another order every other time.
    Plans that have not settled after `ITERATIONS` get the average of the later half.
    """
    tasks = unroll(problem, plan, ITERATIONS)
    times = simulate(tasks)
    by_iteration: list[list[int]] = [[] for _ in range(ITERATIONS)]
    for index, task in enumerate(tasks):
        by_iteration[task.iteration].append(index)
    starts = [[times[index][0] for index in indices] for indices in by_iteration]
    last, period = _settled(starts)
    if period:
        total = starts[last][0] - starts[last - period][0]
        shown = range(last - period + 1, last + 1)
    else:
        total, shown = starts[LAST_SETTLED][0] - starts[LAST_SETTLED // 2][0], range(last, last + 1)
    seconds = total // (period or LAST_SETTLED - LAST_SETTLED // 2) / NANOSECONDS
    indices = [index for iteration in shown for index in by_iteration[iteration]]
    origin = min(times[index][0] for index in indices)
    spans = [
        Span(tasks[index], (times[index][0] - origin) / NANOSECONDS, (times[index][1] - origin) / NANOSECONDS)
        for index in indices
    ]
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
        _critical(tasks, times, by_iteration, period),
    )


def _settled(starts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The first iteration that, with the one before, repeats earlier ones, and how many iterations earlier; 0: none."""
    for last in range(FIRST_SETTLED, LAST_SETTLED + 1):
        for period in range(1, last - RUN_AHEAD + 1):
            later = starts[last][0] - starts[last - period][0]
            if all(
                start == before + later
                for iteration in (last - 1, last)
                for start, before in zip(starts[iteration], starts[iteration - period], strict=True)
            ):
                return last, period
    return LAST_SETTLED, 0


def _critical(
    tasks: Sequence[Task], times: Sequence[tuple[int, int]], by_iteration: Sequence[Sequence[int]], period: int
) -> tuple[str, ...]:
    """The tasks of a circle in which each starts when the one before ends, because it waits for it or for its devices.

    Found by going back from the end of a late iteration until a task comes that was met already, a period later.
    """
    places = {index: place for indices in by_iteration for place, index in enumerate(indices)}
    here = max(
        (index for index in by_iteration[LAST_SETTLED] if tasks[index].kind == "call"), key=lambda i: times[i][1]
    )
    way: list[int] = []
    met: dict[tuple[int, int], int] = {}
    while tasks[here].iteration > 1:
        key = (places[here], tasks[here].iteration % period if period else tasks[here].iteration)
        if key in met:
            way = way[met[key] :]
            break
        met[key] = len(way)
        way.append(here)
        start = times[here][0]
        devices = {device for part in tasks[here].devices for device in part}
        ended = [
            index
            for index, (_, end) in enumerate(times)
            if end == start
            and (times[index][0], index) < (start, here)
            and (index in tasks[here].needs or any(not devices.isdisjoint(part) for part in tasks[index].devices))
        ]
        if not ended:
            break
        here = max(ended, key=lambda index: (index in tasks[here].needs, index))
    way.reverse()
    first = min(range(len(way)), key=lambda at: (places[way[at]], at), default=0)
    return tuple(dict.fromkeys(tasks[index].name for index in way[first:] + way[:first]))
