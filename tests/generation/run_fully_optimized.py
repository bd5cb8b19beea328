"""Rollouts in slots with XLA's usual flags, whose kernels are not those of the other tests: the bits do not depend on
the order of the prompts, on when they enter, or on how much of the cache is read meanwhile."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.generation.generate import generate
from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.kv_cache import COLUMNS
from jaxrlhf.models.params import init_params
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

B, P, V = 24, 40, 97
CONFIG = ModelConfig(
    vocab_size=V, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=64
)
SAMPLING = Sampling(max_new_tokens=2 * COLUMNS, stop_ids=(1, 2, 3), num_samples=2)
SLOTS = Slots(16, prefill_rows=4)
LAYOUT = Layout.over((0,), Strategy())


def prompts() -> Prompts:
    rng = np.random.default_rng(0)
    mask = np.arange(P)[None] >= P - rng.integers(1, P + 1, B)[:, None]
    tokens = np.where(mask, rng.integers(0, V, (B, P)), 0)
    return Prompts(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask), jnp.arange(B), jnp.arange(B, dtype=jnp.uint32))


def by_id(rollout: Rollout) -> dict[str, np.ndarray]:
    """What sequences have, in the order of their ids."""
    order = np.argsort(rollout.id, kind="stable")
    return {name: getattr(rollout, name)[order] for name in ("tokens", "logprobs", "sampled_logprobs", "finish")}


def check(dtype: str, shared_prompts: int) -> None:
    config = dataclasses.replace(CONFIG, dtype=dtype)
    params = init_params(config, jax.random.key(0))
    orders = [np.arange(B), np.random.default_rng(1).permutation(B), np.arange(B)[::-1]]
    noise, found = jnp.arange(3, dtype=jnp.uint32), list[dict[str, np.ndarray]]()
    for steps, admit in ((8, 0), (1, 1)):
        slots = dataclasses.replace(SLOTS, steps=steps, admit=admit, shared_prompts=shared_prompts)
        run = jax.jit(
            lambda some, slots=slots: generate(params, some, noise, jnp.float32(1), SAMPLING, config, LAYOUT, slots)
        )
        found += [by_id(jax.device_get(run(jax.tree.map(lambda x, o=order: x[o], prompts())))) for order in orders]
    lengths = (found[0]["tokens"][:, P:] > 0).sum(axis=1)
    assert lengths.min() < COLUMNS - P < P < lengths.max(), "some rows need few columns, some all"
    for other in found[1:]:
        for name, array in found[0].items():
            np.testing.assert_array_equal(other[name], array, err_msg=f"{name}, {dtype}, shared {shared_prompts}")


if __name__ == "__main__":
    check("float32", shared_prompts=0)
    check("bfloat16", shared_prompts=4)
