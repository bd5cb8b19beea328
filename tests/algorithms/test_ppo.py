import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.algorithms.kl import KLPenalty
from jaxrlhf.algorithms.masked import whiten
from jaxrlhf.algorithms.policy import PolicyState, PolicyUpdate, policy_state, ppo_policy_loss
from jaxrlhf.algorithms.ppo import PPOConfig, ValueUpdate, explained_variance, ppo_batch, value_loss
from jaxrlhf.algorithms.token_rewards import no_moments
from jaxrlhf.experience import LENGTH, STOP, Max, PolicyOutputs, Rollout
from tests.algorithms.made_up_rollout import at_last_token, gae_in_a_loop

B, P, R = 4, 2, 5
PLAIN = PPOConfig(whiten_advantages=False, discount=0.9, gae_lambda=0.8, kl=KLPenalty(coef=0.5))
IN_LOSS = dataclasses.replace(PLAIN, kl=KLPenalty(estimator="k3", placement="loss", coef=0.5))
fast_ppo_batch = jax.jit(ppo_batch, static_argnames="config")


def make_inputs(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    response = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]], bool)

    def draw(mean: float) -> jax.Array:
        return jnp.asarray(rng.normal(mean, 0.5, (B, R)), jnp.float32)

    rollout = Rollout(
        tokens=jnp.asarray(rng.integers(0, 9, (B, P + R)), jnp.int32),
        mask=jnp.asarray(np.concatenate([np.ones((B, P), bool), response], axis=1)),
        response=jnp.asarray(response),
        logprobs=draw(-2.0),
        sampled_logprobs=draw(-2.0),
        finish=jnp.array([STOP, LENGTH, STOP, STOP], jnp.int32),
        row=jnp.arange(B, dtype=jnp.int32),
        id=jnp.arange(B, dtype=jnp.uint32),
    )
    scores_B = jnp.array([1.0, -2.0, 4.0, 3.0])
    return {"rollout": rollout, "reference_BR": draw(-2.2), "values_BR": draw(0.3), "scores_B": scores_B}


def run(config: PPOConfig, state: PolicyState | None = None, **changes: Any):
    inputs = make_inputs() | changes
    return fast_ppo_batch(
        inputs["rollout"],
        inputs["reference_BR"],
        inputs["values_BR"],
        inputs["scores_B"],
        policy_state(config) if state is None else state,
        config=config,
    )


def advantages_in_a_loop(kl_coef: float, config: PPOConfig) -> tuple[np.ndarray, np.ndarray]:
    """Advantages, and the rewards of each response."""
    inputs = make_inputs()
    mask_BR, values_BR = np.asarray(inputs["rollout"].response), np.asarray(inputs["values_BR"], np.float64)
    log_ratio_BR = np.asarray(inputs["rollout"].logprobs, np.float64) - np.asarray(inputs["reference_BR"])
    rewards_BR = at_last_token(inputs["scores_B"], mask_BR) - np.where(mask_BR, kl_coef * log_ratio_BR, 0.0)
    advantages_BR, _ = gae_in_a_loop(rewards_BR, values_BR, mask_BR, config.discount, config.gae_lambda)
    return advantages_BR, rewards_BR.sum(axis=1)


