import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import layers
from jaxrlhf.models.config import PRESETS, ModelConfig, RopeScaling
from jaxrlhf.models.params import with_layers
from jaxrlhf.models.transformer import hidden_states
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.random_weights import params_of

CONFIG = ModelConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2)
FULL = dataclasses.replace(CONFIG, attention_bias=True, qk_norm=True)
"""With every optional weight."""
LAYOUT = Layout.over((0,), Strategy())
B, T, N = 4, 8, 5
"""N: tokens of a sequence that is shorter than its row."""


@functools.partial(jax.jit, static_argnames=("config", "first"))
def forward(params, tokens_BT, mask_BT, config: ModelConfig = FULL, first: int = 0):
    return hidden_states(params, tokens_BT, mask_BT, config, LAYOUT, wanted=first)


@functools.partial(jax.jit, static_argnames=("config", "remat"))
def gradient(params, tokens_BT, mask_BT, weight_BTD, config: ModelConfig = FULL, remat: Any = "none"):
    """The gradient of a weighted sum of the outputs with respect to the weights."""

    def weighted_sum(params):
        return (hidden_states(params, tokens_BT, mask_BT, config, LAYOUT, remat=remat) * weight_BTD).sum()

    return jax.grad(weighted_sum)(params)


def distinct_tokens(seed: int = 0) -> np.ndarray:
    """No token twice."""
    return np.random.default_rng(seed).permutation(97)[: B * T].reshape(B, T).astype(np.int32)


def ragged_mask() -> np.ndarray:
    """Row b: N real tokens with b columns of padding before them."""
    columns_T = np.arange(T)
    return np.stack([(columns_T >= b) & (columns_T < b + N) for b in range(B)])


EVERYWHERE = np.ones((B, T), bool)
RANDOM_BTD = np.random.default_rng(3).normal(size=(B, T, 32)).astype(np.float32)


# Which tokens an output depends on


def test_causality_is_a_gradient_of_exactly_zero():
    tokens_BT = distinct_tokens()
    for t in range(T):
        weight_BTD = RANDOM_BTD * (np.arange(T) == t)[None, :, None]
        by_token = np.asarray(gradient(params_of(FULL), tokens_BT, EVERYWHERE, weight_BTD)["embedding"])
        depends_BT = np.abs(by_token).max(axis=1)[tokens_BT] > 0
        np.testing.assert_array_equal(depends_BT, np.broadcast_to(np.arange(T) <= t, (B, T)))


def test_padding_on_either_side_changes_nothing():
    sequence_N = distinct_tokens()[0, :N]
    mask_BT, tokens_BT = ragged_mask(), distinct_tokens(1)  # what stands under the padding is noise
    tokens_BT[mask_BT] = np.tile(sequence_N, B)
    outputs_BTD = np.asarray(forward(params_of(FULL), tokens_BT, mask_BT))
    alone_1ND = np.asarray(forward(params_of(FULL), sequence_N[None], np.ones((1, N), bool)))
    for b in range(B):
        np.testing.assert_allclose(outputs_BTD[b, b : b + N], alone_1ND[0], atol=2e-6)


def test_rows_do_not_see_each_other():
    tokens_BT, order_B = distinct_tokens(), np.array([2, 0, 3, 1])
    outputs_BTD = np.asarray(forward(params_of(FULL), tokens_BT, EVERYWHERE))
    reordered_BTD = np.asarray(forward(params_of(FULL), tokens_BT[order_B], EVERYWHERE))
    np.testing.assert_allclose(reordered_BTD, outputs_BTD[order_B], atol=1e-6)
    beside_others = np.concatenate([tokens_BT[:1], distinct_tokens(1)[1:]])
    np.testing.assert_allclose(forward(params_of(FULL), beside_others, EVERYWHERE)[0], outputs_BTD[0], atol=1e-6)


def test_padding_gives_finite_outputs_and_gradients():
    nothing = np.zeros((B, T), bool)
    assert np.isfinite(forward(params_of(FULL), distinct_tokens(), nothing)).all()
    grads = gradient(params_of(FULL), distinct_tokens(), nothing, RANDOM_BTD)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


# One model, computed in several ways


def test_first_is_a_slice():
    inputs = (distinct_tokens(), ragged_mask())
    whole_BTD = np.asarray(forward(params_of(FULL), *inputs))
    np.testing.assert_allclose(forward(params_of(FULL), *inputs, first=3), whole_BTD[:, 3:], atol=1e-6)
    stacked = with_layers(params_of(FULL), stacked=True)
    np.testing.assert_allclose(forward(stacked, *inputs, first=3), whole_BTD[:, 3:], atol=1e-6)


