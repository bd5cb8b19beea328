import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.experience import Sequences
from jaxrlhf.models import heads
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import param_shardings
from jaxrlhf.models.transformer import hidden_states
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.random_weights import params_of

LAYOUT = Layout.over((0,), Strategy())
B, P, R, D, V = 4, 5, 6, 16, 97
T = P + R
CONFIG = ModelConfig(vocab_size=V, hidden_size=D, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1)
SCALAR = dataclasses.replace(CONFIG, head="scalar")
UNCHUNKED, CHUNKED, TIGHT, ONE_COLUMN = 4096, 9, 7, 1
"""Tokens of a chunk: all 24; two columns of 4 rows; one column, for two are one token too many; less than that."""


def make_sequences(seed: int = 0) -> Sequences:
    """Prompts of 5, 3, 1 and 2 tokens, responses of 6, 4, 1 and 0."""
    response_BR = np.arange(R)[None] < np.array([6, 4, 1, 0])[:, None]
    prompt_BP = np.arange(P)[None] >= P - np.array([5, 3, 1, 2])[:, None]
    tokens_BT = np.random.default_rng(seed).integers(0, V, (B, T)).astype(np.int32)
    mask_BT = np.concatenate([prompt_BP, response_BR], axis=1)
    return Sequences(tokens=jnp.asarray(tokens_BT), mask=jnp.asarray(mask_BT), response=jnp.asarray(response_BR))


SEQUENCES = make_sequences()
RESPONSE_BR = np.asarray(SEQUENCES.response)


def with_chunks(tokens: int, **changes: Any) -> ModelConfig:
    return dataclasses.replace(CONFIG, logits_chunk_tokens=tokens, **changes)


