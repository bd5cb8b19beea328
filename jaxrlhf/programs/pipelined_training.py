"""Training over the stages of a pipeline: the same gradients, metrics and updates as one program would give.

A train call is one program over its devices where it has no stages. With stages every data-parallel group is a pipe,
and what follows is done for every mini-batch:

1. The rows are dealt into micro-batches.
2. A schedule is carried out. The forward of a stage keeps the results of its matrix products and of attention for its
   backward, or, with remat `dots`, the former only; with `layer` only the stage input, and the backward computes the
   stage anew. The backward adds the gradient of the stage's weights to what there is, on the devices of its own group.
3. The gradients are summed over the groups, once, and divided by the weight of the loss. The norm of the whole gradient
   is made of those of the stages. Every stage updates its own weights.

A head that is tied to the embedding is lent it by the first stage, and gives its gradient back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf.models.params import Params, param_shardings
from jaxrlhf.models.stage_weights import fill, join, lend_embedding, part_of, pick, pick_virtual, seen_from, whole_of
from jaxrlhf.programs.arrays import Arrays, Metrics, Noise, Outputs, Rebuild, Sums
from jaxrlhf.programs.optimizer import OptimizerState
from jaxrlhf.programs.pipeline import Pipelined, carry_out, compile_all, hand_over, settle
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.stage_programs import StageArguments, TrainPrograms
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.schedules.instructions import Schedule
from jaxrlhf.schedules.schedule import gpipe, interleaved_1f1b, topological_order, validate
from jaxrlhf.sharding.axes import DATA, PIPELINE
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy


def schedule_of(strategy: Strategy) -> Schedule:
    """In which order the stages of a train call work."""
    if strategy.schedule == "gpipe":
        schedule = gpipe(strategy.pipeline, strategy.micro_batches)
    else:
        schedule = interleaved_1f1b(strategy.pipeline, strategy.chunks, strategy.micro_batches)
    validate(schedule)
    return schedule


class PipelinedTraining(Pipelined):
    """`(params, optimizer state, noise, arrays, adapted) -> (params, optimizer state, metrics)`, as `train_program`."""

    def __init__(self, role: ModelRole, rebuild: Rebuild, has_rows: Sequence[bool], layout: Layout) -> None:
        self.programs = TrainPrograms(role, rebuild, has_rows, layout)
        self._order = [
            instruction._replace(pipe=group)
            for instruction in topological_order(schedule_of(layout.strategy))
            for group in range(layout.strategy.data)
        ]

    def __call__(
        self, params: Params, state: OptimizerState, noise: Noise, arrays: Arrays, adapted: Params | None = None
    ) -> tuple[Params, OptimizerState, Metrics]:
        run = TrainRun(self.programs, params, state, noise, arrays, adapted)
        for update in range(run.num_updates):
            run.begin_update(update)
            for term in range(run.num_terms):
                carry_out(self._order, dict(enumerate(run.runners(term))))
                run.end_term(term)
            run.end_update()
        self.ends = run.ends
        return run.result()


class TrainRun:
    """One call of `PipelinedTraining` under way. Takes the params and the optimizer state over.

    For every update: `begin_update`; for each of its terms, a schedule carried out by `runners` and `end_term`; then
    `end_update`. In the end, `result`.
    """

    def __init__(
        self,
        programs: TrainPrograms,
        params: Params,
        state: OptimizerState,
        noise: Noise,
        arrays: Arrays,
        adapted: Params | None,
    ) -> None:
        self.programs, self.noise, self.arrays = programs, noise, arrays
        layout, layers = programs.layout, programs.num_layers
        self.stages = range(layout.strategy.pipeline)
        self.params = [pick(params, stage, layers, layout) for stage in self.stages]
        self.state = [pick(state, stage, layers, layout) for stage in self.stages]
        self.adapted = adapted
        _, update = programs.rebuild(arrays)
        self.num_updates, self.num_terms = update.epochs * update.mini_batches, programs.losses.count
        without_rows = [None if rows else x for x, rows in zip(arrays, programs.has_rows, strict=True)]
        self._without_rows = [
            jax.tree.map(lambda x, stage=stage: seen_from(x, layout.stage(stage).replicated), without_rows)
            for stage in self.stages
        ]
        self.ends: dict[Layout, Outputs] = {}
        """After an update: the stages of which this process has devices, and what is there when each is done."""
        self._told: list[tuple[list[Sums], Metrics]] = []
        self._adapted_in = [None if adapted is None else self._seen_by(group, adapted) for group in programs.groups]

    def _seen_by(self, group: Layout, adapted: Params) -> Params:
        """Weights that adapters adapt, as a group sees them; without a head that only another role's model has."""
        own = param_shardings(self.programs.role.model, group)
        return {name: jax.tree.map(seen_from, x, own[name]) for name, x in adapted.items() if name in own}

    def begin_update(self, number: int) -> None:
        """Deals the rows of an update."""
        deal = self.programs.deal(self.num_updates)
        self.dealt = deal(self.noise, self.arrays, np.int32(number))
        self._sums: list[Params | None] = [None for _ in self.stages]
        self._squares: list[Any] = [None for _ in self.stages]
        self._parts: list[Sums] = []
        params = join(self.params, self.programs.num_layers, self.programs.layout)
        self._lent = self._lend(params)
        self._seen = [jax.tree.map(seen_from, params, own) for own in self.programs.group_shardings]

    def _lend(self, params: Params) -> list[jax.Array] | None:
        """The embedding on the last stage's devices, as every group has it."""
        programs = self.programs
        if not programs.lends:
            return None
        source = params if self.adapted is None else self.adapted
        declared, dtype = programs.embedding, programs.role.model.compute_dtype
        first = programs.layout.stage(0)
        embedding = source["embedding"]
        if embedding.dtype != dtype:
            cast = programs.get("lend", lambda x: x.astype(dtype), first.weight(declared), first.mesh)
            embedding = cast(embedding)
        lent = hand_over(embedding, programs.last.weight(declared))
        last = programs.num_stages - 1
        return [seen_from(lent, group.stage(last).weight(declared)) for group in programs.groups]

    def weights(self, group: int, stage: int) -> tuple[Params, Params | None]:
        """The weights of a group on a virtual stage: those that are trained, and those that adapters adapt."""
        programs = self.programs
        layers, stages, last = programs.num_layers, programs.num_stages, stage == programs.num_stages - 1
        params = pick_virtual(self._seen[group], stage, layers, stages)
        adapted = self._adapted_in[group]
        lent = self._lent[group] if last and self._lent is not None else None
        if adapted is None:
            return params if lent is None else lend_embedding(params, lent), None
        adapted = pick_virtual(adapted, stage, layers, stages)
        return params, adapted if lent is None else lend_embedding(adapted, lent)

    def runners(self, term: int) -> list["TrainRunner"]:
        """One runner for each group, which carries out its instructions for a term of the loss."""
        self._runners = [TrainRunner(self, term, group) for group in range(len(self.programs.groups))]
        jobs = [job for runner in self._runners for job in runner.compile_jobs()]
        if jobs:
            compile_all(jobs, self.programs.layout.mesh)
        return self._runners

    def without_rows(self, stage: int, group: int) -> list[Any]:
        """Arrays of the call that are no rows, as a group has them on a stage."""
        sharding = self.programs.groups[group].stage(stage).replicated
        return jax.tree.map(lambda x: seen_from(x, sharding), self._without_rows[stage % len(self.stages)])

    def end_term(self, term: int) -> None:
        """Sums what the groups have added up of a term's gradient."""
        programs, runners = self.programs, self._runners
        parts = [programs.combine(term, g)(runner.parts) for g, runner in enumerate(runners)]
        over_groups = NamedSharding(programs.last.mesh, PartitionSpec(DATA))
        groups = jax.tree.map(lambda *x: whole_of(x, over_groups), *parts)
        weight, metrics = programs.totals(term)(groups)
        self._parts.append((weight, metrics))
        weight = reallocate(weight, programs.layout.replicated)
        for stage in self.stages:
            layout = programs.layout.stage(stage)
            own = [fill(runner.hand_in(stage)) for runner in runners]
            spread = jax.tree.map(
                lambda *x, mesh=layout.mesh: whole_of(x, NamedSharding(mesh, x[0].sharding.spec)), *own
            )
            self._sums[stage], self._squares[stage] = programs.sum_over_groups(term, stage)(
                spread, seen_from(weight, layout.replicated), self._without_rows[stage], self._sums[stage]
            )
            del own, spread  # before the next stage, as far as it is on the same devices
        del self._runners

    def end_update(self) -> None:
        """Updates the weights of every stage."""
        programs, layout = self.programs, self.programs.layout
        sums, squares, last = self._sums, self._squares, self.stages[-1]
        if programs.tied:
            first, final = sums[0], sums[last]
            assert first is not None and final is not None
            lent = hand_over(final["embedding"], first["embedding"].sharding)
            whole, squares[0] = programs.take_back()(first["embedding"], lent, squares[0])
            sums[0], sums[last] = {**first, "embedding": whole}, {**final, "embedding": None}
        everywhere = NamedSharding(layout.mesh, PartitionSpec(PIPELINE))
        norm = programs.norm()(whole_of(squares, everywhere))
        rates: list[Metrics] = []
        for stage in self.stages:
            own = seen_from(norm, layout.stage(stage).replicated)
            self.params[stage], self.state[stage], more = programs.update(stage)(
                self.params[stage], self.state[stage], sums[stage], own
            )
            rates.append(more)
            if layout.stage(stage).own_devices:
                self.ends[layout.stage(stage)] = more
        self._told.append((self._parts, rates[last]))
        settle((self.params, self.state))
        del self.dealt, self._sums, self._squares, self._seen, self._lent

    def result(self) -> tuple[Params, OptimizerState, Metrics]:
        """The new params and optimizer state, and the metrics, on the devices of the last stage."""
        programs, last = self.programs, self.stages[-1]
        parts, rates = [told[0] for told in self._told], [told[1] for told in self._told]
        counters = self.state[last].num_updates
        metrics = programs.report()(self._without_rows[last], parts, rates, counters)
        layers, layout = programs.num_layers, programs.layout
        return join(self.params, layers, layout), join(self.state, layers, layout), metrics


