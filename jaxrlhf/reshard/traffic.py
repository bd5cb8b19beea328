"""Traffic of a reallocation: the bytes that devices send and receive, within nodes and between them.

It is counted from the plan that `reallocate` executes, either for arrays and shardings (`traffic_of`), or by arithmetic
for grids of devices that need not exist (`traffic`). A piece counts once for every device that receives it.
"""

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from jaxrlhf.reshard.moves import Change, Grid, Moves, plan_moves
from jaxrlhf.reshard.reallocate import flatten, is_placed, signature_of
from jaxrlhf.reshard.tree_moves import Signature, tree_moves
from jaxrlhf.sharding.axes import WEIGHTS_AT_REST, partition_spec
from jaxrlhf.sharding.mesh import own_ids

Spec = tuple[str | tuple[str, ...] | None, ...]
"""Dim -> the mesh axes over which it is split."""


class Traffic(NamedTuple):
    """Bytes that a reallocation moves: those of the pieces that arrive, without temporary copies of collectives."""

    sent_bytes: Mapping[int, int]
    """Device -> bytes sent to others."""
    received_bytes: Mapping[int, int]
    """Device -> bytes received from others."""
    local_bytes: int
    """Bytes that stay on their device."""
    within_nodes_bytes: int
    between_nodes_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes that go from one device to another."""
        return self.within_nodes_bytes + self.between_nodes_bytes


class DescribedArray(NamedTuple):
    """An array that goes from one grid of devices to another."""

    shape: tuple[int, ...]
    dtype: np.dtype
    source: Spec
    target: Spec


def describe(
    weights: Iterable[tuple[tuple[int, ...], jax.typing.DTypeLike, tuple[str | None, ...]]],
) -> list[DescribedArray]:
    """Weights by shape, dtype and logical axes, that rest on both grids, whose degrees divide them."""
    described = []
    for shape, dtype, axes in weights:
        spec = tuple(partition_spec(axes, WEIGHTS_AT_REST))
        described.append(DescribedArray(shape, np.dtype(dtype), spec, spec))
    return described


def traffic(arrays: Sequence[DescribedArray], source: Grid, target: Grid, *, node_size: int) -> Traffic:
    """The traffic of arrays that go from one grid to another.

    Args:
        arrays: In the order of their tree, since the choice of sources depends on the arrays before.
        source: Devices are numbers; `node_size` consecutive ones are a node.
        target: As `source`.

    Raises:
        ValueError: A dim does not divide evenly, or an axis is not of the grid.
    """
    devices = sorted({*source.devices, *target.devices})
    nodes = [device // node_size for device in range(devices[-1] + 1)]
    counts = collections.Counter(arrays)
    source_boxes = functools.cache(source.boxes)
    target_boxes = functools.cache(target.boxes)
    changes = [
        Change(source_boxes(a.shape, a.source), target_boxes(a.shape, a.target), a.dtype.itemsize, count)
        for a, count in counts.items()
    ]
    planned = [
        (moves, change.itemsize * count)
        for change, lots in zip(changes, plan_moves(changes, nodes), strict=True)
        for moves, count in lots
    ]
    return _count(planned, nodes, dict.fromkeys(devices, 0), range(len(nodes)))


def traffic_of(tree: PyTree[jax.Array], shardings: PyTree[Sharding]) -> Traffic:
    """The traffic of `reallocate(tree, shardings)` between devices, named by their ids; nodes are processes.

    Moves from or to host memory do not count. The result is cached.
    """
    _, arrays, targets, _ = flatten(tree, shardings)
    return _traffic_of(
        tuple(signature_of(a, target) for a, target in zip(arrays, targets, strict=True) if is_placed(a))
    )


def bytes_received_here(tree: PyTree[jax.Array], shardings: PyTree[Sharding]) -> int:
    """Bytes that the devices of this process receive in `reallocate(tree, shardings)`."""
    received = traffic_of(tree, shardings).received_bytes
    return sum(received.get(device, 0) for device in own_ids())


@functools.lru_cache(maxsize=64)
def _traffic_of(signatures: tuple[Signature, ...]) -> Traffic:
    tree = tree_moves(signatures)
    planned = [(moves, s.dtype.itemsize) for moves, s in zip(tree.moves, signatures, strict=True)]
    ids = [device.id for device in tree.devices]
    return _count(planned, tree.nodes, dict.fromkeys(ids, 0), ids)


def _count(
    planned: Sequence[tuple[Moves, int]], nodes: Sequence[int], nothing: Mapping[int, int], names: Sequence[int]
) -> Traffic:
    """The traffic of moves, each with the bytes of one element of all its arrays."""
    nodes_D = np.asarray(nodes, np.int64)
    sent_D, received_D = np.zeros((2, len(nodes_D)), np.int64)
    local = within = 0
    for moves, itemsize in planned:
        bytes_M = moves.sizes_M * itemsize
        stays_M = moves.source_M == moves.target_M
        near_M = (nodes_D[moves.source_M] == nodes_D[moves.target_M]) & ~stays_M
        local += int(bytes_M[stays_M].sum())
        within += int(bytes_M[near_M].sum())
        leaving_M = np.where(stays_M, 0, bytes_M)
        np.add.at(sent_D, moves.source_M, leaving_M)
        np.add.at(received_D, moves.target_M, leaving_M)
    sent, received = (
        {**nothing, **{names[i]: int(by_device[i]) for i in np.flatnonzero(by_device).tolist()}}
        for by_device in (sent_D, received_D)
    )
    return Traffic(sent, received, local, within, int(sent_D.sum()) - within)
