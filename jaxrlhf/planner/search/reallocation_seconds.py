"""Seconds of bringing weights from where they are trained to where they are read, for many pairs of layouts at once.

What every device lacks is exact: its part of the weights in the target layout, less what it has of that in the source
layout. Whatever some device of its node has of this comes from within the node, the rest from other nodes.
`reshard.traffic` counts the same from the moves themselves, for one pair.

What the devices of a node receive depends on the contents of that node in both layouts. The same contents recur within
and across layouts, so each distinct pair of them (source, target) is compared only once.

Letters: S source layouts, T target layouts, M devices of a node, G different parts that a node has, U different nodes
of a source layout, V different nodes of all target layouts, E nodes of all target layouts, one layout after another.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.planner.search.problem import Choice
from jaxrlhf.sharding.stage_layers import layers_of_stages

TINY = 1e-6
"""A fraction of a model that counts as nothing."""


@dataclasses.dataclass(frozen=True)
class LayoutShape:
    """Everything that determines where weights lie, except the first node."""

    skipped: int
    """Devices of that node before the first one."""
    num_devices: int
    pipeline: int
    data: int
    fsdp: int
    tensor: int


def shape_of(choice: Choice, devices_per_node: int) -> LayoutShape:
    s = choice.strategy
    return LayoutShape(choice.first % devices_per_node, len(choice.devices), s.pipeline, s.data, s.fsdp, s.tensor)


def node_parts(shape: LayoutShape, devices_per_node: int, num_layers: int) -> np.ndarray:
    """The part of a model's layers that every device has, in every node that has any.

    Chunks are ignored: with them a rank of the pipeline holds as many layers, but others.

    Returns:
        [nodes, 2, 3, M] where parts begin and end, in [0, 1]: among layers, along `fsdp`, along `tensor`. Devices that
        have nothing begin and end at 0.
    """
    at, first, end = np.arange(shape.num_devices), shape.skipped, shape.skipped + shape.num_devices
    tensor, fsdp = at % shape.tensor, at // shape.tensor % shape.fsdp
    stage = at // (shape.tensor * shape.fsdp * shape.data)
    layers = np.array([[r.start, r.stop] for r in layers_of_stages(num_layers, shape.pipeline)])[stage] / num_layers
    nodes = -(-end // devices_per_node)
    parts = np.zeros((2, 3, nodes * devices_per_node))
    parts[0, :, first:end] = layers[:, 0], fsdp / shape.fsdp, tensor / shape.tensor
    parts[1, :, first:end] = layers[:, 1], (fsdp + 1) / shape.fsdp, (tensor + 1) / shape.tensor
    return np.moveaxis(parts.reshape(2, 3, nodes, devices_per_node), 2, 0)


def received(parts: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fractions of the model [V, M] that each device gets from its own node, and from others. `parts`: [2, 3, M] what
    the devices of a node have, as `node_parts` says. `wanted`: [2, 3, V, M] what they are to have, in several ways."""
    different, number = _different(np.moveaxis(parts, 2, 0))
    low, high = np.moveaxis(different, 0, 2)[..., None, None]
    common = np.minimum(wanted[1][:, None], high) - np.maximum(wanted[0][:, None], low)
    shared_GVM = _product(np.maximum(common, 0.0))
    own_VM = shared_GVM[number, :, np.arange(len(number))].T
    in_node_VM = shared_GVM.sum(axis=0)  # parts that differ have nothing in common
    far_VM = _product(wanted[1] - wanted[0]) - in_node_VM
    near_VM = in_node_VM - own_VM
    return np.where(near_VM > TINY, near_VM, 0.0), np.where(far_VM > TINY, far_VM, 0.0)


def _product(lengths: np.ndarray) -> np.ndarray:
    """The product of three lengths, along the first dim. `np.prod` takes three times as long."""
    return lengths[0] * lengths[1] * lengths[2]


