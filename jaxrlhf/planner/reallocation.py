"""Seconds of bringing weights from where they are trained to where they are read, for many pairs of layouts at once.

What every device lacks is exact: its part of the weights in the one layout, less what it has of it in the other. What
of it comes from its own node is what the devices of its node have together. `reshard.traffic` counts the same from the
moves themselves, for one pair.

Letters: S source layouts, T target layouts, N devices, M devices of a node.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrlhf.planner.hardware import Cluster
from jaxrlhf.planner.problem import Choice
from jaxrlhf.sharding.stages import layers_of_stages


@dataclasses.dataclass(frozen=True)
class Parts:
    """The part of a model's layers that every device has in some layouts, as intervals in [0, 1)."""

    has: np.ndarray
    """[layouts, N] whether it has any."""
    low: np.ndarray
    """[3, layouts, N] where its part begins: among layers, along `fsdp`, along `tensor`."""
    high: np.ndarray
    first: np.ndarray
    """[layouts] the first device."""
    givers: tuple[tuple[int, ...], ...]
    """For each layout the devices of a node, counted from the first one in it, that have all that the node has."""


def parts_of(choices: Sequence[Choice], num_devices: int, devices_per_node: int, num_layers: int) -> Parts:
    """Where the layers of a model lie under some choices. Pipelines with chunks count as without: the layers of a stage
    are as many, elsewhere."""
    count = len(choices)
    has = np.zeros((count, num_devices), bool)
    low, high = np.zeros((2, 3, count, num_devices), np.float32)
    first = np.array([choice.first for choice in choices])
    givers = tuple(_givers(choice, devices_per_node) for choice in choices)
    for i, choice in enumerate(choices):
        s, n = choice.strategy, len(choice.devices)
        at = np.arange(n)
        tensor, fsdp = at % s.tensor, at // s.tensor % s.fsdp
        stage = at // (s.tensor * s.fsdp * s.data)
        layers = layers_of_stages(num_layers, s.pipeline)
        ends = np.array([[r.start, r.stop] for r in layers]) / num_layers
        where = slice(choice.first, choice.end)
        has[i, where] = True
        low[:, i, where] = ends[stage, 0], fsdp / s.fsdp, tensor / s.tensor
        high[:, i, where] = ends[stage, 1], (fsdp + 1) / s.fsdp, (tensor + 1) / s.tensor
    return Parts(has, low, high, first, givers)


def _givers(choice: Choice, devices_per_node: int) -> tuple[int, ...]:
    """One device for every different part of the weights that a node has."""
    s, local = choice.strategy, min(len(choice.devices), devices_per_node)
    copy, stage = s.fsdp * s.tensor, s.data * s.fsdp * s.tensor
    if stage <= local:
        return tuple(m for m in range(local) if m // copy % s.data == 0)
    return tuple(range(min(copy, local)))


def reallocation_seconds(
    sources: Sequence[Choice], targets: Sequence[Choice], *, size: float, num_layers: int, cluster: Cluster
) -> np.ndarray:
    """Seconds [S, T] of bringing weights of `size` bytes from each source's layout to each target's.

    Every link is as slow as that of the slowest device of the cluster; a device sends and receives at the same time.
    """
    nodes, per_node = cluster.num_nodes, cluster.devices_per_node
    layouts = {_layout(c): c for c in (*sources, *targets)}
    numbers = {layout: i for i, layout in enumerate(layouts)}
    parts = parts_of(list(layouts.values()), cluster.num_devices, per_node, num_layers)
    kind = cluster.slowest(0, cluster.num_devices)
    costs, network = kind.coefficients, cluster.network(0, cluster.num_devices)
    near_rate = kind.link.bandwidth * costs.link_efficiency
    device_rate = network.shared_by(1) * costs.network_efficiency
    node_rate = network.bandwidth * costs.network_efficiency
    unique_S, unique_T = (sorted({numbers[_layout(c)] for c in group}) for group in (sources, targets))
    seconds = np.zeros((len(layouts), len(layouts)))
    high_T, low_T, has_T = parts.high[:, unique_T], parts.low[:, unique_T], parts.has[unique_T]
    whole_TN = _product(high_T - low_T) * has_T
    for s in unique_S:
        near_TN, far_TN = _received(parts, s, low_T, high_T, has_T, whole_TN, nodes, per_node)
        near_TN, far_TN = near_TN * size, far_TN * size
        far_of_node = far_TN.reshape(len(unique_T), nodes, per_node).sum(axis=-1)
        sending_nodes = max(1, int(parts.has[s].reshape(nodes, per_node).any(axis=1).sum()))
        received = np.maximum(far_TN.max(axis=1) / device_rate, far_of_node.max(axis=1) / node_rate)
        sent = far_of_node.sum(axis=1) / sending_nodes / node_rate
        moved = near_TN.max(axis=1) / near_rate + np.maximum(received, sent)
        latency = np.where(far_TN.any(axis=1), costs.network_collective_seconds, costs.collective_seconds)
        seconds[s, unique_T] = np.where(moved > 0, moved + latency, 0.0)
    rows = [numbers[_layout(c)] for c in sources]
    columns = [numbers[_layout(c)] for c in targets]
    return seconds[np.ix_(rows, columns)]


def _received(
    parts: Parts,
    s: int,
    low_T: np.ndarray,
    high_T: np.ndarray,
    has_T: np.ndarray,
    whole_TN: np.ndarray,
    nodes: int,
    per_node: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Fractions of the model [T, N] that each device gets from its own node, and from others."""
    T, N = has_T.shape

    def shared(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """What a target's part has in common with a source's."""
        return _product(np.maximum(np.minimum(high_T, high[:, None]) - np.maximum(low_T, low[:, None]), 0.0))

    own_TN = shared(parts.low[:, s], parts.high[:, s]) * (has_T & parts.has[s])
    in_node_TN = np.zeros((T, N))
    for m in parts.givers[s]:  # what each of them has, in turn
        giver = np.arange(N) // per_node * per_node + parts.first[s] % per_node + m
        gives = parts.has[s][giver]
        in_node_TN += shared(parts.low[:, s, giver], parts.high[:, s, giver]) * (has_T & gives)
    in_node_TN = np.minimum(in_node_TN, whole_TN)
    far_TN = np.clip(whole_TN - np.maximum(in_node_TN, own_TN), 0.0, None)
    near_TN = np.clip(whole_TN - own_TN - far_TN, 0.0, None)
    tiny = 1e-6
    return np.where(near_TN > tiny, near_TN, 0.0), np.where(far_TN > tiny, far_TN, 0.0)


def _product(intervals: np.ndarray) -> np.ndarray:
    """Along the first axis, of three."""
    return intervals[0] * intervals[1] * intervals[2]


def _layout(choice: Choice) -> tuple[int, ...]:
    """What decides where weights lie."""
    s = choice.strategy
    return choice.first, choice.end, s.pipeline, s.data, s.fsdp, s.tensor
