"""The transformer: whole sequences at once for inference and training, one token at a time for decoding.

Letters: B sequences, T columns, S the last columns of T whose outputs are wanted, D hidden size.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.models import layers
from jaxrlhf.models.attention import attention_implementation, cached_attention, column_attention, full_attention
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.kv_cache import KVCache
from jaxrlhf.models.params import Params, declare, use, use_layer
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Remat

KeysValues = list[tuple[jax.Array, jax.Array]]

Kept = Remat | Literal["dots_and_attention"]
"""What is kept of each layer for a backward pass; the last is for one that comes much later: everything but what is
cheap to compute anew, or follows from the weights alone."""
Wanted = int | Int[Array, " B"]
"""Which columns get an output: this one and all later ones, or one column of each sequence."""


def hidden_states(
    params: Params,
    tokens_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    config: ModelConfig,
    layout: Layout,
    *,
    wanted: Wanted = 0,
    remat: Remat = "none",
) -> Float[Array, "B S D"]:
    """The last layer's outputs, normalized, for the columns that are wanted.

    Positions count real tokens, so padding on either side changes nothing. Where layers are not scanned, the last one
    computes queries, attention output and MLP only for the columns that are wanted.
    """
    x_BTD = embed(params, tokens_BT, config, layout)
    x_BSD, _ = run_layers(params["layers"], x_BTD, mask_BT, config, layout, wanted=wanted, remat=remat)
    return normalize(params, x_BSD, config, layout)


def prefill(
    params: Params, tokens_BP: Int[Array, "B P"], mask_BP: Bool[Array, "B P"], config: ModelConfig, layout: Layout
) -> tuple[Float[Array, "B D"], KeysValues]:
    """The hidden state of each prompt's last column, and every layer's keys and values [B, P, K, h]."""
    x_BPD = embed(params, tokens_BP, config, layout)
    last = tokens_BP.shape[1] - 1
    x_B1D, keys_values = run_layers(params["layers"], x_BPD, mask_BP, config, layout, wanted=last)
    return normalize(params, x_B1D, config, layout)[:, 0], keys_values


def embed(params: Params, tokens_BT: Int[Array, "B T"], config: ModelConfig, layout: Layout) -> Float[Array, "B T D"]:
    """The embeddings of tokens: what the first layer gets."""
    declared = declare(config)["embedding"]
    x_BTD = use(params["embedding"], declared, layout, config.compute_dtype)[tokens_BT]
    return layout.activation(x_BTD, ("batch", "length", "embed"))


def normalize(params: Params, x_BSD: Float[Array, "B S D"], config: ModelConfig, layout: Layout) -> jax.Array:
    """What heads get: the last layer's outputs, normalized."""
    norm = use(params["final_norm"], declare(config)["final_norm"], layout, config.compute_dtype)
    return layers.rms_norm(x_BSD, norm, config.norm_eps)


def run_layers(
    weights: Any,
    x_BTD: Float[Array, "B T D"],
    mask_BT: Bool[Array, "B T"],
    config: ModelConfig,
    layout: Layout,
    *,
    wanted: Wanted = 0,
    remat: Kept = "none",
) -> tuple[Float[Array, "B S D"], KeysValues]:
    """Some consecutive layers, all or those of one stage: outputs for the columns that are wanted, and every layer's
    keys and values [B, T, K, h].

    Args:
        weights: A list with one dict a layer, or, stacked, one dict whose arrays have a leading axis.
    """
    rotation = layers.rotary(jnp.maximum(jnp.cumsum(mask_BT, axis=1) - 1, 0), config)

    def layer(weights: Any, x: jax.Array, wanted: Wanted) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return _layer(use_layer(weights, config, layout), x, rotation, mask_BT, config, layout, wanted)

    if isinstance(weights, dict):
        every = _rematerialized(lambda weights, x: layer(weights, x, 0), remat)
        x_BTD, (k, v) = jax.lax.scan(lambda x, weights: every(weights, x), x_BTD, weights)
        return _select(x_BTD, wanted), list(zip(k, v, strict=True))
    keys_values = []
    for i, each in enumerate(weights):
        columns = wanted if i == len(weights) - 1 else 0
        x_BTD, kv = _rematerialized(functools.partial(layer, wanted=columns), remat)(each, x_BTD)
        keys_values.append(kv)
    return x_BTD, keys_values


