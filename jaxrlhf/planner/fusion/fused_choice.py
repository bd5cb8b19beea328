"""The choice of two train calls whose fusion into one pipeline makes a plan faster.

A search places calls that run one after another on shared devices. Two train calls that do not depend on each other
may instead run as one pipeline, each filling the other's bubbles (`fusible`). Here a plan is compared with the
same plan in which two train calls share devices and are fused.

Reference:
    Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, section 5.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.stage_costs import StageCost, stage_costs
from jaxrlhf.planner.fusion.fusible import find_schedules, opposite, units_of
from jaxrlhf.planner.plans.plan import Placement, PlanError
from jaxrlhf.planner.search.peak_memory import peak_memory
from jaxrlhf.planner.search.problem import Choice, Problem
from jaxrlhf.planner.search.simulate import Simulation, steady_state
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.schedules.instructions import Pipe, Schedule
from jaxrlhf.schedules.schedule import makespan
from jaxrlhf.schedules.schedule_bounds import lower_bound

LOOKED_AT, PAIRS, SIMULATED, SCHEDULED = 200, 40, 100, 6
"""Limits of the search: pairs of choices that are examined, the fastest without bubbles; of these, pairs that are tried
in plans, those with the least lower bounds; plans that are simulated, those that save most; pairs for which a schedule
is searched, those whose plans could be fastest."""


@dataclasses.dataclass(frozen=True)
class FusedPlan:
    """A plan in which two train calls run as one pipeline."""

    problem: Problem
    """The problem, with seconds and working memory of both calls on the first of them, and none on the second."""
    plan: tuple[int, ...]
    """Call -> its choice."""
    fuse: tuple[str, str]
    schedules: tuple[Schedule, ...]
    """The schedules of both calls, as in `Plan.schedules`."""
    simulation: Simulation
    seconds: float
    """Seconds of both calls together, under these schedules."""
    apart: float
    """Seconds of both calls, one after the other."""


@dataclasses.dataclass(frozen=True)
class FusedCalls:
    """Two train calls whose stages share devices."""

    placements: tuple[Placement, Placement]
    """Their placements, the second in the opposite direction."""
    costs: tuple[StageCost, StageCost]
    pipes: tuple[Pipe, ...]
    """One set of groups that share devices; the others are equal to it."""
    updates: int
    around: float
    """Seconds of both that do not depend on the schedule: sends, reductions, updates."""
    apart: float
    """Seconds of both calls, one after the other."""

    @property
    def bound(self) -> float:
        """A lower bound of the seconds under any schedule."""
        return lower_bound(self.pipes) * self.updates + self.around

    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules of the calls."""
        return find_schedules(*self.placements, self.costs)

    def seconds(self, schedules: Sequence[Schedule]) -> float:
        """Seconds under these schedules."""
        return makespan(Schedule(self.pipes, schedules[0].orders)) * self.updates + self.around


def best_fused(
    problem: Problem, workload: Workload, costs: CostModel, plans: Iterable[Sequence[int]], *, beat: float
) -> FusedPlan | None:
    """The fastest plan that differs from one of `plans` in its train calls alone, two of which are fused.

    Plans are tried in the order of their seconds at the lower bound of their schedules, until none of the rest could be
    faster than the best. Schedules are searched for `SCHEDULED` pairs of choices.

    Args:
        beat: The seconds of an iteration that it must be faster than.

    Returns:
        None if no fused plan is faster, or none fits.
    """
    best: FusedPlan | None = None
    found: dict[FusedCalls, tuple[tuple[Schedule, ...], float]] = {}
    for least, i, j, plan, both in _candidates(problem, workload, costs, list(plans), beat):
        limit = beat if best is None else best.simulation.seconds
        if least >= limit:
            break
        if both not in found:
            if len(found) == SCHEDULED:
                continue
            schedules = both.schedules()
            found[both] = schedules, both.seconds(schedules)
        schedules, seconds = found[both]
        if seconds >= both.apart:
            continue
        merged = as_one(problem, i, j, plan, seconds)
        simulation = steady_state(merged, plan)
        if simulation.seconds < limit:
            names = problem.calls[i].name, problem.calls[j].name
            best = FusedPlan(merged, plan, names, schedules, simulation, seconds, both.apart)
    return best


