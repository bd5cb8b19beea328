"""FlexRLHF's guideline as rules: the placement strategy that suits some models on a cluster, and how to divide devices.

    found = guideline(workload, cluster)
    found.strategies        # the placements that it advises, the one to begin with first
    found.rules             # each advice with its reason, in words

Rules know sizes of weights and nodes alone; `advisor` simulates what they advise.

Reference:
    Xiao et al. 2023 (FlexRLHF), arXiv:2312.11819, section IV-C.
"""

import dataclasses
import math

from flax.core import FrozenDict

from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.placement_strategy import INFER, INTERLEAVING, REPLICAS, TRAIN, PlacementStrategy
from jaxrlhf.planner.costs.memory import weight_bytes
from jaxrlhf.planner.search.peak_memory import in_gb
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.sharding.strategy import Strategy

FEW_NODES = 2
"""Up to so many nodes, resources are limited: shadow models take memory that other things need."""
GENERATION = (0.3, 0.5)
"""The share of all devices for generation where training and inference are apart."""
FULL = 0.95
"""The share of the memory up to which batches should be raised."""
TRAINED_BYTES = 16
"""Bytes of a number that is trained: weights, gradient and two moments in float32."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One advice of the guideline."""

    about: str
    advice: str
    reason: str

    def __str__(self) -> str:
        return f"{self.about}: {self.advice}. {self.reason}"


@dataclasses.dataclass(frozen=True)
class Guideline:
    """What the guideline advises."""

    rules: tuple[Rule, ...]
    strategies: tuple[PlacementStrategy | None, ...]
    """Placements to try, the best guess first; None is all roles on all devices."""


def guideline(workload: Workload, cluster: Cluster) -> Guideline:
    """The advice for some models on a cluster."""
    trains, infers = ([c for c in workload.calls if c.trains == trained] for trained in (True, False))
    batch = Rule(
        "Batch", f"raise it until {FULL:.0%} of the memory are full",
        "Each step of decoding reads all weights, for few rows as for many.",
    )  # fmt: skip
    if not trains or not infers:
        why = "The step has train calls alone." if trains else "The step trains nothing."
        return Guideline((Rule("Strategy", "all roles on all devices", why), batch), (None,))
    if cluster.num_nodes > FEW_NODES:
        return _apart(workload, cluster, trains, infers, batch)
    return _together(workload, cluster, batch)


def _together(workload: Workload, cluster: Cluster, batch: Rule) -> Guideline:
    """The advice for few nodes."""
    node = min(_node_bytes(cluster))
    fixed = {c.role: _weights(c) for c in workload.calls if c.weights not in workload.trained}
    fitting = [role for role, size in fixed.items() if size <= node]
    few = f"{cluster} has no more than {FEW_NODES} nodes"
    if not fitting:
        what = "no role's weights stay as they are" if not fixed else "none that is not trained fits into a node"
        why = f"{few}, and {what}: between nodes, interleaving communicates more."
        return Guideline(
            (Rule("Strategy", "all roles on all devices", why), batch), (None, PlacementStrategy("interleaving-2"))
        )
    listed = " and ".join(f"{role} ({in_gb(fixed[role])})" for role in fitting)
    why = (
        f"{few}, and {listed} fit{'s' if len(fitting) == 1 else ''} into a node: on half of the devices, calls that do "
    )
    why += "not wait for each other run side by side, and there are fewer copies of weights."
    return Guideline((Rule("Strategy", INTERLEAVING, why), batch), (PlacementStrategy(INTERLEAVING), None))


def _apart(
    workload: Workload, cluster: Cluster, trains: list[ModelCall], infers: list[ModelCall], batch: Rule
) -> Guideline:
    """The advice for many nodes: training and inference apart, as long as both have the memory for it."""
    nodes, per_node = cluster.num_nodes, cluster.devices_per_node
    room = sum(_node_bytes(cluster)) / nodes
    trained = sum(TRAINED_BYTES * _weights(c) // c.model.itemsize for c in {c.weights: c for c in trains}.values())
    read = sum(_weights(c) for c in {c.weights: c for c in infers}.values())
    fewest, fewest_infer = math.ceil(trained / room), math.ceil(read / room)
    low, high = max(fewest_infer, math.ceil(GENERATION[0] * nodes)), math.floor(GENERATION[1] * nodes)
    high = min(max(high, fewest_infer), nodes - fewest)
    if high < max(1, fewest_infer):
        why = (
            f"Training needs {in_gb(trained)} and inference {in_gb(read)}, {fewest} and {fewest_infer} nodes of "
            f"{nodes}: there is no room for shadow models."
        )
        return Guideline(
            (Rule("Strategy", "all roles on all devices", why), batch), (None, PlacementStrategy(INTERLEAVING))
        )
    low = min(low, high)
    counts = dict.fromkeys((high, low, (low + high) // 2))
    strategies = [_of_nodes(nodes, count, per_node) for count in counts if count]
    generates = next((c.role for c in infers if c.kind == "generate"), infers[0].role)
    rules = (
        Rule(
            "Strategy", "training and inference apart",
            f"{cluster} has more than {FEW_NODES} nodes, and room for shadow models: training needs {in_gb(trained)}, "
            f"inference {in_gb(read)}. Generation then has layouts of its own.",
        ),
        Rule(
            "Ratio", f"{low} to {high} of {nodes} nodes for inference",
            f"Generation takes longest: {GENERATION[0]:.0%} to {GENERATION[1]:.0%} of the devices are its share, and "
            f"training must have at least {fewest} nodes for its memory.",
        ),
        Rule(
            "Replicas", f"one of {generates} on each node of inference",
            "A replica within a node communicates over its links alone, and none waits for another.",
        ),
        batch,
    )  # fmt: skip
    replicas = [
        dataclasses.replace(each, **{REPLICAS: count})
        for each, count in zip(strategies, counts, strict=True)
        if count > 1
    ]
    return Guideline(rules, (*strategies, *replicas[:1], PlacementStrategy(INTERLEAVING), None))


def _node_bytes(cluster: Cluster) -> list[int]:
    """Node -> the bytes that a plan may fill of its devices' memory."""
    memories = cluster.devices_per_node // cluster.devices_per_memory
    return [memories * cluster.capacity(n * cluster.devices_per_node) for n in range(cluster.num_nodes)]


def _of_nodes(nodes: int, infer: int, per_node: int) -> PlacementStrategy:
    """Training on the first nodes, inference on the last."""
    first = (nodes - infer) * per_node
    extents = {TRAIN: tuple(range(first)), INFER: tuple(range(first, nodes * per_node))}
    return PlacementStrategy("", FrozenDict(extents))


def _weights(call: ModelCall) -> int:
    """Bytes of the weights that a call reads."""
    return weight_bytes(call.model, Strategy(), call.model.itemsize)
