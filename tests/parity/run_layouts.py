"""One of two processes over whose devices checkpoints of transformers compute what they compute there:
run_layouts.py COORDINATOR NUM_PROCESSES INDEX."""

import sys
from typing import Any

import jax
import numpy as np

coordinator, num_processes, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 8 // num_processes)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, num_processes, index)

from jaxrlhf.experience import Sampling  # noqa: E402
from jaxrlhf.generation.decoding_weights import ring_params  # noqa: E402
from jaxrlhf.generation.generate import generate  # noqa: E402
from jaxrlhf.models import heads  # noqa: E402
from jaxrlhf.models.config import ModelConfig  # noqa: E402
from jaxrlhf.models.huggingface import load_params  # noqa: E402
from jaxrlhf.models.params import Params  # noqa: E402
from jaxrlhf.models.transformer import hidden_states  # noqa: E402
from jaxrlhf.reshard.reallocate import reallocate  # noqa: E402
from jaxrlhf.sharding.layout import Layout  # noqa: E402
from jaxrlhf.sharding.strategy import Strategy  # noqa: E402
from tests.parity.test_huggingface import CONFIGS, DATA, NAMES, TOLERANCE, Goldens, goldens  # noqa: E402

STRATEGIES = (
    Strategy(fsdp=2, tensor=4),  # twice the key-value heads
    Strategy(pipeline=2, data=2, tensor=2),  # a stage in each process
)


def here(x: jax.Array) -> np.ndarray:
    """An array of which every device has a copy."""
    return np.asarray(x.addressable_shards[0].data)


def check_logits(params: Params, config: ModelConfig, layout: Layout, golden: Goldens) -> None:
    def logits(params: Params, tokens_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        return heads.logits(params, hidden_states(params, tokens_BT, mask_BT, config, layout), config, layout)

    tokens_BT, mask_BT = reallocate((golden.tokens_BT, golden.mask_BT), layout.rows)
    logits_BTV = here(jax.jit(logits, out_shardings=layout.replicated)(params, tokens_BT, mask_BT))
    mask = golden.mask_BT
    np.testing.assert_allclose(logits_BTV[mask], golden.logits_BTV[mask], rtol=0, atol=TOLERANCE)


def check_greedy(params: Params, config: ModelConfig, layout: Layout, golden: Goldens) -> None:
    responses_BR = golden.responses_BR
    B, R = responses_BR.shape
    sampling = Sampling(max_new_tokens=R, temperature=0.0)
    prompts = reallocate(jax.tree.map(np.asarray, golden.prompts), layout.rows)
    noise, temperature = reallocate((np.zeros(3, np.uint32), np.float32(0)), layout.replicated)
    decode: Any = jax.jit(generate, static_argnums=(4, 5, 6), out_shardings=layout.replicated)
    rollout = decode(params, prompts, noise, temperature, sampling, config, layout)
    np.testing.assert_array_equal(here(rollout.tokens)[:, -R:], responses_BR)
    P = golden.prompts.tokens.shape[1]
    golden_BRV = np.asarray(jax.nn.log_softmax(golden.logits_BTV[:, P - 1 : -1]))
    golden_BR = np.take_along_axis(golden_BRV, responses_BR[..., None], axis=2)[..., 0]
    assert here(rollout.logprobs).shape == (B, R)
    np.testing.assert_allclose(here(rollout.logprobs), golden_BR, rtol=0, atol=TOLERANCE)


for name in NAMES:
    config, golden = CONFIGS[name], goldens(name)
    for strategy in STRATEGIES:
        layout = Layout.over(tuple(range(8)), strategy)
        params = load_params(DATA / name, config, layout)
        if layout.is_pipelined:
            params = ring_params(params, config, layout, move=reallocate)
        else:
            check_logits(params, config, layout, golden)
        check_greedy(params, config, layout, golden)
