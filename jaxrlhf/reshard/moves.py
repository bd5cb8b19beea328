"""Planning the moves of arrays between devices: arithmetic on boxes, without JAX devices.

A device holds a box of an array: a start and a stop for each dim. Another box reaches a device in pieces, each its
intersection with one box of the source. If several devices hold a source box, one is chosen: the device itself, else
one on its node, and of these the one with the least to send so far.

Devices are numbers from 0 on. `reallocate` executes the plan, and `traffic` counts it.
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

LOTS = 4
"""The most different plans for like arrays: few, so that a large model is planned quickly, but enough for all owners of
a box to take turns."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Device numbers in a grid with named axes, like a mesh."""

    axes: tuple[tuple[str, int], ...]
    """Name and degree of every axis, outermost first."""
    devices: tuple[int, ...]
    """In row-major order."""

    def __post_init__(self) -> None:
        size = math.prod(degree for _, degree in self.axes)
        if size != len(self.devices) or len(set(self.devices)) != size:
            raise ValueError(
                f"Grid {dict(self.axes)}: needs {size} different devices. Got {len(self.devices)}, of which "
                f"{len(set(self.devices))} are different."
            )

    def boxes(self, shape: tuple[int, ...], spec: Sequence[str | tuple[str, ...] | None]) -> "Boxes":
        """The box of each device, for an array whose dims are split over the axes in `spec`. Raises ValueError if an
        axis is unknown, or a dim does not divide evenly."""
        degrees = dict(self.axes)
        coordinates = dict(
            zip(degrees, np.unravel_index(np.arange(len(self.devices)), tuple(degrees.values())), strict=True)
        )
        starts = np.zeros((len(self.devices), len(shape)), np.int64)
        sizes = np.array(shape, np.int64)
        for dim, entry in enumerate(spec):
            names = (entry,) if isinstance(entry, str) else entry or ()
            if unknown := [name for name in names if name not in degrees]:
                raise ValueError(f"Unknown mesh axis {unknown[0]!r} in {tuple(spec)}. Known: {', '.join(degrees)}.")
            degree = math.prod(degrees[name] for name in names)
            if degree == 1:
                continue
            if shape[dim] % degree:
                raise ValueError(
                    f"Shape {shape}: dim {dim} must be a multiple of its degree {degree} (axes {', '.join(names)}). "
                    f"Got {shape[dim]}."
                )
            sizes[dim] = shape[dim] // degree
            index = np.ravel_multi_index([coordinates[name] for name in names], [degrees[name] for name in names])
            starts[:, dim] = index * sizes[dim]
        return Boxes(np.array(self.devices, np.int64), starts, starts + sizes)


@dataclasses.dataclass(frozen=True, eq=False)
class Boxes:
    """The box of each device, one row for each. N devices, R dims."""

    devices_N: Ints
    starts_NR: Ints
    stops_NR: Ints

    @functools.cached_property
    def groups(self) -> "Groups":
        """The devices grouped by their boxes."""
        rows = np.concatenate([self.starts_NR, self.stops_NR], axis=1)
        if rows.shape[1]:
            different, box_N = np.unique(rows, axis=0, return_inverse=True)
            box_N = box_N.reshape(-1)
        else:
            different, box_N = rows[:1], np.zeros(len(rows), np.int64)
        order = np.lexsort((self.devices_N, box_N))
        counts = np.bincount(box_N, minlength=len(different))
        rank = self.starts_NR.shape[1]
        return Groups(different[:, :rank], different[:, rank:], self.devices_N[order], counts, box_N)


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """The G different boxes among N devices."""

    starts_GR: Ints
    stops_GR: Ints
    members_N: Ints
    """The devices ordered by box, and by number within a box."""
    counts_G: Ints
    box_N: Ints
    """Row of `Boxes` -> its box."""

    @functools.cached_property
    def firsts_G(self) -> Ints:
        """The index in `members_N` of the first device of each box."""
        return np.cumsum(self.counts_G) - self.counts_G


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """The K pieces into which two layouts cut an array, and the M moves that bring each piece to its targets.

    Moves without a choice have their source already: the target itself, or the only owner.
    """

    starts_KR: Ints
    stops_KR: Ints
    source_box_K: Ints
    piece_M: Ints
    target_M: Ints
    source_M: Ints
    """The source of each move; -1 if it is to be chosen among several devices."""
    size_K: Ints
    """The number of elements of each piece."""


@dataclasses.dataclass(frozen=True, eq=False)
class Moves:
    """The M moves of one array. Pieces that stay on a device count as moves from it to itself."""

    source_M: Ints
    target_M: Ints
    piece_M: Ints
    pieces: Pieces

    @property
    def starts_MR(self) -> Ints:
        """The start in the array of each moved piece."""
        return self.pieces.starts_KR[self.piece_M]

    @property
    def stops_MR(self) -> Ints:
        return self.pieces.stops_KR[self.piece_M]

    @property
    def sizes_M(self) -> Ints:
        """The number of elements of each moved piece."""
        return self.pieces.size_K[self.piece_M]

    @functools.cached_property
    def key(self) -> bytes:
        """A key that distinguishes moves between the same layouts."""
        return self.source_M.tobytes()


