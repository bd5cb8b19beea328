"""The transformer: whole sequences at once for inference and training, one token at a time for decoding.

Letters: B sequences, T columns, S the last columns of T whose outputs are wanted, D hidden size.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.models import layers
from jaxrlhf.models.architecture import computed, declare
from jaxrlhf.models.attention import (
    Window,
    attention_implementation,
    chunk_attention,
    column_attention,
    full_attention,
)
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.kv_cache import KVCache
from jaxrlhf.models.layers import LayerWeights
from jaxrlhf.models.params import Params, use, use_layer
from jaxrlhf.models.spans import Span, layer_spans, rotations, scanned_spans, span_of_all
from jaxrlhf.sharding.layout import Axes, Layout
from jaxrlhf.sharding.stage_layers import layers_of_stages
from jaxrlhf.sharding.strategy import Remat

KeysValues = list[tuple[jax.Array, jax.Array]]
_KEYS = ("batch", "length", "kv_heads", "head_dim")

SavedByLayer = Remat | Literal["dots_and_attention"]
"""The residuals of each layer. The last is for a backward pass that comes much later: everything but what is cheap to
compute anew, or follows from the weights alone."""
Wanted = int | Int[Array, " B"]
"""The columns that get an output: this one and all later ones, or one column of each sequence."""


def hidden_states(
    params: Params,
    given: Int[Array, "B T"] | Float[Array, "B T D"],
    mask_BT: Bool[Array, "B T"],
    config: ModelConfig,
    layout: Layout,
    *,
    wanted: Wanted = 0,
    remat: SavedByLayer = "none",
    stage: int = 0,
    num_stages: int = 1,
) -> Float[Array, "B S D"]:
    """The last layer's outputs, normalized, for the columns that are wanted; or those of a pipeline's stage, of all
    columns and as they are unless it is the last.

    Positions count real tokens, so padding on either side changes nothing. Where layers are not scanned, the last one
    computes queries, attention output and MLP only for the columns that are wanted.

    Args:
        params: Of a stage, as `models.stage_weights.pick` gives them.
        given: Tokens, or the outputs of the stage before.
        layout: Of the stage's devices.
    """
    weights, spans, last = params["layers"], None, stage == num_stages - 1
    if num_stages > 1:
        numbers = layers_of_stages(config.num_layers, num_stages)[stage]
        weights, spans = [weights[i] for i in numbers], [layer_spans(config)[i] for i in numbers]
    x_BTD: jax.Array = embed(params, given, config, layout) if stage == 0 else given
    x_BSD, _ = run_layers(
        weights, x_BTD, mask_BT, config, layout, spans=spans, wanted=wanted if last else 0, remat=remat
    )
    return normalize(params, x_BSD, config, layout) if last else x_BSD


@jax.named_scope("embed")
def embed(params: Params, tokens: Int[Array, "*B"], config: ModelConfig, layout: Layout) -> Float[Array, "*B D"]:
    """The input of the first layer: the embeddings of whole sequences, or of one more token of each."""
    table_VD = use(params["embedding"], declare(config)["embedding"], layout, config.compute_dtype)
    rows = table_VD[tokens]
    if config.scale_embeddings:
        rows = rows * jnp.asarray(math.sqrt(config.hidden_size), rows.dtype)
    return layout.activation(rows, ("batch", *["length"] * (tokens.ndim - 1), "embed"))


def normalize(params: Params, x_BSD: Float[Array, "*B D"], config: ModelConfig, layout: Layout) -> Float[Array, "*B D"]:
    """The input of heads: the last layer's outputs, normalized."""
    norm_D = use(params["final_norm"], declare(config)["final_norm"], layout, config.compute_dtype)
    return layers.normed_by(norm_D, x_BSD, config)


