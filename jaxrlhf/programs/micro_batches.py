"""Mini-batches and micro-batches: dealing and splitting the rows of a call, and joining the results of the parts.

Letters: B rows, M micro-batches, U updates, b rows of one micro-batch or update.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Int, Shaped

from jaxrlhf.call_graph import named_sequences
from jaxrlhf.experience import Max
from jaxrlhf.programs.arrays import Arrays, Noise, Rebuild
from jaxrlhf.reshard.balance import balanced_order
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.row_padding import row_parts, with_copies

T = TypeVar("T")


def update_orders(
    noise: Noise, arrays: Arrays, has_rows: Sequence[bool], update: Any
) -> dict[int, Int[jax.Array, "U b"]]:
    """Number of rows -> the rows of every update of a train call, for arrays of that many. Each epoch shuffles anew.
    `update`: the settings of the update, with `epochs` and `mini_batches`."""
    counts = {x.shape[0] for x, rows in zip(arrays, has_rows, strict=True) if rows}
    return {count: shuffled(noise, count, update.epochs, update.mini_batches) for count in counts}


def rows_of_update(arrays: Arrays, has_rows: Sequence[bool], chosen: Mapping[int, Int[jax.Array, " b"]]) -> Arrays:
    """The arrays of a train call with the rows of one update alone. `chosen` has one row of each of `update_orders`."""
    return [x[chosen[x.shape[0]]] if rows else x for x, rows in zip(arrays, has_rows, strict=True)]


def shuffled(noise: Noise, num_rows: int, epochs: int, mini_batches: int) -> Int[jax.Array, "U b"]:
    """Row numbers of every update, [updates, rows of a mini-batch]."""
    if mini_batches == 1:
        return jnp.tile(jnp.arange(num_rows), epochs).reshape(epochs, num_rows)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(noise[0]), noise[1]), noise[2])
    orders = [jax.random.permutation(jax.random.fold_in(key, epoch), num_rows) for epoch in range(epochs)]
    return jnp.concatenate(orders).reshape(epochs * mini_batches, num_rows // mini_batches)


def dealt_sequences(
    arrays: Arrays, rebuild: Rebuild, layout: Layout, *, uneven: bool
) -> tuple[Any, Int[jax.Array, " B"] | None]:
    """The sequences of an inference call, dealt if the strategy balances rows, and the indices that put their outputs
    back in order; None if they are in order. `uneven`: true if rows do not divide and are padded with copies
    (`sharding.row_padding`)."""
    if uneven:
        arrays = layout.constrain_rows(with_copies(arrays, row_parts("infer", layout.strategy)))
    (sequences,) = rebuild(arrays)
    if not layout.strategy.balance:
        return sequences, None
    order, inverse = balanced(sequences, layout)
    return layout.constrain_rows(jax.tree.map(lambda x: x[order], sequences)), inverse


def balanced(sequences: Any, layout: Layout) -> tuple[Int[jax.Array, " B"], Int[jax.Array, " B"]]:
    """The order in which rows are dealt to shards and micro-batches, and its inverse."""
    strategy = layout.strategy
    tokens_B = sum(x.mask.sum(axis=1) for x in named_sequences(sequences).values())
    # lengths are small: replicated, and sorted on every device
    tokens_B = jax.lax.with_sharding_constraint(tokens_B, layout.replicated)
    return balanced_order(tokens_B, num_shards=strategy.num_row_shards, micro_batches=strategy.micro_batches)


def cut(x: Shaped[jax.Array, "B ..."], parts: int) -> Shaped[jax.Array, "M b ..."]:
    """[rows, ...] -> [parts, rows / parts, ...] with every parts-th row together, so that no row leaves its device."""
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)


def joined(x: Shaped[jax.Array, "M b ..."]) -> Shaped[jax.Array, "B ..."]:
    """The inverse of `cut`: the rows of all parts in their order."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def constrain(arrays: Arrays, has_rows: Sequence[bool], layout: Layout) -> Arrays:
    """The arrays, those with rows split over the row shards of a layout."""
    return [layout.constrain_rows(x) if rows else x for x, rows in zip(arrays, has_rows, strict=True)]


def is_max(x: Any) -> bool:
    """True for a metric that is a largest value; all others are sums."""
    return isinstance(x, Max)


def added(parts: Sequence[T]) -> T:
    """Adds trees of sums over the rows of some parts, in their order; of a `Max`, takes the largest."""

    def combine(a: Any, b: Any) -> Any:
        return Max(jnp.maximum(a.value, b.value)) if is_max(a) else a + b

    return functools.reduce(lambda a, b: jax.tree.map(combine, a, b, is_leaf=is_max), parts)
