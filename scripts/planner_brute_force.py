"""The fastest plan of all that could be written for a small workload, by trying them.

Nothing is left out because it seems slow or takes much memory. Tried are all placements that a search looks at, or all
that may be written: every set of devices that a call may have, every way to write their number as a product of degrees,
every number of micro-batches that divides the rows, all of `remat`. A plan is priced as if it were written by hand.
Only plans are skipped that cannot be faster than one that fits: calls on a device take turns, and what trains weights
waits, by way of others, for what was drawn with them.

Not tried are what no search chooses: chunks of stages, the GPipe schedule, weights that are trained in host memory, two
train calls as one pipeline.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrlhf.call_graph import Call
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.numba_loops import integers, loops, numba_is_there
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.plans.check_plan import check_call
from jaxrlhf.planner.plans.plan import Placement, PlanError
from jaxrlhf.planner.search import chain_loops, evaluate_loops
from jaxrlhf.planner.search.choices import make_problem, problem_of, strategies
from jaxrlhf.planner.search.flat_problem import NANOSECONDS, flat_problem, room_for_work
from jaxrlhf.planner.search.problem import Problem
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.run.step_draft import StepDraft
from jaxrlhf.sharding.strategy import Remat, Strategy


@dataclasses.dataclass(frozen=True)
class Least:
    """The fastest plan of all."""

    seconds: float
    plans: int
    """The number of plans."""
    placements: dict[str, Placement]
    offload: frozenset[str]

    def __str__(self) -> str:
        parts = [
            f"{name} {placement}, {placement.strategy.micro_batches} micro-batches, remat {placement.strategy.remat}"
            for name, placement in self.placements.items()
        ]
        offload = f"; {', '.join(sorted(self.offload))} in host memory" if self.offload else ""
        return "; ".join(parts) + offload


def brute_force(draft: StepDraft, cluster: Cluster, *, as_searched: bool = False) -> Least:
    """The fastest plan of a step. Its seconds are infinite where none fits.

    Args:
        as_searched: Of the devices and strategies that a search looks at (`Cluster.meshes`, `choices.strategies`), not
            of all.
    """
    workload, costs = draft.workload(), CostModel(cluster)
    calls = {call.plan_name: call for call in draft.graph.calls}
    tried: dict[str, list[Placement]] = {}
    for call in workload.calls:
        every = placements(calls[call.name], draft, cluster)
        tried[call.name] = [x for x in every if not as_searched or _is_looked_at(call, x, cluster)]
    read_only = {call.role for call in workload.calls if call.weights == call.role not in workload.trained}
    best = Least(math.inf, 0, {}, frozenset())
    for offload in itertools.chain.from_iterable(
        itertools.combinations(sorted(read_only), number) for number in range(len(read_only) + 1)
    ):
        problem = problem_of(workload, cluster, costs, tried, offload=offload)
        plan, seconds = fastest(problem, below=best.seconds)
        num_plans = best.plans + math.prod(len(call.choices) for call in problem.calls)
        best = dataclasses.replace(best, plans=num_plans)
        if plan is not None:
            placed = {name: options[k] for (name, options), k in zip(tried.items(), plan, strict=True)}
            best = Least(seconds, num_plans, placed, frozenset(offload))
    if best.placements:
        alone = make_problem(workload, cluster, costs, fixed=best.placements, offload=best.offload)
        assert steady_state(alone, [0] * len(alone.calls)).seconds == best.seconds
    return best


def fastest(problem: Problem, *, below: float = math.inf) -> tuple[tuple[int, ...] | None, float]:
    """The plan with the shortest iteration of all that fit, and its seconds.

    Args:
        below: Seconds that it must stay below; else it is None.
    """
    compiled = numba_is_there()
    flat = flat_problem(problem, compiled=compiled)
    run = loops(evaluate_loops, chain_loops, compiled=compiled)  # together, as the search has them: compiled once
    work = room_for_work(flat, compiled=compiled)
    bounds = np.where(cannot_fit(problem), np.inf, lower_bounds(problem))
    found, seconds = None, below
    for position in np.argsort(bounds, axis=None, kind="stable"):
        plan = tuple(int(k) for k in np.unravel_index(position, bounds.shape))
        if bounds[plan] >= seconds:
            break
        numbers = integers([flat.begin[c] + k for c, k in enumerate(plan)], compiled=compiled)
        if run["fit"](flat, numbers, work) > 0:
            continue
        took = run["steady_iteration"](flat, numbers, work)[0] / NANOSECONDS
        if took < seconds:
            found, seconds = plan, took
    return found, seconds


def lower_bounds(problem: Problem) -> np.ndarray:
    """Seconds that an iteration takes at the least under every plan, [choices of the first call, of the second ...]."""
    calls = problem.calls
    seconds = _open_mesh([[choice.seconds for choice in call.choices] for call in calls])
    bounds = np.zeros(np.broadcast_shapes(*(each.shape for each in seconds)))
    for device in range(problem.num_devices):
        there = _open_mesh([[float(device in choice.devices) for choice in call.choices] for call in calls])
        bounds = np.maximum(bounds, sum(one * other for one, other in zip(seconds, there, strict=True)))
    names = [call.name for call in calls]
    for first, reader in enumerate(calls):
        ends: dict[int, np.ndarray] = {first: seconds[first]}
        """Call -> when it ends after the reader began, of those that wait for the reader."""
        for c in range(first + 1, len(calls)):
            before = [ends[k] for k in map(names.index, calls[c].needs) if k in ends]
            if before:
                ends[c] = seconds[c] + functools.reduce(np.maximum, before)
            if before and calls[c].trains and calls[c].weights == reader.weights:
                bounds = np.maximum(bounds, ends[c])
                break
    return bounds


def cannot_fit(problem: Problem) -> np.ndarray:
    """Plans that take too much memory, whatever else is held, [choices of the first call, of the second ...]: what is
    trained, and one call at work with the weights that only its role reads. Others may lack memory too."""
    calls = problem.calls
    trained = {call.weights: c for c, call in reversed(list(enumerate(calls))) if call.trains}
    """Set -> its first train call, which it rests with."""
    sizes = {
        part: _open_mesh([[getattr(choice, part) for choice in call.choices] for call in calls])
        for part in ("resting", "working")
    }
    lacking = np.zeros(tuple(len(call.choices) for call in calls), bool)
    for device in range(problem.num_devices):
        there = _open_mesh([[device in choice.devices for choice in call.choices] for call in calls])
        resting = [size * is_there for size, is_there in zip(sizes["resting"], there, strict=True)]
        working = [size * is_there for size, is_there in zip(sizes["working"], there, strict=True)]
        held = sum(resting[c] for c in trained.values())
        for c, call in enumerate(calls):
            alone = call.weights == call.role and call.weights not in trained
            lacking |= held + working[c] + (resting[c] if alone else 0) > problem.capacity[device]
    return lacking


def _open_mesh(values: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """Call -> its values, along a dim of its own."""
    dims = range(len(values))
    return [np.reshape(values[c], [-1 if dim == c else 1 for dim in dims]) for c in dims]


def placements(call: Call, draft: StepDraft, cluster: Cluster) -> Iterator[Placement]:
    """Every placement of a call that a plan may have, in devices that are consecutive and in order."""
    remats: tuple[Remat, ...] = ("none", "dots", "layer") if call.kind == "train" else ("none",)
    for first, end in itertools.combinations(range(cluster.num_devices + 1), 2):
        size = end - first
        for degrees in itertools.product(range(1, size + 1), repeat=4):
            if np.prod(degrees) != size:
                continue
            for micro_batches, remat in itertools.product(range(1, call.num_rows * call.num_drawn + 1), remats):
                data, fsdp, tensor, pipeline = degrees
                strategy = Strategy(
                    data=data, fsdp=fsdp, tensor=tensor, pipeline=pipeline, micro_batches=micro_batches, remat=remat
                )
                placement = Placement(tuple(range(first, end)), strategy)
                if _may_be_written(call, placement, draft, cluster):
                    yield placement


def _is_looked_at(call: ModelCall, placement: Placement, cluster: Cluster) -> bool:
    devices = range(placement.devices[0], placement.devices[-1] + 1)
    return devices in cluster.meshes and placement.strategy in strategies(call, len(devices), cluster.devices_per_node)


def _may_be_written(call: Call, placement: Placement, draft: StepDraft, cluster: Cluster) -> bool:
    try:
        check_call(call, placement, draft.models, cluster.num_devices, cluster.devices_per_node, draft.keys)
    except PlanError:
        return False
    return True
