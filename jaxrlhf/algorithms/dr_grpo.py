"""Dr. GRPO: GRPO without its two biases, and without a reference.

Letters: B sequences, R response columns.

Dividing by the standard deviation of a group weighs prompts that are nearly always or never solved more than others;
dividing by the length of a response makes long wrong ones cheap. Here advantages are plain differences, and the sum
over tokens is divided by a constant.
"""

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxrlhf.algorithms.group import group_batch, require_group
from jaxrlhf.algorithms.policy import PolicyUpdate, ppo_policy_loss
from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class DrGRPOConfig:
    """Settings of Dr. GRPO."""

    sampling: Sampling = Sampling(num_samples=8)
    """`num_samples` is the size of a group."""
    actor_update: PolicyUpdate = PolicyUpdate(aggregation="constant")

    def __post_init__(self) -> None:
        require_group(self.sampling)


def dr_grpo_step(
    roles: Any, state: tuple[()], prompts: Prompts, config: DrGRPOConfig
) -> tuple[dict[str, Any], tuple[()]]:
    """One step of Dr. GRPO, on `batch_size` prompts and `num_samples` responses to each.

    Reference:
        Liu et al. 2025, arXiv:2503.20783.
    """
    rollout = roles.actor.generate(prompts, config.sampling)
    scores = roles.reward.scores(rollout)
    batch, metrics = compute(dr_grpo_batch, rollout, scores, config)
    return {"rollout": metrics, "actor": roles.actor.train(ppo_policy_loss, batch, config.actor_update)}, state


def dr_grpo_batch(
    rollout: Rollout, scores_B: Float[Array, " B"], config: DrGRPOConfig
) -> tuple[dict[str, Any], dict[str, Float[Array, ""]]]:
    """The training batch and metrics.

    A_{i,t} = r_i - mean(r)    for all tokens t of response i, over its group
    """
    return group_batch(rollout, scores_B, num_samples=config.sampling.num_samples, normalize_std=False)
