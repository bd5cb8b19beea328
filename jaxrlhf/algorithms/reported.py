"""Metrics that many algorithms report of their rollouts, under verl's names.

Letters: B sequences, T = P + R columns, R response columns.
"""

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrlhf.algorithms.masked import masked_mean
from jaxrlhf.experience import STOP, Rollout


def summary(name: str, x_B: Float[Array, " B"]) -> dict[str, Float[Array, ""]]:
    """Mean, maximum and minimum of one number per sequence, as `<name>/mean` and so on.

    >>> {name: float(x) for name, x in summary("length", jnp.array([1.0, 3.0])).items()}
    {'length/mean': 2.0, 'length/max': 3.0, 'length/min': 1.0}
    """
    chex.assert_rank(x_B, 1)
    return {f"{name}/mean": jnp.mean(x_B), f"{name}/max": jnp.max(x_B), f"{name}/min": jnp.min(x_B)}


def score_metrics(scores_B: Float[Array, " B"]) -> dict[str, Float[Array, ""]]:
    """Mean, maximum, minimum and standard deviation of the scores, as the reward gave them.

    >>> float(score_metrics(jnp.array([1.0, 3.0]))["critic/score/std"])
    1.0
    """
    return {**summary("critic/score", scores_B), "critic/score/std": jnp.std(scores_B)}


def masked_summary(name: str, x_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"]) -> dict[str, Float[Array, ""]]:
    """Mean, maximum and minimum over unmasked tokens; all zero if there are none."""
    chex.assert_rank([x_BR, mask_BR], 2)
    chex.assert_equal_shape([x_BR, mask_BR])
    any_counts = jnp.any(mask_BR)
    largest = jnp.max(jnp.where(mask_BR, x_BR, -jnp.inf))
    least = jnp.min(jnp.where(mask_BR, x_BR, jnp.inf))
    return {
        f"{name}/mean": masked_mean(x_BR, mask_BR),
        f"{name}/max": jnp.where(any_counts, largest, 0.0),
        f"{name}/min": jnp.where(any_counts, least, 0.0),
    }


def rollout_metrics(rollout: Rollout) -> dict[str, Float[Array, ""]]:
    """Lengths of prompts and responses, and the fractions of responses that did not stop or are empty.

    >>> tokens_BT, row_B, zeros_BR = jnp.ones((1, 3), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros((1, 2))
    >>> half_BR = jnp.array([[True, False]])
    >>> rollout = Rollout(tokens_BT, tokens_BT > 0, half_BR, zeros_BR, zeros_BR, row_B, row_B, row_B.astype(jnp.uint32))
    >>> metrics = rollout_metrics(rollout)
    >>> float(metrics["response_length/mean"]), float(metrics["prompt_length/mean"])
    (1.0, 1.0)
    """
    lengths_B = rollout.lengths.astype(jnp.float32)
    prompt_columns = rollout.mask.shape[1] - rollout.response.shape[1]
    prompt_lengths_B = jnp.sum(rollout.mask[:, :prompt_columns], axis=1, dtype=jnp.float32)
    return {
        **summary("response_length", lengths_B),
        "response_length/clip_ratio": jnp.mean(rollout.finish != STOP, dtype=jnp.float32),
        "response/aborted_ratio": jnp.mean(lengths_B == 0, dtype=jnp.float32),
        **summary("prompt_length", prompt_lengths_B),
    }
