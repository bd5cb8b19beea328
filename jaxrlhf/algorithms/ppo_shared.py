"""PPO with actor and critic on one trunk: two heads, one train call with both losses.

Letters: B sequences, R response columns.

The role `critic` shares the weights of the actor (`roles.critic.shares: actor`) and has no optimizer of its own. That
halves the memory of trained models, and one backward pass serves both; the two losses meet in the trunk, so their
relative weight, `value_coef`, matters here, which it does not between two models.
"""

import dataclasses
from typing import Any

from jaxrlhf.algorithms.losses import Loss, clipped_value_loss
from jaxrlhf.algorithms.policy import PolicyState, PolicyUpdate, ppo_policy_loss
from jaxrlhf.algorithms.ppo import ActorCriticConfig, ppo_batch
from jaxrlhf.experience import PolicyAndValues, PolicyOutputs, Prompts
from jaxrlhf.require import require_positive
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class SharedUpdate(PolicyUpdate):
    """Settings of the updates of both heads on one rollout."""

    value_clip: float | None = 0.2
    """Clip range of the value in the loss, around the value at the time of the rollout. None does not clip."""
    value_coef: float = 0.1
    """Weight of the critic's loss beside the actor's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_clip is not None:
            require_positive(self.value_clip, "actor_update.value_clip")
        require_positive(self.value_coef, "actor_update.value_coef")


@dataclasses.dataclass(frozen=True)
class PPOSharedConfig(ActorCriticConfig):
    """Settings of PPO on one trunk.

    >>> PPOSharedConfig(gae_lambda=0.9).gae_lambda
    0.9
    """

    actor_update: SharedUpdate = SharedUpdate()


def ppo_shared_step(
    roles: Any, state: PolicyState, prompts: Prompts, config: PPOSharedConfig
) -> tuple[dict[str, Any], PolicyState]:
    """One step of PPO on one trunk.

    Reference:
        Schulman et al. 2017, arXiv:1707.06347, eq. 9, for two losses on one model; AC-Share of FlexRLHF.
    """
    rollout = roles.actor.generate(prompts, config.sampling)
    reference = roles.reference.logprobs(rollout)
    values = roles.critic.values(rollout)
    scores = roles.reward.scores(rollout)
    given = (rollout, reference, values, scores, state, config)
    batch, state, metrics = compute(ppo_batch, *given, groups_of=config.groups_of())
    return {"rollout": metrics, "actor": roles.actor.train(ppo_shared_loss, batch, config.actor_update)}, state


def ppo_shared_loss(outputs: PolicyAndValues | PolicyOutputs, batch: dict[str, Any], update: SharedUpdate) -> Loss:
    """The actor's loss plus the critic's, on the outputs of both heads.

        loss = policy_loss + value_coef * value_loss

    Metrics: those of `ppo_policy_loss` and `clipped_value_loss`. Raises ValueError if the critic is a model of its own.
    """
    if not isinstance(outputs, PolicyAndValues):
        raise ValueError(
            "ppo_shared: the critic must be a head on the actor's trunk. Got a critic that is a model of its own. "
            "Write roles.critic: {shares: actor}, or take ppo."
        )
    policy = PolicyOutputs(logprobs=outputs.logprobs, entropy=outputs.entropy)
    policy_loss, weight, policy_metrics = ppo_policy_loss(policy, batch, update)
    critic_loss, _, value_metrics = clipped_value_loss(
        outputs.values,
        batch["values"],
        batch["returns"],
        batch["sequences"].response,
        value_clip=update.value_clip,
        coef=update.value_coef,
        aggregation=update.aggregation,
    )
    return policy_loss + critic_loss, weight, {**policy_metrics, **value_metrics}
