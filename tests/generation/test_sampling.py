import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.data.stop_strings import stop_table
from jaxrlhf.experience import LENGTH, RUNNING, STOP, ResolvedSampling, Sampling
from jaxrlhf.generation.sampling import History, draw_token, next_token
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

jitted = jax.jit(draw_token, static_argnames="sampling")
LAYOUT = Layout.over((0,), Strategy())
PLAIN = Sampling()
N = 512
EVEN_N = ((np.arange(N) + 0.5) / N).astype(np.float32)
"""Uniforms spread evenly: how often a token is drawn is its probability, to within 1 / N."""


def draw(logits_BV, uniform_B, *, temperature: float = 1.0, sampling: Sampling = PLAIN, may_stop: bool = True, **more):
    uniform_B = jnp.asarray(uniform_B, jnp.float32)
    may_stop_B = jnp.full(uniform_B.shape, may_stop)
    logits_BV = jnp.asarray(logits_BV, jnp.float32)
    outputs = jitted(logits_BV, uniform_B, may_stop_B, jnp.float32(temperature), sampling=sampling, **more)
    return tuple(np.asarray(x) for x in outputs)


def random_logits(vocab: int, seed: int = 0, spread: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


def softmax(logits_V: np.ndarray) -> np.ndarray:
    mass_V = np.exp(logits_V.astype(np.float64) - logits_V.max())
    return mass_V / mass_V.sum()


def draw_evenly(logits_V: np.ndarray, **settings):
    return draw(np.tile(logits_V, (N, 1)), EVEN_N, **settings)


@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 130])
def test_inverts_the_cumulative_distribution(vocab):
    logits_BV = np.stack([random_logits(vocab, seed, spread=2.0) for seed in range(N)])
    token_B, _, _ = draw(logits_BV, EVEN_N)
    for logits_V, uniform, token in zip(logits_BV, EVEN_N, token_B, strict=True):
        cumulative_V = np.cumsum(softmax(logits_V))
        below = cumulative_V[token - 1] if token else 0.0
        assert below - 1e-6 <= uniform <= cumulative_V[token] + 1e-6


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-24])
@pytest.mark.parametrize("holes", ["first", "last", "all but one", "blocks"])
def test_tokens_without_mass_are_never_drawn(uniform, holes):
    logits_V = random_logits(130)
    nowhere = list(
        {
            "first": range(70),
            "last": range(60, 130),
            "all but one": set(range(130)) - {97},
            "blocks": range(64, 128),
        }[holes]
    )
    logits_V[nowhere] = -1e30
    token_B, sampled_B, _ = draw(np.tile(logits_V, (N, 1)), np.full(N, uniform))
    token = token_B[0]
    allowed = sorted(set(range(130)) - set(nowhere))
    assert token == (allowed[0] if uniform == 0 else allowed[-1])
    assert sampled_B[0] == pytest.approx(np.log(softmax(logits_V)[token]), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_frequencies_are_the_softmax_at_that_temperature(temperature):
    logits_V = random_logits(130, spread=2.0)
    token_B, sampled_B, policy_B = draw_evenly(logits_V, temperature=temperature)
    expected_V = softmax(logits_V / temperature)
    np.testing.assert_allclose(np.bincount(token_B, minlength=130) / N, expected_V, atol=1.1 / N)
    np.testing.assert_allclose(sampled_B, np.log(expected_V)[token_B], atol=2e-5)
    np.testing.assert_allclose(policy_B, np.log(softmax(logits_V))[token_B], atol=1e-5)


def test_random_noise_gives_the_softmax_too():
    logits_V = random_logits(5)
    uniform_B = jax.random.uniform(jax.random.key(0), (40 * N,))
    token_B, _, _ = draw(np.tile(logits_V, (40 * N, 1)), uniform_B)
    expected_V = softmax(logits_V) * 40 * N
    chi_square = np.sum((np.bincount(token_B, minlength=5) - expected_V) ** 2 / expected_V)
    assert chi_square < 18.5  # 0.1 % of fair draws exceed this with 4 degrees of freedom


def expected(
    logits_V: np.ndarray,
    sampling: Sampling,
    temperature: float,
    prompt: Sequence[int] = (),
    response: Sequence[int] = (),
    may_stop: bool = True,
) -> np.ndarray:
    """The distribution that a `Sampling` describes, token by token and by sorting."""
    changed_V = logits_V.astype(np.float64)
    for token in range(len(logits_V)):
        logit, times = changed_V[token] + sampling.logit_bias.get(token, 0.0), list(response).count(token)
        if token in (*prompt, *response):
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * times + sampling.presence_penalty * (times > 0)
        is_left_out = token in sampling.banned_tokens or (token in sampling.stop_ids and not may_stop)
        if is_left_out or (sampling.allowed_tokens and token not in sampling.allowed_tokens):
            logit = -np.inf
        changed_V[token] = logit / temperature
    probs_V = softmax(changed_V)
    order = np.argsort(-probs_V)[: sampling.top_k or None]
    probs = probs_V[order] / probs_V[order].sum()
    kept = [token for token, before in zip(order, np.cumsum(probs) - probs, strict=True) if before < sampling.top_p]
    kept = [token for token in kept if probs_V[token] >= sampling.min_p * probs_V.max()]
    probs_V[np.setdiff1d(np.arange(len(probs_V)), kept)] = 0.0
    return probs_V / probs_V.sum()


PROMPT, RESPONSE = [3, 8, 64, 100, 100], [5, 64, 5, 5, 101]
CUTS: list[dict[str, Any]] = [
    *({"top_k": 1}, {"top_k": 4}, {"top_p": 0.35}, {"top_p": 0.9}, {"top_k": 6, "top_p": 0.8}),
    *({"top_k": 200, "top_p": 0.01}, {"min_p": 1.0}, {"min_p": 0.1}, {"min_p": 0.02, "top_p": 0.9, "top_k": 50}),
]
CHANGES: list[dict[str, Any]] = [
    *({"repetition_penalty": 1.7}, {"repetition_penalty": 0.6}, {"presence_penalty": 1.5}, {"frequency_penalty": -0.7}),
    *({"logit_bias": {5: 4.0, 80: -100.0}}, {"allowed_tokens": (3, 5, 129)}, {"banned_tokens": tuple(range(60))}),
    {
        "logit_bias": {5: 4.0, 100: 2.0}, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3,
        "banned_tokens": (7, 8), "top_k": 30, "top_p": 0.95, "min_p": 0.01,
    },
]  # fmt: skip


@pytest.mark.parametrize("settings", [*CUTS, *CHANGES], ids=lambda x: " ".join(x))
def test_draws_are_those_of_a_slow_reference(settings):
    logits_V, temperature, sampling = random_logits(130, seed=1, spread=3.0), 1.5, Sampling(**settings)
    seen_V = 2 * np.bincount(RESPONSE, minlength=130) + np.isin(np.arange(130), PROMPT)
    seen_BV = jnp.tile(jnp.asarray(seen_V, jnp.int16), (N, 1)) if sampling.counts_tokens else None
    token_B, sampled_B, policy_B = draw_evenly(logits_V, temperature=temperature, sampling=sampling, seen_BV=seen_BV)
    probs_V = expected(logits_V, sampling, temperature, PROMPT, RESPONSE)
    np.testing.assert_allclose(np.bincount(token_B, minlength=130) / N, probs_V, atol=1.1 / N)
    assert (probs_V[token_B] > 0).all()
    np.testing.assert_allclose(sampled_B, np.log(probs_V[token_B]), atol=2e-5)
    _, first = np.unique(token_B, return_index=True)
    if len(first) == np.count_nonzero(probs_V):
        assert np.exp(sampled_B[first]).sum() == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(policy_B, np.log(softmax(logits_V))[token_B], atol=1e-5)
    greedy_B, _, _ = draw_evenly(logits_V, temperature=0.0, sampling=sampling, seen_BV=seen_BV)
    assert (greedy_B == probs_V.argmax()).all()


V, P, ROWS, STEPS = 70, 4, 24, 12
TOKEN_BYTES = [bytes(np.random.default_rng(i).choice([*b"abc"], i % 4).astype(np.uint8)) for i in range(V)]
"""Tokens of none to three letters."""
STRINGS = ("abca", "cc", "bab")
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.25}
CHAINS: dict[str, dict[str, Any]] = {
    "penalties": PENALTIES | {"stop_ids": (7,)},
    "of the response alone": {"presence_penalty": 1.0, "stop_ids": (7,)},
    "stop strings": {"stop_strings": STRINGS, "min_new_tokens": 3},
    "all": PENALTIES | {"stop_strings": STRINGS, "stop_ids": (7, 8), "min_new_tokens": 2, "min_p": 0.02, "top_p": 0.97},
}


