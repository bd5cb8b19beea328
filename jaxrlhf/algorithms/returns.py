"""Advantages and returns, all columns at once: linear recursions run as associative scans.

Letters: B sequences, T columns.
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def gae(
    rewards_BT: Float[Array, "B T"],
    values_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Generalized advantage estimation.

        delta_t = r_t + discount * v_{t+1} - v_t
        A_t     = delta_t + discount * gae_lambda * A_{t+1}

    Masked tokens are skipped, wherever they stand: t + 1 is the next unmasked token. The value after the last unmasked
    token is zero.

    Returns:
        Advantages and returns, both zero where `mask_BT` is False.

    Reference:
        Schulman et al. 2016, arXiv:1506.02438, eq. 16.

    >>> rewards_BT, values_BT, mask_BT = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.5]]), jnp.ones((1, 2), bool)
    >>> advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, discount=1.0, gae_lambda=1.0)
    >>> advantages_BT.tolist(), returns_BT.tolist()
    ([[0.5, 0.5]], [[1.0, 1.0]])
    """
    chex.assert_rank([rewards_BT, values_BT, mask_BT], 2)
    chex.assert_equal_shape([rewards_BT, values_BT, mask_BT])
    rewards_BT = jnp.where(mask_BT, rewards_BT, 0.0)
    values_BT = jnp.where(mask_BT, values_BT, 0.0)
    # With no decay at unmasked tokens, the recursion says what the nearest unmasked value at or after each column is.
    nearest_BT = _backward_recursion(values_BT, mask_BT, decay=0.0)
    next_values_BT = jnp.pad(nearest_BT[:, 1:], ((0, 0), (0, 1)))
    deltas_BT = jnp.where(mask_BT, rewards_BT + discount * next_values_BT - values_BT, 0.0)
    advantages_BT = jnp.where(mask_BT, _backward_recursion(deltas_BT, mask_BT, decay=discount * gae_lambda), 0.0)
    return advantages_BT, advantages_BT + values_BT


def discounted_sum(
    rewards_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], *, discount: float
) -> Float[Array, "B T"]:
    """The reward to go.

        G_t = r_t + discount * G_{t+1}

    Masked tokens are skipped, as in `gae`; their sums are zero.
    """
    chex.assert_rank([rewards_BT, mask_BT], 2)
    chex.assert_equal_shape([rewards_BT, mask_BT])
    rewards_BT = jnp.where(mask_BT, rewards_BT, 0.0)
    return jnp.where(mask_BT, _backward_recursion(rewards_BT, mask_BT, decay=discount), 0.0)


def _backward_recursion(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], *, decay: float) -> Float[Array, "B T"]:
    """y_t = x_t + decay * y_{t+1} at unmasked tokens, y_t = y_{t+1} at masked ones, where `x_BT` must be zero."""

    def compose(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        # Each pair (d, x) is the map y -> x + d * y; maps compose associatively.
        later_decay, later_x = later
        earlier_decay, earlier_x = earlier
        return earlier_decay * later_decay, earlier_x + earlier_decay * later_x

    decays_BT = jnp.where(mask_BT, decay, 1.0)
    _, y_BT = jax.lax.associative_scan(compose, (decays_BT, x_BT), reverse=True, axis=1)
    return y_BT
