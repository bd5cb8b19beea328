"""Inference over the stages of a pipeline, and losses without an update: micro-batches follow one another through the
stages. The head is computed once, on the last."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.models.heads import READINGS
from jaxrlhf.models.params import Params, declare
from jaxrlhf.models.pipeline import lend_embedding, run_stage
from jaxrlhf.models.stages import pick, seen_from
from jaxrlhf.planner.schedules.schedule import forward_only, topological_order
from jaxrlhf.runtime.loss_terms import Losses, Rebuild, balanced, combine, cut, is_max
from jaxrlhf.runtime.pipeline import Pipelined, StageProgram, carry_out, compile_all, hand_over
from jaxrlhf.runtime.roles import ModelRole, joined_sequences, parted_outputs, term_reading
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.row_padding import row_parts, with_copies

MicroBatch = dict[str, Any]
"""`tokens` and `mask`, which go through the stages, and `own`: what the last one needs besides."""
LastStage = Callable[[Params, jax.Array, jax.Array, Any], Any]
"""(params, given, mask, own) -> outputs."""


class PipelinedInference(Pipelined):
    """`(params, arrays) -> leaves of the outputs`, as `infer_program`; they lie on the devices of the last stage."""

    def __init__(self, role: ModelRole, method: str, rebuild: Rebuild, layout: Layout, *, uneven: bool = False) -> None:
        self._rebuild, self._layout, self._uneven = rebuild, layout, uneven
        self._reading = READINGS[method]
        last = layout.stage(layout.strategy.num_stages - 1)

        def outputs(params: Params, given: jax.Array, mask_BT: jax.Array, sequences: Any) -> Any:
            _, wanted = self._reading.columns(sequences)
            hidden = _run(role, params, given, mask_BT, layout.strategy.num_stages - 1, layout, wanted)
            return self._reading.outputs(params, hidden, sequences, role.model, last)

        self._pass = ForwardPass(role, layout, outputs, last.rows)
        self._deal = StageProgram(self._dealt, (layout.rows, layout.replicated), layout.mesh)
        self._gather = StageProgram(self._gathered, last.replicated if uneven else last.rows, last.mesh)
        self._inverse = last.replicated

    def __call__(self, params: Params, arrays: list[Any]) -> list[jax.Array]:
        self._num_rows = len(arrays[0])
        micro_batches, inverse = self._deal(arrays)
        outputs = self._pass(params, micro_batches)
        self.ends = self._pass.ends
        return self._gather(outputs, None if inverse is None else seen_from(inverse, self._inverse))

    def _dealt(self, arrays: list[Any]) -> tuple[list[MicroBatch], jax.Array | None]:
        """The rows in micro-batches, and the order in which their outputs are as they were."""
        layout, inverse = self._layout, None
        if self._uneven:
            arrays = layout.constrain_rows(with_copies(arrays, row_parts("infer", layout.strategy)))
        (sequences,) = self._rebuild(arrays)
        if layout.strategy.balance:
            order, inverse = balanced(sequences, layout)
            sequences = layout.constrain_rows(jax.tree.map(lambda x: x[order], sequences))
        parts, (length, _) = layout.strategy.micro_batches, self._reading.columns(sequences)
        pieces = jax.tree.map(lambda x: cut(x, parts), sequences)
        each = [jax.tree.map(lambda x, m=m: x[m], pieces) for m in range(parts)]
        return [{"tokens": x.tokens[:, :length], "mask": x.mask[:, :length], "own": x} for x in each], inverse

    def _gathered(self, outputs: list[Any], inverse: jax.Array | None) -> list[jax.Array]:
        whole = jax.tree.map(lambda *x: jnp.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *outputs)
        whole = whole if inverse is None else jax.tree.map(lambda x: x[inverse], whole)
        return [x[: self._num_rows] for x in jax.tree.leaves(whole)]


class PipelinedLoss(Pipelined):
    """`(params, arrays) -> leaves of the metrics`, as `loss_program`; they lie on the devices of the last stage."""

    def __init__(self, role: ModelRole, rebuild: Rebuild, has_rows: list[bool], layout: Layout) -> None:
        self._role, self._layout, self._has_rows = role, layout, has_rows
        self._losses = Losses(role, rebuild, has_rows, layout)
        self._last = layout.stage(layout.strategy.num_stages - 1)
        on_last = Losses(role, rebuild, has_rows, self._last)
        stage = layout.strategy.num_stages - 1

        def pass_of(i: int) -> ForwardPass:
            def value(params: Params, given: jax.Array, mask_BT: jax.Array, own: list[Any]) -> Any:
                term = on_last.term(own, i)
                reading, sequences = term_reading(role, term), joined_sequences(term, self._last)
                hidden = _run(role, params, given, mask_BT, stage, layout, reading.columns(sequences)[1])
                outputs = reading.outputs(params, hidden, sequences, role.model, self._last)
                return on_last.value_of(parted_outputs(term, outputs), own, i)

            return ForwardPass(role, layout, value, self._last.replicated)

        self._passes = [pass_of(i) for i in range(self._losses.count)]
        self._deal = StageProgram(self._dealt, layout.rows, layout.mesh)
        self._report = StageProgram(self._reported, self._last.replicated, self._last.mesh)

    def __call__(self, params: Params, arrays: list[Any]) -> list[jax.Array]:
        replicated = self._last.replicated
        others = [None if rows else seen_from(x, replicated) for x, rows in zip(arrays, self._has_rows, strict=True)]
        parts = []
        for micro_batches, forward in zip(self._deal(arrays), self._passes, strict=True):
            parts.append(forward(params, micro_batches, others))
            self.ends = forward.ends
        return self._report(others, parts)

    def _dealt(self, arrays: list[Any]) -> list[list[MicroBatch]]:
        parts = range(self._layout.strategy.micro_batches)
        return [
            [micro_batch(self._role, self._losses, arrays, i, m, len(parts)) for m in parts]
            for i in range(self._losses.count)
        ]

    def _reported(self, arrays: list[Any], parts: list[list[Any]]) -> list[jax.Array]:
        sums = []
        for of_term in parts:
            whole = of_term[0]
            for part in of_term[1:]:
                whole = jax.tree.map(combine, whole, part, is_leaf=is_max)
            sums.append(whole)
        metrics = self._losses.combined(arrays, sums)
        return jax.tree.leaves(jax.tree.map(lambda x: x.value if is_max(x) else x, metrics, is_leaf=is_max))


def micro_batch(role: ModelRole, losses: Losses, arrays: list[Any], i: int, number: int, parts: int) -> MicroBatch:
    """One micro-batch of a term's rows. `own` are the arrays of the term, with None in place of all others."""
    part = losses.part(arrays, i, number, parts)
    term = losses.term(part, i)
    sequences = joined_sequences(term, losses.layout)
    length, _ = term_reading(role, term).columns(sequences)
    own = [x if mine else None for x, mine in zip(part, losses.own_rows(i), strict=True)]
    return {"tokens": sequences.tokens[:, :length], "mask": sequences.mask[:, :length], "own": own}