def reallocation_seconds(
    sources: Sequence[Choice], targets: Sequence[Choice], *, size: float, num_layers: int, cluster: Cluster
) -> np.ndarray:
    """Seconds [sources, targets] of bringing weights of `size` bytes from each source's layout to each target's.

    Every link is as slow as that of the slowest device of the cluster; a device sends and receives at the same time.
    """
    per_node = cluster.devices_per_node
    everywhere = range(cluster.num_devices)
    kind, network = cluster.slowest(everywhere), cluster.network(everywhere)
    costs = kind.coefficients
    near_rate = kind.link.bandwidth * costs.link_efficiency
    device_rate = network.shared_by(1) * costs.network_efficiency
    node_rate = network.bandwidth * costs.network_efficiency

    places = [[(shape_of(c, per_node), c.first // per_node) for c in group] for group in (sources, targets)]
    rows, columns = ({place: i for i, place in enumerate(dict.fromkeys(group))} for group in places)
    parts_V, node_E, at_E, begins_T = _nodes_of(list(columns), per_node, num_layers)
    seconds = np.zeros((len(rows), len(columns)))
    starts = collections.defaultdict(list)
    for shape, start in rows:
        starts[shape].append(start)
    for shape in starts:
        parts_U, number = _different(node_parts(shape, per_node, num_layers))
        pairs = [_number_at(at_E - start, number, none=len(parts_U)) * len(parts_V) + node_E for start in starts[shape]]
        near, far, far_of_node = _tables(parts_U, parts_V, pairs)
        for start, pair_E in zip(starts[shape], pairs, strict=True):
            near_T, far_T, most_T = (np.maximum.reduceat(table[pair_E], begins_T) for table in (near, far, far_of_node))
            sum_T = np.add.reduceat(far_of_node[pair_E], begins_T)
            arriving = np.maximum(far_T / device_rate, most_T / node_rate)
            leaving = sum_T / len(number) / node_rate  # every node of the source sends as much
            moved = size * (near_T / near_rate + np.maximum(arriving, leaving))
            latency = np.where(far_T > 0, costs.network_collective_seconds, costs.collective_seconds)
            seconds[rows[shape, start]] = np.where(moved > 0, moved + latency, 0.0)
    return seconds[np.ix_([rows[place] for place in places[0]], [columns[place] for place in places[1]])]


def _nodes_of(
    layouts: Sequence[tuple[LayoutShape, int]], devices_per_node: int, num_layers: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The nodes of layouts that begin with given nodes.

    Returns:
        The distinct contents of nodes, [V, 2, 3, M]; the number of each node's contents among them, [E]; its number in
        the cluster, [E]; where in E each layout begins, [T].
    """
    parts = {shape: node_parts(shape, devices_per_node, num_layers) for shape in dict.fromkeys(s for s, _ in layouts)}
    parts_V, number = _different(np.concatenate(list(parts.values())))
    pieces = np.split(number, np.cumsum([len(p) for p in parts.values()])[:-1])
    numbers = dict(zip(parts, pieces, strict=True))
    node_E = np.concatenate([numbers[shape] for shape, _ in layouts])
    at_E = np.concatenate([start + np.arange(len(numbers[shape])) for shape, start in layouts])
    begins_T = np.cumsum([0] + [len(numbers[shape]) for shape, _ in layouts[:-1]])
    return parts_V, node_E, at_E, begins_T


def _number_at(position: np.ndarray, number: np.ndarray, *, none: int) -> np.ndarray:
    """`number[position]`, or `none` where a position is out of range."""
    return np.where((position >= 0) & (position < len(number)), number.take(position, mode="clip"), none)


def _tables(parts_U: np.ndarray, parts_V: np.ndarray, pairs: Sequence[np.ndarray]) -> np.ndarray:
    """[3, (U + 1) * V] the most that a device gets from its own node, the most that one gets from others, and what all
    devices of the node get from others. The last V are of a node that has nothing. Only the given pairs are looked at.
    """
    U, V, M = len(parts_U), len(parts_V), parts_U.shape[-1]
    parts_U = np.concatenate([parts_U, np.zeros((1, 2, 3, M))])
    is_given = np.zeros((U + 1) * V, bool)
    for pair in pairs:
        is_given[pair] = True
    wanted = np.ascontiguousarray(np.moveaxis(parts_V, 0, 2))
    tables = np.zeros((3, U + 1, V))
    for u, given in enumerate(is_given.reshape(U + 1, V)):
        v = np.flatnonzero(given)
        near_VM, far_VM = received(parts_U[u], wanted[:, :, v])
        tables[:, u, v] = near_VM.max(axis=1), far_VM.max(axis=1), far_VM.sum(axis=1)
    return tables.reshape(3, -1)


def _different(arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct entries along the first axis, by first appearance, and the number of each entry among them."""
    numbers: dict[bytes, int] = {}
    number = np.array([numbers.setdefault(array.tobytes(), len(numbers)) for array in arrays])
    return arrays[np.unique(number, return_index=True)[1]], number
