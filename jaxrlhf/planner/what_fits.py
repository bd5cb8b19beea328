"""Clusters that would have room for a workload, where the one that was asked for has not."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from jaxrlhf.cluster.cluster_text import kinds
from jaxrlhf.cluster.hardware import Cluster, Group
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.plans.plan import Placement, PlanError
from jaxrlhf.planner.search.choices import make_problem
from jaxrlhf.planner.search.search import search
from jaxrlhf.planner.workload import Workload

MAX_DEVICES = 256
"""Of the clusters that are looked at: counting what calls take takes longer the larger they are."""
_USUAL_DEVICES_PER_NODE = 8
_STEPS = 2_000
"""Plans looked at. Whether the leanest one fits takes but a few."""


def what_would_fit(
    workload: Workload,
    cluster: Cluster,
    *,
    fixed: Mapping[str, Placement],
    offload: Iterable[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """In a sentence, the first clusters that have room: of those with twice as many such devices, four times as many
    and so on, and of those with as many devices of more memory. Empty where none has.

    Fewer devices than named, but more than half as many, may do too.

    Args:
        cluster: Has too little room.
        fixed, offload: As of `choices.make_problem`.
    """
    offload = tuple(offload)

    def has_room(other: Cluster) -> bool:
        say(f"Looking whether {other} would have room")
        try:
            search(make_problem(workload, other, CostModel(other), fixed=fixed, offload=offload), steps=_STEPS)
        except PlanError:
            return False
        return True

    more = next((str(other) for other in _with_more_devices(cluster) if has_room(other)), None)
    larger = next((str(other) for other in _with_larger_devices(cluster) if has_room(other)), None)
    if found := [name for name in (more, larger) if name]:
        return f"There would be room on {' or on '.join(found)}."
    return ""


def _with_more_devices(cluster: Cluster) -> Iterator[Cluster]:
    """Twice as many devices, and so on: in each node first, as far as nodes usually go, then in more nodes."""
    if any(group.kind.target is None for group in cluster.groups):  # devices share the memory of one host
        return
    while 2 * cluster.num_devices <= MAX_DEVICES:
        wide = 2 * cluster.devices_per_node <= _USUAL_DEVICES_PER_NODE
        cluster = Cluster(tuple(map(_wider if wide else _longer, cluster.groups)))
        yield cluster


def _wider(group: Group) -> Group:
    return dataclasses.replace(group, devices_per_node=2 * group.devices_per_node)


def _longer(group: Group) -> Group:
    return dataclasses.replace(group, nodes=2 * group.nodes)


def _with_larger_devices(cluster: Cluster) -> Iterator[Cluster]:
    """As many devices of each kind that has more memory, from the least on."""
    most = max(group.kind.capacity for group in cluster.groups)
    larger = sorted((k for k in kinds().values() if k.target and k.capacity > most), key=lambda kind: kind.capacity)
    for kind in larger if all(group.kind.target for group in cluster.groups) else ():
        yield Cluster((Group(cluster.num_nodes, cluster.devices_per_node, kind, kind.network),))
