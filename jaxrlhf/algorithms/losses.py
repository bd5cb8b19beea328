"""Losses over response tokens that add up: each gives a sum, its weight, and metrics that are sums too.

Letters: B sequences, R response columns.

A train call adds sums, weights and metrics over micro-batches and shards, and divides by the weight once, at the end.
So the loss is a mean over all tokens of a mini-batch, however it was cut.
"""

from typing import TypeAlias

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrlhf.algorithms.kl import ESTIMATORS, Estimator
from jaxrlhf.algorithms.masked import masked_count, masked_max, masked_sum
from jaxrlhf.experience import Max

Metrics: TypeAlias = dict[str, Float[Array, ""] | Max]
"""Sums, to be divided by the loss's weight, or maxima."""

Loss: TypeAlias = tuple[Float[Array, ""], Float[Array, ""], Metrics]
"""The loss summed over tokens; the number of tokens; metrics."""


def clipped_policy_loss(
    logprobs_BR: Float[Array, "B R"],
    old_logprobs_BR: Float[Array, "B R"],
    advantages_BR: Float[Array, "B R"],
    mask_BR: Bool[Array, "B R"],
    *,
    clip: float,
    clip_high: float | None = None,
) -> Loss:
    """The clipped surrogate objective of PPO, to be minimized.

        ratio = exp(logprob - old_logprob)
        loss  = max(-A * ratio, -A * min(max(ratio, 1 - clip), 1 + clip_high))

    `clip_high` is `clip` where it is None.

    Metrics: `pg_loss`; `pg_clipfrac`, tokens where the clipped term is the larger one, which have no gradient;
    `ppo_kl`, old minus new log-probability; `ratio_max`.

    Reference:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; the two bounds, Yu et al. 2025, arXiv:2503.14476, section 3.1.
    """
    chex.assert_rank([logprobs_BR, old_logprobs_BR, advantages_BR, mask_BR], 2)
    chex.assert_equal_shape([logprobs_BR, old_logprobs_BR, advantages_BR, mask_BR])
    # Masked before exp: an overflow at a masked token would turn the gradient into NaN, summed or not.
    log_ratio_BR = jnp.where(mask_BR, logprobs_BR - old_logprobs_BR, 0.0)
    ratio_BR = jnp.exp(log_ratio_BR)
    plain_BR = -advantages_BR * ratio_BR
    clipped_BR = -advantages_BR * jnp.clip(ratio_BR, 1.0 - clip, 1.0 + (clip if clip_high is None else clip_high))
    loss = masked_sum(jnp.maximum(plain_BR, clipped_BR), mask_BR)
    metrics: Metrics = {
        "pg_loss": loss,
        "pg_clipfrac": masked_count(mask_BR & (clipped_BR > plain_BR)),
        "ppo_kl": -jnp.sum(log_ratio_BR),
        "ratio_max": Max(masked_max(ratio_BR, mask_BR, floor=0.0)),
    }
    return loss, masked_count(mask_BR), metrics


def entropy_bonus(entropy_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"], *, coef: float) -> Loss:
    """Rewards a spread-out policy: loss = -coef * entropy. Metric: `entropy`, in nats, without the coefficient."""
    entropy = masked_sum(entropy_BR, mask_BR)
    return -coef * entropy, masked_count(mask_BR), {"entropy": entropy}


def kl_loss(
    logprobs_BR: Float[Array, "B R"],
    reference_BR: Float[Array, "B R"],
    coef_B: Float[Array, " B"],
    mask_BR: Bool[Array, "B R"],
    *,
    estimator: Estimator,
) -> Loss:
    """Holds the policy near the reference: loss = coef * kl. Metric: `kl_loss`, in nats, without the coefficient."""
    chex.assert_rank([logprobs_BR, reference_BR, coef_B, mask_BR], [2, 2, 1, 2])
    chex.assert_equal_shape([logprobs_BR, reference_BR, mask_BR])
    kl_BR = ESTIMATORS[estimator](jnp.where(mask_BR, logprobs_BR, 0.0), reference_BR)
    loss = masked_sum(coef_B[:, None] * kl_BR, mask_BR)
    return loss, masked_count(mask_BR), {"kl_loss": masked_sum(kl_BR, mask_BR)}


def clipped_value_loss(
    values_BR: Float[Array, "B R"],
    old_values_BR: Float[Array, "B R"],
    returns_BR: Float[Array, "B R"],
    mask_BR: Bool[Array, "B R"],
    *,
    value_clip: float | None,
    coef: float,
) -> Loss:
    """Squared error of the critic, pessimistic about moves away from its earlier values.

        clipped = old + min(max(value - old, -value_clip), value_clip)
        loss    = coef * max((value - return)^2, (clipped - return)^2)

    Metrics: `vf_loss`, with the coefficient; `vf_clipfrac`, tokens where the clipped term is the larger one, which have
    no gradient; `vpred_mean`, the mean of `values_BR`.

    Reference:
        Schulman et al. 2017, arXiv:1707.06347, eq. 9; the clipping, openai/baselines, ppo2/model.py.
    """
    chex.assert_rank([values_BR, old_values_BR, returns_BR, mask_BR], 2)
    chex.assert_equal_shape([values_BR, old_values_BR, returns_BR, mask_BR])
    values_BR = jnp.where(mask_BR, values_BR, 0.0)
    plain_BR = jnp.square(values_BR - returns_BR)
    if value_clip is None:
        clipped_BR = plain_BR
    else:
        # clipped so, a value that is in range stays as it is to the last bit, and is not counted as clipped
        near_BR = jnp.clip(values_BR, old_values_BR - value_clip, old_values_BR + value_clip)
        clipped_BR = jnp.square(near_BR - returns_BR)
    loss = coef * masked_sum(jnp.maximum(plain_BR, clipped_BR), mask_BR)
    metrics: Metrics = {
        "vf_loss": loss,
        "vf_clipfrac": masked_count(mask_BR & (clipped_BR > plain_BR)),
        "vpred_mean": masked_sum(values_BR, mask_BR),
    }
    return loss, masked_count(mask_BR), metrics
