"""The loss of a train call: its terms, each over its own rows, in micro-batches, and what becomes of its metrics."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.call_graph import named_sequences
from jaxrlhf.experience import Max, Term
from jaxrlhf.models.params import Params
from jaxrlhf.reshard.balance import balanced_order
from jaxrlhf.runtime.roles import GAP_METRIC, ModelRole, gap_term, logprob_gap, term_metrics, term_outputs
from jaxrlhf.sharding.layout import Layout

Rebuild = Callable[[list[Any]], tuple[Any, ...]]
"""Array leaves -> the arguments of the call."""

MIN_WEIGHT = 1e-8
"""What a loss is divided by at least, so that a batch in which nothing counts gives zero."""


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands for an array of a call's arguments, by its place among them."""

    at: int


class Losses:
    """The terms of a train or loss call, each over its own rows. `i` is the number of a term."""

    def __init__(self, role: ModelRole, rebuild: Rebuild, has_rows: list[bool], layout: Layout) -> None:
        self._role, self._rebuild, self._has_rows, self.layout = role, rebuild, has_rows, layout
        terms, _ = rebuild([_Slot(at) for at in range(len(has_rows))])
        self.count = len(terms)
        self._own = [{x.at for x in jax.tree.leaves(term) if isinstance(x, _Slot)} for term in terms]

    def term(self, arrays: list[Any], i: int) -> Term:
        """A term with its arrays."""
        return self._rebuild(arrays)[0][i]

    def value(self, params: Params, arrays: list[Any], i: int) -> tuple[jax.Array, dict[str, Any]]:
        """The weight of a term's loss over its rows in `arrays`, and its metrics, the loss among them: sums."""
        outputs = term_outputs(self._role, self.term(arrays, i), params, self.layout)
        return self.value_of(outputs, arrays, i)

    def value_of(self, outputs: Any, arrays: list[Any], i: int) -> tuple[jax.Array, dict[str, Any]]:
        """The same, where what the model says is there already."""
        terms, update = self._rebuild(arrays)
        term: Term = terms[i]
        total, weight, metrics = term.loss(outputs, term.batch, update)
        metrics = {name: x if is_max(x) else jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
        if term is gap_term(self._role, terms):
            metrics[GAP_METRIC] = logprob_gap(outputs, term.batch["sequences"])
        return jnp.asarray(weight, jnp.float32), {**metrics, "loss": total}

    def in_micro_batches(self, function: Callable[..., Any], params: Params, arrays: list[Any], i: int) -> Any:
        """`function(params, arrays, i)` over the rows of a term a part at a time, added up."""
        layout, parts = self.layout, self.layout.strategy.micro_batches
        own = self.own_rows(i)
        if parts == 1:
            return function(params, constrain(arrays, own, layout), i)
        pieces = [cut(x, parts) if rows else x for x, rows in zip(arrays, own, strict=True)]

        def of_part(part: Any) -> Any:
            rows = [x[part] if rows else x for x, rows in zip(pieces, own, strict=True)]
            return function(params, constrain(rows, own, layout), i)

        def add(part: jax.Array, sums: Any) -> Any:
            return jax.tree.map(combine, sums, of_part(part), is_leaf=is_max)

        # from the first part on: XLA would hold zeros to begin with beside the sums
        return jax.lax.fori_loop(1, parts, add, of_part(0))

    def own_rows(self, i: int) -> list[bool]:
        """Which arrays are rows of a term."""
        return [rows and at in self._own[i] for at, rows in enumerate(self._has_rows)]

    def part(self, arrays: list[Any], i: int, number: int, parts: int) -> list[Any]:
        """The arrays with the rows of a term cut down to those of one micro-batch."""
        own = self.own_rows(i)
        rows = [cut(x, parts)[number] if mine else x for x, mine in zip(arrays, own, strict=True)]
        return constrain(rows, own, self.layout)

    def dealt(self, arrays: list[Any], i: int) -> list[Any]:
        """The arrays with the rows of a term dealt evenly, where the strategy balances."""
        if not self.layout.strategy.balance:
            return arrays
        terms, _ = self._rebuild(arrays)
        order, _ = balanced(terms[i].batch["sequences"], self.layout)
        own = self.own_rows(i)
        return [x[order] if rows else x for x, rows in zip(arrays, own, strict=True)]

    def scale(self, arrays: list[Any], i: int) -> Any:
        """The weight of a term in the sum of all."""
        return self._rebuild(arrays)[0][i].weight

    def combined(self, arrays: list[Any], parts: list[tuple[jax.Array, dict[str, Any]]]) -> dict[str, Any]:
        """The metrics of all terms, from their weights and sums: means, and the weighted sum of the losses."""
        terms, _ = self._rebuild(arrays)
        combined: dict[str, Any] = {"loss": jnp.zeros((), jnp.float32)}
        for i, (term, (weight, sums)) in enumerate(zip(terms, parts, strict=True)):
            weight = jnp.maximum(weight, MIN_WEIGHT)
            means = {name: x if is_max(x) else x / weight for name, x in sums.items()}
            combined["loss"] += means["loss"] * self.scale(arrays, i)
            gap = {GAP_METRIC: means.pop(GAP_METRIC)} if GAP_METRIC in means else {}
            combined |= term_metrics(term, means) | gap
        return combined


def shuffled(noise: jax.Array, num_rows: int, epochs: int, mini_batches: int) -> jax.Array:
    """Row numbers of every update, [updates, rows of a mini-batch]."""
    if mini_batches == 1:
        return jnp.tile(jnp.arange(num_rows), epochs).reshape(epochs, num_rows)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(noise[0]), noise[1]), noise[2])
    orders = [jax.random.permutation(jax.random.fold_in(key, epoch), num_rows) for epoch in range(epochs)]
    return jnp.concatenate(orders).reshape(epochs * mini_batches, num_rows // mini_batches)


def balanced(sequences: Any, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """The order in which rows are dealt to shards and micro-batches, and its inverse."""
    strategy = layout.strategy
    tokens_B = sum(x.mask.sum(axis=1) for x in named_sequences(sequences).values())
    # lengths are few numbers: whole on every device, each of which sorts them for itself
    tokens_B = jax.lax.with_sharding_constraint(tokens_B, layout.replicated)
    return balanced_order(tokens_B, num_shards=strategy.num_row_shards, micro_batches=strategy.micro_batches)


def cut(x: jax.Array, parts: int) -> jax.Array:
    """[rows, ...] -> [parts, rows / parts, ...] with every parts-th row together, so that no row leaves its device."""
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)


def constrain(arrays: list[Any], has_rows: list[bool], layout: Layout) -> list[Any]:
    return [layout.constrain_rows(x) if rows else x for x, rows in zip(arrays, has_rows, strict=True)]


def is_max(x: Any) -> bool:
    return isinstance(x, Max)


def combine(a: Any, b: Any) -> Any:
    return Max(jnp.maximum(a.value, b.value)) if is_max(a) else a + b


def over_updates(metrics: dict[str, Any], num_updates: jax.Array) -> dict[str, jax.Array]:
    """The metrics of a train call from those of its updates, one after another along the first axis: means, or the
    largest; the gap before the first.

    Args:
        num_updates: Of the optimizer, after the call.
    """
    metrics = dict(metrics)
    first_gap = {GAP_METRIC: metrics.pop(GAP_METRIC).value[0]} if GAP_METRIC in metrics else {}
    averaged = jax.tree.map(lambda x: x.value.max() if is_max(x) else x.mean(), metrics, is_leaf=is_max)
    return averaged | first_gap | {"num_updates": num_updates.astype(jnp.float32)}
