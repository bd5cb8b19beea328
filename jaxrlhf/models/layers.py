"""The parts of a transformer layer.

Letters: B sequences, T columns, S query columns (the last S of T), D hidden size, H query heads, K key-value heads,
G = H / K queries a group, h head size, F MLP size. Biases and norms of single heads are optional.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.models.config import ModelConfig, RopeScaling
from jaxrlhf.sharding.layout import Layout

Rotation = tuple[jax.Array, jax.Array]
"""Cosine and sine of every position's angles, [..., h / 2] each."""


def attention_implementation(config: ModelConfig, layout: Layout) -> str:
    """Which implementation of `jax.nn.dot_product_attention` a model uses in a layout: 'xla' or 'cudnn'.

    Raises:
        ValueError: cuDNN is asked for where there is no NVIDIA GPU, or for float32, which it does not compute.
    """
    on_gpu = layout.mesh.devices.flat[0].platform in ("gpu", "cuda")
    if config.attention == "cudnn" and not (on_gpu and config.dtype == "bfloat16"):
        raise ValueError(
            f"attention: cudnn needs an NVIDIA GPU and bfloat16. Got {layout.mesh.devices.flat[0].platform} and "
            f"{config.dtype}. Use xla or auto."
        )
    if config.attention == "auto":
        return (
            "cudnn"
            if on_gpu and config.dtype == "bfloat16" and config.head_size % 8 == 0 and config.head_size <= 128
            else "xla"
        )
    return config.attention


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight + bias` with all leading dims of `x` as one, so that the weight's gradient is a plain matrix
    product."""
    y = x.reshape(-1, x.shape[-1]) @ weight
    if bias is not None:
        y = y + bias[None, :]
    return y.reshape(*x.shape[:-1], weight.shape[-1])


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dim, in float32 (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    x32 = x.astype(jnp.float32)
    scaled = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (scaled * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def rotary(position: Int[Array, "*B"], config: ModelConfig) -> Rotation:
    """Cosines and sines of rotary position embeddings (Su et al. 2021, arXiv:2104.09864), scaled as Llama 3 does."""
    h = config.head_size
    frequency = config.rope_theta ** (-jnp.arange(0, h, 2, dtype=jnp.float32) / h)
    if config.rope_scaling is not None:
        frequency = _scale_frequencies(frequency, config.rope_scaling)
    angle = position[..., None].astype(jnp.float32) * frequency.reshape((1,) * position.ndim + (-1,))
    return jnp.cos(angle), jnp.sin(angle)


def _scale_frequencies(frequency: jax.Array, scaling: RopeScaling) -> jax.Array:
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def rotate(x: Float[Array, "*B heads h"], rotation: Rotation) -> Float[Array, "*B heads h"]:
    """Turn the pairs (x_i, x_{i + h/2}) of each head by their position's angles."""
    cos, sin = (part[..., None, :] for part in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def queries(weights: dict[str, Any], x: jax.Array, rotation: Rotation, config: ModelConfig) -> jax.Array:
    """[..., D] -> rotated queries [..., H, h]."""
    q = linear(x, weights["query"], weights.get("query_bias")).reshape(
        *x.shape[:-1], config.num_heads, config.head_size
    )
    if config.qk_norm:
        q = rms_norm(q, weights["query_norm"], config.norm_eps)
    return rotate(q, rotation)


def keys_values(
    weights: dict[str, Any], x: jax.Array, rotation: Rotation, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """[..., D] -> rotated keys and values, [..., K, h] each."""
    shape = (*x.shape[:-1], config.num_kv_heads, config.head_size)
    k = linear(x, weights["key"], weights.get("key_bias")).reshape(shape)
    v = linear(x, weights["value"], weights.get("value_bias")).reshape(shape)
    if config.qk_norm:
        k = rms_norm(k, weights["key_norm"], config.norm_eps)
    return rotate(k, rotation), v


def full_attention(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    allowed_B1ST: Bool[Array, "B 1 S T"],
    *,
    implementation: str,
) -> Float[Array, "B S H h"]:
    """Grouped-query attention of whole sequences."""
    assert implementation in ("xla", "cudnn")
    S = q_BSHh.shape[1]
    if implementation == "cudnn":  # its backward pass with a mask takes even lengths only
        q_BSHh, k_BTKh, v_BTKh, allowed_B1ST = pad_to_even(q_BSHh, k_BTKh, v_BTKh, allowed_B1ST)
    attended = jax.nn.dot_product_attention(q_BSHh, k_BTKh, v_BTKh, mask=allowed_B1ST, implementation=implementation)  # pyright: ignore[reportArgumentType]
    return attended[:, :S]


def pad_to_even(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    allowed_B1ST: Bool[Array, "B 1 S T"],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """An even number of queries and of keys: one more key is seen by none, one more query sees the rest."""
    more_q, more_k = q_BSHh.shape[1] % 2, k_BTKh.shape[1] % 2

    def pad(x: jax.Array, more: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))

    allowed = jnp.pad(allowed_B1ST, ((0, 0), (0, 0), (0, more_q), (0, 0)), constant_values=True)
    allowed = jnp.pad(allowed, ((0, 0), (0, 0), (0, 0), (0, more_k)), constant_values=False)
    return pad(q_BSHh, more_q), pad(k_BTKh, more_k), pad(v_BTKh, more_k), allowed


def cached_attention(
    q_BHh: Float[Array, "B H h"],
    k_BKTh: Float[Array, "B K T h"],
    v_BKTh: Float[Array, "B K T h"],
    allowed_BT: Bool[Array, "B T"],
) -> Float[Array, "B H h"]:
    """Grouped-query attention of one new token a sequence over a cache, the softmax in float32."""
    B, H, h = q_BHh.shape
    K = k_BKTh.shape[1]
    q_BKGh = q_BHh.reshape(B, K, H // K, h)
    score = jnp.einsum("bkgh,bkth->bkgt", q_BKGh, k_BKTh, preferred_element_type=jnp.float32) * h**-0.5
    score = jnp.where(allowed_BT[:, None, None, :], score, jnp.finfo(jnp.float32).min)
    weight = jnp.exp(score - score.max(axis=-1, keepdims=True))
    weighted = jnp.einsum("bkgt,bkth->bkgh", weight.astype(v_BKTh.dtype), v_BKTh, preferred_element_type=jnp.float32)
    return (weighted / weight.sum(axis=-1, keepdims=True)).astype(q_BHh.dtype).reshape(B, H, h)


def gated_mlp(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""
    return linear(jax.nn.silu(linear(x, weights["gate"])) * linear(x, weights["up"]), weights["down"])
