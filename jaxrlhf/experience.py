"""The data between the calls of a step: prompts, rollouts, model outputs; and the settings of sampling.

Letters: B sequences, P prompt columns, R response columns, T = P + R columns.

Prompts are padded on the left to P columns and responses on the right to R, so a sequence is one row of T columns with
padding at both ends, and the response always starts at column P. `Sequences` is the part that a model reads; `Rollout`
adds the results of sampling.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from flax import struct
from flax.core import FrozenDict
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrlhf.require import (
    require,
    require_at_least_one,
    require_fraction,
    require_not_negative,
    require_positive,
    require_positive_fraction,
)

RUNNING, STOP, LENGTH = 0, 1, 2
"""Finish reasons: still decoding; ended by a stop token or a stop string; ended by the limit on new tokens."""
MAX_PENALTY, MAX_BIAS = 2.0, 100.0
"""The largest presence and frequency penalty, and the largest bias of a token, up and down: those of OpenAI's API."""
RowKind = Literal["prompts", "demonstrations", "preferences"]
"""Rows as prompts alone, with a completion, or with a chosen and a rejected one."""


class Prompts(struct.PyTreeNode):
    """A batch of prompts, padded on the left.

    >>> tokens_BP, rows_B = jnp.array([[0, 5, 6]]), jnp.zeros(1, jnp.int32)
    >>> Prompts(tokens_BP, tokens_BP > 0, row=rows_B, id=jnp.zeros(1, jnp.uint32)).mask.tolist()
    [[False, True, True]]
    """

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
    """Prompts with responses, the input of forward passes and losses. Demonstrations have this form.

    >>> tokens_BT = jnp.array([[0, 5, 6, 7]])
    >>> Sequences(tokens_BT, tokens_BT > 0, response=jnp.array([[True, True]])).tokens.shape
    (1, 4)
    """

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    """True where a token is real, prompt or response."""
    response: Bool[Array, "B R"]
    """True at response tokens, the stop token included. In demonstrations of dialogues it is False between replies;
    scores are for responses without such gaps."""


class Rollout(Sequences):
    """Sequences sampled from a policy, with their log-probabilities.

    >>> tokens_BT, zeros_BR, rows_B = jnp.array([[5, 6, 7]]), jnp.zeros((1, 2)), jnp.zeros(1, jnp.int32)
    >>> rollout = Rollout(
    ...     tokens_BT, tokens_BT > 0, response=jnp.array([[True, False]]), logprobs=zeros_BR,
    ...     sampled_logprobs=zeros_BR, finish=rows_B, row=rows_B, id=rows_B.astype(jnp.uint32),
    ... )
    >>> rollout.lengths.tolist()
    [1]
    """

    logprobs: Float[Array, "B R"]
    """Log-probability of each response token under the unmodified policy: temperature 1, no bias, no penalties, nothing
    cut off."""
    sampled_logprobs: Float[Array, "B R"]
    """The same under the distribution from which it was drawn: with all that `Sampling` says, and 0 when greedy."""
    finish: Int[Array, " B"]
    """`STOP` or `LENGTH`."""
    row: Int[Array, " B"]
    id: UInt[Array, " B"]
    importance_weights: Float[Array, "B R"] | None = None
    """By which a loss multiplies the advantages of tokens that an older policy drew, whose log-probabilities `logprobs`
    then are not: they are those of the current one. None where no correction is needed or wanted."""

    @property
    def lengths(self) -> Int[Array, " B"]:
        """The number of tokens of each response, including the stop token."""
        return self.response.sum(axis=1)


class Preferences(struct.PyTreeNode):
    """Pairs of responses to the same prompts, of which the first was preferred.

    >>> tokens_BT = jnp.array([[5, 6]])
    >>> better = Sequences(tokens_BT, tokens_BT > 0, response=jnp.array([[True]]))
    >>> Preferences(better, better, margin=jnp.zeros(1)).margin.shape
    (1,)
    """

    chosen: Sequences
    rejected: Sequences
    margin: Float[Array, " B"]
    """The difference, on the scale of a reward model's scores; zero if unknown."""


class PolicyOutputs(struct.PyTreeNode):
    """Outputs of a language-model head at response tokens. Zero outside of `response`.

    >>> PolicyOutputs(logprobs=jnp.full((1, 2), -0.5), entropy=jnp.ones((1, 2))).logprobs.shape
    (1, 2)
    """

    logprobs: Float[Array, "B R"]
    entropy: Float[Array, "B R"]


class PolicyAndValues(PolicyOutputs):
    """Outputs of a language-model head and a scalar head on one trunk. Zero outside of `response`.

    >>> zeros_BR = jnp.zeros((1, 2))
    >>> PolicyAndValues(zeros_BR, zeros_BR, values=zeros_BR).values.shape
    (1, 2)
    """

    values: Float[Array, "B R"]
    """The output of the scalar head before each response token."""