class TrainRunner:
    """Carries out the forwards and backwards of one data-parallel group."""

    def __init__(self, run: TrainRun, term: int, group: int) -> None:
        programs = run.programs
        self._run, self._programs, self._term, self._group = run, programs, term, group
        self._layout = programs.groups[group]
        self._last = programs.num_stages - 1
        self._rows = run.dealt[term]
        self._stage_inputs: dict[tuple[int, int], jax.Array] = {}
        self._residuals: dict[tuple[int, int], Arrays] = {}
        self._by_output: dict[tuple[int, int], jax.Array] = {}
        self._weights = [run.weights(group, stage) for stage in range(programs.num_stages)]
        trained = [params for params, _ in self._weights]
        self.gradients: list[Any] = [programs.zeros(stage, group, x)() for stage, x in enumerate(trained)]
        self.parts: list[Sums] = []

    def forward(self, micro_batch: int, stage: int) -> Outputs:
        """A stage before the last; of the last, nothing: its backward begins with it."""
        if stage == self._last:
            return None
        if stage == 0:
            self._stage_inputs[micro_batch, 0] = self._tokens(micro_batch)
        program = self._programs.forward(self._term, stage, self._group)
        stage_output, self._residuals[micro_batch, stage] = program(self._arguments(micro_batch, stage))
        self._stage_inputs[micro_batch, stage + 1] = hand_over(stage_output, self._layout.stage(stage + 1).rows)
        return stage_output

    def backward(self, micro_batch: int, stage: int) -> Outputs:
        """Adds to the gradient of the stage's weights."""
        arguments = self._arguments(micro_batch, stage)
        if stage == self._last:
            program = self._programs.last_backward(self._term, self._group)
            sums, by_input, *part = program(self.gradients[stage], arguments, self._own(micro_batch))
            self.parts.append(tuple(part))
        else:
            program = self._programs.backward(self._term, stage, self._group)
            later = self._residuals.pop((micro_batch, stage)), self._by_output.pop((micro_batch, stage))
            sums, by_input = program(self.gradients[stage], arguments, *later)
        self.gradients[stage] = sums
        del self._stage_inputs[micro_batch, stage]
        if stage:
            self._by_output[micro_batch, stage - 1] = hand_over(by_input, self._layout.stage(stage - 1).rows)
        return by_input if stage else sums

    def hand_in(self, stage: int) -> list[Params]:
        """Gives the gradients up that were added up on a stage's devices, one for each of its chunks."""
        chunks = range(stage, self._programs.num_stages, self._programs.layout.strategy.pipeline)
        gradients = [self.gradients[chunk] for chunk in chunks]
        for chunk in chunks:
            self.gradients[chunk] = None
        return gradients

    def compile_jobs(self) -> list[Callable[[], None]]:
        """Functions that compile the programs of each stage for the shapes that they will be called with; none where
        all are compiled."""
        programs, term, group = self._programs, self._term, self._group
        rows, length = self._rows[0]["tokens"].shape
        shape = (rows // len(programs.groups), length, programs.role.model.hidden_size)

        def job(stage: int) -> Callable[[], None]:
            layout = self._layout.stage(stage)
            stage_output = jax.ShapeDtypeStruct(shape, programs.role.model.compute_dtype, sharding=layout.rows)
            arguments = self._arguments(0, stage, stage_output if stage else self._tokens(0))
            if stage == self._last:
                last, own = programs.last_backward(term, group), self._own(0)
                return lambda: last.compile(self.gradients[stage], arguments, own)
            forward, backward = programs.forward(term, stage, group), programs.backward(term, stage, group)

            def compile() -> None:
                forward.compile(arguments)
                if backward.is_new:
                    backward.compile(self.gradients[stage], arguments, forward.outputs[1], stage_output)

            return compile

        backwards = [programs.backward(term, stage, group) for stage in range(self._last)]
        if any(program.is_new for program in (*backwards, programs.last_backward(term, group))):
            return [job(stage) for stage in range(programs.num_stages)]
        return []

    def _arguments(self, micro_batch: int, stage: int, stage_input: Any = None) -> StageArguments:
        """The arguments of a stage's programs. `stage_input`: None means that of the micro-batch."""
        stage_input = self._stage_inputs[micro_batch, stage] if stage_input is None else stage_input
        return StageArguments(
            *self._weights[stage], stage_input, self._row_part(self._rows[micro_batch]["mask"], stage)
        )

    def _tokens(self, micro_batch: int) -> jax.Array:
        return self._row_part(self._rows[micro_batch]["tokens"], 0)

    def _own(self, micro_batch: int) -> list[Any]:
        """The arrays of a micro-batch that the loss gets."""
        rows, others = self._rows[micro_batch]["own"], self._run.without_rows(self._last, self._group)
        return [other if x is None else self._row_part(x, self._last) for x, other in zip(rows, others, strict=True)]

    def _row_part(self, rows: jax.Array, stage: int) -> jax.Array:
        """Rows of all groups on all devices -> those of this group on the devices of a stage."""
        shape = (rows.shape[0] // len(self._programs.groups), *rows.shape[1:])
        return part_of(rows, shape, self._layout.stage(stage).rows)
