"""Clusters that would have room for a workload that does not fit on the requested one."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from jaxrlhf.cluster.cluster_text import kinds
from jaxrlhf.cluster.hardware import Cluster, NodeGroup
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.plans.plan import Placement, PlanError
from jaxrlhf.planner.search.choices import make_problem
from jaxrlhf.planner.search.search import search
from jaxrlhf.planner.workload import Workload

MAX_DEVICES = 256
"""The most devices of the clusters that are tried: counting costs takes longer the larger they are."""
_USUAL_DEVICES_PER_NODE = 8
_STEPS = 2_000
"""Plans of each search: few are needed to find the leanest."""


def what_would_fit(
    workload: Workload,
    cluster: Cluster,
    *,
    fixed: Mapping[str, Placement],
    offload: Iterable[str],
    say: Callable[[str], None],
) -> str:
    """A sentence with the first clusters that have room, of those with twice as many such devices, four times as many
    and so on, and of those with as many devices of more memory. Empty if none has. Fewer devices than named, but more
    than half as many, may be enough. Arguments are those of `choices.make_problem`."""

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
    """Clusters with twice as many devices, and so on: first in each node, up to the usual number, then more nodes."""
    if any(group.kind.target is None for group in cluster.groups):  # devices share the memory of one host
        return
    while 2 * cluster.num_devices <= MAX_DEVICES:
        doubled = "devices_per_node" if 2 * cluster.devices_per_node <= _USUAL_DEVICES_PER_NODE else "nodes"
        cluster = Cluster(
            tuple(dataclasses.replace(group, **{doubled: 2 * getattr(group, doubled)}) for group in cluster.groups)
        )
        yield cluster


def _with_larger_devices(cluster: Cluster) -> Iterator[Cluster]:
    """Clusters of as many devices, of each kind with more memory, from the least memory on."""
    most = max(group.kind.capacity for group in cluster.groups)
    larger = sorted((k for k in kinds().values() if k.target and k.capacity > most), key=lambda kind: kind.capacity)
    for kind in larger if all(group.kind.target for group in cluster.groups) else ():
        yield Cluster((NodeGroup(cluster.num_nodes, cluster.devices_per_node, kind, kind.network),))
