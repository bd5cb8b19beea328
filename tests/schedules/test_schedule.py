"""Schedules: formulas, a simulation in small time steps as oracle, deadlocks, and what is refused."""

import dataclasses
import json
import random
from typing import Any

import pytest

from jaxrlhf.schedules.instructions import Instruction, Pipe, Schedule, ScheduleError, instructions, needed, spans
from jaxrlhf.schedules.schedule import (
    bubble_fraction,
    bubble_warning,
    forward_only,
    from_data,
    gpipe,
    interleaved_1f1b,
    makespan,
    peak_activations,
    to_data,
    topological_order,
    validate,
)
from jaxrlhf.schedules.schedule_bounds import (
    added_peaks,
    lower_bound,
    serial_schedule,
)
from scripts.fused_models import greedy_schedule, serial_latency
from scripts.schedule_picture import memory_curve

SHAPES = [(1, 1), (2, 1), (2, 5), (3, 2), (4, 4), (4, 8), (5, 7)]


def random_schedule(seed: int) -> Schedule:
    """Two or three pipes in any directions over up to four workers, their instructions in a random possible order."""
    draw = random.Random(seed)
    num_workers = draw.randint(1, 4)
    pipes = tuple(
        Pipe(
            tuple(draw.choices(range(num_workers), k=draw.randint(1, 5))),
            draw.randint(1, 4),
            draw.randint(0, 3),
            draw.choice([None, 1, 2, 5]),
            draw.choice([1, 1.5, 0.1]),
        )
        for _ in range(draw.randint(1, 3))
    )
    orders: list[list[Instruction]] = [[] for _ in range(num_workers)]
    left = list(instructions(pipes))
    done: set[Instruction | None] = {None}
    while left:
        x = draw.choice([each for each in left if needed(pipes, each) in done])
        left.remove(x)
        done.add(x)
        orders[pipes[x.pipe].workers[x.stage]].append(x)
    return Schedule(pipes, tuple(map(tuple, orders)))


def simulated(schedule: Schedule) -> dict[Instruction, tuple[int, int]]:
    """Starts and finishes, by looking at every worker in every unit of time. Written from the paper's words alone."""
    started: dict[Any, int] = {}
    finished: dict[Any, int] = {}
    queues = [[(*x[:3], "F" if x.forward else "B") for x in order] for order in schedule.orders]
    busy_until = [0] * len(queues)
    time = 0
    while any(queues):
        moved = True
        while moved:  # instructions that take no time let others start at the same time
            moved = False
            for worker, queue in enumerate(queues):
                if not queue or busy_until[worker] > time:
                    continue
                pipe_index, micro_batch, stage, kind = queue[0]
                pipe = schedule.pipes[pipe_index]
                if kind == "F":
                    arrived = stage == 0 or finished.get((pipe_index, micro_batch, stage - 1, "F"), time + 1) <= time
                    takes = pipe.forward
                else:
                    upper = (
                        (micro_batch, stage + 1, "B") if stage + 1 < len(pipe.workers) else (micro_batch, stage, "F")
                    )
                    arrived = finished.get((pipe_index, *upper), time + 1) <= time
                    takes = pipe.backward
                if arrived:
                    assert isinstance(takes, int)
                    started[queue[0]], finished[queue[0]] = time, time + takes
                    busy_until[worker] = time + takes
                    queue.pop(0)
                    moved = True
        time += 1
    return {
        Instruction(pipe, micro_batch, stage, kind == "F"): (start, finished[pipe, micro_batch, stage, kind])
        for (pipe, micro_batch, stage, kind), start in started.items()
    }


@pytest.mark.parametrize("seed", range(30))
def test_spans_equal_a_simulation_in_units_of_time(seed):
    schedule = random_schedule(seed)
    validate(schedule)
    expected = simulated(schedule)
    assert spans(schedule) == expected
    assert makespan(schedule) == max(finish for _, finish in expected.values())


