"""Fused schedules: what is fused, that the best is found where it is known, caps, and that all find the same."""

import builtins
import itertools
import math
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from jaxrlhf.schedules.fused_schedule import fuse_quickly
from jaxrlhf.schedules.instructions import Instruction, Pipe, ScheduleError, instructions, needed
from jaxrlhf.schedules.job_shop import (
    as_schedule,
    back_and_forth,
    job_shop,
    list_schedule,
    longest_pipe_first,
    ranks,
)
from jaxrlhf.schedules.schedule import interleaved_1f1b, makespan, peak_activations, validate
from jaxrlhf.schedules.schedule_bounds import (
    added_peaks,
    lower_bound,
    serial_peak,
    serial_schedule,
)
from scripts.annealing import as_orders, peak, shorten, slim
from scripts.fused_models import (
    TrainedModel,
    fused_pipes,
    greedy_schedule,
    paper_pipes,
    serial_latency,
    shallow_serial_latency,
)
from scripts.fused_search import fuse


def model(pipeline: int, micro_batches: int, *, data=1, tensor=1, forward=1.0, backward=2.0, activation=1.0):
    return TrainedModel(data, pipeline, tensor, micro_batches, forward, backward, activation)


def shortest_of_all(pipes: tuple[Pipe, ...], cap: float = math.inf) -> float:
    """The least makespan of any orders, by trying every one. Written without anything of the search."""
    num_workers = max(max(pipe.workers) for pipe in pipes) + 1
    queues: list[list[list[Instruction]]] = [[] for _ in range(num_workers)]
    for index, pipe in enumerate(pipes):
        for stage, worker in enumerate(pipe.workers):
            for forward in (True, False):
                queues[worker].append([Instruction(index, m, stage, forward) for m in range(pipe.micro_batches)])
    follower = {needed(pipes, x): x for worker in queues for queue in worker for x in queue}
    best = math.inf
    seen: dict[tuple[tuple[int, ...], ...], list[tuple[float, ...]]] = {}

    def extend(finish, clock, heads, kept):
        nonlocal best
        left = [
            sum(
                (len(queue) - head) * pipes[queue[0].pipe].latency(queue[0].stage, forward=queue[0].forward)
                for head, queue in zip(heads[worker], queues[worker], strict=True)
            )
            for worker in range(num_workers)
        ]
        if not any(left):
            best = min(best, max(clock))
        if not any(left) or max(map(sum, zip(clock, left, strict=True))) >= best:
            return
        # what comes after depends on the clocks, and on when that finished which is needed still
        state = tuple(map(tuple, heads))
        times = (*clock, *(finish[x] for x in sorted(finish) if follower.get(x) not in finish))
        if any(all(a <= b for a, b in zip(old, times, strict=True)) for old in seen.get(state, ())):
            return
        seen.setdefault(state, []).append(times)
        for worker in range(num_workers):
            for kind, queue in enumerate(queues[worker]):
                if heads[worker][kind] == len(queue):
                    continue
                x = queue[heads[worker][kind]]
                before = needed(pipes, x)
                if before is not None and before not in finish:
                    continue
                pipe = pipes[x.pipe]
                size = pipe.kept(x.stage) if x.forward else -pipe.kept(x.stage)
                if kept[worker] + size > cap + 1e-9:
                    continue
                end = max(clock[worker], finish[before] if before is not None else 0) + pipe.latency(
                    x.stage, forward=x.forward
                )
                extend(
                    {**finish, x: end},
                    [end if i == worker else each for i, each in enumerate(clock)],
                    [[h + (i == worker and k == kind) for k, h in enumerate(row)] for i, row in enumerate(heads)],
                    [each + size * (i == worker) for i, each in enumerate(kept)],
                )

    extend({}, [0.0] * num_workers, [[0] * len(each) for each in queues], [0.0] * num_workers)
    return best


TINY = [
    fused_pipes(model(2, 2, forward=2, backward=4), model(1, 1, data=2, forward=3, backward=5)),
    fused_pipes(model(2, 2, forward=3, backward=5), model(2, 2, forward=1, backward=2)),
    fused_pipes(model(2, 3, forward=1, backward=2), model(2, 3, forward=1, backward=1)),
    fused_pipes(model(3, 2, forward=1, backward=2), model(3, 2, forward=1, backward=2)),
]


@pytest.mark.parametrize("pipes", TINY, ids=range(len(TINY)))
def test_the_shortest_schedule_of_all_is_found_where_all_can_be_tried(pipes):
    shortest = shortest_of_all(pipes)
    found = fuse(pipes, moves=400, compiled=False)
    assert found.latency == shortest >= lower_bound(pipes)


