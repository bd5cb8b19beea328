"""Whether two train calls as one pipeline would make a plan faster.

A search places calls that run one after another on shared devices. Two train calls that wait for nothing of each
other may instead run as one pipeline, each filling the other's bubbles (`fusion`). Here a plan that was found is
compared with the same plan in which two train calls share devices and are fused.

Reference:
    Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, section 5.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jaxrlhf.planner.cost import CallSeconds, CostModel
from jaxrlhf.planner.fusion import StageCost, opposite, pipes_of, stages_per_node
from jaxrlhf.planner.peak_memory import peak_memory
from jaxrlhf.planner.plan import Placement, PlanError
from jaxrlhf.planner.problem import Choice, Problem
from jaxrlhf.planner.schedules.schedule_bounds import lower_bound
from jaxrlhf.planner.simulate import Simulation, steady_state
from jaxrlhf.planner.workload import ModelCall, Workload

LOOKED_AT, SIMULATED = 200, 40
"""Pairs of choices that are looked at closely, those that would be fastest without bubbles; and how many of them are
tried in whole plans, those that are fastest with them."""
FOUND = 1.05
"""How much longer than the lower bound the schedules are that are found at the start of a run, at most as a rule."""


@dataclasses.dataclass(frozen=True)
class FusedPlan:
    """A plan in which two train calls run as one pipeline."""

    problem: Problem
    """That was searched, with seconds and working memory of both calls on the first of them, and none on the second."""
    plan: tuple[int, ...]
    """Call -> its choice."""
    fuse: tuple[str, str]
    simulation: Simulation
    seconds: float
    """Of both calls together."""
    apart: float
    """What they would take one after the other."""


def best_fused(
    problem: Problem, workload: Workload, costs: CostModel, plans: Iterable[Sequence[int]], *, beat: float
) -> FusedPlan | None:
    """The fastest plan that differs from one of some others in its train calls alone, two of which are fused.

    Args:
        beat: Seconds of an iteration that it must be faster than.

    Returns:
        None: fusing makes nothing faster, or does not fit.
    """
    best: FusedPlan | None = None
    plans = list(plans)
    for i, j in _pairs(problem):
        calls = workload.call(problem.calls[i].name), workload.call(problem.calls[j].name)
        if calls[0].updates != calls[1].updates:
            continue
        ways = _fastest_ways(problem, i, j, calls, costs) if plans else []
        for plan, (seconds, apart, a, b) in itertools.product(plans, ways):
            limit = beat if best is None else best.simulation.seconds
            if seconds >= limit:
                continue
            candidate = list(plan)
            candidate[i], candidate[j] = a, b
            merged = as_one(problem, i, j, candidate, seconds)
            if any(taken > room for taken, room in zip(peak_memory(merged, candidate), problem.capacity, strict=True)):
                continue
            simulation = steady_state(merged, candidate)
            if simulation.seconds < limit:
                names = problem.calls[i].name, problem.calls[j].name
                best = FusedPlan(merged, tuple(candidate), names, simulation, seconds, apart)
    return best


def _fastest_ways(
    problem: Problem, i: int, j: int, calls: tuple[ModelCall, ModelCall], costs: CostModel
) -> list[tuple[float, float, int, int]]:
    """(seconds fused, seconds apart, choice of the one, choice of the other) of pairs that are faster fused, from the
    fastest on."""
    ways = []
    for a, b in _promising(problem, i, j, calls, costs):
        choices = problem.calls[i].choices[a], problem.calls[j].choices[b]
        seconds, apart = fused_seconds(calls, choices, costs), choices[0].seconds + choices[1].seconds
        if seconds is not None and seconds < apart:
            ways.append((seconds, apart, a, b))
    return sorted(ways)[:SIMULATED]


def _promising(
    problem: Problem, i: int, j: int, calls: tuple[ModelCall, ModelCall], costs: CostModel
) -> list[tuple[int, int]]:
    """Choices of two calls on the same devices, over stages, that would gain most if no bubble were left."""
    ones, twos = problem.calls[i].choices, problem.calls[j].choices
    by_devices: dict[range, list[int]] = {}
    for b, two in enumerate(twos):
        by_devices.setdefault(two.devices, []).append(b)
    found = []
    for a, one in enumerate(ones):
        for b in by_devices.get(one.devices, ()):
            if not _may_fuse(one, twos[b]):
                continue
            each = [costs.seconds(call, c.devices, c.strategy) for call, c in zip(calls, (one, twos[b]), strict=True)]
            found.append((sum(s.total - s.bubbles for s in each), a, b))
    return [(a, b) for _, a, b in sorted(found)[:LOOKED_AT]]


def fused_seconds(calls: tuple[ModelCall, ModelCall], choices: tuple[Choice, Choice], costs: CostModel) -> float | None:
    """Seconds of two train calls as one pipeline; None where their stages do not lie on one another."""
    placements = [Placement(tuple(c.devices), c.strategy) for c in choices]
    each = [costs.seconds(call, c.devices, c.strategy) for call, c in zip(calls, choices, strict=True)]
    stages = [_stage_cost(call, c, s) for call, c, s in zip(calls, choices, each, strict=True)]
    try:
        merged = stages_per_node(placements[0].strategy, placements[1].strategy)
        pipes = pipes_of(placements[0], opposite(*placements), merged, (stages[0], stages[1]))
    except (ValueError, PlanError):
        return None
    nodes = set(pipes[0].nodes)
    pipes = [pipe for pipe in pipes if set(pipe.nodes) & nodes]  # groups elsewhere are alike
    around = sum(s.total - s.passes - s.bubbles for s in each)
    return FOUND * lower_bound(pipes) * calls[0].updates + around


def _stage_cost(call: ModelCall, choice: Choice, seconds: CallSeconds) -> StageCost:
    """Seconds of a micro-batch on a stage: a third of them forward, or a quarter where that is computed anew."""
    one = seconds.passes / call.updates / choice.strategy.micro_batches
    forward = one / (4 if choice.strategy.remat == "layer" else 3)
    return StageCost(forward, one - forward, 1.0)


def _pairs(problem: Problem) -> Iterator[tuple[int, int]]:
    """Train calls of which neither waits for the other, in the order of the step."""
    trained = [i for i, call in enumerate(problem.calls) if call.trains]
    for i, j in itertools.combinations(trained, 2):
        one, two = problem.calls[i], problem.calls[j]
        if one.name not in two.needs and one.weights != two.weights:
            yield i, j


def _may_fuse(one: Choice, two: Choice) -> bool:
    pipelines = min(one.strategy.pipeline, two.strategy.pipeline) > 1
    return pipelines and max(one.strategy.chunks, two.strategy.chunks) == 1


def as_one(problem: Problem, i: int, j: int, plan: Sequence[int], seconds: float) -> Problem:
    """The problem in which two calls are one task under a plan, so that it can be simulated: whatever fuses calls
    enters so, a generation with the inference that begins on its finished rows too.

    The seconds and the working memory of both are those of the first, which begins when both can; the second, which may
    need the first, takes no time.
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
