"""What travels between the calls of a step: prompts, rollouts, model outputs, and the settings of sampling.

Letters: B sequences, P prompt columns, R response columns, T = P + R columns.

Prompts are padded on the left to P columns and responses on the right to R, so a sequence is one row of T columns with
its padding at both ends, and the response always starts at column P. `Sequences` is the part that a model reads;
`Rollout` adds what sampling found out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrlhf.require import require, require_at_least_one, require_not_negative, require_positive_fraction

RUNNING, STOP, LENGTH = 0, 1, 2
"""Finish reasons: still decoding; ended by a stop token; ended by the limit on new tokens."""


class Prompts(struct.PyTreeNode):
    """A batch of prompts, padded on the left."""

    tokens: Int[Array, "B P"]
    mask: Bool[Array, "B P"]
    """True where a token is real."""
    row: Int[Array, " B"]
    """Which row of the prompt table each prompt came from: how a reward function finds the row's other columns."""
    id: UInt[Array, " B"]
    """A number for each sequence, unique within a step. With the seed, the step and the call it decides the noise."""


class Sequences(struct.PyTreeNode):
    """Prompts with responses: what a forward pass and a loss need. Demonstrations arrive in this form."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    """True where a token is real, prompt or response."""
    response: Bool[Array, "B R"]
    """True at response tokens, the stop token included."""


class Rollout(struct.PyTreeNode):
    """Sequences that a policy sampled, with what was recorded on the way."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    response: Bool[Array, "B R"]
    logprobs: Float[Array, "B R"]
    """Log-probability of each response token under the unmodified policy (temperature 1, nothing cut off)."""
    sampled_logprobs: Float[Array, "B R"]
    """The same under the distribution that it was drawn from."""
    finish: Int[Array, " B"]
    """`STOP` or `LENGTH`."""
    row: Int[Array, " B"]
    id: UInt[Array, " B"]

    @property
    def lengths(self) -> Int[Array, " B"]:
        """Tokens of each response, the stop token included."""
        return self.response.sum(axis=1)


class Preferences(struct.PyTreeNode):
    """Pairs of responses to the same prompts, of which the first was preferred."""

    chosen: Sequences
    rejected: Sequences
    margin: Float[Array, " B"]
    """By how much, on the scale of a reward model's scores; zero where nobody said."""


class PolicyOutputs(struct.PyTreeNode):
    """What a language-model head says about response tokens. Zero outside `response`."""

    logprobs: Float[Array, "B R"]
    entropy: Float[Array, "B R"]


class PolicyAndValues(PolicyOutputs):
    """What a language-model head and a scalar head on one trunk say about response tokens. Zero outside `response`."""

    values: Float[Array, "B R"]
    """The scalar head before each response token."""


class Term(struct.PyTreeNode):
    """One of several losses that a train call sums up: its mean over its own batch, times its weight.

    roles.actor.train((Term(ppo_policy_loss, batch), Term(sft_loss, demonstrations, weight=0.5)), update)
    """

    loss: Callable[..., Any] = struct.field(pytree_node=False)
    """`(outputs, batch, update) -> (sum, weight, metrics)`."""
    batch: Any
    """A dict of arrays with rows first. The model runs on its `sequences`."""
    weight: Any = 1.0
    """A number, or an output of a call."""
    of: str = struct.field(default="", pytree_node=False)
    """The inference method whose outputs the loss gets. Empty: all that the model's heads say about response tokens."""
    name: str = struct.field(default="", pytree_node=False)
    """What its metrics lie under, `<role>/<name>/loss`, where those of two terms would have the same names."""


class Max(struct.PyTreeNode):
    """A metric of a loss that combines over micro-batches and updates by its maximum, where plain ones add up."""

    value: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """No stop token is drawn before this many tokens."""
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability."""
    num_samples: int = 1
    """Responses to each prompt. Those to one prompt are neighbours: rows i * num_samples and following."""
    stop_ids: tuple[int, ...] = ()
    """Any of these ends a response. Empty: the tokenizer's end-of-text token."""

    def __post_init__(self) -> None:
        least, most = self.min_new_tokens, self.max_new_tokens
        require_at_least_one(most, "sampling.max_new_tokens")
        require(0 <= least <= most, "sampling.min_new_tokens", f"must lie between 0 and max_new_tokens={most}", least)
        require_not_negative(self.temperature, "sampling.temperature")
        require(self.top_k >= 0, "sampling.top_k", "must be 0 (all tokens) or positive", self.top_k)
        require_positive_fraction(self.top_p, "sampling.top_p")
        require_at_least_one(self.num_samples, "sampling.num_samples")
