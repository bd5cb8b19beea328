"""From a score per sequence to a reward per token, with the KL penalty; moments of scores.

Letters: B sequences, R response columns.
"""

import chex
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float


class Moments(struct.PyTreeNode):
    """Count, mean and sum of squared deviations of the scores seen so far."""

    count: Float[Array, ""]
    mean: Float[Array, ""]
    m2: Float[Array, ""]


def no_moments() -> Moments:
    """The moments of nothing."""
    return Moments(count=jnp.zeros((), jnp.float32), mean=jnp.zeros((), jnp.float32), m2=jnp.zeros((), jnp.float32))


def moments_of(x_B: Float[Array, " B"]) -> Moments:
    """The moments of one batch."""
    chex.assert_rank(x_B, 1)
    mean = jnp.mean(x_B)
    return Moments(count=jnp.full((), x_B.shape[0], jnp.float32), mean=mean, m2=jnp.sum(jnp.square(x_B - mean)))


def merge_moments(a: Moments, b: Moments) -> Moments:
    """The moments of both together.

        d  = mean_b - mean_a
        n  = n_a + n_b
        mean = mean_a + d * n_b / n
        m2   = m2_a + m2_b + d^2 * n_a * n_b / n

    Reference:
        Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    count = a.count + b.count
    share = b.count / jnp.maximum(count, 1.0)
    difference = b.mean - a.mean
    return Moments(
        count=count, mean=a.mean + difference * share, m2=a.m2 + b.m2 + jnp.square(difference) * a.count * share
    )


def last_token(mask_BR: Bool[Array, "B R"]) -> Bool[Array, "B R"]:
    """True at the last unmasked token of each row; nowhere in a row without one."""
    chex.assert_rank(mask_BR, 2)
    remaining_BR = jnp.cumsum(mask_BR[:, ::-1], axis=1)[:, ::-1]
    return mask_BR & (remaining_BR == 1)


def token_rewards(
    scores_B: Float[Array, " B"],
    kl_BR: Float[Array, "B R"],
    mask_BR: Bool[Array, "B R"],
    *,
    kl_coef: Float[Array, ""] | float,
) -> Float[Array, "B R"]:
    """The KL penalty at every response token, and the score at the last one.

        r_t = -kl_coef * kl_t + score * [t is the last token]

    Rewards are zero where `mask_BR` is False. A row without response tokens has no place for its score.

    Reference:
        Ziegler et al. 2019, arXiv:1909.08593, eq. 2; Ouyang et al. 2022, arXiv:2203.02155, eq. 2.
    """
    chex.assert_rank([scores_B, kl_BR, mask_BR], [1, 2, 2])
    chex.assert_equal_shape([kl_BR, mask_BR])
    penalty_BR = jnp.where(mask_BR, kl_coef * kl_BR, 0.0)
    return jnp.where(last_token(mask_BR), scores_B[:, None], 0.0) - penalty_BR
