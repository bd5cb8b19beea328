"""Inference over the stages of a pipeline, and losses without an update: micro-batches follow one another through the
stages. The head is computed once, on the last."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from jaxrlhf.models.architecture import declare
from jaxrlhf.models.heads import INFERENCE_OUTPUTS
from jaxrlhf.models.params import Params, Shardings
from jaxrlhf.models.stage_weights import lend_embedding, pick, seen_from
from jaxrlhf.models.transformer import hidden_states
from jaxrlhf.programs.arrays import Arrays, MicroBatch, Outputs, Rebuild, StageInput
from jaxrlhf.programs.loss_terms import Losses
from jaxrlhf.programs.micro_batches import added, cut, dealt_sequences, joined
from jaxrlhf.programs.pipeline import Pipelined, StageProgram, carry_out, compile_all, hand_over
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.schedules.schedule import forward_only, topological_order
from jaxrlhf.sharding.layout import Layout

LastStage = Callable[[Params, StageInput, jax.Array, Any], Outputs]
"""(params, stage input, mask, own) -> outputs."""


class PipelinedInference(Pipelined):
    """`(params, arrays) -> leaves of the outputs`, as `infer_program`; they lie on the devices of the last stage."""

    def __init__(self, role: ModelRole, method: str, rebuild: Rebuild, layout: Layout, *, uneven: bool = False) -> None:
        self._rebuild, self._layout, self._uneven = rebuild, layout, uneven
        self._output = INFERENCE_OUTPUTS[method]
        last = layout.stage(layout.strategy.num_stages - 1)

        def outputs(params: Params, stage_input: StageInput, mask_BT: Bool[jax.Array, "B T"], sequences: Any) -> Any:
            _, wanted = self._output.columns(sequences)
            hidden = _run(role, params, stage_input, mask_BT, layout.strategy.num_stages - 1, layout, wanted)
            return self._output.outputs(params, hidden, sequences, role.model, last)

        self._pass = ForwardPass(role, layout, outputs, last.rows)
        self._deal = StageProgram(self._dealt, (layout.rows, layout.replicated), layout.mesh)
        self._gather = StageProgram(self._gathered, last.replicated if uneven else last.rows, last.mesh)
        self._inverse = last.replicated

    def __call__(self, params: Params, arrays: Arrays) -> Arrays:
        self._num_rows = len(arrays[0])
        micro_batches, inverse = self._deal(arrays)
        outputs = self._pass(params, micro_batches)
        self.ends = self._pass.ends
        return self._gather(outputs, None if inverse is None else seen_from(inverse, self._inverse))

    def _dealt(self, arrays: Arrays) -> tuple[list[MicroBatch], Int[jax.Array, " B"] | None]:
        """The rows in micro-batches, and the order in which their outputs are as they were."""
        sequences, inverse = dealt_sequences(arrays, self._rebuild, self._layout, uneven=self._uneven)
        parts, (length, _) = self._layout.strategy.micro_batches, self._output.columns(sequences)
        pieces = jax.tree.map(lambda x: cut(x, parts), sequences)
        each = [jax.tree.map(lambda x, m=m: x[m], pieces) for m in range(parts)]
        return [{"tokens": x.tokens[:, :length], "mask": x.mask[:, :length], "own": x} for x in each], inverse

    def _gathered(self, outputs: list[Outputs], inverse: Int[jax.Array, " B"] | None) -> Arrays:
        whole = jax.tree.map(lambda *x: joined(jnp.stack(x)), *outputs)
        whole = whole if inverse is None else jax.tree.map(lambda x: x[inverse], whole)
        return [x[: self._num_rows] for x in jax.tree.leaves(whole)]


class PipelinedLoss(Pipelined):
    """`(params, arrays) -> leaves of the metrics`, as `loss_program`; they lie on the devices of the last stage."""

    def __init__(self, role: ModelRole, rebuild: Rebuild, has_rows: Sequence[bool], layout: Layout) -> None:
        self._has_rows = has_rows
        self._losses = Losses(role, rebuild, has_rows, layout)
        self._last = layout.stage(layout.strategy.num_stages - 1)
        on_last = Losses(role, rebuild, has_rows, self._last)
        stage = layout.strategy.num_stages - 1

        def pass_of(i: int) -> ForwardPass:
            def value(params: Params, stage_input: StageInput, mask_BT: Bool[jax.Array, "B T"], own: Arrays) -> Any:
                run = functools.partial(_run, role, params, stage_input, mask_BT, stage, layout)
                return on_last.value_of_hidden(run, params, own, i)

            return ForwardPass(role, layout, value, self._last.replicated)

        self._passes = [pass_of(i) for i in range(self._losses.count)]
        self._deal = StageProgram(self._dealt, layout.rows, layout.mesh)
        self._report = StageProgram(self._reported, self._last.replicated, self._last.mesh)

    def __call__(self, params: Params, arrays: Arrays) -> Arrays:
        replicated = self._last.replicated
        others = [None if rows else seen_from(x, replicated) for x, rows in zip(arrays, self._has_rows, strict=True)]
        parts = []
        for micro_batches, forward in zip(self._deal(arrays), self._passes, strict=True):
            parts.append(forward(params, micro_batches, others))
            self.ends = forward.ends
        return self._report(others, parts)

    def _dealt(self, arrays: Arrays) -> list[list[MicroBatch]]:
        return [self._losses.micro_batches(arrays, i) for i in range(self._losses.count)]

    def _reported(self, arrays: Arrays, parts: list[list[Any]]) -> Arrays:
        return self._losses.reported(arrays, [added(of_term) for of_term in parts])


class ForwardPass(Pipelined):
    """Micro-batches through all stages, forward only.

    Args:
        last: What the last stage makes of its input.
        sharding: Of that.
    """

    def __init__(self, role: ModelRole, layout: Layout, last: LastStage, sharding: Shardings) -> None:
        self._role, self._layout = role, layout
        strategy, self._final = layout.strategy, layout.strategy.num_stages - 1
        self._order = topological_order(forward_only(strategy.pipeline, strategy.chunks, strategy.micro_batches))

        def forward(stage: int) -> StageProgram:
            def run(params: Params, stage_input: StageInput, mask_BT: Bool[jax.Array, "B T"]) -> jax.Array:
                return _run(role, params, stage_input, mask_BT, stage, layout)

            own = layout.stage(stage)
            function, of_output = (last, sharding) if stage == self._final else (run, own.rows)
            return StageProgram(function, of_output, own.mesh)

        self._programs = [forward(stage) for stage in range(strategy.num_stages)]

    def __call__(
        self, params: Params, micro_batches: list[MicroBatch], others: list[Any] | None = None
    ) -> list[Outputs]:
        """The outputs of the last stage, for each micro-batch. `others`: arrays that all micro-batches share, on the
        last stage; their places in `own` are None."""
        self._micro_batches, self._others = micro_batches, others
        self._outputs: dict[int, Outputs] = {}
        self._stage_inputs: dict[tuple[int, int], jax.Array] = {}
        self._stage_outputs: dict[int, Outputs] = {}
        strategy = self._layout.strategy
        self._params = [
            pick(params, stage, self._role.model.num_layers, self._layout) for stage in range(strategy.pipeline)
        ]
        if self._role.model.has_tied_head:
            declared = declare(self._role.model)["embedding"]
            lent = hand_over(params["embedding"], self._layout.stage(self._final).weight(declared))
            self._params[-1] = lend_embedding(self._params[-1], lent)
        if any(program.is_new for program in self._programs):
            compile_all(self._jobs(), self._layout.mesh)
        carry_out(self._order, {0: self})
        ends = {self._layout.stage(stage): self._stage_outputs[stage] for stage in range(strategy.num_stages)}
        self.ends = {layout: stage_output for layout, stage_output in ends.items() if layout.own_devices}
        outputs = [self._outputs[m] for m in range(len(micro_batches))]
        del self._micro_batches, self._others, self._outputs, self._stage_inputs, self._stage_outputs, self._params
        return outputs

    def forward(self, micro_batch: int, stage: int) -> Outputs:
        """One stage."""
        arguments = self._arguments(micro_batch, stage, self._stage_inputs.pop((micro_batch, stage), None))
        stage_output = self._programs[stage](*arguments)
        self._stage_outputs[stage] = stage_output
        if stage == self._final:
            self._outputs[micro_batch] = stage_output
        else:
            self._stage_inputs[micro_batch, stage + 1] = hand_over(stage_output, self._layout.stage(stage + 1).rows)
        return stage_output

    def backward(self, micro_batch: int, stage: int) -> Outputs:
        """There is none."""
        raise AssertionError("inference has no backwards")

    def _arguments(
        self, micro_batch: int, stage: int, stage_input: StageInput | jax.ShapeDtypeStruct | None
    ) -> tuple[Any, ...]:
        rows, layout = self._micro_batches[micro_batch], self._layout.stage(stage)
        params = self._params[stage % self._layout.strategy.pipeline]
        tokens, mask = (seen_from(rows[name], layout.rows) for name in ("tokens", "mask"))
        inputs = (params, tokens if stage == 0 else stage_input, mask)
        if stage != self._final:
            return inputs
        own = jax.tree.map(lambda x: seen_from(x, layout.rows), rows["own"])
        if self._others is not None:
            own = [x if other is None else other for x, other in zip(own, self._others, strict=True)]
        return (*inputs, own)

    def _jobs(self) -> list[Callable[[], None]]:
        """Functions that compile the program of each stage for the shapes that it will be called with."""
        shape = (*self._micro_batches[0]["tokens"].shape, self._role.model.hidden_size)
        dtype = self._role.model.compute_dtype

        def job(stage: int, program: StageProgram) -> Callable[[], None]:
            stage_input = jax.ShapeDtypeStruct(shape, dtype, sharding=self._layout.stage(stage).rows)
            arguments = self._arguments(0, stage, stage_input)
            return lambda: program.compile(*arguments)

        return [job(stage, program) for stage, program in enumerate(self._programs)]


def _run(
    role: ModelRole,
    params: Params,
    stage_input: StageInput,
    mask_BT: Bool[jax.Array, "B T"],
    stage: int,
    layout: Layout,
    wanted: Any = 0,
) -> jax.Array:
    count, own = layout.strategy.num_stages, layout.stage(stage)
    return hidden_states(params, stage_input, mask_BT, role.model, own, wanted=wanted, stage=stage, num_stages=count)
