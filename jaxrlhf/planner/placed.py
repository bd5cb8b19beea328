"""Plans of which is given where each call may run: the fastest choices there that fit together."""

from collections.abc import Sequence

from jaxrlhf.planner.peak_memory import in_gib, peak_memory
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import Choice, Problem
from jaxrlhf.planner.search import SearchResult
from jaxrlhf.planner.simulate import steady_state


def fastest_that_fits(problem: Problem, options: Sequence[Sequence[int]], strategy: str) -> tuple[int, ...]:
    """A choice for every call: of each the fastest, then leaner ones where they gain most memory for a second, until
    all fit.

    Args:
        options: Call -> the choices that it may have.
        strategy: Whose plan it is, for the error.

    Raises:
        PlanError: The leanest choices do not fit.
    """
    picks = [
        min(own, key=lambda i, c=call: _seconds(c.choices[i])) for call, own in zip(problem.calls, options, strict=True)
    ]
    while (over := lacking(problem, picks)) > 0:
        best: tuple[float, int, int] | None = None
        for position, (call, own) in enumerate(zip(problem.calls, options, strict=True)):
            now = call.choices[picks[position]]
            for i in own:
                other = call.choices[i]
                if i == picks[position] or _seconds(other) < _seconds(now):
                    continue
                tried = [*picks[:position], i, *picks[position + 1 :]]
                gained = over - max(0, lacking(problem, tried))
                if gained > 0:
                    rank = (_seconds(other) - _seconds(now)) / gained
                    if best is None or rank < best[0]:
                        best = rank, position, i
        if best is None:
            raise PlanError(
                f"{strategy}: its plan must fit the memory of the devices. Got {in_gib(over)} too much on the fullest "
                "one, with the leanest choices that were found. Use search, fewer rows, or more devices."
            )
        picks[best[1]] = best[2]
    return tuple(picks)


def lacking(problem: Problem, plan: Sequence[int]) -> int:
    """Bytes by which the fullest device is above its capacity."""
    taken = peak_memory(problem, plan)
    return max(bytes_ - room for bytes_, room in zip(taken, problem.capacity, strict=True))


def result_of(problem: Problem, plan: Sequence[int], *, evaluated: int = 1) -> SearchResult:
    """A plan with what it gives."""
    memory = peak_memory(problem, plan)
    return SearchResult(tuple(plan), steady_state(problem, plan), memory, (), (), evaluated)


def all_meshes(problem: Problem) -> list[range]:
    """All devices that any call may have."""
    return sorted({c.devices for call in problem.calls for c in call.choices}, key=lambda r: (len(r), r.start))


def _seconds(choice: Choice) -> float:
    return choice.load + choice.seconds + choice.unload