@pytest.mark.parametrize("pipes", TINY[:2], ids=range(2))
def test_under_a_cap_too(pipes):
    cap = serial_peak(pipes)
    shortest = shortest_of_all(pipes, cap)
    found = fuse(pipes, memory_cap=cap, moves=400, compiled=False)
    validate(found.schedule, memory_cap=cap)
    assert found.latency == shortest


def test_what_the_paper_compares_with():
    """Table 3: speedups over serial 1F1B of 1F1B+, the greedy schedule, and the lower bound."""
    speedups = {}
    for first, second, micro_batches in [(8, 4, 8), (8, 8, 8), (8, 8, 32)]:
        pipes = paper_pipes(first, second, micro_batches)
        serial = serial_latency(pipes)
        speedups[first, second, micro_batches] = (
            round(serial / shallow_serial_latency(pipes), 2),
            round(serial / lower_bound(pipes), 2),
        )
    assert speedups == {(8, 4, 8): (1.1, 1.37), (8, 8, 8): (1.07, 1.4), (8, 8, 32): (1.03, 1.17)}
    pipes = paper_pipes(8, 4, 8)
    assert max(peak_activations(greedy_schedule(pipes))) / serial_peak(pipes) == pytest.approx(1.51, abs=0.005)


def test_the_lower_bound_is_that_of_its_definition():
    pipes = paper_pipes(8, 4, 16)
    workers = []
    for worker in range(8):
        place = 3 - worker % 4  # of the small model's stage on this worker
        arrives = min(worker * 5, place * 4)
        leaves = min(worker * 10, place * 8)
        workers.append(arrives + 16 * 15 + 8 * 12 + leaves)
    assert lower_bound(pipes) == max(workers) == 372
    assert lower_bound(paper_pipes(8, 4, 8)) == (8 + 7) * 15  # the large model alone takes as long
    assert lower_bound(interleaved_1f1b(4, 2, 4).pipes) == makespan(interleaved_1f1b(4, 2, 4))
    assert lower_bound([Pipe((0, 1, 2), 4, 2, None)]) == 12


def test_serial_is_one_model_after_another():
    pipes = paper_pipes(8, 4, 8)
    assert serial_latency(pipes) == (8 + 7) * 15 + (4 + 3) * 12
    schedule = serial_schedule(pipes)
    validate(schedule)
    assert makespan(schedule) <= serial_latency(pipes)
    assert serial_peak(pipes) == max(peak_activations(schedule)) == 8 * 1.95
    single = serial_schedule(interleaved_1f1b(4, 2, 8).pipes)
    assert single == interleaved_1f1b(4, 2, 8) and serial_latency(single.pipes) == makespan(single)
    assert serial_schedule(interleaved_1f1b(3, 1, 5).pipes) == interleaved_1f1b(3, 1, 5)
    with pytest.raises(
        ScheduleError, match=r"workers of pipe 0: must go over its workers in rounds. Got \(0, 1, 1, 0\)"
    ):
        serial_schedule([Pipe((0, 1, 1, 0), 2)])


def test_stages_are_merged_and_groups_are_coprime():
    pipes = fused_pipes(model(4, 6, tensor=4, data=3), model(12, 9, tensor=2, data=2))
    assert [pipe.workers for pipe in pipes] == [
        *[tuple(range(4 * k, 4 * k + 4)) for k in range(3)],
        *[tuple(range(6 * k + 5, 6 * k - 1, -1)) for k in range(2)],
    ]
    assert [pipe.model for pipe in pipes] == [0, 0, 0, 1, 1]
    assert [pipe.micro_batches for pipe in pipes] == [6, 6, 6, 9, 9]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (model(0, 1), model(1, 1), r"pipeline of the first model: must be at least 1. Got 0"),
        (model(2, 2), model(2, 0), r"micro_batches of the second model: must be at least 1. Got 0"),
        (model(4, 4), model(2, 2), r"must be trained on equally many devices. Got .* = 4 for the first and 2"),
        (model(2, 2, tensor=3), model(3, 2, tensor=2), r"one tensor degree must divide the other. Got 3 and 2"),
        (
            model(3, 2, tensor=4, data=1),
            model(3, 2, tensor=2, data=2),
            r"pipeline of the second model: with tensor=2 beside 4, every 2 stages become one, .* Got 3. Use 2 or 4",
        ),
        (model(4, 4), model(2, 4, data=2), r"must have the same batch. Got 1 x 4 .* and 2 x 4 .* in the ratio 2 to 1"),
    ],
)
def test_models_that_do_not_fit_say_so(first, second, message):
    with pytest.raises(ScheduleError, match=message):
        fused_pipes(first, second)


