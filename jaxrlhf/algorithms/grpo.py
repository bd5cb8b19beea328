"""GRPO: PPO with the other responses to a prompt in place of a critic; and Dr. GRPO.

Letters: B sequences, R response columns.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrlhf.algorithms.group import group_advantages, group_batch, group_metrics, on_tokens, require_group
from jaxrlhf.algorithms.kl import KLPenalty
from jaxrlhf.algorithms.policy import PolicyBatch, PolicyConfig, PolicyState, PolicyUpdate, ppo_policy_loss, rewarded
from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class GRPOConfig(PolicyConfig):
    """Settings of GRPO.

    >>> GRPOConfig(sampling=Sampling(num_samples=16), normalize_std=False).kl.estimator
    'k3'
    """

    sampling: Sampling = Sampling(num_samples=8)
    """`num_samples` is the size of a group."""
    kl: KLPenalty = KLPenalty(estimator="k3", placement="loss", coef=0.04)
    normalize_std: bool = True
    """Divide advantages by the standard deviation of their group. Without, easy and hard prompts count alike."""
    actor_update: PolicyUpdate = PolicyUpdate(aggregation="sequence")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_group(self.sampling)


def grpo_step(
    roles: Any, state: PolicyState, prompts: Prompts, config: GRPOConfig
) -> tuple[dict[str, Any], PolicyState]:
    """One step of GRPO, on `batch_size` prompts and `num_samples` responses to each.

    Reference:
        Shao et al. 2024, arXiv:2402.03300, algorithm 1.
    """
    rollout = roles.actor.generate(prompts, config.sampling)
    reference = roles.reference.logprobs(rollout)
    scores = roles.reward.scores(rollout)
    groups_of = config.groups_of(config.sampling.num_samples)
    batch, state, metrics = compute(grpo_batch, rollout, reference, scores, state, config, groups_of=groups_of)
    return {"rollout": metrics, "actor": roles.actor.train(ppo_policy_loss, batch, config.actor_update)}, state


def grpo_batch(
    rollout: Rollout,
    reference_BR: Float[Array, "B R"],
    scores_B: Float[Array, " B"],
    state: PolicyState,
    config: GRPOConfig,
) -> PolicyBatch:
    """From what the roles said about a rollout to what the actor trains on.

        A_{i,t} = (r_i - mean(r)) / std(r)    for all tokens t of response i, over its group

    The reward r_i of a response is the sum of those of its tokens: its score, less the KL penalty where that is placed
    in the reward.
    """
    mask_BR, num_samples = rollout.response, config.sampling.num_samples
    rewards_BR, batch, state, metrics = rewarded(rollout, reference_BR, scores_B, state, config)
    advantages_B = group_advantages(
        jnp.sum(rewards_BR, axis=1), num_samples=num_samples, normalize_std=config.normalize_std
    )
    batch["advantages"] = on_tokens(advantages_B, mask_BR)
    metrics |= group_metrics(scores_B, batch["advantages"], mask_BR, num_samples=num_samples)
    return batch, state, metrics


@dataclasses.dataclass(frozen=True)
class DrGRPOConfig:
    """Settings of Dr. GRPO: GRPO without its two biases, and without a reference.

    Dividing by the standard deviation of a group weighs prompts that are nearly always or never solved more than
    others; dividing by the length of a response makes long wrong ones cheap. Here advantages are plain differences, and
    the sum over tokens is divided by a constant.

    >>> DrGRPOConfig(sampling=Sampling(num_samples=16)).actor_update.aggregation
    'constant'
    """

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
    batch, metrics = compute(dr_grpo_batch, rollout, scores, config, groups_of=config.sampling.num_samples)
    return {"rollout": metrics, "actor": roles.actor.train(ppo_policy_loss, batch, config.actor_update)}, state


def dr_grpo_batch(
    rollout: Rollout, scores_B: Float[Array, " B"], config: DrGRPOConfig
) -> tuple[dict[str, Any], dict[str, Float[Array, ""]]]:
    """The training batch and metrics.

    A_{i,t} = r_i - mean(r)    for all tokens t of response i, over its group
    """
    return group_batch(rollout, scores_B, num_samples=config.sampling.num_samples, normalize_std=False)
