"""The parts of a transformer layer beside attention.

What is done element by element is computed anew in the backward pass: that is cheaper than keeping it, in memory and
nearly in time.

Letters: B sequences, D hidden size, H query heads, K key-value heads, h head size. Biases and norms are optional.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrlhf.models.architecture import JOINED
from jaxrlhf.models.config import Activation, ModelConfig, RopeScaling, at_least_float32


class Adapted(struct.PyTreeNode):
    """A weight with a low-rank adapter: it multiplies as `weight + scale * down @ up` (Hu et al. 2021,
    arXiv:2106.09685)."""

    weight: Any
    """[..., in, out]"""
    down: Any
    """[..., in, rank]"""
    up: Any
    """[..., rank, out]"""
    scale: float = struct.field(pytree_node=False)


LayerWeights = dict[str, Any]
"""The weights of one layer, or of all layers, stacked: name -> array, or `Adapted` where a matrix has an adapter."""
Rotation = tuple[jax.Array, jax.Array]
"""Cosine and sine of every position's angles, [..., h / 2] each."""


def linear(x: jax.Array, weight: jax.Array | Adapted, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight + bias` with all leading dims of `x` as one, so that the weight's gradient is a plain matrix
    product."""
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Adapted):
        y = rows @ weight.weight
        with jax.named_scope("adapter"):
            y = y + (rows @ weight.down) @ weight.up * weight.scale
    else:
        y = rows @ weight
    if bias is not None:
        y = y + bias[None, :]
    return y.reshape(*x.shape[:-1], y.shape[-1])


@functools.partial(jax.checkpoint, static_argnums=2)
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dim, in float32 (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    wide = at_least_float32(x.dtype)
    x32 = x.astype(wide)
    scaled = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (scaled * weight.astype(wide).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def rotary(position: Int[Array, "*B"], config: ModelConfig, *, local: bool = False) -> Rotation:
    """Cosines and sines of rotary position embeddings (Su et al. 2021, arXiv:2104.09864), scaled to longer
    contexts; or those of sliding layers that have a theta of their own."""
    h, theta = config.head_size, config.rope_local_theta if local else config.rope_theta
    frequency = theta ** (-jnp.arange(0, h, 2, dtype=jnp.float32) / h)
    if config.rope_scaling is not None and not local:
        frequency = scale_frequencies(frequency, config.rope_scaling)
    angle = position[..., None].astype(jnp.float32) * frequency.reshape((1,) * position.ndim + (-1,))
    return jnp.cos(angle), jnp.sin(angle)


def scale_frequencies(frequency: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Rotary frequencies of a model whose context was extended."""
    if scaling.type == "linear":
        return frequency / scaling.factor
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def rotate(x: Float[Array, "*B heads h"], rotation: Rotation, scale: float = 1.0) -> Float[Array, "*B heads h"]:
    """Turn the pairs (x_i, x_{i + h/2}) of each head by their position's angles, and scale them."""
    cos, sin = (part[..., None, :] for part in rotation)
    first, second = jnp.split(x.astype(at_least_float32(x.dtype)), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return (turned if scale == 1.0 else turned * scale).astype(x.dtype)


def join(weights: LayerWeights) -> LayerWeights:
    """The weights of a layer, with those that multiply the same input joined into one matrix.

    One large product is faster than several small ones. Where columns are split over `tensor` it cannot be had: the
    joined columns would lie on other devices.
    """
    joined = dict(weights)
    for whole, parts in JOINED.items():
        for suffix in ("", "_bias"):
            if parts[0] + suffix in joined:
                joined[whole + suffix] = jnp.concatenate([joined.pop(part + suffix) for part in parts], axis=-1)
    return joined


def is_joined(weights: LayerWeights) -> bool:
    """True for weights from `join`."""
    return any(whole in weights for whole in JOINED)


def product(weights: LayerWeights, name: str, x: jax.Array) -> jax.Array:
    """`linear` with one of a layer's matrices, and its bias if it has one."""
    with jax.named_scope(name):
        return linear(x, weights[name], weights.get(f"{name}_bias"))


def queries_keys_values(
    weights: LayerWeights, x: jax.Array, rotation: Rotation, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[..., D] -> rotated queries [..., H, h], rotated keys and values, [..., K, h] each."""
    H, K, h = config.num_heads, config.num_kv_heads, config.head_size
    if not is_joined(weights):
        return (queries(weights, x, rotation, config), *keys_values(weights, x, rotation, config))
    heads = product(weights, "query_key_value", x).reshape(*x.shape[:-1], H + 2 * K, h)
    q, k, v = heads[..., :H, :], heads[..., H : H + K, :], heads[..., H + K :, :]
    return _rotated(weights, "query", q, rotation, config), _rotated(weights, "key", k, rotation, config), v


def queries(weights: LayerWeights, x: jax.Array, rotation: Rotation, config: ModelConfig) -> jax.Array:
    """[..., D] -> rotated queries [..., H, h]."""
    return _rotated(weights, "query", _heads(weights, "query", x, config), rotation, config)


def keys_values(
    weights: LayerWeights, x: jax.Array, rotation: Rotation, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """[..., D] -> rotated keys and values, [..., K, h] each."""
    k, v = _heads(weights, "key", x, config), _heads(weights, "value", x, config)
    return _rotated(weights, "key", k, rotation, config), v


def _heads(weights: LayerWeights, name: str, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Queries, keys or values, by columns that are cut out where they are joined."""
    if name not in weights:
        H, K, h = config.num_heads, config.num_kv_heads, config.head_size
        first, end = {"query": (0, H * h), "key": (H * h, (H + K) * h), "value": ((H + K) * h, (H + 2 * K) * h)}[name]
        whole = "query_key_value"
        joined = {name: weights[whole], f"{name}_bias": weights.get(f"{whole}_bias")}
        weights = {part: columns[..., first:end] for part, columns in joined.items() if columns is not None}
    return product(weights, name, x).reshape(*x.shape[:-1], -1, config.head_size)


def _rotated(weights: LayerWeights, name: str, heads: jax.Array, rotation: Rotation, config: ModelConfig) -> jax.Array:
    if config.qk_norm:
        together = heads if config.qk_norm_over == "head" else heads.reshape(*heads.shape[:-2], -1)
        heads = normed(weights, f"{name}_norm", together, config).reshape(heads.shape)
    # attention divides by the root of the head size
    scalar = config.query_pre_attn_scalar if name == "query" else 0.0
    return rotate(heads, rotation, math.sqrt(config.head_size / scalar) if scalar else 1.0)


def normed(weights: LayerWeights, name: str, x: jax.Array, config: ModelConfig) -> jax.Array:
    """An array normalized by one of a layer's weights, or as it is if the layer has no such norm."""
    return normed_by(weights[name], x, config) if name in weights else x


def normed_by(weight: jax.Array, x: jax.Array, config: ModelConfig) -> jax.Array:
    """An array normalized by a weight, as a model's norms do."""
    if config.norm_plus_one:
        weight = weight.astype(at_least_float32(x.dtype)) + 1
    return rms_norm(x, weight, config.norm_eps)


def add_attention(
    weights: LayerWeights, x: Float[Array, "*B D"], heads: Float[Array, "*B H h"], config: ModelConfig
) -> jax.Array:
    """The residual stream after attention, from what the heads gave."""
    attended = product(weights, "output", heads.reshape(*x.shape[:-1], -1))
    return x + normed(weights, "attention_output_norm", attended, config)


@jax.named_scope("mlp")
def add_mlp(weights: LayerWeights, x: Float[Array, "*B D"], config: ModelConfig) -> jax.Array:
    """The residual stream after the MLP."""
    gated = gated_mlp(weights, normed(weights, "mlp_norm", x, config), config.activation)
    return x + normed(weights, "mlp_output_norm", gated, config)


def gated_mlp(weights: LayerWeights, x: jax.Array, activation: Activation = "silu") -> jax.Array:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""
    if is_joined(weights):
        gated = _gated_halves(product(weights, "gate_up", x), activation)
    else:
        gated = _gated(product(weights, "gate", x), product(weights, "up", x), activation)
    return product(weights, "down", gated)


_ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@functools.partial(jax.checkpoint, static_argnums=2)
def _gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    return _ACTIVATIONS[activation](gate) * up


@functools.partial(jax.checkpoint, static_argnums=1)
def _gated_halves(gate_up: jax.Array, activation: Activation) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return _gated(gate, up, activation)
