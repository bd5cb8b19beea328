"""The forms in which weights lie in a layout, and the ways from one to another.

In a layout without stages a model's layers are a list or stacked. In a pipelined one every weight rests on the devices
of its stage, so that layers are a list, and no program can take all of them: a function of weights runs once a stage,
on what belongs to it. Whatever moves between the two goes layer by layer.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, SequenceKey

from jaxrlhf.generation.decoding_weights import ring_params
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.layers import Adapted
from jaxrlhf.models.lora import merge
from jaxrlhf.models.params import LayerForm, Params, Shardings, param_shardings, with_layers
from jaxrlhf.models.stage_weights import join, pick, seen_from, stage_of_weight
from jaxrlhf.programs.arrays import Program
from jaxrlhf.programs.weight_sets import Form, WeightSet
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.reshard.traffic import bytes_received_here
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import absent, is_here


def program_at(layout: Layout, function: Program, shardings: Shardings) -> Program:
    """A program that runs a function of weights where they lie: in the processes that own devices of a layout.

    In a pipelined layout it runs once a stage, on arguments with None in place of the weights of other stages. What it
    returns for those is dropped, and the compiler leaves out what they alone needed. To be kept: it compiles once.

    Args:
        function: Gives a tree of weights. Each result must follow from arguments of its own stage, and from what
            belongs to no weight: a key, a number.
        shardings: Those of the results.
    """
    if not layout.is_pipelined:
        return _program(layout.mesh, function, shardings)
    num_layers = _num_layers(shardings)
    programs = [stage_program(layout, stage, function, shardings) for stage in range(layout.strategy.pipeline)]

    def seen(arguments: Any, stage: int) -> Any:
        own = layout.stage(stage)

        def of_stage(path: tuple[Any, ...], x: Any) -> Any:
            at = stage_of_weight(path, num_layers, layout)
            if at is None and isinstance(x, jax.Array) and x.committed and isinstance(x.sharding, NamedSharding):
                return seen_from(x, own.replicated)
            return x if at in (None, stage) else None

        return jax.tree_util.tree_map_with_path(of_stage, arguments)

    def program(*arguments: Any) -> Any:
        parts = [run(*seen(arguments, stage)) for stage, run in enumerate(programs)]
        return join(parts, num_layers, layout)

    return program


def stage_program(layout: Layout, stage: int, function: Program, shardings: Shardings) -> Program:
    """The part of `program_at` that runs on one stage of a pipelined layout; its results for other stages are None.
    `shardings`: those of the results of all stages."""
    num_layers = _num_layers(shardings)

    def kept(path: tuple[Any, ...], x: Any) -> Any:
        return x if stage_of_weight(path, num_layers, layout) in (None, stage) else None

    def run(*arguments: Any) -> Any:
        return jax.tree_util.tree_map_with_path(kept, function(*arguments))

    return _program(layout.stage(stage).mesh, run, pick(shardings, stage, num_layers, layout))


def _program(mesh: Mesh, function: Program, shardings: Shardings) -> Program:
    if is_here(mesh):
        return jax.jit(function, out_shardings=shardings)
    return lambda *arguments: absent(jax.eval_shape(function, *arguments), shardings)


def _num_layers(shardings: Shardings) -> int:
    """The number of layers of a tree over the stages of a pipeline."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shardings)]
    pairs = [pair for path in paths for pair in itertools.pairwise(path)]
    return 1 + max(key.idx for name, key in pairs if name == DictKey("layers") and isinstance(key, SequenceKey))


# -- forms of layers --------------------------------------------------------------------------------------------------


def in_form(params: Params, weight_set: WeightSet, form: Form, dtype: jax.typing.DTypeLike | None = None) -> Params:
    """Weights that are in a layout, in its form and a dtype, by default their own: the same arrays where nothing is to
    be done."""
    layout, layers = form
    same_dtype = dtype is None or all(x.dtype == dtype for x in jax.tree.leaves(params))
    if isinstance(params["layers"], dict) == (layers == "stacked") and same_dtype:
        return params
    return _form_program(weight_set, layout, layers, None if dtype is None else jnp.dtype(dtype))(params)


@functools.lru_cache(maxsize=64)
def _form_program(weight_set: WeightSet, layout: Layout, layers: LayerForm, dtype: jnp.dtype | None) -> Program:
    def change(params: Params) -> Params:
        return with_layers(jax.tree.map(lambda x: x.astype(dtype or x.dtype), params), stacked=layers == "stacked")

    return program_at(layout, change, weight_set.shardings(layout, layers=layers))


