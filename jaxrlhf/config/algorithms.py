"""Which algorithm a config names: a built-in one, or a user's own step function."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.algorithms.algorithm import Algorithm, NoSettings
from jaxrlhf.brief import brief
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.importing import find_function
from jaxrlhf.suggest import did_you_mean

STEP = "(roles, state, data, config) -> (results, state)"


def load_algorithm(name: str) -> Algorithm:
    """The algorithm that a config names.

    `name` is a built-in one, `module:name` or `path/to/file.py:name`. A user's own is an `Algorithm`, or a plain step
    function: that is given prompts, its first state is `()`, and its settings are of the frozen dataclass which it
    annotates its `config` with.

    Raises:
        ConfigError: There is no such algorithm, its module does not import, or it is something else.
    """
    if ":" not in name:
        if name not in ALGORITHMS:
            raise ConfigError(
                f"algorithm: must be one of {', '.join(ALGORITHMS)}, module:step or path/to/file.py:step. Got "
                f"{brief(name)}.{did_you_mean(name, ALGORITHMS)}"
            )
        return ALGORITHMS[name]
    where = f"Algorithm {brief(name)}"
    try:
        found = find_function(name, what="Algorithm")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if isinstance(found, type) or not (isinstance(found, Algorithm) or callable(found)):
        raise ConfigError(f"{where}: must be a step function, {STEP}, or an Algorithm. Got {brief(found)}.")
    algorithm = found if isinstance(found, Algorithm) else _around(where, found)
    _check_step(where, algorithm.step)
    _check_settings(where, algorithm.config)
    if isinstance(algorithm.roles, str) or not all(isinstance(role, str) for role in algorithm.roles):
        raise ConfigError(f"{where}: roles must be a tuple of names, ('actor',). Got {brief(algorithm.roles)}.")
    for field in ("init_state", "data"):
        if not callable(getattr(algorithm, field)):
            raise ConfigError(
                f"{where}: {field} must be a function of the settings. Got {brief(getattr(algorithm, field))}. Write "
                f"`lambda config: ...`."
            )
    return algorithm


def _check_step(where: str, step: Any) -> None:
    try:
        inspect.signature(step).bind(*("roles", "state", "data", "config"))
    except TypeError as error:
        raise ConfigError(
            f"{where}: a step takes four arguments, {STEP}. Got {step.__name__}{inspect.signature(step)}: {error}."
        ) from error


def _around(where: str, step: Callable[..., Any]) -> Algorithm:
    """A plain step function as an algorithm."""
    return Algorithm(step, _settings_of(where, step))


def _settings_of(where: str, step: Callable[..., Any]) -> type[Any]:
    """The annotation of a step's last argument."""
    parameters = list(inspect.signature(step).parameters.values())
    annotation = parameters[3].annotation if len(parameters) > 3 else inspect.Parameter.empty
    if isinstance(annotation, str):  # from __future__ import annotations
        try:
            annotation = eval(annotation, getattr(step, "__globals__", {}))
        except Exception as error:
            raise ConfigError(
                f"{where}: the annotation of its settings must be there when it is loaded. Got {annotation!r}: {error}."
                " Import it outside of `if TYPE_CHECKING`."
            ) from error
    return NoSettings if annotation in (inspect.Parameter.empty, Any, None) else annotation


def _check_settings(where: str, settings: Any) -> None:
    if not isinstance(settings, type) or not dataclasses.is_dataclass(settings):
        raise ConfigError(
            f"{where}: its settings must be a frozen dataclass, which it annotates its last argument with. Got "
            f"{brief(settings)}. Write @dataclasses.dataclass(frozen=True) over the class."
        )
    if not settings.__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            f"{where}: its settings must be hashable, since they are part of the compiled programs. Got the dataclass "
            f"{settings.__name__}, which is not frozen. Write @dataclasses.dataclass(frozen=True)."
        )
