"""Algorithms as data: a step function with its settings, initial state, roles and rows.
Evaluation by sampling is a step of the same kind that trains nothing."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_args

from jaxrlhf.experience import Prompts, RowKind, Sampling
from jaxrlhf.require import require


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that a step takes, all of one kind.

    >>> Rows("demonstrations", max_new_tokens=64, count=16, dataset="pretraining").count
    16
    """

    kind: RowKind = "prompts"
    """`prompts`: `Prompts`. `demonstrations`: `Sequences`, prompts with the rows' completions. `preferences`:
    `Preferences`, prompts with two completions each, of which the first was preferred."""
    max_new_tokens: int = 0
    """Columns of a completion, 0 for prompts."""
    count: int = 0
    """Rows in a step. 0 means the run's `batch_size`."""
    dataset: str = ""
    """The name of a table under the run's `datasets`. If there is none, the run's `data`, as always for prompts."""

    def __post_init__(self) -> None:
        known = get_args(RowKind)
        require(self.kind in known, "Rows.kind", f"must be one of {', '.join(known)}", self.kind)
        if self.kind == "prompts":
            require(self.max_new_tokens == 0, "Rows.max_new_tokens", "prompts have no completion", self.max_new_tokens)
        else:
            require(self.max_new_tokens >= 1, "Rows.max_new_tokens", "must be at least 1", self.max_new_tokens)
        rule = "prompts come from the run's `data`, as rewards read its columns"
        require(self.kind != "prompts" or not self.dataset, "Rows.dataset", rule, self.dataset)
        require(self.count >= 0, "Rows.count", "must not be negative", self.count)


def no_state(config: Any) -> tuple[()]:
    """The initial state of an algorithm that carries nothing from step to step."""
    return ()


def prompts(config: Any) -> Rows:
    """A batch of prompts.

    >>> prompts(NoSettings()).kind
    'prompts'
    """
    return Rows("prompts")


def demonstrations(config: Any) -> Rows:
    """A batch of prompts with their completions, of the settings' `max_new_tokens`.

    >>> demonstrations(Sampling(max_new_tokens=64)).max_new_tokens
    64
    """
    return Rows("demonstrations", config.max_new_tokens)


def preferences(config: Any) -> Rows:
    """A batch of pairs of completions, of the settings' `max_new_tokens`.

    >>> preferences(Sampling(max_new_tokens=64)).kind
    'preferences'
    """
    return Rows("preferences", config.max_new_tokens)


@dataclasses.dataclass(frozen=True)
class NoSettings:
    """The settings of an algorithm that has none."""


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An entry of `ALGORITHMS`, or what `algorithm: module:name` names.

    >>> Algorithm(evaluation_step, EvaluationConfig, roles=("actor", "reward")).data(EvaluationConfig()).kind
    'prompts'
    """

    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    """`(roles, state, data, config) -> (results, state)`, written for `jaxrlhf.tracing.trace`."""
    config: type[Any] = NoSettings
    """The frozen dataclass of its settings."""
    init_state: Callable[[Any], Any] = no_state
    """`config -> state`: the initial state. Each step takes a state and returns the next one."""
    roles: tuple[str, ...] = ()
    """Roles that a run must have. Any others that the step calls are required when it is traced."""
    data: Callable[[Any], Rows | Mapping[str, Rows]] = prompts
    """`config -> Rows`: the data of a step. For a mapping, the step takes a dict with a batch under each name."""
    evaluation: Callable[[Any, Any, Any, Any], tuple[dict[str, Any], Any]] | None = None
    """`(roles, state, data, config) -> (metrics, state)`, run on held-out rows of the same kinds; the metrics are
    means over these rows. It trains nothing. None means that the run's evaluation only samples and scores."""


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Settings of evaluation by sampling: responses, greedy by default, and their scores."""

    sampling: Sampling = Sampling(temperature=0.0)
    scorers: tuple[str, ...] = ("reward",)
    """Roles whose `scores` are called."""

    def __post_init__(self) -> None:
        each_once = len(set(self.scorers)) == len(self.scorers)
        require(each_once, "evaluation.scorers", "must name each role once", self.scorers)


def evaluation_step(roles: Any, state: Any, prompts: Prompts, config: EvaluationConfig) -> tuple[dict[str, Any], Any]:
    """Responses to the prompts, and each scorer's scores of them."""
    rollout = roles.actor.generate(prompts, config.sampling)
    scores = {name: getattr(roles, name).scores(rollout) for name in config.scorers}
    return {"rollout": rollout, "scores": scores}, state
