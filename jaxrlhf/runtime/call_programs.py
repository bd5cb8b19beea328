"""The programs of a call with described arguments: what is lowered to ask the compiler what a call costs, and what is
measured in its place.

They are the very programs that the executor runs, over any devices, real or described, for fewer layers and rows than
the call has.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf.call_graph import Call, Ref, split_args
from jaxrlhf.experience import Term
from jaxrlhf.models.lora import adapt, merging_pays
from jaxrlhf.models.params import Weight, layer_form, map_weights, shardings_of
from jaxrlhf.planner.programs.compiled_work import CallAtDepth
from jaxrlhf.planner.programs.described import Described
from jaxrlhf.runtime.gradients import sum_over_copies
from jaxrlhf.runtime.optimizer import apply_gradient, init_optimizer, optimizer_shardings
from jaxrlhf.runtime.programs import generate_program, infer_program, loss_program, train_program
from jaxrlhf.runtime.roles import ModelRole
from jaxrlhf.runtime.weight_sets import How, WeightSet, set_of
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.mesh import mesh_over
from jaxrlhf.sharding.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class DescribedCall:
    """A call by itself: arrays by their shapes, everything else as it is."""

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
    dtype: Any


class CallProgram(NamedTuple):
    """A jitted program and the shapes, with shardings, of what it is called with."""

    program: Callable[..., Any]
    arguments: tuple[Any, ...]

    def lower(self) -> Any:
        """The program, ready to be compiled."""
        return self.program.lower(*self.arguments)  # pyright: ignore[reportFunctionMemberAccess]


def describe_call(call: Call, role: ModelRole) -> DescribedCall:
    """A call of a graph, by itself."""

    def described(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        return DescribedRows(x.shape, x.dtype) if x.has_rows else jax.ShapeDtypeStruct(x.shape, x.dtype)

    return DescribedCall(
        call.plan_name, call.kind, call.method, jax.tree.map(described, call.args), role, call.num_tokens
    )


def form_of(kind: str, role: ModelRole, layout: Layout) -> How:
    """How the layers of a call's weights lie."""
    return layer_form(role.model, generates=kind == "generate", is_pipelined=layout.is_pipelined)


def call_program(call: DescribedCall, layout: Layout, *, num_layers: int, rows: int, updates: int = 1) -> CallProgram:
    """The program of a call whose model has fewer layers and whose batch has fewer rows.

    Args:
        layout: Without stages.
        rows: Of all row shards together, of the array that has most; of a train call, for each update.
        updates: Of a train call, one after another.
    """
    assert not layout.is_pipelined
    role = dataclasses.replace(call.role, model=dataclasses.replace(call.role.model, num_layers=num_layers))
    args = _with_rows(call, rows * updates, layout, updates)
    arrays, _, rebuild = split_args(args)
    has_rows = [x.sharding == layout.rows for x in arrays]
    noise = jax.ShapeDtypeStruct((3,), jnp.uint32, sharding=layout.replicated)
    if call.kind == "train":
        params, state, adapted = _training_state(role, layout)
        program = train_program(role, rebuild, has_rows, layout)
        return CallProgram(program, (params, state, noise, arrays, *([] if adapted is None else [adapted])))
    merged = role.lora is not None and merging_pays(role.model, role.lora, call.num_tokens)
    params = _read_weights(role, layout, form_of(call.kind, role, layout), merged=merged)
    if call.kind == "generate":
        temperature = jax.ShapeDtypeStruct((), jnp.float32, sharding=layout.replicated)
        return CallProgram(generate_program(role, rebuild, layout), (params, noise, temperature, arrays))
    if isinstance(call.args[0], tuple) and all(isinstance(x, Term) for x in call.args[0]):
        return CallProgram(loss_program(role, rebuild, has_rows, layout), (params, arrays))
    return CallProgram(infer_program(role, call.method, rebuild, layout), (params, arrays))


def update_program(call: DescribedCall, layout: Layout, *, num_layers: int) -> CallProgram:
    """What a train call does once for each mini-batch: `(params, optimizer state, gradients) -> (params, optimizer
    state)`, the first two donated, of a model that has fewer layers. The gradients have a leading axis over the copies
    of each weight, over which they are added up first.

    Args:
        layout: Without stages.
    """
    assert not layout.is_pipelined
    role = dataclasses.replace(call.role, model=dataclasses.replace(call.role.model, num_layers=num_layers))
    config, (params, state, _) = role.optimizer, _training_state(role, layout)
    assert config is not None

    reduced, own = sum_over_copies(role, layout), set_of(role)

    def program(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        params, state, _ = apply_gradient(config, role.num_updates, params, state, reduced(gradients))
        return params, state

    def of_copies(weight: Weight) -> jax.ShapeDtypeStruct:
        copies, rest = layout.copies_of_weight(weight.axes), layout.weight(weight.axes).spec
        shape = (math.prod(layout.mesh.shape[axis] for axis in copies), *weight.shape)
        sharding = NamedSharding(layout.mesh, PartitionSpec(copies, *rest))
        return jax.ShapeDtypeStruct(shape, weight.dtype, sharding=sharding)

    gradients = map_weights(of_copies, own.declare(own.resting_form(layout)))

    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    return CallProgram(jax.jit(program, donate_argnums=(0, 1), out_shardings=shardings), (params, state, gradients))


def lower_program(program: CallAtDepth, described: Described) -> Any:
    """A program for described devices, lowered. Where cuDNN's attention cannot be, it is matrix products."""
    call: DescribedCall = program.origin
    model = call.role.model
    if model.attention == "auto" and not described.has_cudnn:
        call = dataclasses.replace(
            call, role=dataclasses.replace(call.role, model=dataclasses.replace(model, attention="xla"))
        )
    strategy = Strategy(tensor=program.tensor)
    layout = Layout(mesh_over(described.devices[: program.tensor], strategy), strategy)
    return call_program(call, layout, num_layers=program.num_layers, rows=program.rows).lower()


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


def _training_state(role: ModelRole, layout: Layout) -> tuple[Any, Any, Any]:
    """Master weights, optimizer state, and what adapters adapt, if the role has any."""
    own, config = set_of(role), role.optimizer
    assert config is not None
    how = own.resting_form(layout)
    shardings = own.shardings(layout, how=how)
    state = jax.eval_shape(lambda params: init_optimizer(config, params), own.abstract(how=how))
    state_shardings = optimizer_shardings(config, own.abstract(how=how), shardings, layout)
    adapted = None if role.lora is None else _placed(_base(role), layout, how)
    return _placed(own, layout, how, rests=True), _tree_placed(state, state_shardings), adapted


def _read_weights(role: ModelRole, layout: Layout, how: How, *, merged: bool) -> Any:
    if role.lora is None:
        return _placed(set_of(role), layout, how)
    base = _placed(WeightSet(role.model), layout, how)
    return base if merged else adapt(base, _placed(set_of(role), layout, how), role.model, role.lora)


def _base(role: ModelRole) -> WeightSet:
    head = "lm" if role.model.head == "both" else role.model.head
    return WeightSet(dataclasses.replace(role.model, head=head))


def _placed(kind: WeightSet, layout: Layout, how: How, *, rests: bool = False) -> Any:
    """Shapes of a set's weights, in the compute precision unless they rest."""
    declared = kind.declare(how)
    abstract = kind.abstract(None if rests else kind.model.compute_dtype, how=how)
    return _tree_placed(abstract, shardings_of(declared, layout))


def _tree_placed(abstract: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, shardings
    )
