"""Moving arrays between virtual devices of one CPU by copies in host memory, which is also theirs.

No program is compiled, nothing is copied twice, and devices with equal shards share memory, as after `jax.device_put`.
The host waits for the sources.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxrlhf.reshard.moves import Moves
from jaxrlhf.reshard.tree_moves import Device, Signature, boxes_of

ALIGNMENT = 64
"""JAX takes over host memory without a copy if its address is a multiple of this number of bytes."""


def copy_on_host(
    arrays: Sequence[jax.Array],
    signatures: Sequence[Signature],
    moves: Sequence[Moves],
    targets: Sequence[jax.sharding.Sharding],
    devices: tuple[Device, ...],
) -> list[jax.Array]:
    """Executes the moves of arrays, which name devices by their positions in `devices`."""
    blocks, destinations, counts = [], [], []
    for array, signature, each in zip(arrays, signatures, moves, strict=True):
        source = boxes_of(signature.source, signature.shape, devices)
        target = boxes_of(signature.target, signature.shape, devices)
        start = dict(zip(source.devices_N.tolist(), source.starts_NR, strict=True))
        # On CPUs, a view of the shard's own memory.
        held = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
        arriving: dict[int, list[int]] = {}
        for move, device in enumerate(each.target_M.tolist()):
            arriving.setdefault(device, []).append(move)
        groups = target.groups
        sources, starts_MR, stops_MR = each.source_M.tolist(), each.starts_MR, each.stops_MR
        for box, first in enumerate(groups.firsts_G.tolist()):
            members = groups.members_N[first : first + groups.counts_G[box]].tolist()
            begin = groups.starts_GR[box]
            block = _aligned(tuple((groups.stops_GR[box] - begin).tolist()), signature.dtype)
            for move in arriving[members[0]]:
                piece = held[devices[sources[move]]]
                to = _slices(starts_MR[move] - begin, stops_MR[move] - begin)
                origin = start[sources[move]]
                block[to] = piece[_slices(starts_MR[move] - origin, stops_MR[move] - origin)]
            blocks += [block] * len(members)
            destinations += [devices[member] for member in members]
        counts.append(len(target.devices_N))
    placed = iter(jax.device_put(blocks, destinations))
    return [
        jax.make_array_from_single_device_arrays(
            signature.shape, sharding, [next(placed) for _ in range(count)], dtype=signature.dtype
        )
        for signature, sharding, count in zip(signatures, targets, counts, strict=True)
    ]


def _slices(start: np.ndarray, stop: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(start.tolist(), stop.tolist(), strict=True))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """New memory that JAX takes over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % ALIGNMENT
    return buffer[offset : offset + nbytes].view(dtype).reshape(shape)
