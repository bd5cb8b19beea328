"""Direct preference optimization: the actor learns from pairs, without a reward model and without sampling.

Letters: B pairs, R response columns.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrlhf.algorithms.losses import Loss, Metrics
from jaxrlhf.algorithms.reward_model import correct_pairs, pair_batch
from jaxrlhf.algorithms.sft import SFTConfig, SupervisedUpdate
from jaxrlhf.experience import PolicyOutputs, Preferences
from jaxrlhf.require import require, require_positive

DPOLoss = Literal["sigmoid", "robust", "ipo"]


@dataclasses.dataclass(frozen=True)
class DPOUpdate(SupervisedUpdate):
    """Settings of the actor's updates on one batch of pairs."""

    loss: DPOLoss = "sigmoid"
    """`sigmoid` is DPO, `ipo` is IPO. `robust` is DPO with a loss that is unbiased under flipped labels."""
    beta: float = 0.1
    """Strength of the implied KL penalty towards the reference, in nats^-1."""
    label_smoothing: float = 0.0
    """Assumed fraction of flipped preference labels, in [0, 0.5). Must be 0 for `ipo`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = get_args(DPOLoss)
        require(self.loss in known, "update.loss", f"must be one of {', '.join(known)}", self.loss)
        require_positive(self.beta, "update.beta")
        smooth = self.label_smoothing
        require(0 <= smooth < 0.5, "update.label_smoothing", "must lie in [0, 0.5)", smooth)
        require(smooth == 0 or self.loss != "ipo", "update.label_smoothing", "ipo has none", smooth, "Leave it out.")


@dataclasses.dataclass(frozen=True)
class DPOConfig(SFTConfig):
    """Settings of direct preference optimization.

    >>> DPOConfig(max_new_tokens=64, update=DPOUpdate(mini_batches=2)).update.mini_batches
    2
    """

    update: DPOUpdate = DPOUpdate()


def dpo_step(roles: Any, state: tuple[()], pairs: Preferences, config: DPOConfig) -> tuple[dict[str, Any], tuple[()]]:
    """One step of direct preference optimization.

    Reference:
        Rafailov et al. 2023, arXiv:2305.18290.
    """
    return {"actor": roles.actor.train(dpo_loss, _batch(roles, pairs), config.update)}, state


def dpo_evaluation(
    roles: Any, state: tuple[()], pairs: Preferences, config: DPOConfig
) -> tuple[dict[str, Any], tuple[()]]:
    """Loss, accuracy and margin of the implied rewards on held-out pairs."""
    return roles.actor.loss(dpo_loss, _batch(roles, pairs), config.update), state


def _batch(roles: Any, pairs: Preferences) -> dict[str, Any]:
    """The pairs with the reference's log-probabilities of both responses."""
    logprobs = roles.reference.logprobs
    return pair_batch(pairs, reference={"chosen": logprobs(pairs.chosen), "rejected": logprobs(pairs.rejected)})


def dpo_loss(outputs: Mapping[str, PolicyOutputs], batch: dict[str, Any], update: DPOUpdate) -> Loss:
    """The loss of DPO and its variants, a function of the difference between the implied rewards of two responses.

        r(y)    = log policy(y) - log reference(y)
        h       = r(chosen) - r(rejected)
        sigmoid = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
        robust  = (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)
        ipo     = (h - 1 / (2 beta))^2

    log policy(y) is the sum over the tokens of a response, its end of text included; e is `label_smoothing`.

    Metrics: `accuracy`, pairs whose chosen response has the higher implied reward, ties half; `margin`, beta h;
    `chosen_reward` and `rejected_reward`, beta r; `chosen_logprob` and `rejected_logprob`, log policy.

    Reference:
        Rafailov et al. 2023, arXiv:2305.18290, eq. 7; label smoothing, Mitchell 2023, "A note on DPO with noisy
        preferences & relationship to IPO", eq. 3; robust, Chowdhury et al. 2024, arXiv:2403.00409, eq. 9; IPO, Azar et
        al. 2023, arXiv:2310.12036, eq. 17.
    """
    logprobs, rewards = {}, {}
    for name, sequences in batch["sequences"].items():
        logprobs[name] = _sequence_sum(outputs[name].logprobs, sequences.response)
        rewards[name] = update.beta * (logprobs[name] - _sequence_sum(batch["reference"][name], sequences.response))
    margin_B = rewards["chosen"] - rewards["rejected"]
    metrics: Metrics = {
        "accuracy": correct_pairs(rewards["chosen"], rewards["rejected"]),
        "margin": jnp.sum(margin_B),
        **{f"{name}_reward": jnp.sum(reward_B) for name, reward_B in rewards.items()},
        **{f"{name}_logprob": jnp.sum(logprob_B) for name, logprob_B in logprobs.items()},
    }
    return jnp.sum(_pair_losses(margin_B, update)), jnp.asarray(margin_B.shape[0], jnp.float32), metrics


def _pair_losses(margin_B: Float[Array, " B"], update: DPOUpdate) -> Float[Array, " B"]:
    """The loss of each pair. `margin_B` is beta h."""
    if update.loss == "ipo":
        return jnp.square(margin_B / update.beta - 1.0 / (2.0 * update.beta))
    right_B, wrong_B = -jax.nn.log_sigmoid(margin_B), -jax.nn.log_sigmoid(-margin_B)
    smooth = update.label_smoothing
    if update.loss == "robust":
        return ((1.0 - smooth) * right_B - smooth * wrong_B) / (1.0 - 2.0 * smooth)
    return (1.0 - smooth) * right_B + smooth * wrong_B


def _sequence_sum(x_BR: Float[Array, "B R"], mask_BR: Bool[Array, "B R"]) -> Float[Array, " B"]:
    """Sum over the tokens of each response."""
    return jnp.sum(jnp.where(mask_BR, x_BR, 0.0), axis=1)
