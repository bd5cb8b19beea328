"""Shared parts of the algorithms that train an actor on its own scored samples: settings, state, rewards, loss.

Letters: B sequences, R response columns.
"""

import dataclasses
from typing import Any, Literal, TypeAlias, get_args

import chex
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrlhf.algorithms.group import group_mean
from jaxrlhf.algorithms.importance_weights import weighted
from jaxrlhf.algorithms.kl import ESTIMATORS, KLPenalty, KLTerm, adapt_kl_coef, k1
from jaxrlhf.algorithms.losses import (
    AGGREGATIONS,
    Aggregation,
    Loss,
    clipped_policy_loss,
    entropy_bonus,
    kl_loss,
    reinforce_loss,
)
from jaxrlhf.algorithms.masked import VARIANCE_FLOOR, masked_mean, masked_sum
from jaxrlhf.algorithms.reported import rollout_metrics, score_metrics, summary
from jaxrlhf.algorithms.token_rewards import Moments, merge_moments, moments_of, no_moments, token_rewards
from jaxrlhf.experience import STOP, PolicyOutputs, Rollout, Sampling
from jaxrlhf.require import require, require_not_negative, require_passes, require_positive

ScoreNormalization = Literal["none", "batch", "running"]


@dataclasses.dataclass(frozen=True)
class PolicyUpdate:
    """Settings of the actor's updates on one rollout.

    >>> PolicyUpdate(mini_batches=4, clip=0.1).epochs
    1
    """

    mini_batches: int = 4
    """Updates in one pass over the rollout."""
    epochs: int = 1
    """Passes over the rollout."""
    clip: float = 0.2
    """Clip range of the probability ratio, [1 - clip, 1 + clip_high]. `clip_high` is `clip` if None."""
    clip_high: float | None = None
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token"
    """The aggregation of the loss over tokens and sequences; see `jaxrlhf.algorithms.losses`."""

    def __post_init__(self) -> None:
        require_passes(self.mini_batches, self.epochs, "actor_update")
        require(0 < self.clip < 1, "actor_update.clip", "must lie in (0, 1)", self.clip)
        if self.clip_high is not None:
            require_positive(self.clip_high, "actor_update.clip_high")
        require_not_negative(self.entropy_coef, "actor_update.entropy_coef")
        _require_aggregation(self.aggregation)


@dataclasses.dataclass(frozen=True)
class ReinforceUpdate:
    """Settings of the actor's updates where the loss has no ratio to the policy that drew the tokens.

    >>> ReinforceUpdate(aggregation="sum", entropy_coef=0.01).mini_batches
    1
    """

    mini_batches: int = 1
    """Updates in one pass over the rollout. After the first, the rollout is off-policy, which nothing corrects."""
    epochs: int = 1
    """Passes over the rollout."""
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token"
    """The aggregation of the loss over tokens and sequences; see `jaxrlhf.algorithms.losses`."""

    def __post_init__(self) -> None:
        require_passes(self.mini_batches, self.epochs, "actor_update")
        require_not_negative(self.entropy_coef, "actor_update.entropy_coef")
        _require_aggregation(self.aggregation)


