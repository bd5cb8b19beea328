"""PPO-ptx: PPO whose actor also trains on demonstrations or pretraining text.

Letters: B sequences, R response columns.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrlhf.algorithms.algorithm import Rows
from jaxrlhf.algorithms.policy import PolicyState, ppo_policy_loss
from jaxrlhf.algorithms.ppo import PPOConfig, ppo_batch, value_loss
from jaxrlhf.algorithms.sft import sft_loss
from jaxrlhf.experience import Sequences, Term
from jaxrlhf.require import require, require_not_negative
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class PretrainingMix:
    """Settings of the supervised loss that is added to the actor's."""

    coef: float = 1.0
    """Weight of the mean negative log-likelihood per token, relative to the policy loss, a mean over tokens too."""
    batch_size: int = 0
    """Rows of each step; 0 means as many as prompts."""
    max_new_tokens: int = 128
    """Columns of a completion."""

    def __post_init__(self) -> None:
        require_not_negative(self.coef, "pretraining.coef")
        require(self.batch_size >= 0, "pretraining.batch_size", "must not be negative", self.batch_size)
        require(self.max_new_tokens >= 1, "pretraining.max_new_tokens", "must be at least 1", self.max_new_tokens)

    def term(self, demonstrations: Sequences) -> Term:
        """The loss on demonstrations, to be added to the actor's."""
        return Term(sft_loss, {"sequences": demonstrations}, weight=self.coef, name="pretraining")


@dataclasses.dataclass(frozen=True)
class PPOPtxConfig(PPOConfig):
    """Settings of PPO-ptx: PPO's, and those of the supervised loss.

    >>> PPOPtxConfig(pretraining=PretrainingMix(batch_size=64)).pretraining.batch_size
    64
    """

    pretraining: PretrainingMix = PretrainingMix()


def prompts_and_pretraining(config: Any) -> Mapping[str, Rows]:
    """The rows of a step: prompts, and demonstrations of the dataset `pretraining`, or of the main one without it."""
    mix: PretrainingMix = config.pretraining
    rows = Rows("demonstrations", max_new_tokens=mix.max_new_tokens, count=mix.batch_size, dataset="pretraining")
    return {"prompts": Rows("prompts"), "pretraining": rows}


def ppo_ptx_step(
    roles: Any, state: PolicyState, data: dict[str, Any], config: PPOPtxConfig
) -> tuple[dict[str, Any], PolicyState]:
    """One step of PPO-ptx.

        loss = PPO's policy loss - coef * mean over tokens of log pi(demonstration)

    Reference:
        Ouyang et al. 2022, arXiv:2203.02155, eq. 2.
    """
    rollout = roles.actor.generate(data["prompts"], config.sampling)
    reference = roles.reference.logprobs(rollout)
    values = roles.critic.values(rollout)
    scores = roles.reward.scores(rollout)
    given = (rollout, reference, values, scores, state, config)
    batch, state, metrics = compute(ppo_batch, *given, groups_of=config.groups_of())
    losses = (Term(ppo_policy_loss, batch), config.pretraining.term(data["pretraining"]))
    results = {
        "rollout": metrics,
        "actor": roles.actor.train(losses, config.actor_update),
        "critic": roles.critic.train(value_loss, batch, config.critic_update),
    }
    return results, state
