"""DAPO: GRPO with a higher upper clip, a mean over tokens, prompts that still teach something, and no reference.

Letters: B sequences, R response columns, K sequences that are trained on, N samples of a prompt.
"""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrlhf.algorithms.group import differing, group_batch, require_group
from jaxrlhf.algorithms.policy import PolicyUpdate, ppo_policy_loss
from jaxrlhf.algorithms.reported import masked_summary, rollout_metrics, score_metrics, summary
from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.require import require, require_not_negative
from jaxrlhf.tracing import GraphError, compute


@dataclasses.dataclass(frozen=True)
class DAPOConfig:
    """Settings of DAPO.

    >>> DAPOConfig(oversampling=3).sampling.num_samples
    8
    """

    sampling: Sampling = Sampling(num_samples=8)
    """`num_samples` is the size of a group."""
    oversampling: int = 2
    """A step samples for `batch_size` prompts, which must be a multiple of this, and trains on
    `batch_size / oversampling` of them; with 1, on all of them."""
    overlong_tokens: int = 0
    """Tokens before the limit of `max_new_tokens` over which the overlong penalty grows from zero. 0: no penalty."""
    overlong_penalty: float = 1.0
    """The overlong penalty of a response of `max_new_tokens` tokens, subtracted from its score."""
    actor_update: PolicyUpdate = PolicyUpdate(clip=0.2, clip_high=0.28)

    def __post_init__(self) -> None:
        require_group(self.sampling)
        require(self.oversampling >= 1, "oversampling", "must be at least 1", self.oversampling)
        limit = self.sampling.max_new_tokens
        rule = f"must lie between 0 and sampling.max_new_tokens={limit}"
        require(0 <= self.overlong_tokens <= limit, "overlong_tokens", rule, self.overlong_tokens)
        require_not_negative(self.overlong_penalty, "overlong_penalty")


def dapo_step(roles: Any, state: tuple[()], prompts: Prompts, config: DAPOConfig) -> tuple[dict[str, Any], tuple[()]]:
    """One step of DAPO.

    In the paper a step goes on sampling until it has enough prompts whose responses do not all score alike. Here a step
    is a graph of calls of fixed sizes: it samples `oversampling` times as many as it trains on, once. Prompts beyond
    what is needed are not kept for later; where there are too few, the step trains on fewer, and says how many.

    Raises:
        GraphError: `oversampling` does not divide the number of prompts.

    Reference:
        Yu et al. 2025, arXiv:2503.14476, section 3.
    """
    _num_places(prompts.tokens.shape[0], config.oversampling)
    rollout = roles.actor.generate(prompts, config.sampling)
    scores = roles.reward.scores(rollout)
    groups_of = config.sampling.num_samples if config.oversampling == 1 else f"oversampling: {config.oversampling}"
    batch, metrics = compute(dapo_batch, rollout, scores, config, groups_of=groups_of)
    return {"rollout": metrics, "actor": roles.actor.train(ppo_policy_loss, batch, config.actor_update)}, state


def dapo_batch(
    rollout: Rollout, scores_B: Float[Array, " B"], config: DAPOConfig
) -> tuple[dict[str, Any], dict[str, Float[Array, ""]]]:
    """The actor's training batch, from the scores of all samples.

        r_i = score_i + overlong_i
        A_i = (r_i - mean(r)) / std(r)    over its group

    Groups are selected by their scores alone, without the overlong penalty.

    Returns:
        The batch, of B / oversampling rows: `sequences` and `advantages`. Metrics: those of the rollout and the rewards
        over all samples, those of the advantages over the batch.
    """
    num_samples, limit = config.sampling.num_samples, config.sampling.max_new_tokens
    punished_B = overlong_punishment(
        rollout.lengths, limit=limit, interval=config.overlong_tokens, penalty=config.overlong_penalty
    )
    all_rows, group = group_batch(rollout, scores_B + punished_B, num_samples=num_samples, normalize_std=True)
    batch, chosen = select_groups(all_rows, scores_B, num_samples=num_samples, oversampling=config.oversampling)
    metrics = {
        **group,
        **score_metrics(scores_B),
        **summary("critic/rewards", scores_B + punished_B),
        **rollout_metrics(rollout),
        **chosen,
        **masked_summary("critic/advantages", batch["advantages"], batch["sequences"].response),
        "response_length/overlong_ratio": jnp.mean(punished_B < 0, dtype=jnp.float32),
    }
    return batch, metrics


def overlong_punishment(
    lengths_B: Int[Array, " B"], *, limit: int, interval: int, penalty: float
) -> Float[Array, " B"]:
    """The soft overlong punishment: a penalty that grows as a response nears the limit.

        0                                               length <= limit - interval
        -penalty * (length - (limit - interval)) / interval      beyond

    Lengths and interval are in tokens. An interval of 0 punishes nothing.

    Reference:
        Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    chex.assert_rank(lengths_B, 1)
    if interval == 0:
        return jnp.zeros(lengths_B.shape, jnp.float32)
    beyond_B = jnp.maximum(lengths_B - (limit - interval), 0).astype(jnp.float32)
    return -penalty * beyond_B / interval


def select_groups(
    batch: dict[str, Any], scores_B: Float[Array, " B"], *, num_samples: int, oversampling: int
) -> tuple[dict[str, Any], dict[str, Float[Array, ""]]]:
    """The first groups whose scores differ, B / (num_samples * oversampling) of them, in order.

    Where there are too few, others fill the places, without response tokens: they have no weight in a loss. With
    `oversampling` 1 all groups stay as they are.

    Returns:
        The batch of K = B / oversampling rows. Metrics: the share of groups that differed, and how many are trained on
        and are missing.
    """
    keep_G = differing(scores_B, num_samples=num_samples)
    num_places = _num_places(keep_G.shape[0], oversampling)
    num_differing = jnp.sum(keep_G, dtype=jnp.float32)
    if oversampling > 1:
        order_G = jnp.argsort(jnp.logical_not(keep_G), stable=True)[:num_places]
        rows_K = (order_G[:, None] * num_samples + jnp.arange(num_samples)[None]).reshape(-1)
        batch = jax.tree.map(lambda x: x[rows_K], batch)
        counts_K = jnp.repeat(keep_G[order_G], num_samples)
        sequences: Rollout = batch["sequences"]
        response_KR = sequences.response & counts_K[:, None]
        batch |= {"sequences": sequences.replace(response=response_KR)}
    kept = jnp.minimum(num_differing, num_places)
    return batch, {
        "group/differing": jnp.mean(keep_G, dtype=jnp.float32),
        "group/kept": kept,
        "group/missing": num_places - kept,
    }


def _num_places(num_prompts: int, oversampling: int) -> int:
    """The number of prompts that a step trains on."""
    if num_prompts % oversampling:
        raise GraphError(
            f"settings.oversampling: must divide the {num_prompts} prompts of a step. Got {oversampling}. Choose a "
            "batch_size that is a multiple of it."
        )
    return num_prompts // oversampling
