"""Whole arrays in host memory, in one process or in several.

In several processes each reads the parts on its devices and sends them to the first process by the channel. A
collective would enter the queue of every device and delay independent work: a generation would wait for the metrics of
a critic that still trains on the step before.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrlhf.execution.process_channel import Channel


class Part(NamedTuple):
    """A box of an array."""

    start: tuple[int, ...]
    array: np.ndarray


def to_host(leaves: Sequence[Any], channel: Channel) -> list[Any]:
    """Whole arrays as NumPy arrays in every process. All processes must call this, in the same order. Waits for them.
    `leaves`: arrays on any devices. NumPy arrays, which all processes have, are returned unchanged."""
    if channel.count == 1:
        return jax.device_get(list(leaves))
    whole = gather(leaves, channel, channel.number())
    return channel.share(lambda: whole or [])


def hand_to_threads(leaves: Sequence[Any]) -> None:
    """Prepares arrays to be read by several threads at once. Must be called in the thread that made them.

    An array makes its list of shards on first use. If two threads do that at the same time, one finds an incomplete
    list (jaxlib 0.10.2: `IndexError` in `device_get`).
    """
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            _ = leaf.addressable_shards


def gather(leaves: Sequence[Any], channel: Channel, number: int) -> list[Any] | None:
    """Whole arrays as NumPy arrays in the first process; None in the others. May run in any thread. `number`: from
    `channel.number()`, called in the main thread, so that it is the same in all processes."""
    if channel.count == 1:
        return jax.device_get(list(leaves))
    own = [_own_parts(leaf) if isinstance(leaf, jax.Array) else [] for leaf in leaves]
    parts = channel.gather(own, number)
    if not channel.is_first:
        return None
    return [
        _whole(leaf, [part for process in parts for part in process[i]]) if isinstance(leaf, jax.Array) else leaf
        for i, leaf in enumerate(leaves)
    ]


def _own_parts(array: jax.Array) -> list[Part]:
    """The parts of an array in this process, without replicas."""
    return [
        Part(tuple(s.start or 0 for s in shard.index), np.asarray(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def _whole(array: jax.Array, parts: list[Part]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0].array
    whole = np.empty(array.shape, array.dtype)
    for start, part in parts:
        whole[tuple(slice(a, a + size) for a, size in zip(start, part.shape, strict=True))] = part
    return whole
