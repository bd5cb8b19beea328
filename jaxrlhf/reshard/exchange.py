"""One program over the devices of two layouts that executes the moves of arrays, in any number of processes.

Every device of either layout takes part. The moves of an array are grouped into rounds, in each of which a device sends
at most one piece and receives at most one, all of the same shape. A round is one `ppermute`, which small arrays of the
same kind share.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.reshard.moves import Boxes, Moves
from jaxrlhf.reshard.tree_moves import Device, Signature, boxes_of, on_device
from jaxrlhf.sharding.processes import meet_first

AXIS = "device"
ALONE_BYTES = 2**16
"""Smaller pieces of like arrays share one collective. For larger ones, the copy into one array costs more."""


@dataclasses.dataclass(frozen=True)
class Round:
    """Pieces of one shape that move at the same time."""

    shape: tuple[int, ...]
    links: tuple[tuple[int, int], ...]
    """(from, to) as positions in the program's mesh; empty where pieces stay on their device."""
    read_UR: np.ndarray
    """Position -> the start of the piece in its source shard."""
    write_UR: np.ndarray
    """Position -> the start of the piece in its target shard."""
    writes_U: np.ndarray
    """Position -> True if it writes in this round."""


@dataclasses.dataclass(frozen=True)
class Lot:
    """Arrays with the same moves, between positions in the program's mesh."""

    signature: Signature
    count: int
    choice: bytes
    """The chosen sources, which determine the moves together with the signature and the devices."""
    moves: Moves = dataclasses.field(compare=False)


def rounds(moves: Moves, source: Boxes, target: Boxes, num_devices: int) -> list[Round]:
    """The moves of an array in rounds.

    Moves are ordered by their distance around the ring of devices, so that regular patterns fill their rounds.
    """
    source_start = dict(zip(source.devices_N.tolist(), source.starts_NR, strict=True))
    target_start = dict(zip(target.devices_N.tolist(), target.starts_NR, strict=True))
    starts_MR, stops_MR = moves.starts_MR, moves.stops_MR
    distance_M = (moves.target_M - moves.source_M) % num_devices
    made: list[
        tuple[tuple[int, ...], bool, dict[int, int], dict[int, int]]
    ] = []  # shape, stays, to -> move, from -> move
    for move in np.lexsort((moves.source_M, distance_M)).tolist():
        sender, receiver = int(moves.source_M[move]), int(moves.target_M[move])
        shape, stays = tuple((stops_MR[move] - starts_MR[move]).tolist()), sender == receiver
        for other_shape, other_stays, to, came in made:
            if (other_shape, other_stays) == (shape, stays) and receiver not in to and sender not in came:
                break
        else:
            to, came = {}, {}
            made.append((shape, stays, to, came))
        to[receiver] = came[sender] = move
    result = []
    for shape, stays, to, came in made:
        read_UR = np.zeros((num_devices, len(shape)), np.int32)
        write_UR = np.zeros((num_devices, len(shape)), np.int32)
        writes_U = np.zeros(num_devices, bool)
        for sender, move in came.items():
            read_UR[sender] = starts_MR[move] - source_start[sender]
        for receiver, move in to.items():
            write_UR[receiver] = starts_MR[move] - target_start[receiver]
            writes_U[receiver] = True
        links = () if stays else tuple((int(moves.source_M[move]), receiver) for receiver, move in to.items())
        result.append(Round(shape, links, read_UR, write_UR, writes_U))
    return result


def exchange(arrays: Sequence[jax.Array], lots: tuple[Lot, ...], devices: tuple[Device, ...]) -> list[jax.Array]:
    """Moves arrays, in the order of their lots, between two layouts that together cover `devices`.

    Every process that owns one of the devices must call it, all in the same order.
    """
    here = tuple(device for device in devices if device.process_index == jax.process_index())
    signatures = [lot.signature for lot in lots for _ in range(lot.count)]
    entering = _enter(arrays, devices, here)
    meet_first(devices)
    leaving = exchange_program(lots, devices)(entering)
    return [_leave(array, signature) for array, signature in zip(leaving, signatures, strict=True)]


