"""The mathematics of OLMo 2 and Gemma 3, part by part, and models that have all of it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import layers
from jaxrlhf.models.architecture import declare_layer, read_and_written, residuals, tensor_sums
from jaxrlhf.models.config import FULL, PRESETS, SLIDING, ModelConfig, RopeScaling
from jaxrlhf.models.params import init_params, with_layers
from tests.model_variants import VARIANTS
from tests.models.test_transformer import EVERYWHERE, RANDOM_BTD, distinct_tokens, forward, gradient, ragged_mask
from tests.random_weights import params_of

CONFIG = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, qk_norm=True
)
MODELS = {name: dataclasses.replace(CONFIG, **fields) for name, fields in VARIANTS.items()}
OLMO2 = dataclasses.replace(MODELS["olmo2"], norm_eps=1e-12)
"""With an epsilon too small to be seen, so that norms take out any scale."""
INPUTS = (distinct_tokens(), ragged_mask())


def changed(params, **factors):
    """Weights of all layers multiplied."""
    each = [{name: w * factors.get(name, 1.0) for name, w in layer.items()} for layer in params["layers"]]
    return {**params, "layers": each}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_every_weight_is_used(config):
    grads = gradient(params_of(config), distinct_tokens(), EVERYWHERE, RANDOM_BTD, config)
    for layer in grads["layers"]:
        assert set(layer) == set(declare_layer(config))
        assert all(np.abs(g).max() > 1e-5 for g in layer.values())
    assert np.abs(grads["embedding"]).max() > 1e-4


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_scanned_and_rematerialized_layers_give_the_same(config):
    stacked = with_layers(params_of(config), stacked=True)
    np.testing.assert_allclose(
        forward(stacked, *INPUTS, config), forward(params_of(config), *INPUTS, config), rtol=1e-5, atol=1e-5
    )
    from_list = with_layers(gradient(params_of(config), *INPUTS, RANDOM_BTD, config), stacked=True)
    from_scan = gradient(stacked, *INPUTS, RANDOM_BTD, config, remat="layer")
    for given, expected in zip(jax.tree.leaves(from_scan), jax.tree.leaves(from_list), strict=True):
        assert np.linalg.norm(given - expected) <= 1e-4 * np.linalg.norm(expected)


def test_norms_after_the_blocks_take_the_scale_out_of_what_is_added():
    params, expected = params_of(OLMO2), forward(params_of(OLMO2), *INPUTS, OLMO2)
    scaled = changed(params, output=3.0, down=3.0)
    np.testing.assert_allclose(forward(scaled, *INPUTS, OLMO2), expected, atol=1e-3)
    louder = changed(params, attention_output_norm=3.0)
    assert np.abs(forward(louder, *INPUTS, OLMO2) - expected).max() > 0.1
    assert {"attention_norm", "mlp_norm"}.isdisjoint(declare_layer(OLMO2))


def test_queries_and_keys_are_normalized_over_all_heads():
    """A factor of all heads is taken out, one of a single head is not."""
    params, expected = params_of(OLMO2), forward(params_of(OLMO2), *INPUTS, OLMO2)
    scaled = changed(params, query=3.0, key=3.0)
    np.testing.assert_allclose(forward(scaled, *INPUTS, OLMO2), expected, atol=1e-3)
    of_one = np.where(np.arange(32) < 8, 3.0, 1.0).astype(np.float32)[None, :]
    assert np.abs(forward(changed(params, query=of_one), *INPUTS, OLMO2) - expected).max() > 0.1
    per_head = dataclasses.replace(CONFIG, norm_eps=1e-12)
    same = forward(changed(params_of(per_head), query=of_one), *INPUTS, per_head)
    np.testing.assert_allclose(same, forward(params_of(per_head), *INPUTS, per_head), atol=1e-3)
    shapes = {name: w.shape for name, w in declare_layer(OLMO2).items()}
    assert (shapes["query_norm"], shapes["key_norm"]) == ((32,), (16,))


def test_weights_of_norms_are_added_to_one():
    x_BD = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    weight_D = np.random.default_rng(1).normal(size=8).astype(np.float32)
    config = ModelConfig(norm_plus_one=True, norm_eps=0.1)
    expected = x_BD / np.sqrt((x_BD**2).mean(axis=1, keepdims=True) + 0.1) * (1 + weight_D)
    given = layers.normed_by(jnp.asarray(weight_D), jnp.asarray(x_BD), config)
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)
    first = init_params(dataclasses.replace(CONFIG, norm_plus_one=True), jax.random.key(0))
    assert not np.any(first["final_norm"]) and not np.any(first["layers"][0]["query_norm"])


def test_activations():
    rng = np.random.default_rng(0)
    x_BD, gate, up, down = (rng.normal(size=size) for size in [(3, 4), (4, 6), (4, 6), (6, 4)])
    weights = {"gate": jnp.asarray(gate), "up": jnp.asarray(up), "down": jnp.asarray(down)}
    z = x_BD @ gate
    gelu = 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    given = layers.gated_mlp(weights, jnp.asarray(x_BD), "gelu_pytorch_tanh")
    np.testing.assert_allclose(given, (gelu * (x_BD @ up)) @ down, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        given, layers.gated_mlp(layers.join(weights), jnp.asarray(x_BD), "gelu_pytorch_tanh"), rtol=1e-5
    )


def test_scores_are_divided_by_the_root_of_a_number():
    """As if the norm of queries had scaled them."""
    scaled = changed(params_of(CONFIG), query_norm=math.sqrt(8 / 20))
    given = forward(params_of(CONFIG), *INPUTS, dataclasses.replace(CONFIG, query_pre_attn_scalar=20.0))
    np.testing.assert_allclose(given, forward(scaled, *INPUTS, CONFIG), atol=1e-5)
    same = forward(params_of(CONFIG), *INPUTS, dataclasses.replace(CONFIG, query_pre_attn_scalar=8.0))
    np.testing.assert_array_equal(same, forward(params_of(CONFIG), *INPUTS, CONFIG))


def test_embeddings_are_scaled():
    config = dataclasses.replace(CONFIG, scale_embeddings=True)
    scaled = {**params_of(config), "embedding": params_of(config)["embedding"] * math.sqrt(32)}
    np.testing.assert_allclose(forward(params_of(config), *INPUTS, config), forward(scaled, *INPUTS, CONFIG), atol=1e-5)


def test_linear_scaling_stretches_all_wavelengths():
    config = ModelConfig(hidden_size=16, num_heads=1, num_kv_heads=1, rope_scaling=RopeScaling(4.0, type="linear"))
    plain = dataclasses.replace(config, rope_scaling=None)
    scaled, expected = layers.rotary(jnp.arange(0, 40, 4), config), layers.rotary(jnp.arange(10), plain)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), scaled, expected)


def test_costs_of_more_norms():
    both = dataclasses.replace(CONFIG, norms="both")
    assert read_and_written(both).whole - read_and_written(CONFIG).whole == 4 * 32
    assert residuals(both, "none").whole - residuals(CONFIG, "none").whole == 2 * 32
    assert residuals(both, "layer") == residuals(CONFIG, "layer")
    assert tensor_sums(CONFIG) == (4 * 32,) * 2 and tensor_sums(OLMO2) == (4 * 32, 4 * 32, 4, 4)


def test_gemma_3_270m():
    config = ModelConfig(**PRESETS["gemma3-270m"])
    assert config.windows == tuple(None if i % 6 == 5 else 512 for i in range(18))
    assert config.layer_types.count(SLIDING) == 5 and config.layer_types[-1] == FULL
