"""Two train calls as one fused pipeline: whether a plan may fuse them, on which devices, and in which order they work.

Every data-parallel group of either call is a pipe over nodes: the devices of one stage of the call whose stages have
more of them. Groups that share nodes are scheduled together, the second call's in the opposite direction.

Reference:
    Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, section 5.
"""

import dataclasses
import functools
import itertools

import numpy as np

from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.config.schema import FUSE
from jaxrlhf.planner.plan import Placement, Plan, PlanError, train_sizes
from jaxrlhf.planner.schedules.fused_schedule import fuse_quickly
from jaxrlhf.planner.schedules.instructions import Instruction, Pipe, Schedule
from jaxrlhf.planner.schedules.schedule import topological_order, validate
from jaxrlhf.planner.schedules.schedule_bounds import serial_peak
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.suggest import did_you_mean

MEMORY_CAP = 1.25
"""What micro-batches may take of a node under a fused schedule, in peaks of 1F1B of one call after the other."""


@dataclasses.dataclass(frozen=True)
class StageCost:
    """What a micro-batch costs a stage of one of the calls; only ratios between the two matter."""

    forward: float
    backward: float
    activation: float


@dataclasses.dataclass(frozen=True)
class FusedOrder:
    """One order of all instructions of two calls."""

    instructions: tuple[Instruction, ...]
    """The pipes are the groups of the first call, then those of the second; stages are merged ones."""
    merged: tuple[int, int]
    """How many consecutive stages of either call are one stage of its pipes."""


def stages_per_node(
    first: Strategy, second: Strategy, names: tuple[str, str] = ("the first", "the second")
) -> tuple[int, int]:
    """How many consecutive stages of either call lie on one node.

    Args:
        names: Of the calls, for error messages.

    Raises:
        ValueError: The sizes of stages do not divide, or not the number of stages.
    """
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

    The groups of the first, one after another, pass over N nodes, where N is the least that whole groups of either
    make up; the groups of the second follow one another over the same N nodes, each from its last node to its first.
    """
    merged = stages_per_node(first.strategy, second.strategy)
    nodes = _nodes(first, merged[0])  # [group, merged stage, devices]
    length = second.strategy.pipeline // merged[1]
    flat = nodes.reshape(-1, length, nodes.shape[2])[:, ::-1]  # [group of second, merged stage, devices]
    groups = flat.reshape(second.strategy.data, second.strategy.pipeline, -1)
    devices = tuple(groups.swapaxes(0, 1).flatten().tolist())
    return dataclasses.replace(second, devices=devices)


@functools.lru_cache(maxsize=16)
def fused_order(first: Placement, second: Placement, costs: tuple[StageCost, StageCost]) -> FusedOrder:
    """A schedule of both calls at once: found in seconds, the same in every process.

    Raises:
        PlanError: The devices of their stages are not the same sets.
    """
    merged = stages_per_node(first.strategy, second.strategy)
    pipes = pipes_of(first, second, merged, costs)
    timed: list[tuple[int, Instruction]] = []
    for unit in _units(pipes):
        numbers = {node: i for i, node in enumerate(sorted({node for pipe in unit for node in pipes[pipe].nodes}))}
        own = tuple(
            dataclasses.replace(pipes[pipe], nodes=tuple(numbers[node] for node in pipes[pipe].nodes)) for pipe in unit
        )
        order = topological_order(_schedule(own))
        timed += [(at, x._replace(pipe=unit[x.pipe])) for at, x in enumerate(order)]
    return FusedOrder(tuple(x for _, x in sorted(timed, key=lambda each: each[0])), merged)


@functools.lru_cache(maxsize=64)
def _schedule(pipes: tuple[Pipe, ...]) -> Schedule:  # units are alike: one search serves all
    # at most a quarter more than the calls one after the other take, as a rule at no or little cost in latency
    schedule = fuse_quickly(pipes, memory_cap=MEMORY_CAP * serial_peak(pipes)).schedule
    validate(schedule)
    return schedule


def pipes_of(
    first: Placement, second: Placement, merged: tuple[int, int], costs: tuple[StageCost, StageCost]
) -> list[Pipe]:
    """The groups of both calls, over nodes that are numbered as the first call's groups pass over them."""
    nodes = [_nodes(placement, count) for placement, count in zip((first, second), merged, strict=True)]
    number = {frozenset(node): i for i, node in enumerate(nodes[0].reshape(-1, nodes[0].shape[2]).tolist())}
    pipes = []
    for model, (placement, count, cost) in enumerate(zip((first, second), merged, costs, strict=True)):
        for group in nodes[model].tolist():
            if not all(frozenset(node) in number for node in group):
                raise PlanError(
                    f"plan.{FUSE}: stages of both calls must lie on the same devices. Got {list(first.devices)} and "
                    f"{list(second.devices)}. Leave `devices` of the second out, or write whole groups the other way."
                )
            pipes.append(
                Pipe(
                    nodes=tuple(number[frozenset(node)] for node in group),
                    micro_batches=placement.strategy.micro_batches,
                    forward=cost.forward * count,
                    backward=cost.backward * count,
                    activation=cost.activation * count,
                    model=model,
                )
            )
    return pipes


