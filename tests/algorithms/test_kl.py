import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.kl import ESTIMATORS, KLPenalty, adapt_kl_coef, k1, k2, k3

POLICY = np.array([0.5, 0.25, 0.2, 0.05])
REFERENCE = np.array([0.3, 0.3, 0.1, 0.3])
EXACT_KL = float(np.sum(POLICY * np.log(POLICY / REFERENCE)))


def log_row(probabilities: np.ndarray) -> jax.Array:
    return jnp.log(jnp.asarray(probabilities, jnp.float32))[None]


def test_by_hand():
    logprobs_BR, reference_BR = jnp.array([[-1.0, -2.0]]), jnp.array([[-3.0, -1.0]])
    np.testing.assert_allclose(k1(logprobs_BR, reference_BR), [[2.0, -1.0]])
    np.testing.assert_allclose(k2(logprobs_BR, reference_BR), [[2.0, 0.5]])
    np.testing.assert_allclose(k3(logprobs_BR, reference_BR), [[1.0 + np.exp(-2.0), np.e - 2.0]], rtol=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_over_every_token_of_a_distribution(name):
    kl_BR = ESTIMATORS[name](log_row(POLICY), log_row(REFERENCE))
    np.testing.assert_allclose(np.sum(POLICY * np.asarray(kl_BR)[0]), EXACT_KL, rtol=1e-5)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_never_negative_and_zero_only_where_equal(name):
    log_ratio_BR = jnp.linspace(-4.0, 4.0, 41)[None]
    kl_BR = np.asarray(ESTIMATORS[name](log_ratio_BR, jnp.zeros((1, 41))))
    zero = np.abs(np.asarray(log_ratio_BR)) < 1e-6
    assert np.all(kl_BR[~zero] > 0)
    np.testing.assert_allclose(kl_BR[zero], 0.0, atol=1e-10)


def test_small_log_ratios_keep_their_digits_in_k3():
    np.testing.assert_allclose(k3(jnp.array([[1e-2]]), jnp.zeros((1, 1))), [[4.98337e-5]], rtol=1e-4)


def test_gradient_in_expectation():
    """On the policy's own tokens: none for k1, the KL's for k2."""
    logits = jnp.log(jnp.asarray(POLICY, jnp.float32))

    def expected(logits, name):
        kl_BR = ESTIMATORS[name](jax.nn.log_softmax(logits)[None], log_row(REFERENCE))
        return jnp.sum(jnp.asarray(POLICY, jnp.float32) * kl_BR[0])

    def kl(logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - log_row(REFERENCE)[0]))

    np.testing.assert_allclose(jax.grad(expected)(logits, "k1"), np.zeros(4), atol=1e-6)
    np.testing.assert_allclose(jax.grad(expected)(logits, "k2"), jax.grad(kl)(logits), rtol=1e-4, atol=1e-6)
    assert np.max(np.abs(jax.grad(kl)(logits))) > 0.05


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.05),  # on target
        (6.6, 0.05 * (1 + 0.1 * 64 / 1000)),
        (60.0, 0.05 * (1 + 0.2 * 64 / 1000)),  # clipped
        (0.0, 0.05 * (1 - 0.2 * 64 / 1000)),  # clipped
        (5.4, 0.05 * (1 - 0.1 * 64 / 1000)),
    ],
)
def test_controller(observed, expected):
    coef = adapt_kl_coef(jnp.float32(0.05), jnp.float32(observed), target=6.0, horizon=1000.0, num_sequences=64)
    np.testing.assert_allclose(coef, expected, rtol=1e-6)
    assert coef.dtype == jnp.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coef": -0.1}, "kl.coef: must be finite and not negative. Got -0.1."),
        ({"coef": float("nan")}, "kl.coef: must be finite and not negative. Got nan."),
        (
            {"coef": 0.0, "adaptive": True},
            "kl.coef: must be positive where kl.adaptive is on. Got 0.0. The controller multiplies, so it never "
            "leaves zero.",
        ),
        ({"target": 0.0}, "kl.target: must be finite and positive. Got 0.0."),
        ({"horizon": -1.0}, "kl.horizon: must be finite and positive. Got -1.0."),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        KLPenalty(**settings)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("estimator", "kl.estimator: must be one of k1, k2, k3. Got 'other'."),
        ("placement", "kl.placement: must be reward or loss. Got 'other'."),
    ],
)
def test_refuses_other_words(field, message):
    penalty = KLPenalty()
    object.__setattr__(penalty, field, "other")  # under test, types are checked before __post_init__ is reached
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        penalty.__post_init__()
