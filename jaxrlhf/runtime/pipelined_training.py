"""Training over the stages of a pipeline: the same gradients, metrics and updates as one program would give.

A train call is one program over its devices where it has no stages. With stages every data-parallel group is a pipe,
and what follows is done for every mini-batch:

1. The rows are dealt into micro-batches.
2. A schedule is carried out. The forward of a stage keeps only what it was given; its backward computes the stage anew
   and adds the gradient of its weights to what it has, on the devices of its own group.
3. The gradients are summed over the groups, once, and divided by the weight of the loss. The norm of the whole gradient
   is made of those of the stages. Every stage updates its own weights.

A head that is tied to the embedding is lent it by the first stage, and gives its gradient back.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf.experience import Max
from jaxrlhf.models.lora import adapt
from jaxrlhf.models.params import Params, Weight, declare, param_shardings, shardings_of
from jaxrlhf.models.pipeline import lend_embedding, run_stage
from jaxrlhf.models.stages import fill, join, part_of, pick, pick_virtual, seen_from, whole_of
from jaxrlhf.planner.instructions import Schedule
from jaxrlhf.planner.schedule import gpipe, interleaved_1f1b, topological_order
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.runtime.loss_terms import MIN_WEIGHT, Losses, Rebuild, combine, is_max, over_updates, shuffled
from jaxrlhf.runtime.optimizer import OptimizerState, apply_gradient, optimizer_shardings
from jaxrlhf.runtime.pipeline import Pipelined, StageProgram, carry_out, compile_all, hand_over
from jaxrlhf.runtime.pipelined_inference import MicroBatch, micro_batch
from jaxrlhf.runtime.roles import ModelRole, joined_sequences, parted_outputs, term_reading
from jaxrlhf.runtime.weight_sets import set_of
from jaxrlhf.sharding.axes import DATA, PIPELINE
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import is_here
from jaxrlhf.sharding.strategy import Strategy


def schedule_of(strategy: Strategy) -> Schedule:
    """In which order the stages of a train call work."""
    if strategy.schedule == "gpipe":
        return gpipe(strategy.pipeline, strategy.micro_batches)
    return interleaved_1f1b(strategy.pipeline, strategy.chunks, strategy.micro_batches)


class PipelinedTraining(Pipelined):
    """`(params, optimizer state, noise, arrays, adapted) -> (params, optimizer state, metrics)`, as `train_program`."""

    def __init__(self, role: ModelRole, rebuild: Rebuild, has_rows: list[bool], layout: Layout) -> None:
        self.programs = TrainPrograms(role, rebuild, has_rows, layout)

    def __call__(
        self,
        params: Params,
        state: OptimizerState,
        noise: jax.Array,
        arrays: list[Any],
        adapted: Params | None = None,
    ) -> tuple[Params, OptimizerState, dict[str, jax.Array]]:
        run = TrainRun(self.programs, params, state, noise, arrays, adapted)
        groups = range(self.programs.layout.strategy.data)
        order = [
            instruction._replace(pipe=group)
            for instruction in topological_order(schedule_of(self.programs.layout.strategy))
            for group in groups
        ]
        for update in range(run.num_updates):
            run.begin_update(update)
            for term in range(run.num_terms):
                carry_out(order, dict(enumerate(run.workers(term))))
                run.end_term(term)
            run.end_update()
        self.end = run.end
        return run.result()


class TrainPrograms:
    """The programs of a train call over a pipelined layout, each built when it is first asked for."""

    def __init__(self, role: ModelRole, rebuild: Rebuild, has_rows: list[bool], layout: Layout) -> None:
        assert role.optimizer is not None
        self.role, self.rebuild, self.has_rows, self.layout = role, rebuild, has_rows, layout
        self.num_stages, self.num_layers = layout.strategy.num_stages, role.model.num_layers
        self.groups = [layout.data_group(group) for group in range(layout.strategy.data)]
        self.last = layout.stage(self.num_stages - 1)
        self.losses = Losses(role, rebuild, has_rows, layout)
        self.embedding: Weight = declare(role.model)["embedding"]
        self.lends = role.model.tie_embeddings and role.model.head != "scalar"
        """The last stage is lent the embedding for its head."""
        self.tied = self.lends and role.lora is None
        """And gives its gradient back."""
        self.declared = set_of(role).declare(how="list")
        self.shardings = shardings_of(self.declared, layout)
        self.state_shardings = optimizer_shardings(
            role.optimizer, set_of(role).abstract(how="list"), self.shardings, layout
        )
        self._programs: dict[Any, StageProgram] = {}

    def get(self, key: Any, build: Callable[[], StageProgram]) -> StageProgram:
        """A program by its key."""
        if key not in self._programs:
            self._programs[key] = build()
        return self._programs[key]

    def deal(self, num_updates: int) -> StageProgram:
        """`(noise, arrays, number of the update) -> term -> micro-batch -> its arrays`."""
        layout, losses, parts = self.layout, self.losses, self.layout.strategy.micro_batches

        def deal(noise: jax.Array, arrays: list[Any], number: jax.Array) -> list[list[MicroBatch]]:
            _, update = self.rebuild(arrays)
            if num_updates > 1:
                sizes = {x.shape[0] for x, rows in zip(arrays, self.has_rows, strict=True) if rows}
                order = {n: shuffled(noise, n, update.epochs, update.mini_batches)[number] for n in sizes}
                arrays = [x[order[x.shape[0]]] if rows else x for x, rows in zip(arrays, self.has_rows, strict=True)]
            return [
                [micro_batch(self.role, losses, losses.dealt(arrays, i), i, m, parts) for m in range(parts)]
                for i in range(losses.count)
            ]

        return self.get("deal", lambda: StageProgram(deal, layout.rows, layout.mesh))

    def forward(self, i: int, stage: int, group: int) -> StageProgram:
        """`(params, adapted, given, mask) -> what the next stage is given`."""
        layout = self.groups[group].stage(stage)

        def forward(params: Params, adapted: Params | None, given: jax.Array, mask_BT: jax.Array) -> jax.Array:
            return self._run(params, adapted, given, mask_BT, stage, layout)

        return self.get(("forward", i, stage, group), lambda: StageProgram(forward, layout.rows, layout.mesh))

    def backward(self, i: int, stage: int, group: int) -> StageProgram:
        """`(gradient, params, adapted, given, mask, gradient by what it hands on) -> (gradient, gradient by what it was
        given)`; the first gradient is donated."""
        layout = self.groups[group].stage(stage)
        shardings = (self.gradient_shardings(stage, group), layout.rows if stage else None)

        def backward(
            sums: Params,
            params: Params,
            adapted: Params | None,
            given: jax.Array,
            mask_BT: jax.Array,
            by_out: jax.Array,
        ) -> Any:
            def run(params: Params, given: jax.Array) -> jax.Array:
                return self._run(params, adapted, given, mask_BT, stage, layout)

            if stage == 0:  # tokens have no gradient
                _, pull = jax.vjp(lambda params: run(params, given), params)
                return _added(sums, pull(by_out)[0]), None
            _, pull = jax.vjp(run, params, given)
            by_params, by_given = pull(by_out)
            return _added(sums, by_params), by_given

        key = ("backward", i, stage, group)
        return self.get(key, lambda: StageProgram(backward, shardings, layout.mesh, donated=(0,)))

    def last_backward(self, i: int, group: int) -> StageProgram:
        """`(gradient, params, adapted, given, mask, arrays) -> (gradient, gradient by what it was given, weight of the
        loss, metrics)`: forward and backward of the last stage; the first gradient is donated."""
        stage = self.num_stages - 1
        layout = self.groups[group].stage(stage)
        shardings = (self.gradient_shardings(stage, group), layout.rows, layout.replicated, layout.replicated)

        def backward(
            sums: Params, params: Params, adapted: Params | None, given: jax.Array, mask_BT: jax.Array, own: list[Any]
        ) -> Any:
            losses = Losses(self.role, self.rebuild, self.has_rows, layout)

            def value(params: Params, given: jax.Array) -> Any:
                weight, metrics = self._last(losses, params, adapted, given, mask_BT, own, i)
                return metrics["loss"], (weight, metrics)

            gradient = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)
            (_, (weight, metrics)), (by_params, by_given) = gradient(params, given)
            return _added(sums, by_params), by_given, weight, metrics

        key = ("last backward", i, group)
        return self.get(key, lambda: StageProgram(backward, shardings, layout.mesh, donated=(0,)))

    def _last(
        self,
        losses: Losses,
        params: Params,
        adapted: Params | None,
        given: jax.Array,
        mask_BT: jax.Array,
        own: list[Any],
        i: int,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """The weight of a term's loss on a micro-batch, and its metrics."""
        stage = self.num_stages - 1
        layout = losses.layout
        term = losses.term(own, i)
        reading, sequences = term_reading(self.role, term), joined_sequences(term, layout)
        hidden = self._run(params, adapted, given, mask_BT, stage, layout, wanted=reading.columns(sequences)[1])
        whole = self._whole(params, adapted)
        outputs = reading.outputs(whole, hidden, sequences, self.role.model, layout)
        return losses.value_of(parted_outputs(term, outputs), own, i)

    def _run(
        self,
        params: Params,
        adapted: Params | None,
        given: jax.Array,
        mask_BT: jax.Array,
        stage: int,
        layout: Layout,
        wanted: Any = 0,
    ) -> jax.Array:
        remat, num_stages = self.layout.strategy.remat, self.num_stages
        whole = self._whole(params, adapted)
        return run_stage(whole, given, mask_BT, stage, num_stages, self.role.model, layout, wanted=wanted, remat=remat)

    def _whole(self, params: Params, adapted: Params | None) -> Params:
        lora = self.role.lora
        return params if adapted is None or lora is None else adapt(adapted, params, self.role.model, lora)

    def group_shardings(self, group: int) -> Any:
        """How weights rest in the layout of a data-parallel group."""
        return shardings_of(self.declared, self.groups[group])

    def adapted_shardings(self, group: int) -> Any:
        """The same for the weights that adapters adapt."""
        return param_shardings(self.role.model, self.groups[group])

    def gradient_shardings(self, stage: int, group: int) -> Any:
        """Of the gradient that a group adds up on a virtual stage, with a leading axis over the groups."""
        own = self.groups[group].stage(stage)
        rest = pick_virtual(self.group_shardings(group), stage, self.num_layers, self.num_stages)
        if self.tied and stage == self.num_stages - 1:
            rest = lend_embedding(rest, own.weight(self.embedding.axes))
        return jax.tree.map(lambda s: NamedSharding(own.mesh, PartitionSpec(DATA, *s.spec)), rest)

    def zeros(self, stage: int, group: int, params: Params) -> StageProgram:
        """`() -> gradient of nothing yet`."""
        shapes = [(1, *x.shape) for x in jax.tree.leaves(params)]
        structure = jax.tree.structure(params)
        shardings = self.gradient_shardings(stage, group)

        def zeros() -> Params:
            return structure.unflatten([jnp.zeros(shape, jnp.float32) for shape in shapes])

        mesh = self.groups[group].stage(stage).mesh
        return self.get(("zeros", stage, group), lambda: StageProgram(zeros, shardings, mesh))

    def combine(self, i: int, group: int) -> StageProgram:
        """`(weight and metrics of every micro-batch) -> of a group`, with a leading axis over the groups."""
        last = self.groups[group].stage(self.num_stages - 1)

        def combined(parts: list[Any]) -> Any:
            whole = parts[0]
            for part in parts[1:]:
                whole = jax.tree.map(combine, whole, part, is_leaf=is_max)
            return jax.tree.map(lambda x: x[None], whole)

        sharding = NamedSharding(last.mesh, PartitionSpec(DATA))
        return self.get(("combine", i, group), lambda: StageProgram(combined, sharding, last.mesh))

    def totals(self, i: int) -> StageProgram:
        """`(weight and metrics of the groups) -> of all`."""

        def total(x: Any) -> Any:
            return Max(x.value.max(axis=0)) if is_max(x) else x.sum(axis=0)

        def totals(groups: Any) -> Any:
            return jax.tree.map(total, groups, is_leaf=is_max)

        return self.get(("totals", i), lambda: StageProgram(totals, self.last.replicated, self.last.mesh))

    def accumulate(self, i: int, stage: int) -> StageProgram:
        """`(gradients of the groups, weight, arrays without rows, sum over the terms before) -> (sum, square of its
        norm)`; the first is donated. What is lent is left out of the norm."""
        layout = self.layout.stage(stage)
        own = pick(self.shardings, stage, self.num_layers, self.layout)
        lent = self.tied and stage == self.layout.strategy.pipeline - 1
        if lent:
            own = lend_embedding(own, layout.weight(self.embedding.axes))

        def accumulate(groups: Params, weight: jax.Array, arrays: list[Any], before: Params | None) -> Any:
            scale = self.losses.scale(arrays, i)
            sums = jax.tree.map(lambda g: g.sum(axis=0) / jnp.maximum(weight, MIN_WEIGHT) * scale, groups)
            sums = sums if before is None else jax.tree.map(jnp.add, before, sums)
            counted = {**sums, "embedding": None} if self.tied else sums
            return sums, jnp.square(optax.tree.norm(counted))[None]

        return self.get(
            ("accumulate", i, stage), lambda: StageProgram(accumulate, (own, layout.replicated), layout.mesh)
        )

    def take_back(self) -> StageProgram:
        """`(gradient of the embedding, that of what was lent, square of the norm of the rest) -> (their sum, square of
        the norm of all)`."""
        first = self.layout.stage(0)

        def add(embedding: jax.Array, lent: jax.Array, squared: jax.Array) -> tuple[jax.Array, jax.Array]:
            whole = embedding + lent
            return whole, squared + jnp.sum(jnp.square(whole))[None]

        shardings = (first.weight(self.embedding.axes), first.replicated)
        return self.get("take back", lambda: StageProgram(add, shardings, first.mesh))

    def norm(self) -> StageProgram:
        """`(squares of the norms of the stages) -> norm`, on all devices."""
        layout = self.layout

        def norm(squares: jax.Array) -> jax.Array:
            return jnp.sqrt(squares.sum())

        return self.get("norm", lambda: StageProgram(norm, layout.replicated, layout.mesh))

    def update(self, stage: int) -> StageProgram:
        """`(params, optimizer state, gradient, norm of the whole gradient) -> (params, optimizer state, metrics)`; the
        first two are donated."""
        role, layout = self.role, self.layout.stage(stage)
        assert role.optimizer is not None
        config = role.optimizer
        shardings = (
            pick(self.shardings, stage, self.num_layers, self.layout),
            pick(self.state_shardings, stage, self.num_layers, self.layout),
            layout.replicated,
        )

        def update(params: Params, state: OptimizerState, gradient: Params, grad_norm: jax.Array) -> Any:
            return apply_gradient(config, role.num_updates, params, state, gradient, grad_norm)

        return self.get(("update", stage), lambda: StageProgram(update, shardings, layout.mesh, donated=(0, 1)))

    def report(self) -> StageProgram:
        """`(arrays without rows, weights and metrics of the terms of every update, norms and rates of each, updates so
        far) -> metrics`."""

        def report(arrays: list[Any], updates: list[Any], more: list[dict[str, Any]], count: jax.Array) -> Any:
            each = [self.losses.combined(arrays, parts) | m for parts, m in zip(updates, more, strict=True)]
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
            return over_updates(stacked, count)

        return self.get("report", lambda: StageProgram(report, self.last.replicated, self.last.mesh))


