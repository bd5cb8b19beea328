"""Seconds of reallocations: what is received is what is moved."""

import itertools
from typing import Any

import numpy as np
import pytest

from jaxrlhf.planner import reallocation
from jaxrlhf.planner.cluster_text import read_cluster
from jaxrlhf.planner.problem import Choice
from jaxrlhf.planner.reallocation import parts_of, reallocation_seconds
from jaxrlhf.reshard.traffic import Described, traffic
from jaxrlhf.reshard.transfer import Grid
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


def received(source: Choice, target: Choice, num_layers: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Fractions of the model that devices get from their own node, and from others."""
    parts = parts_of([source, target], 16, 4, num_layers)
    low, high, has = parts.low[:, [1]], parts.high[:, [1]], parts.has[[1]]
    whole = np.prod(high - low, axis=0) * has
    near, far = reallocation._received(parts, 0, low, high, has, whole, 4, 4)
    return near[0], far[0]


def grid(choice: Choice) -> Grid:
    s = choice.strategy
    return Grid((("data", s.data), ("fsdp", s.fsdp), ("tensor", s.tensor)), tuple(choice.devices))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(SOURCES, TARGETS)))
def test_what_is_received_is_what_a_reallocation_moves(source, target):
    moved = traffic(
        [Described((64, 64), np.dtype("int8"), ("fsdp", "tensor"), ("fsdp", "tensor"))],
        grid(source), grid(target), node_size=4,
    )  # fmt: skip
    near, far = received(source, target)
    each = [moved.received_bytes.get(device, 0) for device in range(16)]
    np.testing.assert_allclose((near + far) * SIZE, each, rtol=1e-6)
    np.testing.assert_allclose(near.sum() * SIZE, moved.within_nodes_bytes, rtol=1e-6)
    np.testing.assert_allclose(far.sum() * SIZE, moved.between_nodes_bytes, rtol=1e-6)


def test_stages_have_their_layers():
    """Two stages of a model of 3 layers, of 2 and 1, to all on every device: each lacks the layers of the others."""
    near, far = received(choice(0, 2, pipeline=2), choice(0, 2, data=2), num_layers=3)
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
