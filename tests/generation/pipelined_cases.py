"""What pipelined generation is compared on: models, prompts, and both ways to respond to them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.generation.decoding_weights import declare_ring, ring_params
from jaxrlhf.generation.generate import generate
from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import Params, abstract_of, abstract_params, param_shardings
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.random_weights import params_of

B, P, R, V = 8, 4, 6, 96
STOPS = tuple(range(0, V, 8))
NOISE = (1, 2, 3)


def model(num_layers: int, **changes: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        attention_bias=True,
        qk_norm=True,
        **changes,
    )


def sampling(**changes: Any) -> Sampling:
    """Some sequences stop and some reach the limit."""
    return Sampling(**{"max_new_tokens": R, "min_new_tokens": 1, "stop_ids": STOPS, **changes})


def make_prompts() -> Prompts:
    """Prompts of 1 to 4 tokens, padded on the left with noise."""
    rng = np.random.default_rng(1)
    mask_BP = np.arange(P)[None] >= rng.integers(0, P, (B, 1))
    tokens_BP = rng.integers(0, V, (B, P)).astype(np.int32)
    row_B, id_B = np.arange(10, 10 + B, dtype=np.int32), np.arange(100, 100 + B, dtype=np.uint32)
    return Prompts(*map(jnp.asarray, (tokens_BP, mask_BP, row_B, id_B)))


def over(strategy: Strategy) -> Layout:
    return Layout.over(tuple(range(strategy.num_devices)), strategy)


@functools.cache
def on_one_device(config: ModelConfig, drawn: Sampling, temperature: float) -> Rollout:
    """By `generate`, in this process alone."""
    layout = Layout.over((jax.devices().index(jax.local_devices()[0]),), Strategy())
    weights = jax.device_put(params_of(config), layout.replicated)
    fast = jax.jit(generate, static_argnums=(4, 5, 6), out_shardings=layout.rows)
    prompts = jax.device_put(make_prompts(), layout.rows)
    noise = jnp.array(NOISE, jnp.uint32)
    return jax.device_get(fast(weights, prompts, noise, jnp.float32(temperature), drawn, config, layout))


def pipelined(config: ModelConfig, layout: Layout) -> Params:
    """The same weights, first by stages and then as the ring reads them."""
    weights = jax.tree.map(lambda x, like: x.astype(like.dtype), params_of(config), abstract(config))
    return ring_params(reallocate(weights, param_shardings(config, layout)), config, layout, move=reallocate)


def abstract(config: ModelConfig) -> Any:
    return abstract_params(config, config.compute_dtype)


def abstract_ring(config: ModelConfig, layout: Layout) -> Any:
    return abstract_of(declare_ring(config, layout.strategy.pipeline), config.compute_dtype)


def given(layout: Layout, temperature: float) -> tuple[Prompts, jax.Array, jax.Array]:
    """Prompts, noise and temperature on the devices of a layout."""
    prompts = reallocate(jax.tree.map(np.asarray, make_prompts()), layout.rows)
    noise, temperature_ = reallocate((np.array(NOISE, np.uint32), np.float32(temperature)), layout.replicated)
    return prompts, noise, temperature_


def on_stages(config: ModelConfig, drawn: Sampling, temperature: float, layout: Layout) -> Rollout:
    """Through the ring, whole on every device."""
    fast = jax.jit(generate, static_argnums=(4, 5, 6), out_shardings=layout.replicated)
    return fast(pipelined(config, layout), *given(layout, temperature), drawn, config, layout)


def in_slots(
    config: ModelConfig, drawn: Sampling, layout: Layout, slots: Slots, prompts: Prompts | None = None
) -> Rollout:
    """The same in slots. `prompts`: others than those of `make_prompts`."""
    fast = jax.jit(generate, static_argnums=(4, 5, 6, 7), out_shardings=layout.replicated)
    own, noise, temperature = given(layout, 0.8)
    own = own if prompts is None else reallocate(prompts, layout.rows)
    return fast(pipelined(config, layout), own, noise, temperature, drawn, config, layout, slots)


def assert_same(rollout: Rollout, expected: Rollout) -> None:
    """Tokens, masks and finish reasons equal, log-probabilities near."""
    for name in ("tokens", "mask", "response", "finish", "row", "id"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name), err_msg=name)
    for name in ("logprobs", "sampled_logprobs"):
        np.testing.assert_allclose(getattr(rollout, name), getattr(expected, name), atol=1e-5, err_msg=name)