@pytest.mark.parametrize("seed", range(30))
def test_topological_order_keeps_needs_workers_and_starts(seed):
    schedule = random_schedule(seed)
    order = topological_order(schedule)
    place = {x: index for index, x in enumerate(order)}
    assert sorted(order) == sorted(instructions(schedule.pipes))
    for x in order:
        before = needed(schedule.pipes, x)
        assert before is None or place[before] < place[x]
    for worker_order in schedule.orders:
        assert sorted(worker_order, key=place.__getitem__) == list(worker_order)
    starts = [spans(schedule)[x][0] for x in order]
    assert starts == sorted(starts)


@pytest.mark.parametrize("seed", range(10))
def test_memory_is_that_of_forwards_begun_and_backwards_not_ended(seed):
    schedule = random_schedule(seed)
    times = simulated(schedule)
    peaks = [0.0] * len(schedule.orders)
    for worker, curve in enumerate(memory_curve(schedule)):
        pipes = schedule.pipes
        for x in schedule.orders[worker]:
            kept = 0.0
            for y in schedule.orders[worker][: schedule.orders[worker].index(x) + 1]:
                if y.forward and pipes[y.pipe].backward is not None:
                    backward = y._replace(forward=False)
                    ended = schedule.orders[worker].index(backward) <= schedule.orders[worker].index(x)
                    kept += 0 if ended else pipes[y.pipe].kept(y.stage)
            assert (times[x][0 if x.forward else 1], pytest.approx(kept)) in curve
            peaks[worker] = max(peaks[worker], kept)
    assert peak_activations(schedule) == pytest.approx(peaks)


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
def test_gpipe_and_1f1b_have_the_bubbles_of_the_formula(stages, micro_batches):
    for schedule in (gpipe(stages, micro_batches), interleaved_1f1b(stages, 1, micro_batches, forward=2, backward=3)):
        validate(schedule)
        assert bubble_fraction(schedule) == pytest.approx((stages - 1) / (stages - 1 + micro_batches))
    assert makespan(interleaved_1f1b(stages, 1, micro_batches)) == (micro_batches + stages - 1) * 3
    assert peak_activations(gpipe(stages, micro_batches, activation=1.5)) == (1.5 * micro_batches,) * stages
    expected = tuple(min(stages - worker, micro_batches) for worker in range(stages))
    assert peak_activations(interleaved_1f1b(stages, 1, micro_batches)) == expected


@pytest.mark.parametrize(("stages", "chunks", "groups"), [(2, 2, 1), (2, 3, 4), (4, 2, 1), (4, 2, 2), (3, 4, 3)])
def test_interleaved_1f1b_has_the_bubbles_of_the_formula(stages, chunks, groups):
    schedule = interleaved_1f1b(stages, chunks, groups * stages)
    validate(schedule)
    expected = (stages - 1) / (stages - 1 + chunks * groups * stages)
    assert bubble_fraction(schedule) == pytest.approx(expected)
    most = [2 * (stages - worker) + (chunks - 1) * stages - 1 for worker in range(stages)]
    assert peak_activations(schedule) == tuple(min(each, chunks * groups * stages) for each in most)


def test_interleaved_1f1b_is_the_one_of_the_paper():
    """The rows of the devices in figure 4 of arXiv:2104.04473 (bottom), for the first and the last of 4 devices."""
    schedule = interleaved_1f1b(4, 2, 8)

    def row(worker: int, count: int) -> str:
        letters = {(0, True): "F", (1, True): "G", (0, False): "B", (1, False): "C"}
        return " ".join(
            f"{letters[x.stage // 4, x.forward]}{x.micro_batch + 1}" for x in schedule.orders[worker][:count]
        )

    assert row(0, 16) == "F1 F2 F3 F4 G1 G2 G3 G4 F5 F6 F7 C1 F8 C2 G5 C3"
    assert row(3, 12) == "F1 F2 F3 F4 G1 C1 G2 C2 G3 C3 G4 C4"


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_any_number_of_micro_batches_can_be_interleaved(chunks):
    for stages in range(1, 6):
        for micro_batches in range(1, 14):
            schedule = interleaved_1f1b(stages, chunks, micro_batches)
            validate(schedule)
            whole = -(-micro_batches // stages) * stages
            assert makespan(schedule) <= makespan(interleaved_1f1b(stages, chunks, whole))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (3, 3), (4, 8), (4, 6)])
