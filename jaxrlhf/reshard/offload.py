"""Offload: arrays rest in pinned host memory, sharded as on the devices, and return from it.

Every shard rests on the host of its device, so nothing crosses a network, and pinned memory is copied without the CPU.
Copies are dispatched and not awaited.
"""

from typing import TypeVar

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jaxrlhf.sharding.processes import absent, is_here

T = TypeVar("T")
"""A tree of arrays."""
HOST, DEVICE = "pinned_host", "device"


def to_host_memory(tree: T) -> T:
    """Copies arrays to pinned memory of their devices' hosts. Arrays that rest there already are returned unchanged."""
    return _in_memory(tree, HOST)


def to_device_memory(tree: T) -> T:
    """Copies arrays back to their devices. Arrays on devices are returned unchanged."""
    return _in_memory(tree, DEVICE)


def rests_on_host(tree: PyTree[jax.Array]) -> bool:
    """Returns whether all arrays of a tree are in host memory."""
    return all(x.sharding.memory_kind == HOST for x in jax.tree.leaves(tree))


def _in_memory(tree: T, kind: str) -> T:
    def moved(x: jax.Array) -> jax.Array:
        if x.sharding.memory_kind == kind:
            return x
        sharding = x.sharding.with_memory_kind(kind)
        assert isinstance(sharding, NamedSharding)
        return jax.device_put(x, sharding) if is_here(sharding) else absent(x, sharding)

    return jax.tree.map(moved, tree)
