import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.dapo import DAPOConfig, dapo_batch, overlong_punishment, select_groups
from jaxrlhf.algorithms.policy import ppo_policy_loss
from jaxrlhf.experience import PolicyOutputs, Sampling
from jaxrlhf.run.assembly import assemble
from jaxrlhf.testing import small_run
from tests.algorithms.made_up_rollout import (
    LENGTHS,
    MASK,
    MOVED,
    SCORES,
    B,
    N,
    R,
    clipped_surrogate,
    group_of,
    make_rollout,
    mean_by,
    moved_outputs,
)

SAMPLING = Sampling(num_samples=N, max_new_tokens=R)
CONFIG = DAPOConfig(sampling=SAMPLING, oversampling=1, overlong_tokens=2, overlong_penalty=0.5)
fast_dapo_batch = jax.jit(dapo_batch, static_argnames="config")


def test_punishment_by_hand():
    got_B = overlong_punishment(jnp.array([1, 6, 7, 8, 10]), limit=10, interval=4, penalty=1.0)
    np.testing.assert_allclose(got_B, [0.0, 0.0, -0.25, -0.5, -1.0])
    np.testing.assert_array_equal(overlong_punishment(jnp.array([1, 10]), limit=10, interval=0, penalty=1.0), [0, 0])


def test_batch_and_loss_against_a_loop():
    batch, metrics = fast_dapo_batch(make_rollout(), jnp.asarray(SCORES), config=CONFIG)
    rewards_B = [float(SCORES[b]) - 0.5 * max(0, LENGTHS[b] - 3) / 2 for b in range(B)]
    want_BR = np.zeros((B, R))
    for b in range(B):
        group = [rewards_B[i] for i in group_of(b)]
        std = (sum((x - sum(group) / N) ** 2 for x in group) / (N - 1)) ** 0.5
        want_BR[b] = np.where(MASK[b], (rewards_B[b] - sum(group) / N) / (std + 1e-6), 0.0)
    np.testing.assert_allclose(batch["advantages"], want_BR, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["critic/rewards/mean"], np.mean(rewards_B), rtol=1e-5)
    np.testing.assert_allclose(metrics["critic/score/mean"], SCORES.mean(), rtol=1e-5)  # as the reward gave it
    np.testing.assert_allclose(metrics["response_length/overlong_ratio"], 0.5)
    assert metrics["group/kept"] == 2 and metrics["group/missing"] == 0

    loss, weight, _ = ppo_policy_loss(moved_outputs(), batch, CONFIG.actor_update)
    assert weight == MASK.sum()
    np.testing.assert_allclose(loss / weight, mean_by("token", clipped_surrogate(want_BR, 0.2, 0.28)), rtol=1e-5)


def four_groups(*scores: float) -> tuple[dict[str, Any], jax.Array]:
    """Twelve rows, the made-up rollout twice; a score for each."""
    rollout = jax.tree.map(lambda x: jnp.concatenate([x, x]), make_rollout())
    rollout = rollout.replace(row=jnp.arange(2 * B, dtype=jnp.int32))
    return {"sequences": rollout, "advantages": jnp.ones((2 * B, R))}, jnp.array(scores)


def test_the_first_groups_that_differ_are_kept_in_order():
    batch, scores_B = four_groups(*[1.0, 1.0, 1.0], *[0.0, 1.0, 0.0], *[0.0, 1.0, 1.0], *[1.0, 0.0, 1.0])
    kept, metrics = select_groups(batch, scores_B, num_samples=N, oversampling=2)
    np.testing.assert_array_equal(kept["sequences"].row, np.arange(N, 3 * N))
    np.testing.assert_array_equal(kept["sequences"].response, batch["sequences"].response[N : 3 * N])
    assert kept["advantages"].shape == (B, R)
    assert metrics["group/kept"] == 2.0 and metrics["group/missing"] == 0.0