def _added(sums: Params, gradient: Params) -> Params:
    return jax.tree.map(lambda a, g: a + g[None].astype(a.dtype), sums, gradient)


class TrainRun:
    """One call of `PipelinedTraining` under way. Takes the params and the optimizer state over.

    For every update: `begin_update`; for each of its terms, a schedule carried out by `workers` and `end_term`; then
    `end_update`. In the end, `result`.
    """

    def __init__(
        self,
        programs: TrainPrograms,
        params: Params,
        state: OptimizerState,
        noise: jax.Array,
        arrays: list[Any],
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
        self.end: Any = None
        """After an update: an array that is there when this process is done with it."""
        self._told: list[tuple[list[Any], dict[str, Any]]] = []
        self._adapted_in = [
            None if adapted is None else jax.tree.map(seen_from, adapted, programs.adapted_shardings(group))
            for group in range(len(programs.groups))
        ]

    def begin_update(self, number: int) -> None:
        """Deals the rows of an update."""
        deal = self.programs.deal(self.num_updates)
        self.dealt = deal(self.noise, self.arrays, np.int32(number))
        self._sums: list[Params | None] = [None for _ in self.stages]
        self._squares: list[Any] = [None for _ in self.stages]
        self._parts: list[Any] = []
        params = join(self.params, self.programs.num_layers, self.programs.layout)
        self._lent = self._lend(params)
        self._seen = [
            jax.tree.map(seen_from, params, self.programs.group_shardings(group))
            for group in range(len(self.programs.groups))
        ]

    def _lend(self, params: Params) -> list[jax.Array] | None:
        """The embedding on the last stage's devices, as every group has it."""
        programs = self.programs
        if not programs.lends:
            return None
        source = params if self.adapted is None else self.adapted
        axes, dtype = programs.embedding.axes, programs.role.model.compute_dtype
        first = programs.layout.stage(0)
        embedding = source["embedding"]
        if embedding.dtype != dtype:
            cast = programs.get("lend", lambda: StageProgram(lambda x: x.astype(dtype), first.weight(axes), first.mesh))
            embedding = cast(embedding)
        lent = hand_over(embedding, programs.last.weight(axes))
        last = programs.num_stages - 1
        return [seen_from(lent, group.stage(last).weight(axes)) for group in programs.groups]

    def weights(self, group: int, stage: int) -> tuple[Params, Params | None]:
        """What a group has on a virtual stage: weights that are trained, and those that they adapt."""
        programs = self.programs
        layers, stages, last = programs.num_layers, programs.num_stages, stage == programs.num_stages - 1
        params = pick_virtual(self._seen[group], stage, layers, stages)
        adapted = self._adapted_in[group]
        if adapted is not None:
            adapted = pick_virtual(adapted, stage, layers, stages)
        if last and self._lent is not None:
            if adapted is None:
                params = lend_embedding(params, self._lent[group])
            else:
                adapted = lend_embedding(adapted, self._lent[group])
        return params, adapted

    def workers(self, term: int) -> list["TrainWorker"]:
        """What carries out the instructions of each group, for a term of the loss."""
        self._workers = [TrainWorker(self, term, group) for group in range(len(self.programs.groups))]
        jobs = [job for worker in self._workers for job in worker.compile_jobs()]
        if jobs:
            compile_all(jobs, self.programs.layout.mesh)
        return self._workers

    def without_rows(self, stage: int, group: int) -> list[Any]:
        """Arrays of the call that are no rows, as a group has them on a stage."""
        sharding = self.programs.groups[group].stage(stage).replicated
        return jax.tree.map(lambda x: seen_from(x, sharding), self._without_rows[stage % len(self.stages)])

    def end_term(self, term: int) -> None:
        """Sums what the groups have added up of a term's gradient."""
        programs, workers = self.programs, self._workers
        parts = [programs.combine(term, g)(worker.parts) for g, worker in enumerate(workers)]
        over_groups = NamedSharding(programs.last.mesh, PartitionSpec(DATA))
        groups = jax.tree.map(lambda *x: whole_of(x, over_groups), *parts)
        weight, metrics = programs.totals(term)(groups)
        self._parts.append((weight, metrics))
        weight = reallocate(weight, programs.layout.replicated)
        for stage in self.stages:
            layout = programs.layout.stage(stage)
            own = [
                fill([sums for v, sums in enumerate(worker.gradients) if v % len(self.stages) == stage])
                for worker in workers
            ]
            spread = jax.tree.map(
                lambda *x, mesh=layout.mesh: whole_of(x, NamedSharding(mesh, x[0].sharding.spec)), *own
            )
            self._sums[stage], self._squares[stage] = programs.accumulate(term, stage)(
                spread, seen_from(weight, layout.replicated), self._without_rows[stage], self._sums[stage]
            )
        del self._workers

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
        rates: list[dict[str, Any]] = []
        for stage in self.stages:
            own = seen_from(norm, layout.stage(stage).replicated)
            self.params[stage], self.state[stage], more = programs.update(stage)(
                self.params[stage], self.state[stage], sums[stage], own
            )
            rates.append(more)
            if is_here(layout.stage(stage).mesh):
                self.end = more
        self._told.append((self._parts, rates[last]))
        del self.dealt, self._sums, self._squares, self._seen, self._lent

    def result(self) -> tuple[Params, OptimizerState, dict[str, jax.Array]]:
        """The new params and optimizer state, and the metrics, on the devices of the last stage."""
        programs, last = self.programs, self.stages[-1]
        parts, rates = [told[0] for told in self._told], [told[1] for told in self._told]
        counters = self.state[last].num_updates
        metrics = programs.report()(self._without_rows[last], parts, rates, counters)
        layers, layout = programs.num_layers, programs.layout
        return join(self.params, layers, layout), join(self.state, layers, layout), metrics


class TrainWorker:
    """Carries out the forwards and backwards of one data-parallel group."""

    def __init__(self, run: TrainRun, term: int, group: int) -> None:
        programs = run.programs
        self._run, self._programs, self._term, self._group = run, programs, term, group
        self._layout = programs.groups[group]
        self._given: dict[tuple[int, int], jax.Array] = {}
        self._by_output: dict[tuple[int, int], jax.Array] = {}
        self._weights = [run.weights(group, stage) for stage in range(programs.num_stages)]
        trained = [params for params, _ in self._weights]
        self.gradients = [programs.zeros(stage, group, x)() for stage, x in enumerate(trained)]
        self.parts: list[Any] = []

    def forward(self, micro_batch: int, stage: int) -> Any:
        """A stage before the last; of the last, nothing: its backward begins with it."""
        if stage == self._programs.num_stages - 1:
            return None
        given, mask = self._inputs(micro_batch, stage)
        self._given[micro_batch, stage] = given
        program = self._programs.forward(self._term, stage, self._group)
        handed = program(*self._weights[stage], given, mask)
        self._given[micro_batch, stage + 1] = hand_over(handed, self._layout.stage(stage + 1).rows)
        return handed

    def backward(self, micro_batch: int, stage: int) -> Any:
        """Adds to the gradient of the stage's weights."""
        programs, weights = self._programs, self._weights[stage]
        given, mask = self._inputs(micro_batch, stage)
        if stage == programs.num_stages - 1:
            program = programs.last_backward(self._term, self._group)
            sums, by_given, *part = program(self.gradients[stage], *weights, given, mask, self._own(micro_batch))
            self.parts.append(tuple(part))
        else:
            program = programs.backward(self._term, stage, self._group)
            by_output = self._by_output.pop((micro_batch, stage))
            sums, by_given = program(self.gradients[stage], *weights, given, mask, by_output)
        self.gradients[stage] = sums
        del self._given[micro_batch, stage]
        if stage:
            self._by_output[micro_batch, stage - 1] = hand_over(by_given, self._layout.stage(stage - 1).rows)
        return by_given if stage else sums

    def compile_jobs(self) -> list[tuple[StageProgram, tuple[Any, ...]]]:
        """The programs of the stages, with what they will be called with."""
        programs, term, group, last = self._programs, self._term, self._group, self._programs.num_stages - 1
        rows, length = self._run.dealt[term][0]["tokens"].shape
        shape = (rows // len(programs.groups), length, programs.role.model.hidden_size)
        jobs: list[tuple[StageProgram, tuple[Any, ...]]] = []
        for stage in range(programs.num_stages):
            layout = self._layout.stage(stage)
            handed = jax.ShapeDtypeStruct(shape, programs.role.model.compute_dtype, sharding=layout.rows)
            given = handed if stage else self._row_part(self._run.dealt[term][0]["tokens"], 0)
            inputs = (*self._weights[stage], given, self._mask(0, stage))
            if stage == last:
                program = programs.last_backward(term, group)
                jobs.append((program, (self.gradients[stage], *inputs, self._own(0))))
            else:
                jobs.append((programs.forward(term, stage, group), inputs))
                jobs.append((programs.backward(term, stage, group), (self.gradients[stage], *inputs, handed)))
        return [(program, arguments) for program, arguments in jobs if program.is_new]

    def _inputs(self, micro_batch: int, stage: int) -> tuple[jax.Array, jax.Array]:
        """What a stage is given of a micro-batch, and the mask of its rows."""
        if stage == 0 and (micro_batch, 0) not in self._given:
            tokens = self._run.dealt[self._term][micro_batch]["tokens"]
            self._given[micro_batch, 0] = self._row_part(tokens, 0)
        return self._given[micro_batch, stage], self._mask(micro_batch, stage)

    def _mask(self, micro_batch: int, stage: int) -> jax.Array:
        return self._row_part(self._run.dealt[self._term][micro_batch]["mask"], stage)

    def _own(self, micro_batch: int) -> list[Any]:
        """What the loss gets of a micro-batch."""
        last = self._programs.num_stages - 1
        rows = self._run.dealt[self._term][micro_batch]["own"]
        others = self._run.without_rows(last, self._group)
        return [self._row_part(x, last) if x is not None else other for x, other in zip(rows, others, strict=True)]

    def _row_part(self, rows: jax.Array, stage: int) -> jax.Array:
        """Rows of all groups on all devices -> those of this group on the devices of a stage."""
        shape = (rows.shape[0] // len(self._programs.groups), *rows.shape[1:])
        return part_of(rows, shape, self._layout.stage(stage).rows)
