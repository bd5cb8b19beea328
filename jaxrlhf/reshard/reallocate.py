"""Reallocation: moving a pytree of arrays from its layout to another one."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jaxtyping import PyTree

from jaxrlhf.brief import brief
from jaxrlhf.reshard.exchange import Lot, exchange
from jaxrlhf.reshard.host_copy import copy_on_host
from jaxrlhf.reshard.moves import Moves
from jaxrlhf.reshard.tree_moves import Device, Signature, boxes_of, mesh_devices, on_device, tree_moves, union
from jaxrlhf.sharding.processes import meet_first

BUCKET_BYTES = 256 * 2**20
"""The most bytes of arrays that are moved at once, counting whole arrays, however they are split."""
BUCKETS_IN_FLIGHT = 2
"""Buckets in flight: one is moved while the next is dispatched. It is also far below the number of un-awaited programs,
about 16, at which JAX on a CPU can deadlock."""

TransferMethod = Literal["memory", "host", "shards", "jit", "exchange"]
"""Methods of transfer: `memory` between a device and host memory; `host` piece by piece in host memory that is also the
devices'; `shards` as whole shards from device to device; `jit` by an identity program whose collectives XLA chooses;
`exchange` piece by piece by one program over all devices."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The start and the stop of a box in each dim."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Arrays of a tree that are moved at once, by their numbers in the tree."""

    method: TransferMethod
    members: tuple[int, ...]
    devices: tuple[Device, ...]
    """The devices of both layouts."""
    lots: tuple[Lot, ...] = ()
    """The moves, in the order of `members`; empty for `memory` and `jit`."""


def reallocate(
    tree: PyTree, shardings: PyTree[Sharding], *, donate: bool = False, bucket_bytes: int = BUCKET_BYTES
) -> PyTree[jax.Array]:
    """Moves arrays to other shardings: over the same, some, more, overlapping or other devices.

    Args:
        tree: Pytree of arrays. Leaves without a placement (NumPy arrays, numbers, uncommitted arrays; in several
            processes also arrays without a mesh) are taken from this process, and must be the same in all of them.
        shardings: One sharding for all, or a pytree of them with the structure of `tree`.
        donate: Delete the sources of each bucket when it has arrived.
        bucket_bytes: The most bytes to move at once. A larger array is a bucket of its own.

    Arrays that already have an equivalent sharding are returned without a copy, under the target sharding, and are not
    deleted.

    In several processes each must call it, in the same order and with the same shapes and shardings. A process that
    owns no device of a layout passes or gets arrays without local shards.

    Beside sources and results, a device holds for at most `BUCKETS_IN_FLIGHT` buckets: zeros in place of shards that it
    does not own, unused parts of target shards, and pieces in flight; each at most a shard of every array of the
    bucket. With `donate`, the sources of earlier buckets are deleted. The function returns before the last buckets have
    arrived, with `donate` after that.

    Raises:
        ValueError: A dim does not divide evenly over the mesh axes that split it.
    """
    paths, arrays, targets, rebuild = flatten(tree, shardings)
    for path, array, target in zip(paths, arrays, targets, strict=True):
        check_even(np.shape(array), target, path)
    results: list[Any] = [
        None if is_placed(array) else _place(array, target) for array, target in zip(arrays, targets, strict=True)
    ]
    jobs = dict.fromkeys((id(a), t) for a, t, r in zip(arrays, targets, results, strict=True) if r is None)
    by_id = {id(array): array for array in arrays}
    signatures = tuple(signature_of(by_id[i], target) for i, target in jobs)
    moved = _move([by_id[i] for i, _ in jobs], signatures, donate=donate, bucket_bytes=bucket_bytes)
    done = dict(zip(jobs, moved, strict=True))
    return rebuild(done[id(a), t] if r is None else r for a, t, r in zip(arrays, targets, results, strict=True))


def on_some_devices(tree: PyTree[jax.Array], shardings: PyTree[Sharding]) -> PyTree[jax.Array] | None:
    """Arrays under other shardings over some of their devices, without a copy: both share the memory. None if a device
    has another part of an array than it is to have."""
    _, arrays, targets, rebuild = flatten(tree, shardings)
    shared = []
    for array, target in zip(arrays, targets, strict=True):
        here, wanted = (x.devices_indices_map(array.shape) for x in (array.sharding, target))
        if array.sharding.memory_kind != target.memory_kind or any(here.get(d) != box for d, box in wanted.items()):
            return None
        own = [shard.data for shard in array.addressable_shards if shard.device in wanted]
        shared.append(jax.make_array_from_single_device_arrays(array.shape, target, own, dtype=array.dtype))
    return rebuild(shared)


def signature_of(array: jax.Array, target: Sharding) -> Signature:
    return Signature(array.shape, np.dtype(array.dtype), array.sharding, target)


@functools.lru_cache(maxsize=4096)
def check_even(shape: tuple[int, ...], sharding: Sharding, where: str) -> None:
    """Checks that an array can be split as a sharding says. Raises ValueError if it has too few dims, or one that does
    not divide evenly."""
    if not isinstance(sharding, NamedSharding):
        return
    if len(sharding.spec) > len(shape):
        raise ValueError(f"{where}: {sharding.spec} must not name more dims than the array has. Got shape {shape}.")
    for dim, (size, entry) in enumerate(zip(shape, sharding.spec, strict=False)):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        degree = math.prod(sharding.mesh.shape[axis] for axis in axes)
        if size % degree:
            raise ValueError(
                f"{where}: dim {dim} must be a multiple of {degree}, the degree of {' x '.join(axes)}, over which it "
                f"is split. Got {size} in shape {shape}. Use a degree that divides it, or pad it."
            )


def flatten(
    tree: PyTree, shardings: PyTree[Sharding]
) -> tuple[list[str], list[Any], list[Sharding], Callable[[Iterable[Any]], PyTree]]:
    """The paths and arrays of a tree, their targets, and a function that makes a tree of results."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    if isinstance(shardings, Sharding):
        targets = [shardings] * len(leaves)
    else:
        targets = structure.flatten_up_to(shardings)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") or "array" for path, _ in leaves]
    for path, target in zip(paths, targets, strict=True):
        if not isinstance(target, Sharding):
            raise ValueError(f"{path}: needs a sharding to go to. Got {brief(target)}.")
    return paths, [leaf for _, leaf in leaves], targets, structure.unflatten


