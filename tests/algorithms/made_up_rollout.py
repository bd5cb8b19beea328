"""A made-up rollout of two groups of three responses, and losses in Python loops, for tests of algorithms."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrlhf.experience import LENGTH, STOP, PolicyOutputs, Rollout

B, P, R, N = 6, 2, 5, 3
LENGTHS = (3, 5, 1, 4, 2, 5)
FINISH = np.array([STOP, LENGTH, STOP, STOP, STOP, LENGTH])
SCORES = np.array([1.0, -2.0, 0.5, 2.0, 2.0, -1.0], np.float32)
MASK = np.array([[t < length for t in range(R)] for length in LENGTHS])
_draws = np.random.default_rng(7)
LOGPROBS, REFERENCE, VALUES, COST_VALUES, MOVED = (
    _draws.normal(mean, 0.4, (B, R)).astype(np.float32) for mean in (-2.0, -2.2, 0.3, 0.1, 0.0)
)


def make_rollout() -> Rollout:
    """Responses of the lengths above, whose log-probabilities outside of them are NaN: nobody is to read them."""
    return Rollout(
        tokens=jnp.asarray(np.arange(B * (P + R)).reshape(B, P + R), jnp.int32),
        mask=jnp.asarray(np.concatenate([np.ones((B, P), bool), MASK], axis=1)),
        response=jnp.asarray(MASK),
        logprobs=jnp.where(MASK, LOGPROBS, jnp.nan),
        sampled_logprobs=jnp.where(MASK, LOGPROBS, jnp.nan),
        finish=jnp.asarray(FINISH, jnp.int32),
        row=jnp.arange(B, dtype=jnp.int32),
        id=jnp.arange(B, dtype=jnp.uint32),
    )


def moved_outputs() -> PolicyOutputs:
    """What the policy says after it has moved."""
    logprobs_BR = jnp.where(MASK, LOGPROBS + MOVED, 0.0)
    return PolicyOutputs(logprobs=logprobs_BR, entropy=jnp.where(MASK, -0.5 * logprobs_BR, 0.0))


def kl_k1() -> np.ndarray:
    return np.where(MASK, LOGPROBS.astype(np.float64) - REFERENCE, 0.0)


def gae_in_a_loop(
    rewards_BT: np.ndarray, values_BT: Any, mask_BT: np.ndarray, discount: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns, token by token."""
    advantages_BT = np.zeros(rewards_BT.shape)
    for b in range(rewards_BT.shape[0]):
        later_advantage = next_value = 0.0
        for t in reversed(range(rewards_BT.shape[1])):
            if mask_BT[b, t]:
                delta = rewards_BT[b, t] + discount * next_value - values_BT[b, t]
                later_advantage = advantages_BT[b, t] = delta + discount * gae_lambda * later_advantage
                next_value = values_BT[b, t]
    return advantages_BT, np.where(mask_BT, advantages_BT + values_BT, 0.0)


def at_last_token(scores_B: Any, mask_BT: np.ndarray) -> np.ndarray:
    """Each score at the last token of its response, if it has one."""
    last_BT = mask_BT & (np.cumsum(mask_BT[:, ::-1], axis=1)[:, ::-1] == 1)
    return np.where(last_BT, np.asarray(scores_B)[:, None], 0.0)


def group_of(b: int) -> range:
    """The rows of a row's group."""
    return range(b // N * N, b // N * N + N)


def mean_by(aggregation: str, x_BR: np.ndarray) -> float:
    """What a loss is to be the mean of, token by token."""
    tokens, sequences = [], []
    for b in range(len(x_BR)):
        row = [float(x_BR[b, t]) for t in range(R) if MASK[b, t]]
        tokens += row
        sequences.append({"sequence": sum(row) / len(row), "sum": sum(row), "constant": sum(row) / R}.get(aggregation))
    values = tokens if aggregation == "token" else [x for x in sequences if x is not None]
    return sum(values) / len(values)


def clipped_surrogate(advantages_BR: np.ndarray, clip: float, clip_high: float) -> np.ndarray:
    """-min(ratio A, clip(ratio) A) of each token, of `moved_outputs`."""
    loss_BR = np.zeros((B, R))
    for b, t in zip(*np.nonzero(MASK), strict=True):
        ratio, advantage = math.exp(MOVED[b, t]), float(advantages_BR[b, t])
        loss_BR[b, t] = -min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip_high) * advantage)
    return loss_BR