def _require_aggregation(aggregation: str) -> None:
    where, rule = "actor_update.aggregation", f"must be one of {', '.join(AGGREGATIONS)}"
    require(aggregation in AGGREGATIONS, where, rule, aggregation)


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Settings of sampling, and of the rewards made from scores."""

    sampling: Sampling = Sampling()
    kl: KLPenalty = KLPenalty()
    score_clip: float | None = None
    """Scores are clipped to [-score_clip, score_clip], after the missing-stop penalty and before normalization."""
    score_normalization: ScoreNormalization = "none"
    """Scores are scaled to mean zero and variance one, over the batch or (`running`) over the run so far."""
    missing_stop_penalty: float = 0.0
    """Subtracted from the score of a response that did not end with a stop token or a stop string."""

    def __post_init__(self) -> None:
        if self.score_clip is not None:
            require_positive(self.score_clip, "score_clip")
        known, rule = get_args(ScoreNormalization), "must be none, batch or running"
        require(self.score_normalization in known, "score_normalization", rule, self.score_normalization)
        require_not_negative(self.missing_stop_penalty, "missing_stop_penalty")

    def groups_of(self, size: int = 1) -> int | str:
        """The rows of a batch that belong together, as `tracing.compute` takes it. `size`: as far as anything but the
        settings here is concerned."""
        return size if self.score_normalization == "none" else f"score_normalization: {self.score_normalization}"


class PolicyState(struct.PyTreeNode):
    """The state that is carried from step to step."""

    kl_coef: Float[Array, ""]
    scores: Moments
    """Moments of all scores so far, where they are normalized by running moments."""


PolicyBatch: TypeAlias = tuple[dict[str, Any], PolicyState, dict[str, Float[Array, ""]]]
"""`(batch, next state, metrics)`. The batch, with rows first in every leaf, has `sequences` (the rollout),
`advantages`, and `kl` if the KL term is part of the loss."""


def policy_state(config: PolicyConfig) -> PolicyState:
    """The state before the first step."""
    return PolicyState(kl_coef=jnp.full((), config.kl.coef, jnp.float32), scores=no_moments())


def shape_scores(
    scores_B: Float[Array, " B"], finish_B: Int[Array, " B"], state: PolicyState, config: PolicyConfig
) -> tuple[Float[Array, " B"], PolicyState]:
    """Penalizes responses that did not stop, then clips, then normalizes.

        s = score - missing_stop_penalty * [finish is not STOP]
        s = min(max(s, -score_clip), score_clip)
        s = (s - mean) / sqrt(variance + 1e-8)

    Mean and variance are those of this batch, or with "running" of all scores seen, this batch included, whose moments
    the returned state has.
    """
    chex.assert_rank([scores_B, finish_B], 1)
    chex.assert_equal_shape([scores_B, finish_B])
    scores_B = scores_B - jnp.where(finish_B == STOP, 0.0, config.missing_stop_penalty)
    if config.score_clip is not None:
        scores_B = jnp.clip(scores_B, -config.score_clip, config.score_clip)
    if config.score_normalization == "none":
        return scores_B, state
    over = moments_of(scores_B)
    if config.score_normalization == "running":
        over = merge_moments(state.scores, over)
        state = state.replace(scores=over)
    scale = 1.0 / jnp.sqrt(over.m2 / over.count + VARIANCE_FLOOR)
    return (scores_B - over.mean) * scale, state


def token_kl(rollout: Rollout, reference_BR: Float[Array, "B R"], kl: KLPenalty) -> Float[Array, "B R"]:
    """The KL estimate of each token; zero if the penalty is part of the loss, not of the reward."""
    if kl.placement == "loss":
        return jnp.zeros_like(reference_BR)
    return ESTIMATORS[kl.estimator](rollout.logprobs, reference_BR)


def penalized(rollout: Rollout, reference_BR: Float[Array, "B R"], state: PolicyState, kl: KLPenalty) -> PolicyBatch:
    """The training batch still without `advantages`, the next state, and metrics of the KL and the rollout.

    The KL that is reported and drives the controller is k1's, in nats, whichever estimator the penalty uses.
    """
    mask_BR = rollout.response
    chex.assert_equal_shape([rollout.logprobs, reference_BR, mask_BR])
    num_sequences = mask_BR.shape[0]
    batch: dict[str, Any] = {"sequences": rollout}
    if kl.placement == "loss":
        coef_B = jnp.broadcast_to(state.kl_coef, (num_sequences,))
        batch["kl"] = KLTerm(reference=reference_BR, coef=coef_B, estimator=kl.estimator)

    log_ratio_BR = k1(rollout.logprobs, reference_BR)
    observed_kl = masked_sum(log_ratio_BR, mask_BR) / num_sequences
    kl_coef = state.kl_coef
    if kl.adaptive:
        kl_coef = adapt_kl_coef(kl_coef, observed_kl, target=kl.target, horizon=kl.horizon, num_sequences=num_sequences)
    metrics = {
        "kl/mean": observed_kl,
        "kl/per_token": masked_mean(log_ratio_BR, mask_BR),
        "kl/coef": state.kl_coef,
        **rollout_metrics(rollout),
    }
    return batch, state.replace(kl_coef=kl_coef), metrics


def rewarded(
    rollout: Rollout,
    reference_BR: Float[Array, "B R"],
    scores_B: Float[Array, " B"],
    state: PolicyState,
    config: PolicyConfig,
    *,
    less_mean_of: int = 0,
    kl_share: float = 1.0,
) -> tuple[Float[Array, "B R"], dict[str, Any], PolicyState, dict[str, Float[Array, ""]]]:
    """Rewards per token: shaped scores, minus the KL penalty if it is placed in the reward.

    Args:
        less_mean_of: the size of the groups whose mean shaped score is subtracted; 0 subtracts nothing.
        kl_share: the fraction of the penalty that is applied to these rewards.

    Returns:
        Rewards, zero outside of responses; then the outputs of `penalized`, with metrics of scores and rewards too.
    """
    chex.assert_rank([reference_BR, scores_B], [2, 1])
    shaped_B, scored = shape_scores(scores_B, rollout.finish, state, config)
    if less_mean_of:
        shaped_B = shaped_B - group_mean(shaped_B, num_samples=less_mean_of)
    kl_BR = token_kl(rollout, reference_BR, config.kl)
    rewards_BR = token_rewards(shaped_B, kl_BR, rollout.response, kl_coef=kl_share * state.kl_coef)
    batch, next_state, metrics = penalized(rollout, reference_BR, scored, config.kl)
    metrics |= score_metrics(scores_B) | summary("critic/rewards", jnp.sum(rewards_BR, axis=1))
    return rewards_BR, batch, next_state, metrics


def ppo_policy_loss(outputs: PolicyOutputs, batch: dict[str, Any], update: PolicyUpdate) -> Loss:
    """The actor's loss: clipped surrogate, minus an entropy bonus, plus the KL term where the batch has one.

    Metrics: those of `clipped_policy_loss`, `entropy_bonus` and `kl_loss`.

    >>> zeros_BR, both_BR = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    >>> tokens_BT, row_B = jnp.ones((1, 3), jnp.int32), jnp.zeros(1, jnp.int32)
    >>> rollout = Rollout(tokens_BT, tokens_BT > 0, both_BR, zeros_BR, zeros_BR, row_B, row_B, row_B.astype(jnp.uint32))
    >>> batch = {"sequences": rollout, "advantages": jnp.array([[1.0, 2.0]])}
    >>> loss, tokens, _ = ppo_policy_loss(PolicyOutputs(zeros_BR, entropy=zeros_BR), batch, PolicyUpdate())
    >>> float(loss), float(tokens)
    (-3.0, 2.0)
    """
    sequences: Rollout = batch["sequences"]
    surrogate = clipped_policy_loss(
        outputs.logprobs,
        sequences.logprobs,
        weighted(batch["advantages"], sequences),
        sequences.response,
        clip=update.clip,
        clip_high=update.clip_high,
        aggregation=update.aggregation,
    )
    return regularized(surrogate, outputs, batch, entropy_coef=update.entropy_coef, aggregation=update.aggregation)


def reinforce_policy_loss(outputs: PolicyOutputs, batch: dict[str, Any], update: ReinforceUpdate) -> Loss:
    """The actor's loss: REINFORCE, minus an entropy bonus, plus the KL term where the batch has one.

    Metrics: those of `reinforce_loss`, `entropy_bonus` and `kl_loss`.

    >>> zeros_BR, both_BR = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    >>> tokens_BT, row_B = jnp.ones((1, 3), jnp.int32), jnp.zeros(1, jnp.int32)
    >>> rollout = Rollout(tokens_BT, tokens_BT > 0, both_BR, zeros_BR, zeros_BR, row_B, row_B, row_B.astype(jnp.uint32))
    >>> batch = {"sequences": rollout, "advantages": jnp.array([[1.0, 2.0]])}
    >>> outputs = PolicyOutputs(jnp.full((1, 2), -0.5), entropy=zeros_BR)
    >>> float(reinforce_policy_loss(outputs, batch, ReinforceUpdate())[0])
    1.5
    """
    sequences: Rollout = batch["sequences"]
    advantages_BR = weighted(batch["advantages"], sequences)
    surrogate = reinforce_loss(outputs.logprobs, advantages_BR, sequences.response, aggregation=update.aggregation)
    return regularized(surrogate, outputs, batch, entropy_coef=update.entropy_coef, aggregation=update.aggregation)


def regularized(
    surrogate: Loss, outputs: PolicyOutputs, batch: dict[str, Any], *, entropy_coef: float, aggregation: Aggregation
) -> Loss:
    """A policy loss, minus an entropy bonus, plus the KL term where the batch has one."""
    mask_BR = batch["sequences"].response
    terms = [surrogate, entropy_bonus(outputs.entropy, mask_BR, coef=entropy_coef, aggregation=aggregation)]
    if "kl" in batch:
        kl: KLTerm = batch["kl"]
        terms.append(
            kl_loss(outputs.logprobs, kl.reference, kl.coef, mask_BR, estimator=kl.estimator, aggregation=aggregation)
        )
    loss = sum((loss for loss, _, _ in terms), jnp.zeros(()))
    return loss, surrogate[1], {name: x for _, _, metrics in terms for name, x in metrics.items()}
