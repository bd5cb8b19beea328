"""Reward functions by name, built in or a user's own, and checked calls of them.

Letters: B completions.
"""

import asyncio
import concurrent.futures
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.importing import failure, find_function
from jaxrlhf.rewards.built_in import VERIFIERS
from jaxrlhf.rewards.verifiers import RewardFunction
from jaxrlhf.rewards.workers import RewardError, Workers, in_thread

ROW_ARGUMENTS = ("prompts", "completions")
"""Arguments of every reward function; all others are columns or options."""


def load_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """The reward function that a config names, with its options bound.

    `name` is a built-in one, `module:function` or `path/to/file.py:function`. A user's function is
    `f(prompts, completions, **columns) -> list[float]`, with options as further arguments. Raises ValueError if there
    is no such function, its module does not import, or it does not take the options.
    """
    if ":" not in name:
        if name not in VERIFIERS:
            raise ValueError(
                f"Reward: must be built in, module:function or path/to/file.py:function. Got {brief(name)}. Built in: "
                f"{', '.join(VERIFIERS)}.{did_you_mean(name, VERIFIERS)}"
            )
        signature = inspect.signature(VERIFIERS[name])
        _check_options(name, signature, options, all_required=True)
        _check_types(name, signature, options)
        return VERIFIERS[name](**options)
    function: Callable[..., Any] = find_function(name, what="Reward")
    if not callable(function):
        raise ValueError(
            f"Reward {brief(name)}: must name a function. Got {type(function).__name__} {brief(function)}."
        )
    _check_options(name, inspect.signature(function), options, all_required=False)
    return functools.partial(function, **options) if options else function


