"""The search for a fast plan: Metropolis-Hastings over the choices of single calls and of pairs.

It looks at some hundred thousand plans a second where numba is installed. `exhaustive` shows how good what it finds is.

Reference:
    Mei et al. 2024 (ReaL), arXiv:2406.14088, 5.2.
"""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrlhf.planner import search_rounds
from jaxrlhf.planner.dominance import with_choices, worth_keeping
from jaxrlhf.planner.flat_problem import FlatProblem, Groups, Integers, as_integers, flat_problem, groups_of
from jaxrlhf.planner.lean_plans import fast_to_lean, require_choices
from jaxrlhf.planner.numba_loops import loops, numba_is_there
from jaxrlhf.planner.peak_memory import in_gib, memory_at_peak, peak_memory
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.search_rounds import BUCKETS, NEVER, PER_UNIT, Rivals, Work, sizes_of_work
from jaxrlhf.planner.simulate import NANOSECONDS, Simulation, steady_state

STEPS = 1_000_000
STEPS_IN_PYTHON = 4_000
"""Plans that are looked at where nobody says how many."""
_ROUND = 2_000
"""Steps in which a chain cools down once."""
_COST = 1.5
"""A plan that does not fit costs as much as one that takes so many times as long ..."""
_COST_OF_LACK = 5.0
"""... and so many times more if it lacks the memory of a whole device."""
_WAYS = (
    ("on", 0.3, 0.003, 1.5, 5.0),
    ("afresh", 0.2, 0.003, 1.5, 5.0),
    ("best", 0.05, 0.002, 1.5, 5.0),
    ("rival", 0.02, 0.001, 1.5, 5.0),
)
"""How chains begin a round, and their first and last temperature, in parts of the shortest iteration: where they are,
at a random plan, at the best one, at one of the best of another shape."""
_TEMPERATURES = 32
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
    """A plan that lost: calls share devices in another way, or have others in number."""

    plan: tuple[int, ...]
    seconds: float
    lacking: int
    """Bytes by which the fullest device is above its capacity; 0 if all fits."""

    def why(self, best: float) -> str:
        """Why it lost against a plan of so many seconds.

        >>> RunnerUp((0,), 5.5, 0).why(5.0)
        '10.0 % slower, by 0.5 s'
        >>> RunnerUp((0,), 4.5, 2**31).why(5.0)
        '10.0 % faster, but a device lacks 2 GiB'
        """
        part = f"{abs(self.seconds / best - 1):.1%}".replace("%", " %")
        if self.lacking:
            return f"{part} faster, but a device lacks {in_gib(self.lacking)}"
        return f"{part} slower, by {self.seconds - best:.3g} s"


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The best plan found, and what lost against it."""

    plan: tuple[int, ...]
    """Call -> its choice."""
    simulation: Simulation
    memory: tuple[int, ...]
    """Device -> bytes that it needs."""
    history: tuple[Progress, ...]
    runners_up: tuple[RunnerUp, ...]
    """The best that fit, fastest first, and then those that would be faster but do not fit, nearest first."""
    evaluated: int
    """Plans looked at."""
    proven: bool = False
    """Whether no other plan is faster."""

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return self.simulation.seconds


def search(
    problem: Problem,
    *,
    seed: int = 0,
    steps: int | None = None,
    seconds: float | None = None,
    chains: int = len(_WAYS),
    compiled: bool = True,
) -> SearchResult:
    """The fastest plan that several chains find.

    They start from the fastest choice of each call, and from the fastest such plan that fits. Then each walks by
    Metropolis-Hastings, at temperatures that fall from round to round: a call or two get other choices, at random or
    where another call is, or the two halves of a block of devices. A plan that does not fit costs more the more it
    lacks, so that a chain finds its way out. Choices that `dominance` finds no use for are left out.

    Args:
        seed: Of the chains. The same seed and steps give the same plan, if the time suffices.
        steps: Plans to look at, of all chains together. None: `STEPS`, or `STEPS_IN_PYTHON` without numba.
        seconds: To stop after. None: no limit.
        chains: They begin their rounds in different ways, in turn.
        compiled: Whether numba is used, if it is installed. It changes nothing but the time.

    Raises:
        PlanError: No plan fits the memory of the devices, or none that was found.
    """
    for name, number in (("steps", steps), ("chains", chains)):
        if number is not None and number < 1:
            raise ValueError(f"search: {name} must be at least 1. Got {number}.")
    begun = time.monotonic()
    compiled = compiled and numba_is_there()
    steps = steps if steps is not None else STEPS if compiled else STEPS_IN_PYTHON
    arena = Arena.of(problem, exact=False, compiled=compiled)
    deadline = math.inf if seconds is None else begun + seconds
    history = walk(arena, seed=seed, steps=steps, chains=chains, begun=begun, deadline=deadline)
    return arena.result(history, history[-1].evaluated)


@dataclasses.dataclass(frozen=True)
class Arena:
    """What a search works on and what it has found."""

    problem: Problem
    kept: tuple[tuple[int, ...], ...]
    """Call -> its choices that take part."""
    flat: FlatProblem
    """Of those, as are all that follow."""
    groups: Groups
    loops: Mapping[str, Callable[..., Any]]
    work: Work
    fitting: Rivals
    lacking: Rivals
    compiled: bool

    @classmethod
    def of(cls, problem: Problem, *, exact: bool, compiled: bool) -> "Arena":
        """For the choices of a problem that are worth keeping. For all of them where a call would have none, so that it
        can be said what is lacking.

        Raises:
            PlanError: A call has no choices.
        """
        require_choices(problem)
        kept = worth_keeping(problem, exact=exact)
        if not all(kept):
            kept = tuple(tuple(range(len(call.choices))) for call in problem.calls)
        part = with_choices(problem, kept)
        flat = flat_problem(part, compiled=compiled)
        num_calls = len(problem.calls)
        room = [as_integers([0] * size, compiled=compiled) for size in sizes_of_work(num_calls, len(flat.before))]
        functions = loops(search_rounds, compiled=compiled)
        groups = groups_of(part, compiled=compiled)
        fitting, lacking = (_no_rivals(num_calls, compiled=compiled) for _ in range(2))
        return cls(problem, kept, flat, groups, functions, Work(*room), fitting, lacking, compiled)

    @property
    def best(self) -> int:
        """Nanoseconds of an iteration under the best plan that fits; `NEVER` if there is none yet."""
        return min(map(int, self.fitting.rank))

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

    def add(self, plans: Iterable[Sequence[int]]) -> None:
        """Judges plans of the whole problem, those whose choices all take part."""
        for plan in plans:
            if all(k in kept for k, kept in zip(plan, self.kept, strict=True)):
                self.judge(self.numbers(plan))

    def judge(self, numbers: Sequence[int]) -> None:
        """Looks at a plan, and notes it if it is among the best."""
        plan = as_integers(numbers, compiled=self.compiled)
        self.loops["judge"](self.flat, plan, self.work, 1.0, 0.0, self.fitting, self.lacking)

    def numbers(self, plan: Sequence[int]) -> list[int]:
        """A plan as loops take it, of choices that all take part."""
        return [int(self.flat.begin[c]) + self.kept[c].index(k) for c, k in enumerate(plan)]

    def plan(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Call -> its choice in the whole problem."""
        return tuple(self.kept[c][number - int(self.flat.begin[c])] for c, number in enumerate(numbers))

    def result(self, history: Sequence[Progress], evaluated: int, *, proven: bool = False) -> SearchResult:
        """What was found.

        Raises:
            PlanError: Nothing that fits.
        """
        fitting, lacking = self.found(self.fitting), self.found(self.lacking)
        if not fitting:
            raise nothing_fits(self.problem, self.plan(lacking[0][3]), proven=proven)
        best, *others = fitting
        losers = [*others[:_RUNNERS_UP], *[each for each in lacking if each[1] < best[1]][:_RUNNERS_UP]]
        plan = self.plan(best[3])
        return SearchResult(
            plan,
            steady_state(self.problem, plan),
            peak_memory(self.problem, plan),
            tuple(history),
            tuple(RunnerUp(self.plan(each[3]), each[1] / NANOSECONDS, max(0, each[2])) for each in losers),
            evaluated,
            proven,
        )