def _nodes(placement: Placement, merged: int) -> np.ndarray:
    """The devices of every node that a group passes over, [group, merged stage, devices]."""
    strategy = placement.strategy
    grid = np.array(placement.devices).reshape(strategy.pipeline, strategy.data, -1).swapaxes(0, 1)
    return grid.reshape(strategy.data, strategy.pipeline // merged, -1)


def _units(pipes: list[Pipe]) -> list[tuple[int, ...]]:
    """The pipes that share nodes, directly or by others."""
    units: list[tuple[set[int], set[int]]] = []
    for number, pipe in enumerate(pipes):
        touching = [unit for unit in units if unit[1] & set(pipe.nodes)]
        merged = ({number}.union(*(u[0] for u in touching)), set(pipe.nodes).union(*(u[1] for u in touching)))
        units = [unit for unit in units if unit not in touching] + [merged]
    return [tuple(sorted(members)) for members, _ in units]


def check_fusion(plan: Plan, graph: CallGraph) -> None:
    """The calls that a plan fuses are two train calls that may run at once, on the same devices.

    Raises:
        PlanError: They are not, or may not.
    """
    if not plan.fuse:
        return
    first, second = _calls(plan, graph)
    where = f"plan.{FUSE}"
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
        merged = stages_per_node(one.strategy, two.strategy, (first.plan_name, second.plan_name))
    except ValueError as error:
        raise PlanError(f"{where}: {error}") from error
    turned = oppose(plan, graph)[second]
    pipes_of(one, turned, merged, (StageCost(1, 2, 1), StageCost(1, 2, 1)))  # which says if stages lie across
    updates = [
        sizes.mini_batches * sizes.epochs
        for call, placement in ((first, one), (second, two))
        for sizes in train_sizes(call, placement.strategy)[:1]
    ]
    if updates[0] != updates[1]:
        raise PlanError(
            f"{where}: both calls must make equally many updates, which are fused one by one. Got {updates[0]} for "
            f"{first.plan_name} and {updates[1]} for {second.plan_name}. Change mini_batches or epochs of one."
        )


def _calls(plan: Plan, graph: CallGraph) -> tuple[Call, Call]:
    calls = {call.plan_name: call for call in graph.calls if call.kind == "train"}
    if len(plan.fuse) != 2 or len(set(plan.fuse)) != 2 or not set(plan.fuse) <= set(calls):
        wrong = next((name for name in plan.fuse if name not in calls), None)
        which = f", and '{wrong}' is none.{did_you_mean(wrong, calls)}" if wrong and calls else "."
        raise PlanError(
            f"plan.{FUSE}: must be two train calls. Got {list(plan.fuse)}{which} Train calls: "
            f"{', '.join(calls) or 'none'}. {'Name two of them, or remove it' if len(calls) > 1 else 'Remove it'}."
        )
    first, second = sorted((calls[name] for name in plan.fuse), key=graph.calls.index)
    return first, second


def _check_independent(where: str, first: Call, second: Call, graph: CallGraph) -> None:
    """The first may wait for the second: nothing up to it needs what the first gives."""
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
    their natural order; an order that a user chose is left as it is.

    Args:
        plan: Checked.
    """
    if not plan.fuse:
        return plan
    first, second = _calls(plan, graph)
    one, two = plan[first], plan[second]
    if two.devices != tuple(sorted(two.devices)):
        return plan
    return dataclasses.replace(plan, placements={**plan.placements, second.plan_name: opposite(one, two)})


def fusion_notes(plan: Plan, graph: CallGraph) -> list[str]:
    """What to say of fused calls that go over their nodes in the same direction, as `devices` have them do.

    Args:
        plan: Checked, after `oppose`.
    """
    if not plan.fuse:
        return []
    first, second = _calls(plan, graph)
    one, two = plan[first], plan[second]
    pipes = pipes_of(one, two, stages_per_node(one.strategy, two.strategy), (StageCost(1, 2, 1), StageCost(1, 2, 1)))
    ways = [[pipe.nodes for pipe in pipes if pipe.model == model] for model in range(2)]
    for a, b in itertools.product(*ways):
        shared = [node for node in a if node in b]
        if len(shared) > 1 and shared == [node for node in b if node in a]:
            return [
                f"plan.{FUSE}: {first.plan_name} and {second.plan_name} go over their devices in the same direction, "
                f"and fill few of each other's bubbles. Leave plan.{second.plan_name}.devices out."
            ]
    return []