def test_forward_only_fills_and_drains_once(stages, chunks, micro_batches):
    schedule = forward_only(stages, chunks, micro_batches)
    validate(schedule, memory_cap=0)
    assert all(x.forward for order in schedule.orders for x in order)
    if micro_batches % stages == 0:
        assert makespan(schedule) == stages - 1 + chunks * micro_batches


def test_few_micro_batches_are_warned_of_with_their_bubbles():
    assert bubble_warning(4, 1, 4) is None
    assert bubble_warning(4, 2, 8) is None
    message = bubble_warning(4, 1, 1)
    assert message is not None and message.startswith("1 micro-batch for 4 pipeline stages: the devices wait 75%")
    assert f"{bubble_fraction(interleaved_1f1b(8, 2, 3)):.0%}" in (bubble_warning(8, 2, 3) or "")


def test_a_schedule_survives_json():
    for schedule in (random_schedule(3), serial_schedule(UNEVEN)):
        assert from_data(json.loads(json.dumps(to_data(schedule)))) == schedule


UNEVEN = (Pipe((0, 1, 2), 3, (2, 3, 0), (4, 6, 9), (1, 2.5, 0.5)), Pipe((2, 1, 0), 2, 1, 2, 1, model=1))
"""The stages of one differ."""


def test_stages_may_differ():
    """Each has a latency and a size of its own, in all that a schedule is measured by."""
    first, second = UNEVEN
    assert [first.work(stage) for stage in range(3)] == [6, 9, 9] and second.work(2) == 3
    alone = serial_schedule([first])
    found = spans(alone)
    assert found[Instruction(0, 0, 1, True)] == (2, 5) and found[Instruction(0, 0, 2, True)] == (5, 5)
    assert makespan(alone) == serial_latency([first]) == 3 * 9 + 6 + 9
    assert lower_bound([first]) == makespan(alone)
    assert peak_activations(alone) == (3, 5, 0.5) and added_peaks(UNEVEN) == 5 + 2
    assert lower_bound(UNEVEN) <= makespan(greedy_schedule(UNEVEN))
    with pytest.raises(ScheduleError, match="forward of a pipe: must be one number, or one for each of its 2 stages"):
        Pipe((0, 1), 1, (1, 2, 3))


def swapped(schedule: Schedule, worker: int, first: Instruction, second: Instruction) -> Schedule:
    exchange = {first: second, second: first}
    orders = list(schedule.orders)
    orders[worker] = tuple(exchange.get(x, x) for x in orders[worker])
    return dataclasses.replace(schedule, orders=tuple(orders))


def test_a_deadlock_names_its_circle():
    two_ways = Schedule(
        (Pipe((0, 1), 1, 1, None), Pipe((1, 0), 1, 1, None)),
        (
            (Instruction(1, 0, 1, True), Instruction(0, 0, 0, True)),
            (Instruction(0, 0, 1, True), Instruction(1, 0, 0, True)),
        ),
    )
    with pytest.raises(ScheduleError) as caught:
        validate(two_ways)
    message = str(caught.value)
    assert "workers must not wait for one another in a circle" in message
    one = "worker 0 waits before the forward of micro-batch 0 on stage 1 of pipe 1 for the forward of micro-batch 0 on "
    assert one + "stage 0 of pipe 1" in message
    assert "worker 1 waits before the forward of micro-batch 0 on stage 1 of pipe 0" in message
    assert message.endswith("Let each worker run what another one waits for before what it waits for itself.")


def test_a_backward_before_its_forward_is_a_deadlock_of_one_worker():
    schedule = interleaved_1f1b(2, 1, 2)
    wrong = swapped(schedule, 1, Instruction(0, 0, 1, True), Instruction(0, 0, 1, False))
    for function in (validate, makespan, topological_order):
        with pytest.raises(
            ScheduleError, match="worker 1 waits before the backward of micro-batch 0 on stage 1 of pipe 0"
        ):
            function(wrong)


