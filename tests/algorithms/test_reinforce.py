"""ReMax, RLOO and REINFORCE++ against Python loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.kl import KLPenalty
from jaxrlhf.algorithms.policy import policy_state, reinforce_policy_loss
from jaxrlhf.algorithms.reinforce_plus_plus import ReinforcePlusPlusConfig, reinforce_plus_plus_batch
from jaxrlhf.algorithms.remax import ReMaxConfig, remax_batch
from jaxrlhf.algorithms.rloo import RLOOConfig, rloo_batch
from jaxrlhf.experience import LENGTH, STOP, Sampling
from tests.algorithms.made_up_rollout import (
    FINISH,
    LOGPROBS,
    MASK,
    MOVED,
    REFERENCE,
    SCORES,
    B,
    N,
    R,
    group_of,
    kl_k1,
    make_rollout,
    mean_by,
    moved_outputs,
)

BASELINE = np.array([0.5, -1.0, 1.0, 0.0, 2.0, 1.0], np.float32)
GREEDY_FINISH = np.array([STOP, STOP, LENGTH, STOP, STOP, STOP])
KL = KLPenalty(coef=0.25)
reference_BR = jnp.where(MASK, REFERENCE, jnp.nan)
fast_remax_batch = jax.jit(remax_batch, static_argnames="config")
fast_reinforce_plus_plus_batch = jax.jit(reinforce_plus_plus_batch, static_argnames="config")


def run_remax(config: ReMaxConfig):
    greedy = make_rollout().replace(finish=jnp.asarray(GREEDY_FINISH, jnp.int32))
    scores = jnp.asarray(SCORES), jnp.asarray(BASELINE)
    return fast_remax_batch(make_rollout(), greedy.finish, reference_BR, *scores, policy_state(config), config=config)


def test_remax_against_a_loop():
    config = ReMaxConfig(kl=KL, missing_stop_penalty=0.5)
    batch, _, metrics = run_remax(config)
    want_BR = np.zeros((B, R))
    for b, t in zip(*np.nonzero(MASK), strict=True):
        score = float(SCORES[b]) - 0.5 * (FINISH[b] != STOP)
        baseline = float(BASELINE[b]) - 0.5 * (GREEDY_FINISH[b] != STOP)
        want_BR[b, t] = score - baseline - 0.25 * (float(LOGPROBS[b, t]) - float(REFERENCE[b, t]))
    np.testing.assert_allclose(batch["advantages"], want_BR, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["critic/baseline/mean"], BASELINE.mean(), rtol=1e-6)
    rewards_B = SCORES - 0.5 * (FINISH != STOP) - 0.25 * kl_k1().sum(axis=1)
    np.testing.assert_allclose(metrics["critic/rewards/mean"], rewards_B.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["critic/score/mean"], SCORES.mean(), rtol=1e-5)

    loss, weight, _ = reinforce_policy_loss(moved_outputs(), batch, config.actor_update)
    np.testing.assert_allclose(loss / weight, mean_by("token", -want_BR * (LOGPROBS + MOVED)), rtol=1e-4)


def test_remax_normalizes_both_scores_alike():
    config = ReMaxConfig(kl=dataclasses.replace(KL, coef=0.0), score_normalization="batch")
    batch, _, _ = run_remax(config)
    std = np.concatenate([SCORES, BASELINE]).std()
    np.testing.assert_allclose(batch["advantages"][:, 0], (SCORES - BASELINE) / std, rtol=1e-4)


def test_remax_with_the_penalty_in_the_loss():
    batch, _, _ = run_remax(ReMaxConfig(kl=KLPenalty(estimator="k3", placement="loss", coef=0.25)))
    np.testing.assert_allclose(batch["advantages"][:, 0], SCORES - BASELINE, rtol=1e-6)
    assert batch["kl"].estimator == "k3"


def test_remax_has_one_response_to_a_prompt():
    message = (
        r"^sampling.num_samples: must be 1: a prompt's one baseline is its greedy response. Got 2. For several "
        r"responses to a prompt take rloo.$"
    )
    with pytest.raises(ValueError, match=message):
        ReMaxConfig(sampling=Sampling(num_samples=2))


def test_rloo_against_a_loop():
    config = RLOOConfig(sampling=Sampling(num_samples=N), kl=KL)
    batch, _, metrics = rloo_batch(make_rollout(), reference_BR, jnp.asarray(SCORES), policy_state(config), config)
    rewards_B = SCORES - 0.25 * kl_k1().sum(axis=1)
    want_BR = np.zeros((B, R))
    for b in range(B):
        others = [rewards_B[i] for i in group_of(b) if i != b]
        want_BR[b] = np.where(MASK[b], rewards_B[b] - sum(others) / len(others), 0.0)
    np.testing.assert_allclose(batch["advantages"], want_BR, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["critic/rewards/mean"], rewards_B.mean(), rtol=1e-4)

    loss, weight, _ = reinforce_policy_loss(moved_outputs(), batch, config.actor_update)
    assert weight == B
    np.testing.assert_allclose(loss / weight, mean_by("sum", -want_BR * (LOGPROBS + MOVED)), rtol=1e-4)


@pytest.mark.parametrize("group_baseline", [False, True])
def test_reinforce_plus_plus_against_a_loop(group_baseline):
    config = ReinforcePlusPlusConfig(
        sampling=Sampling(num_samples=N),
        kl=KL,
        discount=0.9,
        missing_stop_penalty=0.5,
        group_baseline=group_baseline,
    )
    batch, _, metrics = fast_reinforce_plus_plus_batch(
        make_rollout(), reference_BR, jnp.asarray(SCORES), policy_state(config), config=config
    )
    shaped_B = SCORES - 0.5 * (FINISH != STOP)
    returns_BR, kl_BR = np.zeros((B, R)), kl_k1()
    for b in range(B):
        score = shaped_B[b] - (sum(shaped_B[i] for i in group_of(b)) / N if group_baseline else 0.0)
        tokens, later = [t for t in range(R) if MASK[b, t]], 0.0
        for t in reversed(tokens):
            later = returns_BR[b, t] = (score if t == tokens[-1] else 0.0) - 0.25 * kl_BR[b, t] + 0.9 * later
    kept = returns_BR[MASK]
    want_BR = np.where(MASK, (returns_BR - kept.mean()) / np.sqrt(kept.var() + 1e-8), 0.0)
    np.testing.assert_allclose(batch["advantages"], want_BR, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["critic/advantages/raw_std"], kept.std(), rtol=1e-4)
    np.testing.assert_allclose(metrics["critic/score/mean"], SCORES.mean(), rtol=1e-5)  # as the reward gave it


def test_reinforce_plus_plus_refuses():
    with pytest.raises(ValueError, match=r"^discount: must lie in \[0, 1\]. Got 2.0.$"):
        ReinforcePlusPlusConfig(discount=2.0)
    with pytest.raises(ValueError, match=r"^sampling.num_samples: must be at least 2"):
        ReinforcePlusPlusConfig(group_baseline=True)
    ReinforcePlusPlusConfig()
