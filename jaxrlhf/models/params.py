"""The weights of a model. One declaration for each gives its shape, dtype, logical axes and how it starts.

Abstract trees, shardings and arrays all follow from `declare`. The tree is

    {"embedding": ..., "layers": [{"query": ..., ...}, ...], "final_norm": ..., "lm_head" or "value_head": ...}

where `layers` is a list with one dict per layer, or, stacked, one dict whose arrays have a leading `layers` axis.
Decoding wants the list, a scan over layers the stack; `with_layers` turns one into the other.
"""

import dataclasses
import math
import zlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.layers import Adapted, is_adapted, is_joined, join
from jaxrlhf.models.stages import stage_of_weight
from jaxrlhf.sharding.layout import Axes, Layout

Params = dict[str, Any]
LayerForm = Literal["list", "stacked", "ring"]
"""How layers lie: as a `list`, with a dict each; `stacked`, as one dict whose arrays have a leading axis; or as the
`ring` of stages reads them that generates in a pipelined layout."""


def layer_form(config: ModelConfig, *, generates: bool, is_pipelined: bool) -> LayerForm:
    """How the layers lie that a call reads."""
    if is_pipelined:
        return "ring" if generates else "list"
    return "stacked" if config.scan_layers and not generates else "list"


@dataclasses.dataclass(frozen=True)
class Weight:
    """The declaration of one weight."""

    shape: tuple[int, ...]
    axes: Axes
    """Logical axes, one a dim."""
    initializer: Literal["normal", "ones", "zeros"] = "normal"
    stddev: float = 0.0
    dtype: jax.typing.DTypeLike = jnp.float32
    """Of the master weight, which is trained; calls that do not train hold copies in the compute precision."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def declare(config: ModelConfig, *, stacked: bool = False) -> Any:
    """The tree of a model's weights, as declarations."""
    D, V = config.hidden_size, config.vocab_size
    tree: dict[str, Any] = {"embedding": Weight((V, D), ("vocab", "embed"), stddev=D**-0.5)}
    tree["layers"] = every_layer(declare_layer(config), config, stacked=stacked)
    tree["final_norm"] = Weight((D,), ("norm",), "ones")
    if config.head in ("scalar", "both"):
        tree["value_head"] = Weight((D, 1), ("embed", "value"), "zeros")
    if config.head in ("lm", "both") and not config.tie_embeddings:
        tree["lm_head"] = Weight((D, V), ("embed", "vocab"), stddev=D**-0.5)
    return tree


def every_layer(layer: Any, config: ModelConfig, *, stacked: bool) -> Any:
    """The declarations of all layers, from those of one."""
    if not stacked:
        return [layer for _ in range(config.num_layers)]
    n = config.num_layers
    return map_weights(lambda w: dataclasses.replace(w, shape=(n, *w.shape), axes=("layers", *w.axes)), layer)


def declare_layer(config: ModelConfig) -> dict[str, Weight]:
    """One layer's weights."""
    D, F, hd = config.hidden_size, config.intermediate_size, config.head_size
    H, K = config.num_heads * hd, config.num_kv_heads * hd
    into_residual = 1 / math.sqrt(2 * config.num_layers)  # keeps the residual stream's scale however deep the model
    layer = {
        "attention_norm": Weight((D,), ("norm",), "ones"),
        "query": Weight((D, H), ("embed", "heads"), stddev=D**-0.5),
        "key": Weight((D, K), ("embed", "kv_heads"), stddev=D**-0.5),
        "value": Weight((D, K), ("embed", "kv_heads"), stddev=D**-0.5),
        "output": Weight((H, D), ("heads", "embed"), stddev=H**-0.5 * into_residual),
        "mlp_norm": Weight((D,), ("norm",), "ones"),
        "gate": Weight((D, F), ("embed", "mlp"), stddev=D**-0.5),
        "up": Weight((D, F), ("embed", "mlp"), stddev=D**-0.5),
        "down": Weight((F, D), ("mlp", "embed"), stddev=F**-0.5 * into_residual),
    }
    if config.attention_bias:
        layer["query_bias"] = Weight((H,), ("heads",), "zeros")
        layer["key_bias"] = Weight((K,), ("kv_heads",), "zeros")
        layer["value_bias"] = Weight((K,), ("kv_heads",), "zeros")
    if config.qk_norm:
        layer["query_norm"] = Weight((hd,), ("norm",), "ones")
        layer["key_norm"] = Weight((hd,), ("norm",), "ones")
    return layer


