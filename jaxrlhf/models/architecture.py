"""The architecture of the models, declared once: their weights, how these split, what a layer costs, and the names in
checkpoints.

A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, gated MLP. Everything that must know
which weights a layer has (initial values, shardings, stages, adapters, checkpoints, forecasts of time and memory)
derives it from here. A variant is a field of `ModelConfig`; its weights, names and costs, declared here; a branch where
the mathematics differs, in `layers`, `attention` or `transformer`; and its family in `families`.

Letters: D hidden size, F MLP size, h head size, H query heads x h, K key-value heads x h, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxrlhf.models.config import ModelConfig, NormPlacement
from jaxrlhf.sharding.axes import TENSOR, WEIGHTS_AT_USE
from jaxrlhf.sharding.layout import Axes
from jaxrlhf.sharding.strategy import Remat

Declared = dict[str, Any]
"""A tree of `Weight`, in the form of the weights that it declares."""

# -- weights -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Weight:
    """The declaration of one weight."""

    shape: tuple[int, ...]
    axes: Axes
    """Logical axes, one a dim."""
    initializer: Literal["normal", "ones", "zeros"] = "normal"
    stddev: float = 0.0
    dtype: jax.typing.DTypeLike = jnp.float32
    """dtype of the master weight, which is trained; calls that do not train hold copies in the compute precision."""
    heads: int = 0
    """Key-value heads along the axis `kv_heads`, if it has one."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def units(self) -> tuple[int, ...]:
        """The shape, with heads in place of their columns where these may only be split in whole heads."""
        sizes = zip(self.shape, self.axes, strict=True)
        return tuple(self.heads if axis == "kv_heads" else size for size, axis in sizes)

    @property
    def splits_input(self) -> bool:
        """True if `tensor` splits a matrix along what it multiplies, so that its product is a sum over devices."""
        return self.axes[0] is not None and WEIGHTS_AT_USE[self.axes[0]] == TENSOR


def declare(config: ModelConfig, *, stacked: bool = False) -> Declared:
    """The tree of a model's weights."""
    D, V = config.hidden_size, config.vocab_size
    tree: Declared = {"embedding": Weight((V, D), ("vocab", "embed"), stddev=D**-0.5)}
    tree["layers"] = every_layer(declare_layer(config), config, stacked=stacked)
    tree["final_norm"] = _norm(D, "norm", config)
    if config.head in ("scalar", "both"):
        tree["value_head"] = Weight((D, 1), ("embed", "value"), "zeros")
    if config.head in ("lm", "both") and not config.tie_embeddings:
        tree["lm_head"] = Weight((D, V), ("embed", "vocab"), stddev=D**-0.5)
    return tree


FIRST_STAGE, LAYERS, LAST_STAGE = ("embedding",), "layers", ("final_norm", "lm_head", "value_head")
"""The names of the tree, by where in a pipeline they are used. A tied embedding is used on the last stage too."""


def declare_layer(config: ModelConfig) -> dict[str, Weight]:
    """One layer's weights."""
    (D, F, H, K), heads = _sizes(config), config.num_kv_heads
    into_residual = 1 / math.sqrt(2 * config.num_layers)  # keeps the residual stream's scale however deep the model
    layer = {
        "query": Weight((D, H), ("embed", "heads"), stddev=D**-0.5),
        "key": Weight((D, K), ("embed", "kv_heads"), stddev=D**-0.5, heads=heads),
        "value": Weight((D, K), ("embed", "kv_heads"), stddev=D**-0.5, heads=heads),
        "output": Weight((H, D), ("heads", "embed"), stddev=H**-0.5 * into_residual),
        "gate": Weight((D, F), ("embed", "mlp"), stddev=D**-0.5),
        "up": Weight((D, F), ("embed", "mlp"), stddev=D**-0.5),
        "down": Weight((F, D), ("mlp", "embed"), stddev=F**-0.5 * into_residual),
    }
    layer |= {name: _norm(D, "norm", config) for name in BLOCK_NORMS[config.norms]}
    if config.attention_bias:
        layer["query_bias"] = Weight((H,), ("heads",), "zeros")
        layer["key_bias"] = Weight((K,), ("kv_heads",), "zeros", heads=heads)
        layer["value_bias"] = Weight((K,), ("kv_heads",), "zeros", heads=heads)
    if config.qk_norm and config.qk_norm_over == "head":
        layer["query_norm"] = layer["key_norm"] = _norm(config.head_size, "norm", config)
    elif config.qk_norm:
        layer["query_norm"], layer["key_norm"] = _norm(H, "heads", config), _norm(K, "kv_heads", config)
    return layer