def is_placed(array: Any) -> bool:
    """Returns whether all processes agree on an array's placement. One without a mesh is local to its process."""
    if not isinstance(array, jax.Array) or not array.size or not array.committed:
        return False
    return jax.process_count() == 1 or isinstance(array.sharding, NamedSharding)


def _place(array: Any, sharding: Sharding) -> jax.Array:
    """Places an array that every process has in its own memory. One without elements is created."""
    if jax.process_count() == 1:
        return jax.device_put(array, sharding)
    dtype = jax.dtypes.canonicalize_dtype(np.result_type(array))
    whole = np.zeros(np.shape(array), dtype) if 0 in np.shape(array) else np.asarray(array, dtype)
    if not sharding.addressable_devices:
        return jax.make_array_from_single_device_arrays(whole.shape, sharding, [], dtype=whole.dtype)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _move(
    arrays: list[jax.Array], signatures: tuple[Signature, ...], *, donate: bool, bucket_bytes: int
) -> list[jax.Array]:
    results = list(arrays)
    buckets = in_buckets(signatures, bucket_bytes)
    uses = collections.Counter(id(arrays[i]) for bucket in buckets for i in bucket.members)
    kept = {id(arrays[i]) for i in set(range(len(arrays))).difference(*(bucket.members for bucket in buckets))}
    under_way: collections.deque[Bucket] = collections.deque()

    def arrive(bucket: Bucket) -> None:
        jax.block_until_ready([results[i] for i in bucket.members])
        for i in bucket.members:
            uses[id(arrays[i])] -= 1
            if donate and not uses[id(arrays[i])] and id(arrays[i]) not in kept:
                arrays[i].delete()

    for i in set(range(len(arrays))).difference(*(bucket.members for bucket in buckets)):
        results[i] = _renamed(arrays[i], signatures[i].target)
    for bucket in buckets:
        if len(under_way) == BUCKETS_IN_FLIGHT:
            arrive(under_way.popleft())
        moved = _carry_out([arrays[i] for i in bucket.members], [signatures[i] for i in bucket.members], bucket)
        for i, array in zip(bucket.members, moved, strict=True):
            results[i] = array
        under_way.append(bucket)
    while donate and under_way:
        arrive(under_way.popleft())
    return results