def abstract_params(config: ModelConfig, dtype: jax.typing.DTypeLike | None = None, *, stacked: bool = False) -> Any:
    """Shapes and dtypes of the weights: of the master weights, or of copies in another dtype."""
    return abstract_of(declare(config, stacked=stacked), dtype)


def abstract_of(declared: Any, dtype: jax.typing.DTypeLike | None = None) -> Any:
    """Shapes and dtypes of declared weights."""
    return map_weights(lambda w: jax.ShapeDtypeStruct(w.shape, dtype or w.dtype), declared)


def param_shardings(config: ModelConfig, layout: Layout, *, stacked: bool = False) -> Any:
    """How the weights rest in a layout, as a tree of `NamedSharding`."""
    return shardings_of(declare(config, stacked=stacked), layout)


def shardings_of(declared: Any, layout: Layout) -> Any:
    """How declared weights rest in a layout, as a tree of `NamedSharding`. In a pipelined one layers are a list."""

    def sharding(path: Any, weight: Weight) -> NamedSharding:
        if not layout.is_pipelined:
            return layout.weight(weight.axes)
        stage = stage_of_weight(path, len(declared["layers"]), layout)
        assert stage is not None, path
        return layout.stage(stage).weight(weight.axes)

    return jax.tree_util.tree_map_with_path(sharding, declared, is_leaf=_is_weight)


def init_params(config: ModelConfig, key: jax.Array, *, random_value_head: bool = False) -> Params:
    """Random float32 weights, layers as a list. Each weight's noise depends on the key and on its own path alone.

    A scalar head starts at zero, so that a critic's first values say nothing, unless it is to be random.
    """

    def initial(path: Any, weight: Weight) -> jax.Array:
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
    return jax.tree_util.tree_map_with_path(initial, declared, is_leaf=_is_weight)


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


def num_parameters(config: ModelConfig, *, output_embedding: bool = True) -> int:
    """How many numbers the weights hold; without the output embedding, all but the language-model or scalar head."""
    tree = declare(config)
    if not output_embedding:
        tree = {name: w for name, w in tree.items() if name not in ("lm_head", "value_head")}
    return sum(w.size for w in jax.tree.leaves(tree, is_leaf=_is_weight))


def use(params: Any, declared: Any, layout: Layout, dtype: jax.typing.DTypeLike) -> Any:
    """Weights made ready for computing: in the compute precision, then gathered over `fsdp` (so that less is moved)."""

    def ready(weight: Any, declared: Weight) -> Any:
        cast = weight.astype(dtype)
        if layout.strategy.fsdp > 1 and cast.dtype != weight.dtype:
            cast = jax.lax.optimization_barrier(cast)  # XLA would gather first, and cast what came of it
        return layout.at_use(cast, declared.axes)

    return jax.tree.map(ready, params, declared)


def use_layer(weights: Any, config: ModelConfig, layout: Layout) -> Any:
    """The weights of one layer made ready for computing, joined where no columns are split. Ready ones stay."""
    if is_joined(weights):
        return weights
    declared: dict[str, Any] = declare_layer(config)
    for name, weight in weights.items():
        if isinstance(weight, Adapted):
            declared[name] = declare_adapted(declared[name], weight.down.shape[-1], weight.scale)
    ready = use(weights, declared, layout, config.compute_dtype)
    return join(ready) if layout.strategy.tensor == 1 and not is_adapted(ready) else ready


def declare_adapted(weight: Weight, rank: int, scale: float) -> Adapted:
    """A weight with an adapter. The rank is never split; `up` starts at zero, so that at first nothing changes."""
    (size_in, size_out), (axis_in, axis_out) = weight.shape, weight.axes
    return Adapted(
        weight=weight,
        down=Weight((size_in, rank), (axis_in, None), stddev=size_in**-0.5),
        up=Weight((rank, size_out), (None, axis_out), "zeros"),
        scale=scale,
    )


def _is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


def map_weights(function: Any, tree: Any) -> Any:
    """A function of declarations over a tree of them."""
    return jax.tree.map(function, tree, is_leaf=_is_weight)
