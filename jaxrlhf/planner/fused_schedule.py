"""Fused pipelines: two models trained at once on the same nodes in opposite directions, each in the other's bubbles.

`fused_pipes` says what is to be fused, `fuse` finds a schedule. Reference: Zhong et al. 2024 (RLHFuse),
arXiv:2409.13221, 5.2.
"""

import contextlib
import functools
import math
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxrlhf.planner.annealing import numba_is_there, shorten, slim
from jaxrlhf.planner.instructions import Pipe, Schedule, ScheduleError
from jaxrlhf.planner.job_shop import (
    JobShop,
    Limit,
    Orders,
    as_orders,
    as_schedule,
    job_shop,
    larger_model_first,
    list_schedule,
    longest_pipe_first,
    longest_way_first,
    peak,
)
from jaxrlhf.planner.schedule import makespan, peak_activations
from jaxrlhf.planner.schedule_bounds import lower_bound, serial_latency, serial_peak, serial_schedule

MOVES = 400_000
"""Moves of annealing in each of a seed's rounds, where nobody says how many."""
_SLIM = 5
"""How many times as many moves the round for memory has, most of which cost next to nothing."""
_NO_CAP = 2**62
_PRIORITIES = (longest_way_first, longest_pipe_first, larger_model_first)
_LIMITS: tuple[Limit | None, ...] = (
    None,
    lambda below: -(-3 * below // 2),
    lambda below: below + 3,
    lambda below: below + 1,
)
_CAPS = (1.3, 2.0, 1.6, math.inf)
"""The memory that orders to start from may take, in peaks of serial 1F1B. Seeds take them in turn."""


@dataclass(frozen=True)
class TrainedModel:
    """How a model is trained by itself.

    Attributes:
        data: Data-parallel degree: how many pipeline groups there are.
        pipeline: Stages of a group.
        tensor: Tensor degree: devices of a stage.
        micro_batches: Micro-batches that each pipeline group processes.
        forward, backward: Latencies of one micro-batch on one stage.
        activation: Memory that a device keeps for a micro-batch on one stage from its forward to its backward.
    """

    data: int
    pipeline: int
    tensor: int
    micro_batches: int
    forward: float
    backward: float
    activation: float


@dataclass(frozen=True)
class FusedResult:
    """A fused schedule, and what it is measured by.

    Attributes:
        schedule: It, valid.
        latency: Its makespan.
        lower_bound: Below which no makespan can be.
        peak: The most activation memory that a node keeps.
        serial_latency: That of the models trained one after another by 1F1B.
        serial_peak: The peak of the same.
    """

    schedule: Schedule
    latency: float
    lower_bound: float
    peak: float
    serial_latency: float
    serial_peak: float


def fused_pipes(first: TrainedModel, second: TrainedModel) -> tuple[Pipe, ...]:
    """The pipes of one fused unit: groups of the first model upwards, groups of the second downwards, over N nodes.

    If one tensor degree is s times the other, every s consecutive stages of the model with the smaller one become one,
    on s times the devices: with s times the layers and a tensor degree s times as large, it is taken to have the same
    latency and the same memory for each device. N1 and N2 stages then need K1 and K2 groups, coprime, on N nodes:

        K1 * N1 = K2 * N2 = N        K1 * M1 = K2 * M2

    The whole training is data / K such units beside one another.

    Raises:
        ScheduleError: The degrees or the micro-batches do not fit.

    Reference:
        Zhong et al. 2024, arXiv:2409.13221, 5.2.
    """
    for name, model in (("first", first), ("second", second)):
        for key in ("data", "pipeline", "tensor", "micro_batches"):
            if getattr(model, key) < 1:
                raise ScheduleError(
                    f"{key} of the {name} model: must be at least 1. Got {getattr(model, key)}. Use 1 or more."
                )
    devices = [model.data * model.pipeline * model.tensor for model in (first, second)]
    if devices[0] != devices[1]:
        raise ScheduleError(
            f"Fused models: must be trained on equally many devices. Got data * pipeline * tensor = {devices[0]} for the "
            f"first and {devices[1]} for the second. Raise the data degree of the one with fewer."
        )
    stages = []
    for name, model, other in (("first", first, second), ("second", second, first)):
        larger = max(model.tensor, other.tensor)
        if larger % model.tensor:
            raise ScheduleError(
                f"Fused models: one tensor degree must divide the other. Got {first.tensor} and {second.tensor}. "
                "Use powers of two."
            )
        merged = larger // model.tensor
        if model.pipeline % merged:
            raise ScheduleError(
                f"pipeline of the {name} model: with tensor={model.tensor} beside {other.tensor}, every {merged} stages "
                f"become one, so {merged} must divide them. Got {model.pipeline}. "
                f"Use {model.pipeline // merged * merged or merged} or {-(-model.pipeline // merged) * merged}."
            )
        stages.append(model.pipeline // merged)
    num_nodes = math.lcm(*stages)
    groups = [num_nodes // each for each in stages]
    micro_batches = [count * model.micro_batches for count, model in zip(groups, (first, second), strict=True)]
    if micro_batches[0] != micro_batches[1]:
        raise ScheduleError(
            f"Fused models: must have the same batch. Got {groups[0]} x {first.micro_batches} micro-batches of the first "
            f"and {groups[1]} x {second.micro_batches} of the second in a unit of {num_nodes} nodes. Choose micro_batches "
            f"in the ratio {groups[1]} to {groups[0]}."
        )
    pipes = []
    for index, (model, count, size) in enumerate(zip((first, second), groups, stages, strict=True)):
        for group in range(count):
            nodes = tuple(range(group * size, (group + 1) * size))
            pipes.append(
                Pipe(
                    nodes[:: -1 if index else 1],
                    model.micro_batches,
                    model.forward,
                    model.backward,
                    model.activation,
                    index,
                )
            )
    return tuple(pipes)


def fuse(
    pipes: Sequence[Pipe],
    *,
    memory_cap: float | None = None,
    seeds: Sequence[int] = range(8),
    moves: int = MOVES,
    processes: int = 1,
    compiled: bool = True,
) -> FusedResult:
    """A short schedule of several pipes that keeps little memory.

    List schedules of several priorities are made first. Each seed then anneals one of them for latency, and what it
    finds for the peak of activation memory, at the same latency. The best is the shortest one, then the one that keeps
    the least. Once a seed has found one as short as the lower bound that keeps no more than serial 1F1B, later ones are
    not asked.

    The result depends on what is given here alone: not on `processes`, `compiled`, or how fast anything is.

    Args:
        memory_cap: The most activation memory that a node may keep.
        seeds: Of the annealing. None at all: list schedules only.
        moves: How many exchanges each seed tries in each of its rounds.
        processes: How many seeds are tried at once.
        compiled: Compile with numba, if it is installed. That takes seconds the first time, and is far faster after.

    Raises:
        ScheduleError: Not even serial 1F1B keeps within the cap, or moves are negative.
    """
    serial = serial_peak(pipes)
    if memory_cap is not None and serial > memory_cap:
        raise ScheduleError(
            f"memory_cap of a fused schedule: must leave room for one model after another by 1F1B, which keeps "
            f"{serial:g}. Got {memory_cap:g}. Use smaller micro-batches or more stages, or raise the cap."
        )
    if moves < 0 or processes < 1:
        raise ScheduleError(
            f"moves and processes of a search: must be at least 0 and 1. Got {moves} and {processes}. Use more."
        )
    shop = job_shop(pipes)
    search = _Search(
        shop,
        starts=_starts(shop, serial),
        target=math.ceil(lower_bound(pipes) / shop.latency_unit - 1e-6),
        floor=math.floor(serial / shop.memory_unit + 1e-6),
        cap=_NO_CAP if memory_cap is None else math.floor(memory_cap / shop.memory_unit + 1e-6),
        moves=moves,
        compiled=compiled and numba_is_there(),
    )
    one_after_another = as_orders(shop, serial_schedule(pipes))
    found = [_Found(span, peak(shop, orders), orders) for orders, span, _ in search.starts]
    found.append(_Found(_span(shop, one_after_another), peak(shop, one_after_another), one_after_another))
    found = [each for each in found if each.peak <= search.cap]
    if not any(each.latency <= search.target and each.peak <= search.floor for each in found):
        found += _anneal(search, seeds, processes)
    orders = min(found, key=lambda each: (each.latency, each.peak)).orders
    schedule = as_schedule(shop, orders)
    return FusedResult(
        schedule,
        latency=makespan(schedule),
        lower_bound=lower_bound(pipes),
        peak=max(peak_activations(schedule)),
        serial_latency=serial_latency(pipes),
        serial_peak=serial,
    )


def fuse_quickly(pipes: Sequence[Pipe], *, memory_cap: float | None = None) -> FusedResult:
    """`fuse` with a budget for the start of a run: a second or so for two models of a few stages each.

    It compiles nothing, and every process of a run finds the same schedule.
    """
    tasks = sum(2 * pipe.stages * pipe.micro_batches for pipe in pipes)
    return fuse(pipes, memory_cap=memory_cap, seeds=range(1), moves=200_000 // tasks, compiled=False)


@dataclass(frozen=True)
class _Search:
    """What every seed is given. Amounts in the units of the shop."""

    shop: JobShop
    starts: Sequence[tuple[Orders, int, int]]
    target: int
    floor: int
    cap: int
    moves: int
    compiled: bool


class _Found(NamedTuple):
    latency: int
    peak: int
    orders: Orders


def _starts(shop: JobShop, serial: float) -> list[tuple[Orders, int, int]]:
    """For each of the caps: the shortest list schedule, its makespan, and the cap. Some caps may allow none."""
    starts = []
    for factor in _CAPS:
        cap = _NO_CAP if factor == math.inf else math.floor(factor * serial / shop.memory_unit + 1e-6)
        lists = [list_schedule(shop, rank, cap=cap, limit=limit) for rank in _PRIORITIES for limit in _LIMITS]
        ended = [each for each in lists if each is not None]
        if ended:
            orders, span = min(ended, key=lambda each: (each[1], peak(shop, each[0])))
            starts.append((orders, span, cap))
    return starts


def _span(shop: JobShop, orders: Orders) -> int:
    """The makespan of orders, in units of the shop."""
    return shorten(shop, orders, cap=_NO_CAP, target=0, moves=0, seed=0, compiled=False)[1]


def _anneal(search: _Search, seeds: Sequence[int], processes: int) -> list[_Found]:
    """What the seeds find, up to the first that finds the best that there can be."""
    found: list[_Found] = []
    with contextlib.ExitStack() as stack:
        if processes > 1 and len(seeds) > 1:
            # spawned, since a fork of a process with threads, such as those of JAX, may hang
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(min(processes, len(seeds))))
            results = pool.imap(functools.partial(_anneal_one, search), enumerate(seeds))
        else:
            results = map(functools.partial(_anneal_one, search), enumerate(seeds))
        for each in results:
            if each.peak <= search.cap:
                found.append(each)
                if each.latency <= search.target and each.peak <= search.floor:
                    break
    return found  # leaving the pool ends what still runs in it


def _anneal_one(search: _Search, which: tuple[int, int]) -> _Found:
    """The two rounds of one seed. If the second does not reach the cap, it is repeated with longer makespans allowed."""
    index, seed = which
    shop, moves, compiled = search.shop, search.moves, search.compiled
    orders, _, cap = search.starts[index % len(search.starts)]
    orders, span = shorten(shop, orders, cap=cap, target=search.target, moves=moves, seed=seed, compiled=compiled)
    for factor in (1, 1.01, 1.03, 1.1, 1.2, 1.4):
        limit = max(span, math.floor(factor * span))
        orders, top = slim(
            shop, orders, floor=search.floor, limit=limit, moves=_SLIM * moves, seed=seed, compiled=compiled
        )
        if top <= search.cap:
            break
    else:
        return _Found(span, top, orders)
    if factor > 1:
        orders, span = shorten(
            shop, orders, cap=search.cap, target=search.target, moves=moves, seed=seed, compiled=compiled
        )
    return _Found(_span(shop, orders), peak(shop, orders), orders)
