import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.losses import (
    AGGREGATIONS,
    aggregated,
    clipped_policy_loss,
    clipped_sequence_loss,
    clipped_value_loss,
    entropy_bonus,
    kl_loss,
    reinforce_loss,
)
from jaxrlhf.experience import Max

B, R = 4, 6


def draw(seed: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, scale, (B, R)).astype(np.float32)


def draw_mask() -> np.ndarray:
    mask_BR = np.random.default_rng(99).random((B, R)) < 0.6
    mask_BR[2] = False
    return mask_BR


@pytest.mark.parametrize("clip_high", [None, 0.4])
def test_policy_loss_against_a_loop(clip_high):
    old_BR, advantages_BR, mask_BR = draw(0) - 3.0, draw(1), draw_mask()
    new_BR = old_BR + draw(2, scale=0.3)
    metrics: Any
    loss, weight, metrics = clipped_policy_loss(
        *map(jnp.asarray, (new_BR, old_BR, advantages_BR, mask_BR)), clip=0.2, clip_high=clip_high
    )
    total = clipped = kl = count = largest = 0.0
    for b, t in zip(*np.nonzero(mask_BR), strict=True):
        ratio, advantage = math.exp(new_BR[b, t] - old_BR[b, t]), float(advantages_BR[b, t])
        bounded = min(max(ratio, 0.8), 1.2 if clip_high is None else 1.4)
        total += -min(ratio * advantage, bounded * advantage)
        clipped += bounded * advantage < ratio * advantage
        kl += old_BR[b, t] - new_BR[b, t]
        count += 1
        largest = max(largest, ratio)
    assert 0 < clipped < count
    assert weight == count
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    np.testing.assert_allclose(metrics["pg_loss"], total, rtol=1e-5)
    np.testing.assert_allclose(metrics["ppo_kl"], kl, rtol=1e-4)
    assert metrics["pg_clipfrac"] == clipped
    assert isinstance(metrics["ratio_max"], Max)
    np.testing.assert_allclose(metrics["ratio_max"].value, largest, rtol=1e-5)


def test_policy_gradient_is_zero_exactly_where_clipped():
    # ratio: above, below, above, below, inside, one; advantage: +, -, -, +, +, +
    ratio_BR = jnp.array([[1.5, 0.5, 1.5, 0.5, 1.1, 1.0]])
    advantages_BR = jnp.array([[2.0, -2.0, -2.0, 2.0, 2.0, 2.0]])
    mask_BR = jnp.ones((1, 6), bool)

    def loss(logprobs_BR):
        return clipped_policy_loss(logprobs_BR, jnp.zeros((1, 6)), advantages_BR, mask_BR, clip=0.2)[0]

    grads_BR = np.asarray(jax.grad(loss)(jnp.log(ratio_BR)))
    np.testing.assert_array_equal(grads_BR[0, :2], [0.0, 0.0])
    np.testing.assert_allclose(grads_BR[0, 2:], [3.0, -1.0, -2.2, -2.0], rtol=1e-5)  # -A * ratio


def test_masked_tokens_reach_neither_loss_nor_gradient():
    mask_BR = jnp.array([[True, False]])
    bad_BR = jnp.array([[-1.0, jnp.nan]])
    huge_BR = jnp.array([[-1.0, 1e4]])
    old_BR = jnp.array([[-1.0, -1e4]])

    for loss in (
        lambda x: clipped_policy_loss(x, old_BR, bad_BR, mask_BR, clip=0.2)[0],
        lambda x: kl_loss(x, old_BR, jnp.ones(1), mask_BR, estimator="k3")[0] + x[0, 0],
        lambda x: kl_loss(x, bad_BR, jnp.ones(1), mask_BR, estimator="k2")[0] + x[0, 0],
        lambda x: clipped_value_loss(x, old_BR, bad_BR, mask_BR, value_clip=0.2, coef=0.5)[0] + x[0, 0],
        lambda x: entropy_bonus(x, mask_BR, coef=0.1)[0],
    ):
        for x_BR in (bad_BR, huge_BR, -huge_BR):
            value, grads_BR = jax.value_and_grad(loss)(x_BR)
            assert np.isfinite(value) and np.isfinite(grads_BR[0, 0]) and grads_BR[0, 0] != 0.0
            assert grads_BR[0, 1] == 0.0


@pytest.mark.parametrize("value_clip", [None, 0.3])
def test_value_loss_against_a_loop(value_clip):
    old_BR, returns_BR, mask_BR = draw(3), draw(4), draw_mask()
    values_BR = old_BR + draw(5, scale=0.5)
    metrics: Any
    loss, weight, metrics = clipped_value_loss(
        *map(jnp.asarray, (values_BR, old_BR, returns_BR, mask_BR)), value_clip=value_clip, coef=0.25
    )
    total = clipped = 0.0
    for b, t in zip(*np.nonzero(mask_BR), strict=True):
        value, old, target = float(values_BR[b, t]), float(old_BR[b, t]), float(returns_BR[b, t])
        bounded = value if value_clip is None else min(max(value, old - value_clip), old + value_clip)
        total += 0.25 * max((value - target) ** 2, (bounded - target) ** 2)
        clipped += (bounded - target) ** 2 > (value - target) ** 2
    assert (clipped > 0) == (value_clip is not None)
    assert weight == mask_BR.sum()
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    np.testing.assert_allclose(metrics["vf_loss"], total, rtol=1e-5)
    assert metrics["vf_clipfrac"] == clipped
    np.testing.assert_allclose(metrics["vpred_mean"], values_BR[mask_BR].sum(), rtol=1e-4)


