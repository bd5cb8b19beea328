"""PPO: the step, its settings and state, the batch that it trains on, the two losses.

Letters: B sequences, R response columns.
"""

import dataclasses
from typing import Any, Literal

import chex
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxrlhf.algorithms.kl import ESTIMATORS, KLPenalty, KLTerm, adapt_kl_coef, k1
from jaxrlhf.algorithms.losses import Loss, clipped_policy_loss, clipped_value_loss, entropy_bonus, kl_loss
from jaxrlhf.algorithms.masked import masked_count, masked_mean, masked_sum, masked_variance, whiten
from jaxrlhf.algorithms.reported import masked_summary, rollout_metrics, summary
from jaxrlhf.algorithms.returns import gae
from jaxrlhf.algorithms.rewards import Moments, no_moments, shape_scores, token_rewards
from jaxrlhf.algorithms.settings import (
    require,
    require_fraction,
    require_not_negative,
    require_passes,
    require_positive,
)
from jaxrlhf.experience import PolicyOutputs, Prompts, Rollout, Sampling
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class PolicyUpdate:
    """How one rollout becomes updates of the actor."""

    mini_batches: int = 4
    """Updates in one pass over the rollout."""
    epochs: int = 1
    """Passes over the rollout."""
    clip: float = 0.2
    """How far below one the probability ratio may move, and above it unless `clip_high` says otherwise."""
    clip_high: float | None = None
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        require_passes(self.mini_batches, self.epochs, "actor_update")
        require(0 < self.clip < 1, "actor_update.clip", "must lie in (0, 1)", self.clip)
        if self.clip_high is not None:
            require_positive(self.clip_high, "actor_update.clip_high")
        require_not_negative(self.entropy_coef, "actor_update.entropy_coef")


