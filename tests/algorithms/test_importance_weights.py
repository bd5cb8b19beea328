"""Truncated importance weights, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.importance_weights import importance_weights, sequence_weighted, weighted
from jaxrlhf.experience import Rollout

DRAWN = np.log(np.array([[0.5, 0.2, 0.1], [0.4, 0.3, 0.9]], np.float32))
CURRENT = np.log(np.array([[0.25, 0.3, 0.8], [0.4, 0.9, 0.1]], np.float32))
MASK = np.array([[True, True, True], [True, True, False]])


def rollout(weights: np.ndarray | None) -> Rollout:
    zeros, row = jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32)
    return Rollout(
        tokens=zeros.astype(int), mask=jnp.asarray(MASK), response=jnp.asarray(MASK), logprobs=zeros,
        sampled_logprobs=zeros, finish=row, row=row, id=row.astype(jnp.uint32),
        importance_weights=None if weights is None else jnp.asarray(weights),
    )  # fmt: skip


def test_weights_are_ratios_up_to_their_bound():
    weights, metrics = importance_weights(jnp.asarray(DRAWN), jnp.asarray(CURRENT), jnp.asarray(MASK), 2.0)
    expected = np.array([[0.5, 1.5, 2.0], [1.0, 2.0, 0.0]], np.float32)  # 8 and 3 are truncated
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    kept = expected[MASK]
    assert metrics["staleness/weight/mean"] == pytest.approx(kept.mean())
    assert metrics["staleness/weight/max"] == pytest.approx(2.0)
    assert metrics["staleness/weight/truncated"] == pytest.approx(2 / 5)
    assert metrics["staleness/weight/effective"] == pytest.approx(kept.mean() ** 2 / (kept**2).mean())
    assert metrics["staleness/kl"] == pytest.approx(np.mean((DRAWN - CURRENT)[MASK]), rel=1e-5)


def test_a_token_outside_of_responses_cannot_overflow():
    current = np.where(MASK, CURRENT, 1e4).astype(np.float32)
    weights, metrics = importance_weights(jnp.asarray(DRAWN), jnp.asarray(current), jnp.asarray(MASK), 2.0)
    assert np.isfinite(weights).all() and all(np.isfinite(x) for x in metrics.values())


def test_advantages_of_tokens_and_of_sequences():
    weights = np.array([[0.5, 1.0, 2.0], [2.0, 0.5, 0.0]], np.float32)
    advantages = jnp.asarray(np.full((2, 3), -3.0, np.float32))
    np.testing.assert_allclose(weighted(advantages, rollout(weights)), -3 * weights)
    np.testing.assert_allclose(sequence_weighted(advantages[:, 0], rollout(weights)), [-3.0, -3.0], rtol=1e-6)
    assert weighted(advantages, rollout(None)) is advantages
