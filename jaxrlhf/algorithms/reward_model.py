"""Training of a reward model on preferences: a scalar head learns to score the chosen response above the rejected one.
DPO uses the batches of pairs and their accuracy too.

Letters: B pairs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrlhf.algorithms.losses import Loss, Metrics
from jaxrlhf.algorithms.sft import SFTConfig, SupervisedUpdate
from jaxrlhf.experience import Preferences, Term
from jaxrlhf.require import require_not_negative


@dataclasses.dataclass(frozen=True)
class RewardModelUpdate(SupervisedUpdate):
    """Settings of the reward model's updates on one batch of pairs."""

    center_coef: float = 0.0
    """Weight of the term that centers the scores of a pair around zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self.center_coef, "update.center_coef")


@dataclasses.dataclass(frozen=True)
class RewardModelConfig(SFTConfig):
    """Settings of training a reward model.

    >>> RewardModelConfig(update=RewardModelUpdate(center_coef=0.01)).max_new_tokens
    128
    """

    update: RewardModelUpdate = RewardModelUpdate()


def reward_model_step(
    roles: Any, state: tuple[()], pairs: Preferences, config: RewardModelConfig
) -> tuple[dict[str, Any], tuple[()]]:
    """One step of training a reward model.

    Reference:
        Ouyang et al. 2022, arXiv:2203.02155, eq. 1.
    """
    term = Term(reward_model_loss, pair_batch(pairs), of="scores")
    return {"reward": roles.reward.train(term, config.update)}, state


def reward_model_evaluation(
    roles: Any, state: tuple[()], pairs: Preferences, config: RewardModelConfig
) -> tuple[dict[str, Any], tuple[()]]:
    """Loss and accuracy on held-out pairs."""
    return roles.reward.loss(Term(reward_model_loss, pair_batch(pairs), of="scores"), config.update), state


def reward_model_loss(
    scores: Mapping[str, Float[Array, " B"]], batch: dict[str, Any], update: RewardModelUpdate
) -> Loss:
    """Negative log-likelihood of the preferences under the model of Bradley and Terry.

        loss = -log sigmoid(s_chosen - s_rejected - margin) + center_coef * (s_chosen + s_rejected)^2

    Metrics: `accuracy`, pairs whose chosen response scores higher, ties half; `margin`, s_chosen - s_rejected;
    `chosen_score`; `rejected_score`.

    Reference:
        Bradley and Terry 1952; the margin, Touvron et al. 2023, arXiv:2307.09288, eq. 2; the centering term, Eisenstein
        et al. 2023, arXiv:2312.09244, eq. 2.
    """
    chosen_B, rejected_B = scores["chosen"], scores["rejected"]
    margin_B = chosen_B - rejected_B
    loss_B = -jax.nn.log_sigmoid(margin_B - batch["margin"]) + update.center_coef * jnp.square(chosen_B + rejected_B)
    metrics: Metrics = {
        "accuracy": correct_pairs(chosen_B, rejected_B),
        "margin": jnp.sum(margin_B),
        "chosen_score": jnp.sum(chosen_B),
        "rejected_score": jnp.sum(rejected_B),
    }
    return jnp.sum(loss_B), jnp.asarray(chosen_B.shape[0], jnp.float32), metrics


def pair_batch(pairs: Preferences, **more: Any) -> dict[str, Any]:
    """A training batch with the sequences `chosen` and `rejected` of each pair, the margin and `more`."""
    return {"sequences": {"chosen": pairs.chosen, "rejected": pairs.rejected}, "margin": pairs.margin, **more}


def correct_pairs(chosen_B: Float[Array, " B"], rejected_B: Float[Array, " B"]) -> Float[Array, ""]:
    """The number of pairs whose chosen response scores higher. A tie counts half."""
    chex.assert_rank([chosen_B, rejected_B], 1)
    chex.assert_equal_shape([chosen_B, rejected_B])
    return jnp.sum((1.0 + jnp.sign(chosen_B - rejected_B)) / 2.0)