def test_entropy_bonus_by_hand():
    entropy_BR, mask_BR = jnp.array([[1.0, 2.0, 9.0]]), jnp.array([[True, True, False]])
    metrics: Any
    loss, weight, metrics = entropy_bonus(entropy_BR, mask_BR, coef=0.5)
    assert (loss, weight, metrics["entropy"]) == (-1.5, 2.0, 3.0)


def test_kl_loss_by_hand():
    logprobs_BR, reference_BR = jnp.array([[-1.0, -1.0], [-2.0, -9.0]]), jnp.array([[-3.0, -2.0], [-5.0, 0.0]])
    mask_BR = jnp.array([[True, True], [True, False]])
    metrics: Any
    loss, weight, metrics = kl_loss(logprobs_BR, reference_BR, jnp.array([0.1, 1.0]), mask_BR, estimator="k2")
    # k2 is 2 and 0.5 in the first row, 4.5 in the second
    np.testing.assert_allclose(loss, 0.25 + 4.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["kl_loss"], 7.0, rtol=1e-6)
    assert weight == 3.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations_against_a_loop(aggregation):
    x_BR, mask_BR = draw(6), draw_mask()
    total, weight = aggregated(jnp.asarray(x_BR), jnp.asarray(mask_BR), aggregation)
    rows = [[float(x_BR[b, t]) for t in range(R) if mask_BR[b, t]] for b in range(B)]
    rows = [row for row in rows if row]  # the third is empty
    want = {
        "token": sum(x for row in rows for x in row) / sum(len(row) for row in rows),
        "sequence": sum(sum(row) / len(row) for row in rows) / len(rows),
        "sum": sum(sum(row) for row in rows) / len(rows),
        "constant": sum(sum(row) / R for row in rows) / len(rows),
    }
    assert len(rows) == 3 and weight == (mask_BR.sum() if aggregation == "token" else 3)
    np.testing.assert_allclose(total / weight, want[aggregation], rtol=1e-5)


@pytest.mark.parametrize("aggregation", ["sequence", "sum", "constant"])
def test_metrics_are_means_over_sequences_of_means_over_tokens(aggregation):
    old_BR, advantages_BR, mask_BR = draw(0) - 3.0, draw(1), draw_mask()
    new_BR = old_BR + draw(2, scale=0.3)
    metrics: Any
    _, weight, metrics = clipped_policy_loss(
        *map(jnp.asarray, (new_BR, old_BR, advantages_BR, mask_BR)), clip=0.2, aggregation=aggregation
    )
    drops = [(old_BR - new_BR)[b][mask_BR[b]].mean() for b in range(B) if mask_BR[b].any()]
    np.testing.assert_allclose(metrics["ppo_kl"] / weight, np.mean(drops), rtol=1e-4)
    loss, weight, metrics = entropy_bonus(jnp.ones((B, R)), jnp.asarray(mask_BR), coef=0.5, aggregation=aggregation)
    assert metrics["entropy"] == weight == 3.0
    mean_tokens = mask_BR.sum() / 3
    scale = {"sequence": 1.0, "sum": mean_tokens, "constant": mean_tokens / R}[aggregation]
    np.testing.assert_allclose(loss / weight, -0.5 * scale, rtol=1e-5)


def test_sequence_loss_against_a_loop():
    old_BR, advantages_B, mask_BR = draw(0) - 3.0, draw(1)[:, 0], draw_mask()
    new_BR = np.where(mask_BR, old_BR + draw(2, scale=0.3), np.nan)  # nothing reads what is masked
    metrics: Any
    loss, weight, metrics = clipped_sequence_loss(
        *map(jnp.asarray, (new_BR, old_BR, advantages_B, mask_BR)), clip=0.02, clip_high=0.03
    )
    total = clipped = largest = drop = 0.0
    for b in range(B):
        tokens = [t for t in range(R) if mask_BR[b, t]]
        if tokens:
            log_ratio = sum(new_BR[b, t] - old_BR[b, t] for t in tokens) / len(tokens)
            ratio, advantage = math.exp(log_ratio), float(advantages_B[b])
            bounded = min(max(ratio, 0.98), 1.03)
            total -= min(ratio * advantage, bounded * advantage)
            clipped += bounded * advantage < ratio * advantage
            largest, drop = max(largest, ratio), drop - log_ratio
    assert 0 < clipped < 3 and weight == 3.0
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    assert metrics["pg_clipfrac"] == clipped and metrics["pg_loss"] == loss
    np.testing.assert_allclose(metrics["ratio_max"].value, largest, rtol=1e-5)
    np.testing.assert_allclose(metrics["ppo_kl"], drop, rtol=1e-4)


def test_reinforce_gradient_by_hand():
    advantages_BR, mask_BR = jnp.array([[2.0, -1.0, 5.0], [3.0, 5.0, 5.0]]), jnp.array([[1, 1, 0], [1, 0, 0]], bool)

    def loss(x_BR, aggregation):
        total, weight, _ = reinforce_loss(x_BR, advantages_BR, mask_BR, aggregation=aggregation)
        return total / weight

    at_BR = jnp.where(mask_BR, -1.0, jnp.nan)
    np.testing.assert_allclose(jax.grad(loss)(at_BR, "sum"), [[-1.0, 0.5, 0.0], [-1.5, 0.0, 0.0]])
    np.testing.assert_allclose(jax.grad(loss)(at_BR, "token"), np.array([[-2.0, 1.0, 0.0], [-3.0, 0.0, 0.0]]) / 3)
    assert reinforce_loss(at_BR, advantages_BR, mask_BR, aggregation="sum")[2]["pg_loss"] == 4.0
