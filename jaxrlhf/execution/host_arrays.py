"""Arrays read whole into host memory, in one process or in several.

In several processes each reads the parts that its devices hold and sends them to the first, beside the devices. A
collective would stand in the queue of every device that it touches, and make those wait that have nothing to do with
it: a generation for the metrics of a critic that still trains on the step before.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrlhf.execution.channel import Channel


class Part(NamedTuple):
    """A box of an array."""

    start: tuple[int, ...]
    array: np.ndarray


def to_host(leaves: Sequence[Any], channel: Channel) -> list[Any]:
    """Arrays as numpy arrays, whole, in every process: each of them must call this, in the same order. Waits for them.

    Args:
        leaves: Arrays on any devices. Numpy arrays, which all processes have, are left as they are.
    """
    if channel.count == 1:
        return jax.device_get(list(leaves))
    whole = gather(leaves, channel, channel.number())
    return channel.share(lambda: whole or [])


def hand_to_threads(leaves: Sequence[Any]) -> None:
    """Makes arrays ready to be read by several threads at once. To be called in the thread that made them.

    An array takes itself apart into its shards when it is first asked for them. Where two threads ask at the same time,
    one of them finds only some (jaxlib 0.10.2: `IndexError` in `device_get`).
    """
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            _ = leaf.addressable_shards


def gather(leaves: Sequence[Any], channel: Channel, number: int) -> list[Any] | None:
    """Arrays as numpy arrays, whole, in the first process; None in the others. May run in any thread.

    Args:
        number: From `channel.number()`, asked for in the main thread, so that it is the same in all processes.
    """
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
    """The parts of an array in this process; of copies one."""
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
