"""Generation with sliding windows: log-probabilities of the training forward, in every form of the cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.generation.generate import generate
from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.models.config import FULL, SLIDING, ModelConfig
from jaxrlhf.models.heads import policy_outputs
from jaxrlhf.models.params import param_shardings
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.generation.pipelined_cases import B, V, in_slots, make_prompts, model, on_one_device, on_stages, over
from tests.generation.pipelined_cases import P as SHORT
from tests.random_weights import params_of

R = 12
UNIFORM = model(3, sliding_window=3)
MIXED = model(5, sliding_window=3, layer_types=(SLIDING, SLIDING, FULL), rope_local_theta=100.0)
SAMPLING = Sampling(max_new_tokens=R, min_new_tokens=6, stop_ids=tuple(range(0, V, 8)))
TWICE = dataclasses.replace(SAMPLING, num_samples=2)


def logprobs(rollout: Rollout, config: ModelConfig) -> Any:
    """Of the same tokens, by the forward pass that training computes."""
    run = jax.jit(policy_outputs, static_argnums=(2, 3))
    return run(params_of(config), jax.device_get(rollout), config, Layout.over((0,), Strategy())).logprobs


def in_slots_of(config: ModelConfig, drawn: Sampling, slots: Slots, strategy: Strategy, prompts: Prompts) -> Rollout:
    layout = over(strategy)
    weights = jax.device_put(params_of(config), param_shardings(config, layout))
    run = jax.jit(generate, static_argnums=(4, 5, 6, 7), out_shardings=layout.rows)
    given = weights, jax.device_put(prompts, layout.rows), jnp.array([1, 2, 3], jnp.uint32), jnp.float32(0.8)
    return jax.device_get(run(*given, drawn, config, layout, slots))


def prompts_of(columns: int) -> Prompts:
    """From one token to so many."""
    rng = np.random.default_rng(2)
    length_B = np.linspace(1, columns, B).astype(int)
    given = make_prompts()
    return given.replace(
        tokens=jnp.asarray(rng.integers(0, V, (B, columns)), jnp.int32),
        mask=jnp.asarray(np.arange(columns)[None] >= columns - length_B[:, None]),
    )


ON_ONE = Strategy()
CASES = {
    "slots": (UNIFORM, SAMPLING, Slots(3, prefill_rows=2), ON_ONE, 7),
    "chunks of prompts": (MIXED, SAMPLING, Slots(3, prefill_rows=2, prefill_tokens=2), ON_ONE, 7),
    "shared prompts": (MIXED, TWICE, Slots(4, 2, shared_prompts=3, prefill_tokens=4), ON_ONE, 7),
    "shared prompts that a window leaves behind": (UNIFORM, TWICE, Slots(4, 2, shared_prompts=3), ON_ONE, 2),
    "a cache in parts": (MIXED, SAMPLING, Slots(3, prefill_rows=2, prefill_tokens=16), ON_ONE, 150),
    "data, fsdp and tensor": (MIXED, SAMPLING, Slots(2, 2), Strategy(data=2, fsdp=2, tensor=2), 7),
}


@pytest.mark.parametrize("case", CASES)
def test_recorded_logprobs_are_those_of_the_training_forward(case):
    config, drawn, slots, strategy, columns = CASES[case]
    rollout = in_slots_of(config, drawn, slots, strategy, prompts_of(columns))
    assert rollout.lengths.max() > 6
    np.testing.assert_allclose(rollout.logprobs, logprobs(rollout, config), atol=1e-4)


@pytest.mark.parametrize("config", [UNIFORM, MIXED], ids=["all layers", "some layers"])
def test_all_rows_at_once(config):
    rollout = on_one_device(config, SAMPLING, 0.8)
    np.testing.assert_allclose(rollout.logprobs, logprobs(rollout, config), atol=1e-4)
    other = dataclasses.replace(config, sliding_window=SHORT + R)
    assert np.abs(rollout.logprobs - logprobs(rollout, other)).max() > 0.01, "the window shows"


@pytest.mark.parametrize("strategy", [Strategy(pipeline=2, tensor=2), Strategy(pipeline=4)], ids=str)
@pytest.mark.parametrize("slots", [None, Slots(8, prefill_rows=1, prefill_tokens=3, shared_prompts=4)], ids=str)
def test_stages(strategy, slots):
    """Layers of both types are in the same place on different stages."""
    layout = over(strategy)
    if slots is None:
        rollout = on_stages(MIXED, SAMPLING, 0.8, layout)
    else:
        rollout = in_slots(MIXED, TWICE, layout, slots)
    np.testing.assert_allclose(rollout.logprobs, logprobs(rollout, MIXED), atol=1e-4)
