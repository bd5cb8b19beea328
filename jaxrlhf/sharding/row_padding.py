"""Padding of rows by copies, for row-wise calls whose rows do not divide over devices and micro-batches.

The outputs of such a call for a row depend on that row alone. So it can get some rows twice, and its program drops the
outputs for the copies. A copy is an ordinary row: its noise is that of its original, and it is decoded in as many
steps, so that no generation takes longer.

Outside of the program arrays keep their rows: inputs and outputs of such a call are whole on each of its devices.

A train call is not padded. Only the loss knows the weight of a row in it and in its metrics: many losses count rows or
pairs, not only tokens under a mask.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxrlhf.sharding.strategy import Strategy

T = TypeVar("T")


def row_parts(kind: str, strategy: Strategy) -> int:
    """The number of equal parts of the rows of a model's call: shards times micro-batches. Generation cuts each
    micro-batch further, into as many parts as there are stages."""
    stages = strategy.pipeline if kind == "generate" else 1
    return strategy.num_row_shards * strategy.micro_batches * stages


def num_copies(rows: int, parts: int) -> int:
    """The number of copies with which rows divide into equal parts."""
    return -rows % parts


def can_split(rows: int, parts: int, *, may_copy: bool) -> bool:
    """Returns whether rows can be cut into equal parts. If rows may be copied, one row for each part is enough."""
    return rows % parts == 0 or (may_copy and parts <= rows)


def with_copies(rows: T, parts: int) -> T:
    """A pytree of arrays with copies of their first rows appended, so that the rows divide into equal parts."""

    def filled(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, x[: num_copies(len(x), parts)]])

    return jax.tree.map(filled, rows)
