import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.gspo import SequenceUpdate
from jaxrlhf.algorithms.kl import KLPenalty
from jaxrlhf.algorithms.policy import PolicyConfig, PolicyUpdate, ReinforceUpdate, policy_state, rewarded
from jaxrlhf.algorithms.token_rewards import last_token
from tests.algorithms.made_up_rollout import MASK, REFERENCE, SCORES, N, group_of, kl_k1, make_rollout


def test_rewards_may_carry_a_share_of_the_penalty_and_lose_the_mean_of_their_group():
    config = PolicyConfig(kl=KLPenalty(coef=0.5))
    rewards_BR, batch, _, metrics = rewarded(
        make_rollout(),
        jnp.asarray(REFERENCE),
        jnp.asarray(SCORES),
        policy_state(config),
        config,
        less_mean_of=N,
        kl_share=0.5,
    )
    means_B = np.array([SCORES[list(group_of(b))].mean() for b in range(len(SCORES))])
    want_BR = np.where(last_token(jnp.asarray(MASK)), (SCORES - means_B)[:, None], 0.0) - 0.25 * kl_k1()
    np.testing.assert_allclose(rewards_BR, want_BR, rtol=1e-4, atol=1e-6)
    assert list(batch) == ["sequences"] and metrics["kl/coef"] == 0.5


@pytest.mark.parametrize("update", [PolicyUpdate(), ReinforceUpdate()])
def test_refuses_another_aggregation(update):
    object.__setattr__(update, "aggregation", "mean")  # under test, types are checked before __post_init__
    message = "actor_update.aggregation: must be one of token, sequence, sum, constant. Got 'mean'."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        update.__post_init__()


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (ReinforceUpdate, {"mini_batches": 0}, "actor_update.mini_batches: must be at least 1. Got 0."),
        (ReinforceUpdate, {"epochs": 0}, "actor_update.epochs: must be at least 1. Got 0."),
        (
            ReinforceUpdate,
            {"entropy_coef": -1.0},
            "actor_update.entropy_coef: must be finite and not negative. Got -1.0.",
        ),
        (SequenceUpdate, {"mini_batches": 0}, "actor_update.mini_batches: must be at least 1. Got 0."),
        (SequenceUpdate, {"clip": 1.0}, "actor_update.clip: must lie in (0, 1). Got 1.0."),
        (SequenceUpdate, {"clip_high": 0.0}, "actor_update.clip_high: must be finite and positive. Got 0.0."),
        (
            SequenceUpdate,
            {"entropy_coef": -1.0},
            "actor_update.entropy_coef: must be finite and not negative. Got -1.0.",
        ),
    ],
)
def test_refuses(make, settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(**settings)
