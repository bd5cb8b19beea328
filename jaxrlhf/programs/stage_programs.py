"""The programs of a train call over the stages of a pipeline: those of each stage, and those that combine results.

Every data-parallel group of a stage has programs of its own, on its own devices, so that no gradient is summed over the
groups before the end of a mini-batch.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int

from jaxrlhf.experience import Max
from jaxrlhf.models.architecture import Weight, declare
from jaxrlhf.models.config import at_least_float32
from jaxrlhf.models.lora import adapt
from jaxrlhf.models.params import Params, Shardings
from jaxrlhf.models.stage_weights import lend_embedding, pick, pick_virtual
from jaxrlhf.models.transformer import SavedByLayer, hidden_states
from jaxrlhf.programs.arrays import Arrays, Metrics, MicroBatch, Noise, Program, Rebuild, StageInput, Sums
from jaxrlhf.programs.loss_terms import Losses, over_updates
from jaxrlhf.programs.micro_batches import added, is_max, rows_of_update, update_orders
from jaxrlhf.programs.optimizer import OptimizerState, apply_gradient
from jaxrlhf.programs.pipeline import StageProgram
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_sets import set_of
from jaxrlhf.sharding.axes import DATA
from jaxrlhf.sharding.layout import Layout


class StageArguments(NamedTuple):
    """The weights of a stage, those that adapters adapt among them, and its input and the mask of a micro-batch."""

    params: Params
    adapted: Params | None
    stage_input: StageInput
    mask_BT: Bool[jax.Array, "B T"]


class TrainPrograms:
    """The programs of a train call over a pipelined layout, each built when it is first asked for."""

    def __init__(self, role: ModelRole, rebuild: Rebuild, has_rows: Sequence[bool], layout: Layout) -> None:
        assert role.optimizer is not None
        self.role, self.rebuild, self.has_rows, self.layout = role, rebuild, has_rows, layout
        self.num_stages, self.num_layers = layout.strategy.num_stages, role.model.num_layers
        self.groups = [layout.data_group(group) for group in range(layout.strategy.data)]
        self.last = layout.stage(self.num_stages - 1)
        self.losses = Losses(role, rebuild, has_rows, layout)
        self.embedding: Weight = declare(role.model)["embedding"]
        self.lends = role.model.has_tied_head
        """True if the last stage is lent the embedding for its head."""
        self.tied = self.lends and role.lora is None
        """True if it also gives the gradient of the embedding back."""
        own = set_of(role)
        self.shardings, self.state_shardings = own.shardings(layout), own.optimizer_shardings(layout)
        self.group_shardings = [own.shardings(group, layers="list") for group in self.groups]
        """The shardings of weights at rest in the layouts of the data-parallel groups."""
        self.keeps = layout.strategy.remat != "layer"
        """True if a forward saves residuals for its backward, which else recomputes them."""
        self._pulls: dict[tuple[int, int, int], Callable[..., Any]] = {}
        """(term, stage, group) -> the function from the arguments and residuals of a forward to its vjp."""
        self._programs: dict[Hashable, StageProgram] = {}

    def get(self, key: Hashable, function: Program, shardings: Any, mesh: Mesh, **options: Any) -> StageProgram:
        """The program of a key, made from its function the first time; other arguments as in `StageProgram`."""
        if key not in self._programs:
            self._programs[key] = StageProgram(function, shardings, mesh, **options)
        return self._programs[key]

    def deal(self, num_updates: int) -> StageProgram:
        """`(noise, arrays, number of the update) -> term -> micro-batch -> its arrays`."""
        layout, losses = self.layout, self.losses

        def deal(noise: Noise, arrays: Arrays, number: Int[jax.Array, ""]) -> list[list[MicroBatch]]:
            _, update = self.rebuild(arrays)
            if num_updates > 1:
                orders = update_orders(noise, arrays, self.has_rows, update)
                chosen = {count: order[number] for count, order in orders.items()}
                arrays = rows_of_update(arrays, self.has_rows, chosen)
            return [losses.micro_batches(losses.dealt(arrays, i), i) for i in range(losses.count)]

        return self.get("deal", deal, layout.rows, layout.mesh)

    def forward(self, i: int, stage: int, group: int) -> StageProgram:
        """`stage arguments -> (stage output, residuals)`."""
        layout = self.groups[group].stage(stage)

        def forward(given: StageArguments) -> tuple[jax.Array, Arrays]:
            if not self.keeps:
                return self._run(given, stage, layout), []
            stage_output, pull = self._pull(given, stage, layout)
            self._pulls[i, stage, group], residuals = _residuals(pull, given)
            return stage_output, residuals

        return self.get(("forward", i, stage, group), forward, (layout.rows, None), layout.mesh)

    def backward(self, i: int, stage: int, group: int) -> StageProgram:
        """`(gradient, stage arguments, residuals, gradient by the stage output) -> (gradient, gradient by the stage
        input)`; the first gradient is donated."""
        layout = self.groups[group].stage(stage)
        shardings = (self.gradient_shardings(stage, group), layout.rows if stage else None)

        def backward(
            sums: Params, given: StageArguments, residuals: Arrays, by_output: Float[jax.Array, "B T D"]
        ) -> tuple[Params, jax.Array | None]:
            if self.keeps:
                pull = self._pulls[i, stage, group](given, residuals)
            else:
                _, pull = self._pull(given, stage, layout)
            by_params, *by_input = pull(by_output)
            return _added(sums, by_params), by_input[0] if by_input else None

        def elsewhere(sums: Params, given: StageArguments, *_: Any) -> tuple[Params, Any]:
            return sums, given.stage_input if stage else None  # its gradient is sharded as the stage input

        return self.get(
            ("backward", i, stage, group), backward, shardings, layout.mesh, donated=(0,), elsewhere=elsewhere
        )

    def _pull(self, given: StageArguments, stage: int, layout: Layout) -> tuple[jax.Array, Any]:
        """The stage output, and the function from the gradient by it to those by the weights and by the stage input;
        tokens have none."""

        def run(params: Params, stage_input: Any = given.stage_input) -> jax.Array:
            return self._run(given._replace(params=params, stage_input=stage_input), stage, layout)

        return jax.vjp(run, *((given.params, given.stage_input) if stage else (given.params,)))

    def last_backward(self, i: int, group: int) -> StageProgram:
        """`(gradient, stage arguments, arrays) -> (gradient, gradient by the stage input, weight of the loss,
        metrics)`: forward and backward of the last stage; the first gradient is donated."""
        stage = self.num_stages - 1
        layout = self.groups[group].stage(stage)
        shardings = (self.gradient_shardings(stage, group), layout.rows, layout.replicated, layout.replicated)

        def backward(sums: Params, given: StageArguments, own: Arrays) -> tuple[Params, jax.Array, jax.Array, Metrics]:
            losses = Losses(self.role, self.rebuild, self.has_rows, layout)

            def value(params: Params, stage_input: StageInput) -> tuple[jax.Array, Sums]:
                arguments = given._replace(params=params, stage_input=stage_input)
                run = functools.partial(self._run, arguments, stage, layout)
                weight, metrics = losses.value_of_hidden(run, self._whole(arguments), own, i)
                return metrics["loss"], (weight, metrics)

            gradient = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)
            (_, (weight, metrics)), (by_params, by_input) = gradient(given.params, given.stage_input)
            return _added(sums, by_params), by_input, weight, metrics

        return self.get(("last backward", i, group), backward, shardings, layout.mesh, donated=(0,))

    def _run(self, given: StageArguments, stage: int, layout: Layout, wanted: Any = 0) -> jax.Array:
        count, remat = self.num_stages, self.layout.strategy.remat
        saved: SavedByLayer = remat
        if remat == "none" and stage < count - 1:  # its backward comes later, and keeps no copies of weights
            saved = "dots_and_attention"
        return hidden_states(
            self._whole(given), given.stage_input, given.mask_BT, self.role.model, layout,
            wanted=wanted, remat=saved, stage=stage, num_stages=count,
        )  # fmt: skip

    def _whole(self, given: StageArguments) -> Params:
        """The weights that a stage computes with."""
        lora = self.role.lora
        if given.adapted is None or lora is None:
            return given.params
        return adapt(given.adapted, given.params, self.role.model, lora)

    def gradient_shardings(self, stage: int, group: int) -> Shardings:
        """The shardings of a group's gradient on a virtual stage, with a leading axis over the groups."""
        own = self.groups[group].stage(stage)
        rest = pick_virtual(self.group_shardings[group], stage, self.num_layers, self.num_stages)
        if self.tied and stage == self.num_stages - 1:
            rest = lend_embedding(rest, own.weight(self.embedding))
        return jax.tree.map(lambda s: NamedSharding(own.mesh, PartitionSpec(DATA, *s.spec)), rest)

    def zeros(self, stage: int, group: int, params: Params) -> StageProgram:
        """`() -> a gradient of zeros`."""
        shapes = [(1, *x.shape) for x in jax.tree.leaves(params)]
        structure, dtype = jax.tree.structure(params), at_least_float32(jax.tree.leaves(params)[0].dtype)
        shardings = self.gradient_shardings(stage, group)

        def zeros() -> Params:
            return structure.unflatten([jnp.zeros(shape, dtype) for shape in shapes])

        mesh = self.groups[group].stage(stage).mesh
        return self.get(("zeros", stage, group), zeros, shardings, mesh)

    def combine(self, i: int, group: int) -> StageProgram:
        """`(weight and metrics of every micro-batch) -> those of a group`, with a leading axis over the groups."""
        last = self.groups[group].stage(self.num_stages - 1)

        def combined(parts: list[Sums]) -> Sums:
            return jax.tree.map(lambda x: x[None], added(parts))

        sharding = NamedSharding(last.mesh, PartitionSpec(DATA))
        return self.get(("combine", i, group), combined, sharding, last.mesh)

    def totals(self, i: int) -> StageProgram:
        """`(weight and metrics of the groups) -> those of all groups`."""

        def total(x: Any) -> Any:
            return Max(x.value.max(axis=0)) if is_max(x) else x.sum(axis=0)

        def totals(groups: Sums) -> Sums:
            return jax.tree.map(total, groups, is_leaf=is_max)

        return self.get(("totals", i), totals, self.last.replicated, self.last.mesh)

    def sum_over_groups(self, i: int, stage: int) -> StageProgram:
        """`(gradients of the groups, weight, arrays without rows, sum over the terms before) -> (sum, square of its
        norm)`; the last is donated. A tied embedding is left out of the norm."""
        layout = self.layout.stage(stage)
        own = pick(self.shardings, stage, self.num_layers, self.layout)
        lent = self.tied and stage == self.layout.strategy.pipeline - 1
        if lent:
            own = lend_embedding(own, layout.weight(self.embedding))

        def sum_over_groups(
            groups: Params, weight: jax.Array, arrays: Arrays, before: Params | None
        ) -> tuple[Params, jax.Array]:
            sums = self.losses.mean(jax.tree.map(lambda g: g.sum(axis=0), groups), weight, arrays, i)
            sums = sums if before is None else jax.tree.map(jnp.add, before, sums)
            counted = {**sums, "embedding": None} if self.tied else sums
            return sums, jnp.square(optax.tree.norm(counted))[None]

        shardings = (own, layout.replicated)
        return self.get(("sum_over_groups", i, stage), sum_over_groups, shardings, layout.mesh, donated=(3,))

    def take_back(self) -> StageProgram:
        """`(gradient of the embedding, that of the lent one, square of the norm of the rest) -> (their sum, square of
        the norm of all)`."""
        first = self.layout.stage(0)

        def add(embedding: jax.Array, lent: jax.Array, squared: jax.Array) -> tuple[jax.Array, jax.Array]:
            whole = embedding + lent
            return whole, squared + jnp.sum(jnp.square(whole))[None]

        shardings = (first.weight(self.embedding), first.replicated)
        return self.get("take back", add, shardings, first.mesh)

    def norm(self) -> StageProgram:
        """`(squares of the norms of the stages) -> norm`, on all devices."""

        def norm(squares: jax.Array) -> jax.Array:
            return jnp.sqrt(squares.sum())

        return self.get("norm", norm, self.layout.replicated, self.layout.mesh)

    def update(self, stage: int) -> StageProgram:
        """`(params, optimizer state, gradient, norm of the whole gradient) -> (params, optimizer state, metrics)`; the
        first two are donated."""
        role, layout = self.role, self.layout.stage(stage)
        config, resting = role.optimizer, (self.shardings, self.state_shardings)
        assert config is not None
        shardings = (*(pick(x, stage, self.num_layers, self.layout) for x in resting), layout.replicated)

        def update(
            params: Params, state: OptimizerState, gradient: Params, grad_norm: Float[jax.Array, ""]
        ) -> tuple[Params, OptimizerState, Metrics]:
            return apply_gradient(config, role.num_updates, params, state, gradient, grad_norm)

        return self.get(("update", stage), update, shardings, layout.mesh, donated=(0, 1))

    def report(self) -> StageProgram:
        """`(arrays without rows, weights and metrics of the terms of every update, norms and rates of each, updates so
        far) -> metrics`."""

        def report(arrays: Arrays, updates: list[list[Sums]], more: list[Metrics], count: jax.Array) -> Metrics:
            each = [self.losses.combined(arrays, parts) | m for parts, m in zip(updates, more, strict=True)]
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
            return over_updates(stacked, count)

        return self.get("report", report, self.last.replicated, self.last.mesh)


def _added(sums: Params, gradient: Params) -> Params:
    return jax.tree.map(lambda a, g: a + g[None].astype(a.dtype), sums, gradient)


def _residuals(pull: Any, arguments: Any) -> tuple[Callable[[Any, Arrays], Any], Arrays]:
    """The function that rebuilds a vjp from arguments and residuals, and the residuals: the arrays in the vjp that are
    not arguments of its program, each once. Weights are arguments, so no micro-batch saves them."""
    places = {id(x): i for i, x in enumerate(jax.tree.leaves(arguments))}
    leaves, structure = jax.tree.flatten(pull)
    residuals = list({id(x): x for x in leaves if id(x) not in places}.values())
    own_places = {id(x): i for i, x in enumerate(residuals)}
    at = [(id(x) in places, places.get(id(x), own_places.get(id(x), 0))) for x in leaves]

    def rebuild(arguments: Any, residuals: Arrays) -> Any:
        inputs = jax.tree.leaves(arguments)
        return structure.unflatten([inputs[i] if is_argument else residuals[i] for is_argument, i in at])

    return rebuild, residuals
