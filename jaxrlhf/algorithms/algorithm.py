"""What an algorithm is: a step function, the type of its settings, its first state, the roles that it plays with."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An entry of `ALGORITHMS`."""

    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    """`(roles, state, data, config) -> (results, state)`, written for `jaxrlhf.tracing.trace`."""
    config: type[Any]
    """The frozen dataclass of its settings."""
    init_state: Callable[[Any], Any]
    """`config -> state`: what the first step is given, and every later one hands on."""
    roles: tuple[str, ...]
    """Roles that a run must have."""
    data: Literal["prompts", "demonstrations"] = "prompts"
    """What a step is given: prompts, or prompts with the rows' completions (its settings then say `max_new_tokens`)."""
