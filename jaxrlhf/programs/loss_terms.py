"""The loss of a train call: its terms, each over its own rows, in micro-batches, and what becomes of its metrics."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxrlhf.experience import Term
from jaxrlhf.models.params import Params
from jaxrlhf.programs.arrays import Arrays, Metrics, MicroBatch, Rebuild, Sums
from jaxrlhf.programs.micro_batches import added, balanced, constrain, cut, is_max
from jaxrlhf.programs.roles import (
    GAP_METRIC,
    ModelRole,
    gap_term,
    joined_sequences,
    logprob_gap,
    parted_outputs,
    term_metrics,
    term_output,
    term_outputs,
)
from jaxrlhf.sharding.layout import Layout

T = TypeVar("T")

MIN_WEIGHT = 1e-8
"""The least weight that a loss is divided by, so that the loss of a batch without weight is zero."""


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands for an array of a call's arguments, by its place among them."""

    at: int


class Losses:
    """The terms of a train or loss call, each over its own rows. `i` is the number of a term."""

    def __init__(self, role: ModelRole, rebuild: Rebuild, has_rows: Sequence[bool], layout: Layout) -> None:
        self._role, self._rebuild, self._has_rows, self.layout = role, rebuild, has_rows, layout
        terms, _ = rebuild([_Slot(at) for at in range(len(has_rows))])
        self.count = len(terms)
        self._own = [{x.at for x in jax.tree.leaves(term) if isinstance(x, _Slot)} for term in terms]

    def term(self, arrays: Arrays, i: int) -> Term:
        """A term with its arrays."""
        return self._rebuild(arrays)[0][i]

    def value(self, params: Params, arrays: Arrays, i: int) -> Sums:
        """The weight of a term's loss over its rows in `arrays`, and its metrics, the loss among them: sums."""
        outputs = term_outputs(self._role, self.term(arrays, i), params, self.layout)
        return self._value_of(outputs, arrays, i)

    def value_of_hidden(
        self, hidden_states: Callable[[Any], jax.Array], params: Params, arrays: Arrays, i: int
    ) -> Sums:
        """The same, on the last stage of a pipeline. `hidden_states`: from the columns that are wanted to their hidden
        states."""
        term = self.term(arrays, i)
        output, sequences = term_output(self._role, term), joined_sequences(term, self.layout)
        hidden = hidden_states(output.columns(sequences)[1])
        outputs = output.outputs(params, hidden, sequences, self._role.model, self.layout)
        return self._value_of(parted_outputs(term, outputs), arrays, i)

    def _value_of(self, outputs: Any, arrays: Arrays, i: int) -> Sums:
        terms, update = self._rebuild(arrays)
        term: Term = terms[i]
        total, weight, metrics = term.loss(outputs, term.batch, update)
        metrics = {name: x if is_max(x) else jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
        if term is gap_term(self._role, terms):
            metrics[GAP_METRIC] = logprob_gap(outputs, term.batch["sequences"])
        return jnp.asarray(weight, jnp.float32), {**metrics, "loss": total}

    def in_micro_batches(
        self, function: Callable[[Params, Arrays, int], T], params: Params, arrays: Arrays, i: int
    ) -> T:
        """`function(params, arrays, i)` over the rows of a term a part at a time, added up."""
        layout, parts = self.layout, self.layout.strategy.micro_batches
        own = self.own_rows(i)
        if parts == 1:
            return function(params, constrain(arrays, own, layout), i)
        pieces = [cut(x, parts) if rows else x for x, rows in zip(arrays, own, strict=True)]

        def of_part(part: Any) -> T:
            rows = [x[part] if rows else x for x, rows in zip(pieces, own, strict=True)]
            return function(params, constrain(rows, own, layout), i)

        def add(part: jax.Array, sums: T) -> T:
            return added([sums, of_part(part)])

        # from the first part on: XLA would hold zeros to begin with beside the sums
        return jax.lax.fori_loop(1, parts, add, of_part(0))

    def own_rows(self, i: int) -> list[bool]:
        """A flag for each array: True if it has rows of a term."""
        return [rows and at in self._own[i] for at, rows in enumerate(self._has_rows)]

    def micro_batches(self, arrays: Arrays, i: int) -> list[MicroBatch]:
        """The rows of a term in micro-batches. `own` are the arrays of the term, with None in place of all others."""
        own, parts = self.own_rows(i), self.layout.strategy.micro_batches

        def micro_batch(number: int) -> MicroBatch:
            rows = [cut(x, parts)[number] if mine else x for x, mine in zip(arrays, own, strict=True)]
            rows = constrain(rows, own, self.layout)
            term = self.term(rows, i)
            sequences = joined_sequences(term, self.layout)
            length, _ = term_output(self._role, term).columns(sequences)
            mine = [x if mine else None for x, mine in zip(rows, own, strict=True)]
            return {"tokens": sequences.tokens[:, :length], "mask": sequences.mask[:, :length], "own": mine}

        return [micro_batch(number) for number in range(parts)]

    def dealt(self, arrays: Arrays, i: int) -> Arrays:
        """The arrays with the rows of a term dealt evenly, where the strategy balances."""
        if not self.layout.strategy.balance:
            return arrays
        terms, _ = self._rebuild(arrays)
        order, _ = balanced(terms[i].batch["sequences"], self.layout)
        own = self.own_rows(i)
        return [x[order] if rows else x for x, rows in zip(arrays, own, strict=True)]

    def mean(self, gradient: Params, weight: jax.Array, arrays: Arrays, i: int) -> Params:
        """The gradient of a term's sum -> of its mean, times the weight of the term. `weight`: of all its rows."""
        weight, scale = jnp.maximum(weight, MIN_WEIGHT), self.term(arrays, i).weight
        return jax.tree.map(lambda g: g / weight * scale, gradient)

    def combined(self, arrays: Arrays, parts: Sequence[Sums]) -> Metrics:
        """The metrics of all terms, from their weights and sums: means, and the weighted sum of the losses."""
        terms, _ = self._rebuild(arrays)
        combined: dict[str, Any] = {"loss": jnp.zeros((), jnp.float32)}
        for term, (weight, sums) in zip(terms, parts, strict=True):
            weight = jnp.maximum(weight, MIN_WEIGHT)
            means = {name: x if is_max(x) else x / weight for name, x in sums.items()}
            combined["loss"] += means["loss"] * term.weight
            gap = {GAP_METRIC: means.pop(GAP_METRIC)} if GAP_METRIC in means else {}
            combined |= term_metrics(term, means) | gap
        return combined

    def reported(self, arrays: Arrays, parts: Sequence[Sums]) -> Arrays:
        """The leaves of the metrics of a call of `loss`, from the weights and sums of its terms."""
        metrics = self.combined(arrays, parts)
        return jax.tree.leaves(jax.tree.map(lambda x: x.value if is_max(x) else x, metrics, is_leaf=is_max))


def over_updates(metrics: Metrics, num_updates: jax.Array) -> Metrics:
    """The metrics of a train call from those of its updates, one after another along the first axis: means, or the
    largest; the gap before the first. `num_updates`: of the optimizer, after the call."""
    metrics = dict(metrics)
    first_gap = {GAP_METRIC: metrics.pop(GAP_METRIC).value[0]} if GAP_METRIC in metrics else {}
    averaged = jax.tree.map(lambda x: x.value.max() if is_max(x) else x.mean(), metrics, is_leaf=is_max)
    return averaged | first_gap | {"num_updates": num_updates.astype(jnp.float32)}