def _norm(size: int, axis: str, config: ModelConfig) -> Weight:
    heads = config.num_kv_heads if axis == "kv_heads" else 0
    return Weight((size,), (axis,), "zeros" if config.norm_plus_one else "ones", heads=heads)


_BEFORE, _AFTER = ("attention_norm", "mlp_norm"), ("attention_output_norm", "mlp_output_norm")
BLOCK_NORMS: Mapping[NormPlacement, tuple[str, ...]] = {
    "before": _BEFORE, "after": _AFTER, "both": (*_BEFORE, *_AFTER),
}  # fmt: skip
"""The norms of a layer, beside those of queries and keys."""


Matrix = Literal["query", "key", "value", "output", "gate", "up", "down"]
"""The matrices of a layer, all of which may have adapters."""
MATRICES: tuple[Matrix, ...] = get_args(Matrix)
JOINED: dict[str, tuple[Matrix, ...]] = {"query_key_value": ("query", "key", "value"), "gate_up": ("gate", "up")}
"""Matrices with the same input, which are one product where no columns are split; biases follow them."""


def every_layer(layer: Any, config: ModelConfig, *, stacked: bool) -> Any:
    """The declarations of all layers, from those of one: a list, or, stacked, with a leading axis."""
    if not stacked:
        return [layer for _ in range(config.num_layers)]
    return with_leading_axis(layer, config.num_layers, "layers")


def with_leading_axis(tree: Any, size: int, axis: str) -> Any:
    """Declarations of arrays with one more axis in front."""
    return map_weights(lambda w: dataclasses.replace(w, shape=(size, *w.shape), axes=(axis, *w.axes)), tree)


def map_weights(function: Callable[[Weight], Any], tree: Any) -> Any:
    """A function of declarations over a tree of them."""
    return jax.tree.map(function, tree, is_leaf=is_weight)


def is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


@functools.lru_cache(maxsize=1024)
def num_parameters(config: ModelConfig, *, output_embedding: bool = True) -> int:
    """The number of parameters; without the output embedding, of all but the language-model and the scalar head."""
    tree = declare(config)
    if not output_embedding:
        tree = {name: w for name, w in tree.items() if name not in ("lm_head", "value_head")}
    return sum(w.size for w in jax.tree.leaves(tree, is_leaf=is_weight))


# -- names -------------------------------------------------------------------------------------------------------------

CHECKPOINT_NAMES: dict[str, str] = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "value_head": "score",
    # in model.layers.<number>, beside the norms of the blocks
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""The modules of Hugging Face's models. A bias has the module of its weight."""


_NORM_NAMES: Mapping[NormPlacement, Mapping[str, str]] = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}
"""Those of the norms of the blocks."""


def checkpoint_name(name: str, layer: int | None = None, *, norms: NormPlacement = "before") -> str:
    """A weight's name in a checkpoint. `norms`: of the model.

    >>> checkpoint_name("key_bias", 3), checkpoint_name("mlp_norm", 3)
    ('model.layers.3.self_attn.k_proj.bias', 'model.layers.3.post_attention_layernorm.weight')
    """
    module = _NORM_NAMES[norms].get(name) or CHECKPOINT_NAMES[name.removesuffix("_bias")]
    kind = "bias" if name.endswith("_bias") else "weight"
    return f"{module}.{kind}" if layer is None else f"model.layers.{layer}.{module}.{kind}"


# -- costs -------------------------------------------------------------------------------------------------------------


class Width(NamedTuple):
    """A number of activations per token: `whole` on every device, and `split` over `tensor`."""

    whole: float
    split: float

    def on_device(self, tensor: int) -> float:
        return self.whole + self.split / tensor


@functools.lru_cache(maxsize=256)
def matrices(config: ModelConfig) -> Mapping[Matrix, Weight]:
    """The declarations of a layer's matrices."""
    layer = declare_layer(config)
    return MappingProxyType({name: layer[name] for name in MATRICES})


@functools.lru_cache(maxsize=1024)
def matrix_numbers(config: ModelConfig, names: tuple[Matrix, ...] = MATRICES) -> int:
    """Parameters of some of a layer's matrices: half the operations of their products with one token."""
    return sum(matrices(config)[name].size for name in names)


def head_numbers(config: ModelConfig) -> int:
    """Parameters of the output heads, tied or not: half the operations of their products with one token."""
    return config.hidden_size * {"lm": config.vocab_size, "scalar": 1, "both": config.vocab_size + 1}[config.head]


@functools.lru_cache(maxsize=1024)
def matrix_widths(config: ModelConfig, names: tuple[Matrix, ...] = MATRICES) -> tuple[Width, ...]:
    """Inputs and outputs of some of a layer's matrices: one of the two is whole on every device, the other is split."""
    weights = [matrices(config)[name] for name in names]
    return tuple(Width(*(weight.shape[::-1] if weight.splits_input else weight.shape)) for weight in weights)


