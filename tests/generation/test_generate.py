import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.experience import LENGTH, RUNNING, STOP, Prompts, Rollout, Sampling
from jaxrlhf.generation import continuous_batching
from jaxrlhf.generation.continuous_batching import BatchState, advance, uniforms
from jaxrlhf.generation.decoding_weights import prepare
from jaxrlhf.generation.generate import begin_rollout, continue_rollout, generate, rollout_so_far
from jaxrlhf.generation.rollout_settings import (
    ALL_AT_ONCE,
    RolloutSettings,
    Slots,
    Until,
    decoding_stages,
    mean_columns,
)
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import policy_outputs
from jaxrlhf.models.params import with_layers
from jaxrlhf.models.transformer import hidden_states
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.random_weights import params_of

LAYOUT = Layout.over((0,), Strategy())
B, P, R, V = 6, 5, 8, 97
T = P + R
CONFIG = ModelConfig(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    attention_bias=True,
    qk_norm=True,
)
STOPS = tuple(range(0, V, 5))
SAMPLING = Sampling(max_new_tokens=R, min_new_tokens=2, stop_ids=STOPS)
"""Some sequences stop and some reach the limit."""
NOISE = (16, 2, 3)
GREEDY, RANDOM = 0.0, 0.8
AT_ONCE = RolloutSettings(SAMPLING, ALL_AT_ONCE, CONFIG, LAYOUT)


@functools.cache
@jax.ensure_compile_time_eval()
def params() -> Any:
    """Random weights, and a head that makes some tokens likely."""
    given = params_of(CONFIG)
    return given | {"lm_head": 2 * given["lm_head"]}


def make_prompts(columns: int = P) -> Prompts:
    """Prompts of 1 to 5 tokens, padded on the left with noise."""
    rng = np.random.default_rng(0)
    lengths_B = np.array([5, 3, 1, 4, 2, 5])
    words = [rng.integers(0, V, n) for n in lengths_B]
    tokens_BP = np.random.default_rng(columns).integers(0, V, (B, columns)).astype(np.int32)
    for row_P, word in zip(tokens_BP, words, strict=True):
        row_P[columns - len(word) :] = word
    return Prompts(
        tokens=jnp.asarray(tokens_BP),
        mask=jnp.asarray(np.arange(columns)[None] >= columns - lengths_B[:, None]),
        row=jnp.arange(10, 10 + B, dtype=jnp.int32),
        id=jnp.arange(100, 100 + B, dtype=jnp.uint32),
    )


PROMPTS = make_prompts()


def noise_of(numbers: tuple[int, int, int]) -> jax.Array:
    return jnp.array(numbers, jnp.uint32)


fast_generate = jax.jit(generate, static_argnames=("sampling", "config", "layout", "slots"))


def respond(
    prompts: Prompts = PROMPTS,
    noise: tuple[int, int, int] = NOISE,
    temperature: float = RANDOM,
    sampling: Sampling = SAMPLING,
    slots: Slots = ALL_AT_ONCE,
) -> Rollout:
    """Through `generate`, as numpy arrays."""
    given = fast_generate(params(), prompts, noise_of(noise), jnp.float32(temperature), sampling, CONFIG, LAYOUT, slots)
    return jax.device_get(given)


def take(tree: Any, rows: Any) -> Any:
    return jax.tree.map(lambda x: x[rows], tree)


def assert_same(a: Rollout, b: Rollout) -> None:
    """Tokens, masks and finish reasons equal, log-probabilities near."""
    P_a, P_b = (x.tokens.shape[1] - x.response.shape[1] for x in (a, b))
    for x, y in [
        (a.response, b.response),
        (a.finish, b.finish),
        (a.row, b.row),
        (a.id, b.id),
        (a.tokens[:, P_a:], b.tokens[:, P_b:]),
        (a.mask[:, P_a:], b.mask[:, P_b:]),
    ]:
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    np.testing.assert_allclose(a.sampled_logprobs, b.sampled_logprobs, atol=2e-5)


