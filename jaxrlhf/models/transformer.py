"""The transformer: whole sequences at once for inference and training, one token at a time for decoding.

Letters: B sequences, T columns, S the last columns of T whose outputs are wanted, D hidden size.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.models import layers
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.kv_cache import KVCache
from jaxrlhf.models.params import Params, declare, use
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Remat

KeysValues = list[tuple[jax.Array, jax.Array]]


def hidden_states(
    params: Params,
    tokens_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    config: ModelConfig,
    layout: Layout,
    *,
    first: int = 0,
    remat: Remat = "none",
) -> Float[Array, "B S D"]:
    """The last layer's outputs, normalized, for columns `first` and later.

    Positions count real tokens, so padding on either side changes nothing. Where layers are not scanned, the last one
    computes queries, attention output and MLP only for the columns that are wanted.
    """
    hidden_BSD, _ = _run_layers(params, tokens_BT, mask_BT, config, layout, first=first, remat=remat)
    return hidden_BSD


def prefill(
    params: Params, tokens_BP: Int[Array, "B P"], mask_BP: Bool[Array, "B P"], config: ModelConfig, layout: Layout
) -> tuple[Float[Array, "B D"], KeysValues]:
    """The hidden state of each prompt's last column, and every layer's keys and values [B, P, K, h]."""
    hidden_B1D, keys_values = _run_layers(params, tokens_BP, mask_BP, config, layout, first=tokens_BP.shape[1] - 1)
    return hidden_B1D[:, 0], keys_values


def decode_step(
    params: Params, token_B: Int[Array, " B"], cache: KVCache, config: ModelConfig, layout: Layout
) -> tuple[Float[Array, "B D"], KVCache]:
    """Feed one more token of each sequence. `params` are ready for use, with layers as a list."""
    cache = cache.advance()
    occupied_BT = cache.occupied()
    rotation = layers.rotary(cache.length - 1, config)
    x_BD = layout.activation(params["embedding"][token_B], ("batch", "embed"))
    for i, weights in enumerate(params["layers"]):
        normed = layers.rms_norm(x_BD, weights["attention_norm"], config.norm_eps)
        k_BKh, v_BKh = layers.keys_values(weights, normed, rotation, config)
        cache = cache.write(i, k_BKh, v_BKh, layout)
        q_BHh = layers.queries(weights, normed, rotation, config)
        attended_BHh = layers.cached_attention(q_BHh, cache.keys[i], cache.values[i], occupied_BT)
        x_BD = x_BD + layers.linear(attended_BHh.reshape(x_BD.shape[0], -1), weights["output"])
        x_BD = x_BD + layers.gated_mlp(weights, layers.rms_norm(x_BD, weights["mlp_norm"], config.norm_eps))
        x_BD = layout.activation(x_BD, ("batch", "embed"))
    return layers.rms_norm(x_BD, params["final_norm"], config.norm_eps), cache


def _run_layers(
    params: Params,
    tokens_BT: jax.Array,
    mask_BT: jax.Array,
    config: ModelConfig,
    layout: Layout,
    *,
    first: int,
    remat: Remat = "none",
) -> tuple[jax.Array, KeysValues]:
    stacked = isinstance(params["layers"], dict)
    declared = declare(config, stacked=stacked)
    dtype = config.compute_dtype
    rotation = layers.rotary(jnp.maximum(jnp.cumsum(mask_BT, axis=1) - 1, 0), config)
    allowed_BTT = _allowed(mask_BT)
    x_BTD = use(params["embedding"], declared["embedding"], layout, dtype)[tokens_BT]
    x_BTD = layout.activation(x_BTD, ("batch", "length", "embed"))

    declared_layer = declare(config)["layers"][0]

    def layer(weights: Any, x: jax.Array, first: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return _layer(use(weights, declared_layer, layout, dtype), x, rotation, allowed_BTT, config, layout, first)

    layer = _rematerialized(layer, remat)
    if stacked:
        x_BTD, (k, v) = jax.lax.scan(lambda x, weights: layer(weights, x, 0), x_BTD, params["layers"])
        keys_values = list(zip(k, v, strict=True))
        x_BTD = x_BTD[:, first:]
    else:
        keys_values = []
        for i, weights in enumerate(params["layers"]):
            is_last = i == config.num_layers - 1
            x_BTD, kv = layer(weights, x_BTD, first if is_last else 0)
            keys_values.append(kv)
    norm = use(params["final_norm"], declared["final_norm"], layout, dtype)
    return layers.rms_norm(x_BTD, norm, config.norm_eps), keys_values


def _layer(
    weights: dict[str, jax.Array],
    x_BTD: jax.Array,
    rotation: layers.Rotation,
    allowed_BTT: jax.Array,
    config: ModelConfig,
    layout: Layout,
    first: int,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer, its outputs for columns `first` and later; keys and values for all."""
    with jax.named_scope("attention"):
        normed_BTD = layers.rms_norm(x_BTD, weights["attention_norm"], config.norm_eps)
        k_BTKh, v_BTKh = layers.keys_values(weights, normed_BTD, rotation, config)
        rotation_S = (rotation[0][:, first:], rotation[1][:, first:])
        q_BSHh = layers.queries(weights, normed_BTD[:, first:], rotation_S, config)
        q_BSHh = layout.activation(q_BSHh, ("batch", "length", "heads", "head_dim"))
        k_BTKh, v_BTKh = (layout.activation(x, ("batch", "length", "kv_heads", "head_dim")) for x in (k_BTKh, v_BTKh))
        attended_BSHh = layers.full_attention(
            q_BSHh,
            k_BTKh,
            v_BTKh,
            allowed_BTT[:, None, first:],
            implementation=layers.attention_implementation(config, layout),
        )
        attended_BSH = attended_BSHh.reshape(*attended_BSHh.shape[:2], -1)
        x_BSD = x_BTD[:, first:] + layers.linear(attended_BSH, weights["output"])
        x_BSD = layout.activation(x_BSD, ("batch", "length", "embed"))
    with jax.named_scope("mlp"):
        x_BSD = x_BSD + layers.gated_mlp(weights, layers.rms_norm(x_BSD, weights["mlp_norm"], config.norm_eps))
        return layout.activation(x_BSD, ("batch", "length", "embed")), (k_BTKh, v_BTKh)


def _allowed(mask_BT: jax.Array) -> jax.Array:
    """Which columns a column may look at: real ones that are not later; and itself, so that padding sees something."""
    T = mask_BT.shape[1]
    causal_TT = jnp.tril(jnp.ones((T, T), bool))
    return (causal_TT[None] & mask_BT[:, None, :]) | jnp.eye(T, dtype=bool)[None]


def _rematerialized(layer: Any, remat: Remat) -> Any:
    if remat == "none":
        return layer
    policies = {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "layer": jax.checkpoint_policies.nothing_saveable,
    }
    return jax.checkpoint(layer, policy=policies[remat], static_argnums=(2,))
