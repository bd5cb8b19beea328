import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.generation.generate import generate
from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.models import heads
from jaxrlhf.models.adapter_files import CONFIG, WEIGHTS, check_adapters, load_adapters, save_adapters
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.layers import Adapted, linear
from jaxrlhf.models.lora import LoRAConfig, adapt, declare_adapters, init_adapters, merge, reads_merged
from jaxrlhf.models.params import init_params, param_shardings, shardings_of, with_layers
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

MODEL = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2)
LORA = LoRAConfig(rank=3, alpha=6.0)
ONE = Layout.over((0,), Strategy())
B, P, R = 4, 3, 5


outputs_of = jax.jit(heads.policy_outputs, static_argnums=(2, 3))


def some_adapters(model=MODEL, lora=LORA):
    """Adapters that change something, as after training."""
    adapters = init_adapters(model, lora, jax.random.key(1))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape), adapters)


def rollout() -> Rollout:
    rng = np.random.default_rng(0)
    response_BR = np.arange(R)[None] < rng.integers(1, R + 1, B)[:, None]
    return Rollout(
        tokens=jnp.asarray(rng.integers(0, 32, (B, P + R)), jnp.int32),
        mask=jnp.asarray(np.concatenate([np.ones((B, P), bool), response_BR], 1)),
        response=jnp.asarray(response_BR),
        logprobs=jnp.zeros((B, R)),
        sampled_logprobs=jnp.zeros((B, R)),
        finish=jnp.ones(B, jnp.int32),
        row=jnp.arange(B),
        id=jnp.arange(B, dtype=jnp.uint32),
    )


def test_an_adapted_weight_multiplies_as_the_sum():
    rng = np.random.default_rng(0)
    x, weight, down, up = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 7, 4), (4, 6), (4, 2), (2, 6)))
    got = linear(jnp.asarray(x), Adapted(weight=weight, down=down, up=up, scale=0.5))
    np.testing.assert_allclose(got, x @ (weight + 0.5 * down @ up), rtol=1e-5, atol=1e-5)


def test_new_adapters_change_nothing_and_a_scalar_head_is_among_them():
    params = init_params(MODEL, jax.random.key(0))
    adapters = init_adapters(MODEL, LORA, jax.random.key(1))
    expected = outputs_of(params, rollout(), MODEL, ONE).logprobs
    got = outputs_of(adapt(params, adapters, MODEL, LORA), rollout(), MODEL, ONE).logprobs
    np.testing.assert_allclose(got, expected, rtol=1e-6)  # joined weights add up in another order
    assert all(np.abs(np.asarray(w["down"])).max() > 0 for w in adapters["layers"][0].values())
    scalar = dataclasses.replace(MODEL, head="scalar")
    assert set(declare_adapters(scalar, LORA)) == {"layers", "value_head"} and set(adapters) == {"layers"}


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(fsdp=2, tensor=2), Strategy(tensor=2)], ids=lambda s: str(s))
@pytest.mark.parametrize("stacked", [False, True])
def test_applied_beside_the_weights_or_merged_they_give_the_same(strategy, stacked):
    layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
    params, adapters = (
        with_layers(x, stacked=stacked) for x in (init_params(MODEL, jax.random.key(0)), some_adapters())
    )
    expected = outputs_of(init_params(MODEL, jax.random.key(0)), rollout(), MODEL, ONE).logprobs
    placed = jax.device_put(params, param_shardings(MODEL, layout, stacked=stacked))
    own = jax.device_put(adapters, shardings_of(declare_adapters(MODEL, LORA, stacked=stacked), layout))
    adapted = adapt(placed, own, MODEL, LORA)
    beside, merged = (outputs_of(p, rollout(), MODEL, layout).logprobs for p in (adapted, jax.jit(merge)(adapted)))
    np.testing.assert_allclose(merged, beside, atol=2e-5)
    assert np.abs(np.asarray(beside) - expected).max() > 0.01
    if strategy.num_devices > 1:
        whole = adapt(init_params(MODEL, jax.random.key(0)), some_adapters(), MODEL, LORA)
        np.testing.assert_allclose(beside, outputs_of(whole, rollout(), MODEL, ONE).logprobs, atol=2e-5)


