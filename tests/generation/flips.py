"""Rollouts that are the same but for flips: tokens that rounding decides, since the uniform number that draws them lies
next to a boundary of the cumulative distribution."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.experience import Rollout, Sampling
from jaxrlhf.generation.continuous_batching import uniforms
from jaxrlhf.generation.sampling import History, draw_token
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import logits
from jaxrlhf.models.transformer import hidden_states
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

NEAR = 1e-6
"""How far a uniform number may lie from a boundary at which a token flips."""


def assert_same_but_for_flips(
    one: Rollout,
    other: Rollout,
    params: Any,
    noise: Any,
    temperature: Any,
    sampling: Sampling,
    config: ModelConfig,
    uniform_of: Any = lambda noise, number, position: uniforms(noise, number[None], int(position) + 1)[0, -1],
) -> int:
    """Checks that two rollouts of the same prompts have the same tokens up to the first that is shown to be a flip, and
    log-probabilities to rtol and atol 1e-5.

    Returns:
        The number of sequences with a flip.
    """
    first = np.asarray(one.tokens).shape[1] - np.asarray(one.response).shape[1]
    for name in ("row", "id"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
    np.testing.assert_array_equal(one.tokens[:, :first], other.tokens[:, :first])
    flips, R = 0, np.asarray(one.response).shape[1]
    for i, (a, b) in enumerate(zip(np.asarray(one.tokens), np.asarray(other.tokens), strict=True)):
        differs = np.flatnonzero(a != b)
        same = R if not len(differs) else int(differs[0]) - first
        if same < R:
            assert one.response[i, same] and other.response[i, same], "one of the responses ends earlier"
            logits_V, seen_V = before(a, np.asarray(one.mask)[i], first, same, params, sampling, config)
            u = float(uniform_of(noise, jnp.asarray(one.id)[i], jnp.int32(same)))
            near = drawn([max(u - NEAR, 0.0), u, u + NEAR], logits_V, seen_V, same, temperature, sampling)
            assert {a[first + same], b[first + same]} <= set(near), f"no boundary lies within {NEAR} of {u}"
            flips += 1
        else:
            for name in ("finish", "mask", "response"):
                np.testing.assert_array_equal(getattr(one, name)[i], getattr(other, name)[i], name)
        for name in ("logprobs", "sampled_logprobs"):
            left, right = getattr(one, name)[i, :same], getattr(other, name)[i, :same]
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5, err_msg=name)
    return flips


def before(
    tokens_T: Any, mask_T: Any, first: int, at: int, params: Any, sampling: Sampling, config: ModelConfig
) -> tuple[jax.Array, jax.Array | None]:
    """The logits from which token `at` of a response is drawn, by a forward pass over all that is before it, and what
    its penalties depend on."""
    layout, end = Layout.over((0,), Strategy()), first + at
    prefix, mask = jnp.asarray(tokens_T[None, :end]), jnp.asarray(mask_T[None, :end])
    seen = History.of_prompts(prefix[:, :first], mask[:, :first], config.vocab_size, sampling, layout).seen
    if seen is not None:
        seen = seen.at[0, prefix[0, first:]].add(2)

    def last(params: Any) -> jax.Array:
        hidden_11D = hidden_states(params, prefix, mask, config, layout, wanted=end - 1)
        return logits(params, hidden_11D[:, 0], config, layout)

    return jax.jit(last)(params), seen


def drawn(near: list[float], logits_1V: Any, seen_1V: Any, at: int, temperature: Any, sampling: Sampling) -> list[int]:
    """The tokens that some uniform numbers draw."""
    wide, seen = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(near), x.shape[1])), (logits_1V, seen_1V))
    may_stop = jnp.full(len(near), at >= sampling.min_new_tokens)
    return _draw(wide, jnp.asarray(near, jnp.float32), may_stop, temperature, sampling, seen)[0].tolist()


_draw = jax.jit(draw_token, static_argnames="sampling")
