"""Plans of which is given where each call may run: the fastest choices there that fit together."""

from collections.abc import Mapping, Sequence

from jaxrlhf.planner.peak_memory import peak_memory
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.search import search
from jaxrlhf.planner.searching.arena import SearchResult
from jaxrlhf.planner.searching.dominance import with_choices
from jaxrlhf.planner.simulate import steady_state

_STEPS, _BOUNDS = 2_000, 10_000
"""Of a search among the choices on given devices, which are few."""


def most_devices(problem: Problem, strategy: str) -> range:
    """The most devices on which every call has a choice, but those that have a single one.

    Raises:
        PlanError: There are none.
    """
    open_calls = [call for call in problem.calls if len(call.choices) > 1]
    common = set.intersection(*({c.devices for c in call.choices} for call in open_calls)) if open_calls else set()
    if open_calls and not common:
        raise PlanError(
            f"{strategy}: all calls must have a choice on the same devices. Got none. Use another strategy."
        )
    return max(common, key=lambda devices: (len(devices), -devices.start), default=range(problem.num_devices))


def options_on(problem: Problem, devices: Mapping[str, range]) -> list[list[int]]:
    """Call -> its choices on the devices of its set of weights."""
    return [
        [k for k, choice in enumerate(call.choices) if choice.devices == devices[call.weights]]
        for call in problem.calls
    ]


def fastest_that_fits(problem: Problem, options: Sequence[Sequence[int]], strategy: str) -> tuple[int, ...]:
    """The plan with the shortest iteration among some that fit, as a short search finds it.

    Args:
        options: Call -> the choices that it may have.
        strategy: Whose plan it is, for the error.

    Raises:
        PlanError: A call has no choice, or none fit.
    """
    kept = tuple(tuple(some) for some in options)
    try:
        found = search(with_choices(problem, kept), steps=_STEPS, bounds=_BOUNDS).plan
    except PlanError as error:
        raise PlanError(f"{strategy}: {str(error).removeprefix('plan: ')}") from error
    return tuple(some[k] for some, k in zip(kept, found, strict=True))


def result_of(problem: Problem, plan: Sequence[int], *, evaluated: int = 1) -> SearchResult:
    """A plan with what it gives."""
    memory = peak_memory(problem, plan)
    return SearchResult(tuple(plan), steady_state(problem, plan), memory, (), (), evaluated, proven=False)