def _renamed(array: jax.Array, target: Sharding) -> jax.Array:
    """An array whose shards all stay, under the target sharding, without a copy. Processes without its shards then have
    the same sharding."""
    if array.sharding == target:
        return array
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, target, shards, dtype=array.dtype)


@functools.lru_cache(maxsize=64)
def in_buckets(signatures: tuple[Signature, ...], bucket_bytes: int) -> tuple[Bucket, ...]:
    """The arrays that have to be moved, in buckets that are the same in every process."""
    groups: dict[Any, list[int]] = {}
    for i, signature in enumerate(signatures):
        method = transfer_method(signature)
        if method is not None:
            groups.setdefault((method, device_order(signature.source), device_order(signature.target)), []).append(i)
    buckets = []
    for (method, *_), members in groups.items():
        devices = union(signatures[members[0]])
        lots: dict[int, Lot] = {}
        if method in ("host", "shards", "exchange"):
            plan = tree_moves(signatures)
            lots = {i: _lot(signatures[i], plan.devices, plan.moves[i], devices) for i in members}
        # Like arrays are neighbors, so that they move together, and buckets of a large model share their programs.
        like = {i: lots.get(i, signatures[i]) for i in members}
        turn = {each: n for n, each in enumerate(dict.fromkeys(like.values()))}
        members = sorted(members, key=lambda i: (turn[like[i]], i))
        for some in _fill(members, signatures, bucket_bytes):
            counts = collections.Counter(lots[i] for i in some) if lots else {}
            counted = tuple(dataclasses.replace(lot, count=count) for lot, count in counts.items())
            buckets.append(Bucket(method, tuple(some), devices, counted))
    return tuple(buckets)


def _lot(signature: Signature, positions: tuple[Device, ...], moves: Moves, devices: tuple[Device, ...]) -> Lot:
    """The moves of one array, renamed from positions in `positions` to positions in `devices`."""
    renamed = np.array([devices.index(device) if device in devices else -1 for device in positions], np.int64)
    own = dataclasses.replace(moves, source_M=renamed[moves.source_M], target_M=renamed[moves.target_M])
    return Lot(signature, 1, own.key, own)


def _fill(members: Sequence[int], signatures: Sequence[Signature], bucket_bytes: int) -> Iterator[list[int]]:
    """Yields consecutive members of at most `bucket_bytes` bytes, or a single larger one."""
    bucket, size = [], 0
    for i in members:
        if bucket and size + signatures[i].nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size += signatures[i].nbytes
    yield bucket


@functools.lru_cache(maxsize=4096)
def transfer_method(signature: Signature) -> TransferMethod | None:
    """How an array is moved; None if every shard stays where it is."""
    source, target = signature.source, signature.target
    same_order = device_order(source) == device_order(target)
    held, wanted = _both_boxes(signature)
    if same_order and held == wanted:
        return None if source.memory_kind == target.memory_kind else "memory"
    devices = union(signature)
    one_process = len({device.process_index for device in devices}) == 1
    if same_order and all(map(_lies_in, wanted.values(), held.values())):
        return "jit"  # every device keeps a part, and nothing moves
    if one_process and host_memory_is_theirs(devices):
        return "host"
    if one_process and set(wanted.values()) <= set(held.values()):
        return "shards"
    if same_order and _suits_xla(list(held.values()), list(wanted.values())):
        return "jit"
    return "exchange"


def _suits_xla(held: list[Box], wanted: list[Box]) -> bool:
    """Returns whether devices gather, or all split another dim than before.

    In other cases XLA copies whole arrays onto every device.
    """
    gathers = all(map(_lies_in, held, wanted))
    split_otherwise = all(len(set(boxes)) == len(boxes) and _num_split_dims(boxes) == 1 for boxes in (held, wanted))
    return gathers or split_otherwise


