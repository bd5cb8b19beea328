"""Seconds of reallocations: what is received is what is moved."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.planner.search.problem import Choice
from jaxrlhf.planner.search.reallocation_seconds import node_parts, reallocation_seconds, received, shape_of
from jaxrlhf.reshard.moves import Grid
from jaxrlhf.reshard.traffic import DescribedArray, traffic
from jaxrlhf.sharding.stage_layers import layers_of_stages
from jaxrlhf.sharding.strategy import Strategy

CLUSTER = read_cluster("4x4:a100-80g")
SIZE = 64 * 64


def choice(first: int, end: int, **strategy: Any) -> Choice:
    return Choice(first, end, Strategy(**strategy), 1.0)


SOURCES = [
    choice(0, 16, data=2, fsdp=2, tensor=4),
    choice(0, 8, fsdp=4, tensor=2),
    choice(0, 8, fsdp=8),
    choice(4, 12, data=4, tensor=2),
    choice(0, 16, data=16),
    choice(2, 4, tensor=2),
]
TARGETS = [
    choice(0, 16, data=8, tensor=2),
    choice(8, 16, data=2, tensor=4),
    choice(0, 4, tensor=4),
    choice(2, 4, data=2),
    choice(0, 8, fsdp=4, tensor=2),
]


def received_by_devices(source: Choice, target: Choice, num_layers: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Fractions of the model that devices get from their own node, and from others."""
    parts = np.zeros((2, 4, 2, 3, 4))
    for of_nodes, choice in zip(parts, (source, target), strict=True):
        found = node_parts(shape_of(choice, 4), 4, num_layers)
        of_nodes[choice.first // 4 :][: len(found)] = found
    near, far = zip(*(received(has, wanted[:, :, None]) for has, wanted in zip(*parts, strict=True)), strict=True)
    return np.concatenate(near).ravel(), np.concatenate(far).ravel()


def grid(choice: Choice) -> Grid:
    s = choice.strategy
    return Grid((("data", s.data), ("fsdp", s.fsdp), ("tensor", s.tensor)), tuple(choice.devices))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(SOURCES, TARGETS)))
def test_what_is_received_is_what_a_reallocation_moves(source, target):
    moved = traffic(
        [DescribedArray((64, 64), np.dtype("int8"), ("fsdp", "tensor"), ("fsdp", "tensor"))],
        grid(source), grid(target), node_size=4,
    )  # fmt: skip
    near, far = received_by_devices(source, target)
    each = [moved.received_bytes.get(device, 0) for device in range(16)]
    np.testing.assert_allclose((near + far) * SIZE, each, rtol=1e-6)
    np.testing.assert_allclose(near.sum() * SIZE, moved.within_nodes_bytes, rtol=1e-6)
    np.testing.assert_allclose(far.sum() * SIZE, moved.between_nodes_bytes, rtol=1e-6)


def test_stages_have_their_layers():
    """Two stages of a model of 3 layers, of 2 and 1, to all on every device: each lacks the layers of the others."""
    near, far = received_by_devices(choice(0, 2, pipeline=2), choice(0, 2, data=2), num_layers=3)
    np.testing.assert_allclose(near[:2], [1 / 3, 2 / 3], rtol=1e-6)
    assert not far.any()


def test_seconds_are_those_of_the_links():
    size = 8e9
    kind = CLUSTER.groups[0].kind
    near = kind.link.bandwidth * kind.coefficients.link_efficiency
    table = reallocation_seconds(
        [choice(0, 4, tensor=4), choice(0, 2, tensor=2)],
        [choice(0, 4, tensor=4), choice(0, 4, data=4), choice(4, 8, tensor=4)],
        size=size, num_layers=8, cluster=CLUSTER,
    )  # fmt: skip
    assert table[0, 0] == 0  # it lies there already
    assert table[0, 1] == pytest.approx(0.75 * size / near + kind.coefficients.collective_seconds)
    assert table[1, 1] == pytest.approx(size / near + kind.coefficients.collective_seconds)  # to what had nothing
    network = CLUSTER.groups[0].network
    rate = network.bandwidth * kind.coefficients.network_efficiency
    alone = network.shared_by(1) * kind.coefficients.network_efficiency
    slowest = max(size / rate, size / 4 / alone)
    assert table[0, 2] == pytest.approx(slowest + kind.coefficients.network_collective_seconds)


