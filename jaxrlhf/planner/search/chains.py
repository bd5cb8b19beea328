"""Chains of plans by Metropolis-Hastings, over the choices of single calls, of pairs, and of all that share devices.

Reference:
    Mei et al. 2024 (ReaL), arXiv:2406.14088, 5.2.
"""

import dataclasses
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxrlhf.numba_loops import Integers, integers, loops
from jaxrlhf.planner.plans.plan import NoRoomError, PlanError
from jaxrlhf.planner.search import chain_loops, evaluate_loops
from jaxrlhf.planner.search.chain_loops import BUCKETS, PER_UNIT, Rivals
from jaxrlhf.planner.search.evaluate_loops import NEVER
from jaxrlhf.planner.search.flat_problem import NANOSECONDS, flat_problem, groups_of, room_for_work
from jaxrlhf.planner.search.peak_memory import in_gb, memory_at_peak, remedy, room_in_words
from jaxrlhf.planner.search.problem import Problem
from jaxrlhf.planner.search.pruning import own_bytes, worth_keeping
from jaxrlhf.planner.search.search_result import Progress, RunnerUp, SearchResult, result_of


class _Way(NamedTuple):
    """The rounds of a chain. Temperatures are in parts of the shortest iteration known."""

    beginning: str
    """`on`: where it is. `afresh`: at random, many calls on many devices or few. `best`: at the best plan. `rival`: at
    one of the best that differ in shape."""
    first: float
    """The temperature at which a round begins."""
    last: float
    """The temperature at which it ends."""
    cost_of_lack: float
    """By what part an iteration counts as longer where a device lacks as much memory as it has."""


WAYS = (
    _Way("on", first=0.3, last=0.003, cost_of_lack=5.0),
    _Way("afresh", first=0.05, last=0.002, cost_of_lack=2.0),
    _Way("best", first=0.05, last=0.002, cost_of_lack=2.0),
    _Way("rival", first=0.02, last=0.001, cost_of_lack=1.0),
)
"""One for each chain."""
_ROUNDS = (2_000, 8_000, 32_000)
"""Steps in which a chain cools down: in its first round, its second, its third, and again from the first. Short rounds
begin at more plans, long ones find what takes several steps that only help together."""
_TEMPERATURES = 32
_DESCENTS = 4
"""Plans at a time whose neighbors are all looked at."""
_RIVALS = 16
"""The most plans that are stored, of those that fit and, again, of those that do not."""
_RUNNERS_UP = 5
"""Plans of each sort that are reported."""


