"""Fusion of two train calls into one pipeline: the conditions, the devices, and the order in which they run.

Every data-parallel group of either call is a pipe over workers: the devices of one stage of the call whose stages have
more of them. Groups that share workers are scheduled together, the second call's in the opposite direction.

Reference:
    Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, section 5.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from jaxrlhf.brief import did_you_mean
from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.stage_costs import StageCost, stage_costs
from jaxrlhf.planner.plans.plan import SCHEDULES, Placement, Plan, PlanError
from jaxrlhf.planner.workload import Workload
from jaxrlhf.schedules.fused_schedule import fuse_quickly
from jaxrlhf.schedules.instructions import Instruction, PerStage, Pipe, Schedule, ScheduleError
from jaxrlhf.schedules.schedule import topological_order, validate
from jaxrlhf.schedules.schedule_bounds import added_peaks
from jaxrlhf.sharding.strategy import Strategy

_PARTS = 1000
"""The unit of a schedule's latencies is this part of the longest one, and so for activations."""
_ANY = StageCost(1, 2, 1)
"""Costs for pipes of which only the shape matters."""


@dataclasses.dataclass(frozen=True)
class FusedOrder:
    """One order of all instructions of two calls."""

    instructions: tuple[Instruction, ...]
    """The pipes are the groups of the first call, then those of the second; stages are merged ones."""
    merged: tuple[int, int]
    """The number of consecutive stages of either call that are one stage of its pipes."""