def _candidates(
    problem: Problem, workload: Workload, costs: CostModel, plans: Sequence[Sequence[int]], beat: float
) -> list[tuple[float, int, int, tuple[int, ...], FusedCalls]]:
    """(seconds of an iteration at the lower bound, two calls, plan, the two calls as one) of plans that fit and could
    be fast enough, from the fastest on."""
    tried: dict[tuple[int, int, tuple[int, ...]], tuple[float, float, FusedCalls]] = {}
    apart = [steady_state(problem, plan).seconds for plan in plans]
    for i, j in _pairs(problem) if plans else ():
        calls = workload.call(problem.calls[i].name), workload.call(problem.calls[j].name)
        if calls[0].updates != calls[1].updates:
            continue
        ways = _best_ways(problem, i, j, calls, costs)
        for (before, seconds), (bound, both, a, b) in itertools.product(zip(plans, apart, strict=True), ways):
            plan = tuple(a if k == i else b if k == j else pick for k, pick in enumerate(before))
            saved = sum(problem.calls[k].choices[before[k]].seconds for k in (i, j)) - bound
            if bound < beat and seconds - saved < tried.get((i, j, plan), (math.inf,))[0]:
                tried[i, j, plan] = seconds - saved, bound, both
    candidates = []
    for (i, j, plan), (_, bound, both) in sorted(tried.items(), key=lambda each: (each[1][0], each[0]))[:SIMULATED]:
        merged = as_one(problem, i, j, plan, bound)
        if any(taken > room for taken, room in zip(peak_memory(merged, plan), problem.capacity, strict=True)):
            continue
        seconds = steady_state(merged, plan).seconds
        if seconds < beat:
            candidates.append((seconds, i, j, plan, both))
    return sorted(candidates, key=lambda each: each[:4])


def _best_ways(
    problem: Problem, i: int, j: int, calls: tuple[ModelCall, ModelCall], costs: CostModel
) -> list[tuple[float, FusedCalls, int, int]]:
    """(seconds at the lower bound, both calls, choice of the one, choice of the other) of pairs on the same devices,
    over stages, that could be faster fused, from the fastest on. Those are looked at that would gain most if no bubble
    were left."""
    by_devices: dict[range, tuple[list[tuple[float, int]], list[tuple[float, int]]]] = {}
    for k, call in enumerate((i, j)):
        for number, c in enumerate(problem.calls[call].choices):
            if c.strategy.pipeline > 1 and c.strategy.chunks == 1:
                seconds = costs.seconds(calls[k], c.devices, c.strategy)
                by_devices.setdefault(c.devices, ([], []))[k].append((seconds.total - seconds.bubbles, number))
    pairs = (pair for ones, twos in by_devices.values() for pair in itertools.product(ones, twos))
    ways = []
    for (_, a), (_, b) in sorted(pairs, key=lambda pair: (pair[0][0] + pair[1][0], pair[0][1], pair[1][1]))[:LOOKED_AT]:
        both = fused_calls(calls, (problem.calls[i].choices[a], problem.calls[j].choices[b]), costs)
        if both is not None and (bound := both.bound) < both.apart:
            ways.append((bound, both, a, b))
    return sorted(ways, key=lambda way: (way[0], *way[2:]))[:PAIRS]


def fused_calls(
    calls: tuple[ModelCall, ModelCall], choices: tuple[Choice, Choice], costs: CostModel
) -> FusedCalls | None:
    """Two train calls as one pipeline; None if their stages do not share devices."""
    one, two = (Placement(tuple(choice.devices), choice.strategy) for choice in choices)
    try:
        placements = one, opposite(one, two)
    except ValueError:
        return None
    stages = stage_costs(calls, placements, costs)
    try:
        pipes = units_of(*placements, stages)[0]
    except PlanError:
        return None
    each = [costs.seconds(call, c.devices, c.strategy) for call, c in zip(calls, choices, strict=True)]
    around = sum(s.total - s.passes - s.bubbles for s in each)
    apart = sum(choice.seconds for choice in choices)
    return FusedCalls(placements, stages, pipes, calls[0].updates, around, apart)


def _pairs(problem: Problem) -> Iterator[tuple[int, int]]:
    """Pairs of train calls that do not wait for each other, in the order of the step."""
    trained = [i for i, call in enumerate(problem.calls) if call.trains]
    for i, j in itertools.combinations(trained, 2):
        one, two = problem.calls[i], problem.calls[j]
        if one.name not in two.needs and one.weights != two.weights:
            yield i, j


def as_one(problem: Problem, i: int, j: int, plan: Sequence[int], seconds: float) -> Problem:
    """The problem in which two calls are one task under a plan, so that it can be simulated.

    The first, which begins when both can, has the seconds and the working memory of both. The second takes no time.
    """
    calls = list(problem.calls)
    first, second = calls[i].choices[plan[i]], calls[j].choices[plan[j]]
    both = dataclasses.replace(first, seconds=seconds, working=first.working + second.working)
    nothing = dataclasses.replace(second, seconds=0.0, working=0)
    needs = tuple(dict.fromkeys(need for k in (i, j) for need in calls[k].needs if need != calls[i].name))
    calls[i] = dataclasses.replace(calls[i], needs=needs, choices=_with(calls[i].choices, plan[i], both))
    calls[j] = dataclasses.replace(
        calls[j], needs=(*calls[j].needs, calls[i].name), choices=_with(calls[j].choices, plan[j], nothing)
    )
    return dataclasses.replace(problem, calls=tuple(calls))


def _with(choices: tuple[Choice, ...], number: int, choice: Choice) -> tuple[Choice, ...]:
    return (*choices[:number], choice, *choices[number + 1 :])