def pair_flops(config: ModelConfig) -> int:
    """Operations for a query and a key that it sees, in all heads: the score, and the weighted value."""
    return 2 * 2 * config.num_heads * config.head_size


def seen_pairs(num_queries: int, num_keys: int, window: int | None = None) -> int:
    """Pairs of a query, in the last columns, and a key that it sees.

    >>> seen_pairs(2, 4), seen_pairs(2, 4, window=3)
    (7, 6)
    """
    most = num_keys if window is None else min(window, num_keys)

    def of_first(columns: int) -> int:
        rising = min(columns, most)
        return rising * (rising + 1) // 2 + (columns - rising) * most

    return of_first(num_keys) - of_first(num_keys - num_queries)


def forward_flops(config: ModelConfig, *, rows: int, columns: int, scored: int) -> int:
    """Operations of the matrix products of a forward pass over full rows, whose last `scored` columns get an output.

    One multiplication and one addition are two operations; the half of attention that is hidden is not counted, nor
    what is outside of a window. The last layer needs keys and values of all columns, and the rest of itself for the
    scored ones only.
    """
    *others, last = config.windows
    pairs = sum(seen_pairs(columns, columns, window) for window in others) + seen_pairs(scored, columns, last)
    products = product_flops(config, columns=columns, last_layer=scored, scored=scored)
    return rows * (products + pairs * pair_flops(config))


def product_flops(config: ModelConfig, *, columns: int, last_layer: int, scored: int) -> int:
    """Operations of a row's products with weights in a forward pass, whose last layer works on its last `last_layer`
    columns. As many for the gradient of all these weights, and for that of what they multiply."""
    everywhere = matrix_numbers(config, ("key", "value"))
    others = matrix_numbers(config) - everywhere
    layers = config.num_layers * columns * everywhere + ((config.num_layers - 1) * columns + last_layer) * others
    return 2 * (layers + scored * head_numbers(config))


def cached_numbers(config: ModelConfig) -> int:
    """Keys and values of one token in one layer."""
    return 2 * config.num_kv_heads * config.head_size


@functools.lru_cache(maxsize=256)
def computed(config: ModelConfig, tensor: int) -> ModelConfig:
    """The model as devices along `tensor` compute it together: key-value heads repeated, and the vocabulary padded, to
    what it divides. What a device computes, reads and caches follows from it; what rests, from the model itself."""
    heads, vocab = math.lcm(config.num_kv_heads, tensor), math.ceil(config.vocab_size / tensor) * tensor
    if (heads, vocab) == (config.num_kv_heads, config.vocab_size):
        return config
    return dataclasses.replace(config, num_kv_heads=heads, vocab_size=vocab)


def read_and_written(config: ModelConfig) -> Width:
    """Activations per token that a layer's forward pass reads and writes: the norms of the blocks and two sums over the
    hidden state, inputs and outputs of products, rotations, attention and gate."""
    D, F, H, K = _sizes(config)
    return Width((8 + 2 * len(BLOCK_NORMS[config.norms])) * D, 3 * H + 4 * K + 5 * F)


def tensor_sums(config: ModelConfig) -> tuple[int, ...]:
    """Bytes per token of the sums over `tensor` in a layer's forward pass: of the products of the two blocks, and of
    the squares in norms that are over all heads."""
    squares = 4 * config.qk_norm * (config.qk_norm_over == "projection")
    products = config.hidden_size * config.itemsize
    return (products, products, squares, squares) if squares else (products, products)


def residuals(config: ModelConfig, remat: Remat) -> Width:
    """Residuals per token of a layer: its input; and, unless it is rematerialized, its norms' outputs, what is
    normalized before it is added, queries, keys, values, attention, and the two factors of the MLP."""
    D, F, H, K = _sizes(config)
    if remat == "layer":
        return Width(D, 0)
    added = sum(name in _AFTER for name in BLOCK_NORMS[config.norms])
    return Width((2 + added) * D, (1 if remat == "dots" else 2) * H + 2 * K + 2 * F)


def live_activations(config: ModelConfig) -> Width:
    """Activations per token that are live while a layer is computed: the residual stream before and after, a norm's
    output, and the MLP's two products with half of their gated one, or, where they are more, those of attention."""
    D, F, H, K = _sizes(config)
    return Width(3 * D, max(2.5 * F, 2 * H + 2 * K))


def _sizes(config: ModelConfig) -> tuple[int, int, int, int]:
    """D, F, H, K."""
    h = config.head_size
    return config.hidden_size, config.intermediate_size, config.num_heads * h, config.num_kv_heads * h
