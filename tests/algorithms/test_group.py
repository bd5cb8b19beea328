import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.algorithms.group import (
    differing,
    group_advantages,
    group_batch,
    group_mean,
    require_group,
)
from jaxrlhf.experience import Sampling
from tests.algorithms.made_up_rollout import MASK, SCORES, B, N, R, make_rollout


def test_group_mean_by_hand():
    np.testing.assert_allclose(group_mean(jnp.array([1.0, 3.0, 5.0, 6.0]), num_samples=2), [2.0, 2.0, 5.5, 5.5])


def test_a_group_of_equal_scores_has_no_advantages():
    scores_B = jnp.array([0.1, 0.1, 0.1, 0.1, 0.7, 0.1])
    np.testing.assert_array_equal(group_advantages(scores_B, num_samples=N, normalize_std=True)[:N], np.zeros(N))
    np.testing.assert_array_equal(differing(scores_B, num_samples=N), [False, True])


def test_batch_and_metrics():
    batch, metrics = group_batch(make_rollout(), jnp.asarray(SCORES), num_samples=N, normalize_std=False)
    want_B = SCORES - np.repeat(SCORES.reshape(2, N).mean(axis=1), N)
    np.testing.assert_allclose(batch["advantages"], np.where(MASK, want_B[:, None], 0.0), rtol=1e-5, atol=1e-6)
    assert batch["advantages"].shape == (B, R) and list(batch) == ["sequences", "advantages"]
    assert metrics["group/differing"] == 1.0
    np.testing.assert_allclose(metrics["group/score_std"], SCORES.reshape(2, N).std(axis=1, ddof=1).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["critic/score/mean"], SCORES.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["critic/advantages/max"], want_B.max(), rtol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "rloo"])
def test_a_group_needs_two(name):
    message = "sampling.num_samples: must be at least 2, since a response is judged beside others to its prompt. Got 1."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ALGORITHMS[name].config(sampling=Sampling())
    require_group(Sampling(num_samples=2))
