"""An algorithm of one's own: RAFT, reward-ranked fine-tuning.

For each prompt the actor draws some responses. The best of them, by its score, becomes a demonstration: the actor
learns it by heart. Nothing here knows a device. A config names the step by its file,

    algorithm: examples/raft.py:raft_step

and says under `settings` what `RaftConfig` declares. See docs/own_algorithm.md.

Reference:
    Dong et al. 2023, arXiv:2304.06767, algorithm 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.algorithms.masked import masked_count, masked_sum
from jaxrlhf.algorithms.reported import rollout_metrics, summary
from jaxrlhf.algorithms.sft import SupervisedUpdate
from jaxrlhf.experience import PolicyOutputs, Prompts, Rollout, Sampling
from jaxrlhf.tracing import compute


@dataclasses.dataclass(frozen=True)
class RaftConfig:
    """Settings of RAFT."""

    sampling: Sampling = Sampling(num_samples=8)
    update: SupervisedUpdate = SupervisedUpdate()

    def __post_init__(self) -> None:
        if self.sampling.num_samples < 2:
            raise ValueError(f"sampling.num_samples: must be at least 2. Got {self.sampling.num_samples}.")


def raft_step(roles: Any, state: tuple[()], prompts: Prompts, config: RaftConfig) -> tuple[dict[str, Any], tuple[()]]:
    """Sample, rank, imitate the best."""
    rollout = roles.actor.generate(prompts, config.sampling)
    scores = roles.reward.scores(rollout)
    batch, metrics = compute(raft_batch, rollout, scores, config.sampling.num_samples)
    return {"rollout": metrics, "actor": roles.actor.train(raft_loss, batch, config.update)}, state


def raft_batch(rollout: Rollout, scores_B: jax.Array, num_samples: int) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Of every `num_samples` neighbours, which respond to the same prompt, the one with the highest score."""
    scores_PK = scores_B.reshape(-1, num_samples)
    best_P = jnp.arange(len(scores_PK)) * num_samples + jnp.argmax(scores_PK, axis=1)
    batch = {"sequences": jax.tree.map(lambda x: x[best_P], rollout)}
    metrics = {**summary("critic/score", scores_B), **rollout_metrics(rollout)}
    return batch, {**metrics, "raft/best_score": jnp.mean(scores_B[best_P])}


def raft_loss(outputs: PolicyOutputs, batch: dict[str, Any], update: SupervisedUpdate) -> tuple[Any, Any, dict]:
    """loss = -logprob of each token of the best responses: a sum, and how many tokens it is over."""
    mask_BR = batch["sequences"].response
    loss = -masked_sum(outputs.logprobs, mask_BR)
    return loss, masked_count(mask_BR), {"entropy": masked_sum(outputs.entropy, mask_BR)}
