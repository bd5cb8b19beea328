"""From a call and a layout to a jitted function.

A program takes arrays only. Everything else about a call (its settings, the loss, the structure of its arguments) is
built in, and is the key under which the executor finds the program again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.call_graph import named_sequences
from jaxrlhf.experience import Max, Sampling, Term
from jaxrlhf.models import ring
from jaxrlhf.models.generate import generate
from jaxrlhf.models.lora import adapt
from jaxrlhf.models.params import Params
from jaxrlhf.reshard.balance import balanced_order
from jaxrlhf.runtime.optimizer import OptimizerState, apply_gradient, optimizer_shardings
from jaxrlhf.runtime.roles import GAP_METRIC, INFER, ModelRole, gap_term, logprob_gap, term_metrics, term_outputs
from jaxrlhf.runtime.weight_sets import set_of
from jaxrlhf.sharding.layout import Layout

Rebuild = Callable[[list[Any]], tuple[Any, ...]]
"""Array leaves -> the arguments of the call."""


def compute_program(
    function: Callable[..., Any], rebuild: Rebuild, has_rows: list[bool], layout: Layout
) -> Callable[..., Any]:
    """`arrays -> leaves of the outputs`."""
    shardings = [layout.rows if rows else layout.replicated for rows in has_rows]
    return jax.jit(lambda arrays: jax.tree.leaves(function(*rebuild(arrays))), out_shardings=shardings)


def generate_program(role: ModelRole, rebuild: Rebuild, layout: Layout) -> Callable[..., Any]:
    """`(params, noise, temperature, arrays) -> leaves of a Rollout`. In a pipelined layout the params are as
    `ring_params` gives them."""
    generate_in = ring.generate if layout.is_pipelined else generate

    def program(params: Params, noise: jax.Array, temperature: jax.Array, arrays: list[Any]) -> list[jax.Array]:
        prompts, sampling = rebuild(arrays)
        assert isinstance(sampling, Sampling)

        def respond(some_prompts: Any) -> Any:
            rollout = generate_in(params, some_prompts, noise, temperature, sampling, role.model, layout)
            # a row for each prompt, with its samples in it, until all are back in order
            return jax.tree.map(lambda x: x.reshape(-1, sampling.num_samples, *x.shape[1:]), rollout)

        rollout = _in_micro_batches(respond, prompts, layout)
        return jax.tree.leaves(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout))

    return jax.jit(program, out_shardings=layout.rows)


def infer_program(role: ModelRole, method: str, rebuild: Rebuild, layout: Layout) -> Callable[..., Any]:
    """`(params, arrays) -> leaves of the outputs`."""

    def program(params: Params, arrays: list[Any]) -> list[jax.Array]:
        (sequences,) = rebuild(arrays)

        def infer(some_sequences: Any) -> Any:
            return INFER[method](params, some_sequences, role.model, layout, "none")

        if not layout.strategy.balance:
            return jax.tree.leaves(_in_micro_batches(infer, sequences, layout))
        order, inverse = _balanced(sequences, layout)
        dealt = layout.constrain_rows(jax.tree.map(lambda x: x[order], sequences))
        outputs = _in_micro_batches(infer, dealt, layout)
        return jax.tree.leaves(jax.tree.map(lambda x: x[inverse], outputs))

    return jax.jit(program, out_shardings=layout.rows)


def loss_program(role: ModelRole, rebuild: Rebuild, has_rows: list[bool], layout: Layout) -> Callable[..., Any]:
    """`(params, arrays) -> leaves of the metrics`: those of a train call's loss, without an update."""
    losses = _Losses(role, rebuild, has_rows, layout)

    def program(params: Params, arrays: list[Any]) -> list[jax.Array]:
        parts = [losses.in_micro_batches(losses.value, params, arrays, i) for i in range(losses.count)]
        metrics = losses.combined(arrays, [(weight, metrics) for weight, metrics in parts])
        return jax.tree.leaves(jax.tree.map(lambda x: x.value if _is_max(x) else x, metrics, is_leaf=_is_max))

    return jax.jit(program, out_shardings=layout.replicated)


