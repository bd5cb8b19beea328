import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from jaxrlhf.algorithms.returns import discounted_sum, gae
from tests.algorithms.made_up_rollout import gae_in_a_loop

SHAPE = (3, 7)
fast_gae = jax.jit(gae, static_argnames=("discount", "gae_lambda"))
fast_discounted_sum = jax.jit(discounted_sum, static_argnames=("discount",))

numbers = np_st.arrays(np.float32, SHAPE, elements=st.floats(-4, 4, width=32))
masks = np_st.arrays(np.bool_, SHAPE)
rates = st.sampled_from([(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.5, 0.0)])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(numbers, numbers, masks, rates)
def test_gae_against_a_loop(rewards_BT, values_BT, mask_BT, rate):
    discount, gae_lambda = rate
    mask_BT[1] = False
    got = fast_gae(rewards_BT, values_BT, mask_BT, discount=discount, gae_lambda=gae_lambda)
    want = gae_in_a_loop(rewards_BT, values_BT, mask_BT, discount, gae_lambda)
    for got_BT, want_BT in zip(got, want, strict=True):
        np.testing.assert_allclose(got_BT, want_BT, rtol=1e-5, atol=1e-5)
        assert not np.any(np.asarray(got_BT)[~mask_BT])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(numbers, masks, st.sampled_from([1.0, 0.9, 0.0]))
def test_discounted_sum_against_a_loop(rewards_BT, mask_BT, discount):
    want_BT = np.zeros(SHAPE)
    for b in range(SHAPE[0]):
        later = 0.0
        for t in reversed(range(SHAPE[1])):
            if mask_BT[b, t]:
                later = want_BT[b, t] = rewards_BT[b, t] + discount * later
    got_BT = fast_discounted_sum(rewards_BT, mask_BT, discount=discount)
    np.testing.assert_allclose(got_BT, want_BT, rtol=1e-5, atol=1e-5)


def test_gae_by_hand():
    # Unmasked: rewards 1, 2 with values 10, 20; a hole lies between them.
    rewards_BT, values_BT = jnp.array([[1.0, 7.0, 2.0, 7.0]]), jnp.array([[10.0, 7.0, 20.0, 7.0]])
    mask_BT = jnp.array([[True, False, True, False]])
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, discount=0.5, gae_lambda=0.5)
    # delta_2 = 2 - 20 = -18; delta_0 = 1 + 0.5 * 20 - 10 = 1; A_0 = 1 + 0.25 * -18
    np.testing.assert_allclose(advantages_BT, [[-3.5, 0.0, -18.0, 0.0]])
    np.testing.assert_allclose(returns_BT, [[6.5, 0.0, 2.0, 0.0]])


def test_masked_tokens_are_not_read():
    rng = np.random.default_rng(2)
    rewards_BT, values_BT = (jnp.asarray(rng.normal(size=SHAPE), jnp.float32) for _ in range(2))
    mask_BT = jnp.asarray(rng.random(SHAPE) < 0.5)
    clean = gae(rewards_BT, values_BT, mask_BT, discount=0.9, gae_lambda=0.8)
    dirty = gae(
        jnp.where(mask_BT, rewards_BT, jnp.nan),
        jnp.where(mask_BT, values_BT, jnp.inf),
        mask_BT,
        discount=0.9,
        gae_lambda=0.8,
    )
    for clean_BT, dirty_BT in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(clean_BT, dirty_BT)


def test_refuses_unequal_shapes():
    with pytest.raises((AssertionError, TypeError)):
        gae(jnp.ones((2, 3)), jnp.ones((2, 4)), jnp.ones((2, 3), bool), discount=1.0, gae_lambda=1.0)
