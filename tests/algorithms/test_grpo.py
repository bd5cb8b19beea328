import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.group import group_advantages
from jaxrlhf.algorithms.grpo import DrGRPOConfig, GRPOConfig, dr_grpo_batch, grpo_batch
from jaxrlhf.algorithms.gspo import GSPOConfig, SequenceUpdate, gspo_batch, gspo_policy_loss
from jaxrlhf.algorithms.kl import KLPenalty
from jaxrlhf.algorithms.policy import policy_state, ppo_policy_loss
from jaxrlhf.experience import Sampling
from tests.algorithms.made_up_rollout import (
    MASK,
    MOVED,
    REFERENCE,
    SCORES,
    B,
    N,
    R,
    clipped_surrogate,
    group_of,
    kl_k1,
    make_rollout,
    mean_by,
    moved_outputs,
)

CONFIG = GRPOConfig(sampling=Sampling(num_samples=N, max_new_tokens=R))
fast_grpo_batch = jax.jit(grpo_batch, static_argnames="config")


def run(config: GRPOConfig):
    reference_BR = jnp.where(MASK, REFERENCE, jnp.nan)
    return fast_grpo_batch(make_rollout(), reference_BR, jnp.asarray(SCORES), policy_state(config), config=config)


def advantages_in_a_loop(rewards_B: np.ndarray, *, normalize_std: bool) -> np.ndarray:
    advantages_BR = np.zeros((B, R))
    for b in range(B):
        group = [float(rewards_B[i]) for i in group_of(b)]
        mean = sum(group) / N
        std = (sum((x - mean) ** 2 for x in group) / (N - 1)) ** 0.5
        for t in range(R):
            if MASK[b, t]:
                advantages_BR[b, t] = (float(rewards_B[b]) - mean) / (std + 1e-6 if normalize_std else 1.0)
    return advantages_BR


@pytest.mark.parametrize("normalize_std", [True, False])
def test_batch_against_a_loop(normalize_std):
    batch, state, metrics = run(dataclasses.replace(CONFIG, normalize_std=normalize_std))
    want_BR = advantages_in_a_loop(SCORES, normalize_std=normalize_std)
    np.testing.assert_allclose(batch["advantages"], want_BR, rtol=1e-5, atol=1e-6)
    assert set(batch) == {"sequences", "advantages", "kl"} and batch["kl"].estimator == "k3"
    np.testing.assert_array_equal(batch["kl"].coef, np.full(B, np.float32(0.04)))
    assert jnp.isfinite(jnp.stack(jax.tree.leaves(metrics))).all()
    np.testing.assert_allclose(metrics["kl/mean"], kl_k1().sum() / B, rtol=1e-5)
    np.testing.assert_allclose(metrics["critic/rewards/mean"], SCORES.mean(), rtol=1e-5)
    assert jax.tree.structure(state) == jax.tree.structure(policy_state(CONFIG))


def test_penalty_in_the_reward_is_part_of_what_the_group_compares():
    config = dataclasses.replace(CONFIG, kl=KLPenalty(estimator="k1", placement="reward", coef=0.5))
    batch, _, _ = run(config)
    rewards_B = SCORES - 0.5 * kl_k1().sum(axis=1)
    want_BR = advantages_in_a_loop(rewards_B, normalize_std=True)
    np.testing.assert_allclose(batch["advantages"], want_BR, rtol=1e-4, atol=1e-5)
    assert "kl" not in batch


def test_dr_grpo_against_a_loop():
    config = DrGRPOConfig(sampling=CONFIG.sampling)
    batch, _ = dr_grpo_batch(make_rollout(), jnp.asarray(SCORES), config)
    want_BR = advantages_in_a_loop(SCORES, normalize_std=False)
    np.testing.assert_allclose(batch["advantages"], want_BR, rtol=1e-5, atol=1e-6)
    loss, weight, metrics = ppo_policy_loss(moved_outputs(), batch, config.actor_update)
    np.testing.assert_allclose(loss / weight, mean_by("constant", clipped_surrogate(want_BR, 0.2, 0.2)), rtol=1e-5)
    assert "kl_loss" not in metrics


def test_gspo_against_a_loop():
    config = GSPOConfig(sampling=CONFIG.sampling)
    batch, _ = gspo_batch(make_rollout(), jnp.asarray(SCORES), config)
    advantages_B = group_advantages(jnp.asarray(SCORES), num_samples=N, normalize_std=True)
    np.testing.assert_array_equal(batch["advantages"], np.where(MASK, advantages_B[:, None], 0.0))
    outputs, update = moved_outputs(), SequenceUpdate(clip=0.05, clip_high=0.1, entropy_coef=0.1)
    loss, weight, metrics = gspo_policy_loss(outputs, batch, update)
    total = 0.0
    for b in range(B):
        tokens = [t for t in range(R) if MASK[b, t]]
        ratio = math.exp(sum(float(MOVED[b, t]) for t in tokens) / len(tokens))
        advantage = float(advantages_B[b])
        total -= min(ratio * advantage, min(max(ratio, 0.95), 1.1) * advantage) / B
    total -= 0.1 * mean_by("sequence", np.asarray(outputs.entropy))
    assert weight == B and 0 < float(metrics["pg_clipfrac"]) < B  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(loss / weight, total, rtol=1e-5)


def test_gspo_without_the_standard_deviation():
    config = GSPOConfig(sampling=CONFIG.sampling, normalize_std=False)
    batch, _ = gspo_batch(make_rollout(), jnp.asarray(SCORES), config)
    want_BR = advantages_in_a_loop(SCORES, normalize_std=False)
    np.testing.assert_allclose(batch["advantages"], want_BR, rtol=1e-5, atol=1e-6)
