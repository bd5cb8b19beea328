"""Losses and their gradients beside those of verl and TRL, as scripts/make_loss_references.py wrote them down."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algorithms.dpo import DPOUpdate, dpo_loss
from jaxrlhf.algorithms.group import group_advantages, leave_one_out, on_tokens
from jaxrlhf.algorithms.gspo import SequenceUpdate, gspo_policy_loss
from jaxrlhf.algorithms.kl import KLTerm
from jaxrlhf.algorithms.masked import whiten
from jaxrlhf.algorithms.policy import PolicyUpdate, ppo_policy_loss
from jaxrlhf.algorithms.ppo import ValueUpdate, value_loss
from jaxrlhf.algorithms.returns import gae
from jaxrlhf.algorithms.reward_model import RewardModelUpdate, reward_model_loss
from jaxrlhf.experience import STOP, PolicyOutputs, Rollout, Sequences

CLOSE: Any = {"rtol": 1e-5, "atol": 1e-5}


def references(name: str) -> dict[str, jax.Array]:
    with np.load(Path(__file__).parent / "data" / f"{name}_references.npz") as arrays:
        return {key: jnp.asarray(arrays[key]) for key in arrays}


def batch_of(arrays: dict[str, jax.Array], advantages_BR: jax.Array) -> dict[str, Any]:
    """A training batch: a rollout without prompts, of which only responses and their log-probabilities are read."""
    mask_BR, num_rows = arrays["mask"] > 0, arrays["mask"].shape[0]
    rollout = Rollout(
        tokens=jnp.zeros(mask_BR.shape, jnp.int32),
        mask=mask_BR,
        response=mask_BR,
        logprobs=arrays["old_logprobs"],
        sampled_logprobs=arrays["old_logprobs"],
        finish=jnp.full(num_rows, STOP, jnp.int32),
        row=jnp.arange(num_rows, dtype=jnp.int32),
        id=jnp.arange(num_rows, dtype=jnp.uint32),
    )
    return {"sequences": rollout, "advantages": jnp.where(mask_BR, advantages_BR, 0.0)}


def mean_and_gradient(loss: Any, outputs: Any, batch: dict[str, Any], update: Any) -> tuple[Any, Any]:
    def mean(outputs: Any) -> jax.Array:
        total, weight, _ = loss(outputs, batch, update)
        return total / weight

    return jax.value_and_grad(mean)(outputs)


def policy_outputs(logprobs_BR: jax.Array) -> PolicyOutputs:
    return PolicyOutputs(logprobs=logprobs_BR, entropy=jnp.zeros_like(logprobs_BR))


@pytest.mark.parametrize("clips", ["even", "uneven"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "sum", "constant"])
def test_ppo_policy_loss(aggregation, clips):
    arrays = references("ppo")
    update = PolicyUpdate(clip=0.2, clip_high={"even": None, "uneven": 0.28}[clips], aggregation=aggregation)
    batch = batch_of(arrays, arrays["advantages"])
    value, grads = mean_and_gradient(ppo_policy_loss, policy_outputs(arrays["logprobs"]), batch, update)
    np.testing.assert_allclose(value, arrays[f"{aggregation}_{clips}_loss"], **CLOSE)
    np.testing.assert_allclose(grads.logprobs, arrays[f"{aggregation}_{clips}_grad"], **CLOSE)
    assert np.count_nonzero(grads.logprobs) > 10


def test_value_loss():
    arrays = references("ppo")
    batch = batch_of(arrays, arrays["advantages"]) | {"returns": arrays["returns"], "values": arrays["old_values"]}
    update = ValueUpdate(value_clip=0.2, coef=0.5)  # verl's has the half in it
    value, grads_BR = mean_and_gradient(value_loss, arrays["values"], batch, update)
    np.testing.assert_allclose(value, arrays["value_loss"], **CLOSE)
    np.testing.assert_allclose(grads_BR, arrays["value_grad"], **CLOSE)
    assert np.count_nonzero(grads_BR) > 5


def test_advantages_and_returns():
    arrays = references("ppo")
    mask_BR = arrays["mask"] > 0
    advantages_BR, returns_BR = gae(arrays["rewards"], arrays["old_values"], mask_BR, discount=0.97, gae_lambda=0.9)
    np.testing.assert_allclose(returns_BR, jnp.where(mask_BR, arrays["returns"], 0.0), **CLOSE)
    # verl divides the variance by n - 1
    count = arrays["mask"].sum()
    want_BR = jnp.where(mask_BR, arrays["advantages"], 0.0) * jnp.sqrt(count / (count - 1))
    np.testing.assert_allclose(whiten(advantages_BR, mask_BR), want_BR, **CLOSE)


@pytest.mark.parametrize("case", ["grpo_sequence", "grpo_token", "dr_grpo"])
def test_grpo_loss(case):
    arrays = references("grpo")
    name, _, aggregation = case.partition("_") if case != "dr_grpo" else ("dr_grpo", "", "constant")
    batch = batch_of(arrays, arrays[f"{name}_advantages"])
    if name == "grpo":
        coef_B = jnp.full(arrays["scores"].shape, 0.04)
        batch["kl"] = KLTerm(reference=arrays["reference"], coef=coef_B, estimator="k3")
    update = PolicyUpdate(clip=0.2, aggregation=aggregation)
    value, grads = mean_and_gradient(ppo_policy_loss, policy_outputs(arrays["logprobs"]), batch, update)
    np.testing.assert_allclose(value, arrays[f"{case}_loss"], **CLOSE)
    np.testing.assert_allclose(grads.logprobs, arrays[f"{case}_grad"], **CLOSE)
    assert np.count_nonzero(grads.logprobs) > 10


@pytest.mark.parametrize("library", ["ppo", "grpo"])
def test_gspo_loss(library):
    arrays = references(library)  # verl's and TRL's
    advantages_BR = arrays["advantages"][:, :1] if library == "ppo" else arrays["grpo_advantages"]
    batch = batch_of(arrays, jnp.broadcast_to(advantages_BR, arrays["mask"].shape))
    update = {"ppo": SequenceUpdate(clip=0.1, clip_high=0.15), "grpo": SequenceUpdate(clip=0.2, clip_high=0.2)}[library]
    value, grads = mean_and_gradient(gspo_policy_loss, policy_outputs(arrays["logprobs"]), batch, update)
    np.testing.assert_allclose(value, arrays["gspo_loss"], **CLOSE)
    np.testing.assert_allclose(grads.logprobs, arrays["gspo_grad"], **CLOSE)
    assert np.count_nonzero(grads.logprobs) > 10


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_within_groups(name):
    arrays = references("grpo")
    scores_B, num_samples = arrays["scores"], int(arrays["num_samples"])
    if name == "rloo":
        advantages_B = leave_one_out(scores_B, num_samples=num_samples)
    else:
        advantages_B = group_advantages(scores_B, num_samples=num_samples, normalize_std=name == "grpo")
    want_BR = jnp.where(arrays["mask"] > 0, arrays[f"{name}_advantages"], 0.0)
    np.testing.assert_allclose(on_tokens(advantages_B, arrays["mask"] > 0), want_BR, **CLOSE)


def halves(x: jax.Array) -> dict[str, jax.Array]:
    """The first half of the rows was preferred."""
    chosen, rejected = jnp.split(x, 2)
    return {"chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize("case", ["sigmoid", "robust", "ipo"])
def test_dpo_loss(case):
    arrays = references("dpo")
    mask_BR = arrays["ipo_mask" if case == "ipo" else "mask"] > 0
    sequences = Sequences(tokens=jnp.zeros(mask_BR.shape, jnp.int32), mask=mask_BR, response=mask_BR)
    chosen, rejected = (jax.tree.map(lambda x, half=half: halves(x)[half], sequences) for half in halves(mask_BR))
    reference = halves(jnp.where(mask_BR, arrays["reference"], 0.0))
    batch = {"sequences": {"chosen": chosen, "rejected": rejected}, "reference": reference}
    smoothing = float(arrays["label_smoothing"]) if case == "robust" else 0.0
    update = DPOUpdate(loss=case, beta=float(arrays["beta"]), label_smoothing=smoothing)

    def loss(logprobs_BR: jax.Array, batch: dict[str, Any], update: DPOUpdate) -> Any:
        outputs = {name: policy_outputs(x_BR) for name, x_BR in halves(logprobs_BR).items()}
        return dpo_loss(outputs, batch, update)

    value, grads_BR = mean_and_gradient(loss, arrays["logprobs"], batch, update)
    np.testing.assert_allclose(value, arrays[f"{case}_loss"], **CLOSE)
    np.testing.assert_allclose(grads_BR, arrays[f"{case}_grad"], **CLOSE)
    assert np.count_nonzero(grads_BR) == mask_BR.sum()


@pytest.mark.parametrize("case", ["plain", "margin", "centered"])
def test_reward_model_loss(case):
    arrays = references("reward_model")
    margin_B = jnp.zeros_like(arrays["margin"]) if case == "plain" else arrays["margin"]
    update = RewardModelUpdate(center_coef=float(arrays["centering"]) if case == "centered" else 0.0)

    def loss(scores: jax.Array, batch: dict[str, Any], update: RewardModelUpdate) -> Any:
        return reward_model_loss(halves(scores), batch, update)

    value, grads = mean_and_gradient(loss, arrays["scores"], {"margin": margin_B}, update)
    np.testing.assert_allclose(value, arrays[f"{case}_loss"], **CLOSE)
    np.testing.assert_allclose(grads, arrays[f"{case}_grad"], **CLOSE)
    assert np.count_nonzero(grads) == len(grads)
