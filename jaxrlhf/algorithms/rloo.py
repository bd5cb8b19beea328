"""RLOO: REINFORCE on whole responses, with the other responses to a prompt as the baseline.

Letters: B sequences, R response columns.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrlhf.algorithms.group import group_metrics, leave_one_out, on_tokens, require_group
from jaxrlhf.algorithms.policy import (
    PolicyBatch,
    PolicyConfig,
    PolicyState,
    ReinforceUpdate,
    reinforce_policy_loss,
    rewarded,
)
from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class RLOOConfig(PolicyConfig):
    """Settings of RLOO.

    >>> RLOOConfig(sampling=Sampling(num_samples=8)).actor_update.aggregation
    'sum'
    """

    sampling: Sampling = Sampling(num_samples=4)
    """`num_samples` is the size of a group."""
    actor_update: ReinforceUpdate = ReinforceUpdate(aggregation="sum")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_group(self.sampling)


def rloo_step(
    roles: Any, state: PolicyState, prompts: Prompts, config: RLOOConfig
) -> tuple[dict[str, Any], PolicyState]:
    """One step of RLOO, on `batch_size` prompts and `num_samples` responses to each.

    Reference:
        Ahmadian et al. 2024, arXiv:2402.14740.
    """
    rollout = roles.actor.generate(prompts, config.sampling)
    reference = roles.reference.logprobs(rollout)
    scores = roles.reward.scores(rollout)
    groups_of = config.groups_of(config.sampling.num_samples)
    batch, state, metrics = compute(rloo_batch, rollout, reference, scores, state, config, groups_of=groups_of)
    return {"rollout": metrics, "actor": roles.actor.train(reinforce_policy_loss, batch, config.actor_update)}, state


def rloo_batch(
    rollout: Rollout,
    reference_BR: Float[Array, "B R"],
    scores_B: Float[Array, " B"],
    state: PolicyState,
    config: RLOOConfig,
) -> PolicyBatch:
    """From what the roles said about a rollout to what the actor trains on.

        r_i = score_i - kl_coef * sum_t kl_{i,t}
        A_i = r_i - (sum_{j != i} r_j) / (n - 1)

    A response is one action: its KL is part of its reward, all its tokens have its advantage.
    """
    mask_BR, num_samples = rollout.response, config.sampling.num_samples
    rewards_BR, batch, state, metrics = rewarded(rollout, reference_BR, scores_B, state, config)
    advantages_B = leave_one_out(jnp.sum(rewards_BR, axis=1), num_samples=num_samples)
    batch["advantages"] = on_tokens(advantages_B, mask_BR)
    metrics |= group_metrics(scores_B, batch["advantages"], mask_BR, num_samples=num_samples)
    return batch, state, metrics
