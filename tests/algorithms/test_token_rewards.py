from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.policy import PolicyConfig, policy_state, shape_scores
from jaxrlhf.algorithms.token_rewards import merge_moments, moments_of, no_moments, token_rewards
from jaxrlhf.experience import LENGTH, STOP

ALL_STOP = jnp.full(4, STOP)


def test_token_rewards_by_hand():
    scores_B = jnp.array([10.0, 20.0, 30.0])
    kl_BR = jnp.array([[1.0, 2.0, 9.0, 9.0], [1.0, 9.0, 3.0, 4.0], [9.0, 9.0, 9.0, 9.0]])
    mask_BR = jnp.array([[True, True, False, False], [True, False, True, True], [False] * 4])
    rewards_BR = token_rewards(scores_B, kl_BR, mask_BR, kl_coef=0.5)
    np.testing.assert_allclose(rewards_BR, [[-0.5, 9.0, 0.0, 0.0], [-0.5, 0.0, -1.5, 18.0], [0.0] * 4])


def test_penalty_then_clip():
    scores_B, finish_B = jnp.array([3.0, 3.0, -1.0, -1.5]), jnp.array([STOP, LENGTH, LENGTH, STOP])
    config = PolicyConfig(missing_stop_penalty=2.0, score_clip=2.5)
    before = policy_state(config)
    shaped_B, after = shape_scores(scores_B, finish_B, before, config)
    np.testing.assert_allclose(shaped_B, [2.5, 1.0, -2.5, -1.5])
    assert after is before


def test_batch_normalization():
    scores_B = jnp.array([1.0, 2.0, 3.0, 6.0])
    config = PolicyConfig(score_normalization="batch")
    before = policy_state(config).replace(scores=moments_of(jnp.array([100.0, 200.0])))
    shaped_B, after = shape_scores(scores_B, ALL_STOP, before, config)
    np.testing.assert_allclose(shaped_B, np.array([-2.0, -1.0, 0.0, 3.0]) / np.sqrt(3.5), rtol=1e-6)
    assert after is before


def test_running_normalization_sees_every_batch_up_to_the_present_one():
    rng = np.random.default_rng(2)
    batches = rng.normal(5.0, 3.0, (6, 4)).astype(np.float32)
    config = PolicyConfig(score_normalization="running")
    state = policy_state(config)
    for i, scores_B in enumerate(batches):
        shaped_B, state = shape_scores(jnp.asarray(scores_B), ALL_STOP, state, config)
        seen = batches[: i + 1].astype(np.float64)
        np.testing.assert_allclose(shaped_B, (scores_B - seen.mean()) / seen.std(), rtol=1e-4, atol=1e-5)
    assert state.scores.count == 24


def test_normalizing_equal_scores_gives_zeros():
    normalization: Any
    for normalization in ("batch", "running"):
        config = PolicyConfig(score_normalization=normalization)
        shaped_B, _ = shape_scores(jnp.full(4, 7.0), ALL_STOP, policy_state(config), config)
        np.testing.assert_array_equal(shaped_B, np.zeros(4))


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_merged_moments_are_those_of_all(cut):
    x_B = np.random.default_rng(3).normal(2.0, 5.0, 6).astype(np.float32)
    merged = merge_moments(moments_of(jnp.asarray(x_B[:cut])), moments_of(jnp.asarray(x_B[cut:])))
    assert merged.count == 6
    np.testing.assert_allclose(merged.mean, x_B.mean(), rtol=1e-5)
    np.testing.assert_allclose(merged.m2, np.sum(np.square(x_B - x_B.mean())), rtol=1e-5)


def test_merging_with_nothing_changes_nothing():
    one = moments_of(jnp.array([1.0, 5.0]))
    for merged in (merge_moments(no_moments(), one), merge_moments(one, no_moments())):
        assert (merged.count, merged.mean, merged.m2) == (2.0, 3.0, 8.0)
    nothing = merge_moments(no_moments(), no_moments())
    assert (nothing.count, nothing.mean, nothing.m2) == (0.0, 0.0, 0.0)
