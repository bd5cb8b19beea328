"""From a call and a layout to a jitted function.

What inference computes is in `models.heads`, the methods and output shapes of a role in `roles`.

A program takes arrays only. Everything else about a call (its settings, the loss, the structure of its arguments) is
built in, and is the key under which the executor finds the program again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Float

from jaxrlhf.experience import Sampling
from jaxrlhf.generation.generate import generate
from jaxrlhf.generation.rollout_settings import ALL_AT_ONCE, Slots
from jaxrlhf.models.heads import INFERENCE_OUTPUTS
from jaxrlhf.models.params import Params
from jaxrlhf.programs.arrays import Arrays, Metrics, Noise, Program, Rebuild
from jaxrlhf.programs.generation_in_parts import GenerationInParts
from jaxrlhf.programs.gradients import gradient_of_update
from jaxrlhf.programs.loss_terms import Losses, over_updates
from jaxrlhf.programs.micro_batches import cut, dealt_sequences, joined, rows_of_update, update_orders
from jaxrlhf.programs.optimizer import OptimizerState, apply_gradient
from jaxrlhf.programs.pipelined_inference import PipelinedInference, PipelinedLoss
from jaxrlhf.programs.pipelined_training import PipelinedTraining
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_sets import set_of
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.row_padding import row_parts, with_copies
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.xla_flags import known_flags

Trained = tuple[Params, OptimizerState]
"""Master weights and the optimizer's state, from update to update."""


def model_program(
    kind: str,
    method: str,
    role: ModelRole,
    rebuild: Rebuild,
    has_rows: Sequence[bool],
    layout: Layout,
    *,
    uneven: bool = False,
    part_tokens: int = 0,
) -> Program:
    """The program of a call of a model, by its kind and method: one of those below.

    Args:
        has_rows: Which of the arrays have rows.
        uneven: The rows of a call of `generate` or `infer` do not divide: they are filled up with copies within the
            program (`sharding.row_padding`), and lie whole on every device outside.
        part_tokens: Decoding steps of a part where generation is several programs; 0 means that it is one.
    """
    if kind == "train":
        return train_program(role, rebuild, has_rows, layout)
    if kind == "generate":
        if part_tokens and layout.strategy.micro_batches == 1 and not uneven:
            return GenerationInParts(
                role, rebuild, layout, part_tokens, slots_of(layout.strategy), decoding_options(layout)
            )
        return generate_program(role, rebuild, layout, uneven=uneven)
    if method == "loss":
        return loss_program(role, rebuild, has_rows, layout)
    return infer_program(role, method, rebuild, layout, uneven=uneven)


def compute_program(
    function: Callable[..., Any], rebuild: Rebuild, has_rows: Sequence[bool], layout: Layout
) -> Callable[[Arrays], Arrays]:
    """`arrays -> leaves of the outputs`. `has_rows`: which of the outputs have rows that are split."""
    shardings = [layout.rows if rows else layout.replicated for rows in has_rows]
    return jax.jit(lambda arrays: jax.tree.leaves(function(*rebuild(arrays))), out_shardings=shardings)


def generate_program(role: ModelRole, rebuild: Rebuild, layout: Layout, *, uneven: bool = False) -> Program:
    """`(params, noise, temperature, arrays) -> leaves of a Rollout`. In a pipelined layout the params are as
    `ring_params` gives them. `uneven`: as for `model_program`.
    """

    def program(params: Params, noise: Noise, temperature: Float[jax.Array, ""], arrays: Arrays) -> Arrays:
        prompts, sampling = rebuild(arrays)
        assert isinstance(sampling, Sampling)
        num_sequences = len(prompts.tokens) * sampling.num_samples
        if uneven:
            prompts = layout.constrain_rows(with_copies(prompts, row_parts("generate", layout.strategy)))

        def respond(some_prompts: Any) -> Any:
            given, slots = (params, some_prompts, noise, temperature, sampling), slots_of(layout.strategy)
            rollout = generate(*given, role.model, layout, slots)
            # a row for each prompt, with its samples in it, until all are back in order
            return jax.tree.map(lambda x: x.reshape(-1, sampling.num_samples, *x.shape[1:]), rollout)

        rollout = _in_micro_batches(respond, prompts, layout)
        return jax.tree.leaves(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_sequences], rollout))

    outputs = layout.replicated if uneven else layout.rows
    return jax.jit(program, out_shardings=outputs, compiler_options=decoding_options(layout))


def slots_of(strategy: Strategy) -> Slots:
    """How prompts enter the slots of a strategy."""
    if not strategy.slots:
        return ALL_AT_ONCE
    return Slots(strategy.slots, strategy.prefill_rows, strategy.prefill_tokens, shared_prompts=strategy.shared_prompts)


