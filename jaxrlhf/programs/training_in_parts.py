"""The programs of a train call in parts: it adds up the gradients of blocks of rows, and makes one update of all.

    so_far = add((None, None), params, first_rows, adapted)
    so_far = add(so_far, params, more_rows, adapted)
    params, state, metrics = update(params, state, so_far, last_rows, adapted)

`so_far` is the gradients of the terms' sums, as the params rest, and the weights and metrics of the terms.

The gradient, its weight and the metrics are sums over rows until the update divides them, so that its result is that of
`train_program` over all rows at once, apart from the order of sums. Each part reduces its gradient over the copies of a
weight, where the whole would do so once.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jaxrlhf.models.params import Params
from jaxrlhf.programs.arrays import Arrays, Metrics, Program, Rebuild, Sums
from jaxrlhf.programs.gradients import gradients_of_terms
from jaxrlhf.programs.loss_terms import Losses, over_updates
from jaxrlhf.programs.micro_batches import added
from jaxrlhf.programs.optimizer import OptimizerState, apply_gradient
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_sets import set_of
from jaxrlhf.sharding.layout import Layout

SoFar = tuple[list[Params], list[Sums]]
"""What the parts of a train call have added up, of each term."""


def training_part_program(
    role: ModelRole, rebuild: Rebuild, has_rows: Sequence[bool], layout: Layout, *, updates: bool
) -> Program:
    """The program of one part: the last one `updates`, and all others add. An update takes its params and state as a
    donation, and the others the gradients so far."""
    assert role.optimizer is not None
    optimizer, own = role.optimizer, set_of(role)
    weights, state_sharding = own.shardings(layout), own.optimizer_shardings(layout)
    losses = Losses(role, rebuild, has_rows, layout)
    of_terms = gradients_of_terms(role, rebuild, has_rows, layout)

    def add(
        gradients: list[Params] | None, sums: list[Sums] | None, params: Params, arrays: Arrays, adapted: Params | None
    ) -> SoFar:
        more = of_terms(params, arrays, adapted)
        return more if gradients is None or sums is None else added([(gradients, sums), more])

    def update(
        params: Params,
        state: OptimizerState,
        gradients: list[Params],
        sums: list[Sums],
        arrays: Arrays,
        adapted: Params | None,
    ) -> tuple[Params, OptimizerState, Metrics]:
        gradients, sums = add(gradients, sums, params, arrays, adapted)
        means = [
            losses.mean(gradient, weight, arrays, i)
            for i, (gradient, (weight, _)) in enumerate(zip(gradients, sums, strict=True))
        ]
        gradient: Any = jax.tree.map(lambda *x: sum(x[1:], x[0]), *means)
        if layout.mesh.size > 1:
            gradient = jax.tree.map(jax.lax.with_sharding_constraint, gradient, weights)
        params, state, more = apply_gradient(optimizer, role.num_updates, params, state, gradient)
        metrics = jax.tree.map(lambda x: x[None], losses.combined(arrays, sums) | more)
        return params, state, over_updates(metrics, state.num_updates)

    if updates:
        results = weights, state_sharding, layout.replicated
        program = jax.jit(update, donate_argnums=(0, 1), out_shardings=results)
        return lambda params, state, so_far, *rest: program(params, state, *so_far, *rest)
    program = jax.jit(add, donate_argnums=0, out_shardings=([weights] * losses.count, layout.replicated))
    return lambda so_far, *rest: program(*so_far, *rest)