# What a rollout holds


def test_a_rollout():
    rollout = respond()
    length_B = rollout.response.sum(axis=1)
    assert len(set(length_B.tolist())) > 2 and set(rollout.finish.tolist()) == {STOP, LENGTH}
    np.testing.assert_array_equal(rollout.tokens[:, :P], PROMPTS.tokens)
    np.testing.assert_array_equal(rollout.mask, np.concatenate([PROMPTS.mask, rollout.response], axis=1))
    np.testing.assert_array_equal(rollout.response, np.arange(R)[None] < length_B[:, None])
    np.testing.assert_array_equal(rollout.row, PROMPTS.row)
    np.testing.assert_array_equal(rollout.id, PROMPTS.id)
    for tokens_R, length, reason in zip(rollout.tokens[:, P:], length_B, rollout.finish, strict=True):
        assert length >= SAMPLING.min_new_tokens
        assert not np.isin(tokens_R[: length - 1], STOPS).any()
        assert (tokens_R[length - 1] in STOPS) == (reason == STOP)  # the stop token is part of the response
        assert reason == STOP or length == R
        assert (tokens_R[length:] == 0).all()
    assert (rollout.logprobs[rollout.response] < 0).all()
    for recorded_BR in (rollout.logprobs, rollout.sampled_logprobs):
        np.testing.assert_array_equal(recorded_BR[~rollout.response], 0)


def test_several_stop_tokens_are_used():
    rollouts = [respond(noise=(16, step, 3)) for step in range(4)]
    last = [r.tokens[b, P + r.response[b].sum() - 1] for r in rollouts for b in range(B) if r.finish[b] == STOP]
    assert len(set(last)) > 2


@pytest.mark.parametrize("temperature", [GREEDY, RANDOM])
def test_recorded_logprobs_are_those_of_the_training_forward(temperature):
    rollout = respond(temperature=temperature)
    outputs = fast_policy_outputs(params(), rollout, CONFIG, LAYOUT)
    np.testing.assert_allclose(rollout.logprobs, outputs.logprobs, atol=1e-4)
    assert np.abs(rollout.logprobs[rollout.response]).min() > 0


fast_policy_outputs = jax.jit(policy_outputs, static_argnums=(2, 3))


# Against a loop that computes everything anew for every token


