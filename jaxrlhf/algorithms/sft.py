"""Supervised fine-tuning of the actor on demonstrations: an algorithm by itself, and the warm start of others.

Letters: B sequences, R response columns.
"""

import dataclasses
from typing import Any

from jaxrlhf.algorithms.losses import Loss
from jaxrlhf.algorithms.masked import masked_count, masked_sum
from jaxrlhf.experience import PolicyOutputs, Sequences
from jaxrlhf.require import require, require_passes


@dataclasses.dataclass(frozen=True)
class SupervisedUpdate:
    """Settings of the updates on one batch of rows."""

    mini_batches: int = 1
    """Updates in one pass over the batch."""
    epochs: int = 1
    """Passes over the batch."""

    def __post_init__(self) -> None:
        require_passes(self.mini_batches, self.epochs, "update")


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Settings of supervised fine-tuning."""

    max_new_tokens: int = 128
    """Columns of a response, end of text included."""
    update: SupervisedUpdate = SupervisedUpdate()

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, "max_new_tokens", "must be at least 1", self.max_new_tokens)


def sft_step(
    roles: Any, state: tuple[()], demonstrations: Sequences, config: SFTConfig
) -> tuple[dict[str, Any], tuple[()]]:
    """One step of supervised fine-tuning."""
    return {"actor": roles.actor.train(sft_loss, {"sequences": demonstrations}, config.update)}, state


def sft_evaluation(
    roles: Any, state: tuple[()], demonstrations: Sequences, config: SFTConfig
) -> tuple[dict[str, Any], tuple[()]]:
    """The loss on held-out demonstrations."""
    return roles.actor.loss(sft_loss, {"sequences": demonstrations}, config.update), state


def sft_loss(outputs: PolicyOutputs, batch: dict[str, Any], update: Any) -> Loss:
    """Negative log-likelihood of the response tokens, whatever the settings of the update. Metric: `loss`."""
    mask_BR = batch["sequences"].response
    loss = -masked_sum(outputs.logprobs, mask_BR)
    return loss, masked_count(mask_BR), {"loss": loss}
