"""Completes a plan: places what a search does not, `compute` calls and the calls of a run's other parts.

    plan = complete_plan(graph, chosen, models, num_devices=16, devices_per_node=8)

A search knows the calls of models in a step. What is computed between them goes to the devices of the train call that
takes it, and a call of another part, such as an evaluation, to where the step has the call of its name.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.plans.check_plan import check_call
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError, placement_of
from jaxrlhf.planner.plans.splits import copied_rows, divisors, term_rows
from jaxrlhf.schedules.instructions import Schedule
from jaxrlhf.sharding.strategy import Strategy


def complete_plan(
    graph: CallGraph,
    chosen: Mapping[str, Placement],
    models: Mapping[str, ModelConfig],
    *,
    num_devices: int,
    devices_per_node: int,
    written: Mapping[str, Placement] = MappingProxyType({}),
    offload: Iterable[str] = (),
    fuse: Iterable[str] = (),
    schedules: Iterable[Schedule] = (),
) -> Plan:
    """A placement for every call of a graph that takes devices.

    Args:
        chosen: Call -> the placement of it, or of the call of its name in a step. With other rows, it runs in the
            nearest way that fits. If no call of its name is among them, it runs like one of its role; if none of its
            role is, its rows are split over all devices.
        models: Role -> model, for roles that have one.
        written: Call, with or without its ordinal -> its placement, which stays whether it fits or not.
    """

    def fits(call: Call, placement: Placement) -> bool:
        try:
            check_call(call, placement, models, num_devices, devices_per_node)
        except PlanError:
            return False
        return True

    placements: dict[str, Placement] = {}
    everywhere = tuple(range(num_devices))
    for call in graph.calls:
        name = call.plan_name
        if kept := placement_of(name, written):
            placements[name] = kept
            continue
        if call.kind == "host":
            continue
        for wanted in _wanted(call, chosen):
            fitting = [p for p in _like(wanted) if fits(call, p)]
            if fitting:  # on the most devices, and there with the fewest rows without weight
                placements[name] = min(fitting, key=lambda p: (-len(p.devices), copied_rows(call, p.strategy)))
                break
        if name not in placements and call.kind != "compute":
            placements[name] = spread(call, everywhere, devices_per_node)
    for call in graph.calls:
        if call.kind != "host" and call.plan_name not in placements:
            beside = _neighbour(call, graph, placements)
            devices = everywhere if beside is None else tuple(sorted(placements[beside].devices))
            placements[call.plan_name] = spread(call, devices, devices_per_node)
    in_order = {call.plan_name: placements[call.plan_name] for call in graph.calls if call.plan_name in placements}
    return Plan(in_order, tuple(offload), tuple(fuse), tuple(schedules))


def spread(call: Call, devices: tuple[int, ...], devices_per_node: int) -> Placement:
    """A call with its rows split over the first of some consecutive devices, over as many as divide the rows."""
    first = devices[0]
    rows = math.gcd(*_row_counts(call)) or 1
    in_node = devices_per_node - first % devices_per_node

    def is_mesh(count: int) -> bool:
        return count <= in_node or (first % devices_per_node == 0 and count % devices_per_node == 0)

    count = max(n for n in range(1, len(devices) + 1) if rows % n == 0 and is_mesh(n))
    return Placement(devices[:count], Strategy(data=count))


def _row_counts(call: Call) -> tuple[int, ...]:
    """Numbers of rows that row shards must divide."""
    if call.kind == "train":
        return tuple(rows // call.update.mini_batches for rows in term_rows(call))
    refs = call.refs + (call.output_refs if call.kind == "compute" else ())
    return tuple(ref.shape[0] for ref in refs if ref.has_rows)


def _wanted(call: Call, chosen: Mapping[str, Placement]) -> list[Placement]:
    """The placements that a call may take, the best first: of its name, then of others of its role."""
    name = call.plan_name
    names = [name, name.partition("#")[0]]
    names += [other for other in chosen if call.role is not None and other.partition(".")[0] == call.role]
    return [chosen[each] for each in dict.fromkeys(names) if each in chosen]


def _like(placement: Placement) -> Iterator[Placement]:
    """A placement, and similar ones for other rows: with fewer micro-batches, then on fewer of its devices."""
    strategy, natural = placement.strategy, tuple(sorted(placement.devices))
    for count in reversed(divisors(strategy.micro_batches)):
        yield dataclasses.replace(placement, strategy=dataclasses.replace(strategy, micro_batches=count))
    for data in divisors(strategy.data)[-2::-1]:
        fewer = dataclasses.replace(strategy, data=data, micro_batches=1)
        yield Placement(natural[: fewer.num_devices], fewer)


def _neighbour(call: Call, graph: CallGraph, placements: Mapping[str, Placement]) -> str | None:
    """The call of a model whose devices a `compute` call shares: the first train call that needs its outputs, directly
    or by other `compute` calls; else the last call before it that it needs, or the last one before it. None if there
    is no call of a model."""
    calls = {each.name: each for each in graph.calls}
    fed = {call.name}
    for later in graph.calls[graph.calls.index(call) + 1 :]:
        if fed.isdisjoint(graph.dependencies(later)):
            continue
        if later.kind == "train":
            return later.plan_name
        if later.kind in ("compute", "host"):
            fed.add(later.name)
    before = [calls[name] for name in graph.dependencies(call)] or graph.calls[: graph.calls.index(call)]
    placed = [each.plan_name for each in before if each.plan_name in placements] or list(placements)
    return placed[-1] if placed else None
