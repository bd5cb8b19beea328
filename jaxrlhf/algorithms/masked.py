"""Sums, means and variances over unmasked tokens.

Letters: B sequences, T columns.

Values at masked positions are never read: not even a NaN there reaches a result or a gradient.
"""

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

VARIANCE_FLOOR = 1e-8
"""Added to a variance before dividing by its root, so that constant values whiten to zero."""


def masked_count(mask_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The number of True entries of the mask.

    >>> float(masked_count(jnp.array([[True, False, True]])))
    2.0
    """
    chex.assert_rank(mask_BT, 2)
    return jnp.sum(mask_BT, dtype=jnp.float32)


def masked_sum(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Sum of `x_BT` where `mask_BT` is True.

    >>> float(masked_sum(jnp.array([[1.0, 2.0, 4.0]]), jnp.array([[True, False, True]])))
    5.0
    """
    chex.assert_rank([x_BT, mask_BT], 2)
    chex.assert_equal_shape([x_BT, mask_BT])
    return jnp.sum(jnp.where(mask_BT, x_BT, 0.0))


def masked_mean(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Mean of `x_BT` where `mask_BT` is True; zero where it is True nowhere.

    >>> float(masked_mean(jnp.array([[1.0, 2.0, 4.0]]), jnp.array([[True, False, True]])))
    2.5
    """
    return masked_sum(x_BT, mask_BT) / jnp.maximum(masked_count(mask_BT), 1.0)


def masked_means(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Mean of each row where `mask_BT` is True; zero for a row where it is True nowhere."""
    chex.assert_rank([x_BT, mask_BT], 2)
    chex.assert_equal_shape([x_BT, mask_BT])
    count_B = jnp.sum(mask_BT, axis=1, dtype=jnp.float32)
    return jnp.sum(jnp.where(mask_BT, x_BT, 0.0), axis=1) / jnp.maximum(count_B, 1.0)


def masked_variance(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Population variance (divided by n, not n - 1) of `x_BT` where `mask_BT` is True."""
    return masked_mean(jnp.square(centered(x_BT, mask_BT)), mask_BT)


def centered(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """`x_BT` minus its mean where `mask_BT` is True.

    The mean of values far from zero is rounded coarsely. Its error is the mean of the differences, which is subtracted
    in turn, so that scaling the result up scales up no rounding error, in whatever order the values are summed.
    """
    once_BT = jnp.where(mask_BT, x_BT, 0.0) - masked_mean(x_BT, mask_BT)
    return once_BT - masked_mean(once_BT, mask_BT)


def whiten(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Moves the unmasked values to mean zero and scales them to variance one.

    y = (x - mean) / sqrt(variance + 1e-8)    zero where `mask_BT` is False

    >>> whiten(jnp.array([[1.0, 9.0, 3.0]]), jnp.array([[True, False, True]])).round(3).tolist()
    [[-1.0, 0.0, 1.0]]
    """
    centered_BT = centered(x_BT, mask_BT)
    scale = 1.0 / jnp.sqrt(masked_mean(jnp.square(centered_BT), mask_BT) + VARIANCE_FLOOR)
    return jnp.where(mask_BT, centered_BT * scale, 0.0)