def _no_rivals(num_calls: int, *, compiled: bool) -> Rivals:
    values = ([-1] * _RIVALS, [NEVER] * _RIVALS, [0] * _RIVALS, [0] * _RIVALS, [0] * (_RIVALS * num_calls))
    return Rivals(*(as_integers(each, compiled=compiled) for each in values))


def nothing_fits(problem: Problem, leanest: Sequence[int], *, proven: bool) -> PlanError:
    """The error where devices have too little memory, by the plan that needs least more than they have."""
    device = max(memory_at_peak(problem, leanest), key=lambda each: each.total - problem.capacity[each.device])
    capacity = problem.capacity[device.device]
    least = "No plan needs less" if proven else "No plan was found that needs less"
    return PlanError(
        f"plan: every device must have room for what it holds. Got {in_gib(device.total - capacity)} too much of it: "
        f"device {device.device} has {in_gib(capacity)}, and {device}. {least}. Use devices with at least "
        f"{in_gib(device.total)}, more devices, smaller batches or more micro-batches, or offload roles."
    )


def walk(arena: Arena, *, seed: int, steps: int, chains: int, begun: float, deadline: float) -> list[Progress]:
    """The chains of `search`. What they find is noted in the arena.

    Returns:
        The best after each round that found a better one, and at the end.
    """
    chance = random.Random(seed)
    starts = _starts(arena)
    plans = [starts[chain % len(starts)] for chain in range(chains)]
    numbers = [chance.getrandbits(32) or 1 for _ in range(chains)]
    room = as_integers([0] * len(arena.problem.calls), compiled=arena.compiled)
    table = as_integers([int(math.exp(-b / PER_UNIT) * 2**32) for b in range(BUCKETS)], compiled=arena.compiled)
    capacity = min(arena.problem.capacity)
    length = max(1, min(_ROUND, steps // (4 * chains)))
    history: list[Progress] = []
    evaluated = turn = 0
    while evaluated < steps and (turn == 0 or time.monotonic() < deadline):
        chain, length = turn % chains, min(length, steps - evaluated)
        way, first, last, penalty, penalty_of_lack = _WAYS[chain % len(_WAYS)]
        if turn >= chains:
            plans[chain] = _beginning(arena, way, plans[chain], chance)
        plan = as_integers(plans[chain], compiled=arena.compiled)
        unit = arena.best if arena.best < NEVER else _busy(arena, plan)
        temperatures = [
            max(1, int(unit * first * (last / first) ** (level / (_TEMPERATURES - 1))))
            for level in range(_TEMPERATURES)
        ]
        numbers[chain] = arena.loops["chain"](
            *(arena.flat, arena.groups, plan, length, numbers[chain], table),
            *(as_integers(temperatures, compiled=arena.compiled), penalty, penalty_of_lack / capacity),
            *(arena.fitting, arena.lacking, room, arena.work),
        )
        plans[chain] = [int(number) for number in plan]
        evaluated += length + 1
        turn += 1
        best = arena.best / NANOSECONDS if arena.best < NEVER else math.inf
        progress = Progress(evaluated, best, time.monotonic() - begun)
        if not history or best < history[-1].seconds:
            history.append(progress)
    if history[-1].evaluated < evaluated:
        history.append(progress)
    return history


def _starts(arena: Arena) -> list[list[int]]:
    """The fastest choice of every call, and, on the way from there to the leanest, the first plan that fits."""
    found: list[list[int]] = []
    for plan in fast_to_lean(arena.problem, arena.kept):
        numbers = arena.numbers(plan)
        arena.judge(numbers)
        if not found or arena.best < NEVER:
            found.append(numbers)
        if arena.best < NEVER:
            break
    return found


def _beginning(arena: Arena, way: str, plan: list[int], chance: random.Random) -> list[int]:
    """Where a chain goes on in its next round."""
    if way == "afresh":
        return [chance.randrange(int(a), int(b)) for a, b in zip(arena.flat.begin, arena.flat.begin[1:], strict=False)]
    found = arena.found(arena.fitting)
    if way == "on" or not found:
        return plan
    return list(found[0 if way == "best" else chance.randrange(len(found))][3])


def _busy(arena: Arena, plan: Integers) -> int:
    """Nanoseconds of all calls of a plan one after another."""
    return sum(int(arena.flat.seconds[number]) for number in plan)
