"""KL(policy || reference): estimators per token, the penalty's settings, the controller of its coefficient.

The penalty is subtracted from rewards in `token_rewards`, or added to the loss in `losses`. The estimators take
log-probabilities of tokens that were drawn from the policy. Write l for log policy - log reference.

Letters: B sequences, R response columns.

Reference:
    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import chex
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxrlhf.require import require, require_not_negative, require_positive

Estimator = Literal["k1", "k2", "k3"]


def k1(logprobs_BR: Float[Array, "B R"], reference_BR: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """The log ratio, l: unbiased, high variance, negative for single tokens."""
    chex.assert_rank([logprobs_BR, reference_BR], 2)
    return logprobs_BR - reference_BR


def k2(logprobs_BR: Float[Array, "B R"], reference_BR: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """l^2 / 2: biased, low variance, never negative. On the policy's own tokens its expected gradient is the KL's."""
    return 0.5 * jnp.square(k1(logprobs_BR, reference_BR))


def k3(logprobs_BR: Float[Array, "B R"], reference_BR: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """exp(-l) - 1 + l, with a control variate of expectation zero: unbiased, low variance, never negative."""
    log_ratio_BR = k1(logprobs_BR, reference_BR)
    return jnp.expm1(-log_ratio_BR) + log_ratio_BR


ESTIMATORS: dict[Estimator, Callable[[Float[Array, "B R"], Float[Array, "B R"]], Float[Array, "B R"]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}


@dataclasses.dataclass(frozen=True)
class KLPenalty:
    """Settings of the KL penalty that keeps the policy near the reference.

    >>> KLPenalty(estimator="k3", placement="loss", coef=0.04).adaptive
    False
    """

    estimator: Estimator = "k1"
    """In the loss take k2 or k3: the gradient of k1 has expectation zero on the policy's own tokens."""
    placement: Literal["reward", "loss"] = "reward"
    """Subtracted from each token's reward, or added to each token's loss."""
    coef: float = 0.05
    adaptive: bool = False
    """Let a controller move the coefficient, starting from `coef`, to hold the KL at `target`."""
    target: float = 6.0
    """Nats per sequence."""
    horizon: float = 10000.0
    """Sequences over which a controller at its limit moves the coefficient by a fifth."""

    def __post_init__(self) -> None:
        require(self.estimator in ESTIMATORS, "kl.estimator", f"must be one of {', '.join(ESTIMATORS)}", self.estimator)
        require(self.placement in ("reward", "loss"), "kl.placement", "must be reward or loss", self.placement)
        require_not_negative(self.coef, "kl.coef")
        rule, remedy = "must be positive where kl.adaptive is on", "The controller multiplies, so it never leaves zero."
        require(self.coef > 0 or not self.adaptive, "kl.coef", rule, self.coef, remedy)
        require_positive(self.target, "kl.target")
        require_positive(self.horizon, "kl.horizon")


class KLTerm(struct.PyTreeNode):
    """The KL term of a policy loss, as it travels in a training batch.

    >>> KLTerm(jnp.zeros((1, 2)), coef=jnp.full(1, 0.05), estimator="k3").coef.shape
    (1,)
    """

    reference: Float[Array, "B R"]
    """Log-probabilities under the reference."""
    coef: Float[Array, " B"]
    """The coefficient, which a controller may have moved, for each row."""
    estimator: Estimator = struct.field(pytree_node=False)


def adapt_kl_coef(
    coef: Float[Array, ""], observed: Float[Array, ""], *, target: float, horizon: float, num_sequences: int
) -> Float[Array, ""]:
    """Moves the coefficient towards the one that holds the KL at its target, in nats per sequence.

        error = clip(observed / target - 1, -0.2, 0.2)
        coef' = coef * (1 + error * num_sequences / horizon)

    `observed` is the KL of `num_sequences` sequences.

    Reference:
        Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """
    chex.assert_rank([coef, observed], 0)
    error = jnp.clip(observed / target - 1.0, -0.2, 0.2)
    return coef * (1.0 + error * (num_sequences / horizon))
