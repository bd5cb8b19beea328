"""The result of a search for a plan."""

import dataclasses
from collections.abc import Sequence

from jaxrlhf.planner.search.peak_memory import in_gb, peak_memory
from jaxrlhf.planner.search.problem import Problem
from jaxrlhf.planner.search.simulate import Simulation, steady_state


@dataclasses.dataclass(frozen=True)
class Progress:
    """The best plan after a part of a search."""

    evaluated: int
    """Plans looked at until then."""
    seconds: float
    """Seconds of an iteration under the best plan that fits; infinite if none was found yet."""
    elapsed: float
    """Seconds of searching."""


@dataclasses.dataclass(frozen=True)
class RunnerUp:
    """A plan that lost, in which calls share devices in another way, or have other numbers of devices."""

    plan: tuple[int, ...]
    seconds: float
    lacking: int
    """Bytes by which the fullest device is above its capacity; 0 if all fits."""

    def why(self, best: float) -> str:
        """The reason why it lost against a plan of `best` seconds.

        >>> RunnerUp((0,), 5.5, 0).why(5.0)
        '10.0 % slower, by 0.5 s'
        >>> RunnerUp((0,), 4.5, 2 * 10**9).why(5.0)
        '10.0 % faster, but a device lacks 2 GB'
        """
        part = f"{abs(self.seconds / best - 1):.1%}".replace("%", " %")
        if self.lacking:
            return f"{part} faster, but a device lacks {in_gb(self.lacking)}"
        return f"{part} slower, by {self.seconds - best:.3g} s"


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The best plan found, and plans that lost."""

    plan: tuple[int, ...]
    """Call -> its choice."""
    simulation: Simulation
    memory: tuple[int, ...]
    """Memory -> bytes that it needs."""
    evaluated: int
    """Plans looked at."""
    history: tuple[Progress, ...] = ()
    """The progress whenever a better plan was found, and at the end."""
    runners_up: tuple[RunnerUp, ...] = ()
    """The best that fit, fastest first, then those that would be faster but do not fit, least lacking first."""

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.simulation.seconds


def result_of(problem: Problem, plan: Sequence[int], *, evaluated: int = 1) -> SearchResult:
    """The result for a given plan."""
    return SearchResult(tuple(plan), steady_state(problem, plan), peak_memory(problem, plan), evaluated)