def test_one_column_of_each_sequence():
    inputs, at_B = (distinct_tokens(), ragged_mask()), np.array([N - 1, 3, 0, 7])
    whole_BTD = np.asarray(forward(params_of(FULL), *inputs))
    for weights in (params_of(FULL), with_layers(params_of(FULL), stacked=True)):
        given_B1D = jax.jit(hidden_states, static_argnums=(3, 4))(weights, *inputs, FULL, LAYOUT, wanted=at_B)
        assert given_B1D.shape == (B, 1, 32)
        np.testing.assert_allclose(given_B1D[:, 0], whole_BTD[np.arange(B), at_B], atol=1e-6)


def test_scanned_layers_equal_a_list_of_layers():
    inputs = (distinct_tokens(), ragged_mask())
    stacked = with_layers(params_of(FULL), stacked=True)
    np.testing.assert_allclose(forward(stacked, *inputs), forward(params_of(FULL), *inputs), atol=1e-6)
    from_list = with_layers(gradient(params_of(FULL), *inputs, RANDOM_BTD), stacked=True)
    from_scan = gradient(stacked, *inputs, RANDOM_BTD, remat="layer")
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), from_scan, from_list)


@pytest.mark.parametrize("remat", ["dots", "layer"])
def test_recomputing_changes_no_gradient(remat):
    inputs = (distinct_tokens(), ragged_mask(), RANDOM_BTD)
    expected = gradient(params_of(FULL), *inputs)
    recomputed = gradient(params_of(FULL), *inputs, remat=remat)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), recomputed, expected)


def count_products(jaxpr: Any) -> int:
    """Matrix products in a program and the programs inside it."""
    values = [x for eqn in jaxpr.eqns for x in eqn.params.values()]
    nested = [getattr(x, "jaxpr", x) for x in values if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
    return sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns) + sum(map(count_products, nested))


def test_what_is_recomputed():
    inputs = (distinct_tokens(), ragged_mask(), RANDOM_BTD)

    def num_products(remat: str) -> int:
        return count_products(jax.make_jaxpr(functools.partial(gradient, remat=remat))(params_of(FULL), *inputs).jaxpr)

    none, dots, layer = num_products("none"), num_products("dots"), num_products("layer")
    with_weights, in_attention = 4, 2  # queries, keys and values are one product, gate and up another
    assert none == 3 * FULL.num_layers * (with_weights + in_attention)
    assert none < dots <= none + FULL.num_layers * in_attention
    assert dots < layer <= none + FULL.num_layers * (with_weights + in_attention)


def test_bfloat16_is_near_float32():
    config = dataclasses.replace(FULL, dtype="bfloat16")
    inputs = (distinct_tokens(), EVERYWHERE)
    rough = forward(params_of(FULL), *inputs, config=config)
    assert rough.dtype == jnp.bfloat16
    exact = np.asarray(forward(params_of(FULL), *inputs))
    error = np.abs(np.asarray(rough, np.float32) - exact)
    assert 0 < error.mean() < 0.02 and error.max() < 0.15  # outputs are of order 1; bfloat16 keeps 8 bits
    grads = gradient(params_of(FULL), *inputs, RANDOM_BTD, config=config)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    expected = gradient(params_of(FULL), *inputs, RANDOM_BTD)
    for rough_g, g in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(rough_g - g) <= 0.05 * np.linalg.norm(g)


def test_every_weight_is_used():
    grads = gradient(params_of(FULL), distinct_tokens(), EVERYWHERE, RANDOM_BTD)
    names = set(grads["layers"][0])
    assert {"query_bias", "key_bias", "value_bias", "query_norm", "key_norm"} <= names
    for layer in grads["layers"]:
        assert all(np.abs(g).max() > 1e-4 for g in layer.values())


def test_qk_norm_takes_the_scale_out_of_queries():
    scaled = jax.tree.map(lambda x: x, params_of(FULL))
    for layer in scaled["layers"]:
        layer["query"], layer["query_bias"] = 3 * layer["query"], 3 * layer["query_bias"]
    inputs = (distinct_tokens(), EVERYWHERE)
    np.testing.assert_allclose(forward(scaled, *inputs), forward(params_of(FULL), *inputs), atol=1e-4)
    for layer in scaled["layers"]:
        layer["query_norm"] = 3 * layer["query_norm"]
    assert np.abs(forward(scaled, *inputs) - forward(params_of(FULL), *inputs)).max() > 0.1


# The parts, against plain numpy