@functools.lru_cache(maxsize=256)
def exchange_program(
    lots: tuple[Lot, ...], devices: tuple[Device, ...]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The jitted program of some lots: `shards -> shards`, those of an array one behind another in the order of the
    devices."""
    routes = []
    for lot in lots:
        shape, source, target = lot.signature.shape, lot.signature.source, lot.signature.target
        target_boxes = boxes_of(target, shape, devices)
        made = rounds(lot.moves, boxes_of(source, shape, devices), target_boxes, len(devices))
        routes.append((made, target.shard_shape(shape), set(target_boxes.devices_N.tolist())))

    def move(shards: list[jax.Array]) -> list[jax.Array]:
        position = jax.lax.axis_index(AXIS)
        moved, first = [], 0
        for lot, (made, shape, receivers) in zip(lots, routes, strict=True):
            moved += _move_lot(shards[first : first + lot.count], made, shape, receivers, position)
            first += lot.count
        return moved

    specs = [_spec(len(lot.signature.shape)) for lot in lots for _ in range(lot.count)]
    # Devices outside of a layout hold arbitrary values for it, so no output is truly replicated.
    return jax.jit(jax.shard_map(move, mesh=_mesh(devices), in_specs=(specs,), out_specs=specs, check_vma=False))


def _move_lot(
    shards: list[jax.Array], made: list[Round], shape: tuple[int, ...], receivers: set[int], position: jax.Array
) -> list[jax.Array]:
    """The target shards of like arrays, from their source shards, on one device."""
    # Small arrays are joined into one, since tracing at the start of every process takes time for each operation.
    joined = len(shards) > 1 and shards[0].nbytes < ALONE_BYTES
    lead = (len(shards),) if joined else ()
    blocks = [jnp.stack(shards)] if joined else shards
    outputs: list[jax.Array | None] = [None] * len(blocks)
    for each in made:
        sizes = (*lead, *each.shape)
        pieces = [_slice(block, _starts(each.read_UR, position, lead), sizes) for block in blocks]
        if each.links and (joined or pieces[0].nbytes >= ALONE_BYTES):
            pieces = [jax.lax.ppermute(piece, AXIS, each.links) for piece in pieces]
        elif each.links:
            pieces = list(jax.lax.ppermute(jnp.stack(pieces), AXIS, each.links))
        all_write = receivers <= set(np.flatnonzero(each.writes_U).tolist())
        if all_write and each.shape == shape:
            outputs = [*pieces]
            continue
        write = _starts(each.write_UR, position, lead)
        for i, piece in enumerate(pieces):
            output = outputs[i]
            output = jnp.zeros((*lead, *shape), piece.dtype) if output is None else output
            if not all_write:
                writes = _of_device(each.writes_U, position)
                piece = jax.lax.select(writes, piece, _slice(output, write, sizes))
            outputs[i] = jax.lax.dynamic_update_slice(output, piece, write, allow_negative_indices=False)
    moved = [output for output in outputs if output is not None]
    return list(jnp.unstack(moved[0])) if joined else moved


def _slice(array: jax.Array, starts: list[jax.Array | int], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)


def _starts(table_UR: np.ndarray, position: jax.Array, lead: tuple[int, ...]) -> list[jax.Array | int]:
    """The row of a device in a table, after zeros for leading dims. Values equal on all devices are constants."""
    same = (table_UR == table_UR[0]).all(axis=0)
    of_dims = [
        int(column[0]) if is_same else _of_device(column, position)
        for column, is_same in zip(table_UR.T, same, strict=True)
    ]
    return [0 for _ in lead] + of_dims


def _of_device(numbers_U: np.ndarray, position: jax.Array) -> jax.Array:
    """The entry of a device."""
    return jax.lax.dynamic_index_in_dim(numbers_U, position, keepdims=False, allow_negative_indices=False)


def _enter(arrays: Sequence[jax.Array], devices: tuple[Device, ...], here: tuple[Device, ...]) -> list[jax.Array]:
    """Arrays over all devices of the program, without a copy. Devices outside of the source hold zeros."""
    mesh = _mesh(devices)
    held = [{shard.device: shard.data for shard in array.addressable_shards} for array in arrays]
    local = [array.sharding.shard_shape(array.shape) for array in arrays]
    missing = [tuple(device for device in here if device not in shards) for shards in held]
    zeros: list[jax.Array | None] = [None] * len(arrays)
    for group in dict.fromkeys(missing):  # usually one, since the arrays of an exchange have the same devices
        if group:
            members = [i for i, each in enumerate(missing) if each == group]
            made = _zeros(tuple((local[i], arrays[i].dtype) for i in members), group)()
            for i, array in zip(members, made, strict=True):
                zeros[i] = array
    entering = []
    for array, shards, shape, blank in zip(arrays, held, local, zeros, strict=True):
        if blank is not None:
            shards = shards | {shard.device: shard.data for shard in blank.addressable_shards}
        whole = (len(devices) * shape[0], *shape[1:]) if shape else ()
        sharding = NamedSharding(mesh, _spec(len(shape)))
        buffers = [shards[device] for device in here]
        entering.append(jax.make_array_from_single_device_arrays(whole, sharding, buffers, dtype=array.dtype))
    return entering


def _leave(array: jax.Array, signature: Signature) -> jax.Array:
    """The array that the shards of the target's devices form."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    buffers = [shards[device] for device in signature.target.device_set if device in shards]
    target = on_device(signature.target)
    return jax.make_array_from_single_device_arrays(signature.shape, target, buffers, dtype=signature.dtype)


@functools.lru_cache(maxsize=256)
def _zeros(
    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...], devices: tuple[Device, ...]
) -> Callable[[], list[jax.Array]]:
    """A program that makes zeros, whole on each of the devices, without communication."""
    return jax.jit(
        lambda: [jnp.zeros(shape, dtype) for shape, dtype in shapes],
        out_shardings=NamedSharding(_mesh(devices), PartitionSpec()),
    )


def _spec(rank: int) -> PartitionSpec:
    """Shards are concatenated along the first dim; a scalar has none."""
    return PartitionSpec(AXIS) if rank else PartitionSpec()


@functools.lru_cache(maxsize=64)
def _mesh(devices: tuple[Device, ...]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
