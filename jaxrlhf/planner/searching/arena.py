"""What searches for a plan work on, and what they find."""

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence

from jaxrlhf.planner.numba_loops import loops
from jaxrlhf.planner.peak_memory import in_gb, memory_at_peak, peak_memory, remedy, room_in_words
from jaxrlhf.planner.plan import NoRoomError, PlanError
from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.searching import search_rounds
from jaxrlhf.planner.searching.dominance import with_choices, worth_keeping
from jaxrlhf.planner.searching.flat_problem import Integers, as_integers, flat_problem, groups_of
from jaxrlhf.planner.searching.lean_plans import require_choices
from jaxrlhf.planner.searching.search_rounds import NEVER, Rivals, Work, sizes_of_work
from jaxrlhf.planner.simulate import NANOSECONDS, Simulation, steady_state

_RIVALS = 16
_RUNNERS_UP = 5


@dataclasses.dataclass(frozen=True)
class Progress:
    """The best plan after a part of a search."""

    evaluated: int
    """Plans looked at until then."""
    seconds: float
    """Of an iteration under the best one that fits; infinite if none was found yet."""
    elapsed: float
    """Seconds of searching."""


@dataclasses.dataclass(frozen=True)
class RunnerUp:
    """A plan that lost, and that is not the same but for which devices are which: calls share devices in another way,
    or have others in number."""

    plan: tuple[int, ...]
    seconds: float
    lacking: int
    """Bytes by which the fullest device is above its capacity; 0 if all fits."""

    def why(self, best: float) -> str:
        """Why it lost against a plan of so many seconds.

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
    """The best plan found, and what lost against it."""

    plan: tuple[int, ...]
    """Call -> its choice."""
    simulation: Simulation
    memory: tuple[int, ...]
    """Memory -> bytes that it needs."""
    history: tuple[Progress, ...]
    """Each time that a better plan was found, and the end."""
    runners_up: tuple[RunnerUp, ...]
    """The best that fit, fastest first, and then those that would be faster but do not fit, nearest first."""
    evaluated: int
    """Plans looked at."""
    proven: bool
    """Whether no other plan is faster, of the problem's choices, but for what `dominance` may lose."""

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return self.simulation.seconds


class Arena:
    """A problem, made ready for the loops, and what they have found so far."""

    def __init__(self, problem: Problem, *, exact: bool, compiled: bool, seconds: float | None = None) -> None:
        """Takes part: what `dominance` keeps. Where a call would have nothing left, all takes part, so that it can be
        said what is lacking.

        Args:
            exact: See `dominance`.
            seconds: Of the whole search. None: no limit.

        Raises:
            PlanError: A call has no choices.
        """
        self._begun = time.monotonic()
        self._seconds = math.inf if seconds is None else seconds
        require_choices(problem)
        kept = worth_keeping(problem, exact=exact)
        if not all(kept):
            kept = tuple(tuple(range(len(call.choices))) for call in problem.calls)
        part, size = with_choices(problem, kept), len(problem.calls)
        self.problem, self.kept, self.compiled = problem, kept, compiled
        self.flat = flat_problem(part, compiled=compiled, fits=not exact and problem.devices_per_memory == 1)
        self.groups = groups_of(part, self.flat, compiled=compiled)
        self.loops = loops(search_rounds, compiled=compiled)
        self.work = Work(*(self.room(n) for n in sizes_of_work(size, len(self.flat.before))))
        self.fitting, self.lacking = self._no_rivals(), self._no_rivals()
        self.history: list[Progress] = []
        self.evaluated = 0

    def room(self, size: int, value: int = 0) -> Integers:
        """A sequence for loops to write to."""
        return as_integers([value] * size, compiled=self.compiled)

    def _no_rivals(self) -> Rivals:
        plans = self.room(_RIVALS * len(self.problem.calls))
        return Rivals(self.room(_RIVALS, -1), self.room(_RIVALS, NEVER), self.room(_RIVALS), self.room(_RIVALS), plans)

    @property
    def best(self) -> int:
        """Nanoseconds of an iteration under the best plan that fits; `NEVER` if there is none yet."""
        return min(map(int, self.fitting.rank))

    def time_is_up(self, part: float = 1.0) -> bool:
        """Whether a part of the time of the whole search is over."""
        return time.monotonic() - self._begun >= part * self._seconds

    def looked_at(self, plans: int) -> None:
        """Notes how far the search is, after loops have looked at so many more plans."""
        self.evaluated += plans
        seconds = self.best / NANOSECONDS if self.best < NEVER else math.inf
        if not self.history or seconds < self.history[-1].seconds:
            self.history.append(Progress(self.evaluated, seconds, time.monotonic() - self._begun))

    def judge(self, numbers: Sequence[int]) -> None:
        """Looks at a plan, in numbers of `flat`, and notes it if it is among the best."""
        plan = as_integers(numbers, compiled=self.compiled)
        self.loops["judge"](self.flat, plan, self.work, 0.0, self.fitting, self.lacking)
        self.looked_at(1)

    def found(self, rivals: Rivals) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """(rank, nanoseconds, bytes lacking, plan in numbers of `flat`), lowest first."""
        size = len(self.problem.calls)
        return sorted(
            (
                int(rank),
                int(rivals.nanoseconds[k]),
                int(rivals.lacking[k]),
                tuple(int(number) for number in rivals.plans[k * size : (k + 1) * size]),
            )
            for k, rank in enumerate(rivals.rank)
            if rank < NEVER
        )

    def numbers(self, plan: Iterable[int]) -> list[int]:
        """A plan of choices that take part in numbers of `flat`."""
        return [int(self.flat.begin[c]) + self.kept[c].index(k) for c, k in enumerate(plan)]

    def plan(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """The other way around: call -> its choice in the whole problem."""
        return tuple(self.kept[c][number - int(self.flat.begin[c])] for c, number in enumerate(numbers))

    def result(self, *, proven: bool) -> SearchResult:
        """What was found.

        Raises:
            PlanError: Nothing that fits.
        """
        fitting, lacking = self.found(self.fitting), self.found(self.lacking)
        if not fitting:
            raise self._nothing_fits(self.plan(lacking[0][3]), proven=proven)
        best, *others = fitting
        losers = [*others[:_RUNNERS_UP], *[each for each in lacking if each[1] < best[1]][:_RUNNERS_UP]]
        plan, end = self.plan(best[3]), Progress(self.evaluated, best[1] / NANOSECONDS, time.monotonic() - self._begun)
        return SearchResult(
            plan,
            steady_state(self.problem, plan),
            peak_memory(self.problem, plan),
            (*self.history, end),
            tuple(RunnerUp(self.plan(each[3]), each[1] / NANOSECONDS, max(0, each[2])) for each in losers),
            self.evaluated,
            proven,
        )

    def _nothing_fits(self, leanest: Sequence[int], *, proven: bool) -> PlanError:
        """The error where devices have too little memory, by the plan that lacks least."""
        each_memory = zip(memory_at_peak(self.problem, leanest), self.problem.capacity, strict=True)
        full, room = max(each_memory, key=lambda pair: pair[0].total - pair[1])
        least = "No plan needs less" if proven else "No plan was found that needs less"
        return NoRoomError(
            f"plan: must fit into {room_in_words(room, self.problem.devices_per_memory)}. Got {full}, "
            f"{in_gb(full.total - room)} too much. {least}. {remedy(self.problem.devices_per_memory)}"
        )
