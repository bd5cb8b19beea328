"""The optimizer: AdamW over float32 master weights, its state sharded as they are, in float32 or in bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import BFloat16, Float, Int

from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.models.params import Params, Shardings
from jaxrlhf.programs.arrays import Abstract, Metrics
from jaxrlhf.sharding.layout import Layout


class OptimizerState(struct.PyTreeNode):
    """The state of an optimizer: the number of updates so far, and AdamW's moments."""

    num_updates: jax.Array
    adamw: optax.OptState


def learning_rate(config: OptimizerConfig, num_updates: int) -> optax.Schedule:
    """The rate of each update: a linear warm-up, then the schedule until `num_updates`.

    The first update of a warm-up has the rate 1 / warmup_updates of the full one, not zero.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    decay_updates = max(num_updates - config.warmup_updates, 1)
    after: optax.Schedule
    if config.schedule == "linear":
        after = optax.linear_schedule(peak, final, decay_updates)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, decay_updates, alpha=config.final_fraction)
    else:
        after = optax.constant_schedule(peak)
    if not config.warmup_updates:
        return after
    warmup = config.warmup_updates

    def rate(count: Any) -> jax.Array:
        return jnp.where(count < warmup, peak * (count + 1) / warmup, after(jnp.maximum(count - warmup, 0)))

    return rate


def init_optimizer(config: OptimizerConfig, params: Params) -> OptimizerState:
    """The state before the first update."""
    return OptimizerState(num_updates=jnp.int32(0), adamw=_transform(config).init(params))


def apply_gradient(
    config: OptimizerConfig,
    num_updates: int,
    params: Params,
    state: OptimizerState,
    gradient: Params,
    grad_norm: Float[jax.Array, ""] | None = None,
) -> tuple[Params, OptimizerState, Metrics]:
    """One update. Metrics: `grad_norm`, before clipping, and `lr`. `grad_norm`: norm of the whole gradient if
    `gradient` is a part of it. None means that it is the whole."""
    grad_norm = optax.tree.norm(gradient) if grad_norm is None else grad_norm
    if config.max_grad_norm:
        scale = jnp.minimum(1.0, config.max_grad_norm / (grad_norm + 1e-6))
        gradient = jax.tree.map(lambda g: g * scale, gradient)
    direction, adamw = _transform(config).update(gradient, state.adamw, params)
    rate = jnp.asarray(learning_rate(config, num_updates)(state.num_updates), jnp.float32)
    params = jax.tree.map(lambda p, d: p - rate * (d + config.weight_decay * p), params, direction)
    return params, OptimizerState(state.num_updates + 1, adamw), {"grad_norm": grad_norm, "lr": rate}


def optimizer_shardings(config: OptimizerConfig, abstract: Abstract, shardings: Shardings, layout: Layout) -> Shardings:
    """The shardings of the optimizer state: moments as their weights, counters replicated. `abstract` and `shardings`:
    shapes and shardings of the weights."""
    state = jax.eval_shape(lambda params: init_optimizer(config, params), abstract)
    adamw = optax.tree_map_params(
        _adam(config),  # whose state has the same structure in every precision
        lambda _, sharding: sharding,
        state.adamw,
        shardings,
        transform_non_params=lambda _: layout.replicated,
    )
    return OptimizerState(num_updates=layout.replicated, adamw=adamw)  # pyright: ignore[reportArgumentType]


def _transform(config: OptimizerConfig) -> optax.GradientTransformation:
    return _adam(config) if config.state_dtype == "float32" else _in_bfloat16(_adam(config))


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps)


def _in_bfloat16(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Adam whose two moments rest in bfloat16, and are computed with in float32.

    Optax has a `mu_dtype`, for the first moment alone. Rounded to nearest, the second would stand still where an update
    changes it by less than about 1/256 of itself, as with beta2 = 0.999 most do.
    """

    def rounded(state: Any) -> optax.ScaleByAdamState:
        def at(x: jax.Array) -> jax.Array:
            return round_at_random(x, state.count)

        return optax.ScaleByAdamState(state.count, jax.tree.map(at, state.mu), jax.tree.map(at, state.nu))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        mu, nu = jax.tree.map(lambda x: x.astype(jnp.float32), (state.mu, state.nu))
        direction, new = adam.update(updates, optax.ScaleByAdamState(state.count, mu, nu), params)
        return direction, rounded(new)

    return optax.GradientTransformation(lambda params: rounded(adam.init(params)), update)


def round_at_random(x: Float[jax.Array, "..."], count: Int[jax.Array, ""]) -> BFloat16[jax.Array, "..."]:
    """Float32 numbers as bfloat16, rounded up with the probability that keeps their mean over many `count`s.

    The noise is a hash (the last steps of MurmurHash3) of `count` and the upper half of a number. It needs no key, is
    the same wherever a number lies, under any sharding and form of layers, and the same again after a resume.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = (bits >> 16) ^ (count.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        noise = (noise ^ (noise >> shift)) * jnp.uint32(factor)
    up = bits + ((noise ^ (noise >> 16)) & 0xFFFF)  # a carry into the upper half rounds away from zero
    upper = jnp.where(jnp.isfinite(x), up, bits) >> 16
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