@dataclasses.dataclass(frozen=True)
class ValueUpdate:
    """How one rollout becomes updates of the critic."""

    mini_batches: int = 4
    epochs: int = 1
    value_clip: float | None = 0.2
    """How far a value may move from the one that the rollout got; None does not clip."""
    coef: float = 0.5

    def __post_init__(self) -> None:
        require_passes(self.mini_batches, self.epochs, "critic_update")
        if self.value_clip is not None:
            require_positive(self.value_clip, "critic_update.value_clip")
        require_positive(self.coef, "critic_update.coef")


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO."""

    sampling: Sampling = Sampling()
    kl: KLPenalty = KLPenalty()
    discount: float = 1.0
    gae_lambda: float = 0.95
    whiten_advantages: bool = True
    """Over the whole batch, before it is cut into mini-batches."""
    score_clip: float | None = None
    """Scores are clipped to [-score_clip, score_clip], after the missing-stop penalty and before normalization."""
    score_normalization: Literal["none", "batch", "running"] = "none"
    """To mean zero and variance one, over the batch or over the whole run so far."""
    missing_stop_penalty: float = 0.0
    """Subtracted from the score of a response that did not end with a stop token."""
    actor_update: PolicyUpdate = PolicyUpdate()
    critic_update: ValueUpdate = ValueUpdate()

    def __post_init__(self) -> None:
        require_fraction(self.discount, "discount")
        require_fraction(self.gae_lambda, "gae_lambda")
        if self.score_clip is not None:
            require_positive(self.score_clip, "score_clip")
        require(
            self.score_normalization in ("none", "batch", "running"),
            "score_normalization",
            "must be none, batch or running",
            self.score_normalization,
        )
        require_not_negative(self.missing_stop_penalty, "missing_stop_penalty")


class PPOState(struct.PyTreeNode):
    """What a step of PPO hands to the next."""

    kl_coef: Float[Array, ""]
    scores: Moments
    """Of all scores so far, where they are normalized by running moments."""


def ppo_state(config: PPOConfig) -> PPOState:
    """The state before the first step."""
    return PPOState(kl_coef=jnp.full((), config.kl.coef, jnp.float32), scores=no_moments())


def ppo_step(roles: Any, state: PPOState, prompts: Prompts, config: PPOConfig) -> tuple[dict[str, Any], PPOState]:
    """One step of PPO.

    Reference:
        Schulman et al. 2017, arXiv:1707.06347; for language models, Ouyang et al. 2022, arXiv:2203.02155.
    """
    rollout = roles.actor.generate(prompts, config.sampling)
    reference = roles.reference.logprobs(rollout)
    values = roles.critic.values(rollout)
    scores = roles.reward.scores(rollout)
    batch, state, metrics = compute(ppo_batch, rollout, reference, values, scores, state, config)
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
    state: PPOState,
    config: PPOConfig,
) -> tuple[dict[str, Any], PPOState, dict[str, Float[Array, ""]]]:
    """From what the roles said about a rollout to what they train on.

    The KL that drives the controller and is reported is k1's, in nats, whichever estimator penalizes.

    Returns:
        The batch, every leaf with rows first: `sequences` (the rollout), `advantages`, `returns`, `values`, and `kl`
        where the loss holds the KL term. The state of the next step. Metrics.
    """
    chex.assert_rank([reference_BR, values_BR, scores_B], [2, 2, 1])
    mask_BR = rollout.response
    chex.assert_equal_shape([rollout.logprobs, reference_BR, values_BR, mask_BR])
    penalty_in_loss = config.kl.placement == "loss"

    shaped_B, moments = shape_scores(
        scores_B,
        rollout.finish,
        state.scores,
        clip=config.score_clip,
        missing_stop_penalty=config.missing_stop_penalty,
        normalization=config.score_normalization,
    )
    penalty_BR = ESTIMATORS[config.kl.estimator](rollout.logprobs, reference_BR)
    rewards_BR = token_rewards(shaped_B, penalty_BR, mask_BR, kl_coef=0.0 if penalty_in_loss else state.kl_coef)
    values_BR = jnp.where(mask_BR, values_BR, 0.0)
    advantages_BR, returns_BR = gae(
        rewards_BR, values_BR, mask_BR, discount=config.discount, gae_lambda=config.gae_lambda
    )

    raw_advantages_BR = advantages_BR
    if config.whiten_advantages:
        advantages_BR = whiten(advantages_BR, mask_BR)

    batch: dict[str, Any] = {
        "sequences": rollout,
        "advantages": advantages_BR,
        "returns": returns_BR,
        "values": values_BR,
    }
    if penalty_in_loss:
        coef_B = jnp.broadcast_to(state.kl_coef, scores_B.shape)
        batch["kl"] = KLTerm(reference=reference_BR, coef=coef_B, estimator=config.kl.estimator)

    num_sequences = mask_BR.shape[0]
    log_ratio_BR = k1(rollout.logprobs, reference_BR)
    observed_kl = masked_sum(log_ratio_BR, mask_BR) / num_sequences
    kl_coef = state.kl_coef
    if config.kl.adaptive:
        kl_coef = adapt_kl_coef(
            kl_coef, observed_kl, target=config.kl.target, horizon=config.kl.horizon, num_sequences=num_sequences
        )

    metrics = {
        **summary("critic/score", scores_B),
        "critic/score/std": jnp.std(scores_B),
        **summary("critic/rewards", jnp.sum(rewards_BR, axis=1)),
        **masked_summary("critic/advantages", advantages_BR, mask_BR),
        "critic/advantages/raw_mean": masked_mean(raw_advantages_BR, mask_BR),
        "critic/advantages/raw_std": jnp.sqrt(masked_variance(raw_advantages_BR, mask_BR)),
        **masked_summary("critic/returns", returns_BR, mask_BR),
        **masked_summary("critic/values", values_BR, mask_BR),
        "critic/vf_explained_var": explained_variance(values_BR, returns_BR, mask_BR),
        "kl/mean": observed_kl,
        "kl/per_token": masked_mean(log_ratio_BR, mask_BR),
        "kl/coef": state.kl_coef,
        **rollout_metrics(rollout),
    }
    return batch, PPOState(kl_coef=kl_coef, scores=moments), metrics


def explained_variance(
    values_BR: Float[Array, "B R"], returns_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"]
) -> Float[Array, ""]:
    """How much of the returns' variance the values account for: 1 - variance(returns - values) / variance(returns).

    Zero where the returns do not vary.
    """
    total = masked_variance(returns_BR, mask_BR)
    varies = total > 0
    unexplained = masked_variance(returns_BR - values_BR, mask_BR) / jnp.where(varies, total, 1.0)
    return jnp.where(varies, 1.0 - unexplained, 0.0)


def ppo_policy_loss(outputs: PolicyOutputs, batch: dict[str, Any], update: PolicyUpdate) -> Loss:
    """The actor's loss: clipped surrogate, minus an entropy bonus, plus the KL term where the batch has one.

    Metrics: those of `clipped_policy_loss`, `entropy_bonus` and `kl_loss`.
    """
    sequences: Rollout = batch["sequences"]
    mask_BR = sequences.response
    terms = [
        clipped_policy_loss(
            outputs.logprobs,
            sequences.logprobs,
            batch["advantages"],
            mask_BR,
            clip=update.clip,
            clip_high=update.clip_high,
        ),
        entropy_bonus(outputs.entropy, mask_BR, coef=update.entropy_coef),
    ]
    if "kl" in batch:
        kl: KLTerm = batch["kl"]
        terms.append(kl_loss(outputs.logprobs, kl.reference, kl.coef, mask_BR, estimator=kl.estimator))
    loss = sum((loss for loss, _, _ in terms), jnp.zeros(()))
    return loss, masked_count(mask_BR), {name: x for _, _, metrics in terms for name, x in metrics.items()}


def value_loss(outputs_BR: Float[Array, "B R"], batch: dict[str, Any], update: ValueUpdate) -> Loss:
    """The critic's loss. Metrics: those of `clipped_value_loss`."""
    return clipped_value_loss(
        outputs_BR,
        batch["values"],
        batch["returns"],
        batch["sequences"].response,
        value_clip=update.value_clip,
        coef=update.coef,
    )
