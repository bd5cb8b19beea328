"""Drawing a token from logits, with one uniform number a sequence, and what a draw depends on of the tokens before it.

Letters: B sequences, V vocabulary, N blocks of the vocabulary, P prompt columns.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.experience import LENGTH, RUNNING, STOP, ResolvedSampling, Sampling, StopTable
from jaxrlhf.require import require
from jaxrlhf.sharding.layout import Layout

_BLOCK = 64
_LOWEST = float(jnp.finfo(jnp.float32).min)
_BISECTIONS = 32  # halvings of the range of log-probabilities: finer than float32 resolves


class History(struct.PyTreeNode):
    """What draws depend on of the tokens before them. It has no array that no setting asks for."""

    seen: Int[Array, "B V"] | None
    """Twice the times that a token is in the response so far, and one more if it is in the prompt and counts there."""
    stop_state: Int[Array, " B"] | None
    """The state of the automaton of stop strings (`StopTable`)."""

    @classmethod
    def of_rows(cls, num_rows: int, vocab_size: int, sampling: Sampling, layout: Layout) -> "History":
        """The history of rows without a prompt, before the first token of a response."""
        seen = stop_state = None
        if (dtype := seen_dtype(sampling)) is not None:
            seen = layout.activation(jnp.zeros((num_rows, vocab_size), dtype), ("batch", "choices"))
        if _stop_table(sampling) is not None:
            stop_state = jnp.zeros(num_rows, jnp.int32)
        return cls(seen, stop_state)

    @classmethod
    def of_prompts(
        cls,
        tokens_BP: Int[Array, "B P"],
        mask_BP: Bool[Array, "B P"],
        vocab_size: int,
        sampling: Sampling,
        layout: Layout,
    ) -> "History":
        """The history after some prompts, before the first token of a response."""
        history = cls.of_rows(len(tokens_BP), vocab_size, sampling, layout)
        if history.seen is None or sampling.repetition_penalty == 1:
            return history
        marked = jnp.where(mask_BP, tokens_BP, vocab_size)  # padding is dropped
        seen_BV = jax.vmap(lambda seen_V, token_P: seen_V.at[token_P].set(1, mode="drop"))(history.seen, marked)
        return history.replace(seen=layout.activation(seen_BV, ("batch", "choices")))


def seen_dtype(sampling: Sampling) -> np.dtype | None:
    """The type of `History.seen`, which holds numbers up to twice the tokens of a response; None without penalties."""
    if not sampling.counts_tokens:
        return None
    return np.dtype(np.int16 if sampling.max_new_tokens < 2**14 else np.int32)


class NextToken(NamedTuple):
    """A drawn token of each row."""

    token: Int[Array, " B"]
    logprob: Float[Array, " B"]
    """Under the policy: softmax(logits)."""
    sampled_logprob: Float[Array, " B"]
    """Under the distribution that the token was drawn from."""
    finish: Int[Array, " B"]
    """`STOP` or `LENGTH` of sequences that end with the token; else `RUNNING`."""
    history: History


def next_token(
    logits_BV: Float[Array, "B V"],
    uniform_B: Float[Array, " B"],
    num_new_B: Int[Array, " B"],
    history: History,
    temperature: Float[Array, ""],
    sampling: Sampling,
) -> NextToken:
    """Draws the next token of every row.

    Args:
        uniform_B: Numbers in [0, 1).
        num_new_B: Tokens of each response so far.
        temperature: It stands for the one in `sampling`, as an array, so that greedy (0) and random decoding are one
            program.
    """
    may_stop_B = num_new_B >= sampling.min_new_tokens
    token_B, sampled_B, policy_B = draw_token(logits_BV, uniform_B, may_stop_B, temperature, sampling, history.seen)
    stops_B = jnp.isin(token_B, jnp.array(sampling.stop_ids, jnp.int32))
    seen, stop_state, table = history.seen, history.stop_state, _stop_table(sampling)
    if seen is not None:
        seen = jax.vmap(lambda seen_V, token: seen_V.at[token].add(2))(seen, token_B)
    if table is not None:
        class_of_token, step_of_class = table.class_of_token, table.step_of_class
        class_B = jnp.asarray(class_of_token)[jnp.minimum(token_B, len(class_of_token) - 1)]
        step_B = jnp.asarray(step_of_class)[stop_state, class_B].astype(jnp.int32)
        stops_B |= step_B < 0
        stop_state = jnp.where(step_B < 0, -1 - step_B, step_B)
    is_long_B = num_new_B + 1 >= sampling.max_new_tokens
    finish_B = jnp.where(stops_B & may_stop_B, STOP, jnp.where(is_long_B, LENGTH, RUNNING)).astype(jnp.int32)
    return NextToken(token_B, policy_B, sampled_B, finish_B, History(seen, stop_state))


def draw_token(
    logits_BV: Float[Array, "B V"],
    uniform_B: Float[Array, " B"],
    may_stop_B: Bool[Array, " B"],
    temperature: Float[Array, ""],
    sampling: Sampling,
    seen_BV: Int[Array, "B V"] | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Draw a token by inverting the cumulative distribution.

    Logits are changed in the order that `Sampling` says; each cut leaves out tokens of what the ones before it left.
    Bias before penalties is the order of vLLM and Hugging Face, `min_p` last that of Hugging Face and SGLang.

    Args:
        seen_BV: As in a `History`; needed where there is a penalty.

    Returns:
        The tokens; their log-probabilities under the distribution that they were drawn from (0 when greedy); and under
        softmax(logits), with nothing changed.
    """
    policy_logprobs_BV = jax.nn.log_softmax(logits_BV)
    allowed_BV = _without_banned(_penalized(_biased(logits_BV, sampling), seen_BV, sampling), sampling)
    if sampling.min_new_tokens and sampling.stop_ids:
        is_stop_V = jnp.isin(jnp.arange(logits_BV.shape[1]), jnp.array(sampling.stop_ids))
        allowed_BV = jnp.where(is_stop_V[None, :] & ~may_stop_B[:, None], _LOWEST, allowed_BV)
    greedy = temperature <= 0
    scaled_BV = allowed_BV / jnp.where(greedy, 1.0, temperature)
    if sampling.top_k and sampling.top_k < logits_BV.shape[1]:
        least_B1 = jax.lax.top_k(scaled_BV, sampling.top_k)[0][:, -1:]
        scaled_BV = jnp.where(scaled_BV >= least_B1, scaled_BV, _LOWEST)
    if sampling.top_p < 1:
        scaled_BV = _keep_top_p(scaled_BV, sampling.top_p)
    highest_B1 = scaled_BV.max(axis=1, keepdims=True)
    if sampling.min_p:
        scaled_BV = jnp.where(scaled_BV >= highest_B1 + math.log(sampling.min_p), scaled_BV, _LOWEST)
    mass_BV = jnp.exp(scaled_BV - highest_B1)
    drawn_B = _invert_cumulative(mass_BV, uniform_B)
    token_B = jnp.where(greedy, _likeliest(scaled_BV, highest_B1), drawn_B).astype(jnp.int32)
    mass_B = jnp.take_along_axis(mass_BV, token_B[:, None], axis=1)[:, 0]
    sampled_logprob_B = jnp.where(greedy, 0.0, jnp.log(mass_B) - jnp.log(mass_BV.sum(axis=1)))
    policy_logprob_B = jnp.take_along_axis(policy_logprobs_BV, token_B[:, None], axis=1)[:, 0]
    return token_B, sampled_logprob_B, policy_logprob_B


