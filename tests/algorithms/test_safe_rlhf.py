import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.kl import KLPenalty
from jaxrlhf.algorithms.ppo_ptx import PretrainingMix
from jaxrlhf.algorithms.safe_rlhf import SafeRLHFConfig, ascend, lagrangian, safe_rlhf_batch, safe_rlhf_state
from tests.algorithms.made_up_rollout import (
    COST_VALUES,
    MASK,
    REFERENCE,
    SCORES,
    VALUES,
    B,
    at_last_token,
    gae_in_a_loop,
    kl_k1,
    make_rollout,
)

COSTS = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], np.float32)
CONFIG = SafeRLHFConfig(
    kl=KLPenalty(coef=0.5),
    discount=0.9,
    gae_lambda=0.8,
    whiten_advantages=False,
    cost_budget=0.2,
    initial_lambda=2.0,
    lambda_rate=0.5,
)
fast_safe_rlhf_batch = jax.jit(safe_rlhf_batch, static_argnames="config")


def run(config: SafeRLHFConfig):
    values = tuple(jnp.where(MASK, x_BR, jnp.nan) for x_BR in (VALUES, COST_VALUES))
    scores = jnp.asarray(SCORES), jnp.asarray(COSTS)
    reference_BR = jnp.where(MASK, REFERENCE, jnp.nan)
    return fast_safe_rlhf_batch(make_rollout(), reference_BR, values, scores, safe_rlhf_state(config), config=config)


def advantages_in_a_loop(last_B: np.ndarray, kl_coef: float, values_BR: np.ndarray) -> np.ndarray:
    """Advantages of `last` at the last token, less a KL penalty everywhere."""
    rewards_BR = at_last_token(last_B, MASK) - kl_coef * kl_k1()
    return gae_in_a_loop(rewards_BR, values_BR, MASK, discount=0.9, gae_lambda=0.8)[0]


def test_batch_against_a_loop():
    batch, costs, state, metrics = run(CONFIG)
    gains_BR = advantages_in_a_loop(SCORES, 0.25, VALUES)
    harms_BR = advantages_in_a_loop(COSTS, -0.25, COST_VALUES)
    np.testing.assert_allclose(batch["advantages"], (gains_BR - 2.0 * harms_BR) / 3.0, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch["returns"], np.where(MASK, gains_BR + VALUES, 0.0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(costs["returns"], np.where(MASK, harms_BR + COST_VALUES, 0.0), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(batch["values"], np.where(MASK, VALUES, 0.0))
    np.testing.assert_array_equal(costs["values"], np.where(MASK, COST_VALUES, 0.0))
    assert set(costs) == {"sequences", "returns", "values"} and set(batch) == {*costs, "advantages"}
    np.testing.assert_allclose(math.exp(float(state.log_lambda)), 2.0 * math.exp(0.5 * 2.0 * (0.5 - 0.2)), rtol=1e-5)
    np.testing.assert_allclose(metrics["cost/lambda"], 2.0, rtol=1e-5)  # the one that was used
    np.testing.assert_allclose(metrics["cost/mean"], 0.5)
    assert metrics["kl/coef"] == 0.5 and state.policy.kl_coef == 0.5
    assert jnp.isfinite(jnp.stack(jax.tree.leaves(metrics))).all()
    assert jax.tree.structure(state) == jax.tree.structure(safe_rlhf_state(CONFIG))


def test_advantages_are_whitened_as_one():
    plain, _, _, _ = run(CONFIG)
    white, costs, _, metrics = run(dataclasses.replace(CONFIG, whiten_advantages=True))
    kept = np.asarray(plain["advantages"])[MASK]
    want = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8)
    np.testing.assert_allclose(np.asarray(white["advantages"])[MASK], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["critic/advantages/raw_std"], kept.std(), rtol=1e-4)
    np.testing.assert_allclose(costs["returns"], run(CONFIG)[1]["returns"], rtol=1e-6)


def test_a_penalty_in_the_loss_is_charged_to_nobody():
    config = dataclasses.replace(CONFIG, kl=KLPenalty(estimator="k3", placement="loss", coef=0.5))
    batch, costs, _, _ = run(config)
    gains_BR, harms_BR = advantages_in_a_loop(SCORES, 0.0, VALUES), advantages_in_a_loop(COSTS, 0.0, COST_VALUES)
    np.testing.assert_allclose(batch["advantages"], (gains_BR - 2.0 * harms_BR) / 3.0, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(batch["kl"].coef, np.full(B, 0.5))
    assert "kl" not in costs


def test_lagrangian_by_hand():
    gains_BR, harms_BR = jnp.array([[1.0, -2.0]]), jnp.array([[0.5, 3.0]])
    np.testing.assert_allclose(lagrangian(gains_BR, harms_BR, jnp.log(3.0)), [[-0.125, -2.75]], rtol=1e-6)
    np.testing.assert_allclose(lagrangian(gains_BR, harms_BR, jnp.float32(-30.0)), gains_BR, rtol=1e-6)


def test_lambda_rises_above_the_budget_falls_below_and_has_a_limit():
    def next_lambda(mean_cost: float, before: float = 2.0) -> float:
        return math.exp(float(ascend(jnp.log(jnp.float32(before)), jnp.float32(mean_cost), CONFIG)))

    assert next_lambda(0.2) == pytest.approx(2.0, rel=1e-6)
    assert next_lambda(0.5) == pytest.approx(2.0 * math.exp(0.3), rel=1e-5)
    assert next_lambda(0.1) == pytest.approx(2.0 * math.exp(-0.1), rel=1e-5)
    assert next_lambda(1e6) == pytest.approx(20.0, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (SafeRLHFConfig, {"cost_budget": math.inf}, "cost_budget: must be finite. Got inf."),
        (SafeRLHFConfig, {"lambda_rate": 0.0}, "lambda_rate: must be finite and positive. Got 0.0."),
        (SafeRLHFConfig, {"max_lambda": math.inf}, "max_lambda: must be finite and positive. Got inf."),
        (
            SafeRLHFConfig,
            {"initial_lambda": 0.0},
            "initial_lambda: must be positive and at most max_lambda=20.0. Got 0.0. It is moved by factors, so it "
            "never leaves zero.",
        ),
        (SafeRLHFConfig, {"discount": -1.0}, "discount: must lie in [0, 1]. Got -1.0."),
        (PretrainingMix, {"coef": -1.0}, "pretraining.coef: must be finite and not negative. Got -1.0."),
        (PretrainingMix, {"batch_size": -1}, "pretraining.batch_size: must not be negative. Got -1."),
        (PretrainingMix, {"max_new_tokens": 0}, "pretraining.max_new_tokens: must be at least 1. Got 0."),
    ],
)
def test_refuses(make, settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(**settings)
