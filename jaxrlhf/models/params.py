"""The weights of a model as arrays: shapes, shardings, first values, and the same made ready for computing.

All follow from the declarations of `models.architecture`. The tree is

    {"embedding": ..., "layers": [{"query": ..., ...}, ...], "final_norm": ..., "lm_head" or "value_head": ...}

where `layers` is a list with one dict per layer, or, stacked, one dict whose arrays have a leading `layers` axis.
Decoding wants the list, a scan over layers the stack; `with_layers` turns one into the other.
"""

import dataclasses
import zlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from jaxrlhf.models.architecture import Declared, Weight, declare, declare_layer, is_weight, map_weights
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.layers import Adapted, LayerWeights, is_joined, join
from jaxrlhf.models.stage_weights import stage_of_weight
from jaxrlhf.sharding.layout import Layout

Params = dict[str, Any]
"""The weights of a model, or of one of its stages: arrays, and under `layers` a list of `LayerWeights`, or one of them
whose arrays are stacked. Beside arrays a tree like it may have shapes, shardings, or gradients."""
Shardings = PyTree[NamedSharding]
"""The shardings of a tree of arrays; None in place of arrays that a process does not have."""
LayerForm = Literal["list", "stacked", "ring"]
"""The form of the layers: a `list`, with a dict each; `stacked`, one dict whose arrays have a leading axis; or the
`ring` of stages reads them that generates in a pipelined layout."""


def layer_form(config: ModelConfig, *, generates: bool, is_pipelined: bool) -> LayerForm:
    """The form of the layers that a call reads."""
    if is_pipelined:
        return "ring" if generates else "list"
    return "stacked" if config.scan_layers and not generates else "list"


def abstract_params(config: ModelConfig, dtype: jax.typing.DTypeLike | None = None, *, stacked: bool = False) -> Params:
    """Shapes and dtypes of the weights: of the master weights, or of copies in another dtype."""
    return abstract_of(declare(config, stacked=stacked), dtype)


def abstract_of(declared: Any, dtype: jax.typing.DTypeLike | None = None) -> Any:
    """Shapes and dtypes of declared weights."""
    return map_weights(lambda w: jax.ShapeDtypeStruct(w.shape, dtype or w.dtype), declared)


def param_shardings(config: ModelConfig, layout: Layout, *, stacked: bool = False) -> Shardings:
    """The shardings of the weights at rest in a layout."""
    return shardings_of(declare(config, stacked=stacked), layout)


def shardings_of(declared: Declared, layout: Layout) -> Shardings:
    """The shardings of declared weights at rest in a layout. In a pipelined one layers are a list."""

    def sharding(path: KeyPath, weight: Weight) -> NamedSharding:
        if not layout.is_pipelined:
            return layout.weight(weight)
        stage = stage_of_weight(path, len(declared["layers"]), layout)
        assert stage is not None, path
        return layout.stage(stage).weight(weight)

    return jax.tree_util.tree_map_with_path(sharding, declared, is_leaf=is_weight)


def init_params(config: ModelConfig, key: jax.Array, *, random_value_head: bool = False) -> Params:
    """Random float32 weights, layers as a list. Each weight's noise depends on the key and on its own path alone.

    A scalar head starts at zero, so that a critic's first values say nothing, unless it is to be random.
    """

    def initial(path: KeyPath, weight: Weight) -> jax.Array:
        if weight.initializer == "ones":
            return jnp.ones(weight.shape, weight.dtype)
        if weight.initializer == "zeros":
            return jnp.zeros(weight.shape, weight.dtype)
        own_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return (weight.stddev * jax.random.normal(own_key, weight.shape)).astype(weight.dtype)

    declared = declare(config)
    if random_value_head and "value_head" in declared:
        random_head = dataclasses.replace(declared["value_head"], initializer="normal", stddev=config.hidden_size**-0.5)
        declared["value_head"] = random_head
    return jax.tree_util.tree_map_with_path(initial, declared, is_leaf=is_weight)


def with_layers(params: Params, *, stacked: bool) -> Params:
    """The same weights with layers stacked into one dict, or as a list of dicts. Under `jit` or on abstract trees."""
    layers = params["layers"]
    if isinstance(layers, dict) == stacked:
        return params
    if stacked:
        layers = jax.tree.map(lambda *per_layer: jnp.stack(per_layer), *layers)
    else:
        num_layers = len(jax.tree.leaves(layers)[0])
        layers = [jax.tree.map(lambda w, i=i: w[i], layers) for i in range(num_layers)]
    return {**params, "layers": layers}


def use(params: Any, declared: Any, layout: Layout, dtype: jax.typing.DTypeLike) -> Any:
    """Weights made ready for computing: in the compute precision, then gathered over `fsdp` (so that less is moved).
    Ready ones stay."""

    def ready(weight: jax.Array, declared: Weight) -> jax.Array:
        cast = weight.astype(dtype)
        if layout.strategy.fsdp > 1 and cast.dtype != weight.dtype:
            cast = jax.lax.optimization_barrier(cast)  # XLA would gather first, and cast what came of it
        return layout.at_use(cast, declared)

    with jax.named_scope("weights"):
        return jax.tree.map(ready, params, declared)


def use_layer(weights: LayerWeights, config: ModelConfig, layout: Layout) -> LayerWeights:
    """The weights of one layer made ready for computing, joined where no columns are split. Ready ones stay."""
    if is_joined(weights):
        return weights
    declared: dict[str, Any] = dict(declare_layer(config))
    adapted = {name: weight for name, weight in weights.items() if isinstance(weight, Adapted)}
    for name, weight in adapted.items():
        declared[name] = declare_adapted(declared[name], weight.down.shape[-1], weight.scale)
    ready = use(weights, declared, layout, config.compute_dtype)
    return join(ready) if layout.strategy.tensor == 1 and not adapted else ready


def declare_adapted(weight: Weight, rank: int, scale: float) -> Adapted:
    """A weight with an adapter. The rank is never split; `up` starts at zero, so that at first nothing changes."""
    (size_in, size_out), (axis_in, axis_out) = weight.shape, weight.axes
    return Adapted(
        weight=weight,
        down=Weight((size_in, rank), (axis_in, None), stddev=size_in**-0.5),
        up=Weight((rank, size_out), (None, axis_out), "zeros", heads=weight.heads),
        scale=scale,
    )
