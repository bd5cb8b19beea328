"""A step that calls everything that a role can do, on roles that read, adapt and follow the weights of others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.algorithms.masked import masked_count, masked_sum
from jaxrlhf.experience import Sampling, Term
from jaxrlhf.tracing import compute
from tests.programs.pipelined_calls import Update


@dataclasses.dataclass(frozen=True)
class Settings:
    sampling: Sampling = Sampling(num_samples=2)
    update: Update = Update()


def every_method(roles: Any, state: Any, prompts: Any, config: Settings) -> Any:
    one_each = dataclasses.replace(config.sampling, num_samples=1, temperature=0.5)
    rollout = roles.actor.generate(prompts, config.sampling)
    old = roles.actor.pinned()
    heard = {
        "reference": roles.reference.logprobs(rollout),
        "policy": roles.actor.policy(rollout),
        "values": roles.critic.values(rollout),
        "scores": roles.judge.scores(rollout),
        "token_scores": roles.judge.token_scores(rollout),
        "slow": roles.slow.logprobs(rollout),
        "told": roles.reward.scores(rollout),
    }
    batch, weight = compute(make_batch, rollout, heard)
    likely = Term(likelihood, batch, weight=weight, name="likely")
    results = {
        "before": roles.actor.loss(likelihood, batch, config.update),
        "actor": roles.actor.train((Term(likelihood, batch), likely), config.update),
        "critic": roles.critic.train(Term(squares, batch, of="scores"), config.update),
    }
    after = {
        "old": old.logprobs(rollout),
        "new": roles.actor.logprobs(rollout),
        "slow": roles.slow.logprobs(rollout),
        "sampled_by_old": old.generate(prompts, one_each).logprobs,
        "sampled_by_slow": roles.slow.generate(prompts, one_each).logprobs,
    }
    return {**results, "after": compute(sums_of_squares, after), "weight": weight}, state


def make_batch(rollout: Any, heard: Any) -> Any:
    said = sum(jnp.mean(x.reshape(x.shape[0], -1), axis=1) for x in jax.tree.leaves(heard))
    assert isinstance(said, jax.Array)
    return {"sequences": rollout, "advantages": said - jnp.mean(said)}, 0.1 * jnp.mean(jnp.abs(said))


def likelihood(outputs: Any, batch: Any, update: Any) -> Any:
    mask_BR = batch["sequences"].response
    loss = -masked_sum(batch["advantages"][:, None] * outputs.logprobs, mask_BR)
    return loss, masked_count(mask_BR), {"entropy": masked_sum(outputs.entropy, mask_BR)}


def squares(scores_B: Any, batch: Any, update: Any) -> Any:
    loss = jnp.sum(jnp.square(scores_B - batch["advantages"]))
    return loss, jnp.float32(scores_B.shape[0]), {}


def sums_of_squares(after: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.mean(jnp.square(x)) for name, x in after.items()}