def test_every_instruction_stands_once_on_its_worker():
    schedule = interleaved_1f1b(2, 1, 2)
    first, second = schedule.orders
    for orders, message in [
        ((first[:-1], second), r"must stand once. Got none that is the backward of micro-batch 1 on stage 0 of pipe 0"),
        (
            (first, (*second, second[0])),
            r"Worker 1 of a schedule: every instruction .* on stage 1 of pipe 0 a second time",
        ),
        ((first, (*second, Instruction(0, 2, 1, True))), r"micro-batch 2 on stage 1 of pipe 0, which they do not have"),
        ((first, (*second, Instruction(7, 0, 1, True))), r"pipe 7, which they do not have"),
        (((*first, second[0]), second[1:]), r"Worker 0 of a schedule: must run its own stages. Got .*, of worker 1"),
        ((first,), r"every worker of its pipes must have an order. Got 1 orders for workers 0 to 1"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            validate(Schedule(schedule.pipes, orders))
    with pytest.raises(ScheduleError, match=r"what an instruction needs must be in it. Got .* and nowhere"):
        makespan(Schedule(schedule.pipes, ((), second)))


def test_the_memory_cap_holds_on_every_worker():
    schedule = interleaved_1f1b(4, 1, 8, activation=1.5)
    validate(schedule, memory_cap=6)
    with pytest.raises(ScheduleError, match=r"Worker 0 of a schedule: must keep activations of at most memory_cap=5.9"):
        validate(schedule, memory_cap=5.9)


@pytest.mark.parametrize(
    ("pipe", "message"),
    [
        (dict(workers=()), "workers of a pipe: must be one worker or more"),
        (dict(workers=(0, -1)), "workers of a pipe: must be one worker or more"),
        (dict(workers=(0,), micro_batches=0), "micro_batches of a pipe: must be at least 1. Got 0"),
        (dict(workers=(0,), forward=-1), "forward of a pipe: must be a number that is not negative. Got -1"),
        (dict(workers=(0,), backward=float("nan")), "backward of a pipe: must be a number .* Got nan"),
        (dict(workers=(0,), activation=float("inf")), "activation of a pipe: must be a number .* Got inf"),
    ],
)
def test_pipes_that_cannot_be_say_so(pipe, message):
    with pytest.raises(ScheduleError, match=message):
        Pipe(**{"micro_batches": 1, **pipe})


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_counts_start_at_one(counts):
    for build in (interleaved_1f1b, forward_only):
        with pytest.raises(ScheduleError, match=r"of a schedule: must be at least 1. Got 0"):
            build(*counts)
    if counts[1]:
        with pytest.raises(ScheduleError, match=r"of a schedule: must be at least 1. Got 0"):
            gpipe(counts[0], counts[2])


ONE = {"workers": [0], "micro_batches": 1}


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({}, "no 'version'"),
        ([], "list indices must be"),
        ({"version": 1, "pipes": [], "orders": []}, "version must be 2. Got 1."),
        ({"version": 2, "pipes": [ONE]}, "no 'orders'"),
        (
            {"version": 2, "pipes": [ONE], "orders": ["F0.0.0 B0.0"]},
            "must be such as F0.1.2. Got 'B0.0'",
        ),
        ({"version": 2, "pipes": [ONE], "orders": [3]}, "no attribute 'split'"),
        ({"version": 2, "pipes": [{}], "orders": []}, "missing 2 required positional arguments"),
        ({"version": 2, "pipes": [{**ONE, "workers": [0.0]}], "orders": []}, "workers: must be whole numbers. Got 0.0"),
        ({"version": 2, "pipes": [{**ONE, "forward": ["1"]}], "orders": []}, "forward: must be numbers. Got '1'"),
        ({"version": 2, "pipes": [ONE], "orders": [], "order": []}, "unknown key 'order'"),
    ],
)
def test_data_that_are_no_schedule_say_so(data, fault):
    with pytest.raises(ScheduleError, match="Data of a schedule: must have 'version', 'pipes' and 'orders'") as error:
        from_data(data)
    assert fault in str(error.value)


def test_data_of_a_schedule_that_deadlocks_say_so():
    schedule = interleaved_1f1b(2, 1, 2)
    data = to_data(swapped(schedule, 1, Instruction(0, 0, 1, True), Instruction(0, 0, 1, False)))
    with pytest.raises(ScheduleError, match="in a circle"):
        from_data(data)
