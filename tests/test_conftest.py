"""The checks that conftest.py turns on do find what they are for, and let pass what they should."""

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jaxrlhf.algorithms.kl import KLPenalty, KLTerm, k1


def test_eight_virtual_devices():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


def test_a_wrong_shape_is_found():
    with pytest.raises(TypeCheckError, match="reference_BR"):
        k1(jnp.zeros((2, 3)), jnp.zeros((2, 4)))


def test_a_wrong_dtype_is_found_under_jit():
    with pytest.raises(TypeCheckError, match="logprobs_BR"):
        jax.jit(k1)(jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3)))


def test_the_leaves_of_a_tree_may_be_anything():
    term = KLTerm(reference=jnp.zeros((2, 3)), coef=jnp.zeros(2), estimator="k1")
    assert jax.tree.map(lambda leaf: None, term).coef is None
    assert jax.eval_shape(lambda term: term, term).coef.shape == (2,)


def test_settings_keep_their_own_messages():
    with pytest.raises(ValueError, match=r"kl\.estimator: must be one of"):
        KLPenalty(estimator="k9")  # pyright: ignore[reportArgumentType]
    assert KLPenalty(coef=1).coef == 1


def test_rank_promotion_is_an_error():
    with pytest.raises(ValueError, match="rank_promotion"):
        _ = jnp.zeros((2, 3)) + jnp.zeros(3)