def run_layers(
    weights: list[LayerWeights] | LayerWeights,
    x_BTD: Float[Array, "B T D"],
    mask_BT: Bool[Array, "B T"],
    config: ModelConfig,
    layout: Layout,
    *,
    spans: Sequence[Span] | None = None,
    wanted: Wanted = 0,
    remat: SavedByLayer = "none",
) -> tuple[Float[Array, "B S D"], KeysValues]:
    """Some consecutive layers, all or those of one stage: outputs for the columns that are wanted, and every layer's
    keys and values [B, T, K, h].

    Args:
        weights: A list with one dict a layer, or, stacked, one dict whose arrays have a leading axis.
        spans: Of these layers; None if they are all of the model.
    """
    rotation_of = rotations(jnp.maximum(jnp.cumsum(mask_BT, axis=1) - 1, 0), config)

    def layer(
        weights: LayerWeights, x: jax.Array, span: Span, wanted: Wanted
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return _layer(use_layer(weights, config, layout), x, rotation_of(span), mask_BT, config, layout, wanted, span)

    if isinstance(weights, dict):
        span, every = span_of_all(config), functools.partial(layer, wanted=0)
        if span is None:
            every = _rematerialized(every, remat)
            x_BTD, (k, v) = jax.lax.scan(
                lambda x, each: every(each[0], x, span=each[1]), x_BTD, (weights, scanned_spans(config))
            )
        else:
            every = _rematerialized(functools.partial(every, span=span), remat)
            x_BTD, (k, v) = jax.lax.scan(lambda x, weights: every(weights, x), x_BTD, weights)
        return _select(x_BTD, wanted), list(zip(k, v, strict=True))
    keys_values = []
    for i, (each, span) in enumerate(zip(weights, layer_spans(config) if spans is None else spans, strict=True)):
        columns = wanted if i == len(weights) - 1 else 0
        x_BTD, kv = _rematerialized(functools.partial(layer, span=span, wanted=columns), remat)(each, x_BTD)
        keys_values.append(kv)
    return x_BTD, keys_values


def prefill_in_chunks(
    params: Params,
    tokens_BP: Int[Array, "B P"],
    length_B: Int[Array, " B"],
    size: int,
    config: ModelConfig,
    layout: Layout,
) -> KeysValues:
    """Every layer's keys and values [B, P', K, h] of prompts that are padded on the right; P' is P, rounded up to a
    multiple of `size`, so many of whose columns go through the layers at a time. Chunks beyond the longest prompt are
    left out, and are zeros. `params`: as `generate.prepare` gives them."""
    B, P = tokens_BP.shape
    columns = math.ceil(P / size) * size
    tokens_BP = jnp.pad(tokens_BP, ((0, 0), (0, columns - P)))
    empty = empty_keys_values((B,), columns, len(params["layers"]), config, layout)

    def chunk(number: jax.Array, keys_values: KeysValues) -> KeysValues:
        first = number * size
        x_BCD = embed(params, jax.lax.dynamic_slice_in_dim(tokens_BP, first, size, axis=1), config, layout)
        return chunk_layers(params["layers"], x_BCD, keys_values, first, config, layout)[1]

    num_chunks = (length_B.max() + size - 1) // size
    return jax.lax.fori_loop(0, num_chunks, chunk, empty)


def empty_keys_values(
    rows: tuple[int, ...], columns: int, num_layers: int, config: ModelConfig, layout: Layout
) -> KeysValues:
    """Zeros for the keys and values of some layers, [*rows, columns, K, h]. Rows are the last of their dims."""
    axes = (*[None] * (len(rows) - 1), *_KEYS)
    num_heads = computed(config, layout.strategy.tensor).num_kv_heads
    zeros = jnp.zeros((*rows, columns, num_heads, config.head_size), config.compute_dtype)
    zeros = layout.activation(zeros, axes)
    return [(zeros, zeros) for _ in range(num_layers)]


def chunk_layers(
    every_layer: list[LayerWeights],
    x_BCD: Float[Array, "B C D"],
    keys_values: KeysValues,
    first: Int[Array, ""],
    config: ModelConfig,
    layout: Layout,
    *,
    spans: Sequence[Span] | None = None,
) -> tuple[Float[Array, "B C D"], KeysValues]:
    """Some consecutive layers over C columns of prompts, from column `first` on; and their keys and values [B, P, K, h]
    with those of these columns, which see the earlier ones. `every_layer`: as `generate.prepare` gives them. `spans`:
    as in `run_layers`."""
    attend, done = _by_implementation(chunk_attention, (), config, layout), []

    def put(whole: jax.Array, new: jax.Array) -> jax.Array:
        return layout.activation(jax.lax.dynamic_update_slice(whole, new.astype(whole.dtype), (0, first, 0, 0)), _KEYS)

    rotation_of = rotations(jnp.broadcast_to(first + jnp.arange(x_BCD.shape[1]), x_BCD.shape[:2]), config)
    spans = layer_spans(config) if spans is None else spans
    for weights, span, (k_BPKh, v_BPKh) in zip(every_layer, spans, keys_values, strict=True):
        with jax.named_scope("attention"):
            normed_BCD = layers.normed(weights, "attention_norm", x_BCD, config)
            q_BCHh, k_BCKh, v_BCKh = layers.queries_keys_values(weights, normed_BCD, rotation_of(span), config)
            q_BCHh = layout.activation(q_BCHh, ("batch", "length", "heads", "head_dim"))
            done.append((put(k_BPKh, k_BCKh), put(v_BPKh, v_BCKh)))
            attended_BCHh = attend(q_BCHh, *done[-1], first, span.window)
            x_BCD = layers.add_attention(weights, x_BCD, attended_BCHh, config)
        x_BCD = layout.activation(layers.add_mlp(weights, x_BCD, config), ("batch", "length", "embed"))
    return x_BCD, done


def decode_step(
    params: Params, token_B: Int[Array, " B"], cache: KVCache, config: ModelConfig, layout: Layout
) -> tuple[Float[Array, "B D"], KVCache]:
    """Feed one more token of each sequence. `params` are ready for use, with layers as a list."""
    x_BD = embed(params, token_B, config, layout)
    x_BD, cache = decode_layers(params["layers"], x_BD, cache.advance(), config, layout)
    return normalize(params, x_BD, config, layout), cache


def decode_layers(
    every_layer: list[LayerWeights],
    x_BD: Float[Array, "B D"],
    cache: KVCache,
    config: ModelConfig,
    layout: Layout,
    *,
    spans: Sequence[Span] | None = None,
    only_if: Bool[Array, ""] | None = None,
) -> tuple[Float[Array, "B D"], KVCache]:
    """Some consecutive layers over one more token of each sequence. The cache is theirs, and has made room for it.

    Args:
        spans: As in `run_layers`.
        only_if: Where it is False nothing is computed, `x_BD` stays as it is, and zeros enter the cache. None means
            True. No branch of the program gives a cache, of which it would be a copy.
    """
    over, rotation_of = cache.attention(), rotations(cache.positions(), config)

    def project(weights: LayerWeights, x_BD: jax.Array, *, span: Span) -> tuple[jax.Array, ...]:
        normed_BD = layers.normed(weights, "attention_norm", x_BD, config)
        return layers.queries_keys_values(weights, normed_BD, rotation_of(span), config)

    def attend(weights: LayerWeights, x_BD: jax.Array, q_BHh: jax.Array, layer: Any, *, span: Span) -> jax.Array:
        with jax.named_scope("attention"):
            x_BD = layers.add_attention(weights, x_BD, over(q_BHh, layer, span.window), config)
        return layout.activation(layers.add_mlp(weights, x_BD, config), ("batch", "embed"))

    def nothing(_: LayerWeights, x_BD: jax.Array) -> tuple[jax.Array, ...]:
        num_kv_heads, h = computed(config, layout.strategy.tensor).num_kv_heads, config.head_size
        numbers = config.num_heads, num_kv_heads, num_kv_heads
        return tuple(jnp.zeros((x_BD.shape[0], n, h), x_BD.dtype) for n in numbers)

    def unchanged(_: LayerWeights, x_BD: jax.Array, *__: Any) -> jax.Array:
        return x_BD

    spans = layer_spans(config) if spans is None else spans
    for i, (weights, span) in enumerate(zip(every_layer, spans, strict=True)):
        with jax.named_scope("attention"):
            q_BHh, k_BKh, v_BKh = _if(only_if, functools.partial(project, span=span), nothing, weights, x_BD)
            cache = cache.write(i, k_BKh, v_BKh, layout)
        x_BD = _if(only_if, functools.partial(attend, span=span), unchanged, weights, x_BD, q_BHh, cache.layer(i))
    return x_BD, cache


def _if(
    condition: jax.Array | None, function: Callable[..., Any], otherwise: Callable[..., Any], *arguments: Any
) -> Any:
    """One function of some arguments, or the other. A condition of None means the first."""
    return function(*arguments) if condition is None else jax.lax.cond(condition, function, otherwise, *arguments)


def _layer(
    weights: LayerWeights,
    x_BTD: jax.Array,
    rotation: layers.Rotation,
    mask_BT: jax.Array,
    config: ModelConfig,
    layout: Layout,
    wanted: Wanted,
    span: Span,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer, its outputs for the columns that are wanted; keys and values for all."""
    everywhere = isinstance(wanted, int) and wanted == 0
    with jax.named_scope("attention"):
        normed_BTD = layers.normed(weights, "attention_norm", x_BTD, config)
        if everywhere:
            q_BSHh, k_BTKh, v_BTKh = layers.queries_keys_values(weights, normed_BTD, rotation, config)
        else:
            k_BTKh, v_BTKh = layers.keys_values(weights, normed_BTD, rotation, config)
            rotation_S = (_select(rotation[0], wanted), _select(rotation[1], wanted))
            q_BSHh = layers.queries(weights, _select(normed_BTD, wanted), rotation_S, config)
        q_BSHh = layout.activation(q_BSHh, ("batch", "length", "heads", "head_dim"))
        k_BTKh, v_BTKh = (layout.activation(x, ("batch", "length", "kv_heads", "head_dim")) for x in (k_BTKh, v_BTKh))
        if isinstance(wanted, int):
            attend = _by_implementation(full_attention, ("batch", "length"), config, layout)
            attended_BSHh = attend(q_BSHh, k_BTKh, v_BTKh, mask_BT, span.window)
        else:
            attended_BSHh = column_attention(q_BSHh[:, 0], k_BTKh, v_BTKh, mask_BT, wanted, span.window)[:, None]
        attended_BSHh = checkpoint_name(attended_BSHh, "attended")
        x_BSD = layers.add_attention(weights, _select(x_BTD, wanted), attended_BSHh, config)
        x_BSD = layout.activation(x_BSD, ("batch", "length", "embed"))
    return layout.activation(layers.add_mlp(weights, x_BSD, config), ("batch", "length", "embed")), (k_BTKh, v_BTKh)


def _by_implementation(
    attention: Callable[..., jax.Array], more: Axes, config: ModelConfig, layout: Layout
) -> Callable[..., jax.Array]:
    """Attention of queries, keys, values, one more array, whose axes are given, and a window, as a layout's devices
    compute it."""
    implementation = attention_implementation(config, layout)
    attend = functools.partial(attention, implementation=implementation)
    if implementation != "cudnn":
        return attend
    heads, kv_heads = (("batch", "length", name, "head_dim") for name in ("heads", "kv_heads"))

    def on_each_device(q: jax.Array, k: jax.Array, v: jax.Array, x: jax.Array, window: Window) -> jax.Array:
        if isinstance(window, jax.Array):
            return layout.on_each_device(attend, (heads, kv_heads, kv_heads, more, ()), heads)(q, k, v, x, window)
        own = functools.partial(attend, window=window)
        return layout.on_each_device(own, (heads, kv_heads, kv_heads, more), heads)(q, k, v, x)

    return on_each_device


def _select(x_BTD: jax.Array, wanted: Wanted) -> jax.Array:
    """The columns that are wanted."""
    if isinstance(wanted, int):
        return x_BTD[:, wanted:]
    return jnp.take_along_axis(x_BTD, wanted[:, None, None], axis=1)


def _rematerialized(layer: Callable[..., Any], remat: SavedByLayer) -> Callable[..., Any]:
    if remat == "none":
        return layer
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    attended = jax.checkpoint_policies.save_only_these_names("attended")
    policies = {
        "dots": dots,
        "dots_and_attention": jax.checkpoint_policies.save_from_both_policies(dots, attended),
        "layer": jax.checkpoint_policies.nothing_saveable,
    }
    return jax.checkpoint(layer, policy=policies[remat])