class Chains:
    """Chains over the plans of a problem, of choices that are worth keeping, and the best plans they have found."""

    def __init__(self, problem: Problem, *, compiled: bool, seconds: float | None) -> None:
        """Takes all choices if a call has none that is worth keeping, so that the error can name what is lacking.

        Args:
            seconds: The limit on all that the chains do. None means no limit.

        Raises:
            PlanError: A call has no choices.
        """
        self._begun = time.monotonic()
        self._seconds = math.inf if seconds is None else seconds
        problem.require_choices()
        kept = worth_keeping(problem)
        if not all(kept):
            kept = tuple(tuple(range(len(call.choices))) for call in problem.calls)
        part = problem.with_choices(kept)
        self._problem, self._kept, self._compiled = problem, kept, compiled
        self._flat = flat_problem(part, compiled=compiled, fits=problem.devices_per_memory == 1)
        self._groups = groups_of(part, self._flat, compiled=compiled)
        self._loops = loops(evaluate_loops, chain_loops, compiled=compiled)
        self._work = room_for_work(self._flat, compiled=compiled)
        self._fitting, self._lacking = self._no_rivals(), self._no_rivals()
        self._history: list[Progress] = []
        self._evaluated = 0

    def walk(self, *, seed: int, steps: int) -> None:
        """Chains take turns, a round each.

        The first round begins at the fastest choice of every call or, where that does not fit, at the first plan that
        does on the way from there to the leanest. In a step, a call or two get other choices: at random, where another
        call is, or beside it; or all calls on some devices move to others. A plan that does not fit costs more the more
        it lacks, so that a chain finds its way out. Steps are taken as if a step back were as likely, which it is not
        quite.

        Args:
            steps: Of all chains together.
        """
        chance, chains = random.Random(seed), len(WAYS)
        starts = self._starts()
        plans = [starts[chain % len(starts)] for chain in range(chains)]
        numbers = [chance.getrandbits(32) or 1 for _ in range(chains)]
        table = self._integers(int(math.exp(-b / PER_UNIT) * 2**32) for b in range(BUCKETS))
        before, capacity = self._integers([0] * len(self._problem.calls)), max(1, min(self._problem.capacity))
        taken = turn = 0
        while taken < steps and not (turn and self._time_is_up()):
            chain, longest = turn % chains, max(1, steps // (4 * chains))
            length = min(_ROUNDS[turn // chains % len(_ROUNDS)], longest, steps - taken)
            way = WAYS[chain]
            if turn >= chains:
                plans[chain] = self._beginning(way, plans[chain], chance)
            plan = self._integers(plans[chain])
            temperatures = self._temperatures(way, plans[chain])
            numbers[chain] = self._loops["chain"](
                *(self._flat, self._groups, plan, length, numbers[chain], table, temperatures),
                *(way.cost_of_lack / capacity, self._fitting, self._lacking, before, self._work),
            )
            plans[chain] = [int(number) for number in plan]
            self._looked_at(length)
            taken += length
            turn += 1

    def descend(self, *, most: int) -> None:
        """From the best plans, as long as that helps: looks at all plans that differ from one of them in one call.
        `most`: plans to look at, all together."""
        before, tried, neighbors = NEVER + 1, set[tuple[int, ...]](), len(self._groups.members)
        while self._best < before and not self._time_is_up():
            before = self._best
            for _, _, _, plan in self._found(self._fitting)[:_DESCENTS]:
                if plan not in tried and (len(tried) + 1) * neighbors <= most:
                    tried.add(plan)
                    here, changed = self._integers(plan), self._integers([0] * len(plan))
                    number = self._loops["judge_neighbors"](
                        *(self._flat, self._groups, here, changed, self._work, self._fitting, self._lacking)
                    )
                    self._looked_at(int(number))

    def result(self) -> SearchResult:
        """The best plan found. Raises NoRoomError if no plan was found that fits."""
        fitting, lacking = self._found(self._fitting), self._found(self._lacking)
        if not fitting:
            raise self._nothing_fits(self._plan(lacking[0][3]))
        best, *others = fitting
        losers = [*others[:_RUNNERS_UP], *[each for each in lacking if each[1] < best[1]][:_RUNNERS_UP]]
        end = Progress(self._evaluated, best[1] / NANOSECONDS, time.monotonic() - self._begun)
        return dataclasses.replace(
            result_of(self._problem, self._plan(best[3]), evaluated=self._evaluated),
            history=(*self._history, end),
            runners_up=tuple(RunnerUp(self._plan(each[3]), each[1] / NANOSECONDS, max(0, each[2])) for each in losers),
        )

    def _nothing_fits(self, leanest: Sequence[int]) -> PlanError:
        """The error if devices have too little memory, from the plan that lacks least."""
        shared_by = self._problem.devices_per_memory
        each_memory = zip(memory_at_peak(self._problem, leanest), self._problem.capacity, strict=True)
        full, room = max(each_memory, key=lambda pair: pair[0].total - pair[1])
        return NoRoomError(
            f"plan: must fit into {room_in_words(room, shared_by)}. Got {full}, {in_gb(full.total - room)} too much. "
            f"No plan was found that needs less. {remedy(shared_by)}"
        )

    # -- how far it is -------------------------------------------------------------------------------------------------

    @property
    def _best(self) -> int:
        """Nanoseconds of an iteration under the best plan that fits; `NEVER` if there is none yet."""
        return min(map(int, self._fitting.rank))

    def _time_is_up(self) -> bool:
        return time.monotonic() - self._begun >= self._seconds

    def _looked_at(self, plans: int) -> None:
        """Notes how far the search is, after loops have looked at that many more plans."""
        self._evaluated += plans
        seconds = self._best / NANOSECONDS if self._best < NEVER else math.inf
        if not self._history or seconds < self._history[-1].seconds:
            self._history.append(Progress(self._evaluated, seconds, time.monotonic() - self._begun))

    def _found(self, rivals: Rivals) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """(rank, nanoseconds, bytes lacking, plan in numbers of the flat problem), lowest first."""
        size = len(self._problem.calls)
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

    # -- where rounds begin --------------------------------------------------------------------------------------------

    def _starts(self) -> list[list[int]]:
        """The fastest choice of every call, and, on the way from there to the leanest, the first plan that fits."""
        found: list[list[int]] = []
        for plan in _fast_to_lean(self._problem, self._kept):
            numbers = [int(self._flat.begin[c]) + self._kept[c].index(k) for c, k in enumerate(plan)]
            here = self._integers(numbers)
            self._loops["judge"](self._flat, here, self._work, 0.0, self._fitting, self._lacking)
            self._looked_at(1)
            if not found or self._best < NEVER:
                found.append(numbers)
            if self._best < NEVER:
                break
        return found

    def _beginning(self, way: _Way, plan: list[int], chance: random.Random) -> list[int]:
        """The plan with which a chain begins its next round."""
        if way.beginning == "afresh":
            groups, wide, begun = self._groups, chance.random(), []
            for c in range(len(plan)):
                group = groups.begin[c + 1] - 1  # on the most devices
                if chance.random() >= wide:
                    group = chain_loops.any_group(groups, c, chance.getrandbits(32))
                begun.append(int(chain_loops.member(groups, group, chance.getrandbits(32))))
            return begun
        found = self._found(self._fitting)
        if way.beginning == "on" or not found:
            return plan
        return list(found[0 if way.beginning == "best" else chance.randrange(len(found))][3])

    def _temperatures(self, way: _Way, plan: list[int]) -> Integers:
        """Falling, in nanoseconds. Without a plan that fits, their unit is the time of all calls one after another."""
        unit = self._best if self._best < NEVER else sum(int(self._flat.seconds[number]) for number in plan)
        cooler = (way.last / way.first) ** (1 / (_TEMPERATURES - 1))
        return self._integers(max(1, int(unit * way.first * cooler**level)) for level in range(_TEMPERATURES))

    # -- numbers for loops ---------------------------------------------------------------------------------------------

    def _integers(self, values: Iterable[int]) -> Integers:
        return integers(values, compiled=self._compiled)

    def _no_rivals(self) -> Rivals:
        shape, rank, nanoseconds, lacking = (self._integers([x] * _RIVALS) for x in (-1, NEVER, 0, 0))
        return Rivals(shape, rank, nanoseconds, lacking, self._integers([0] * _RIVALS * len(self._problem.calls)))

    def _plan(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """A plan in numbers of the flat problem -> call -> its choice in the whole problem."""
        return tuple(self._kept[c][number - int(self._flat.begin[c])] for c, number in enumerate(numbers))


def _fast_to_lean(problem: Problem, among: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Plans, from the fastest choice of every call to the one that takes least memory.

    Every call has the choice that is least in seconds, in parts of its fastest, plus a weight times what it takes of a
    device. The weight grows from plan to plan.

    Args:
        among: Call -> its choices that count.
    """
    sizes = own_bytes(problem)
    capacity = max(1, min(problem.capacity))
    seconds = [np.array([x.busy for x in call.choices]) for call in problem.calls]
    last: tuple[int, ...] = ()
    for weight in (0.0, *(2.0**power for power in range(-8, 11))):
        plan = []
        for each, bytes_, some in zip(seconds, sizes, among, strict=True):
            some = list(some)
            slower = each[some] / max(1e-9, each[some].min())
            plan.append(some[int(np.argmin(slower + weight * bytes_[some].sum(1) / capacity))])
        if tuple(plan) != last:
            last = tuple(plan)
            yield last