def decoding_options(layout: Layout) -> dict[str, Any] | None:
    """XLA options of a program that decodes.

    On GPUs it would make one product of those with the same input, by joining their weights in every step: with weights
    split over `tensor`, more bytes than the products themselves read. Where they are not split they are joined before.
    """
    return known_flags({"xla_gpu_dot_merger_threshold_mb": 0}) if layout.is_on_gpu else None


def infer_program(role: ModelRole, method: str, rebuild: Rebuild, layout: Layout, *, uneven: bool = False) -> Program:
    """`(params, arrays) -> leaves of the outputs`. `uneven`: as for `model_program`."""
    if layout.is_pipelined:
        return PipelinedInference(role, method, rebuild, layout, uneven=uneven)

    def program(params: Params, arrays: Arrays) -> Arrays:
        def infer(some_sequences: Any) -> Any:
            return INFERENCE_OUTPUTS[method](params, some_sequences, role.model, layout)

        sequences, inverse = dealt_sequences(arrays, rebuild, layout, uneven=uneven)
        outputs = _in_micro_batches(infer, sequences, layout)
        outputs = outputs if inverse is None else jax.tree.map(lambda x: x[inverse], outputs)
        return [x[: len(arrays[0])] for x in jax.tree.leaves(outputs)]

    return jax.jit(program, out_shardings=layout.replicated if uneven else layout.rows)


def loss_program(role: ModelRole, rebuild: Rebuild, has_rows: Sequence[bool], layout: Layout) -> Program:
    """`(params, arrays) -> leaves of the metrics`: those of a train call's loss, without an update."""
    if layout.is_pipelined:
        return PipelinedLoss(role, rebuild, has_rows, layout)
    losses = Losses(role, rebuild, has_rows, layout)

    def program(params: Params, arrays: Arrays) -> Arrays:
        parts = [losses.in_micro_batches(losses.value, params, arrays, i) for i in range(losses.count)]
        return losses.reported(arrays, parts)

    return jax.jit(program, out_shardings=layout.replicated)


def train_program(role: ModelRole, rebuild: Rebuild, has_rows: Sequence[bool], layout: Layout) -> Program:
    """`(params, optimizer state, noise, arrays, adapted) -> (params, optimizer state, metrics)`; the first two are
    donated. Where the params are adapters, `adapted` are the weights that they adapt, which stay as they are.

    Every epoch shuffles the rows of each term anew and cuts them into mini-batches, one update each. A mini-batch is
    cut into micro-batches, whose gradients of the loss's sum are added, and divided by the sum of their weights: the
    same gradient, however it was cut. Metrics are averaged over updates, or combined as `Max`. Balancing deals the
    rows of each mini-batch anew, which changes only in what order they are summed.
    """
    assert role.optimizer is not None
    if layout.is_pipelined:
        return PipelinedTraining(role, rebuild, has_rows, layout)
    optimizer, own = role.optimizer, set_of(role)
    param_sharding, optimizer_sharding = own.shardings(layout), own.optimizer_shardings(layout)
    losses = Losses(role, rebuild, has_rows, layout)
    gradient = gradient_of_update(role, rebuild, has_rows, layout)

    def one_update(carry: Trained, mini_batch: Arrays, adapted: Params | None) -> tuple[Trained, Metrics]:
        params, state = carry
        grads, parts = gradient(params, mini_batch, adapted)
        if layout.mesh.size > 1:
            grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, param_sharding)
        params, state, more = apply_gradient(optimizer, role.num_updates, params, state, grads)
        return (params, state), losses.combined(mini_batch, parts) | more

    def program(
        params: Params, state: OptimizerState, noise: Noise, arrays: Arrays, adapted: Params | None = None
    ) -> tuple[Params, OptimizerState, Metrics]:
        _, update = rebuild(arrays)
        order = update_orders(noise, arrays, has_rows, update)

        def chosen_update(carry: Trained, chosen: dict[int, jax.Array]) -> tuple[Trained, Metrics]:
            return one_update(carry, rows_of_update(arrays, has_rows, chosen), adapted)

        if update.epochs * update.mini_batches == 1:  # nothing to loop over, and no order to put the rows in
            (params, state), metrics = one_update((params, state), arrays, adapted)
            metrics = jax.tree.map(lambda x: x[None], metrics)
        else:
            (params, state), metrics = jax.lax.scan(chosen_update, (params, state), order)
        return params, state, over_updates(metrics, state.num_updates)

    return jax.jit(
        program, donate_argnums=(0, 1), out_shardings=(param_sharding, optimizer_sharding, layout.replicated)
    )


def _in_micro_batches(function: Callable[[Any], Any], rows: Any, layout: Layout) -> Any:
    """A row-wise function over the rows a part at a time, its outputs put back in order."""
    parts = layout.strategy.micro_batches
    if parts == 1:
        return function(rows)
    outputs = jax.lax.map(
        lambda part: function(layout.constrain_rows(part)), jax.tree.map(lambda x: cut(x, parts), rows)
    )
    return jax.tree.map(joined, outputs)