def cut(source: Boxes, target: Boxes) -> Pieces:
    """The pieces of an array that moves from the boxes `source` to the boxes `target`."""
    owners, takers = source.groups, target.groups
    shared_ST = np.ones((len(owners.counts_G), len(takers.counts_G)), bool)
    for dim in range(source.starts_NR.shape[1]):
        shared_ST &= owners.starts_GR[:, None, dim] < takers.stops_GR[None, :, dim]
        shared_ST &= takers.starts_GR[None, :, dim] < owners.stops_GR[:, None, dim]
    box_K, taker_K = np.nonzero(shared_ST)
    starts_KR = np.maximum(owners.starts_GR[box_K], takers.starts_GR[taker_K])
    stops_KR = np.minimum(owners.stops_GR[box_K], takers.stops_GR[taker_K])

    counts_K = takers.counts_G[taker_K]
    piece_M = np.repeat(np.arange(len(box_K)), counts_K)
    within_M = np.arange(len(piece_M)) - np.repeat(np.cumsum(counts_K) - counts_K, counts_K)
    target_M = takers.members_N[takers.firsts_G[taker_K][piece_M] + within_M]

    num_devices = 1 + max(source.devices_N.max(initial=-1), target.devices_N.max(initial=-1))
    own_box_D = np.full(num_devices, -1, np.int64)
    own_box_D[source.devices_N] = owners.box_N
    box_M = box_K[piece_M]
    only_one_M = owners.counts_G[box_M] == 1
    source_M = np.where(only_one_M, owners.members_N[owners.firsts_G[box_M]], -1)
    source_M = np.where(own_box_D[target_M] == box_M, target_M, source_M)
    return Pieces(starts_KR, stops_KR, box_K, piece_M, target_M, source_M, np.prod(stops_KR - starts_KR, axis=1))


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """A number of like arrays with the same change of layout."""

    source: Boxes
    target: Boxes
    itemsize: int
    count: int = 1


def plan_moves(changes: Sequence[Change], nodes: Sequence[int]) -> list[list[tuple[Moves, int]]]:
    """The moves of a tree of arrays.

    Args:
        changes: The arrays to move. The order matters: the load of a device accumulates from one change to the next.
        nodes: Device -> its node.

    Returns:
        For each change, pairs of moves and the number of consecutive arrays that move so.
    """
    nodes_D = np.asarray(nodes, np.int64)
    load_D = np.zeros(len(nodes_D), np.int64)
    planned = []
    for change in changes:
        pieces = cut(change.source, change.target)
        owners = change.source.groups
        lots: list[tuple[Moves, int]] = []
        left = change.count
        for lots_left in range(min(LOTS, change.count), 0, -1):
            if not left:
                break
            count = -(-left // lots_left)
            source_M = _choose(pieces, owners, nodes_D, load_D, change.itemsize * count)
            moves = Moves(source_M, pieces.target_M, pieces.piece_M, pieces)
            # If all owners send equally much, taking turns changes nothing.
            if _is_even(moves, owners):
                count = left
            lots.append((moves, count))
            load_D += change.itemsize * count * _sent(moves, len(nodes_D))
            left -= count
        planned.append(lots)
    return planned


def _is_even(moves: Moves, owners: Groups) -> bool:
    """Returns whether all owners of each box have equally much to send."""
    sent_N = _sent(moves, 1 + int(owners.members_N.max()))[owners.members_N]
    first_N = np.repeat(sent_N[owners.firsts_G], owners.counts_G)
    return bool((sent_N == first_N).all())


def _sent(moves: Moves, num_devices: int) -> Ints:
    """The number of elements that each device sends to others."""
    sent_D = np.zeros(num_devices, np.int64)
    np.add.at(sent_D, moves.source_M, np.where(moves.source_M == moves.target_M, 0, moves.sizes_M))
    return sent_D


def _choose(pieces: Pieces, owners: Groups, nodes_D: Ints, load_D: Ints, itemsize: int) -> Ints:
    """A source for every move: the owner with the least to send, on the target's node if there is one.

    A device holds one box of an array, so its load grows only by the moves of this box. The heaps of a box, one for
    each node and one for all, are updated lazily: a load that has grown is pushed again.
    """
    source_M = pieces.source_M.copy()
    load = load_D.tolist()
    nodes = nodes_D.tolist()
    size_K = (pieces.size_K * itemsize).tolist()
    heaps: dict[tuple[int, int], list[tuple[int, int]]] = {}
    everyone = -1
    boxes_seen = set()
    for move in np.flatnonzero(source_M < 0).tolist():
        piece = int(pieces.piece_M[move])
        box = int(pieces.source_box_K[piece])
        if box not in boxes_seen:
            boxes_seen.add(box)
            first = owners.firsts_G[box]
            for device in owners.members_N[first : first + owners.counts_G[box]].tolist():
                heaps.setdefault((box, nodes[device]), []).append((load[device], device))
                heaps.setdefault((box, everyone), []).append((load[device], device))
            for key in [key for key in heaps if key[0] == box]:
                heapq.heapify(heaps[key])
        near = heaps.get((box, nodes[pieces.target_M[move]]))
        heap = heaps[box, everyone] if near is None else near
        while heap[0][0] != load[heap[0][1]]:
            heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
        device = heap[0][1]
        load[device] += size_K[piece]
        source_M[move] = device
    return source_M
