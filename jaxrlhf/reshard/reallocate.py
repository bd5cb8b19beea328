"""Reallocation: bringing a pytree of arrays from the layout it is in to another."""

from typing import Any

import jax
from jax.sharding import NamedSharding


def reallocate(tree: Any, shardings: NamedSharding | Any) -> Any:
    """The same arrays under other shardings, over the same, overlapping or other devices of this process.

    Args:
        tree: Pytree of arrays.
        shardings: One sharding for all, or a pytree of them with the structure of `tree`.

    Arrays that are already laid out so are returned as they are, without a copy.
    """
    return jax.device_put(tree, shardings)
