"""ReMax: REINFORCE with the score of the greedy response as the baseline.

Letters: B sequences, R response columns.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrlhf.algorithms.policy import (
    PolicyBatch,
    PolicyConfig,
    PolicyState,
    ReinforceUpdate,
    penalized,
    reinforce_policy_loss,
    shape_scores,
    token_kl,
)
from jaxrlhf.algorithms.reported import masked_summary, score_metrics, summary
from jaxrlhf.experience import Prompts, Rollout
from jaxrlhf.require import require
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class ReMaxConfig(PolicyConfig):
    """Settings of ReMax.

    >>> ReMaxConfig(sampling=Sampling(max_new_tokens=32)).sampling.num_samples
    1
    """

    actor_update: ReinforceUpdate = ReinforceUpdate()

    def __post_init__(self) -> None:
        super().__post_init__()
        num, rule = self.sampling.num_samples, "must be 1: a prompt's one baseline is its greedy response"
        require(num == 1, "sampling.num_samples", rule, num, "For several responses to a prompt take rloo.")


def remax_step(
    roles: Any, state: PolicyState, prompts: Prompts, config: ReMaxConfig
) -> tuple[dict[str, Any], PolicyState]:
    """One step of ReMax.

    Reference:
        Li et al. 2023, arXiv:2310.10505.
    """
    rollout = roles.actor.generate(prompts, config.sampling)
    greedy = roles.actor.generate(prompts, dataclasses.replace(config.sampling, temperature=0.0))
    reference = roles.reference.logprobs(rollout)
    scores = roles.reward.scores(rollout)
    baseline = roles.reward.scores(greedy)
    given = (rollout, greedy.finish, reference, scores, baseline, state, config)
    batch, state, metrics = compute(remax_batch, *given, groups_of=config.groups_of())
    results = {
        "rollout": metrics,
        "actor": roles.actor.train(reinforce_policy_loss, batch, config.actor_update),
    }
    return results, state


def remax_batch(
    rollout: Rollout,
    greedy_finish_B: Int[Array, " B"],
    reference_BR: Float[Array, "B R"],
    scores_B: Float[Array, " B"],
    baseline_B: Float[Array, " B"],
    state: PolicyState,
    config: ReMaxConfig,
) -> PolicyBatch:
    """From what the roles said about both responses to what the actor trains on.

        A_t = score - score of the greedy response - kl_coef * kl_t

    A token answers for its own KL, not for that of the tokens after it: so do it the authors, and it has less
    variance. Both scores are shaped alike; where they are normalized, by the moments of both together.
    """
    mask_BR = rollout.response
    finish_2B = jnp.concatenate([rollout.finish, greedy_finish_B])
    shaped_2B, scored = shape_scores(jnp.concatenate([scores_B, baseline_B]), finish_2B, state, config)
    shaped_B, shaped_baseline_B = jnp.split(shaped_2B, 2)
    kl_BR = jnp.where(mask_BR, state.kl_coef * token_kl(rollout, reference_BR, config.kl), 0.0)
    advantages_BR = jnp.where(mask_BR, (shaped_B - shaped_baseline_B)[:, None] - kl_BR, 0.0)

    batch, state, metrics = penalized(rollout, reference_BR, scored, config.kl)
    batch["advantages"] = advantages_BR
    metrics |= {
        **score_metrics(scores_B),
        "critic/baseline/mean": jnp.mean(baseline_B),
        **summary("critic/rewards", shaped_B - jnp.sum(kl_BR, axis=1)),
        **masked_summary("critic/advantages", advantages_BR, mask_BR),
    }
    return batch, state, metrics