class Term(struct.PyTreeNode):
    """One of the losses that a train call adds: its mean over its own batch, times its weight.

    roles.actor.train((Term(ppo_policy_loss, batch), Term(sft_loss, demonstrations, weight=0.5)), update)

    >>> Term(loss=len, batch={}, weight=0.5, name="pretraining").of
    ''
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
    """A metric of a loss of which the maximum over micro-batches and updates is taken, instead of the sum.

    >>> float(Max(jnp.array(2.0)).value)
    2.0
    """

    value: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of sampling.

    A token is drawn from logits that are changed in this order: by `logit_bias`; by the penalties; by leaving out what
    may not be drawn (all but `allowed_tokens`, `banned_tokens`, stop tokens before `min_new_tokens`); by `temperature`;
    by `top_k`, `top_p` and `min_p`.

    >>> Sampling(max_new_tokens=64, temperature=0.7, top_p=0.9, num_samples=4).counts_tokens
    False
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """The number of tokens before which no stop token is drawn and no stop string ends a response."""
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 means all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together reach this probability."""
    min_p: float = 0.0
    """Draw from tokens that have at least this share of the likeliest token's probability; 0 means all."""
    repetition_penalty: float = 1.0
    """The logit of a token that is in the prompt or in the response so far is divided by this if it is positive, else
    multiplied. Keskar et al. 2019 (CTRL), arXiv:1909.05858, in Hugging Face's form."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of a token that is in the response so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that it is in the response so far."""
    logit_bias: Mapping[int, float] = FrozenDict()
    """Token -> a number added to its logit."""
    allowed_tokens: tuple[int, ...] = ()
    """The only tokens that may be drawn, those that stop among them. Empty means all."""
    banned_tokens: tuple[int, ...] = ()
    """Tokens that are never drawn."""
    num_samples: int = 1
    """Responses to each prompt, in consecutive rows from i * num_samples on."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a response. Empty means the tokenizer's end-of-text token."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response, with the token that completes one of them. The prompt is not part of what is searched.
    A run makes a `ResolvedSampling` of a `Sampling` that has some."""

    def __post_init__(self) -> None:
        for name in ("allowed_tokens", "banned_tokens", "stop_ids", "stop_strings"):  # Python code may give lists
            value = getattr(self, name)
            require(isinstance(value, tuple | list), f"sampling.{name}", "must be a list", value)
            object.__setattr__(self, name, tuple(value))
        require(isinstance(self.logit_bias, Mapping), "sampling.logit_bias", "must be a mapping", self.logit_bias)
        object.__setattr__(self, "logit_bias", FrozenDict({int(k): float(v) for k, v in self.logit_bias.items()}))
        least, most = self.min_new_tokens, self.max_new_tokens
        require_at_least_one(most, "sampling.max_new_tokens")
        require(0 <= least <= most, "sampling.min_new_tokens", f"must lie between 0 and max_new_tokens={most}", least)
        require_not_negative(self.temperature, "sampling.temperature")
        require(self.top_k >= 0, "sampling.top_k", "must be 0 (all tokens) or positive", self.top_k)
        require_positive_fraction(self.top_p, "sampling.top_p")
        require_fraction(self.min_p, "sampling.min_p")
        require_positive(self.repetition_penalty, "sampling.repetition_penalty")
        for name in ("presence_penalty", "frequency_penalty"):
            _require_within(getattr(self, name), MAX_PENALTY, f"sampling.{name}")
        require_at_least_one(self.num_samples, "sampling.num_samples")
        self._require_tokens()
        for text in self.stop_strings:
            is_text = text != "" and text.encode(errors="ignore").decode() == text  # no half of a surrogate pair
            require(is_text, "sampling.stop_strings", "must be texts, not empty ones", text)

    def _require_tokens(self) -> None:
        """Checks that what is said of tokens does not contradict itself."""
        for token, bias in self.logit_bias.items():
            remedy = "A token that must not be drawn belongs into banned_tokens."
            _require_within(bias, MAX_BIAS, f"sampling.logit_bias.{token}", remedy)
        allowed, banned, biased = set(self.allowed_tokens), set(self.banned_tokens), set(self.logit_bias)
        both, lost = allowed & banned, biased & banned | (biased - allowed if allowed else set())
        rule = "must not be of tokens that are in allowed_tokens too"
        require(not both, "sampling.banned_tokens", rule, min(both, default=None), "Leave them out of one of the two.")
        rule, remedy = "must be of tokens that may be drawn", "Leave it out, or change allowed_tokens or banned_tokens."
        require(not lost, "sampling.logit_bias", rule, min(lost, default=None), remedy)

    @property
    def counts_tokens(self) -> bool:
        """True if a penalty makes a draw depend on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclasses.dataclass(frozen=True)
class StopTable:
    """An automaton that reads the tokens of a response and finds stop strings in their bytes.

    Letters: N states, of which 0 is the first, C classes of tokens that lead from each state to the same one, V tokens
    of the tokenizer's vocabulary.

    Of plain data, since it is part of what a program is found by.
    """

    strings: tuple[str, ...]
    num_states: int
    classes: bytes = dataclasses.field(repr=False)
    """int32 [V + 1]: the class of each token, and of tokens beyond the vocabulary."""
    steps: bytes = dataclasses.field(repr=False)
    """int16 [N, C]: the next state, or -1 less it if the token completes a stop string."""

    @property
    def class_of_token(self) -> Int[np.ndarray, "V+1"]:
        return np.frombuffer(self.classes, np.int32)

    @property
    def step_of_class(self) -> Int[np.ndarray, "N C"]:
        return np.frombuffer(self.steps, np.int16).reshape(self.num_states, -1)


@dataclasses.dataclass(frozen=True)
class ResolvedSampling(Sampling):
    """A `Sampling` with its stop strings as a tokenizer writes them."""

    stop_table: StopTable | None = None


def _require_within(value: float, most: float, where: str, remedy: str = "") -> None:
    require(abs(value) <= most, where, f"must lie in [-{most:g}, {most:g}]", value, remedy)