def decode_step(
    params: Params, token_B: Int[Array, " B"], cache: KVCache, config: ModelConfig, layout: Layout
) -> tuple[Float[Array, "B D"], KVCache]:
    """Feed one more token of each sequence. `params` are ready for use, with layers as a list."""
    x_BD = layout.activation(params["embedding"][token_B], ("batch", "embed"))
    x_BD, cache = decode_layers(params["layers"], x_BD, cache.advance(), config, layout)
    return layers.rms_norm(x_BD, params["final_norm"], config.norm_eps), cache


def decode_layers(
    every_layer: list[Any], x_BD: Float[Array, "B D"], cache: KVCache, config: ModelConfig, layout: Layout
) -> tuple[Float[Array, "B D"], KVCache]:
    """Some consecutive layers over one more token of each sequence. The cache is theirs, and has made room for it."""
    occupied_BT = cache.occupied()
    rotation = layers.rotary(cache.length - 1, config)
    for i, weights in enumerate(every_layer):
        normed = layers.rms_norm(x_BD, weights["attention_norm"], config.norm_eps)
        q_BHh, k_BKh, v_BKh = layers.queries_keys_values(weights, normed, rotation, config)
        cache = cache.write(i, k_BKh, v_BKh, layout)
        attended_BHh = cached_attention(q_BHh, cache.keys[i], cache.values[i], occupied_BT)
        x_BD = x_BD + layers.linear(attended_BHh.reshape(x_BD.shape[0], -1), weights["output"])
        x_BD = x_BD + layers.gated_mlp(weights, layers.rms_norm(x_BD, weights["mlp_norm"], config.norm_eps))
        x_BD = layout.activation(x_BD, ("batch", "embed"))
    return x_BD, cache


def _layer(
    weights: dict[str, jax.Array],
    x_BTD: jax.Array,
    rotation: layers.Rotation,
    mask_BT: jax.Array,
    config: ModelConfig,
    layout: Layout,
    wanted: Wanted,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer, its outputs for the columns that are wanted; keys and values for all."""
    everywhere = isinstance(wanted, int) and wanted == 0
    with jax.named_scope("attention"):
        normed_BTD = layers.rms_norm(x_BTD, weights["attention_norm"], config.norm_eps)
        if everywhere:
            q_BSHh, k_BTKh, v_BTKh = layers.queries_keys_values(weights, normed_BTD, rotation, config)
        else:
            k_BTKh, v_BTKh = layers.keys_values(weights, normed_BTD, rotation, config)
            rotation_S = (_select(rotation[0], wanted), _select(rotation[1], wanted))
            q_BSHh = layers.queries(weights, _select(normed_BTD, wanted), rotation_S, config)
        q_BSHh = layout.activation(q_BSHh, ("batch", "length", "heads", "head_dim"))
        k_BTKh, v_BTKh = (layout.activation(x, ("batch", "length", "kv_heads", "head_dim")) for x in (k_BTKh, v_BTKh))
        if isinstance(wanted, int):
            implementation = attention_implementation(config, layout)
            attend = functools.partial(full_attention, implementation=implementation)
            if implementation == "cudnn":
                heads, kv_heads = (("batch", "length", name, "head_dim") for name in ("heads", "kv_heads"))
                attend = layout.on_each_device(attend, (heads, kv_heads, kv_heads, ("batch", "length")), heads)
            attended_BSHh = attend(q_BSHh, k_BTKh, v_BTKh, mask_BT)
        else:
            attended_BSHh = column_attention(q_BSHh[:, 0], k_BTKh, v_BTKh, mask_BT, wanted)[:, None]
        attended_BSHh = checkpoint_name(attended_BSHh, "attended")
        attended_BSH = attended_BSHh.reshape(*attended_BSHh.shape[:2], -1)
        x_BSD = _select(x_BTD, wanted) + layers.linear(attended_BSH, weights["output"])
        x_BSD = layout.activation(x_BSD, ("batch", "length", "embed"))
    with jax.named_scope("mlp"):
        x_BSD = x_BSD + layers.gated_mlp(weights, layers.rms_norm(x_BSD, weights["mlp_norm"], config.norm_eps))
        return layout.activation(x_BSD, ("batch", "length", "embed")), (k_BTKh, v_BTKh)


def _select(x_BTD: jax.Array, wanted: Wanted) -> jax.Array:
    """The columns that are wanted."""
    if isinstance(wanted, int):
        return x_BTD[:, wanted:]
    return jnp.take_along_axis(x_BTD, wanted[:, None, None], axis=1)


def _rematerialized(layer: Any, remat: Kept) -> Any:
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
