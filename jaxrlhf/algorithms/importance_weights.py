"""Truncated importance weights, by which tokens that an older policy drew count as if the current one had drawn them.

Letters: B sequences, R response columns.
"""

from typing import Any

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrlhf.algorithms.masked import masked_mean, masked_means
from jaxrlhf.experience import Rollout
from jaxrlhf.tracing import compute


def corrected(role: Any, rollout: Rollout, max_weight: float) -> tuple[Rollout, dict[str, Any]]:
    """A rollout for training, and metrics of its weights: the log-probabilities become those of the role's current
    policy, so that a ratio to them begins at 1, and what that policy had drawn more rarely counts less.

    Reference:
        Fu et al. 2025, arXiv:2505.24298, section 5.2 (AReaL): a proximal policy apart from the one that drew.
    """
    current = role.logprobs(rollout)
    given = (rollout.logprobs, current, rollout.response, max_weight)
    weights, metrics = compute(importance_weights, *given, groups_of=1)
    return rollout.replace(logprobs=current, importance_weights=weights), metrics


def importance_weights(
    drawn_BR: Float[Array, "B R"],
    current_BR: Float[Array, "B R"],
    mask_BR: Bool[Array, "B R"],
    max_weight: float,
) -> tuple[Float[Array, "B R"], dict[str, Float[Array, ""]]]:
    """Truncated importance weights of tokens, and metrics of them.

        weight = min(exp(current - drawn), max_weight)

    Args:
        drawn_BR: Log-probabilities under the policy that drew the tokens.
        current_BR: The same under the policy that is about to be trained.

    Returns:
        Weights, zero outside of responses; and over all tokens of responses, the mean weight, the largest, the fraction
        that was truncated, the effective sample size as a fraction of the tokens, mean(w)^2 / mean(w^2), and an
        estimate of the KL divergence of the policy that drew from the current one, mean(drawn - current).

    Reference:
        Ionides 2008, "Truncated importance sampling"; per token, Espeholt et al. 2018, arXiv:1802.01561 (V-trace).
    """
    chex.assert_equal_shape([drawn_BR, current_BR, mask_BR])
    log_ratio_BR = jnp.where(mask_BR, current_BR - drawn_BR, 0.0)
    ratio_BR = jnp.exp(log_ratio_BR)
    weights_BR = jnp.where(mask_BR, jnp.minimum(ratio_BR, max_weight), 0.0)
    mean = masked_mean(weights_BR, mask_BR)
    square = masked_mean(weights_BR**2, mask_BR)
    metrics = {
        "weight/mean": mean,
        "weight/max": jnp.max(weights_BR),
        "weight/truncated": masked_mean((ratio_BR > max_weight).astype(jnp.float32), mask_BR),
        "weight/effective": jnp.where(square > 0, mean**2 / jnp.where(square > 0, square, 1.0), 1.0),
        "kl": -masked_mean(log_ratio_BR, mask_BR),
    }
    return weights_BR, {f"staleness/{name}": x for name, x in metrics.items()}


def weighted(advantages_BR: Float[Array, "B R"], rollout: Rollout) -> Float[Array, "B R"]:
    """Advantages times the importance weights of a rollout that has any."""
    weights_BR = rollout.importance_weights
    return advantages_BR if weights_BR is None else advantages_BR * weights_BR


def sequence_weighted(advantages_B: Float[Array, " B"], rollout: Rollout) -> Float[Array, " B"]:
    """The same for one ratio a sequence: times the geometric mean of the weights of its tokens."""
    weights_BR, mask_BR = rollout.importance_weights, rollout.response
    if weights_BR is None:
        return advantages_B
    return advantages_B * jnp.exp(masked_means(jnp.log(jnp.where(mask_BR, weights_BR, 1.0)), mask_BR))