@jax.jit
def next_logits(weights: Any, tokens_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    return hidden_states(weights, tokens_BT, mask_BT, CONFIG, LAYOUT) @ weights["lm_head"]


def naive_loop(uniforms_BR: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, R] and how many of them are drawn, by cumulative sums in float64."""
    tokens_BT, mask_BT = np.zeros((B, T), np.int32), np.zeros((B, T), bool)
    tokens_BT[:, :P], mask_BT[:, :P] = PROMPTS.tokens, PROMPTS.mask
    running_B = np.ones(B, bool)
    for t in range(R):
        logits_BV = np.asarray(next_logits(params(), tokens_BT, mask_BT), np.float64)[:, P + t - 1]
        if t < SAMPLING.min_new_tokens:
            logits_BV[:, list(STOPS)] = -np.inf
        for b in np.flatnonzero(running_B):
            if temperature:
                mass_V = np.exp((logits_BV[b] - logits_BV[b].max()) / temperature)
                token = np.searchsorted(np.cumsum(mass_V), uniforms_BR[b, t] * mass_V.sum(), side="right")
            else:
                token = logits_BV[b].argmax()
            tokens_BT[b, P + t], mask_BT[b, P + t] = token, True
            running_B[b] = token not in STOPS
    return tokens_BT[:, P:], mask_BT[:, P:].sum(axis=1)


def uniforms_of(prompts: Prompts) -> np.ndarray:
    """The noise of every position of each response, [B, R]."""
    return np.asarray(uniforms(noise_of(NOISE), prompts.id, R))


@pytest.mark.parametrize("temperature", [GREEDY, RANDOM])
def test_tokens_of_a_naive_loop(temperature):
    rollout = respond(temperature=temperature)
    tokens_BR, length_B = naive_loop(uniforms_of(PROMPTS), temperature)
    np.testing.assert_array_equal(rollout.tokens[:, P:], tokens_BR)
    np.testing.assert_array_equal(rollout.response.sum(axis=1), length_B)


# A sequence draws the same tokens wherever it is decoded


def test_in_another_order():
    order = np.array([3, 5, 0, 1, 4, 2])
    assert_same(respond(take(PROMPTS, order)), take(respond(), order))


@pytest.mark.parametrize("row", [1, 2])
def test_alone_and_under_another_padding(row):
    only = slice(row, row + 1)
    assert_same(respond(take(make_prompts(columns=P + 3), only)), take(respond(), only))


def test_noise_depends_on_seed_step_call_and_id():
    base = respond()
    for noise in [(0, 2, 3), (16, 0, 3), (16, 2, 0)]:
        assert (respond(noise=noise).tokens != base.tokens).any(axis=1).all()
    other_ids = respond(PROMPTS.replace(id=PROMPTS.id + jnp.uint32(1)))
    assert (other_ids.tokens != base.tokens).any(axis=1).all()
    assert_same(respond(PROMPTS.replace(row=PROMPTS.row)), base)
    greedy = respond(temperature=GREEDY)
    assert_same(respond(noise=(0, 0, 0), temperature=GREEDY), greedy)


def test_the_same_prompt_under_two_ids_gets_two_responses():
    same = PROMPTS.replace(tokens=jnp.tile(PROMPTS.tokens[:1], (B, 1)), mask=jnp.tile(PROMPTS.mask[:1], (B, 1)))
    assert len({tuple(tokens) for tokens in respond(same).tokens.tolist()}) == B
    assert len({tuple(tokens) for tokens in respond(same, temperature=GREEDY).tokens.tolist()}) == 1


def test_several_samples_of_a_prompt_are_those_of_as_many_prompts():
    """Side by side, each under an id of its own, from one prefill."""
    n = 3
    prompts = jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), PROMPTS)
    prompts = prompts.replace(id=PROMPTS.id.repeat(n) * n + jnp.tile(jnp.arange(n, dtype=jnp.uint32), B))
    samples = respond(PROMPTS, sampling=dataclasses.replace(SAMPLING, num_samples=n))
    assert_same(samples, respond(prompts))
    assert samples.tokens.shape == (B * n, T)
    assert not np.array_equal(samples.tokens[0], samples.tokens[1])
    np.testing.assert_array_equal(samples.row, np.repeat(np.asarray(PROMPTS.row), n))


def test_uniforms_lie_in_the_unit_interval_and_are_all_different():
    uniforms_BR = uniforms_of(PROMPTS)
    assert (uniforms_BR >= 0).all() and (uniforms_BR < 1).all()
    assert len(np.unique(uniforms_BR)) == B * R


# Interrupted


@functools.cache
@jax.ensure_compile_time_eval()
def prepared() -> Any:
    return jax.jit(prepare, static_argnums=(1, 2))(params(), CONFIG, LAYOUT)


def begin(prompts: Prompts) -> BatchState:
    return jax.jit(begin_rollout, static_argnames="settings")(prepared(), prompts, settings=AT_ONCE)


GO_ON = jax.jit(continue_rollout, static_argnames=("settings", "tokens"))


def go_on(state: BatchState, num_steps: int) -> BatchState:
    ((tokens, _),) = decoding_stages(P, R)
    given = (prepared(), PROMPTS, state, noise_of(NOISE), jnp.float32(RANDOM))
    return GO_ON(*given, settings=AT_ONCE, until=Until(rounds=num_steps), tokens=tokens)


def test_two_steps_at_a_time():
    state, times = begin(PROMPTS), 0
    while (np.asarray(state.outputs.finish) == RUNNING).any():
        before = np.asarray(state.outputs.lengths)
        state, times = go_on(state, num_steps=2), times + 1
        assert (np.asarray(state.outputs.lengths) - before <= 2).all()
    assert times == R // 2
    assert_same(jax.device_get(rollout_so_far(PROMPTS, state, AT_ONCE)[0]), respond())


def test_no_steps_at_all():
    state = begin(PROMPTS)
    jax.tree.map(np.testing.assert_array_equal, go_on(state, num_steps=0), state)


# The cache


def test_a_growing_cache_changes_nothing():
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=70, min_new_tokens=60)
    assert len(decoding_stages(P, 70)) == 3
    grown = respond(sampling=sampling)
    assert_same(grown, respond(sampling=sampling, slots=Slots(B, prefill_rows=B)))
    assert (grown.response.sum(axis=1) >= 60).all() and set(grown.finish.tolist()) == {STOP, LENGTH}


@pytest.mark.parametrize(("columns", "response"), [(7, 1), (7, 2), (5, 33), (9, 70), (6, 140)])
def test_columns_and_steps_are_those_that_are_told(columns, response, monkeypatch):
    """`decoding_stages` and `mean_columns` against the caches that `generate` decodes over, step by step."""
    sampling = Sampling(max_new_tokens=response, min_new_tokens=response)
    seen: list[tuple[int, int]] = []

    def watched(params, queue, state, *arguments):
        after = advance(params, queue, state, *arguments)
        seen.append((state.caches[0].num_columns, int(after.rounds - state.rounds)))
        return after

    monkeypatch.setattr(continuous_batching, "advance", watched)
    arguments = (noise_of(NOISE), jnp.float32(RANDOM), sampling, CONFIG, LAYOUT)
    generate(params(), make_prompts(columns), *arguments)
    assert seen == decoding_stages(columns, response)
    assert sum(steps for _, steps in seen) == response
    assert mean_columns(columns, response) == pytest.approx(np.mean([c for c, steps in seen for _ in range(steps)]))


def test_a_donated_state_is_updated_in_place():
    state = jax.eval_shape(lambda: begin(PROMPTS))
    donating = jax.jit(continue_rollout, static_argnames=("settings", "tokens"), donate_argnames="state")
    given = (prepared(), PROMPTS, state, noise_of(NOISE), jnp.float32(RANDOM), AT_ONCE, Until(rounds=R))
    compiled = donating.lower(*given, tokens=decoding_stages(P, R)[0][0]).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    cached = jax.tree.leaves((state.caches[0].keys, state.caches[0].values))
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in cached)
    shapes = "|".join(",".join(map(str, x.shape[1:])) for x in cached)
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    assert aliases and aliases[1].count("may-alias") + aliases[1].count("must-alias") >= len(cached)
    assert not re.search(rf"= f32\[(1,)?({shapes})\]\S* copy\(", text)  # neither in the loop nor on its way in or out


# Settings


@pytest.mark.parametrize("stop_ids", [(), STOPS])
def test_one_new_token(stop_ids):
    sampling = Sampling(max_new_tokens=1, stop_ids=stop_ids)
    rollout = respond(sampling=sampling)
    assert rollout.response.all() and rollout.response.shape == (B, 1)
    np.testing.assert_array_equal(rollout.finish, np.where(np.isin(rollout.tokens[:, -1], stop_ids), STOP, LENGTH))
    assert STOP in rollout.finish or not stop_ids


def test_prepare_gives_layers_as_a_list_in_the_compute_precision():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    fast_prepare = jax.jit(prepare, static_argnums=(1, 2))
    from_list, from_stack = (
        fast_prepare(with_layers(params(), stacked=stacked), config, LAYOUT) for stacked in (False, True)
    )
    assert isinstance(from_stack["layers"], list) and len(from_stack["layers"]) == CONFIG.num_layers
    assert {x.dtype for x in jax.tree.leaves(from_stack)} == {jnp.dtype(jnp.bfloat16)}
    jax.tree.map(np.testing.assert_array_equal, from_stack, from_list)
