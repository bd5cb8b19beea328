"""Sharded arrays, made of pieces in host memory and cut into them, so that no process holds a whole array there."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxrlhf.models.weight_files import CHUNK_BYTES, Index, Processes


def make_array(
    shape: tuple[int, ...], sharding: NamedSharding, read: Callable[[Index], np.ndarray], dtype: Any
) -> jax.Array:
    """An array whose shards are read one by one, each once in a process, by the slices that its devices hold.

    Beside the array, host memory has one shard: `jax.make_array_from_callback` asks for those of all devices first.
    """
    made: dict[str, jax.Array] = {}
    shards = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        there = made.get(str(index))
        # not the memory of the NumPy array, which a program could not take over when weights are updated in place
        shard = jax.device_put(read(index) if there is None else there, device, may_alias=False)
        made[str(index)] = shard.block_until_ready()
        shards.append(shard)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=np.dtype(dtype))


class _Piece(NamedTuple):
    start: tuple[int, ...]
    array: np.ndarray


def file_rows(
    array: jax.Array | np.ndarray, layer: int | None, dtype: Any, processes: Processes, *, transposed: bool
) -> Iterator[np.ndarray | None]:
    """Yields an array in chunks of rows as a weight file has them; None in all processes but the first.

    Args:
        layer: The number of the layer, of an array with several; None for an array of its own.
        transposed: The rows of the file are the columns of the array.
    """
    array = _on_devices(array)
    shape = array.shape if layer is None else array.shape[1:]
    rows_dim = len(shape) - 1 if transposed else 0
    step = max(1, CHUNK_BYTES // max(1, 4 * math.prod(shape) // max(1, shape[rows_dim])))
    for begin in range(0, shape[rows_dim], step):
        box = [(0, size) for size in shape]
        box[rows_dim] = (begin, min(begin + step, shape[rows_dim]))
        if layer is not None:
            box = [(layer, layer + 1), *box]
        whole = _gather(array, box, dtype, processes)
        if whole is not None and layer is not None:
            whole = whole[0]
        yield whole.T if whole is not None and transposed else whole


def _on_devices(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """An array that rests in pinned host memory, on its devices: no program slices it where it is."""
    if isinstance(array, jax.Array) and array.sharding.memory_kind == "pinned_host":
        sharding = array.sharding.with_memory_kind("device")
        if not sharding.addressable_devices:
            return jax.make_array_from_single_device_arrays(array.shape, sharding, [], dtype=array.dtype)
        return jax.device_put(array, sharding)
    return array


def _gather(
    array: jax.Array | np.ndarray, box: list[tuple[int, int]], dtype: Any, processes: Processes
) -> np.ndarray | None:
    """A box of an array in the first process."""
    found = processes.gather(_own_pieces(array, box))
    if not processes.is_first:
        return None
    whole = np.empty([stop - start for start, stop in box], dtype)
    for piece in (piece for process in found for piece in process):
        at = tuple(
            slice(start - low, start - low + size)
            for start, (low, _), size in zip(piece.start, box, piece.array.shape, strict=True)
        )
        whole[at] = piece.array
    return whole


def _own_pieces(array: jax.Array | np.ndarray, box: list[tuple[int, int]]) -> list[_Piece]:
    """The pieces of a box that devices of this process hold, without replicas. NumPy arrays are the same everywhere."""
    if not isinstance(array, jax.Array):
        return [_Piece(tuple(start for start, _ in box), array[tuple(slice(*each) for each in box)])]
    pieces = []
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        bounds = [each.indices(size)[:2] for each, size in zip(shard.index, array.shape, strict=True)]
        starts = tuple(max(a, low) for (a, _), (low, _) in zip(bounds, box, strict=True))
        stops = tuple(min(b, high) for (_, b), (_, high) in zip(bounds, box, strict=True))
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            continue
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        inside = tuple(start - a for start, (a, _) in zip(starts, bounds, strict=True))
        if shard.device.platform == "cpu":  # a view
            cut = np.asarray(shard.data)[tuple(slice(at, at + n) for at, n in zip(inside, sizes, strict=True))]
        else:  # cut out on the device: an array keeps a host copy of itself once it was asked for one
            cut = np.asarray(_cut(shard.data, inside, sizes))
        pieces.append(_Piece(starts, cut))
    return pieces


@functools.partial(jax.jit, static_argnames="sizes")
def _cut(array: jax.Array, starts: tuple[Any, ...], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, starts, sizes)