def _num_split_dims(boxes: list[Box]) -> int:
    return sum(len(set(starts)) > 1 for starts in zip(*(start for start, _ in boxes), strict=True))


def host_memory_is_theirs(devices: tuple[Device, ...]) -> bool:
    """Returns whether devices are virtual ones, whose memory is the host's."""
    return all(device.platform == "cpu" for device in devices)


def _both_boxes(signature: Signature) -> tuple[dict[int, Box], dict[int, Box]]:
    """The boxes of each device before and after the move, in the order of the devices."""
    devices = union(signature)
    boxes = [boxes_of(sharding, signature.shape, devices) for sharding in (signature.source, signature.target)]
    held, wanted = (
        {
            device: (tuple(start), tuple(stop))
            for device, start, stop in zip(
                each.devices_N.tolist(), each.starts_NR.tolist(), each.stops_NR.tolist(), strict=True
            )
        }
        for each in boxes
    )
    return held, wanted


def _lies_in(inner: Box, outer: Box) -> bool:
    return all(a <= b for a, b in zip(outer[0], inner[0], strict=True)) and all(
        b <= a for a, b in zip(outer[1], inner[1], strict=True)
    )


@functools.lru_cache(maxsize=1024)
def device_order(sharding: Sharding) -> tuple[Device, ...]:
    """The devices of a sharding in the order of its programs."""
    if isinstance(sharding, NamedSharding):
        return mesh_devices(sharding)
    return tuple(sharding.devices_indices_map(()))


@functools.lru_cache(maxsize=256)
def _identity(shardings: tuple[Sharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda arrays: arrays, out_shardings=list(shardings))


def _by_shards(arrays: list[jax.Array], targets: list[Sharding], bucket: Bucket) -> list[jax.Array]:
    """Moves whole shards in one call, each from the device that the plan names."""
    shards, destinations, counts = [], [], []
    moves = [lot.moves for lot in bucket.lots for _ in range(lot.count)]
    for array, each in zip(arrays, moves, strict=True):
        held = {shard.device: shard.data for shard in array.addressable_shards}
        sources = dict(zip(each.target_M.tolist(), each.source_M.tolist(), strict=True))
        for target, source in sources.items():
            shards.append(held[bucket.devices[source]])
            destinations.append(bucket.devices[target])
        counts.append(len(sources))
    # Even a shard that stays is copied, since donation deletes the source.
    placed = iter(jax.device_put(shards, destinations, may_alias=False))
    return [
        jax.make_array_from_single_device_arrays(
            array.shape, target, [next(placed) for _ in range(count)], dtype=array.dtype
        )
        for array, target, count in zip(arrays, targets, counts, strict=True)
    ]


def _carry_out(arrays: list[jax.Array], signatures: list[Signature], bucket: Bucket) -> list[jax.Array]:
    """Moves one bucket. Only device memory moves between devices: arrays that rest on a host are loaded before."""
    if not any(device.process_index == jax.process_index() for device in bucket.devices):
        return [jax.make_array_from_single_device_arrays(s.shape, s.target, [], dtype=s.dtype) for s in signatures]
    if bucket.method == "memory":
        return jax.device_put(arrays, [signature.target for signature in signatures])
    near = [_in_memory(array, on_device(array.sharding)) for array in arrays]
    targets = [on_device(signature.target) for signature in signatures]
    match bucket.method:
        case "host":
            moves = [lot.moves for lot in bucket.lots for _ in range(lot.count)]
            moved = copy_on_host(near, signatures, moves, targets, bucket.devices)
        case "shards":
            moved = _by_shards(near, targets, bucket)
        case "jit":
            meet_first(bucket.devices, tuple(signatures))
            moved = _identity(tuple(targets))(near)
        case "exchange":
            moved = exchange(near, bucket.lots, bucket.devices)
    return [_in_memory(array, signature.target) for array, signature in zip(moved, signatures, strict=True)]


def _in_memory(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Copies shards to another kind of memory."""
    return array if array.sharding.memory_kind == sharding.memory_kind else jax.device_put(array, sharding)