@pytest.mark.parametrize("scaling", [None, RopeScaling(4.0, 1.0, 4.0, 64), RopeScaling(8.0, 2.0, 10.0, 80)])
def test_rotary_positions(scaling):
    h = 16
    config = ModelConfig(hidden_size=h, num_heads=1, num_kv_heads=1, rope_theta=100.0, rope_scaling=scaling)
    positions_BT = np.array([[0, 1, 2], [7, 100, 2000]], np.int32)
    x_BTHh = np.random.default_rng(0).normal(size=(2, 3, 2, h)).astype(np.float32)
    turned = layers.rotate(jnp.asarray(x_BTHh), layers.rotary(jnp.asarray(positions_BT), config))
    kinds = set()
    for b, t, i in np.ndindex(2, 3, h // 2):
        frequency = 100.0 ** (-2 * i / h)
        if scaling is not None:
            wavelength = 2 * np.pi / frequency
            low = scaling.original_max_position_embeddings / scaling.low_freq_factor
            high = scaling.original_max_position_embeddings / scaling.high_freq_factor
            if wavelength > low:
                kinds.add("stretched")
                frequency = frequency / scaling.factor
            elif wavelength >= high:
                kinds.add("between")
                smooth = (low * scaling.low_freq_factor / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
            else:
                kinds.add("kept")
        turn = np.exp(1j * positions_BT[b, t] * frequency)
        expected_H = (x_BTHh[b, t, :, i] + 1j * x_BTHh[b, t, :, i + h // 2]) * turn
        given_H = np.asarray(turned[b, t, :, i]) + 1j * np.asarray(turned[b, t, :, i + h // 2])
        np.testing.assert_allclose(given_H, expected_H, atol=2e-3 if positions_BT[b, t] > 100 else 1e-4)
    assert scaling is None or kinds == {"stretched", "between", "kept"}


def test_rms_norm():
    x_BD = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    weight_D = np.random.default_rng(1).normal(size=8).astype(np.float32)
    expected = [[x * w / np.sqrt(sum(row**2) / 8 + 0.1) for x, w in zip(row, weight_D, strict=True)] for row in x_BD]
    given = layers.rms_norm(jnp.asarray(x_BD), jnp.asarray(weight_D), 0.1)
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)


def test_gated_mlp():
    rng = np.random.default_rng(0)
    x_BD, gate, up, down = (rng.normal(size=size) for size in [(3, 4), (4, 6), (4, 6), (6, 4)])
    weights = {"gate": jnp.asarray(gate), "up": jnp.asarray(up), "down": jnp.asarray(down)}
    gated = x_BD @ gate
    expected = (gated / (1 + np.exp(-gated)) * (x_BD @ up)) @ down
    given = layers.gated_mlp(weights, jnp.asarray(x_BD))
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_joined_weights_give_the_same(bias):
    config = dataclasses.replace(FULL, attention_bias=bias)
    separate = params_of(config)["layers"][0]
    joined = layers.join(separate)
    assert layers.is_joined(joined) and len(joined) == len(separate) - (5 if bias else 3)
    x_BTD = jnp.asarray(RANDOM_BTD)
    rotation = layers.rotary(jnp.broadcast_to(jnp.arange(T), (B, T)), config)
    expected = [
        layers.queries(separate, x_BTD, rotation, config),
        *layers.keys_values(separate, x_BTD, rotation, config),
    ]
    for given in (
        layers.queries_keys_values(separate, x_BTD, rotation, config),
        layers.queries_keys_values(joined, x_BTD, rotation, config),
        [layers.queries(joined, x_BTD, rotation, config), *layers.keys_values(joined, x_BTD, rotation, config)],
    ):
        assert [x.shape[2] for x in given] == [4, 2, 2]
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), list(given), expected)
    np.testing.assert_allclose(layers.gated_mlp(joined, x_BTD), layers.gated_mlp(separate, x_BTD), atol=1e-5)


# What a model may be


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({name: 0}, f"{name}: must be at least 1. Got 0.")
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "max_position_embeddings",
                "logits_chunk_tokens",
            )
        ),
        (
            {"num_heads": 4, "num_kv_heads": 3},
            "num_kv_heads: must divide num_heads=4, since each key-value head serves a group of queries. Got 3.",
        ),
        (
            {"hidden_size": 130, "num_heads": 4, "num_kv_heads": 4},
            "num_heads: must divide hidden_size=130 unless head_dim is given. Got 4.",
        ),
        ({"head_dim": 7}, "head_dim: must be even, since rotary positions turn pairs. Got 7."),
        ({"hidden_size": 12, "num_heads": 4}, "head_dim: must be even, since rotary positions turn pairs. Got 3."),
    ],
)
def test_models_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig(**fields)


def test_head_dim_is_derived_or_given():
    assert ModelConfig(hidden_size=128, num_heads=4).head_size == 32
    assert ModelConfig(hidden_size=130, num_heads=4, head_dim=24).head_size == 24


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_models(preset):
    assert ModelConfig(**PRESETS[preset]).num_layers >= 2
