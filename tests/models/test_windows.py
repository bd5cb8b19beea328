"""Sliding windows: which columns are seen, in every way in which a layer is computed."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.attention import block_keys, chunk_attention, column_attention, full_attention, query_blocks
from jaxrlhf.models.config import FULL, SLIDING, ModelConfig
from jaxrlhf.models.params import with_layers
from jaxrlhf.models.spans import Span, layer_spans, spans_on_stage
from tests.models.test_attention import B, attention_in_a_loop, inputs, seen_by
from tests.models.test_transformer import EVERYWHERE, RANDOM_BTD, N, T, distinct_tokens, forward, gradient, ragged_mask
from tests.random_weights import params_of

SMALL = ModelConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2)
MIXED = dataclasses.replace(
    SMALL, num_layers=5, sliding_window=3, layer_types=(SLIDING, FULL, SLIDING), rope_local_theta=50.0
)


def arrays(window: int) -> list[Any]:
    """A window as a number, and as an array."""
    return [window, jnp.int32(window)]


@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_attention_sees_the_window(window):
    S, T = 3, 7
    q, k, v, mask_BT = inputs(S, T, 6, 2)

    def seen(b: int, column: int) -> np.ndarray:
        return np.array([t for t in seen_by(mask_BT[b], column) if t > column - window])

    expected = np.array(
        [[attention_in_a_loop(q[b, s], k[b], v[b], seen(b, T - S + s)) for s in range(S)] for b in range(B)]
    )
    rows_B, at_B = jnp.arange(B), jnp.array([1, 2])
    for given in arrays(window):
        full = jax.jit(functools.partial(full_attention, implementation="xla"))(q, k, v, mask_BT, given)
        np.testing.assert_allclose(full, expected, atol=1e-5)
        one_column = column_attention(q[rows_B, at_B], k, v, mask_BT, T - S + at_B, given)
        np.testing.assert_allclose(one_column, expected[rows_B, at_B], atol=1e-5)
        everywhere = jnp.ones_like(mask_BT)
        in_chunk = chunk_attention(q, k, v, jnp.int32(T - S), given, implementation="xla")
        whole = full_attention(q, k, v, everywhere, given, implementation="xla")
        np.testing.assert_allclose(in_chunk, whole, atol=1e-5)


@pytest.mark.parametrize("window", [1, 10, 70, 500])
def test_blocks_multiply_only_keys_in_the_window(window):
    *given, mask_BT = inputs(150, 200, 6, 2)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=given[0].shape), jnp.float32)

    def summed(q: jax.Array, k: jax.Array, v: jax.Array, window: Any) -> jax.Array:
        return (full_attention(q, k, v, mask_BT, window, implementation="xla") * weight).sum()

    gradients = [jax.jit(jax.value_and_grad(summed, (0, 1, 2)))(*given, jnp.int32(window))]
    gradients.append(jax.jit(jax.value_and_grad(summed, (0, 1, 2)), static_argnums=3)(*given, window))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *gradients)
    widths = [len(block_keys(50 + start, 50 + end, window)) for start, end in query_blocks(150)]
    assert widths == [min(50 + end, end - start + window - 1) for start, end in query_blocks(150)]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_reach_of_layers_is_a_gradient_of_exactly_zero(num_layers):
    """A layer looks back over a window but for its own column, and so does each one below it."""
    config = dataclasses.replace(SMALL, num_layers=num_layers, sliding_window=3)
    tokens_BT = distinct_tokens()
    for t in range(T):
        weight_BTD = RANDOM_BTD * (np.arange(T) == t)[None, :, None]
        by_token = np.asarray(gradient(params_of(config), tokens_BT, EVERYWHERE, weight_BTD, config)["embedding"])
        depends_BT = np.abs(by_token).max(axis=1)[tokens_BT] > 0
        reached_T = (np.arange(T) <= t) & (np.arange(T) >= t - 2 * num_layers)
        np.testing.assert_array_equal(depends_BT, np.broadcast_to(reached_T, depends_BT.shape))


def test_padding_on_either_side_changes_nothing():
    sequence_N = distinct_tokens()[0, :N]
    mask_BT, tokens_BT = ragged_mask(), distinct_tokens(1)
    tokens_BT[mask_BT] = np.tile(sequence_N, len(mask_BT))
    outputs_BTD = np.asarray(forward(params_of(MIXED), tokens_BT, mask_BT, MIXED))
    alone_1ND = np.asarray(forward(params_of(MIXED), sequence_N[None], np.ones((1, N), bool), MIXED))
    for b in range(len(mask_BT)):
        np.testing.assert_allclose(outputs_BTD[b, b : b + N], alone_1ND[0], atol=2e-6)


def test_scanned_layers_of_both_types_equal_a_list_of_layers():
    inputs = (distinct_tokens(), ragged_mask())
    stacked = with_layers(params_of(MIXED), stacked=True)
    np.testing.assert_allclose(forward(stacked, *inputs, MIXED), forward(params_of(MIXED), *inputs, MIXED), atol=1e-6)
    from_list = with_layers(gradient(params_of(MIXED), *inputs, RANDOM_BTD, MIXED), stacked=True)
    from_scan = gradient(stacked, *inputs, RANDOM_BTD, MIXED, remat="layer")
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), from_scan, from_list)


@pytest.mark.parametrize(
    "change",
    [{"sliding_window": 4}, {"sliding_window": 8}, {"layer_types": (SLIDING,)}, {"rope_local_theta": 0.0}],
    ids=str,
)
def test_windows_and_local_rotations_show(change):
    inputs = (distinct_tokens(), EVERYWHERE)
    other = dataclasses.replace(MIXED, **change)
    difference = forward(params_of(MIXED), *inputs, MIXED) - forward(params_of(MIXED), *inputs, other)
    assert np.abs(difference).max() > 0.01


def test_local_layers_turn_by_their_own_theta_whether_or_not_a_window_binds():
    short = dataclasses.replace(MIXED, max_position_embeddings=3)
    assert short.windows == (None,) * 5
    assert [span.is_local for span in layer_spans(short)] == [True, False, True, True, False]
    scaled = dataclasses.replace(MIXED, layer_types=(SLIDING,), rope_theta=7.0)
    by_theta = dataclasses.replace(scaled, rope_theta=50.0, rope_local_theta=0.0)
    inputs = (distinct_tokens(), EVERYWHERE)
    given, expected = (forward(params_of(MIXED), *inputs, config) for config in (scaled, by_theta))
    np.testing.assert_array_equal(given, expected)


def test_spans_of_layers_and_of_stages():
    assert MIXED.windows == (3, None, 3, 3, None)
    assert layer_spans(MIXED) == [Span(window, window == 3) for window in MIXED.windows]
    assert len(layer_spans(dataclasses.replace(MIXED, num_layers=7))) == 7
    for stage in range(2):  # of three and of two layers, of the same types
        assert spans_on_stage(MIXED, 2, jnp.int32(stage)) == [Span(3, True), Span(None, False), Span(3, True)]
    alternating = dataclasses.replace(MIXED, num_layers=2, layer_types=(SLIDING, FULL))
    first, second = (spans_on_stage(alternating, 2, jnp.int32(stage))[0] for stage in range(2))
    assert first.is_local and first.window == 3
    assert not second.is_local and second.window is not None and second.window > 10**9


def test_a_shallow_model_has_the_layers_that_most_are():
    assert MIXED.shallow(2).windows == (3, 3)
    assert dataclasses.replace(MIXED, layer_types=(FULL, FULL, SLIDING)).shallow(2).windows == (None, None)
    assert dataclasses.replace(MIXED, layer_types=()).shallow(1).windows == (3,)
    assert SMALL.shallow(1) == SMALL


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": -1}, "sliding_window: must be positive, or 0 for none. Got -1."),
        (
            {"sliding_window": 4, "layer_types": ("local",)},
            "layer_types: must be some of full_attention, sliding_attention. Got 'local'.",
        ),
        ({"layer_types": (SLIDING,)}, "sliding_window: must be positive for layer_types that slide. Got 0."),
        ({"rope_local_theta": -1.0}, "rope_local_theta: must be finite and not negative. Got -1.0."),
    ],
)
def test_models_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig(**fields)
