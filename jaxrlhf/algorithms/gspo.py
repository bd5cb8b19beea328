"""GSPO: GRPO with one probability ratio, and so one clipping, per sequence instead of per token.

Letters: B sequences, R response columns.

A reward belongs to a whole response, so the ratio and its clipping do too. The ratio of a sequence moves far less than
those of its tokens; hence the small clip ranges.
"""

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxrlhf.algorithms.group import group_batch, require_group
from jaxrlhf.algorithms.importance_weights import sequence_weighted
from jaxrlhf.algorithms.losses import Loss, clipped_sequence_loss
from jaxrlhf.algorithms.policy import regularized
from jaxrlhf.experience import PolicyOutputs, Prompts, Rollout, Sampling
from jaxrlhf.require import require, require_not_negative, require_passes, require_positive
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class SequenceUpdate:
    """Settings of the actor's updates on one rollout."""

    mini_batches: int = 4
    """Updates in one pass over the rollout."""
    epochs: int = 1
    """Passes over the rollout."""
    clip: float = 3e-4
    """Lower clip range of the sequence ratio, which is clipped to at least 1 - clip."""
    clip_high: float = 4e-4
    """Upper clip range of the sequence ratio, which is clipped to at most 1 + clip_high."""
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        require_passes(self.mini_batches, self.epochs, "actor_update")
        require(0 < self.clip < 1, "actor_update.clip", "must lie in (0, 1)", self.clip)
        require_positive(self.clip_high, "actor_update.clip_high")
        require_not_negative(self.entropy_coef, "actor_update.entropy_coef")


@dataclasses.dataclass(frozen=True)
class GSPOConfig:
    """Settings of GSPO.

    >>> GSPOConfig(sampling=Sampling(num_samples=4)).normalize_std
    True
    """

    sampling: Sampling = Sampling(num_samples=8)
    """`num_samples` is the size of a group."""
    normalize_std: bool = True
    """Divide advantages by the standard deviation of their group."""
    actor_update: SequenceUpdate = SequenceUpdate()

    def __post_init__(self) -> None:
        require_group(self.sampling)


def gspo_step(roles: Any, state: tuple[()], prompts: Prompts, config: GSPOConfig) -> tuple[dict[str, Any], tuple[()]]:
    """One step of GSPO, on `batch_size` prompts and `num_samples` responses to each.

    Reference:
        Zheng et al. 2025, arXiv:2507.18071, section 4.
    """
    rollout = roles.actor.generate(prompts, config.sampling)
    scores = roles.reward.scores(rollout)
    batch, metrics = compute(gspo_batch, rollout, scores, config, groups_of=config.sampling.num_samples)
    return {"rollout": metrics, "actor": roles.actor.train(gspo_policy_loss, batch, config.actor_update)}, state


def gspo_batch(
    rollout: Rollout, scores_B: Float[Array, " B"], config: GSPOConfig
) -> tuple[dict[str, Any], dict[str, Float[Array, ""]]]:
    """The training batch, with GRPO's advantages, and metrics."""
    return group_batch(rollout, scores_B, num_samples=config.sampling.num_samples, normalize_std=config.normalize_std)


def gspo_policy_loss(outputs: PolicyOutputs, batch: dict[str, Any], update: SequenceUpdate) -> Loss:
    """The actor's loss: `clipped_sequence_loss` minus an entropy bonus, with the metrics of both."""
    sequences: Rollout = batch["sequences"]
    # the same at all tokens of a response; its first column always holds one
    advantages_B = sequence_weighted(batch["advantages"][:, 0], sequences)
    surrogate = clipped_sequence_loss(
        outputs.logprobs,
        sequences.logprobs,
        advantages_B,
        sequences.response,
        clip=update.clip,
        clip_high=update.clip_high,
    )
    return regularized(surrogate, outputs, batch, entropy_coef=update.entropy_coef, aggregation="sequence")
