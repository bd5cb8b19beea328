"""What `tensor` does not divide changes no result: key-value heads, of which devices have copies, and vocabularies,
which are padded. Weights keep their true shapes wherever they rest."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.call_graph import split_args
from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.experience import Term
from jaxrlhf.generation.generate import generate
from jaxrlhf.generation.rollout_settings import ALL_AT_ONCE, Slots
from jaxrlhf.models import heads
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import policy_outputs
from jaxrlhf.models.huggingface import load_params, save_params
from jaxrlhf.models.lora import LoRAConfig, init_adapters
from jaxrlhf.models.params import abstract_params, param_shardings, with_layers
from jaxrlhf.models.transformer import hidden_states
from jaxrlhf.programs.call_programs import train_program
from jaxrlhf.programs.optimizer import init_optimizer
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_sets import set_of
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding.strategy import Strategy
from tests.generation.pipelined_cases import P, R, assert_same, given, make_prompts, on_one_device, over, pipelined
from tests.generation.steered import steered
from tests.invariance.plan_runs import ONE_DEVICE, results, run_plans
from tests.invariance.test_plans import assert_the_same
from tests.programs.pipelined_calls import Update
from tests.random_weights import params_of

V, H = 101, 8
CONFIG = ModelConfig(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=H, num_kv_heads=2, head_dim=4,
    attention_bias=True, qk_norm=True, qk_norm_over="projection", tie_embeddings=False, logits_chunk_tokens=16,
)  # fmt: skip
ONE_HEAD = dataclasses.replace(CONFIG, num_kv_heads=1, qk_norm_over="head", tie_embeddings=True, sliding_window=3)
INDIVISIBLE = dataclasses.replace(CONFIG, hidden_size=36)
"""A hidden size that does not divide either: what does not fit rests whole on every device along `tensor`."""
THREE = dataclasses.replace(CONFIG, num_heads=6, intermediate_size=48)
"""For `tensor` 3, with two key-value heads on each device."""
SAMPLING = steered(V, max_new_tokens=R, top_p=0.95, stop_ids=(0, *range(8, V, 16)))
CASES = [
    (CONFIG, Strategy(tensor=4)),
    (CONFIG, Strategy(fsdp=2, tensor=4)),
    (ONE_HEAD, Strategy(tensor=8)),
    (ONE_HEAD, Strategy(data=2, fsdp=2, tensor=2)),
    (INDIVISIBLE, Strategy(fsdp=2, tensor=4)),
    (THREE, Strategy(data=2, tensor=3)),
]
NAMES = [f"{config.num_kv_heads} of {config.num_heads} heads, {strategy}" for config, strategy in CASES]


def on(config: ModelConfig, strategy: Strategy, slots: Slots = ALL_AT_ONCE, temperature: float = 1.0) -> Any:
    """What is sampled over a layout."""
    layout = over(strategy)
    fast = jax.jit(generate, static_argnums=(4, 5, 6, 7), out_shardings=layout.replicated)
    if layout.is_pipelined:
        weights = pipelined(config, layout)
    else:
        weights = reallocate(params_of(config), param_shardings(config, layout))
    return fast(weights, *given(layout, temperature), SAMPLING, config, layout, slots)


@pytest.mark.parametrize(("config", "strategy"), CASES, ids=NAMES)
def test_tokens_and_logprobs_are_those_of_one_device(config, strategy):
    expected = on_one_device(config, SAMPLING, 1.0)
    assert len(np.unique(expected.tokens[:, P:][expected.response])) > 20
    assert_same(on(config, strategy), expected)
    layout = over(strategy)
    weights = jax.device_put(params_of(config), param_shardings(config, layout))
    fast = jax.jit(policy_outputs, static_argnums=(2, 3), out_shardings=layout.replicated)
    outputs = fast(weights, jax.device_put(expected, layout.rows), config, layout)
    wanted = fast(params_of(config), expected, config, over(Strategy()))
    np.testing.assert_allclose(outputs.logprobs, wanted.logprobs, atol=1e-5)
    np.testing.assert_allclose(outputs.entropy, wanted.entropy, atol=1e-5)
    np.testing.assert_allclose(outputs.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("strategy", "slots"),
    [
        (Strategy(tensor=8), Slots(slots=3, prefill_rows=2, prefill_tokens=3)),
        (Strategy(pipeline=2, tensor=4), ALL_AT_ONCE),
        (Strategy(pipeline=2, data=2, tensor=2), Slots(slots=2, prefill_rows=1)),
    ],
    ids=["slots", "stages", "slots over stages"],
)
def test_slots_and_stages_with_one_head(strategy, slots):
    """With layers that slide, over caches in slots, prompts prefilled in chunks, and rings."""
    assert_same(on(ONE_HEAD, strategy, slots), on_one_device(ONE_HEAD, SAMPLING, 1.0))


def test_greedy_tokens_are_those_of_one_device():
    assert_same(on(CONFIG, Strategy(tensor=8), temperature=0.0), on_one_device(CONFIG, SAMPLING, 0.0))


def test_logits_have_no_padding():
    prompts, layout = make_prompts(), over(Strategy(tensor=4))

    @functools.partial(jax.jit, static_argnums=1)
    def logits(params, layout):
        hidden_BTD = hidden_states(params, prompts.tokens % V, prompts.mask, CONFIG, layout)
        return heads.logits(params, hidden_BTD, CONFIG, layout)

    got = logits(jax.device_put(params_of(CONFIG), param_shardings(CONFIG, layout)), layout)
    assert got.shape[-1] == V
    np.testing.assert_allclose(got, logits(params_of(CONFIG), over(Strategy())), atol=1e-5)


def test_weights_rest_in_their_shapes_each_number_on_one_device():
    layout = over(Strategy(fsdp=2, tensor=4))
    for config in (CONFIG, ONE_HEAD):
        shapes, shardings = abstract_params(config), param_shardings(config, layout)
        for x, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True):
            if len(x.shape) > 1:
                assert math.prod(sharding.shard_shape(x.shape)) * 8 == x.size, (x, sharding)


def test_between_layouts_and_to_a_folder_weights_keep_every_bit(tmp_path):
    config = dataclasses.replace(CONFIG, qk_norm=False, qk_norm_over="head")  # a Qwen 2
    moved = weights = params_of(config)
    for strategy in (Strategy(tensor=8), Strategy(fsdp=2, tensor=4), Strategy(data=2, tensor=2), Strategy(tensor=4)):
        moved = reallocate(moved, param_shardings(config, over(strategy)))
    save_params(moved, config, tmp_path, dtype="float32")
    for tree in (moved, load_params(tmp_path, config), load_params(tmp_path, config, over(Strategy(tensor=8)))):
        for got, want in zip(jax.tree.leaves(tree), jax.tree.leaves(weights), strict=True):
            np.testing.assert_array_equal(got, want)


def nll(outputs: Any, batch: Any, update: Any) -> Any:
    mask_BR = batch["sequences"].response
    loss = -(outputs.logprobs * mask_BR).sum() - 0.1 * (outputs.entropy * mask_BR).sum()
    return loss, mask_BR.sum().astype(jnp.float32), {}


def trained(config: ModelConfig, strategy: Strategy, lora: LoRAConfig | None = None) -> Any:
    """Weights or adapters, and the optimizer's moments, after an update of two mini-batches."""
    layout, optimizer = over(strategy), OptimizerConfig(learning_rate=1e-2, eps=1e-3)
    role = ModelRole(config, optimizer, lora=lora, num_updates=10)
    sequences = on_one_device(config, SAMPLING, 1.0)
    arrays, _, rebuild = split_args(((Term(nll, {"sequences": sequences}),), Update()))
    program = train_program(role, rebuild, [True] * len(arrays), layout)
    own = set_of(role)
    shardings = own.shardings(layout)
    first = params_of(config)
    if lora is not None:
        first = init_adapters(config, lora, jax.random.key(1))
        first = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) / 8, first)
    first = jax.device_get(
        with_layers(first, stacked=own.resting_form(layout) == "stacked")
    )  # no program deletes these
    params = reallocate(first, shardings)
    moments = reallocate(init_optimizer(optimizer, first), own.optimizer_shardings(layout))
    noise = np.array([1, 2, 3], np.uint32)
    adapted = None if lora is None else reallocate(params_of(config), param_shardings(config, layout))
    arrays = [reallocate(np.asarray(x), layout.rows) for x in arrays]
    params, moments, metrics = program(params, moments, noise, arrays, adapted)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, first)
    return jax.device_get((params, moments, metrics))