def check_reward(function: RewardFunction, columns: Iterable[str], *, name: str) -> None:
    """Checks that the required arguments of a function are bound or columns of the data (`finished` is one too)."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(
            f"Reward {brief(name)}: must return a list of scores. Got a function that yields them. Collect them in a "
            "list and return that."
        )
    columns = list(columns)
    parameters = inspect.signature(function).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    variadic = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    if not (_by_keyword(function) or variadic or sum(p.kind in positional for p in parameters.values()) >= 2):
        raise ValueError(
            f"Reward {brief(name)}: must take prompts and completions, or completions by that name. Got "
            f"({', '.join(parameters)})."
        )
    given = {*columns, *(ROW_ARGUMENTS if _by_keyword(function) else list(parameters)[:2])}
    for key, parameter in parameters.items():
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )
        if needed and key not in given:
            raise ValueError(
                f"Reward {brief(name)}: its arguments must be columns of the data or options. Got {brief(key)}. "
                f"Columns: {', '.join(columns) or 'none'}.{did_you_mean(key, columns)}"
            )


def call_reward(
    function: RewardFunction,
    prompts: list[str],
    completions: list[str],
    columns: Mapping[str, list[Any]],
    *,
    name: str,
    timeout_seconds: float = 0.0,
    workers: Workers | None = None,
    late: list[int] | None = None,
) -> np.ndarray:
    """The rewards of completions, [B] in float32, all finite, by a function that gets the columns that it takes.

    A function with an argument `completions` is called by keywords and need not take `prompts`; any other one gets
    prompts and completions as its first two arguments. It may be an `async def`, or return a list of awaitables, which
    are then awaited concurrently, in an event loop of their own.

    Args:
        timeout_seconds: Limit of the whole call. 0 means none.
        workers: They call the function for one completion at a time, with lists of one. None means one call for all.
        late: Gets the indexes of the completions that took too long and have the `timeout_score` of the workers.

    Raises:
        ValueError: The function needs an argument that is no column.
        RewardError: It raised, took too long, or did not return a finite number for each completion.
    """
    late = [] if late is None else late
    returned = _returned(function, prompts, completions, columns, name, timeout_seconds, workers, late)
    rewards_B = np.zeros(len(completions), np.float32)
    for index, reward in enumerate(returned):
        value = _finite(reward)
        if value is None:
            raise RewardError(
                f"Reward {brief(name)}: must return finite numbers. Got {brief(reward)} at index {index} for prompt "
                f"{brief(prompts[index])}, completion {brief(completions[index])}."
            )
        rewards_B[index] = value
    return rewards_B


def call_token_reward(
    function: RewardFunction,
    prompts: list[str],
    completions: list[str],
    columns: Mapping[str, list[Any]],
    *,
    name: str,
    timeout_seconds: float = 0.0,
    workers: Workers | None = None,
    late: list[int] | None = None,
) -> list[np.ndarray]:
    """`call_reward` for a function that returns a list for each completion, with a number for each of its tokens, as
    many as the column `num_tokens` says. A `timeout_score` is that of the last token, and the others get 0."""
    late = [] if late is None else late
    returned = _returned(function, prompts, completions, columns, name, timeout_seconds, workers, late)
    for index in late:
        num_tokens = columns["num_tokens"][index]
        returned[index] = [0.0] * (num_tokens - 1) + [returned[index]] * min(1, num_tokens)
    rewards = []
    for index, (each, count) in enumerate(zip(returned, columns["num_tokens"], strict=True)):
        is_list = (isinstance(each, Sequence) and not isinstance(each, str | bytes)) or np.ndim(each) == 1
        values = [_finite(reward) for reward in each] if is_list else []
        if not is_list or len(values) != count or None in values:
            raise RewardError(
                f"Reward {brief(name)}: must return, for each completion, a list of as many finite numbers as it has "
                f"tokens. Got {brief(each)} at index {index}, of {count} tokens, for prompt {brief(prompts[index])}, "
                f"completion {brief(completions[index])}."
            )
        rewards.append(np.asarray(values, np.float32))
    return rewards


def _returned(
    function: RewardFunction,
    prompts: list[str],
    completions: list[str],
    columns: Mapping[str, list[Any]],
    name: str,
    timeout_seconds: float,
    workers: Workers | None,
    late: list[int],
) -> list[Any]:
    """What a function returns for each completion."""
    check_reward(function, columns, name=name)
    arguments, keywords = _arguments(function, prompts, completions, columns)

    if workers is None:
        return _call(function, arguments, keywords, len(completions), name=name, timeout_seconds=timeout_seconds)

    def sample(index: int) -> str:
        prompt, completion = brief(prompts[index]), brief(completions[index])
        return f" for the sample at index {index}, prompt {prompt}, completion {completion}"

    def score(index: int) -> Any:
        one = slice(index, index + 1)
        of_one = [x[one] for x in arguments], {key: x[one] for key, x in keywords.items()}
        return _call(function, *of_one, 1, name=name, sample=sample(index))[0]

    return workers.run(score, len(completions), describe=sample, timeout_seconds=timeout_seconds, late=late)


def _call(
    function: RewardFunction,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    count: int,
    *,
    name: str,
    timeout_seconds: float = 0.0,
    sample: str = "",
) -> list[Any]:
    """The return value of a function, with `count` entries. `sample`: the end of error messages about what it did."""
    is_late = False
    rewards: Any = None
    try:
        if timeout_seconds:  # in a thread, which Python cannot end: a function that hangs ends with the process
            outcome = in_thread(lambda: _awaited(function(*arguments, **keywords)))
            is_late = not concurrent.futures.wait([outcome], timeout=timeout_seconds).done
            rewards = None if is_late else outcome.result()
        else:
            rewards = _awaited(function(*arguments, **keywords))
    except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        raise RewardError(f"Reward {brief(name)}: must not raise. Got {failure(error, function)}{sample}.") from error
    if is_late:
        raise RewardError(
            f"Reward {brief(name)}: must return within {timeout_seconds:g} seconds for {count} completions. "
            f"Got nothing by then. Raise roles.{name}.timeout_seconds, or set it to 0 to wait for ever."
        )
    is_list = isinstance(rewards, Sequence) and not isinstance(rewards, str | bytes)
    is_array = hasattr(rewards, "__array__") and np.ndim(rewards) > 0
    if not is_list and not is_array:
        raise RewardError(f"Reward {brief(name)}: must return a list of {count} numbers. Got {brief(rewards)}{sample}.")
    if len(rewards) != count:
        raise RewardError(
            f"Reward {brief(name)}: must return one number for each of {count} completions. Got {len(rewards)}{sample}."
        )
    return list(np.asarray(rewards) if is_array else rewards)


def _awaited(returned: Any) -> Any:
    """The return value of a function, awaited if necessary."""

    async def wait() -> Any:
        rewards = await returned if inspect.isawaitable(returned) else returned
        return await asyncio.gather(*rewards) if _is_to_be_awaited(rewards) else rewards

    if not inspect.isawaitable(returned) and not _is_to_be_awaited(returned):
        return returned
    return in_thread(lambda: asyncio.run(wait())).result()  # this thread may have a loop that runs, as in notebooks


def _is_to_be_awaited(rewards: Any) -> bool:
    return isinstance(rewards, list | tuple) and any(map(inspect.isawaitable, rewards))


def _arguments(
    function: RewardFunction, prompts: list[str], completions: list[str], columns: Mapping[str, list[Any]]
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of a call."""
    parameters = inspect.signature(function).parameters
    by_keyword = _by_keyword(function)
    available = {**columns, "prompts": prompts, "completions": completions} if by_keyword else columns
    withheld = set(function.keywords if isinstance(function, functools.partial) else ())  # options override columns
    if not by_keyword:
        withheld.update(list(parameters)[:2])
    keywords = {
        key: value
        for key, value in available.items()
        if (key in parameters or _takes_any(parameters.values())) and key not in withheld
    }
    return [] if by_keyword else [prompts, completions], keywords


