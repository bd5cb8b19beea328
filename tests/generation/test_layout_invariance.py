"""The same tokens and log-probabilities on any layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.experience import LENGTH, STOP, PolicyOutputs, Rollout
from jaxrlhf.generation.generate import generate
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import policy_outputs
from jaxrlhf.models.params import param_shardings
from jaxrlhf.sharding.strategy import Strategy
from tests.generation.pipelined_cases import P, R, V, assert_same, make_prompts, over
from tests.generation.steered import steered
from tests.random_weights import params_of

CONFIG = ModelConfig(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    logits_chunk_tokens=16,
)
SAMPLING = steered(V, max_new_tokens=R, top_p=0.95, stop_ids=(0, *range(8, V, 16)))


@functools.cache
def on(strategy: Strategy) -> tuple[Rollout, PolicyOutputs]:
    """What is sampled on a layout, and what the one device's rollout is given there."""
    layout = over(strategy)
    weights = jax.device_put(params_of(CONFIG), param_shardings(CONFIG, layout))
    noise, temperature = jnp.array([1, 2, 3], jnp.uint32), jnp.float32(1.0)
    fast_generate = jax.jit(generate, static_argnums=(4, 5, 6), out_shardings=layout.rows)
    fast_outputs = jax.jit(policy_outputs, static_argnums=(2, 3), out_shardings=layout.rows)
    prompts = jax.device_put(make_prompts(), layout.rows)
    rollout = fast_generate(weights, prompts, noise, temperature, SAMPLING, CONFIG, layout)
    one_device = rollout if strategy == Strategy() else on(Strategy())[0]
    outputs = fast_outputs(weights, jax.device_put(one_device, layout.rows), CONFIG, layout)
    return jax.device_get((rollout, outputs))


def test_the_rollout_is_worth_comparing():
    rollout, outputs = on(Strategy())
    assert set(rollout.finish.tolist()) == {STOP, LENGTH}
    assert len(np.unique(rollout.tokens[:, P:][rollout.response])) > 20
    np.testing.assert_allclose(rollout.logprobs, outputs.logprobs, atol=1e-4)


@pytest.mark.parametrize("strategy", [Strategy(data=8), Strategy(fsdp=4), Strategy(data=2, fsdp=2, tensor=2)], ids=str)
def test_layouts_give_what_one_device_gives(strategy):
    (rollout, outputs), (expected, expected_outputs) = on(strategy), on(Strategy())
    assert_same(rollout, expected)
    np.testing.assert_allclose(outputs.logprobs, expected_outputs.logprobs, atol=1e-5)
    np.testing.assert_allclose(outputs.entropy, expected_outputs.entropy, atol=1e-5)