def test_a_memory_cap_is_kept_or_refused():
    pipes = paper_pipes(8, 8, 8)
    serial = serial_peak(pipes)
    tight = fuse(pipes, memory_cap=serial, moves=0, compiled=False)
    validate(tight.schedule, memory_cap=serial)
    assert tight.latency <= makespan(serial_schedule(pipes))
    with pytest.raises(ScheduleError, match=r"memory_cap of a fused schedule: must leave room .* keeps 15.6. Got 15.5"):
        fuse(pipes, memory_cap=15.5)


@pytest.mark.parametrize("settings", [dict(moves=-1), dict(processes=0)])
def test_searches_that_cannot_be_say_so(settings):
    with pytest.raises(ScheduleError, match=r"moves and processes of a search: must be at least 0 and 1"):
        fuse(TINY[0], **settings)


HARD = fused_pipes(
    model(4, 6, forward=3, backward=5, activation=1.5), model(2, 3, data=2, forward=2, backward=5, activation=2)
)
"""Reaches neither the lower bound nor the memory of 1F1B at once, so that all seeds are asked."""


def test_the_result_depends_on_seeds_alone():
    one = fuse(HARD, seeds=(1, 2), moves=300, compiled=False)
    assert fuse(HARD, seeds=(1, 2), moves=300, compiled=False) == one
    assert fuse(HARD, seeds=(1, 2), moves=300, processes=2, compiled=False) == one
    shop = job_shop(HARD)
    start = list_schedule(shop, ranks(shop, longest_pipe_first))
    assert start is not None
    shortened = {
        str(shorten(shop, start.orders, cap=2**62, target=0, moves=300, seed=seed, compiled=False))
        for seed in (1, 2, 3)
    }
    assert len(shortened) == 3


def test_compiled_or_not_all_is_the_same():
    pytest.importorskip("numba")
    shop = job_shop(HARD)
    start = list_schedule(shop, ranks(shop, longest_pipe_first))
    assert start is not None
    found = []
    for compiled in (True, False):
        settings: dict[str, Any] = dict(moves=3000, seed=5, compiled=compiled)
        orders, span = shorten(shop, start.orders, cap=peak(shop, start.orders), target=0, **settings)
        slim_orders, top = slim(shop, orders, floor=0, limit=span + 3, **settings)
        found.append((orders, span, slim_orders, top))
    assert found[0] == found[1]
    assert fuse(HARD, moves=500, compiled=True) == fuse(HARD, moves=500, compiled=False)


def test_what_the_rounds_say_is_so():
    shop = job_shop(HARD)
    start = list_schedule(shop, ranks(shop, longest_pipe_first))
    assert start is not None
    assert start.span == makespan(as_schedule(shop, start.orders))
    cap = peak(shop, start.orders)
    orders, span = shorten(shop, start.orders, cap=cap, target=0, moves=2000, seed=1, compiled=False)
    schedule = as_schedule(shop, orders)
    validate(schedule, memory_cap=cap * shop.memory_unit)
    assert as_orders(shop, schedule) == orders
    assert span == makespan(schedule) < start.span
    orders, top = slim(shop, orders, floor=0, limit=span, moves=5000, seed=1, compiled=False)
    schedule = as_schedule(shop, orders)
    validate(schedule)
    assert makespan(schedule) <= span
    assert max(peak_activations(schedule)) == pytest.approx(top * shop.memory_unit)
    assert top < cap


def test_list_schedules_keep_caps_and_limits_and_get_no_longer_back_and_forth():
    shop = job_shop(HARD)
    cap = math.floor(1.3 * serial_peak(HARD) / shop.memory_unit)
    start = list_schedule(shop, ranks(shop, longest_pipe_first), cap=cap)
    assert start is not None and peak(shop, start.orders) <= cap
    found = back_and_forth(shop, start, cap=cap)
    for each in (start, found):
        schedule = as_schedule(shop, each.orders)
        validate(schedule, memory_cap=cap * shop.memory_unit)
        assert each.span == makespan(schedule)
    assert found.span < start.span
    # a stage keeps no more micro-batches than there are stages from there to the last, as in 1F1B
    limited = list_schedule(shop, ranks(shop, longest_pipe_first), ahead=0)
    assert limited is not None
    most = (4 * 1.5 + 1 * 2, 3 * 1.5 + 2 * 2, 2 * 1.5 + 1 * 2, 1 * 1.5 + 2 * 2)
    assert all(a <= b for a, b in zip(peak_activations(as_schedule(shop, limited.orders)), most, strict=True))
    assert list_schedule(shop, ranks(shop, longest_pipe_first), cap=0) is None


