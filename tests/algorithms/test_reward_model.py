"""The loss of a reward model against a loop, and what its step asks for."""

import math
import re
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.algorithms.reward_model import (
    RewardModelConfig,
    RewardModelUpdate,
    reward_model_evaluation,
    reward_model_loss,
    reward_model_step,
)
from jaxrlhf.experience import Preferences, Sequences, Term

B = 7
RNG = np.random.default_rng(0)
CHOSEN_B, REJECTED_B, MARGIN_B = RNG.normal(0.0, 2.0, (3, B)).astype(np.float32)
REJECTED_B[3] = CHOSEN_B[3]


def sequences(start: int) -> Sequences:
    tokens = jnp.arange(start, start + 8).reshape(2, 4)
    return Sequences(tokens=tokens, mask=jnp.ones((2, 4), bool), response=jnp.ones((2, 2), bool))


PAIRS = Preferences(chosen=sequences(0), rejected=sequences(8), margin=jnp.array([0.5, 0.0]))


def loss_of(chosen_B, rejected_B, update):
    scores = {"chosen": jnp.asarray(chosen_B), "rejected": jnp.asarray(rejected_B)}
    return reward_model_loss(scores, {"margin": jnp.asarray(MARGIN_B)}, update)


@pytest.mark.parametrize("center_coef", [0.0, 0.3])
def test_loss_against_a_loop(center_coef):
    metrics: Any
    loss, weight, metrics = loss_of(CHOSEN_B, REJECTED_B, RewardModelUpdate(center_coef=center_coef))
    total = right = 0.0
    for chosen, rejected, margin in zip(CHOSEN_B, REJECTED_B, MARGIN_B, strict=True):
        total -= math.log(1.0 / (1.0 + math.exp(-(chosen - rejected - margin))))
        total += center_coef * (chosen + rejected) ** 2
        right += 1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0
    assert weight == B
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    assert metrics["accuracy"] == right and right % 1 == 0.5, "a tie is half a pair"
    np.testing.assert_allclose(metrics["margin"], (CHOSEN_B - REJECTED_B).sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["chosen_score"], CHOSEN_B.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rejected_score"], REJECTED_B.sum(), rtol=1e-5)


def test_scores_far_apart_give_no_infinity():
    scores = {"chosen": jnp.array([-1e4]), "rejected": jnp.array([1e4])}
    loss, _, _ = reward_model_loss(scores, {"margin": jnp.zeros(1)}, RewardModelUpdate())
    np.testing.assert_allclose(loss, 2e4)


def test_step_and_evaluation_give_the_scores_of_both_responses_to_the_loss():
    config = RewardModelConfig(update=RewardModelUpdate(mini_batches=2))
    called = SimpleNamespace(train=lambda *args: {"train": args}, loss=lambda *args: {"loss": args})
    roles = SimpleNamespace(reward=called)
    results, state = reward_model_step(roles, (), PAIRS, config)
    assert state == () and list(results) == ["reward"]
    measured, _ = reward_model_evaluation(roles, (), PAIRS, config)
    for term, update in (results["reward"]["train"], measured["loss"]):
        assert update is config.update
        assert isinstance(term, Term) and term.loss is reward_model_loss and term.of == "scores"
        assert term.batch["sequences"] == {"chosen": PAIRS.chosen, "rejected": PAIRS.rejected}
        assert term.batch["margin"] is PAIRS.margin
    assert ALGORITHMS["reward_model"].roles == ("reward",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RewardModelUpdate(mini_batches=0), "update.mini_batches: must be at least 1. Got 0."),
        (lambda: RewardModelUpdate(center_coef=-1.0), "update.center_coef: must be finite and not negative. Got -1.0."),
        (lambda: RewardModelConfig(max_new_tokens=0), "max_new_tokens: must be at least 1. Got 0."),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
