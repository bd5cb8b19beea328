"""The gradient of an update of a train call: added up on each device over micro-batches and terms, reduced once.

Every row shard runs the program on its own rows (`shard_map` over the row axes; `tensor` is left to the partitioner),
so that where gradients are communicated is written here and is not the compiler's choice:

- over copies of a weight, gradients are all-reduced once an update, in the compute precision, whatever the number of
  micro-batches. Until then each device adds them up in the precision of the master weight;
- of a weight that rests split over `fsdp`, the gradient of every use is reduce-scattered, so that no device ever holds
  the sum of a whole one. That is once a micro-batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrlhf.models.architecture import Weight, declare, map_weights
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import adapt
from jaxrlhf.models.params import Params
from jaxrlhf.programs.arrays import Arrays, Rebuild, Sums
from jaxrlhf.programs.loss_terms import Losses
from jaxrlhf.programs.micro_batches import is_max
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_sets import set_of
from jaxrlhf.sharding.axes import BATCH_AXES
from jaxrlhf.sharding.layout import Layout

_Reduced = Callable[[Params], Params]
"""Gradients of the rows of one shard -> of all rows."""


def gradient_of_update(
    role: ModelRole, rebuild: Rebuild, has_rows: Sequence[bool], layout: Layout
) -> Callable[[Params, Arrays, Params | None], tuple[Params, list[Sums]]]:
    """`(params, arrays of a mini-batch, adapted) -> (gradient, the weight and the metrics of each term)`, to be traced
    as part of a program over a layout without stages.

    The gradient is that of the weighted sum of the terms' means, and lies as the params rest.
    """

    def gradient(losses: Losses, dealt: list[Arrays], parts: list[tuple[Params, Sums]], reduced: _Reduced) -> Params:
        def mean(gradient: Params, i: int) -> Params:
            _, (weight, _) = parts[i]
            return losses.mean(gradient, weight, dealt[i], i)

        if len(parts) == 1:  # as the products gave it, which rounds it no second time
            return mean(reduced(parts[0][0]), 0)
        each = [mean(gradient, i) for i, (gradient, _) in enumerate(parts)]
        return reduced(jax.tree.map(lambda *x: sum(x), *each))

    return _on_row_shards(role, rebuild, has_rows, layout, gradient, lambda weights, _: weights)


def gradients_of_terms(
    role: ModelRole, rebuild: Rebuild, has_rows: Sequence[bool], layout: Layout
) -> Callable[[Params, Arrays, Params | None], tuple[list[Params], list[Sums]]]:
    """The same for some rows of a mini-batch: the gradient of each term's sum by itself, to be added to those of the
    other rows."""

    def gradients(
        losses: Losses, dealt: list[Arrays], parts: list[tuple[Params, Sums]], reduced: _Reduced
    ) -> list[Params]:
        return [reduced(gradient) for gradient, _ in parts]

    return _on_row_shards(role, rebuild, has_rows, layout, gradients, lambda weights, count: [weights] * count)


def _on_row_shards(
    role: ModelRole,
    rebuild: Rebuild,
    has_rows: Sequence[bool],
    layout: Layout,
    result: Callable[[Losses, list[Arrays], list[tuple[Params, Sums]], _Reduced], Any],
    specs_of_result: Callable[[Any, int], Any],
) -> Callable[[Params, Arrays, Params | None], tuple[Any, list[Sums]]]:
    """`(params, arrays, adapted) -> (a result from the gradients of the terms' sums over the rows of each shard, the
    weights and metrics of the terms)`. `specs_of_result`: from those of the weights and the number of terms."""
    model, lora, own = role.model, role.lora, set_of(role)
    layers = own.resting_form(layout)
    declared, base = own.declare(layers), declare(model, stacked=layers == "stacked")
    dealing = Losses(role, rebuild, has_rows, layout)
    within = layout.inside_row_shards() if layout.strategy.num_row_shards > 1 else layout
    losses = Losses(role, rebuild, has_rows, within)

    def of_term(params: Params, arrays: Arrays, i: int, adapted: Params | None) -> tuple[Params, Sums]:
        def gradient(params: Params, arrays: Arrays, i: int) -> tuple[Params, Sums]:
            def value(params: Params) -> tuple[jax.Array, Sums]:
                whole = params if adapted is None or lora is None else adapt(adapted, params, model, lora)
                weight, metrics = losses.value(whole, arrays, i)
                return metrics["loss"], (weight, metrics)

            (_, sums), grads = jax.value_and_grad(value, has_aux=True)(params)
            split = jax.tree.map(lambda weight, g: within.at_rest(g, weight), declared, grads, is_leaf=_is_weight)
            return split, sums

        grads, sums = losses.in_micro_batches(gradient, params, arrays, i)
        return grads, _over_rows(sums, within)

    def on_shard(params: Params, dealt: list[Arrays], adapted: Params | None) -> tuple[Any, list[Sums]]:
        parts = [of_term(params, arrays, i, adapted) for i, arrays in enumerate(dealt)]

        def reduced(gradient: Params) -> Params:
            return _over_copies(gradient, declared, model, within)

        return result(losses, dealt, parts, reduced), [sums for _, sums in parts]

    def on_all(params: Params, arrays: Arrays, adapted: Params | None) -> tuple[Any, list[Sums]]:
        dealt = [dealing.dealt(arrays, i) for i in range(dealing.count)]
        if within is layout:
            return on_shard(params, dealt, adapted)
        adapted = None if adapted is None else {name: x for name, x in adapted.items() if name in base}
        weights = map_weights(within.manual_weight, declared)
        of_base = map_weights(within.manual_weight, {name: base[name] for name in adapted or ()})
        rows, whole = PartitionSpec(BATCH_AXES), PartitionSpec()
        specs = [rows if mine else whole for mine in has_rows]
        sharded = jax.shard_map(
            on_shard,
            mesh=layout.mesh,
            in_specs=(weights, [specs] * len(dealt), None if adapted is None else of_base),
            out_specs=(specs_of_result(weights, len(dealt)), whole),
            axis_names=within.manual_axes,
            check_vma=False,
        )
        return sharded(params, dealt, adapted)

    return on_all


def sum_over_copies(role: ModelRole, layout: Layout) -> Callable[[Params], Params]:
    """`gradients of the copies of each weight, with a leading axis over them -> their sum`: an update's communication
    by itself, to be traced as part of a program over a layout without stages."""
    own = set_of(role)
    declared = own.declare(own.resting_form(layout))

    def first(stacked: Params) -> Params:
        return jax.tree.map(lambda x: x[0], stacked)

    if layout.strategy.num_row_shards == 1:
        return first
    within = layout.inside_row_shards()
    rest = map_weights(within.manual_weight, declared)
    copies = map_weights(lambda w: PartitionSpec(layout.copies_of_weight(w), *within.manual_weight(w)), declared)
    return jax.shard_map(
        lambda stacked: _over_copies(first(stacked), declared, role.model, within),
        mesh=layout.mesh, in_specs=(copies,), out_specs=rest, axis_names=within.manual_axes, check_vma=False,
    )  # fmt: skip


def _over_rows(sums: Sums, layout: Layout) -> Sums:
    """Sums over the rows of one shard -> sums over the rows of all shards."""
    axes = _summed(BATCH_AXES, layout)
    if not axes:
        return sums

    def whole(x: Any) -> Any:
        return type(x)(jax.lax.pmax(x.value, axes)) if is_max(x) else jax.lax.psum(x, axes)

    return jax.tree.map(whole, sums, is_leaf=is_max)


def _over_copies(grads: Params, declared: Any, model: ModelConfig, layout: Layout) -> Params:
    """Gradients of one shard's rows, scattered over `fsdp` already -> gradients of all rows."""

    def reduced(weight: Weight, gradient: jax.Array) -> jax.Array:
        axes = _summed(layout.copies_of_weight(weight), layout)
        if not axes:
            return gradient
        own = model.compute_dtype if "value" not in weight.axes else gradient.dtype  # a scalar head computes in float32
        own = layout.precision_of_sums(own)
        sent = gradient.astype(own) if jnp.finfo(own).bits < jnp.finfo(gradient.dtype).bits else gradient
        return jax.lax.psum(sent, axes).astype(gradient.dtype)

    return jax.tree.map(reduced, declared, grads, is_leaf=_is_weight)


def _summed(axes: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    """The mesh axes of `axes` over which the program itself has to sum, and that have more than one device."""
    return tuple(axis for axis in axes if axis in layout.manual_axes and layout.mesh.shape[axis] > 1)


def _is_weight(x: Any) -> bool:
    return isinstance(x, Weight)