def _biased(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    if not sampling.logit_bias:
        return logits_BV
    bias_V = np.zeros(logits_BV.shape[1], np.float32)
    bias_V[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
    return logits_BV + bias_V[None, :]


def _penalized(logits_BV: jax.Array, seen_BV: jax.Array | None, sampling: Sampling) -> jax.Array:
    if not sampling.counts_tokens:
        return logits_BV
    assert seen_BV is not None
    if (penalty := sampling.repetition_penalty) != 1:
        lowered_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = jnp.where(seen_BV > 0, lowered_BV, logits_BV)
    if sampling.presence_penalty or sampling.frequency_penalty:
        times_BV = (seen_BV >> 1).astype(logits_BV.dtype)
        logits_BV -= sampling.frequency_penalty * times_BV + sampling.presence_penalty * (times_BV > 0)
    return logits_BV


def _without_banned(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    if not (sampling.allowed_tokens or sampling.banned_tokens):
        return logits_BV
    may_be_drawn_V = np.full(logits_BV.shape[1], not sampling.allowed_tokens)
    may_be_drawn_V[list(sampling.allowed_tokens)] = True
    may_be_drawn_V[list(sampling.banned_tokens)] = False
    return jnp.where(may_be_drawn_V[None, :], logits_BV, _LOWEST)


def _stop_table(sampling: Sampling) -> StopTable | None:
    """The automaton of the stop strings; None without any. Raises ValueError if it is missing, or of other strings."""
    if not sampling.stop_strings:
        return None
    table = sampling.stop_table if isinstance(sampling, ResolvedSampling) else None
    require(
        table is not None and table.strings == sampling.stop_strings, "sampling.stop_strings",
        "must be those of a config, which a run resolves by its tokenizer, or of a ResolvedSampling",
        sampling.stop_strings, "Make its table with data.stop_strings.stop_table.",
    )  # fmt: skip
    return table


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