def train_program(role: ModelRole, rebuild: Rebuild, has_rows: list[bool], layout: Layout) -> Callable[..., Any]:
    """`(params, optimizer state, noise, arrays, adapted) -> (params, optimizer state, metrics)`; the first two are
    donated. Where the params are adapters, `adapted` are the weights that they adapt, which stay as they are.

    Every epoch shuffles the rows of each term anew and cuts them into mini-batches, one update each. A mini-batch is
    cut into micro-batches, whose gradients of the loss's sum are added, and divided by the sum of their weights: the
    same gradient, however it was cut. Metrics are averaged over updates, or combined as `Max`. Balancing deals the
    rows of each mini-batch anew, which changes only in what order they are summed.
    """
    assert role.optimizer is not None
    model, optimizer, lora, own = role.model, role.optimizer, role.lora, set_of(role)
    param_sharding = own.shardings(layout)
    optimizer_sharding = optimizer_shardings(optimizer, own.abstract(), param_sharding, layout)
    losses = _Losses(role, rebuild, has_rows, layout)

    def one_update(
        params: Params, state: OptimizerState, mini_batch: list[Any], adapted: Params | None
    ) -> tuple[Any, dict[str, Any]]:
        def gradient(params: Params, arrays: list[Any], i: int) -> tuple[Params, jax.Array, dict[str, Any]]:
            def value(params: Params) -> Any:
                whole = params if adapted is None or lora is None else adapt(adapted, params, model, lora)
                weight, metrics = losses.value(whole, arrays, i)
                return metrics["loss"], (weight, metrics)

            (_, (weight, metrics)), grads = jax.value_and_grad(value, has_aux=True)(params)
            if layout.mesh.size > 1:  # reduce-scatter over fsdp, instead of an all-reduce that leaves whole gradients
                grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, param_sharding)
            return grads, weight, metrics

        sums: Any = None
        parts = []
        for i in range(losses.count):
            grads, weight, metrics = losses.in_micro_batches(gradient, params, losses.balanced(mini_batch, i), i)
            scale = losses.scale(mini_batch, i)
            grads = jax.tree.map(lambda g, w=weight, c=scale: g / jnp.maximum(w, MIN_WEIGHT) * c, grads)
            sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
            parts.append((weight, metrics))
        params, state, more = apply_gradient(optimizer, role.num_updates, params, state, sums)
        return (params, state), losses.combined(mini_batch, parts) | more

    def program(
        params: Params, state: OptimizerState, noise: jax.Array, arrays: list[Any], adapted: Params | None = None
    ) -> tuple[Params, OptimizerState, dict[str, jax.Array]]:
        _, update = rebuild(arrays)
        rows_of = {x.shape[0] for x, rows in zip(arrays, has_rows, strict=True) if rows}
        order = {n: _shuffled(noise, n, update.epochs, update.mini_batches) for n in rows_of}

        def chosen_update(carry: tuple[Params, OptimizerState], chosen: dict[int, jax.Array]) -> Any:
            pairs = zip(arrays, has_rows, strict=True)
            rows_of_it = [x[chosen[x.shape[0]]] if rows else x for x, rows in pairs]
            return one_update(*carry, rows_of_it, adapted)

        if update.epochs * update.mini_batches == 1:  # nothing to loop over, and no order to put the rows in
            (params, state), metrics = one_update(params, state, arrays, adapted)
            metrics = jax.tree.map(lambda x: x[None], metrics)
        else:
            (params, state), metrics = jax.lax.scan(chosen_update, (params, state), order)
        first_gap = {GAP_METRIC: metrics.pop(GAP_METRIC).value[0]} if GAP_METRIC in metrics else {}
        averaged = jax.tree.map(lambda x: x.value.max() if _is_max(x) else x.mean(), metrics, is_leaf=_is_max)
        return params, state, averaged | first_gap | {"num_updates": state.num_updates.astype(jnp.float32)}

    return jax.jit(
        program, donate_argnums=(0, 1), out_shardings=(param_sharding, optimizer_sharding, layout.replicated)
    )


MIN_WEIGHT = 1e-8
"""What a loss is divided by at least, so that a batch in which nothing counts gives zero."""


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands for an array of a call's arguments, by its place among them."""

    at: int


