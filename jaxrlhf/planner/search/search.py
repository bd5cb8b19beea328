"""The search for a fast plan, among all choices of a problem or among some of them.

Some hundred thousand plans a second are looked at where numba is installed, some hundred where it is not.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrlhf.numba_loops import numba_is_there
from jaxrlhf.planner.plans.plan import PlanError
from jaxrlhf.planner.search.chains import Chains
from jaxrlhf.planner.search.problem import CallChoices, Choice, PairSeconds, Problem
from jaxrlhf.planner.search.search_result import SearchResult
from jaxrlhf.sharding.strategy import Strategy

STEPS, STEPS_IN_PYTHON = 10_000, 40
"""Plans that chains look at by default for each pair of calls, since a step may change two, times the calls beside
them, of which there are taken to be at least four."""
_STEPS_ON_GIVEN_DEVICES = 10_000


def search(
    problem: Problem,
    *,
    seed: int = 0,
    steps: int | None = None,
    seconds: float | None = None,
    compiled: bool = True,
) -> SearchResult:
    """The fastest plan that chains find, or a neighbor of theirs, among choices that are worth keeping (`pruning`).

    Args:
        seed: The same seed and steps give the same plan, unless time is up before.
        steps: Plans that chains look at, all together. None means `default_steps`. Up to half as many more are their
            neighbors.
        seconds: The search stops after this time. None means no limit.
        compiled: Use numba, if it is installed. The results for given steps are the same.

    Raises:
        PlanError: A call has no choices.
        NoRoomError: No plan was found that fits the memory of the devices.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"search: steps must be at least 1. Got {steps}.")
    compiled = compiled and numba_is_there()
    steps = default_steps(problem, compiled=compiled) if steps is None else steps
    found = Chains(problem, compiled=compiled, seconds=seconds)
    found.walk(seed=seed, steps=steps)
    found.descend(most=steps // 2)
    return found.result()


def default_steps(problem: Problem, *, compiled: bool = True) -> int:
    """The default number of plans that the chains of a search look at."""
    num_calls = len(problem.calls)
    pairs, others = math.comb(max(2, num_calls), 2), max(4, num_calls - 2)
    return pairs * others * (STEPS if compiled else STEPS_IN_PYTHON)


@functools.cache
def warm_up() -> None:
    """Compiles the loops of searches, or reads them from disk, so that this takes no time from the next search."""
    choice = Choice(0, 1, Strategy(), 1.0, resting=1, working=1, copy=1)
    calls = (
        CallChoices("actor.generate", "generate", "actor", "actor", False, (), (choice,)),
        CallChoices("actor.train", "train", "actor", "actor", True, ("actor.generate",), (choice,)),
    )
    seconds = PairSeconds.of(np.zeros((1, 1)))
    search(Problem(calls, 1, 1, (10,), {(1, 0): seconds}, {(0, 1): seconds}, tokens=1), steps=8)


def most_devices(problem: Problem, method: str) -> range:
    """The most devices on which every call with several choices has one. `method`: the method that asks, for the error.
    Raises PlanError if there are none."""
    open_calls = [call for call in problem.calls if len(call.choices) > 1]
    common = set.intersection(*({c.devices for c in call.choices} for call in open_calls)) if open_calls else set()
    if open_calls and not common:
        raise PlanError(f"{method}: all calls must have a choice on the same devices. Got none. Use another strategy.")
    return max(common, key=lambda devices: (len(devices), -devices.start), default=range(problem.num_devices))


def options_on(problem: Problem, devices: Mapping[str, range]) -> list[list[int]]:
    """Call -> its choices on the devices of its set of weights."""
    return [
        [k for k, choice in enumerate(call.choices) if choice.devices == devices[call.weights]]
        for call in problem.calls
    ]


def fastest_that_fits(problem: Problem, options: Sequence[Sequence[int]], method: str) -> tuple[int, ...]:
    """The plan with the shortest iteration that a short search finds among some choices. `options`: call -> the choices
    that it may have. `method`: the method that asks, for the error. Raises PlanError if a call has no choice, or none
    fit."""
    try:
        found = search(problem.with_choices(options), steps=_STEPS_ON_GIVEN_DEVICES).plan
    except PlanError as error:
        raise PlanError(f"{method}: {str(error).removeprefix('plan: ')}") from error
    return tuple(some[k] for some, k in zip(options, found, strict=True))