def test_places_that_stay_empty_have_no_weight():
    batch, scores_B = four_groups(*[1.0, 1.0, 1.0], *[0.0] * 3, *[0.0, 1.0, 1.0], *[1.0] * 3)
    kept, metrics = select_groups(batch, scores_B, num_samples=N, oversampling=2)
    np.testing.assert_array_equal(kept["sequences"].row[:N], np.arange(2 * N, 3 * N))
    assert kept["sequences"].response[:N].any() and not kept["sequences"].response[N:].any()
    assert metrics["group/kept"] == 1.0 and metrics["group/missing"] == 1.0

    outputs = PolicyOutputs(logprobs=kept["sequences"].logprobs + MOVED, entropy=jnp.zeros((B, R)))
    loss, weight, _ = ppo_policy_loss(outputs, kept, CONFIG.actor_update)
    first = {"sequences": jax.tree.map(lambda x: x[:N], kept["sequences"]), "advantages": kept["advantages"][:N]}
    alone, weight_alone, _ = ppo_policy_loss(jax.tree.map(lambda x: x[:N], outputs), first, CONFIG.actor_update)
    assert weight == weight_alone and jnp.isfinite(loss)
    np.testing.assert_allclose(loss, alone, rtol=1e-6)


def test_no_group_at_all_trains_on_nothing():
    batch, scores_B = four_groups(*[1.0] * 12)
    kept, metrics = select_groups(batch, scores_B, num_samples=N, oversampling=2)
    outputs = PolicyOutputs(logprobs=kept["sequences"].logprobs + MOVED, entropy=jnp.zeros((B, R)))
    loss, weight, _ = ppo_policy_loss(outputs, kept, CONFIG.actor_update)
    assert loss == weight == 0.0 and metrics["group/missing"] == 2.0


def test_metrics_are_of_the_groups_that_are_trained_on():
    """Punishments alone make groups 0 and 2 differ: they are neither counted nor trained on."""
    rollout, scores_B = four_groups(*[1.0] * 3, *[0.0, 1.0, 0.0], *[0.0] * 3, *[5.0, 1.0, 1.0])
    config = dataclasses.replace(CONFIG, oversampling=2)
    batch, metrics = fast_dapo_batch(rollout["sequences"], scores_B, config=config)
    np.testing.assert_array_equal(batch["sequences"].row, [*range(N, 2 * N), *range(3 * N, 4 * N)])
    assert metrics["group/differing"] == 0.5 and metrics["group/kept"] == 2.0
    trained = [
        float(batch["advantages"][b, r]) for b in range(B) for r in range(R) if batch["sequences"].response[b, r]
    ]
    want = {"mean": sum(trained) / len(trained), "max": max(trained), "min": min(trained)}
    for name, value in want.items():
        np.testing.assert_allclose(metrics[f"critic/advantages/{name}"], value, rtol=1e-5, atol=1e-6)
    everything, _ = fast_dapo_batch(rollout["sequences"], scores_B, config=CONFIG)
    all_tokens = np.asarray(everything["advantages"])[np.asarray(everything["sequences"].response)]
    assert abs(all_tokens.mean() - want["mean"]) > 1e-3  # over all samples it would be another number


UNEVEN = (
    "settings.oversampling: must divide the 4 prompts of a step. Got 3. Choose a batch_size that is a multiple of it."
)


def test_refuses_to_leave_out_a_part_of_a_group():
    batch, scores_B = four_groups(*[0.0, 1.0, 1.0] * 4)
    with pytest.raises(ValueError, match=f"^{re.escape(UNEVEN)}$"):
        select_groups(batch, scores_B, num_samples=N, oversampling=3)
    with pytest.raises(ValueError, match=f"^{re.escape(UNEVEN)}$"):
        assemble(small_run("dapo", batch_size=4, settings={"oversampling": 3}), 1, 1)


def test_without_oversampling_all_groups_stay():
    batch, scores_B = four_groups(*[1.0] * 9, *[0.0, 1.0, 1.0])
    kept, metrics = select_groups(batch, scores_B, num_samples=N, oversampling=1)
    assert kept is batch
    assert metrics["group/kept"] == 1.0 and metrics["group/missing"] == 3.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"oversampling": 0}, "oversampling: must be at least 1. Got 0."),
        ({"overlong_tokens": 6}, "overlong_tokens: must lie between 0 and sampling.max_new_tokens=5. Got 6."),
        ({"overlong_penalty": -1.0}, "overlong_penalty: must be finite and not negative. Got -1.0."),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DAPOConfig(sampling=SAMPLING, **settings)
