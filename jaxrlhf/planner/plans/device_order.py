"""The order of devices in a call's mesh: generation and inference have the weights where training has them."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.reshard.grouping import zero_redundancy_order
from jaxrlhf.reshard.moves import Grid
from jaxrlhf.reshard.traffic import describe, traffic
from jaxrlhf.sharding.axes import DATA, FSDP, TENSOR
from jaxrlhf.sharding.strategy import Strategy


def training_placements(plan: Plan, graph: CallGraph) -> dict[str, Placement]:
    """Role -> where it is trained; if several calls train it, the first."""
    trained = [call for call in graph.calls if call.kind == "train" and call.role is not None]
    return {call.role: plan[call] for call in reversed(trained) if call.role is not None}


def reuse_training_shards(
    plan: Plan, graph: CallGraph, trained: Mapping[str, Placement], devices_per_node: int
) -> Plan:
    """A plan in which a trained role's other calls on the same devices get as little of the weights as they can.

    HybridFlow's zero-redundancy grouping, for calls whose devices stand in their natural order; an order that a user
    chose is left as it is. So are calls that it would save nothing, those of which it would lay a tensor group over
    several nodes, where every layer's products would wait for the network, and those with stages, or of a role that is
    trained in stages.

    Args:
        plan: Checked: every degree fits its devices.
        trained: `training_placements` of the step, also for the plan of another graph over the same roles.
    """
    placements: dict[str, Placement] = dict(plan.placements)
    for call in graph.calls:
        if call.kind not in ("generate", "infer") or call.role is None or call.role not in trained:
            continue
        devices = _order(trained[call.role], plan[call], devices_per_node)
        placements[call.plan_name] = dataclasses.replace(plan[call], devices=devices)
    return dataclasses.replace(plan, placements=placements)


def _order(train: Placement, other: Placement, devices_per_node: int) -> tuple[int, ...]:
    natural = other.devices
    stages = max(train.strategy.pipeline, other.strategy.pipeline)
    if stages > 1 or natural != tuple(sorted(natural)) or set(natural) != set(train.devices):
        return natural
    source, target = _degrees(train.strategy), _degrees(other.strategy)
    if any(source[axis] % target[axis] and target[axis] % source[axis] for axis in (FSDP, TENSOR)):
        return natural
    order = zero_redundancy_order(source, target, train.devices)
    groups = np.array(order).reshape(-1, other.strategy.tensor) // devices_per_node
    if (groups != groups[:, :1]).any():
        return natural
    shape = (source[FSDP] * target[FSDP], source[TENSOR] * target[TENSOR])
    weight = describe([(shape, np.float32, ("embed", "mlp"))])

    def moved(devices: tuple[int, ...]) -> int:
        grids = Grid(tuple(source.items()), train.devices), Grid(tuple(target.items()), devices)
        return traffic(weight, *grids, node_size=devices_per_node).moved_bytes

    return order if moved(order) < moved(natural) else natural


def _degrees(strategy: Strategy) -> Mapping[str, int]:
    return {DATA: strategy.data, FSDP: strategy.fsdp, TENSOR: strategy.tensor}