def stages_per_worker(
    first: Strategy, second: Strategy, names: tuple[str, str] = ("the first", "the second")
) -> tuple[int, int]:
    """The number of consecutive stages of either call on one worker. `names`: of the calls, for error messages. Raises
    ValueError if the sizes of stages do not divide, or not the number of stages."""
    sizes = [strategy.fsdp * strategy.tensor for strategy in (first, second)]
    merged = tuple(max(sizes) // size for size in sizes)
    if max(sizes) % min(sizes):
        raise ValueError(
            f"fsdp x tensor, the devices of a stage, must divide that of the other. Got {sizes[0]} and {sizes[1]}. "
            "Use powers of two."
        )
    for strategy, count, name in zip((first, second), merged, names, strict=True):
        if strategy.pipeline % count:
            raise ValueError(
                f"{count} stages of {name} become one beside stages of {max(sizes)} devices, so its pipeline must be a "
                f"multiple of {count}. Got {strategy.pipeline}. Use {count}, say."
            )
    return merged[0], merged[1]


def opposite(first: Placement, second: Placement) -> Placement:
    """The second placement on the devices of the first, its groups going over them in the opposite direction.

    The groups of the first, one after another, pass over N workers, where N is the least that whole groups of either
    make up; the groups of the second follow one another over the same N workers, each from its last to its first.
    """
    merged = stages_per_worker(first.strategy, second.strategy)
    workers = _workers(first, merged[0])  # [group, merged stage, devices]
    length = second.strategy.pipeline // merged[1]
    flat = workers.reshape(-1, length, workers.shape[2])[:, ::-1]  # [group of second, merged stage, devices]
    groups = flat.reshape(second.strategy.data, second.strategy.pipeline, -1)
    devices = tuple(groups.swapaxes(0, 1).flatten().tolist())
    return dataclasses.replace(second, devices=devices)


def with_schedules(plan: Plan, graph: CallGraph, workload: Workload, costs: CostModel) -> Plan:
    """A plan whose fused calls have their schedules. Those that it has are kept. `plan`: checked, after `oppose`.
    `costs`: by which stages are priced: in every process the same."""
    if not plan.fuse or plan.schedules:
        return plan
    first, second = _calls(plan, graph)
    placements = plan[first], plan[second]
    stages = stage_costs([workload.call(call.plan_name) for call in (first, second)], placements, costs)
    return dataclasses.replace(plan, schedules=find_schedules(*placements, stages))


def find_schedules(first: Placement, second: Placement, costs: tuple[StageCost, StageCost]) -> tuple[Schedule, ...]:
    """Schedules of two calls as one pipeline: found in seconds, the same in every process.

    A worker saves at most what the two calls would save by themselves, each on its fullest worker: a plan has room for
    that.

    Returns:
        One for each set of groups that share devices, once where they are alike.

    Raises:
        PlanError: The devices of their stages are not the same sets.
    """
    units = units_of(first, second, costs)
    return tuple(_schedule(unit) for unit in dict.fromkeys(in_whole_numbers(unit) for unit in units))


@functools.lru_cache(maxsize=256)
def _schedule(pipes: tuple[Pipe, ...]) -> Schedule:
    schedule = fuse_quickly(pipes, memory_cap=added_peaks(pipes))
    validate(schedule)
    return schedule


def fused_order(first: Placement, second: Placement, schedules: Sequence[Schedule]) -> FusedOrder:
    """All instructions of both calls by the schedules of a plan: the same in every process. Raises PlanError if there
    is no schedule for some of their groups."""
    merged = stages_per_worker(first.strategy, second.strategy)
    pipes = pipes_of(first, second, merged, (_ANY, _ANY))
    by_shape = {_shape(schedule.pipes): topological_order(schedule) for schedule in schedules}
    timed: list[tuple[int, Instruction]] = []
    for unit in _units(pipes):
        order = by_shape.get(_shape(_by_themselves(pipes, unit)))
        if order is None:
            raise _no_schedule(_by_themselves(pipes, unit), schedules)
        timed += [(at, x._replace(pipe=unit[x.pipe])) for at, x in enumerate(order)]
    return FusedOrder(tuple(x for _, x in sorted(timed, key=lambda each: each[0])), merged)


def _no_schedule(pipes: Sequence[Pipe], schedules: Sequence[Schedule]) -> PlanError:
    return PlanError(
        f"plan.{SCHEDULES}: must have a schedule for all groups of both calls. Got none for {_in_words(pipes)}, but "
        f"{'; '.join(_in_words(schedule.pipes) for schedule in schedules) or 'none at all'}. Remove `{SCHEDULES}`, and "
        "the run finds its own; or plan again."
    )


def _in_words(pipes: Sequence[Pipe]) -> str:
    """'1 group of 4 stages in 8 micro-batches and 2 groups of 2 stages in 4'."""
    counts = collections.Counter((pipe.model, pipe.stages, pipe.micro_batches) for pipe in pipes)
    parts = [
        f"{number} group{'s' if number > 1 else ''} of {stages} stages in {micro_batches} micro-batches"
        for (_, stages, micro_batches), number in counts.items()
    ]
    return f"{' and '.join(parts)} over workers {', '.join('-'.join(map(str, pipe.workers)) for pipe in pipes)}"


def _shape(pipes: Sequence[Pipe]) -> tuple[tuple[tuple[int, ...], int, int], ...]:
    """The properties of pipes that a schedule must fit."""
    return tuple((pipe.workers, pipe.micro_batches, pipe.model) for pipe in pipes)


def units_of(first: Placement, second: Placement, costs: tuple[StageCost, StageCost]) -> list[tuple[Pipe, ...]]:
    """The groups of both calls in sets that share workers, which are numbered from 0 in each set. Raises PlanError if
    the devices of their stages are not the same sets."""
    pipes = pipes_of(first, second, stages_per_worker(first.strategy, second.strategy), costs)
    return [_by_themselves(pipes, unit) for unit in _units(pipes)]


def _by_themselves(pipes: Sequence[Pipe], unit: Sequence[int]) -> tuple[Pipe, ...]:
    """Some pipes, with workers numbered from 0."""
    numbers = {
        worker: i for i, worker in enumerate(sorted({worker for pipe in unit for worker in pipes[pipe].workers}))
    }
    return tuple(
        dataclasses.replace(pipes[pipe], workers=tuple(numbers[worker] for worker in pipes[pipe].workers))
        for pipe in unit
    )


def in_whole_numbers(pipes: Sequence[Pipe]) -> tuple[Pipe, ...]:
    """Pipes with latencies and activations in thousandths of the largest, so that every computer finds the same.
    Latencies are one at least, as a search for a schedule has them."""
    stages = [(pipe, stage) for pipe in pipes for stage in range(pipe.stages)]
    longest = max(pipe.latency(stage, forward=way) for pipe, stage in stages for way in (True, False))
    largest = max(pipe.kept(stage) for pipe, stage in stages)

    def latencies(pipe: Pipe, forward: bool) -> tuple[int, ...]:
        each = (pipe.latency(stage, forward=forward) for stage in range(pipe.stages))
        return tuple(max(1, round(_PARTS * latency / longest)) for latency in each)

    return tuple(
        dataclasses.replace(
            pipe,
            forward=latencies(pipe, True),
            backward=latencies(pipe, False),
            activation=tuple(round(_PARTS * pipe.kept(stage) / largest) for stage in range(pipe.stages)),
        )
        for pipe in pipes
    )


def pipes_of(
    first: Placement, second: Placement, merged: tuple[int, int], costs: tuple[StageCost, StageCost]
) -> list[Pipe]:
    """The groups of both calls, over workers that are numbered as the first call's groups pass over them."""
    workers = [_workers(placement, count) for placement, count in zip((first, second), merged, strict=True)]
    number = {frozenset(worker): i for i, worker in enumerate(workers[0].reshape(-1, workers[0].shape[2]).tolist())}
    pipes = []
    for model, (placement, count, cost) in enumerate(zip((first, second), merged, costs, strict=True)):
        for group in workers[model].tolist():
            if not all(frozenset(worker) in number for worker in group):
                raise PlanError(
                    f"plan.fuse: stages of both calls must lie on the same devices. Got {list(first.devices)} and "
                    f"{list(second.devices)}. Leave `devices` of the second out, or write whole groups the other way."
                )
            pipes.append(
                Pipe(
                    workers=tuple(number[frozenset(worker)] for worker in group),
                    micro_batches=placement.strategy.micro_batches,
                    forward=_merged(cost.forward, count),
                    backward=_merged(cost.backward, count),
                    activation=_merged(cost.activation, count),
                    model=model,
                )
            )
    return pipes


def _merged(costs: PerStage, count: int) -> PerStage:
    """Costs of every `count` stages together."""
    if not isinstance(costs, tuple):
        return costs * count
    return tuple(sum(costs[i : i + count]) for i in range(0, len(costs), count))


def _workers(placement: Placement, merged: int) -> np.ndarray:
    """The devices of every worker that a group passes over, [group, merged stage, devices]."""
    strategy = placement.strategy
    grid = np.array(placement.devices).reshape(strategy.pipeline, strategy.data, -1).swapaxes(0, 1)
    return grid.reshape(strategy.data, strategy.pipeline // merged, -1)


def _units(pipes: list[Pipe]) -> list[tuple[int, ...]]:
    """The pipes that share workers, directly or by others."""
    units: list[tuple[set[int], set[int]]] = []
    for number, pipe in enumerate(pipes):
        touching = [unit for unit in units if unit[1] & set(pipe.workers)]
        merged = ({number}.union(*(u[0] for u in touching)), set(pipe.workers).union(*(u[1] for u in touching)))
        units = [unit for unit in units if unit not in touching] + [merged]
    return [tuple(sorted(members)) for members, _ in units]


def check_fusion(plan: Plan, graph: CallGraph) -> None:
    """Checks that the calls that a plan fuses are two train calls that may run at once on the same devices. Raises
    PlanError if they are not, or may not."""
    if plan.schedules and not plan.fuse:
        raise PlanError(f"plan.{SCHEDULES}: are for calls that are fused. Got no `fuse`. Remove them.")
    if not plan.fuse:
        return
    first, second = _calls(plan, graph)
    where = "plan.fuse"
    _check_independent(where, first, second, graph)
    one, two = plan[first], plan[second]
    for call, placement in ((first, one), (second, two)):
        if placement.strategy.schedule != "1f1b":
            raise PlanError(
                f"{where}: fused calls have a schedule in common. Got {placement.strategy.schedule} for "
                f"{call.plan_name}. Remove its `schedule`."
            )
        if placement.strategy.pipeline == 1 or placement.strategy.chunks > 1:
            raise PlanError(
                f"{where}: {call.plan_name} must have a pipeline without chunks. Got pipeline "
                f"{placement.strategy.pipeline}, chunks {placement.strategy.chunks}. Set its pipeline to 2, say."
            )
    if set(one.devices) != set(two.devices):
        raise PlanError(
            f"{where}: both calls must have the same devices. Got {one} and {two}. Give them equally many, or do not "
            "fuse them."
        )
    try:
        merged = stages_per_worker(one.strategy, two.strategy, (first.plan_name, second.plan_name))
    except ValueError as error:
        raise PlanError(f"{where}: {error}") from error
    turned = oppose(plan, graph)[second]
    pipes_of(one, turned, merged, (_ANY, _ANY))  # raises if stages do not share devices
    if plan.schedules:
        _check_schedules(plan.schedules, units_of(one, turned, (_ANY, _ANY)))
    updates = [call.update.mini_batches * call.update.epochs for call in (first, second)]
    if updates[0] != updates[1]:
        raise PlanError(
            f"{where}: both calls must make equally many updates, which are fused one by one. Got {updates[0]} for "
            f"{first.plan_name} and {updates[1]} for {second.plan_name}. Change mini_batches or epochs of one."
        )


def _check_schedules(schedules: Sequence[Schedule], units: Sequence[Sequence[Pipe]]) -> None:
    """Checks that there is one schedule for all equal sets of groups, and that no worker saves more activations by it
    than the plan has room for."""
    shapes, given = {_shape(unit) for unit in units}, [_shape(schedule.pipes) for schedule in schedules]
    for unit in units:
        if _shape(unit) not in given:
            raise _no_schedule(unit, schedules)
    if len(given) > len(shapes):
        raise PlanError(
            f"plan.{SCHEDULES}: must have one schedule for all groups that are alike. Got {len(given)}, where there is "
            f"use for {len(shapes)}. Remove `{SCHEDULES}`, and the run finds its own; or plan again."
        )
    for schedule in schedules:
        try:
            validate(schedule, memory_cap=added_peaks(schedule.pipes))
        except ScheduleError as error:
            raise PlanError(
                f"plan.{SCHEDULES}: must keep no more than both calls by themselves. {error} Remove `{SCHEDULES}`, and "
                "the run finds its own; or plan again."
            ) from error


def _calls(plan: Plan, graph: CallGraph) -> tuple[Call, Call]:
    calls = {call.plan_name: call for call in graph.calls if call.kind == "train"}
    if len(plan.fuse) != 2 or len(set(plan.fuse)) != 2 or not set(plan.fuse) <= set(calls):
        wrong = next((name for name in plan.fuse if name not in calls), None)
        which = f", and '{wrong}' is none.{did_you_mean(wrong, calls)}" if wrong and calls else "."
        raise PlanError(
            f"plan.fuse: must be two train calls. Got {list(plan.fuse)}{which} Train calls: "
            f"{', '.join(calls) or 'none'}. {'Name two of them, or remove it' if len(calls) > 1 else 'Remove it'}."
        )
    first, second = sorted((calls[name] for name in plan.fuse), key=graph.calls.index)
    return first, second


def _check_independent(where: str, first: Call, second: Call, graph: CallGraph) -> None:
    """Checks that the first may wait for the second: no call up to it needs the outputs of the first."""
    if first.weights == second.weights:
        raise PlanError(f"{where}: calls must train different weights. Got '{first.weights}' twice. Remove it.")
    start, end = graph.calls.index(first), graph.calls.index(second)
    for call in graph.calls[start + 1 : end + 1]:
        if first.name in graph.dependencies(call):
            raise PlanError(
                f"{where}: {second.plan_name} must not have to wait for {first.plan_name}. Got "
                f"{call.plan_name} between them, which needs it. Do not fuse them."
            )


def oppose(plan: Plan, graph: CallGraph) -> Plan:
    """A plan whose fused calls go over their devices in opposite directions, where the second call's devices stand in
    their natural order; an order that a user chose is left as it is. `plan`: checked."""
    if not plan.fuse:
        return plan
    first, second = _calls(plan, graph)
    one, two = plan[first], plan[second]
    if two.devices != tuple(sorted(two.devices)):
        return plan
    return dataclasses.replace(plan, placements={**plan.placements, second.plan_name: opposite(one, two)})


def fusion_notes(plan: Plan, graph: CallGraph) -> list[str]:
    """A warning if fused calls go over their workers in the same direction, because of their `devices`. `plan`:
    checked, after `oppose`."""
    if not plan.fuse:
        return []
    first, second = _calls(plan, graph)
    one, two = plan[first], plan[second]
    pipes = pipes_of(one, two, stages_per_worker(one.strategy, two.strategy), (_ANY, _ANY))
    ways = [[pipe.workers for pipe in pipes if pipe.model == model] for model in range(2)]
    for a, b in itertools.product(*ways):
        shared = [worker for worker in a if worker in b]
        if len(shared) > 1 and shared == [worker for worker in b if worker in a]:
            return [
                f"plan.fuse: {first.plan_name} and {second.plan_name} go over their devices in the same direction, "
                f"and fill few of each other's bubbles. Leave plan.calls.{second.plan_name}.devices out."
            ]
    return []
