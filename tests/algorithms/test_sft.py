import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.algorithms.sft import SFTConfig, SupervisedUpdate, sft_evaluation, sft_loss, sft_step
from jaxrlhf.experience import PolicyOutputs, Sequences

RESPONSE_BR = jnp.array([[True, True, False], [True, False, False]])
DEMONSTRATIONS = Sequences(tokens=jnp.zeros((2, 4), jnp.int32), mask=jnp.ones((2, 4), bool), response=RESPONSE_BR)


def test_loss_is_the_negative_log_likelihood_of_response_tokens():
    outputs = PolicyOutputs(logprobs=jnp.array([[-1.0, -2.0, -9.0], [-4.0, -9.0, -9.0]]), entropy=jnp.zeros((2, 3)))
    loss, weight, metrics = sft_loss(outputs, {"sequences": DEMONSTRATIONS}, SupervisedUpdate())
    assert (loss, weight) == (7.0, 3.0)
    np.testing.assert_equal(metrics, {"loss": loss})


def test_step_trains_the_actor_on_the_demonstrations():
    config = SFTConfig(update=SupervisedUpdate(mini_batches=2, epochs=3))
    roles = SimpleNamespace(actor=SimpleNamespace(train=lambda *args: args, loss=lambda *args: {"of": args}))
    results, state = sft_step(roles, (), DEMONSTRATIONS, config)
    loss, batch, update = results["actor"]
    assert loss is sft_loss and update is config.update
    assert batch["sequences"] is DEMONSTRATIONS and list(batch) == ["sequences"]
    assert state == () and list(results) == ["actor"]
    assert sft_evaluation(roles, (), DEMONSTRATIONS, config)[0] == {"of": (sft_loss, batch, config.update)}
    assert ALGORITHMS["sft"].roles == ("actor",)


@pytest.mark.parametrize("field", ["mini_batches", "epochs"])
def test_refuses(field):
    with pytest.raises(ValueError, match=re.escape(f"update.{field}: must be at least 1. Got 0.")):
        SupervisedUpdate(**{field: 0})
