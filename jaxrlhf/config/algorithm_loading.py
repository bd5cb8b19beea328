"""The algorithm of a config: a built-in one or a user's own step function; and configs over a base of another one."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.algorithms.algorithm import Algorithm, NoSettings
from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.config.reading import ConfigError, Tree, known_part
from jaxrlhf.importing import find_function
from jaxrlhf.require import errors_as

STEP = "(roles, state, data, config) -> (results, state)"


def load_algorithm(name: str) -> Algorithm:
    """The algorithm that a config names.

    `name` is a built-in one, `module:name` or `path/to/file.py:name`. A user's own is an `Algorithm` or a plain step
    function, which gets prompts, starts with the state `()`, and annotates its `config` with the frozen dataclass of
    its settings.

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
    with errors_as(ConfigError):
        found = find_function(name, what="Algorithm")
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
                "`lambda config: ...`."
            )
    return algorithm


def for_another_algorithm(below: Tree, above: Tree, where: str, *, notes: list[str]) -> Tree:
    """A config, the tree `below` from `where`, without the settings, and the placements of roles, that the algorithm
    chosen in the tree `above` it does not have. Notes about these are appended to `notes`.
    """
    before, name = below.get("algorithm", "ppo"), above.get("algorithm")
    if name in (None, before):
        return below
    try:
        old, new = load_algorithm(before), load_algorithm(name)
    except (ConfigError, TypeError):  # raised again when the run is built
        return below
    settings, plan = below.get("settings"), below.get("plan")
    if isinstance(settings, dict) and isinstance(above.get("settings", {}), dict):
        known, unknown = known_part(new.config, settings)
        below = {**below, "settings": known}
        if unknown:
            notes.append(
                f"{where}: settings of {before} that {name} does not have are left out: {', '.join(unknown)}. Those "
                f"that it has apply to it: {', '.join(known) or 'none'}."
            )
    gone = set(old.roles) - set(new.roles)
    if isinstance(plan, dict) and isinstance(above.get("plan", {}), dict) and new.roles:
        plan, left_out = _without_calls_of(gone, plan)
        below = {**below, "plan": plan}
        if left_out:
            notes.append(
                f"{where}: what its plan says of {', '.join(left_out)} is left out: {name} has no "
                f"{' and no '.join(sorted(gone))}."
            )
    return below


def _without_calls_of(roles: set[str], plan: Tree) -> tuple[Tree, list[str]]:
    """The section `plan` of a config without calls of some roles, and its keys that were removed."""

    plan, calls, fuse = dict(plan), plan.get("calls"), plan.get("fuse")
    left_out: list[str] = []
    if isinstance(calls, dict):
        left_out = [call for call in calls if str(call).partition(".")[0] in roles]
        plan["calls"] = {call: entry for call, entry in calls.items() if call not in left_out}
    if isinstance(fuse, list) and any(str(call).partition(".")[0] in roles for call in fuse):
        left_out.append("fuse")
        del plan["fuse"]
    return plan, left_out


def _check_step(where: str, step: Any) -> None:
    try:
        inspect.signature(step).bind(*("roles", "state", "data", "config"))
    except TypeError as error:
        raise ConfigError(
            f"{where}: a step takes four arguments, {STEP}. Got {step.__name__}{inspect.signature(step)}: {error}."
        ) from error


def _around(where: str, step: Callable[..., Any]) -> Algorithm:
    """A plain step function as an algorithm, with the settings that annotate its last argument."""
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
    return Algorithm(step, NoSettings if annotation in (inspect.Parameter.empty, Any, None) else annotation)


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