NUM_LAYERS = 12
CELLS = 96, 24
"""Along `fsdp` and `tensor`: multiples of all degrees of 1 to 4 nodes of 8."""


def cells(choice: Choice, num_devices: int) -> np.ndarray:
    """[devices, layers, *CELLS] which of the equal pieces of a model each device has."""
    s, (along_fsdp, along_tensor) = choice.strategy, CELLS
    has = np.zeros((num_devices, NUM_LAYERS, *CELLS), bool)
    at = itertools.product(layers_of_stages(NUM_LAYERS, s.pipeline), range(s.data), range(s.fsdp), range(s.tensor))
    for device, (layers, _, f, t) in zip(choice.devices, at, strict=True):
        f_begins, f_ends = f * along_fsdp // s.fsdp, (f + 1) * along_fsdp // s.fsdp
        t_begins, t_ends = t * along_tensor // s.tensor, (t + 1) * along_tensor // s.tensor
        has[device, layers.start : layers.stop, f_begins:f_ends, t_begins:t_ends] = True
    return has


def seconds_by_cells(has: np.ndarray, wanted: np.ndarray, size: float, cluster: Cluster) -> float:
    """Seconds between two layouts, device by device and piece by piece."""
    kind, network, per_node = cluster.groups[0].kind, cluster.groups[0].network, cluster.devices_per_node
    in_node = has.reshape(-1, per_node, *has.shape[1:]).any(axis=1).repeat(per_node, axis=0)
    piece = size / has[0].size
    near = piece * (wanted & in_node & ~has).sum(axis=(1, 2, 3))
    far = piece * (wanted & ~in_node).sum(axis=(1, 2, 3))
    far_of_node = far.reshape(-1, per_node).sum(axis=1)
    if not near.any() and not far.any():
        return 0.0
    costs = kind.coefficients
    node_rate = network.bandwidth * costs.network_efficiency
    sending_nodes = has.any(axis=(1, 2, 3)).reshape(-1, per_node).any(axis=1).sum()
    between_nodes = max(
        far.max() / (network.shared_by(1) * costs.network_efficiency),
        far_of_node.max() / node_rate,
        far.sum() / sending_nodes / node_rate,
    )
    latency = costs.network_collective_seconds if far.any() else costs.collective_seconds
    return near.max() / (kind.link.bandwidth * costs.link_efficiency) + between_nodes + latency


def any_choice(cluster: Cluster, rng: np.random.Generator) -> Choice:
    """Devices that a call may have, few as often as many, or others that follow one another; and degrees over them."""
    ranges = [*cluster.meshes, range(1, 3), range(3, 9), range(2, 10), range(6, 12)]
    size = rng.choice(sorted({len(devices) for devices in ranges}))
    of_size = [devices for devices in ranges if len(devices) == size]
    devices = of_size[rng.integers(len(of_size))]
    degrees = [d for d in range(1, len(devices) + 1) if len(devices) % d == 0]
    found = [
        dict(zip(("pipeline", "data", "fsdp", "tensor"), each, strict=True))
        for each in itertools.product(degrees, repeat=4)
        if np.prod(each) == len(devices) and each[0] <= NUM_LAYERS and each[3] <= cluster.devices_per_node
    ]
    return choice(devices.start, devices.stop, **found[rng.integers(len(found))])


@pytest.mark.parametrize("described", ["3x4:a100-80g", "4x8:a100-80g"])
def test_tables_are_what_each_pair_takes(described):
    group, rng, size = read_cluster(described).groups[0], np.random.default_rng(0), 8e9
    network = dataclasses.replace(group.network, adapters=2)  # slow for one device, and for all of a node together
    cluster = Cluster((dataclasses.replace(group, network=network),))
    sources, targets = ([any_choice(cluster, rng) for _ in range(16)] for _ in range(2))
    table = reallocation_seconds(sources, targets, size=size, num_layers=NUM_LAYERS, cluster=cluster)
    have, want = ([cells(c, cluster.num_devices) for c in group] for group in (sources, targets))
    expected = [[seconds_by_cells(has, wanted, size, cluster) for wanted in want] for has in have]
    np.testing.assert_allclose(table, expected, rtol=1e-6, atol=0)
