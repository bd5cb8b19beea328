"""The moves of a tree of arrays, from their shardings."""

import collections
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxrlhf.reshard.moves import Boxes, Change, Grid, Moves, plan_moves

Device = Any
"""`jax.Device`, which type checkers take for a variable."""


class Signature(NamedTuple):
    """An array and its source and target shardings."""

    shape: tuple[int, ...]
    dtype: np.dtype
    source: Sharding
    target: Sharding

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class TreeMoves:
    """The moves of every array of a tree, between positions in `devices`."""

    devices: tuple[Device, ...]
    nodes: tuple[int, ...]
    """Position -> its process."""
    moves: tuple[Moves, ...]


@functools.lru_cache(maxsize=64)
def tree_moves(signatures: tuple[Signature, ...]) -> TreeMoves:
    """Plans the moves of the arrays of a tree, in their order, identically in every process."""
    devices = union(*signatures)
    nodes = tuple(device.process_index for device in devices)
    counts = collections.Counter(signatures)
    changes = [
        Change(boxes_of(s.source, s.shape, devices), boxes_of(s.target, s.shape, devices), s.dtype.itemsize, count)
        for s, count in counts.items()
    ]
    turns = {
        signature: iter([moves for moves, count in lots for _ in range(count)])
        for signature, lots in zip(counts, plan_moves(changes, nodes), strict=True)
    }
    return TreeMoves(devices, nodes, tuple(next(turns[signature]) for signature in signatures))


@functools.lru_cache(maxsize=4096)
def boxes_of(sharding: Sharding, shape: tuple[int, ...], devices: tuple[Device, ...]) -> Boxes:
    """The boxes of a sharding, by positions in `devices`."""
    position = {device: i for i, device in enumerate(devices)}
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        grid = Grid(tuple(mesh.shape.items()), tuple(position[device] for device in mesh_devices(sharding)))
        return grid.boxes(shape, tuple(sharding.spec))
    indices = sharding.devices_indices_map(shape)
    limits = [[index.indices(n)[:2] for index, n in zip(box, shape, strict=True)] for box in indices.values()]
    limits_NR2 = np.array(limits, np.int64).reshape(len(indices), len(shape), 2)
    return Boxes(np.array([position[device] for device in indices], np.int64), limits_NR2[..., 0], limits_NR2[..., 1])


def mesh_devices(sharding: NamedSharding) -> tuple[Device, ...]:
    """The devices of a mesh as its programs number them."""
    assert sharding.mesh.devices is not None
    return tuple(sharding.mesh.devices.flat)


def on_device(sharding: Sharding) -> Sharding:
    """The same layout in the devices' own memory."""
    kind = next(iter(sharding.device_set)).default_memory().kind
    return sharding if sharding.memory_kind == kind else sharding.with_memory_kind(kind)


def union(*signatures: Signature) -> tuple[Device, ...]:
    """The devices of all layouts of arrays, in an order that all processes agree on."""
    devices: set[Device] = set().union(*(s.source.device_set | s.target.device_set for s in signatures))
    return tuple(sorted(devices, key=lambda device: (device.process_index, device.id)))
