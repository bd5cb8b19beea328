"""Groups of responses to one prompt, each compared with the others.

Letters: B sequences, R response columns, G = B / num_samples groups. Responses of a group are neighbours: sequence i
belongs to group i // num_samples.
"""

from typing import Any

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrlhf.algorithms.reported import masked_summary, rollout_metrics, score_metrics
from jaxrlhf.experience import Rollout, Sampling
from jaxrlhf.require import require

STD_FLOOR = 1e-6
"""Added to a standard deviation before dividing by it."""


def require_group(sampling: Sampling) -> None:
    """Checks that the settings of an algorithm with groups draw at least two samples per prompt."""
    rule = "must be at least 2, since a response is judged beside others to its prompt"
    require(sampling.num_samples >= 2, "sampling.num_samples", rule, sampling.num_samples)


def in_groups(x_B: Float[Array, " B"], num_samples: int) -> Float[Array, "G N"]:
    """Reshapes to one row per group."""
    chex.assert_rank(x_B, 1)
    return x_B.reshape(-1, num_samples)


def group_mean(x_B: Float[Array, " B"], *, num_samples: int) -> Float[Array, " B"]:
    """For each response, the mean of its group."""
    return jnp.repeat(jnp.mean(in_groups(x_B, num_samples), axis=1), num_samples)


def group_advantages(rewards_B: Float[Array, " B"], *, num_samples: int, normalize_std: bool) -> Float[Array, " B"]:
    """Advantages of responses over the mean of their group.

        A_i = r_i - mean(r)                       or, with `normalize_std`,
        A_i = (r_i - mean(r)) / (std(r) + 1e-6)

    Mean and standard deviation (divided by n - 1) are those of the responses to one prompt. Where all rewards are
    equal, advantages are exactly zero: rounding errors of the differences are not scaled up.

    Reference:
        Shao et al. 2024, arXiv:2402.03300, section 4.1.2; without the division, Liu et al. 2025, arXiv:2503.20783.

    >>> group_advantages(jnp.array([0.0, 1.0, 5.0, 5.0]), num_samples=2, normalize_std=False).tolist()
    [-0.5, 0.5, 0.0, 0.0]
    """
    advantages_B = rewards_B - group_mean(rewards_B, num_samples=num_samples)
    if not normalize_std:
        return advantages_B
    std_G = jnp.std(in_groups(rewards_B, num_samples), axis=1, ddof=1)
    scale_G = jnp.where(differing(rewards_B, num_samples=num_samples), 1.0 / (std_G + STD_FLOOR), 0.0)
    return advantages_B * jnp.repeat(scale_G, num_samples)


def leave_one_out(rewards_B: Float[Array, " B"], *, num_samples: int) -> Float[Array, " B"]:
    """Advantages of responses over the mean of the others in their group.

        A_i = r_i - (sum_{j != i} r_j) / (n - 1)  =  (r_i - mean(r)) * n / (n - 1)

    Reference:
        Ahmadian et al. 2024, arXiv:2402.14740.

    >>> leave_one_out(jnp.array([0.0, 1.0, 5.0, 5.0]), num_samples=2).tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    scale = num_samples / (num_samples - 1)
    return scale * (rewards_B - group_mean(rewards_B, num_samples=num_samples))


def differing(scores_B: Float[Array, " B"], *, num_samples: int) -> Bool[Array, " G"]:
    """Groups whose scores are not all equal. The others have no advantages: nothing can be learned from them."""
    scores_GN = in_groups(scores_B, num_samples)
    return jnp.max(scores_GN, axis=1) > jnp.min(scores_GN, axis=1)


def on_tokens(x_B: Float[Array, " B"], mask_BR: Bool[Array, "B R"]) -> Float[Array, "B R"]:
    """One number per sequence, repeated at each of its response tokens; zero elsewhere."""
    return jnp.where(mask_BR, x_B[:, None], 0.0)


def group_metrics(
    scores_B: Float[Array, " B"], advantages_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"], *, num_samples: int
) -> dict[str, Float[Array, ""]]:
    """Mean standard deviation of a group's scores, fraction of groups whose scores differ, and the advantages."""
    return {
        "group/score_std": jnp.mean(jnp.std(in_groups(scores_B, num_samples), axis=1, ddof=1)),
        "group/differing": jnp.mean(differing(scores_B, num_samples=num_samples), dtype=jnp.float32),
        **masked_summary("critic/advantages", advantages_BR, mask_BR),
    }


def group_batch(
    rollout: Rollout, scores_B: Float[Array, " B"], *, num_samples: int, normalize_std: bool
) -> tuple[dict[str, Any], dict[str, Float[Array, ""]]]:
    """The training batch (`sequences`, `advantages`) with scores as rewards and without a reference; metrics."""
    mask_BR = rollout.response
    advantages_B = group_advantages(scores_B, num_samples=num_samples, normalize_std=normalize_std)
    batch = {"sequences": rollout, "advantages": on_tokens(advantages_B, mask_BR)}
    metrics = {
        **score_metrics(scores_B),
        **group_metrics(scores_B, batch["advantages"], mask_BR, num_samples=num_samples),
        **rollout_metrics(rollout),
    }
    return batch, metrics