@pytest.mark.parametrize("name", CHAINS)
def test_each_draw_depends_on_the_tokens_before_it_as_in_a_slow_reference(name):
    """Draw after draw: of all that was drawn before, computed anew for every token."""
    settings: dict[str, Any] = CHAINS[name] | {"max_new_tokens": STEPS}
    sampling = Sampling(**settings)
    if sampling.stop_strings:
        sampling = ResolvedSampling(**settings, stop_table=stop_table(STRINGS, TOKEN_BYTES))
    rng, temperature = np.random.default_rng(3), 1.2
    prompts = rng.integers(0, V, (ROWS, P))
    mask_BP = np.arange(P) >= rng.integers(0, P, (ROWS, 1))
    history = History.of_prompts(jnp.asarray(prompts), jnp.asarray(mask_BP), V, sampling, LAYOUT)
    step = jax.jit(functools.partial(next_token, sampling=sampling))
    responses: list[list[int]] = [[] for _ in range(ROWS)]
    reasons = set()
    for num_new in range(STEPS):
        logits_BV, uniform_B = rng.normal(0, 2, (ROWS, V)).astype(np.float32), rng.random(ROWS, np.float32)
        drawn = step(logits_BV, uniform_B, jnp.full(ROWS, num_new), history, jnp.float32(temperature))
        history = drawn.history
        for i, response in enumerate(responses):
            may_stop, token = num_new >= sampling.min_new_tokens, int(drawn.token[i])
            prompt = prompts[i, mask_BP[i]].tolist()
            probs_V = expected(logits_BV[i], sampling, temperature, prompt, response, may_stop)
            cumulative_V = np.cumsum(probs_V)
            assert cumulative_V[token] - probs_V[token] - 1e-5 <= uniform_B[i] <= cumulative_V[token] + 1e-5
            assert drawn.sampled_logprob[i] == pytest.approx(np.log(probs_V[token]), abs=2e-5)
            assert drawn.logprob[i] == pytest.approx(np.log(softmax(logits_BV[i])[token]), abs=2e-5)
            before = b"".join(TOKEN_BYTES[x] for x in response)
            response.append(token)
            reason = LENGTH if num_new == STEPS - 1 else RUNNING
            if may_stop and (
                token in sampling.stop_ids or completes(sampling.stop_strings, before, TOKEN_BYTES[token])
            ):
                reason = STOP
            assert drawn.finish[i] == reason
            reasons.add(reason)
    assert reasons == {RUNNING, STOP, LENGTH}


