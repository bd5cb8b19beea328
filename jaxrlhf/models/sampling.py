"""Drawing a token from logits, with one uniform number a sequence.

Letters: B sequences, V vocabulary, N blocks of the vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.experience import Sampling

_BLOCK = 64
_LOWEST = float(jnp.finfo(jnp.float32).min)
_BISECTIONS = 32  # halvings of the range of log-probabilities: finer than float32 resolves


def draw_token(
    logits_BV: Float[Array, "B V"],
    uniform_B: Float[Array, " B"],
    may_stop_B: Bool[Array, " B"],
    temperature: Float[Array, ""],
    sampling: Sampling,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Draw a token by inverting the cumulative distribution.

    Temperature is applied first, then `top_k`, then `top_p` to what is left. `temperature` stands for the one in
    `sampling`, as an array, so that greedy (0) and random decoding are one program.

    Returns:
        The tokens; their log-probabilities under the distribution that they were drawn from (0 when greedy); and under
        softmax(logits), with nothing cut off.
    """
    policy_logprobs_BV = jax.nn.log_softmax(logits_BV)
    allowed_BV = logits_BV
    if sampling.min_new_tokens and sampling.stop_ids:
        is_stop_V = jnp.isin(jnp.arange(logits_BV.shape[1]), jnp.array(sampling.stop_ids))
        allowed_BV = jnp.where(is_stop_V[None, :] & ~may_stop_B[:, None], _LOWEST, logits_BV)
    greedy = temperature <= 0
    scaled_BV = allowed_BV / jnp.where(greedy, 1.0, temperature)
    if sampling.top_k and sampling.top_k < logits_BV.shape[1]:
        least_B1 = jax.lax.top_k(scaled_BV, sampling.top_k)[0][:, -1:]
        scaled_BV = jnp.where(scaled_BV >= least_B1, scaled_BV, _LOWEST)
    if sampling.top_p < 1:
        scaled_BV = _keep_top_p(scaled_BV, sampling.top_p)
    highest_B1 = scaled_BV.max(axis=1, keepdims=True)
    mass_BV = jnp.exp(scaled_BV - highest_B1)
    drawn_B = _invert_cumulative(mass_BV, uniform_B)
    token_B = jnp.where(greedy, _likeliest(scaled_BV, highest_B1), drawn_B).astype(jnp.int32)
    mass_B = jnp.take_along_axis(mass_BV, token_B[:, None], axis=1)[:, 0]
    sampled_logprob_B = jnp.where(greedy, 0.0, jnp.log(mass_B) - jnp.log(mass_BV.sum(axis=1)))
    policy_logprob_B = jnp.take_along_axis(policy_logprobs_BV, token_B[:, None], axis=1)[:, 0]
    return token_B, sampled_logprob_B, policy_logprob_B


def _likeliest(scaled_BV: jax.Array, highest_B1: jax.Array) -> jax.Array:
    """The first token of the highest logit, by plain minimum and maximum, which processors vectorize and argmax not."""
    last = scaled_BV.shape[1] - 1
    return jnp.where(scaled_BV == highest_B1, jnp.arange(last + 1)[None, :], last).min(axis=1)


def _invert_cumulative(mass_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """The first token whose cumulative mass exceeds `uniform` x the whole: first its block, then the token in it."""
    B, V = mass_BV.shape
    N = -(-V // _BLOCK)
    mass_BNb = jnp.pad(mass_BV, ((0, 0), (0, N * _BLOCK - V))).reshape(B, N, _BLOCK)
    block_mass_BN = mass_BNb.sum(axis=2)
    cumulative_BN = jnp.cumsum(block_mass_BN, axis=1)
    target_B1 = uniform_B[:, None] * cumulative_BN[:, -1:]
    block_B = _first_above(cumulative_BN, target_B1, block_mass_BN > 0)
    before_B = jnp.take_along_axis(cumulative_BN - block_mass_BN, block_B[:, None], axis=1)
    inside_Bb = jnp.take_along_axis(mass_BNb, block_B[:, None, None], axis=1)[:, 0]
    return block_B * _BLOCK + _first_above(before_B + jnp.cumsum(inside_Bb, axis=1), target_B1, inside_Bb > 0)


def _first_above(cumulative: jax.Array, target: jax.Array, has_mass: jax.Array) -> jax.Array:
    """The first entry with mass where `cumulative` exceeds `target`; rounding may leave none, then the last with
    mass."""
    last = cumulative.shape[1] - 1 - jnp.argmax(has_mass[:, ::-1], axis=1)
    above = (cumulative > target) & has_mass
    return jnp.where(above.any(axis=1), jnp.argmax(above, axis=1), last)


def _keep_top_p(scaled_BV: jax.Array, top_p: float) -> jax.Array:
    """Cut off all but the likeliest tokens that together reach `top_p`, without sorting.

    Finds by bisection the highest threshold such that the tokens at or above it hold `top_p`. Tokens of equal
    probability stay or go together. Holtzman et al. 2020, arXiv:1904.09751.
    """
    logprobs_BV = jax.nn.log_softmax(scaled_BV)
    probs_BV = jnp.exp(logprobs_BV)
    high_B1 = logprobs_BV.max(axis=1, keepdims=True)
    low_B1 = high_B1 - 60.0  # less than 1e-26 of the likeliest

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        enough = jnp.where(logprobs_BV >= middle, probs_BV, 0.0).sum(axis=1, keepdims=True) >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    # the likeliest token alone may be enough, and bisection never tests the upper end itself
    low_B1, _ = jax.lax.fori_loop(0, _BISECTIONS, halve, (low_B1, high_B1 + 1e-6))
    return jnp.where(logprobs_BV >= low_B1, scaled_BV, _LOWEST)
