"""Losses over response tokens that add up: each returns a sum, its weight, and metrics that are sums too.

Letters: B sequences, R response columns.

A train call adds sums, weights and metrics over micro-batches and shards, and divides by the weight once, at the end.
So the loss is a mean over a mini-batch, however it was cut. What it is a mean of, `Aggregation` says:

    token       sum of all tokens / number of all tokens: each token counts alike
    sequence    mean over sequences of the means over their tokens: each sequence counts alike
    sum         mean over sequences of the sums over their tokens: a sequence is one action
    constant    the same, divided by R, the limit on new tokens: `sum` on the scale of `sequence`

Metrics are means over tokens with `token`, else over sequences of means over their tokens.
"""

from typing import Literal, TypeAlias

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrlhf.algorithms.kl import ESTIMATORS, Estimator
from jaxrlhf.algorithms.masked import masked_count, masked_means, masked_sum
from jaxrlhf.experience import Max

Metrics: TypeAlias = dict[str, Float[Array, ""] | Max]
"""Sums, to be divided by the loss's weight, or maxima."""

Loss: TypeAlias = tuple[Float[Array, ""], Float[Array, ""], Metrics]
"""The loss summed over tokens or sequences; the number of these; metrics."""

Aggregation = Literal["token", "sequence", "sum", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = ("token", "sequence", "sum", "constant")


def aggregated(
    x_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"], aggregation: Aggregation
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum of a loss over unmasked tokens, and the weight that it is to be divided by.

    A sequence without unmasked tokens has no weight.

    Reference:
        The first three, Shao et al. 2024, arXiv:2402.03300, eq. 3, and Yu et al. 2025, arXiv:2503.14476, section 3.3;
        the last, Liu et al. 2025, arXiv:2503.20783.
    """
    chex.assert_rank([x_BR, mask_BR], 2)
    if aggregation == "token":
        return masked_sum(x_BR, mask_BR), masked_count(mask_BR)
    num_sequences = jnp.sum(jnp.any(mask_BR, axis=1), dtype=jnp.float32)
    if aggregation == "sequence":
        return jnp.sum(masked_means(x_BR, mask_BR)), num_sequences
    return masked_sum(x_BR, mask_BR) / (mask_BR.shape[1] if aggregation == "constant" else 1), num_sequences


def _metric(x_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"], aggregation: Aggregation) -> Float[Array, ""]:
    """A sum that the weight of `aggregated` turns into a mean."""
    return aggregated(x_BR, mask_BR, "token" if aggregation == "token" else "sequence")[0]


def clipped_policy_loss(
    logprobs_BR: Float[Array, "B R"],
    old_logprobs_BR: Float[Array, "B R"],
    advantages_BR: Float[Array, "B R"],
    mask_BR: Bool[Array, "B R"],
    *,
    clip: float,
    clip_high: float | None = None,
    aggregation: Aggregation = "token",
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
    loss, weight = aggregated(jnp.maximum(plain_BR, clipped_BR), mask_BR, aggregation)
    metrics: Metrics = {
        "pg_loss": loss,
        "pg_clipfrac": _metric((clipped_BR > plain_BR).astype(jnp.float32), mask_BR, aggregation),
        "ppo_kl": _metric(-log_ratio_BR, mask_BR, aggregation),
        "ratio_max": Max(jnp.max(jnp.where(mask_BR, ratio_BR, 0.0), initial=0.0)),
    }
    return loss, weight, metrics


def clipped_sequence_loss(
    logprobs_BR: Float[Array, "B R"],
    old_logprobs_BR: Float[Array, "B R"],
    advantages_B: Float[Array, " B"],
    mask_BR: Bool[Array, "B R"],
    *,
    clip: float,
    clip_high: float,
) -> Loss:
    """The clipped surrogate with one ratio for a whole sequence, to be minimized.

        ratio = exp(mean over tokens of (logprob - old_logprob))
        loss  = max(-A * ratio, -A * min(max(ratio, 1 - clip), 1 + clip_high))

    The ratio is the geometric mean of those of the tokens, so that its size does not depend on the length. The weight
    is the number of sequences that have tokens.

    Metrics: as of `clipped_policy_loss`, over sequences.

    Reference:
        Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7.
    """
    chex.assert_rank([logprobs_BR, old_logprobs_BR, advantages_B, mask_BR], [2, 2, 1, 2])
    chex.assert_equal_shape([logprobs_BR, old_logprobs_BR, mask_BR])
    log_ratio_B1 = masked_means(logprobs_BR - old_logprobs_BR, mask_BR)[:, None]
    counts_B1 = jnp.any(mask_BR, axis=1, keepdims=True)
    return clipped_policy_loss(
        log_ratio_B1, jnp.zeros_like(log_ratio_B1), advantages_B[:, None], counts_B1, clip=clip, clip_high=clip_high
    )


def reinforce_loss(
    logprobs_BR: Float[Array, "B R"],
    advantages_BR: Float[Array, "B R"],
    mask_BR: Bool[Array, "B R"],
    *,
    aggregation: Aggregation,
) -> Loss:
    """The score-function estimator of the policy gradient, as a loss.

        loss = -A * logprob

    Its gradient is that of the objective for the policy that drew the tokens: there is no ratio that would account for
    a policy which has moved since. Metric: `pg_loss`.

    Reference:
        Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
    """
    chex.assert_rank([logprobs_BR, advantages_BR, mask_BR], 2)
    chex.assert_equal_shape([logprobs_BR, advantages_BR, mask_BR])
    loss, weight = aggregated(-advantages_BR * jnp.where(mask_BR, logprobs_BR, 0.0), mask_BR, aggregation)
    return loss, weight, {"pg_loss": loss}


def entropy_bonus(
    entropy_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"], *, coef: float, aggregation: Aggregation = "token"
) -> Loss:
    """Rewards a spread-out policy: loss = -coef * entropy. Metric: `entropy`, in nats, without the coefficient."""
    entropy, weight = aggregated(entropy_BR, mask_BR, aggregation)
    return -coef * entropy, weight, {"entropy": _metric(entropy_BR, mask_BR, aggregation)}


def kl_loss(
    logprobs_BR: Float[Array, "B R"],
    reference_BR: Float[Array, "B R"],
    coef_B: Float[Array, " B"],
    mask_BR: Bool[Array, "B R"],
    *,
    estimator: Estimator,
    aggregation: Aggregation = "token",
) -> Loss:
    """Holds the policy near the reference: loss = coef * kl. Metric: `kl_loss`, in nats, without the coefficient."""
    chex.assert_rank([logprobs_BR, reference_BR, coef_B, mask_BR], [2, 2, 1, 2])
    chex.assert_equal_shape([logprobs_BR, reference_BR, mask_BR])
    kl_BR = ESTIMATORS[estimator](jnp.where(mask_BR, logprobs_BR, 0.0), reference_BR)
    loss, weight = aggregated(coef_B[:, None] * kl_BR, mask_BR, aggregation)
    return loss, weight, {"kl_loss": _metric(kl_BR, mask_BR, aggregation)}


def clipped_value_loss(
    values_BR: Float[Array, "B R"],
    old_values_BR: Float[Array, "B R"],
    returns_BR: Float[Array, "B R"],
    mask_BR: Bool[Array, "B R"],
    *,
    value_clip: float | None,
    coef: float,
    aggregation: Aggregation = "token",
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
    squared, weight = aggregated(jnp.maximum(plain_BR, clipped_BR), mask_BR, aggregation)
    loss = coef * squared
    metrics: Metrics = {
        "vf_loss": loss,
        "vf_clipfrac": _metric((clipped_BR > plain_BR).astype(jnp.float32), mask_BR, aggregation),
        "vpred_mean": _metric(values_BR, mask_BR, aggregation),
    }
    return loss, weight, metrics
