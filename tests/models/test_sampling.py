import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.experience import Sampling
from jaxrlhf.models.sampling import draw_token

jitted = jax.jit(draw_token, static_argnames="sampling")
PLAIN = Sampling()
N = 512
EVEN_N = ((np.arange(N) + 0.5) / N).astype(np.float32)
"""Uniforms spread evenly: how often a token is drawn is its probability, to within 1 / N."""


def draw(logits_BV, uniform_B, *, temperature: float = 1.0, sampling: Sampling = PLAIN, may_stop: bool = True):
    uniform_B = jnp.asarray(uniform_B, jnp.float32)
    may_stop_B = jnp.full(uniform_B.shape, may_stop)
    logits_BV = jnp.asarray(logits_BV, jnp.float32)
    outputs = jitted(logits_BV, uniform_B, may_stop_B, jnp.float32(temperature), sampling=sampling)
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


def kept_by_sorting(logits_V: np.ndarray, temperature: float, top_k: int, top_p: float) -> set[int]:
    probs_V = softmax(logits_V / temperature)
    order = np.argsort(-probs_V)[: top_k or None]
    probs = probs_V[order] / probs_V[order].sum()
    return {int(token) for token, before in zip(order, np.cumsum(probs) - probs, strict=True) if before < top_p}


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (4, 1.0), (0, 0.35), (0, 0.9), (6, 0.8), (200, 0.01)])
def test_what_top_k_and_top_p_keep(top_k, top_p):
    logits_V, temperature = random_logits(130, seed=1, spread=3.0), 1.5
    token_B, sampled_B, policy_B = draw_evenly(
        logits_V, temperature=temperature, sampling=Sampling(top_k=top_k, top_p=top_p)
    )
    kept = kept_by_sorting(logits_V, temperature, top_k, top_p)
    probs_V = np.where(np.isin(np.arange(130), list(kept)), softmax(logits_V / temperature), 0.0)
    probs_V /= probs_V.sum()
    np.testing.assert_allclose(np.bincount(token_B, minlength=130) / N, probs_V, atol=1.1 / N)
    assert set(token_B.tolist()) <= kept
    np.testing.assert_allclose(sampled_B, np.log(probs_V[token_B]), atol=2e-5)
    _, first = np.unique(token_B, return_index=True)
    if len(first) == len(kept):
        assert np.exp(sampled_B[first]).sum() == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(policy_B, np.log(softmax(logits_V))[token_B], atol=1e-5)


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
