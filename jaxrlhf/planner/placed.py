"""Plans of which is given where each call may run: the fastest choices there that fit together."""

from collections.abc import Mapping, Sequence

from jaxrlhf.planner.peak_memory import peak_memory
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.search import search
from jaxrlhf.planner.searching.arena import SearchResult
from jaxrlhf.planner.searching.dominance import with_choices
from jaxrlhf.planner.simulate import steady_state

_STEPS, _BOUNDS = 1_000, 5_000
"""Of a search among the choices on given devices, which are few."""


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