TRAINED = [
    (CONFIG, Strategy(fsdp=2, tensor=4), None),
    (ONE_HEAD, Strategy(tensor=8), None),
    (dataclasses.replace(ONE_HEAD, scan_layers=True), Strategy(data=2, fsdp=2, tensor=2, remat="layer"), None),
    (ONE_HEAD, Strategy(pipeline=2, tensor=2, micro_batches=2), None),
    (INDIVISIBLE, Strategy(data=2, tensor=4), None),
    (CONFIG, Strategy(fsdp=2, tensor=4), LoRAConfig(rank=2, alpha=2.0)),
]


@pytest.mark.parametrize(("config", "strategy", "lora"), TRAINED, ids=lambda x: f"{x}"[:60])
def test_an_update_is_that_of_one_device(config, strategy, lora):
    (params, moments, metrics), (expected, expected_moments, expected_metrics) = (
        trained(config, strategy, lora), trained(config, Strategy(), lora),
    )  # fmt: skip
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], expected_metrics["grad_norm"], rtol=1e-5)
    for got, want in ((params, expected), (moments, expected_moments)):
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


UNEVEN = " --set roles.actor.model.num_kv_heads=1 --set roles.actor.model.vocab_size=267"
RUNS = (  # rows that move from four copies of a head to two; stages; and to two heads on devices of one
    "{default: {data: 2, tensor: 4}, calls: {actor.generate: [{devices: 0-3, tensor: 4, parts: 2, tail: {devices: 0-1, "
    "tensor: 2, rows: 0.25, migrate: cache}}, {devices: 4-7, data: 2, tensor: 2, rows: 0.5, parts: 2, slots: 6}], "
    "actor.train: {fsdp: 2, tensor: 4}, critic.train: {pipeline: 2, data: 2, tensor: 2, micro_batches: 2}, "
    "reference.logprobs: {pipeline: 2, tensor: 4, micro_batches: 2}}}",
    "{default: {data: 4, tensor: 2}, calls: {actor.generate: {pipeline: 2, tensor: 4, slots: 4}, "
    "critic.train: {data: 2, fsdp: 2, tensor: 2}}}",
)


def test_whole_runs_are_those_of_one_device(tmp_path):
    run_plans(tmp_path, [plan + UNEVEN for plan in (ONE_DEVICE, *RUNS)])
    for i in range(len(RUNS)):
        assert_the_same(results(tmp_path, 1 + i), results(tmp_path, 0))
