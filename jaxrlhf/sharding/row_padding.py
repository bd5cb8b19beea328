"""Rows of no weight: what fills up a row-wise call whose rows do not divide over its devices and micro-batches.

What such a call gives for a row depends on that row alone. So it can be given some rows twice, and what it gives for
the copies is cut off within its program: nothing outside ever sees them. A copy needs no care: it has tokens, its noise
is that of its original's id, which changes nobody else's, and it is decoded in as many steps as its original, so that
no generation takes longer for it.

Outside, arrays keep their rows: inputs and outputs of such a call lie whole on each of its devices.

A train call is not filled up. What a row weighs in a loss, and in its metrics, is known to the loss alone: many count
rows or pairs, not only tokens under a mask.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxrlhf.sharding.strategy import Strategy

T = TypeVar("T")


def row_parts(kind: str, strategy: Strategy) -> int:
    """Parts of equal size into which the rows of a call of a model are cut: shards times micro-batches. Generation cuts
    each micro-batch into as many again as there are stages."""
    stages = strategy.pipeline if kind == "generate" else 1
    return strategy.num_row_shards * strategy.micro_batches * stages


def num_copies(rows: int, parts: int) -> int:
    """Rows that there must be beside some, so that they divide into equal parts."""
    return -rows % parts


def can_split(rows: int, parts: int, *, may_copy: bool) -> bool:
    """Whether rows can be cut into parts of equal size: where rows may be copied, there must be one for each."""
    return rows % parts == 0 or (may_copy and parts <= rows)


def with_copies(rows: T, parts: int) -> T:
    """Pytree of arrays, each with copies of its first rows behind its own, so that they divide into equal parts."""

    def filled(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, x[: num_copies(len(x), parts)]])

    return jax.tree.map(filled, rows)
