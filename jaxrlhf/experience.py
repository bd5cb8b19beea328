"""The data between the calls of a step: prompts, rollouts, model outputs; and the settings of sampling.

Letters: B sequences, P prompt columns, R response columns, T = P + R columns.

Prompts are padded on the left to P columns and responses on the right to R, so a sequence is one row of T columns with
padding at both ends, and the response always starts at column P. `Sequences` is the part that a model reads; `Rollout`
adds the results of sampling.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrlhf.require import require, require_at_least_one, require_not_negative, require_positive_fraction

RUNNING, STOP, LENGTH = 0, 1, 2
"""Finish reasons: still decoding; ended by a stop token; ended by the limit on new tokens."""
RowKind = Literal["prompts", "demonstrations", "preferences"]
"""Rows as prompts alone, with a completion, or with a chosen and a rejected one."""


class Prompts(struct.PyTreeNode):
    """A batch of prompts, padded on the left."""

    tokens: Int[Array, "B P"]
    mask: Bool[Array, "B P"]
    """True where a token is real."""
    row: Int[Array, " B"]
    """The row of each prompt in the prompt table, by which reward functions get its other columns."""
    id: UInt[Array, " B"]
    """A number for each sequence, unique in a step. With the seed, step and call it determines the noise."""
    expected_tokens: Float[Array, " B"] | None = None
    """How many tokens the response to each prompt is expected to have. Where responses are generated in slots, the
    longest enter first."""


class Sequences(struct.PyTreeNode):
    """Prompts with responses, the input of forward passes and losses. Demonstrations have this form."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    """True where a token is real, prompt or response."""
    response: Bool[Array, "B R"]
    """True at response tokens, the stop token included."""


class Rollout(struct.PyTreeNode):
    """Sequences sampled from a policy, with their log-probabilities."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    response: Bool[Array, "B R"]
    logprobs: Float[Array, "B R"]
    """Log-probability of each response token under the unmodified policy (temperature 1, nothing cut off)."""
    sampled_logprobs: Float[Array, "B R"]
    """The same under the distribution from which it was drawn."""
    finish: Int[Array, " B"]
    """`STOP` or `LENGTH`."""
    row: Int[Array, " B"]
    id: UInt[Array, " B"]

    @property
    def lengths(self) -> Int[Array, " B"]:
        """The number of tokens of each response, including the stop token."""
        return self.response.sum(axis=1)


class Preferences(struct.PyTreeNode):
    """Pairs of responses to the same prompts, of which the first was preferred."""

    chosen: Sequences
    rejected: Sequences
    margin: Float[Array, " B"]
    """The difference, on the scale of a reward model's scores; zero if unknown."""


class PolicyOutputs(struct.PyTreeNode):
    """Outputs of a language-model head at response tokens. Zero outside of `response`."""

    logprobs: Float[Array, "B R"]
    entropy: Float[Array, "B R"]


class PolicyAndValues(PolicyOutputs):
    """Outputs of a language-model head and a scalar head on one trunk. Zero outside of `response`."""

    values: Float[Array, "B R"]
    """The output of the scalar head before each response token."""


class Term(struct.PyTreeNode):
    """One of the losses that a train call adds: its mean over its own batch, times its weight.

    roles.actor.train((Term(ppo_policy_loss, batch), Term(sft_loss, demonstrations, weight=0.5)), update)
    """

    loss: Callable[..., Any] = struct.field(pytree_node=False)
    """`(outputs, batch, update) -> (sum, weight, metrics)`."""
    batch: Any
    """A dict of arrays with rows first. The model runs on its `sequences`."""
    weight: Any = 1.0
    """A number, or an output of a call."""
    of: str = struct.field(default="", pytree_node=False)
    """The inference method whose outputs the loss gets. Empty means all outputs of the model's heads."""
    name: str = struct.field(default="", pytree_node=False)
    """The group of its metrics, `<role>/<name>/loss`, which distinguishes several terms."""


class Max(struct.PyTreeNode):
    """A metric of a loss of which the maximum over micro-batches and updates is taken, instead of the sum."""

    value: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of sampling."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """The number of tokens before which no stop token is drawn."""
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 means all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together reach this probability."""
    num_samples: int = 1
    """Responses to each prompt, in consecutive rows from i * num_samples on."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a response. Empty means the tokenizer's end-of-text token."""

    def __post_init__(self) -> None:
        least, most = self.min_new_tokens, self.max_new_tokens
        require_at_least_one(most, "sampling.max_new_tokens")
        require(0 <= least <= most, "sampling.min_new_tokens", f"must lie between 0 and max_new_tokens={most}", least)
        require_not_negative(self.temperature, "sampling.temperature")
        require(self.top_k >= 0, "sampling.top_k", "must be 0 (all tokens) or positive", self.top_k)
        require_positive_fraction(self.top_p, "sampling.top_p")
        require_at_least_one(self.num_samples, "sampling.num_samples")