def _by_keyword(function: RewardFunction) -> bool:
    return "completions" in inspect.signature(function).parameters


def _check_options(name: str, signature: inspect.Signature, options: Mapping[str, Any], *, all_required: bool) -> None:
    """Checks that a function takes these options, and, if `all_required`, that none is missing."""
    parameters = {key: parameter for key, parameter in signature.parameters.items() if key not in ROW_ARGUMENTS}
    known = [
        key
        for key, parameter in parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    for option in options:
        if option in ROW_ARGUMENTS or (option not in known and not _takes_any(parameters.values())):
            raise ValueError(
                f"Reward {brief(name)}: options must be arguments of it. Got {brief(option)}. Known: "
                f"{', '.join(known) or 'none'}.{did_you_mean(option, known)}"
            )
    for key in known:
        if all_required and key not in options and parameters[key].default is inspect.Parameter.empty:
            raise ValueError(
                f"Reward {brief(name)}: needs the option {brief(key)}. Got {', '.join(options) or 'none'}."
            )


def _check_types(name: str, signature: inspect.Signature, options: Mapping[str, Any]) -> None:
    """Checks the types of the options of a built-in reward."""
    for option, value in options.items():
        expected = signature.parameters[option].annotation
        fits = isinstance(value, (int, float) if expected is float else expected)
        if not fits or (isinstance(value, bool) and expected is not bool):
            raise ValueError(f"Reward {brief(name)}: {option} must be of type {expected.__name__}. Got {brief(value)}.")


def _takes_any(parameters: Iterable[inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _finite(reward: Any) -> np.float32 | None:
    """`reward` in float32; None if it is not a finite number."""
    try:
        if isinstance(reward, str | bytes) or np.ndim(reward) != 0:
            return None
        with np.errstate(over="ignore"):
            value = np.float32(float(reward))
    except (TypeError, ValueError, OverflowError):
        return None
    return value if np.isfinite(value) else None