def completes(strings: Sequence[str], before: bytes, token: bytes) -> bool:
    """Whether a string ends within a token."""
    text = before + token
    ends = range(len(before) + 1, len(text) + 1)
    return any(text[:end].endswith(string.encode()) for string in strings for end in ends)


def test_nothing_is_kept_of_the_tokens_where_nothing_depends_on_them():
    plain = Sampling(top_p=0.5, min_p=0.1, logit_bias={1: 1.0}, banned_tokens=(2,), stop_ids=(3,))
    assert jax.tree.leaves(History.of_rows(2, V, plain, LAYOUT)) == []


def test_stop_strings_need_their_table():
    unresolved = Sampling(stop_strings=("a",))
    changed = ResolvedSampling(stop_strings=("b",), stop_table=stop_table(["a"], TOKEN_BYTES))
    for sampling in (unresolved, changed):
        with pytest.raises(ValueError, match=r"sampling\.stop_strings: must be those of a config, .* Make its table"):
            History.of_rows(2, V, sampling, LAYOUT)


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.91, 4)])
def test_top_p_keeps_just_enough(top_p, kept):
    logits_V = np.log([0.1, 0.4, 0.2, 0.3]).astype(np.float32)
    token_B, sampled_B, _ = draw_evenly(logits_V, sampling=Sampling(top_p=top_p))
    assert set(token_B.tolist()) == {1, 3, 2, 0} & set([1, 3, 2, 0][:kept])
    _, first = np.unique(token_B, return_index=True)
    assert np.exp(sampled_B[first]).sum() == pytest.approx(1.0, abs=1e-5)


def test_equal_tokens_stay_together_under_top_p():
    token_B, _, _ = draw_evenly(np.zeros(4, np.float32), sampling=Sampling(top_p=0.41))
    assert set(token_B.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=4), Sampling(top_p=0.9)])
def test_temperature_zero_is_greedy(sampling):
    logits_BV = np.stack([random_logits(130, seed) for seed in range(N)])
    token_B, sampled_B, policy_B = draw(logits_BV, EVEN_N, temperature=0.0, sampling=sampling)
    np.testing.assert_array_equal(token_B, logits_BV.argmax(axis=1))
    np.testing.assert_array_equal(sampled_B, 0.0)
    np.testing.assert_allclose(policy_B, [np.log(softmax(x).max()) for x in logits_BV], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_stop_tokens_wait_for_min_new_tokens(temperature):
    logits_V = random_logits(130)
    stops = (3, int(logits_V.argmax()))
    settings = {"temperature": temperature, "sampling": Sampling(min_new_tokens=2, stop_ids=stops)}
    token_B, sampled_B, policy_B = draw_evenly(logits_V, may_stop=False, **settings)
    assert not np.isin(token_B, stops).any()
    np.testing.assert_allclose(policy_B, np.log(softmax(logits_V))[token_B], atol=1e-5)
    if temperature:
        left_V = softmax(logits_V / temperature)
        left_V[list(stops)] = 0
        np.testing.assert_allclose(sampled_B, np.log(left_V[token_B] / left_V.sum()), atol=2e-5)
    assert np.isin(draw_evenly(logits_V, may_stop=True, **settings)[0], stops).any()
