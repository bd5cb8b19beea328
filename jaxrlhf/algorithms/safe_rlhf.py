"""Safe RLHF: PPO that maximizes reward while a Lagrange multiplier holds the mean cost at a budget.

Letters: B sequences, R response columns.

Beside `reward` and `critic` there are the roles `cost`, which scores the harm of a response, and `cost_critic`, which
learns to predict it.
"""

import dataclasses
import math
from typing import Any

import chex
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxrlhf.algorithms.masked import whiten
from jaxrlhf.algorithms.policy import PolicyState, policy_state, ppo_policy_loss, rewarded, token_kl
from jaxrlhf.algorithms.ppo import PPOConfig, advantage_metrics, value_loss, value_metrics
from jaxrlhf.algorithms.ppo_ptx import PretrainingMix
from jaxrlhf.algorithms.reported import summary
from jaxrlhf.algorithms.returns import gae
from jaxrlhf.algorithms.token_rewards import token_rewards
from jaxrlhf.experience import Rollout, Term
from jaxrlhf.require import require, require_positive
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class SafeRLHFConfig(PPOConfig):
    """Settings of Safe RLHF: those of PPO-ptx, and of the multiplier.

    >>> SafeRLHFConfig(cost_budget=0.2).initial_lambda
    1.0
    """

    pretraining: PretrainingMix = PretrainingMix()
    cost_budget: float = 0.0
    """The allowed mean cost of a response."""
    initial_lambda: float = 1.0
    lambda_rate: float = 0.1
    """Learning rate of the logarithm of the multiplier; see `ascend`."""
    max_lambda: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(math.isfinite(self.cost_budget), "cost_budget", "must be finite", self.cost_budget)
        require_positive(self.max_lambda, "max_lambda")
        require_positive(self.lambda_rate, "lambda_rate")
        first, most, remedy = self.initial_lambda, self.max_lambda, "It is moved by factors, so it never leaves zero."
        require(0 < first <= most, "initial_lambda", f"must be positive and at most max_lambda={most}", first, remedy)


class SafeRLHFState(struct.PyTreeNode):
    """The state of Safe RLHF that is carried from step to step."""

    policy: PolicyState
    log_lambda: Float[Array, ""]


def safe_rlhf_state(config: SafeRLHFConfig) -> SafeRLHFState:
    """The state before the first step."""
    log_lambda = jnp.full((), math.log(config.initial_lambda), jnp.float32)
    return SafeRLHFState(policy=policy_state(config), log_lambda=log_lambda)


def safe_rlhf_step(
    roles: Any, state: SafeRLHFState, data: dict[str, Any], config: SafeRLHFConfig
) -> tuple[dict[str, Any], SafeRLHFState]:
    """One step of Safe RLHF.

    Reference:
        Dai et al. 2023, arXiv:2310.12773, section 3.3 and appendix B.
    """
    rollout = roles.actor.generate(data["prompts"], config.sampling)
    reference = roles.reference.logprobs(rollout)
    values = roles.critic.values(rollout), roles.cost_critic.values(rollout)
    scores = roles.reward.scores(rollout), roles.cost.scores(rollout)
    given = (rollout, reference, values, scores, state, config)
    batch, costs, state, metrics = compute(safe_rlhf_batch, *given, groups_of=config.groups_of())
    losses = (Term(ppo_policy_loss, batch), config.pretraining.term(data["pretraining"]))
    results = {
        "rollout": metrics,
        "actor": roles.actor.train(losses, config.actor_update),
        "critic": roles.critic.train(value_loss, batch, config.critic_update),
        "cost_critic": roles.cost_critic.train(value_loss, costs, config.critic_update),
    }
    return results, state


