import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.policy import policy_state, ppo_policy_loss
from jaxrlhf.algorithms.ppo import ValueUpdate, ppo_batch, value_loss
from jaxrlhf.algorithms.ppo_shared import PPOSharedConfig, SharedUpdate, ppo_shared_loss
from jaxrlhf.experience import PolicyAndValues
from tests.algorithms.made_up_rollout import MASK, REFERENCE, SCORES, VALUES, make_rollout, moved_outputs


def test_loss_is_that_of_both_heads():
    config = PPOSharedConfig(actor_update=SharedUpdate(value_clip=0.3, value_coef=0.25, entropy_coef=0.1))
    reference_BR, values_BR = jnp.asarray(REFERENCE), jnp.asarray(VALUES)
    batch, _, _ = ppo_batch(
        make_rollout(), reference_BR, values_BR, jnp.asarray(SCORES), policy_state(config), config=config
    )
    policy, moved_BR = moved_outputs(), jnp.where(MASK, values_BR * 1.5, 0.0)
    outputs = PolicyAndValues(logprobs=policy.logprobs, entropy=policy.entropy, values=moved_BR)
    update = config.actor_update
    (loss, (weight, metrics)), grads = jax.value_and_grad(
        lambda outputs: (lambda loss: (loss[0], loss[1:]))(ppo_shared_loss(outputs, batch, update)), has_aux=True
    )(outputs)

    actor, actor_weight, actor_metrics = ppo_policy_loss(policy, batch, update)
    critic, critic_weight, critic_metrics = value_loss(moved_BR, batch, ValueUpdate(value_clip=0.3, coef=0.25))
    np.testing.assert_allclose(loss, actor + critic, rtol=1e-6)
    assert weight == actor_weight == critic_weight and not set(actor_metrics) & set(critic_metrics)
    assert set(metrics) == {*actor_metrics, *critic_metrics}
    want_BR = jax.grad(lambda x: value_loss(x, batch, ValueUpdate(value_clip=0.3, coef=0.25))[0])(moved_BR)
    np.testing.assert_allclose(grads.values, want_BR, rtol=1e-5)
    assert np.count_nonzero(grads.logprobs) > 10 and np.count_nonzero(grads.values) > 10


def test_refuses_a_critic_of_its_own():
    message = (
        "ppo_shared: the critic must be a head on the actor's trunk. Got a critic that is a model of its own. Write "
        "roles.critic: {shares: actor}, or take ppo."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ppo_shared_loss(moved_outputs(), {"sequences": make_rollout()}, SharedUpdate())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"value_coef": 0.0}, "actor_update.value_coef: must be finite and positive. Got 0.0."),
        ({"value_clip": 0.0}, "actor_update.value_clip: must be finite and positive. Got 0.0."),
        ({"clip": 1.0}, "actor_update.clip: must lie in (0, 1). Got 1.0."),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SharedUpdate(**settings)
