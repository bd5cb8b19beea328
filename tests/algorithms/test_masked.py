import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.masked import masked_count, masked_mean, masked_sum, masked_variance, whiten


@pytest.fixture
def masked_BT() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    mask_BT = rng.random((4, 6)) < 0.6
    mask_BT[2] = False
    assert 3 < mask_BT.sum() < 20
    return jnp.asarray(rng.normal(3.0, 2.0, (4, 6)), jnp.float32), jnp.asarray(mask_BT)


def test_against_numpy_on_the_kept_values(masked_BT):
    x_BT, mask_BT = masked_BT
    kept = np.asarray(x_BT)[np.asarray(mask_BT)]
    assert masked_count(mask_BT) == kept.size
    np.testing.assert_allclose(masked_sum(x_BT, mask_BT), kept.sum(), rtol=1e-5)
    np.testing.assert_allclose(masked_mean(x_BT, mask_BT), kept.mean(), rtol=1e-5)
    np.testing.assert_allclose(masked_variance(x_BT, mask_BT), kept.var(), rtol=1e-5)


def test_by_hand():
    x_BT = jnp.array([[1.0, 5.0, 99.0], [3.0, 99.0, 7.0]])
    mask_BT = jnp.array([[True, True, False], [True, False, True]])
    assert masked_sum(x_BT, mask_BT) == 16.0
    assert masked_mean(x_BT, mask_BT) == 4.0
    assert masked_variance(x_BT, mask_BT) == 5.0  # (9 + 1 + 1 + 9) / 4
    whitened_BT = whiten(x_BT, mask_BT)
    np.testing.assert_allclose(whitened_BT[0], np.array([-3.0, 1.0, 0.0]) / np.sqrt(5.0), rtol=1e-6)


def test_whitened_values_have_mean_zero_and_variance_one(masked_BT):
    x_BT, mask_BT = masked_BT
    whitened_BT = whiten(x_BT, mask_BT)
    np.testing.assert_allclose(masked_mean(whitened_BT, mask_BT), 0.0, atol=1e-6)
    np.testing.assert_allclose(masked_variance(whitened_BT, mask_BT), 1.0, rtol=1e-5)
    assert not np.any(np.asarray(whitened_BT)[~np.asarray(mask_BT)])


def test_values_far_from_zero_whiten_to_mean_zero():
    x_BT = jnp.asarray(np.random.default_rng(0).normal(1000.0, 0.5, (16, 33)), jnp.float32)
    mask_BT = jnp.ones(x_BT.shape, bool)
    assert abs(np.asarray(whiten(x_BT, mask_BT), np.float64).mean()) < 1e-6
    np.testing.assert_allclose(masked_variance(x_BT, mask_BT), np.asarray(x_BT, np.float64).var(), rtol=1e-5)


def test_whitening_forgets_what_is_masked_and_how_much_of_it(masked_BT):
    x_BT, mask_BT = masked_BT
    np.testing.assert_array_equal(whiten(jnp.where(mask_BT, x_BT, jnp.nan), mask_BT), whiten(x_BT, mask_BT))
    wide_BT = whiten(jnp.pad(x_BT, ((0, 0), (0, 5)), constant_values=9.0), jnp.pad(mask_BT, ((0, 0), (0, 5))))
    np.testing.assert_allclose(wide_BT[:, :6], whiten(x_BT, mask_BT), rtol=1e-5, atol=1e-6)


def test_constant_values_whiten_to_zero():
    mask_BT = jnp.ones((2, 3), bool)
    np.testing.assert_array_equal(whiten(jnp.full((2, 3), 4.0), mask_BT), np.zeros((2, 3)))


def test_nothing_kept_gives_zeros():
    x_BT, mask_BT = jnp.ones((2, 3)), jnp.zeros((2, 3), bool)
    assert masked_sum(x_BT, mask_BT) == masked_mean(x_BT, mask_BT) == masked_variance(x_BT, mask_BT) == 0.0
    np.testing.assert_array_equal(whiten(x_BT, mask_BT), np.zeros((2, 3)))


def test_gradient_of_a_masked_nan_is_zero():
    x_BT = jnp.array([[1.0, jnp.nan]])
    grads_BT = jax.grad(lambda x: masked_mean(x, jnp.array([[True, False]])))(x_BT)
    np.testing.assert_array_equal(grads_BT, [[1.0, 0.0]])


def test_refuses_other_ranks():
    with pytest.raises((AssertionError, TypeError)):
        masked_sum(jnp.ones(3), jnp.ones(3, bool))
