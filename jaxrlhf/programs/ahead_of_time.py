"""Programs of calls with described arguments: shapes and shardings in place of arrays. They are lowered and compiled
ahead of time, to ask the compiler what a call costs, or measured in its place.

They are the very programs that the executor runs, over any devices, real or described, for fewer layers and rows than
the call has.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf.call_graph import Call, Ref, split_args
from jaxrlhf.models.architecture import Weight, map_weights
from jaxrlhf.models.lora import adapt, reads_merged
from jaxrlhf.models.params import LayerForm, Params
from jaxrlhf.programs.arrays import Abstract, Program, with_shardings
from jaxrlhf.programs.call_programs import model_program
from jaxrlhf.programs.gradients import sum_over_copies
from jaxrlhf.programs.optimizer import OptimizerState, apply_gradient
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_sets import WeightSet, adapted_set, form_read, set_of
from jaxrlhf.sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class DescribedCall:
    """A call without a graph: arrays as shapes and dtypes, everything else as it is."""

    name: str
    kind: str
    method: str
    args: tuple[Any, ...]
    """The call's arguments, with a `DescribedRows` or a `jax.ShapeDtypeStruct` for each array."""
    role: ModelRole
    num_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows that the call works on."""
        return max(x.shape[0] for x in jax.tree.leaves(self.args, is_leaf=_is_rows) if _is_rows(x))


@dataclasses.dataclass(frozen=True)
class DescribedRows:
    """An array with a row for each sequence."""

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike


class CallProgram(NamedTuple):
    """A jitted program and the shapes, with shardings, of what it is called with."""

    program: Program
    arguments: tuple[Any, ...]

    def lower(self) -> Any:
        """The program, ready to be compiled."""
        return self.program.lower(*self.arguments)  # pyright: ignore[reportFunctionMemberAccess]


def describe_call(call: Call, role: ModelRole) -> DescribedCall:
    """A call of a graph, described without it."""

    def described(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        return DescribedRows(x.shape, x.dtype) if x.has_rows else jax.ShapeDtypeStruct(x.shape, x.dtype)

    return DescribedCall(
        call.plan_name, call.kind, call.method, jax.tree.map(described, call.args), role, call.num_tokens
    )


def call_program(call: DescribedCall, layout: Layout, *, num_layers: int, rows: int, updates: int = 1) -> CallProgram:
    """The program of a call whose model has fewer layers and whose batch has fewer rows.

    Args:
        layout: Without stages.
        rows: Of all row shards together, of the array that has most; of a train call, for each update.
        updates: Of a train call, one after another.
    """
    assert not layout.is_pipelined
    role = dataclasses.replace(call.role, model=call.role.model.shallow(num_layers))
    args = _with_rows(call, rows * updates, layout, updates)
    arrays, _, rebuild = split_args(args)
    has_rows = [x.sharding == layout.rows for x in arrays]
    noise = jax.ShapeDtypeStruct((3,), jnp.uint32, sharding=layout.replicated)
    program = model_program(call.kind, call.method, role, rebuild, has_rows, layout)
    if call.kind == "train":
        params, state, adapted = _training_state(role, layout)
        return CallProgram(program, (params, state, noise, arrays, *([] if adapted is None else [adapted])))
    merged = reads_merged(role.model, role.lora, call.num_tokens)
    params = _read_weights(role, layout, form_read(role, call.kind, layout), merged=merged)
    if call.kind == "generate":
        temperature = jax.ShapeDtypeStruct((), jnp.float32, sharding=layout.replicated)
        return CallProgram(program, (params, noise, temperature, arrays))
    return CallProgram(program, (params, arrays))


def update_program(call: DescribedCall, layout: Layout, *, num_layers: int) -> CallProgram:
    """The part of a train call that runs once a mini-batch: `(params, optimizer state, gradients) -> (params, optimizer
    state)`, the first two donated, of a model that has fewer layers. The gradients have a leading axis over the copies
    of each weight, over which they are added up first. `layout`: without stages."""
    assert not layout.is_pipelined
    role = dataclasses.replace(call.role, model=call.role.model.shallow(num_layers))
    config, (params, state, _) = role.optimizer, _training_state(role, layout)
    assert config is not None

    reduced, own = sum_over_copies(role, layout), set_of(role)

    def program(params: Params, state: OptimizerState, gradients: Params) -> tuple[Params, OptimizerState]:
        params, state, _ = apply_gradient(config, role.num_updates, params, state, reduced(gradients))
        return params, state

    def of_copies(weight: Weight) -> jax.ShapeDtypeStruct:
        copies, rest = layout.copies_of_weight(weight), layout.weight(weight).spec
        shape = (math.prod(layout.mesh.shape[axis] for axis in copies), *weight.shape)
        sharding = NamedSharding(layout.mesh, PartitionSpec(copies, *rest))
        return jax.ShapeDtypeStruct(shape, weight.dtype, sharding=sharding)

    gradients = map_weights(of_copies, own.declare(own.resting_form(layout)))

    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    return CallProgram(jax.jit(program, donate_argnums=(0, 1), out_shardings=shardings), (params, state, gradients))


def _with_rows(call: DescribedCall, rows: int, layout: Layout, updates: int) -> tuple[Any, ...]:
    """The arguments for another number of rows, which all arrays have in the proportion of the call's, and of
    updates."""
    most = call.num_rows

    def placed(x: Any) -> Any:
        if _is_rows(x):
            count = max(layout.strategy.num_row_shards, x.shape[0] * rows // most)
            return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=layout.rows)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.replicated)
        return x

    args = jax.tree.map(placed, call.args, is_leaf=_is_rows)
    if call.kind == "train":
        terms, update = args
        return terms, dataclasses.replace(update, mini_batches=updates, epochs=1)
    return args


def _is_rows(x: Any) -> bool:
    return isinstance(x, DescribedRows)


def _training_state(role: ModelRole, layout: Layout) -> tuple[Abstract, Abstract, Abstract | None]:
    """Master weights, optimizer state, and what adapters adapt, if the role has any."""
    own = set_of(role)
    layers = own.resting_form(layout)
    state = with_shardings(own.abstract_optimizer(layers=layers), own.optimizer_shardings(layout))
    adapted = None if role.lora is None else _compute_weights(adapted_set(role), layout, layers)
    return with_shardings(own.abstract(layers=layers), own.shardings(layout)), state, adapted


def _read_weights(role: ModelRole, layout: Layout, layers: LayerForm, *, merged: bool) -> Abstract:
    if role.lora is None:
        return _compute_weights(set_of(role), layout, layers)
    base = _compute_weights(WeightSet(role.model), layout, layers)
    return base if merged else adapt(base, _compute_weights(set_of(role), layout, layers), role.model, role.lora)


def _compute_weights(weight_set: WeightSet, layout: Layout, layers: LayerForm) -> Abstract:
    """Shapes of a set's weights in the compute precision."""
    abstract = weight_set.abstract(weight_set.model.compute_dtype, layers=layers)
    return with_shardings(abstract, weight_set.shardings(layout, layers=layers))
