"""PPO: the step, its settings, the batch that it trains on, the critic's loss.

The parts shared with algorithms without a critic, such as the actor's loss, are in `policy`.

Letters: B sequences, R response columns.
"""

import dataclasses
from typing import Any

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrlhf.algorithms.losses import Loss, clipped_value_loss
from jaxrlhf.algorithms.masked import masked_mean, masked_variance, whiten
from jaxrlhf.algorithms.policy import PolicyBatch, PolicyConfig, PolicyState, PolicyUpdate, ppo_policy_loss, rewarded
from jaxrlhf.algorithms.reported import masked_summary
from jaxrlhf.algorithms.returns import gae
from jaxrlhf.experience import Prompts, Rollout
from jaxrlhf.require import require_fraction, require_passes, require_positive
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class ValueUpdate:
    """Settings of the critic's updates on one rollout.

    >>> ValueUpdate(mini_batches=4, value_clip=0.5).epochs
    1
    """

    mini_batches: int = 4
    epochs: int = 1
    value_clip: float | None = 0.2
    """Clip range of the value in the loss, around the value at the time of the rollout. None does not clip."""
    coef: float = 0.5

    def __post_init__(self) -> None:
        require_passes(self.mini_batches, self.epochs, "critic_update")
        if self.value_clip is not None:
            require_positive(self.value_clip, "critic_update.value_clip")
        require_positive(self.coef, "critic_update.coef")


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig(PolicyConfig):
    """Settings of advantage estimation with a critic, and of the rewards."""

    discount: float = 1.0
    gae_lambda: float = 0.95
    whiten_advantages: bool = True
    """Whiten over the whole batch, before it is split into mini-batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self.discount, "discount")
        require_fraction(self.gae_lambda, "gae_lambda")

    def groups_of(self, size: int = 1) -> int | str:
        return "whiten_advantages" if self.whiten_advantages else super().groups_of(size)


@dataclasses.dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Settings of PPO.

    >>> PPOConfig(gae_lambda=0.9, actor_update=PolicyUpdate(mini_batches=8)).actor_update.mini_batches
    8
    """

    actor_update: PolicyUpdate = PolicyUpdate()
    critic_update: ValueUpdate = ValueUpdate()


def ppo_step(roles: Any, state: PolicyState, prompts: Prompts, config: PPOConfig) -> tuple[dict[str, Any], PolicyState]:
    """One step of PPO.

    Reference:
        Schulman et al. 2017, arXiv:1707.06347; for language models, Ouyang et al. 2022, arXiv:2203.02155.
    """
    rollout = roles.actor.generate(prompts, config.sampling)
    reference = roles.reference.logprobs(rollout)
    values = roles.critic.values(rollout)
    scores = roles.reward.scores(rollout)
    given = (rollout, reference, values, scores, state, config)
    batch, state, metrics = compute(ppo_batch, *given, groups_of=config.groups_of())
    results = {
        "rollout": metrics,
        "actor": roles.actor.train(ppo_policy_loss, batch, config.actor_update),
        "critic": roles.critic.train(value_loss, batch, config.critic_update),
    }
    return results, state


def ppo_batch(
    rollout: Rollout,
    reference_BR: Float[Array, "B R"],
    values_BR: Float[Array, "B R"],
    scores_B: Float[Array, " B"],
    state: PolicyState,
    config: ActorCriticConfig,
) -> PolicyBatch:
    """The training batch of actor and critic, from the roles' outputs on a rollout.

    Beside the entries of `PolicyBatch` it has `returns` and `values`.
    """
    chex.assert_rank([reference_BR, values_BR, scores_B], [2, 2, 1])
    mask_BR = rollout.response
    rewards_BR, batch, state, metrics = rewarded(rollout, reference_BR, scores_B, state, config)
    values_BR = jnp.where(mask_BR, values_BR, 0.0)
    raw_advantages_BR, returns_BR = gae(
        rewards_BR, values_BR, mask_BR, discount=config.discount, gae_lambda=config.gae_lambda
    )
    advantages_BR = whiten(raw_advantages_BR, mask_BR) if config.whiten_advantages else raw_advantages_BR
    batch |= {"advantages": advantages_BR, "returns": returns_BR, "values": values_BR}
    metrics |= advantage_metrics(advantages_BR, raw_advantages_BR, mask_BR)
    metrics |= value_metrics("critic", values_BR, returns_BR, mask_BR)
    return batch, state, metrics


def advantage_metrics(
    advantages_BR: Float[Array, "B R"], raw_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"]
) -> dict[str, Float[Array, ""]]:
    """Summary of the advantages, and their mean and standard deviation before whitening."""
    return {
        **masked_summary("critic/advantages", advantages_BR, mask_BR),
        "critic/advantages/raw_mean": masked_mean(raw_BR, mask_BR),
        "critic/advantages/raw_std": jnp.sqrt(masked_variance(raw_BR, mask_BR)),
    }


def value_metrics(
    critic: str, values_BR: Float[Array, "B R"], returns_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"]
) -> dict[str, Float[Array, ""]]:
    """Summaries of a critic's returns and values, as `<critic>/values/mean` and so on, and its explained variance."""
    return {
        **masked_summary(f"{critic}/returns", returns_BR, mask_BR),
        **masked_summary(f"{critic}/values", values_BR, mask_BR),
        f"{critic}/vf_explained_var": explained_variance(values_BR, returns_BR, mask_BR),
    }


def explained_variance(
    values_BR: Float[Array, "B R"], returns_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"]
) -> Float[Array, ""]:
    """Fraction of the returns' variance that the values explain: 1 - variance(returns - values) / variance(returns).

    Zero where the returns do not vary.
    """
    total = masked_variance(returns_BR, mask_BR)
    varies = total > 0
    unexplained = masked_variance(returns_BR - values_BR, mask_BR) / jnp.where(varies, total, 1.0)
    return jnp.where(varies, 1.0 - unexplained, 0.0)


def value_loss(outputs_BR: Float[Array, "B R"], batch: dict[str, Any], update: ValueUpdate) -> Loss:
    """The critic's loss. Metrics: those of `clipped_value_loss`.

    >>> tokens_BT, both_BR = jnp.ones((1, 3), jnp.int32), jnp.ones((1, 2), bool)
    >>> batch = {
    ...     "sequences": Sequences(tokens_BT, tokens_BT > 0, both_BR),
    ...     "values": jnp.zeros((1, 2)), "returns": jnp.array([[1.0, 1.0]]),
    ... }
    >>> loss, tokens, _ = value_loss(jnp.zeros((1, 2)), batch, ValueUpdate())
    >>> float(loss), float(tokens)
    (1.0, 2.0)
    """
    return clipped_value_loss(
        outputs_BR,
        batch["values"],
        batch["returns"],
        batch["sequences"].response,
        value_clip=update.value_clip,
        coef=update.coef,
    )
