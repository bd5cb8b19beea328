"""Dealing rows to shards, so that every shard and every micro-batch gets about as many tokens.

Rows are sorted by their tokens and dealt like cards, forwards and backwards in turn. A program does that by itself, so
that Python need not wait for lengths. Every shard gets as many rows, and about as many tokens as by a search, since the
differences of one round cancel those of the next; less so if a few rows are far longer than all others.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int


@functools.cache
def dealt(num_rows: int, num_shards: int, micro_batches: int) -> Int[np.ndarray, " B"]:
    """Place -> the rank of the row that goes there, 0 for the one with the most tokens.

    Shards are blocks of consecutive places, and a micro-batch is every `micro_batches`-th place of each.

    >>> dealt(8, 2, 1)  # the longest row and the two in the middle of the rest go to the first shard
    array([0, 3, 4, 7, 1, 2, 5, 6])
    """
    rows_each = num_rows // (num_shards * micro_batches)
    assert rows_each * num_shards * micro_batches == num_rows, (num_rows, num_shards, micro_batches)
    rank = np.arange(num_rows)
    deal, seat = rank // num_shards, rank % num_shards
    shard = np.where(deal % 2 == 0, seat, num_shards - 1 - seat)
    round_, turn = deal // micro_batches, deal % micro_batches
    micro_batch = np.where(round_ % 2 == 0, turn, micro_batches - 1 - turn)
    ranks = np.empty(num_rows, np.int64)
    ranks[(shard * rows_each + round_) * micro_batches + micro_batch] = rank
    return ranks


def balanced_order(
    tokens_B: Int[jax.Array, " B"], *, num_shards: int, micro_batches: int
) -> tuple[Int[jax.Array, " B"], Int[jax.Array, " B"]]:
    """The order in which rows are dealt, and its inverse: `x[order]` is dealt, `x[order][inverse]` is x. Jittable."""
    ranked_B = jnp.argsort(-tokens_B, stable=True)
    order_B = ranked_B[dealt(len(tokens_B), num_shards, micro_batches)]
    return order_B, jnp.argsort(order_B)


def token_imbalance(
    tokens_B: Int[np.ndarray, " B"], *, num_shards: int, micro_batches: int, mini_batches: int = 1
) -> Float[np.ndarray, "2"]:
    """The slow-down of a call against even shards, if time is proportional to tokens and shards wait for one another.

        sum over micro-batches of the most tokens of a shard / sum over micro-batches of the mean of the shards

    Args:
        tokens_B: The number of tokens of each row, in the order of the rows.

    Returns:
        [2]: for the rows in their order, and as `balanced_order` deals them within each mini-batch. 1 is even.
    """
    came = tokens_B.reshape(mini_batches, -1)
    ranked = -np.sort(-came, axis=1, kind="stable")
    both = np.stack([came, ranked[:, dealt(came.shape[1], num_shards, micro_batches)]])
    # [2, mini-batches, shards, rows of a shard in a micro-batch, micro-batches]
    sums = both.reshape(2, mini_batches, num_shards, -1, micro_batches).sum(axis=3)
    return sums.max(axis=2).sum(axis=(1, 2)) / np.maximum(sums.mean(axis=2).sum(axis=(1, 2)), 1)