def test_batch_against_a_loop():
    batch, state, metrics = run(PLAIN)
    inputs = make_inputs()
    mask_BR = np.asarray(inputs["rollout"].response)
    advantages_BR, total_B = advantages_in_a_loop(0.5, PLAIN)
    values_BR = np.where(mask_BR, inputs["values_BR"], 0.0)
    assert set(batch) == {"sequences", "advantages", "returns", "values"}
    np.testing.assert_allclose(batch["advantages"], advantages_BR, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(batch["returns"], advantages_BR + values_BR, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(batch["values"], values_BR)
    jax.tree.map(np.testing.assert_array_equal, batch["sequences"], inputs["rollout"])
    assert state.kl_coef == 0.5 and state.scores.count == 0

    log_ratio_BR = np.where(mask_BR, inputs["rollout"].logprobs - inputs["reference_BR"], 0.0)
    kept = advantages_BR[mask_BR]
    want = {
        "critic/score/mean": 1.5,
        "critic/score/std": np.sqrt(21 / 4),
        "critic/score/max": 4.0,
        "critic/score/min": -2.0,
        **{f"critic/rewards/{name}": getattr(total_B, name)() for name in ("mean", "max", "min")},
        "kl/mean": log_ratio_BR.sum() / 4,
        "kl/per_token": log_ratio_BR.sum() / 11,
        "kl/coef": 0.5,
        "response_length/mean": 11 / 4,
        "response_length/max": 5.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 0.25,
        "response/aborted_ratio": 0.25,
        "prompt_length/mean": 2.0,
        "prompt_length/max": 2.0,
        "prompt_length/min": 2.0,
        "critic/advantages/raw_mean": kept.mean(),
        "critic/advantages/raw_std": kept.std(),
        "critic/vf_explained_var": 1 - kept.var() / (kept + values_BR[mask_BR]).var(),
    }
    tokens_of = {"advantages": kept, "values": values_BR[mask_BR], "returns": kept + values_BR[mask_BR]}
    for quantity, x in tokens_of.items():
        want |= {f"critic/{quantity}/mean": x.mean(), f"critic/{quantity}/max": x.max()}
        want |= {f"critic/{quantity}/min": x.min()}
    assert set(metrics) == set(want)
    for name, value in metrics.items():
        assert value.shape == () and value.dtype == jnp.float32, name
        np.testing.assert_allclose(value, want[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_advantages_are_whitened_over_the_batch_and_returns_are_not():
    plain, _, _ = run(PLAIN)
    white, _, metrics = run(dataclasses.replace(PLAIN, whiten_advantages=True))
    want_BR = whiten(plain["advantages"], plain["sequences"].response)
    np.testing.assert_allclose(white["advantages"], want_BR, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(white["returns"], plain["returns"], rtol=1e-6)
    assert abs(float(metrics["critic/advantages/raw_std"]) - 1.0) > 0.1  # measured before whitening
    np.testing.assert_allclose(metrics["critic/advantages/mean"], 0.0, atol=1e-6)  # the others after it
    np.testing.assert_allclose(metrics["critic/advantages/max"], np.max(want_BR), rtol=1e-5)


def test_the_coefficient_is_the_state_s():
    state = PolicyState(kl_coef=jnp.float32(0.0), scores=no_moments())
    batch, _, metrics = run(PLAIN, state)
    np.testing.assert_allclose(batch["advantages"], advantages_in_a_loop(0.0, PLAIN)[0], rtol=1e-5, atol=1e-5)
    assert metrics["kl/coef"] == 0.0


def test_penalty_in_the_loss_leaves_the_rewards_and_rides_in_the_batch():
    batch, _, metrics = run(IN_LOSS)
    np.testing.assert_allclose(batch["advantages"], advantages_in_a_loop(0.0, IN_LOSS)[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(batch["kl"].reference, make_inputs()["reference_BR"])
    np.testing.assert_array_equal(batch["kl"].coef, np.full(B, 0.5))
    assert batch["kl"].estimator == "k3"
    moved, _, _ = run(IN_LOSS, PolicyState(kl_coef=jnp.float32(0.125), scores=no_moments()))
    np.testing.assert_array_equal(moved["kl"].coef, np.full(B, 0.125))
    assert metrics["kl/coef"] == 0.5
    assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(batch))


def test_rewards_are_penalized_by_the_chosen_estimator_and_k1_is_reported():
    _, _, by_k1 = run(PLAIN)
    _, _, by_k2 = run(dataclasses.replace(PLAIN, kl=KLPenalty(estimator="k2", coef=0.5)))
    inputs = make_inputs()
    log_ratio_BR = np.where(inputs["rollout"].response, inputs["rollout"].logprobs - inputs["reference_BR"], 0.0)
    difference = 0.5 * np.sum(log_ratio_BR - 0.5 * np.square(log_ratio_BR)) / B
    assert abs(difference) > 0.01
    np.testing.assert_allclose(by_k2["critic/rewards/mean"] - by_k1["critic/rewards/mean"], difference, rtol=1e-4)
    assert by_k2["kl/mean"] == by_k1["kl/mean"]


def test_scores_are_clipped():
    (plain, _, _), (clipped, _, metrics) = run(PLAIN), run(dataclasses.replace(PLAIN, score_clip=3.0))
    np.testing.assert_allclose((clipped["advantages"] - plain["advantages"])[2, 3], -1.0, rtol=1e-5)
    assert metrics["critic/score/max"] == 4.0  # as the reward gave it


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_controller_moves_the_coefficient_of_the_next_step(placement):
    kl = KLPenalty(placement=placement, coef=0.5, adaptive=True, target=100.0, horizon=40.0)
    _, state, metrics = run(dataclasses.replace(PLAIN, kl=kl))
    assert metrics["kl/coef"] == 0.5
    np.testing.assert_allclose(state.kl_coef, 0.5 * (1 - 0.2 * 4 / 40), rtol=1e-6)


def test_running_moments_are_carried():
    config = dataclasses.replace(PLAIN, score_normalization="running")
    _, state, metrics = run(config)
    assert state.scores.count == 4
    np.testing.assert_allclose(state.scores.mean, 1.5)
    _, state, _ = run(config, state)
    assert state.scores.count == 8
    assert metrics["critic/score/mean"] == 1.5  # as the reward gave it


def test_missing_stop_penalty_falls_on_cut_off_responses():
    shaped = dataclasses.replace(PLAIN, missing_stop_penalty=3.0)
    (plain, _, _), (penalized, _, _) = run(PLAIN), run(shaped)
    difference_BR = np.asarray(penalized["advantages"] - plain["advantages"])
    np.testing.assert_allclose(difference_BR[1, -1], -3.0, rtol=1e-5)
    np.testing.assert_allclose(difference_BR[[0, 2, 3]], 0.0, atol=1e-6)


def test_what_stands_at_masked_tokens_is_not_read():
    inputs = make_inputs()
    rollout, mask_BR = inputs["rollout"], inputs["rollout"].response

    def spoil(x_BR: jax.Array) -> jax.Array:
        return jnp.where(mask_BR, x_BR, jnp.nan)

    clean = run(IN_LOSS)
    dirty = run(
        IN_LOSS,
        rollout=rollout.replace(logprobs=spoil(rollout.logprobs)),
        values_BR=spoil(inputs["values_BR"]),
        reference_BR=spoil(inputs["reference_BR"]),
    )
    for name in ("advantages", "returns", "values"):
        np.testing.assert_array_equal(dirty[0][name], clean[0][name])
    jax.tree.map(np.testing.assert_array_equal, dirty[1:], clean[1:])


def test_explained_variance_by_hand():
    mask_BR, returns_BR = jnp.ones((1, 4), bool), jnp.array([[1.0, 2.0, 3.0, 4.0]])
    assert explained_variance(returns_BR + 5.0, returns_BR, mask_BR) == 1.0
    assert explained_variance(jnp.zeros((1, 4)), returns_BR, mask_BR) == 0.0
    np.testing.assert_allclose(explained_variance(-returns_BR, returns_BR, mask_BR), -3.0)
    assert explained_variance(returns_BR, jnp.ones((1, 4)), mask_BR) == 0.0


def actor_outputs(weights_R: jax.Array, batch: dict[str, Any]) -> PolicyOutputs:
    """A policy with shared weights: each token's logit follows its tokens' ids."""
    tokens_BR = batch["sequences"].tokens[:, P:].astype(jnp.float32)
    logits_BR = tokens_BR * weights_R[None]
    return PolicyOutputs(logprobs=-jax.nn.softplus(logits_BR) - 1.5, entropy=jnp.square(logits_BR))


def critic_outputs(weights_R: jax.Array, batch: dict[str, Any]) -> jax.Array:
    return batch["sequences"].tokens[:, P:].astype(jnp.float32) * weights_R[None]


@pytest.mark.parametrize(
    ("loss", "outputs", "update"),
    [
        (ppo_policy_loss, actor_outputs, PolicyUpdate(entropy_coef=0.1)),
        (value_loss, critic_outputs, ValueUpdate()),
    ],
)
def test_micro_batches_add_up(loss, outputs, update):
    batch, _, _ = run(IN_LOSS)
    batch["kl"] = batch["kl"].replace(coef=jnp.arange(B, dtype=jnp.float32))
    weights_R = jnp.linspace(-0.2, 0.3, R)

    @jax.jit
    def sums_and_maxima(weights_R, batch):
        def with_metrics(weights_R):
            total, weight, metrics = loss(outputs(weights_R, batch), batch, update)
            return total, (weight, metrics)

        (total, (weight, metrics)), grads_R = jax.value_and_grad(with_metrics, has_aux=True)(weights_R)
        maxima = {name: x.value for name, x in metrics.items() if isinstance(x, Max)}
        return (total, weight, grads_R, {name: x for name, x in metrics.items() if not isinstance(x, Max)}), maxima

    sums, maxima = sums_and_maxima(weights_R, batch)
    rows = [jax.tree.map(lambda x, b=b: x[b : b + 1], batch) for b in range(B)]  # lengths 3, 5, 3 and 0
    part_sums, part_maxima = zip(*(sums_and_maxima(weights_R, row) for row in rows), strict=True)
    added = jax.tree.map(lambda *xs: sum(xs), *part_sums)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), added, sums)
    for name, value in maxima.items():
        assert value == max(part[name] for part in part_maxima)
    assert sums[1] == 11.0
    assert np.count_nonzero(np.abs(sums[2]) > 1e-3) >= 4


def test_policy_loss_is_the_sum_of_its_terms():
    batch, _, _ = run(IN_LOSS)
    outputs = actor_outputs(jnp.linspace(-0.2, 0.3, R), batch)
    metrics: Any
    loss, weight, metrics = ppo_policy_loss(outputs, batch, PolicyUpdate(entropy_coef=0.1))
    assert set(metrics) == {"pg_loss", "pg_clipfrac", "ppo_kl", "ratio_max", "entropy", "kl_loss"}
    want = metrics["pg_loss"] - 0.1 * metrics["entropy"] + 0.5 * metrics["kl_loss"]
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert float(metrics["entropy"]) > 0 and float(metrics["kl_loss"]) > 0 and weight == 11.0

    del batch["kl"]
    loss, _, metrics = ppo_policy_loss(outputs, batch, PolicyUpdate())
    assert "kl_loss" not in metrics
    np.testing.assert_allclose(loss, metrics["pg_loss"], rtol=1e-6)


def test_policy_loss_reads_the_rollout_s_log_probabilities_and_the_clips():
    batch, _, _ = run(PLAIN)
    rollout = batch["sequences"]
    same = PolicyOutputs(logprobs=rollout.logprobs, entropy=jnp.zeros((B, R)))
    metrics: Any
    loss, _, metrics = ppo_policy_loss(same, batch, PolicyUpdate())
    np.testing.assert_allclose(loss, -np.sum(batch["advantages"]), rtol=1e-5)
    assert metrics["ppo_kl"] == metrics["pg_clipfrac"] == 0.0 and metrics["ratio_max"].value == 1.0
    up = PolicyOutputs(logprobs=rollout.logprobs + 0.25, entropy=jnp.zeros((B, R)))  # ratio 1.28
    positive = int(np.sum(np.asarray(batch["advantages"]) > 0))
    assert positive > 0
    assert ppo_policy_loss(up, batch, PolicyUpdate(clip=0.2))[2]["pg_clipfrac"] == positive
    assert ppo_policy_loss(up, batch, PolicyUpdate(clip=0.2, clip_high=0.3))[2]["pg_clipfrac"] == 0
    assert ppo_policy_loss(up, batch, PolicyUpdate(clip=0.3))[2]["pg_clipfrac"] == 0


def test_value_loss_reads_the_batch_and_the_settings():
    batch, _, _ = run(PLAIN)
    mask_BR = np.asarray(batch["sequences"].response)
    error_BR = np.where(mask_BR, batch["values"] + 1.0 - batch["returns"], 0.0)
    loss, weight, _ = value_loss(batch["values"] + 1.0, batch, ValueUpdate(value_clip=None, coef=2.0))
    np.testing.assert_allclose(loss, 2.0 * np.sum(np.square(error_BR)), rtol=1e-5)
    assert weight == 11.0
    clipped, _, _ = value_loss(batch["values"] + 1.0, batch, ValueUpdate(value_clip=0.2, coef=2.0))
    assert clipped > loss


def test_state_and_entry():
    assert ALGORITHMS["ppo"].init_state is policy_state
    state = policy_state(PPOConfig(kl=KLPenalty(coef=0.25)))
    assert state.kl_coef == 0.25
    assert all(x.shape == () and x.dtype == jnp.float32 for x in jax.tree.leaves(state))
    assert jax.tree.structure(state) == jax.tree.structure(run(PLAIN)[1])
    hash(PPOConfig())  # a setting is part of a compiled program's key


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (PolicyUpdate, {"mini_batches": 0}, "actor_update.mini_batches: must be at least 1. Got 0."),
        (PolicyUpdate, {"epochs": 0}, "actor_update.epochs: must be at least 1. Got 0."),
        (PolicyUpdate, {"clip": 1.0}, "actor_update.clip: must lie in (0, 1). Got 1.0."),
        (PolicyUpdate, {"clip_high": 0.0}, "actor_update.clip_high: must be finite and positive. Got 0.0."),
        (PolicyUpdate, {"entropy_coef": -1.0}, "actor_update.entropy_coef: must be finite and not negative. Got -1.0."),
        (ValueUpdate, {"mini_batches": -1}, "critic_update.mini_batches: must be at least 1. Got -1."),
        (ValueUpdate, {"epochs": 0}, "critic_update.epochs: must be at least 1. Got 0."),
        (ValueUpdate, {"value_clip": 0.0}, "critic_update.value_clip: must be finite and positive. Got 0.0."),
        (ValueUpdate, {"coef": 0.0}, "critic_update.coef: must be finite and positive. Got 0.0."),
        (PPOConfig, {"discount": 1.1}, "discount: must lie in [0, 1]. Got 1.1."),
        (PPOConfig, {"gae_lambda": -0.1}, "gae_lambda: must lie in [0, 1]. Got -0.1."),
        (PPOConfig, {"score_clip": -5.0}, "score_clip: must be finite and positive. Got -5.0."),
        (
            PPOConfig,
            {"missing_stop_penalty": -1.0},
            "missing_stop_penalty: must be finite and not negative. Got -1.0.",
        ),
    ],
)
def test_refuses(make, settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(**settings)


def test_refuses_another_normalization():
    config = PPOConfig()
    object.__setattr__(config, "score_normalization", "all")  # under test, types are checked before __post_init__
    message = "score_normalization: must be none, batch or running. Got 'all'."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        config.__post_init__()