def test_generation_draws_the_same_tokens_merged_or_not_and_in_slots():
    adapted = adapt(init_params(MODEL, jax.random.key(0)), some_adapters(), MODEL, LORA)
    given = rollout()
    prompts = Prompts(tokens=given.tokens[:, :P], mask=given.mask[:, :P], row=given.row, id=given.id)
    sampling = Sampling(max_new_tokens=R, stop_ids=(0, 1, 2))
    respond = jax.jit(generate, static_argnums=(4, 5, 6))
    noise, temperature = jnp.array([1, 2, 3], jnp.uint32), jnp.float32(1.0)
    one, two = (respond(p, prompts, noise, temperature, sampling, MODEL, ONE) for p in (adapted, merge(adapted)))
    in_slots = jax.jit(generate, static_argnums=(4, 5, 6, 7))
    given = prompts, noise, temperature, sampling, MODEL, ONE, Slots(2, prefill_rows=1)
    for other in (two, in_slots(adapted, *given), in_slots(merge(adapted), *given)):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    trained = outputs_of(adapted, one, MODEL, ONE).logprobs
    np.testing.assert_allclose(one.logprobs, trained, atol=1e-4)


def test_only_what_is_targeted_has_adapters():
    lora = LoRAConfig(rank=2, targets=("query", "down"))
    adapted = adapt(init_params(MODEL, jax.random.key(0)), some_adapters(lora=lora), MODEL, lora)
    assert {name for name, w in adapted["layers"][0].items() if isinstance(w, Adapted)} == {"query", "down"}


def test_merging_pays_where_a_call_has_many_tokens():
    square = LoRAConfig(targets=("query",))  # 16 x 16: once 256 r, 32 r a token
    assert not reads_merged(MODEL, square, 8) and reads_merged(MODEL, square, 9)
    assert reads_merged(MODEL, dataclasses.replace(square, merge="always"), 1)
    assert not reads_merged(MODEL, dataclasses.replace(square, merge="never"), 10**9)


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("stacked", [False, True])
def test_adapters_are_saved_and_loaded_alone(tmp_path, head, stacked):
    model = dataclasses.replace(MODEL, head=head)
    adapters = some_adapters(model)
    save_adapters(with_layers(adapters, stacked=stacked), model, LORA, tmp_path, base="some/model")
    assert {path.name for path in tmp_path.iterdir()} == {WEIGHTS, CONFIG}
    layout = Layout.over((0, 1, 2, 3), Strategy(fsdp=2, tensor=2))
    jax.tree.map(np.testing.assert_array_equal, load_adapters(tmp_path, model, LORA, layout), adapters)
    fields = json.loads((tmp_path / CONFIG).read_text())
    assert (fields["r"], fields["lora_alpha"], fields["base_model_name_or_path"]) == (3, 6.0, "some/model")
    with safe_open(tmp_path / WEIGHTS, "numpy") as file:
        name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
        np.testing.assert_array_equal(file.get_tensor(name), np.asarray(adapters["layers"][1]["down"]["down"]).T)


def test_adapters_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: must hold {CONFIG} and {WEIGHTS}. Got ")):
        check_adapters(tmp_path, MODEL, LORA)
    save_adapters(some_adapters(), MODEL, LORA, tmp_path)
    with pytest.raises(
        ValueError, match=r"adapters must be those that the config describes, \{'r': 4, .*\}. Got \{'r': 3"
    ):
        check_adapters(tmp_path, MODEL, dataclasses.replace(LORA, rank=4))
    wider = dataclasses.replace(MODEL, hidden_size=32)
    with pytest.raises(ValueError, match=r"must hold the adapters that the model and lora declare. Got \(16, 3\) for "):
        check_adapters(tmp_path, wider, LORA)
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"must be a file of safetensors. Got "):
        check_adapters(tmp_path, MODEL, LORA)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank: must be at least 1. Got 0."),
        ({"alpha": 0.0}, "alpha: must be finite and positive. Got 0.0."),
        (
            {"targets": ("q_proj",)},
            "targets: must be some of query, key, value, output, gate, up, down. Got 'q_proj'. Here it is called "
            "query.",
        ),
        ({"targets": ("quer",)}, "Got 'quer'. Did you mean 'query'?"),
        ({"targets": ()}, "targets: must name at least one weight, each once. Got []."),
        ({"targets": ("up", "up")}, "targets: must name at least one weight, each once. Got ['up', 'up']."),
    ],
)
def test_settings_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LoRAConfig(**fields)