def outputs(params: Any, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    given = heads.policy_outputs(params, SEQUENCES, config, LAYOUT)
    return given.logprobs, given.entropy


def weighted_sum(params: Any, config: ModelConfig) -> jax.Array:
    logprobs_BR, entropy_BR = outputs(params, config)
    weight_BR = jnp.arange(1.0, B * R + 1).reshape(B, R) / 10
    return (weight_BR * logprobs_BR + weight_BR[::-1] * entropy_BR).sum()


fast_outputs = jax.jit(outputs, static_argnums=1)
fast_gradient = jax.jit(jax.grad(weighted_sum), static_argnums=1)


@functools.cache
def hidden_states_BTD(config: ModelConfig = CONFIG) -> np.ndarray:
    params = params_of(config)
    hidden = jax.jit(hidden_states, static_argnums=(3, 4))(params, SEQUENCES.tokens, SEQUENCES.mask, config, LAYOUT)
    return np.asarray(hidden, np.float64)


def expected_outputs(head_DV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With the log-softmax of the column before each response token, one at a time."""
    logprobs_BR, entropy_BR = np.zeros((B, R)), np.zeros((B, R))
    for b, r in zip(*np.nonzero(RESPONSE_BR), strict=True):
        logits_V = hidden_states_BTD()[b, P + r - 1] @ head_DV
        logprobs_V = logits_V - np.log(np.exp(logits_V - logits_V.max()).sum()) - logits_V.max()
        logprobs_BR[b, r] = logprobs_V[SEQUENCES.tokens[b, P + r]]
        entropy_BR[b, r] = -(np.exp(logprobs_V) * logprobs_V).sum()
    return logprobs_BR, entropy_BR


@pytest.mark.parametrize("chunk_tokens", [UNCHUNKED, CHUNKED])
def test_logprobs_and_entropies(chunk_tokens):
    logprobs_BR, entropy_BR = fast_outputs(params_of(CONFIG), with_chunks(chunk_tokens))
    expected = expected_outputs(np.asarray(params_of(CONFIG)["lm_head"], np.float64))
    np.testing.assert_allclose(logprobs_BR, expected[0], atol=1e-5)
    np.testing.assert_allclose(entropy_BR, expected[1], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(logprobs_BR)[~RESPONSE_BR], 0)
    np.testing.assert_array_equal(np.asarray(entropy_BR)[~RESPONSE_BR], 0)
    assert (np.asarray(entropy_BR)[RESPONSE_BR] > 0.1).all()


def test_a_tied_head_is_the_embedding():
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    params = {name: w for name, w in params_of(CONFIG).items() if name != "lm_head"}
    expected = expected_outputs(np.asarray(params["embedding"], np.float64).T)
    np.testing.assert_allclose(fast_outputs(params, tied), expected, atol=1e-5)


def test_large_logits_stay_finite():
    params = params_of(CONFIG) | {"lm_head": 300 * params_of(CONFIG)["lm_head"]}
    expected = expected_outputs(np.asarray(params["lm_head"], np.float64))
    np.testing.assert_allclose(fast_outputs(params, with_chunks(UNCHUNKED)), expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("chunk_tokens", [CHUNKED, ONE_COLUMN])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens):
    params = params_of(CONFIG)
    whole, chunked = (fast_outputs(params, with_chunks(tokens)) for tokens in (UNCHUNKED, chunk_tokens))
    np.testing.assert_allclose(chunked, whole, atol=1e-6)
    whole, chunked = (fast_gradient(params, with_chunks(tokens)) for tokens in (UNCHUNKED, chunk_tokens))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), chunked, whole)
    assert np.abs(chunked["lm_head"]).max() > 0.1


def plain_weighted_sum(params: Any, config: ModelConfig) -> jax.Array:
    """`weighted_sum` by the log-softmax of all logits, differentiated by JAX."""
    tokens_BT, mask_BT = SEQUENCES.tokens[:, :-1], SEQUENCES.mask[:, :-1]
    hidden_BRD = hidden_states(params, tokens_BT, mask_BT, config, LAYOUT, wanted=P - 1)
    logprobs_BRV = jax.nn.log_softmax(hidden_BRD @ params["lm_head"])
    logprobs_BR = jnp.take_along_axis(logprobs_BRV, SEQUENCES.tokens[:, P:, None], axis=2)[..., 0]
    entropy_BR = -(jnp.exp(logprobs_BRV) * logprobs_BRV).sum(axis=2)
    weight_BR = jnp.arange(1.0, B * R + 1).reshape(B, R) / 10
    return jnp.where(RESPONSE_BR, weight_BR * logprobs_BR + weight_BR[::-1] * entropy_BR, 0.0).sum()


@pytest.mark.parametrize("chunk_tokens", [UNCHUNKED, CHUNKED])
@pytest.mark.parametrize("layout", [LAYOUT, Layout.over((0, 1), Strategy(tensor=2))], ids=str)
def test_the_gradient_is_that_of_a_log_softmax(chunk_tokens, layout):
    config = with_chunks(chunk_tokens, vocab_size=98)  # the vocabulary is split in two
    params = params_of(config)

    def of_chunks(params: Any) -> jax.Array:
        given = heads.policy_outputs(params, SEQUENCES, config, layout)
        weight_BR = jnp.arange(1.0, B * R + 1).reshape(B, R) / 10
        return (weight_BR * given.logprobs + weight_BR[::-1] * given.entropy).sum()

    placed = jax.device_put(params, param_shardings(config, layout))
    given, expected = (
        jax.jit(jax.grad(of_chunks))(placed),
        jax.jit(jax.grad(plain_weighted_sum), static_argnums=1)(params, config),
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), given, expected)


# Which arrays exist


def nested_jaxprs(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [jaxpr for x in value for jaxpr in nested_jaxprs(x)]
    if hasattr(value, "jaxpr"):
        return [value.jaxpr]
    return [value] if hasattr(value, "eqns") else []


def shapes_in(jaxpr: Any) -> set[tuple[int, ...]]:
    """The shapes of all arrays that a program makes, those in loops and checkpoints included."""
    shapes = {tuple(var.aval.shape) for eqn in jaxpr.eqns for var in eqn.outvars}
    inside = [inner for eqn in jaxpr.eqns for x in eqn.params.values() for inner in nested_jaxprs(x)]
    return shapes.union(*map(shapes_in, inside))


def most_logits(function: Any, config: ModelConfig) -> int:
    """Entries of the largest array over the vocabulary, beside weights and their gradients."""
    shapes = shapes_in(jax.make_jaxpr(function, static_argnums=1)(params_of(CONFIG), config).jaxpr)
    assert (T, T) in shapes or (T - 1, T - 1) in shapes  # the walk gets as far as the masks of attention
    return max(int(np.prod(shape)) for shape in shapes - {(D, V), (V, D)} if int(np.prod(shape)) % V == 0)


@pytest.mark.parametrize("function", [outputs, jax.grad(weighted_sum)])
@pytest.mark.parametrize(("chunk_tokens", "most_tokens"), [(CHUNKED, 8), (TIGHT, 4), (ONE_COLUMN, 4), (23, 12)])
def test_no_array_of_all_logits_exists(function, chunk_tokens, most_tokens):
    assert most_logits(function, with_chunks(chunk_tokens)) == most_tokens * V


@pytest.mark.parametrize("function", [outputs, jax.grad(weighted_sum)])
def test_prompts_are_not_projected(function):
    assert most_logits(function, with_chunks(UNCHUNKED)) == B * R * V < B * T * V


def all_logits(params: Any, config: ModelConfig) -> jax.Array:
    hidden_BTD = hidden_states(params, SEQUENCES.tokens, SEQUENCES.mask, config, LAYOUT)

    def one_row(hidden_TD: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(heads.logits(params, hidden_TD, config, LAYOUT))[:, 0]

    return jax.lax.map(jax.checkpoint(one_row), hidden_BTD).sum()


def saved_logits(params: Any, config: ModelConfig) -> jax.Array:
    """Without a checkpoint, the loop saves the logits of every row for its backward pass."""
    hidden_BTD = hidden_states(params, SEQUENCES.tokens, SEQUENCES.mask, config, LAYOUT)
    return jax.lax.map(lambda x: jax.nn.logsumexp(heads.logits(params, x, config, LAYOUT)), hidden_BTD).sum()


def test_the_search_for_logits_looks_into_loops_and_checkpoints():
    assert most_logits(all_logits, CONFIG) == T * V
    assert most_logits(jax.grad(all_logits), CONFIG) == T * V
    assert most_logits(saved_logits, CONFIG) == T * V
    assert most_logits(jax.grad(saved_logits), CONFIG) == B * T * V


# Scalar heads


def test_values_stand_before_each_response_token():
    values_BR = jax.jit(heads.values, static_argnums=(2, 3))(params_of(SCALAR), SEQUENCES, SCALAR, LAYOUT)
    scalar_BT = (hidden_states_BTD(SCALAR) @ np.asarray(params_of(SCALAR)["value_head"], np.float64))[..., 0]
    np.testing.assert_allclose(values_BR, np.where(RESPONSE_BR, scalar_BT[:, P - 1 : T - 1], 0), atol=1e-5)


def test_scores_stand_at_the_last_token():
    scores_B = jax.jit(heads.scores, static_argnums=(2, 3))(params_of(SCALAR), SEQUENCES, SCALAR, LAYOUT)
    scalar_BT = (hidden_states_BTD(SCALAR) @ np.asarray(params_of(SCALAR)["value_head"], np.float64))[..., 0]
    last_B = [T - 1 - np.argmax(mask_T[::-1]) for mask_T in np.asarray(SEQUENCES.mask)]
    assert last_B == [P + 5, P + 3, P, P - 1]  # the last of them has no response
    np.testing.assert_allclose(scores_B, scalar_BT[np.arange(B), last_B], atol=1e-5)


def test_scalar_heads_compute_in_float32():
    config = dataclasses.replace(SCALAR, dtype="bfloat16")
    for function in (heads.values, heads.scores):
        given = jax.eval_shape(functools.partial(function, config=config, layout=LAYOUT), params_of(SCALAR), SEQUENCES)
        assert given.dtype == jnp.float32


def test_logprobs_are_float32_in_bfloat16():
    given = jax.eval_shape(functools.partial(outputs, config=with_chunks(CHUNKED, dtype="bfloat16")), params_of(CONFIG))
    assert [x.dtype for x in given] == [jnp.float32] * 2
