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
    """Settings of the updates on one batch of rows.

    >>> SupervisedUpdate(epochs=2, mini_batches=4).mini_batches
    4
    """

    mini_batches: int = 1
    """Updates in one pass over the batch."""
    epochs: int = 1
    """Passes over the batch."""

    def __post_init__(self) -> None:
        require_passes(self.mini_batches, self.epochs, "update")


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Settings of supervised fine-tuning.

    >>> SFTConfig(max_new_tokens=64, update=SupervisedUpdate(mini_batches=2)).max_new_tokens
    64
    """

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
    """Negative log-likelihood of the response tokens, whatever the settings of the update. Metric: `loss`.

    >>> sequences = Sequences(jnp.ones((1, 3), int), jnp.ones((1, 3), bool), response=jnp.array([[True, False]]))
    >>> outputs = PolicyOutputs(logprobs=jnp.array([[-0.5, 0.0]]), entropy=jnp.zeros((1, 2)))
    >>> loss, tokens, _ = sft_loss(outputs, {"sequences": sequences}, SupervisedUpdate())
    >>> float(loss), float(tokens)
    (0.5, 1.0)
    """
    mask_BR = batch["sequences"].response
    loss = -masked_sum(outputs.logprobs, mask_BR)
    return loss, masked_count(mask_BR), {"loss": loss}
