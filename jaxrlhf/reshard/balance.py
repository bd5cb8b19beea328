"""Dealing rows to shards, so that every shard and every micro-batch works on about as many tokens.

Rows are sorted by their tokens and dealt as cards are, forwards and backwards in turn. A program does that by itself:
Python need not wait for lengths. Every shard gets as many rows, and sums nearly as even as a search would find, since
the differences of one round cancel those of the next; least so where a few rows are far longer than all others.
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
    """Place -> row, and back: `x[order]` is dealt, `x[order][inverse]` is x. Within a program; waits for nothing."""
    ranked_B = jnp.argsort(-tokens_B, stable=True)
    order_B = ranked_B[dealt(len(tokens_B), num_shards, micro_batches)]
    return order_B, jnp.argsort(order_B)


def token_imbalance(
    tokens_B: Int[np.ndarray, " B"], *, num_shards: int, micro_batches: int, mini_batches: int = 1
) -> Float[np.ndarray, "2"]:
    """The factor by which a call takes longer than with even shards, where time goes with tokens and shards wait.

        sum over micro-batches of the most tokens of a shard / sum over micro-batches of the mean of the shards

    Args:
        tokens_B: Tokens of each row, rows in the order in which they come.

    Returns:
        [2]: as the rows come, and as `balanced_order` deals them within each mini-batch. 1 is even.
    """
    came = tokens_B.reshape(mini_batches, -1)
    ranked = -np.sort(-came, axis=1, kind="stable")
    both = np.stack([came, ranked[:, dealt(came.shape[1], num_shards, micro_batches)]])
    # [2, mini-batches, shards, rows of a shard in a micro-batch, micro-batches]
    sums = both.reshape(2, mini_batches, num_shards, -1, micro_batches).sum(axis=3)
    return sums.max(axis=2).sum(axis=(1, 2)) / np.maximum(sums.mean(axis=2).sum(axis=(1, 2)), 1)