class ForwardPass(Pipelined):
    """Micro-batches through all stages, forward only.

    Args:
        last: What the last stage makes of what it is given.
        sharding: Of that.
    """

    def __init__(self, role: ModelRole, layout: Layout, last: LastStage, sharding: Any) -> None:
        self._role, self._layout = role, layout
        strategy, final = layout.strategy, layout.strategy.num_stages - 1
        self._order = topological_order(forward_only(strategy.pipeline, strategy.chunks, strategy.micro_batches))

        def forward(stage: int) -> StageProgram:
            def run(params: Params, given: jax.Array, mask_BT: jax.Array) -> jax.Array:
                return _run(role, params, given, mask_BT, stage, layout)

            own = layout.stage(stage)
            return StageProgram(last if stage == final else run, sharding if stage == final else own.rows, own.mesh)

        self._programs = [forward(stage) for stage in range(strategy.num_stages)]

    def __call__(self, params: Params, micro_batches: list[MicroBatch], others: list[Any] | None = None) -> list[Any]:
        """What the last stage made of each.

        Args:
            others: Arrays that all micro-batches share, on the last stage; their places in `own` are None.
        """
        self._micro_batches, self._others = micro_batches, others
        self._outputs: dict[int, Any] = {}
        self._given: dict[tuple[int, int], jax.Array] = {}
        self._handed: dict[int, Any] = {}
        strategy = self._layout.strategy
        self._params = [
            pick(params, stage, self._role.model.num_layers, self._layout) for stage in range(strategy.pipeline)
        ]
        if self._role.model.tie_embeddings and self._role.model.head != "scalar":
            axes = declare(self._role.model)["embedding"].axes
            lent = hand_over(params["embedding"], self._layout.stage(strategy.num_stages - 1).weight(axes))
            self._params[-1] = lend_embedding(self._params[-1], lent)
        if any(program.is_new for program in self._programs):
            compile_all(self._jobs(), self._layout.mesh)
        carry_out(self._order, {0: self})
        ends = {self._layout.stage(stage): self._handed[stage] for stage in range(strategy.num_stages)}
        self.ends = {layout: handed for layout, handed in ends.items() if layout.own_devices}
        outputs = [self._outputs[m] for m in range(len(micro_batches))]
        del self._micro_batches, self._others, self._outputs, self._given, self._handed, self._params
        return outputs

    def forward(self, micro_batch: int, stage: int) -> Any:
        """One stage."""
        final = stage == self._layout.strategy.num_stages - 1
        arguments = self._arguments(micro_batch, stage, self._given.pop((micro_batch, stage), None))
        handed = self._programs[stage](*arguments)
        self._handed[stage] = handed
        if final:
            self._outputs[micro_batch] = handed
        else:
            self._given[micro_batch, stage + 1] = hand_over(handed, self._layout.stage(stage + 1).rows)
        return handed

    def backward(self, micro_batch: int, stage: int) -> Any:
        """There is none."""
        raise AssertionError("inference has no backwards")

    def _arguments(self, micro_batch: int, stage: int, given: Any) -> tuple[Any, ...]:
        rows, layout = self._micro_batches[micro_batch], self._layout.stage(stage)
        final = stage == self._layout.strategy.num_stages - 1
        params = self._params[stage % self._layout.strategy.pipeline]
        tokens, mask = (seen_from(rows[name], layout.rows) for name in ("tokens", "mask"))
        inputs = (params, tokens if stage == 0 else given, mask)
        if not final:
            return inputs
        own = jax.tree.map(lambda x: seen_from(x, layout.rows), rows["own"])
        if self._others is not None:
            own = [x if other is None else other for x, other in zip(own, self._others, strict=True)]
        return (*inputs, own)

    def _jobs(self) -> list[Callable[[], None]]:
        """What compiles the program of each stage for what it will be called with."""
        shape = (*self._micro_batches[0]["tokens"].shape, self._role.model.hidden_size)
        dtype = self._role.model.compute_dtype

        def job(stage: int, program: StageProgram) -> Callable[[], None]:
            given = jax.ShapeDtypeStruct(shape, dtype, sharding=self._layout.stage(stage).rows)
            arguments = self._arguments(0, stage, given)
            return lambda: program.compile(*arguments)

        return [job(stage, program) for stage, program in enumerate(self._programs)]


def _run(
    role: ModelRole, params: Params, given: jax.Array, mask_BT: jax.Array, stage: int, layout: Layout, wanted: Any = 0
) -> jax.Array:
    stages = layout.strategy.num_stages
    return run_stage(params, given, mask_BT, stage, stages, role.model, layout.stage(stage), wanted=wanted)