@pytest.mark.parametrize("unit", [1.0, 0.001, 1 / 3, 1e-7, 1e6])
def test_latencies_of_any_unit_give_the_same(unit):
    def scaled(pipe: Pipe) -> Pipe:
        assert pipe.backward is not None
        return Pipe(pipe.workers, pipe.micro_batches, pipe.forward * unit, pipe.backward * unit, pipe.activation)

    pipes = tuple(map(scaled, TINY[1]))
    found = fuse(pipes, moves=500, compiled=False)
    assert found.latency == pytest.approx(shortest_of_all(TINY[1]) * unit)
    assert found.latency == pytest.approx(makespan(found.schedule))


def test_quickly_is_quick_and_needs_no_numba(monkeypatch):
    real_import = builtins.__import__

    def without_numba(name, *rest, **named):
        if name == "numba":
            raise ImportError(name)
        return real_import(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_numba)
    pipes = fused_pipes(model(4, 8, forward=3, backward=6), model(2, 4, data=2, forward=2, backward=4))
    begin = time.process_time()
    found = fuse_quickly(pipes)
    assert time.process_time() - begin < 10  # of this process alone; takes about one
    validate(found)
    assert makespan(found) < serial_latency(pipes)
    assert fuse_quickly(pipes) == found
    assert fuse(pipes, moves=10) == fuse(pipes, moves=10, compiled=False)


@pytest.mark.parametrize("instance", list(itertools.product([(8, 4), (8, 8), (16, 8), (16, 16)], [1, 2, 4])), ids=str)
def test_quickly_finds_the_shortest_paper_pipes_s_instances_in_the_memory_of_both(instance):
    """Within what both models keep by themselves every one reaches the lower bound; within 1.25 times the larger
    alone, most do."""
    (first, second), times = instance
    pipes = paper_pipes(first, second, times * first)
    cap = added_peaks(pipes)
    found = fuse_quickly(pipes, memory_cap=cap)
    validate(found, memory_cap=cap)
    assert makespan(found) == lower_bound(pipes)
    if len(list(instructions(pipes))) <= 1024:
        tight = fuse_quickly(pipes, memory_cap=1.25 * serial_peak(pipes))
        validate(tight, memory_cap=1.25 * serial_peak(pipes))
        assert makespan(tight) <= 1.05 * lower_bound(pipes)


def test_every_process_finds_the_same_schedule():
    """Whatever the seed of its hashes is."""
    code = (
        "from jaxrlhf.schedules.fused_schedule import fuse_quickly\n"
        "from jaxrlhf.schedules.schedule_bounds import serial_peak\n"
        "from scripts.fused_models import paper_pipes\n"
        "pipes = paper_pipes(16, 8, 16)\n"
        "print(fuse_quickly(pipes, memory_cap=1.1 * serial_peak(pipes)))"
    )
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        one = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        found.append(one.stdout.strip())
    pipes = paper_pipes(16, 8, 16)
    here = fuse_quickly(pipes, memory_cap=1.1 * serial_peak(pipes))
    assert found == [str(here)] * 2


UNEVEN = (Pipe((0, 1), 3, (2, 1), (4, 7), (2, 0.5)), Pipe((1, 0), 3, (1, 1), (2, 5), (1, 0.5), model=1))
"""Stages differ."""


def test_the_shortest_is_found_where_stages_differ_too():
    cap = added_peaks(UNEVEN)
    assert makespan(fuse_quickly(UNEVEN)) == shortest_of_all(UNEVEN)
    assert makespan(fuse_quickly(UNEVEN, memory_cap=cap)) == shortest_of_all(UNEVEN, cap)


def test_what_keeps_nothing_can_be_fused():
    inference = (Pipe((0, 1, 2), 3, 2, None), Pipe((2, 1, 0), 3, 1, None, model=1))
    found = fuse(inference, memory_cap=0, moves=200, compiled=False)
    validate(found.schedule, memory_cap=0)
    assert found.lower_bound <= found.latency < found.serial_latency == 10 + 5
    weightless = (Pipe((0, 1), 3, 0, 1, 0), Pipe((1, 0), 3, 1, 0, 0, model=1))
    validate(fuse(weightless, memory_cap=0, moves=200, compiled=False).schedule)


def test_forward_only_pipes_and_chunks_can_be_fused():
    pipes = (Pipe((0, 1, 0, 1), 4, 1, 2), Pipe((1, 0), 4, 1, None, model=1))
    found = fuse(pipes, moves=500, compiled=False)
    validate(found.schedule)
    assert found.latency < serial_latency(pipes) == found.serial_latency == 27 + 5
    assert found.peak == max(peak_activations(found.schedule))


def test_no_pipes_at_all():
    for search in (fuse, fuse_quickly):
        with pytest.raises(ScheduleError, match="pipes of a fused schedule: must be at least one"):
            search(())
