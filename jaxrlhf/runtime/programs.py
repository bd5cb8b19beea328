"""From a call and a layout to a jitted function.

A program takes arrays only. Everything else about a call (its settings, the loss, the structure of its arguments) is
built in, and is the key under which the executor finds the program again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.experience import Max, Sampling
from jaxrlhf.models.generate import generate
from jaxrlhf.models.params import Params, param_shardings
from jaxrlhf.reshard.balance import balanced_order
from jaxrlhf.runtime.optimizer import OptimizerState, apply_gradient, optimizer_shardings
from jaxrlhf.runtime.roles import GAP_METRIC, INFER, ModelRole, logprob_gap, model_outputs, records_gap
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
    """`(params, noise, temperature, arrays) -> leaves of a Rollout`."""

    def program(params: Params, noise: jax.Array, temperature: jax.Array, arrays: list[Any]) -> list[jax.Array]:
        prompts, sampling = rebuild(arrays)
        assert isinstance(sampling, Sampling)

        def respond(some_prompts: Any) -> Any:
            return generate(params, some_prompts, noise, temperature, sampling, role.model, layout)

        return jax.tree.leaves(_in_micro_batches(respond, prompts, layout))

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


def train_program(role: ModelRole, rebuild: Rebuild, has_rows: list[bool], layout: Layout) -> Callable[..., Any]:
    """`(params, optimizer state, noise, arrays) -> (params, optimizer state, metrics)`; the first two are donated.

    Every epoch shuffles the rows anew and cuts them into mini-batches, one update each. A mini-batch is cut into
    micro-batches, whose gradients of the loss's sum are added, and divided by the sum of their weights: the same
    gradient, however it was cut. Metrics are averaged over updates, or combined as `Max`. Balancing deals the
    rows of each mini-batch anew, which changes only in what order they are summed.
    """
    assert role.optimizer is not None
    model, optimizer = role.model, role.optimizer
    param_sharding = param_shardings(model, layout, stacked=model.scan_layers)
    optimizer_sharding = optimizer_shardings(optimizer, model, layout)
    num_micro_batches = layout.strategy.micro_batches

    def loss_and_metrics(params: Params, arrays: list[Any]) -> tuple[jax.Array, tuple[jax.Array, dict[str, Any]]]:
        loss, batch, update = rebuild(arrays)
        outputs = model_outputs(model)(params, batch["sequences"], model, layout, layout.strategy.remat)
        total, weight, metrics = loss(outputs, batch, update)
        metrics = {name: x if isinstance(x, Max) else jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
        if records_gap(role, batch):
            metrics[GAP_METRIC] = logprob_gap(outputs, batch["sequences"])
        return total, (jnp.asarray(weight, jnp.float32), {**metrics, "loss": total})

    def gradient(params: Params, arrays: list[Any]) -> tuple[Params, jax.Array, dict[str, Any]]:
        (_, (weight, metrics)), grads = jax.value_and_grad(loss_and_metrics, has_aux=True)(params, arrays)
        if layout.mesh.size > 1:  # reduce-scatter over fsdp, instead of an all-reduce that leaves whole gradients
            grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, param_sharding)
        return grads, weight, metrics

    def accumulated(params: Params, arrays: list[Any]) -> tuple[Params, jax.Array, dict[str, Any]]:
        if num_micro_batches == 1:
            return gradient(params, _constrain(arrays, has_rows, layout))
        parts = [_cut(x, num_micro_batches) if rows else x for x, rows in zip(arrays, has_rows, strict=True)]

        def of_part(i: Any) -> Any:
            part = [x[i] if rows else x for x, rows in zip(parts, has_rows, strict=True)]
            return gradient(params, _constrain(part, has_rows, layout))

        def add(i: jax.Array, sums: Any) -> Any:
            return jax.tree.map(_combine, sums, of_part(i), is_leaf=_is_max)

        return jax.lax.fori_loop(1, num_micro_batches, add, of_part(0))

    def program(
        params: Params, state: OptimizerState, noise: jax.Array, arrays: list[Any]
    ) -> tuple[Params, OptimizerState, dict[str, jax.Array]]:
        _, _, update = rebuild(arrays)
        num_rows = next(x.shape[0] for x, rows in zip(arrays, has_rows, strict=True) if rows)
        order = _shuffled(noise, num_rows, update.epochs, update.mini_batches)

        def one_update(carry: tuple[Params, OptimizerState], chosen: jax.Array | None) -> tuple[Any, dict[str, Any]]:
            params, state = carry
            pairs = zip(arrays, has_rows, strict=True)
            mini_batch = arrays if chosen is None else [x[chosen] if rows else x for x, rows in pairs]
            if layout.strategy.balance:
                _, batch, _ = rebuild(mini_batch)
                dealt, _ = _balanced(batch["sequences"], layout)
                mini_batch = [x[dealt] if rows else x for x, rows in zip(mini_batch, has_rows, strict=True)]
            grads, weight, metrics = accumulated(params, mini_batch)
            weight = jnp.maximum(weight, 1e-8)
            grads = jax.tree.map(lambda g: g / weight, grads)
            metrics = {name: x if _is_max(x) else x / weight for name, x in metrics.items()}
            params, state, more = apply_gradient(optimizer, role.num_updates, params, state, grads)
            return (params, state), metrics | more

        if order.shape[0] == 1:  # nothing to loop over, and no order to put the rows in
            (params, state), metrics = one_update((params, state), None)
            metrics = jax.tree.map(lambda x: x[None], metrics)
        else:
            (params, state), metrics = jax.lax.scan(one_update, (params, state), order)
        first_gap = {GAP_METRIC: metrics.pop(GAP_METRIC).value[0]} if GAP_METRIC in metrics else {}
        averaged = {name: x.value.max() if _is_max(x) else x.mean() for name, x in metrics.items()}
        return params, state, averaged | first_gap | {"num_updates": state.num_updates.astype(jnp.float32)}

    return jax.jit(
        program, donate_argnums=(0, 1), out_shardings=(param_sharding, optimizer_sharding, layout.replicated)
    )


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
    # lengths are few numbers: whole on every device, each of which sorts them for itself
    tokens_B = jax.lax.with_sharding_constraint(sequences.mask.sum(axis=1), layout.replicated)
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
