"""Offload: arrays rest in pinned host memory, laid out as on the devices, and come back from there.

Every shard lies in the memory of its own device's host, so nothing crosses a network, and pinned memory is copied from
without the processor. Both ways are dispatched and not awaited.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxrlhf.sharding.processes import absent, is_here

HOST, DEVICE = "pinned_host", "device"


def to_host_memory(tree: Any) -> Any:
    """The same arrays in the memory of their devices' hosts. What is there already is returned as it is."""
    return _in_memory(tree, HOST)


def to_device_memory(tree: Any) -> Any:
    """The same arrays on their devices. What is there already is returned as it is."""
    return _in_memory(tree, DEVICE)


def rests_on_host(tree: Any) -> bool:
    """Whether all arrays of a tree lie in host memory."""
    return all(x.sharding.memory_kind == HOST for x in jax.tree.leaves(tree))


def _in_memory(tree: Any, kind: str) -> Any:
    def moved(x: jax.Array) -> jax.Array:
        if x.sharding.memory_kind == kind:
            return x
        sharding = x.sharding.with_memory_kind(kind)
        assert isinstance(sharding, NamedSharding)
        return jax.device_put(x, sharding) if is_here(sharding) else absent(x, sharding)

    return jax.tree.map(moved, tree)