class _Losses:
    """The terms of a train or loss call, each over its own rows. `i` is the number of a term."""

    def __init__(self, role: ModelRole, rebuild: Rebuild, has_rows: list[bool], layout: Layout) -> None:
        self._role, self._rebuild, self._has_rows, self._layout = role, rebuild, has_rows, layout
        terms, _ = rebuild([_Slot(at) for at in range(len(has_rows))])
        self.count = len(terms)
        self._own = [{x.at for x in jax.tree.leaves(term) if isinstance(x, _Slot)} for term in terms]

    def value(self, params: Params, arrays: list[Any], i: int) -> tuple[jax.Array, dict[str, Any]]:
        """The weight of a term's loss over its rows in `arrays`, and its metrics, the loss among them: sums."""
        terms, update = self._rebuild(arrays)
        term: Term = terms[i]
        outputs = term_outputs(self._role, term, params, self._layout)
        total, weight, metrics = term.loss(outputs, term.batch, update)
        metrics = {name: x if _is_max(x) else jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
        if term is gap_term(self._role, terms):
            metrics[GAP_METRIC] = logprob_gap(outputs, term.batch["sequences"])
        return jnp.asarray(weight, jnp.float32), {**metrics, "loss": total}

    def in_micro_batches(self, function: Callable[..., Any], params: Params, arrays: list[Any], i: int) -> Any:
        """`function(params, arrays, i)` over the rows of a term a part at a time, added up."""
        layout, parts = self._layout, self._layout.strategy.micro_batches
        own = [rows and at in self._own[i] for at, rows in enumerate(self._has_rows)]
        if parts == 1:
            return function(params, _constrain(arrays, own, layout), i)
        cut = [_cut(x, parts) if rows else x for x, rows in zip(arrays, own, strict=True)]

        def of_part(part: Any) -> Any:
            rows = [x[part] if rows else x for x, rows in zip(cut, own, strict=True)]
            return function(params, _constrain(rows, own, layout), i)

        def add(part: jax.Array, sums: Any) -> Any:
            return jax.tree.map(_combine, sums, of_part(part), is_leaf=_is_max)

        return jax.lax.fori_loop(1, parts, add, of_part(0))

    def balanced(self, arrays: list[Any], i: int) -> list[Any]:
        """The arrays with the rows of a term dealt evenly, where the strategy balances."""
        if not self._layout.strategy.balance:
            return arrays
        terms, _ = self._rebuild(arrays)
        dealt, _ = _balanced(terms[i].batch["sequences"], self._layout)
        own = [rows and at in self._own[i] for at, rows in enumerate(self._has_rows)]
        return [x[dealt] if rows else x for x, rows in zip(arrays, own, strict=True)]

    def scale(self, arrays: list[Any], i: int) -> Any:
        """The weight of a term in the sum of all."""
        return self._rebuild(arrays)[0][i].weight

    def combined(self, arrays: list[Any], parts: list[tuple[jax.Array, dict[str, Any]]]) -> dict[str, Any]:
        """The metrics of all terms, from their weights and sums: means, and the weighted sum of the losses."""
        terms, _ = self._rebuild(arrays)
        combined: dict[str, Any] = {"loss": jnp.zeros((), jnp.float32)}
        for i, (term, (weight, sums)) in enumerate(zip(terms, parts, strict=True)):
            weight = jnp.maximum(weight, MIN_WEIGHT)
            means = {name: x if _is_max(x) else x / weight for name, x in sums.items()}
            combined["loss"] += means["loss"] * self.scale(arrays, i)
            gap = {GAP_METRIC: means.pop(GAP_METRIC)} if GAP_METRIC in means else {}
            combined |= term_metrics(term, means) | gap
        return combined


def _shuffled(noise: jax.Array, num_rows: int, epochs: int, mini_batches: int) -> jax.Array:
    """Row numbers of every update, [updates, rows of a mini-batch]."""
    if mini_batches == 1:
        return jnp.tile(jnp.arange(num_rows), epochs).reshape(epochs, num_rows)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(noise[0]), noise[1]), noise[2])
    orders = [jax.random.permutation(jax.random.fold_in(key, epoch), num_rows) for epoch in range(epochs)]
    return jnp.concatenate(orders).reshape(epochs * mini_batches, num_rows // mini_batches)


def _balanced(sequences: Any, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """The order in which rows are dealt to shards and micro-batches, and its inverse."""
    strategy = layout.strategy
    tokens_B = sum(x.mask.sum(axis=1) for x in named_sequences(sequences).values())
    # lengths are few numbers: whole on every device, each of which sorts them for itself
    tokens_B = jax.lax.with_sharding_constraint(tokens_B, layout.replicated)
    return balanced_order(tokens_B, num_shards=strategy.num_row_shards, micro_batches=strategy.micro_batches)


def _in_micro_batches(function: Callable[[Any], Any], rows: Any, layout: Layout) -> Any:
    """A row-wise function over the rows a part at a time, its outputs put back in order."""
    parts = layout.strategy.micro_batches
    if parts == 1:
        return function(rows)
    outputs = jax.lax.map(
        lambda part: function(layout.constrain_rows(part)), jax.tree.map(lambda x: _cut(x, parts), rows)
    )
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), outputs)


def _cut(x: jax.Array, parts: int) -> jax.Array:
    """[rows, ...] -> [parts, rows / parts, ...] with every parts-th row together, so that no row leaves its device."""
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)


def _constrain(arrays: list[Any], has_rows: list[bool], layout: Layout) -> list[Any]:
    return [layout.constrain_rows(x) if rows else x for x, rows in zip(arrays, has_rows, strict=True)]


def _is_max(x: Any) -> bool:
    return isinstance(x, Max)


def _combine(a: Any, b: Any) -> Any:
    return Max(jnp.maximum(a.value, b.value)) if _is_max(a) else a + b
