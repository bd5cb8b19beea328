"""REINFORCE++: PPO's clipping and KL penalty on plain returns, normalized over the whole batch; no critic, no group.

Letters: B sequences, R response columns.
"""

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxrlhf.algorithms.group import require_group
from jaxrlhf.algorithms.masked import whiten
from jaxrlhf.algorithms.policy import PolicyBatch, PolicyConfig, PolicyState, PolicyUpdate, ppo_policy_loss, rewarded
from jaxrlhf.algorithms.ppo import advantage_metrics
from jaxrlhf.algorithms.returns import discounted_sum
from jaxrlhf.experience import Prompts, Rollout
from jaxrlhf.require import require_fraction
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class ReinforcePlusPlusConfig(PolicyConfig):
    """Settings of REINFORCE++.

    >>> ReinforcePlusPlusConfig(discount=0.99).group_baseline
    False
    """

    discount: float = 1.0
    group_baseline: bool = False
    """REINFORCE++-baseline: scores are taken less the mean of the responses to the same prompt. Needs several."""
    actor_update: PolicyUpdate = PolicyUpdate()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self.discount, "discount")
        if self.group_baseline:
            require_group(self.sampling)


def reinforce_plus_plus_step(
    roles: Any, state: PolicyState, prompts: Prompts, config: ReinforcePlusPlusConfig
) -> tuple[dict[str, Any], PolicyState]:
    """One step of REINFORCE++.

    Reference:
        Hu 2025, arXiv:2501.03262.
    """
    rollout = roles.actor.generate(prompts, config.sampling)
    reference = roles.reference.logprobs(rollout)
    scores = roles.reward.scores(rollout)
    given = (rollout, reference, scores, state, config)
    batch, state, metrics = compute(reinforce_plus_plus_batch, *given, groups_of="its whitened advantages")
    return {"rollout": metrics, "actor": roles.actor.train(ppo_policy_loss, batch, config.actor_update)}, state


def reinforce_plus_plus_batch(
    rollout: Rollout,
    reference_BR: Float[Array, "B R"],
    scores_B: Float[Array, " B"],
    state: PolicyState,
    config: ReinforcePlusPlusConfig,
) -> PolicyBatch:
    """From what the roles said about a rollout to what the actor trains on.

        r_t = score * [t is the last token] - kl_coef * kl_t
        G_t = r_t + discount * G_{t+1}
        A_t = (G_t - mean(G)) / std(G)    over all tokens of the batch

    With `group_baseline`, `score` is the score less the mean of its group.
    """
    mask_BR = rollout.response
    num_samples = config.sampling.num_samples if config.group_baseline else 0
    rewards_BR, batch, state, metrics = rewarded(
        rollout, reference_BR, scores_B, state, config, less_mean_of=num_samples
    )
    returns_BR = discounted_sum(rewards_BR, mask_BR, discount=config.discount)
    batch["advantages"] = whiten(returns_BR, mask_BR)
    metrics |= advantage_metrics(batch["advantages"], returns_BR, mask_BR)
    return batch, state, metrics