def safe_rlhf_batch(
    rollout: Rollout,
    reference_BR: Float[Array, "B R"],
    values: tuple[Float[Array, "B R"], Float[Array, "B R"]],
    scores: tuple[Float[Array, " B"], Float[Array, " B"]],
    state: SafeRLHFState,
    config: SafeRLHFConfig,
) -> tuple[dict[str, Any], dict[str, Any], SafeRLHFState, dict[str, Float[Array, ""]]]:
    """The training batches of the actor and both critics, from the roles' outputs on a rollout.

        r_t = reward * [t is last] - kl_coef / 2 * kl_t        A_r, by GAE with the critic's values
        c_t = cost   * [t is last] + kl_coef / 2 * kl_t        A_c, by GAE with the cost critic's
        A   = (A_r - lambda * A_c) / (1 + lambda)

    So the KL is weighted by half its coefficient, whatever lambda is. Only rewards are shaped and normalized; costs
    stay as the role returns them, in the unit of the budget.

    Args:
        values: From the critic and from the cost critic.
        scores: From the reward and from the cost.

    Returns:
        The batch of actor and critic, as in PPO; that of the cost critic; the next state; metrics.

    Reference:
        Dai et al. 2023, arXiv:2310.12773, appendix B; the halves of the KL, also the authors' trainer.
    """
    mask_BR = rollout.response
    scores_B, costs_B = scores
    critic_BR, cost_critic_BR = (jnp.where(mask_BR, x_BR, 0.0) for x_BR in values)
    rewards_BR, batch, policy, metrics = rewarded(rollout, reference_BR, scores_B, state.policy, config, kl_share=0.5)
    penalty_BR = token_kl(rollout, reference_BR, config.kl)
    charged_BR = token_rewards(costs_B, penalty_BR, mask_BR, kl_coef=-0.5 * state.policy.kl_coef)
    rates = {"discount": config.discount, "gae_lambda": config.gae_lambda}
    gains_BR, returns_BR = gae(rewards_BR, critic_BR, mask_BR, **rates)
    harms_BR, cost_returns_BR = gae(charged_BR, cost_critic_BR, mask_BR, **rates)

    raw_BR = lagrangian(gains_BR, harms_BR, state.log_lambda)
    advantages_BR = whiten(raw_BR, mask_BR) if config.whiten_advantages else raw_BR
    batch |= {"advantages": advantages_BR, "returns": returns_BR, "values": critic_BR}
    costs = {"sequences": rollout, "returns": cost_returns_BR, "values": cost_critic_BR}
    log_lambda = ascend(state.log_lambda, jnp.mean(costs_B), config)
    metrics |= {
        **advantage_metrics(advantages_BR, raw_BR, mask_BR),
        **value_metrics("critic", critic_BR, returns_BR, mask_BR),
        **value_metrics("cost_critic", cost_critic_BR, cost_returns_BR, mask_BR),
        **summary("cost", costs_B),
        "cost/lambda": jnp.exp(state.log_lambda),
    }
    return batch, costs, SafeRLHFState(policy=policy, log_lambda=log_lambda), metrics


def lagrangian(
    gains_BR: Float[Array, "B R"], harms_BR: Float[Array, "B R"], log_lambda: Float[Array, ""]
) -> Float[Array, "B R"]:
    """Combines the advantages of reward and cost.

        (A_r - lambda * A_c) / (1 + lambda)

    The division keeps their scale as lambda grows.

    Reference:
        Dai et al. 2023, arXiv:2310.12773, appendix B.
    """
    chex.assert_equal_shape([gains_BR, harms_BR])
    multiplier = jnp.exp(log_lambda)
    return (gains_BR - multiplier * harms_BR) / (1.0 + multiplier)


def ascend(log_lambda: Float[Array, ""], mean_cost: Float[Array, ""], config: SafeRLHFConfig) -> Float[Array, ""]:
    """The logarithm of the next multiplier: it grows while the mean cost is above the budget.

        log lambda' = min(log lambda + lambda_rate * lambda * (mean_cost - cost_budget), log max_lambda)

    A step of gradient ascent on lambda * (mean_cost - cost_budget) in the logarithm, so that lambda stays positive.

    Reference:
        Dai et al. 2023, arXiv:2310.12773, section 3.3.
    """
    chex.assert_rank([log_lambda, mean_cost], 0)
    moved = log_lambda + config.lambda_rate * jnp.exp(log_lambda) * (mean_cost - config.cost_budget)
    return jnp.minimum(moved, math.log(config.max_lambda))
