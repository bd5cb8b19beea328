"""The losses of DPO and its kin against a loop, and what the step asks for."""

import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.algorithms.dpo import DPOConfig, DPOUpdate, dpo_evaluation, dpo_loss, dpo_step
from jaxrlhf.experience import PolicyOutputs, Preferences, Sequences

B, R = 5, 4
NAMES = ("chosen", "rejected")
UPDATES = [
    DPOUpdate(beta=0.3),
    DPOUpdate(beta=0.3, label_smoothing=0.2),
    DPOUpdate(beta=0.3, loss="robust", label_smoothing=0.2),
    DPOUpdate(beta=0.3, loss="ipo"),
]


def draw() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Log-probabilities of the policy, and a batch. What stands at masked positions is not a number."""
    rng = np.random.default_rng(1)
    logprobs, reference, sequences = {}, {}, {}
    for name in NAMES:
        mask_BR = np.arange(R) < rng.integers(1, R + 1, (B, 1))
        logprobs[name] = np.where(mask_BR, -rng.exponential(1.0, (B, R)), np.nan).astype(np.float32)
        reference[name] = np.where(mask_BR, -rng.exponential(1.0, (B, R)), np.nan).astype(np.float32)
        tokens = np.zeros((B, R + 2), np.int32)
        arrays: dict[str, Any] = {"tokens": tokens, "mask": np.ones_like(tokens, bool), "response": mask_BR}
        sequences[name] = Sequences(**jax.tree.map(jnp.asarray, arrays))
    batch = {"sequences": sequences, "reference": jax.tree.map(jnp.asarray, reference), "margin": jnp.zeros(B)}
    return logprobs, batch


LOGPROBS, BATCH = draw()


def loss_of(logprobs, update):
    outputs = {name: PolicyOutputs(logprobs=jnp.asarray(x), entropy=jnp.zeros((B, R))) for name, x in logprobs.items()}
    return dpo_loss(outputs, BATCH, update)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def log_ratio(name: str, b: int) -> float:
    """log policy - log reference of a response."""
    counts = np.asarray(BATCH["sequences"][name].response[b])
    return float(sum(LOGPROBS[name][b, t] - BATCH["reference"][name][b, t] for t in range(R) if counts[t]))


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: f"{update.loss} {update.label_smoothing}")
def test_losses_against_a_loop(update):
    metrics: Any
    loss, weight, metrics = loss_of(LOGPROBS, update)
    total = right = margin = 0.0
    for b in range(B):
        h = log_ratio("chosen", b) - log_ratio("rejected", b)
        e, right_way, wrong_way = update.label_smoothing, math.log(sigmoid(0.3 * h)), math.log(sigmoid(-0.3 * h))
        if update.loss == "ipo":
            total += (h - 1 / 0.6) ** 2
        elif update.loss == "robust":
            total += (-(1 - e) * right_way + e * wrong_way) / (1 - 2 * e)
        else:
            total += -(1 - e) * right_way - e * wrong_way
        right += h > 0
        margin += 0.3 * h
    assert weight == B and 0 < right < B
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    assert metrics["accuracy"] == right
    np.testing.assert_allclose(metrics["margin"], margin, rtol=1e-5)
    for name in NAMES:
        np.testing.assert_allclose(
            metrics[f"{name}_reward"], 0.3 * sum(log_ratio(name, b) for b in range(B)), rtol=1e-5
        )
        np.testing.assert_allclose(metrics[f"{name}_logprob"], np.nansum(LOGPROBS[name]), rtol=1e-5)


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: f"{update.loss} {update.label_smoothing}")
def test_gradients_are_zero_where_masked(update):
    gradients = jax.grad(lambda logprobs: loss_of(logprobs, update)[0])(jax.tree.map(jnp.asarray, LOGPROBS))
    for name in NAMES:
        np.testing.assert_array_equal(gradients[name] != 0, BATCH["sequences"][name].response)
        assert np.isfinite(gradients[name]).all()


def test_step_and_evaluation_ask_the_reference_about_both_responses():
    config = DPOConfig(update=DPOUpdate(mini_batches=2))
    pairs = Preferences(**BATCH["sequences"], margin=BATCH["margin"])
    roles = SimpleNamespace(
        actor=SimpleNamespace(train=lambda *args: {"train": args}, loss=lambda *args: {"loss": args}),
        reference=SimpleNamespace(logprobs=lambda sequences: ("logprobs of", id(sequences))),
    )
    results, state = dpo_step(roles, (), pairs, config)
    assert state == () and list(results) == ["actor"]
    measured, _ = dpo_evaluation(roles, (), pairs, config)
    for loss, batch, update in (results["actor"]["train"], measured["loss"]):
        assert loss is dpo_loss and update is config.update
        assert batch["sequences"] == {"chosen": pairs.chosen, "rejected": pairs.rejected}
        assert batch["reference"] == {name: ("logprobs of", id(getattr(pairs, name))) for name in NAMES}
    assert ALGORITHMS["dpo"].roles == ("actor", "reference")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPOUpdate(epochs=0), "update.epochs: must be at least 1. Got 0."),
        (lambda: DPOUpdate(loss="hinge"), "update.loss: must be one of sigmoid, robust, ipo. Got 'hinge'."),  # pyright: ignore[reportArgumentType]
        (lambda: DPOUpdate(beta=0.0), "update.beta: must be finite and positive. Got 0.0."),
        (lambda: DPOUpdate(label_smoothing=0.5), "update.label_smoothing: must lie in [0, 0.5). Got 0.5."),
        (lambda: DPOUpdate(loss="ipo", label_smoothing=0.1), "update.label_smoothing: ipo has none. Got 0.1. Leave it"),
        (lambda: DPOConfig(max_new_tokens=0), "max_new_tokens: must be at least 1. Got 0."),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