@functools.lru_cache(maxsize=64)
def merge_program(model: ModelConfig, form: Form) -> Program:
    """Adapted weights -> the same with the adapters added in."""
    layout, layers = form

    def merged(adapted: Params) -> Params:
        own = jax.tree.map(
            lambda x: x if jax.tree.leaves(x) else None, adapted, is_leaf=lambda x: isinstance(x, Adapted)
        )
        return merge(own)

    return program_at(layout, merged, param_shardings(model, layout, stacked=layers == "stacked"))


def moved(params: Params, weight_set: WeightSet, source: Layout, form: Form) -> Params:
    """Weights from one layout in the form of another."""
    target, layers = form
    by = form_between(weight_set, source, target, layers)
    params = reallocate(in_form(params, weight_set, (source, by)), weight_set.shardings(target, layers=by))
    return in_form(params, weight_set, form)


def to_ring(params: Params, model: ModelConfig, layout: Layout) -> tuple[Params, int]:
    """Weights on their stages in the form that pipelined generation reads, and the bytes that devices of this process
    had to receive for it: of what every stage has."""
    received = 0

    def move(tree: Any, shardings: Shardings) -> Any:
        nonlocal received
        received += bytes_received_here(tree, shardings)
        return reallocate(tree, shardings)

    return ring_params(params, model, layout, move=move), received


def form_between(weight_set: WeightSet, source: Layout, target: Layout, layers: LayerForm | None = None) -> LayerForm:
    """The form of layers that are moved: as they are to arrive, but as a list to or from the stages of a pipeline.
    `layers`: the form in which they are to arrive; by default that in which they rest there."""
    pipelined = (source.is_pipelined or target.is_pipelined) and source != target
    return "list" if pipelined else layers or weight_set.resting_form(target)


def arranged(state: Any, layers: LayerForm) -> Any:
    """Weights, or an optimizer's state beside them, in a layout without stages, with layers as asked for.

    One weight at a time, and the sources are given up, so that only one of them is there twice. Those of which nothing
    is to be done are returned as they are.
    """

    def arrange(part: Any) -> Any:
        if not _has_layers(part) or isinstance(part["layers"], dict) == (layers == "stacked"):
            return part
        if layers == "stacked":
            return {**part, "layers": jax.tree.map(lambda *of_layers: _stack(of_layers), *part["layers"])}
        leaves, structure = jax.tree.flatten(part["layers"])
        of_weights = [_unstack(leaf) for leaf in leaves]
        return {**part, "layers": [structure.unflatten(layer) for layer in zip(*of_weights, strict=True)]}

    return jax.tree.map(arrange, state, is_leaf=_has_layers)


def _has_layers(x: Any) -> bool:
    return isinstance(x, dict) and "layers" in x


def _stack(arrays: tuple[jax.Array, ...]) -> jax.Array:
    mesh, spec = _place(arrays[0])
    stacked = _program(mesh, jnp.stack, NamedSharding(mesh, PartitionSpec(None, *spec)))(arrays)
    for array in arrays:
        array.delete()
    return stacked


def _unstack(array: jax.Array) -> list[jax.Array]:
    mesh, spec = _place(array)
    of_layer = NamedSharding(mesh, PartitionSpec(*spec[1:]))  # layers are never split
    layers = _program(mesh, _as_list, [of_layer] * array.shape[0])(array)
    array.delete()
    return layers


def _as_list(stacked: jax.Array) -> list[jax.Array]:
    return list(stacked)


def _place(array: jax.Array) -> tuple[Mesh, PartitionSpec]:
    assert isinstance(array.sharding, NamedSharding) and isinstance(array.sharding.mesh, Mesh)
    return array.sharding.mesh, array.sharding.spec


# -- without stages ----------------------------------------------------------------------------------------------------


def without_stages(layout: Layout, model: ModelConfig) -> Layout:
    """A layout of the same devices in which layers can be stacked: what was split over stages is split over `fsdp`, or,
    where that does not divide the weights, repeated."""
    strategy = layout.strategy
    fsdp, data = strategy.fsdp * strategy.pipeline, strategy.data
    if model.hidden_size % fsdp:
        fsdp, data = strategy.fsdp, data * strategy.pipeline
    return Layout.over(layout.devices, dataclasses.replace(strategy, pipeline=1, chunks=1, fsdp=fsdp, data=data))
