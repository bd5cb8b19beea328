"""HybridFlow's mapping: the sets of weights that share devices, the sizes of these, and the strategy of each call.
`hybridflow` is the best of all mappings, `standalone` and `split` are the best of those that people make by hand.

All groupings of the sets are tried (15 for the four of PPO), with all numbers of devices that the groups can have. The
latency of a mapping is the sum of its stages', where calls that share devices add up and others run side by side. The
best by this measure are placed on the devices and simulated like all plans.

Reference:
    Sheng et al. 2024 (HybridFlow), arXiv:2409.19256, section 6 and Algorithm 1.
"""

import contextlib
import heapq
import math
import time
from collections.abc import Iterator, Sequence

from jaxrlhf.planner.plans.plan import PlanError
from jaxrlhf.planner.search.problem import Choice, Problem
from jaxrlhf.planner.search.search import fastest_that_fits, options_on
from jaxrlhf.planner.search.search_result import SearchResult, result_of

SIMULATED = 50
"""The number of mappings that are simulated: the fastest that fit."""
_TRIED = 100
"""The most for which choices that fit together are looked for; for some there may be none."""
_MOST_SETS = 8
"""The most sets of weights; they can share devices in 4140 ways."""
Group = tuple[str, ...]
"""Sets of weights that share devices."""
Colocation = tuple[Group, ...]
"""All sets of weights."""


def colocations(sets: Sequence[str]) -> Iterator[Colocation]:
    """All partitions of sets of weights into groups that share devices.

    >>> [len(list(colocations("abcdef"[:n]))) for n in range(1, 7)]
    [1, 2, 5, 15, 52, 203]
    """
    if not sets:
        yield ()
        return
    first, *others = sets
    for rest in colocations(others):
        yield ((first,), *rest)
        for k, group in enumerate(rest):
            yield (*rest[:k], (first, *group), *rest[k + 1 :])


def hybridflow(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """The best mapping of all, those of `colocate`, `standalone` and `split` among them. It is the same for every seed;
    `seconds` only cut the simulation of the best ones.

    Raises:
        PlanError: There are too many sets of weights, or no mapping fits.
    """
    del seed
    problem.require_choices()
    sets = _sets(problem)
    if len(sets) > _MOST_SETS:
        raise PlanError(
            f"hybridflow: tries all ways to group sets of weights, of which there may be {_MOST_SETS}. Got "
            f"{len(sets)}: {', '.join(sets)}. Use search."
        )
    always: list[Colocation] = [(tuple(sets),), tuple((name,) for name in sets)]
    with contextlib.suppress(PlanError):  # there are no two parts
        always.append(_split_parts(problem))
    return best_mapping(problem, list(colocations(sets)), "hybridflow", always=always, seconds=seconds)


def standalone(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Every set of weights on devices of its own, in the order of the step, of the sizes with the shortest iteration.

    Raises:
        PlanError: There are fewer devices than sets, or no sizes fit.
    """
    del seed, seconds
    return best_mapping(problem, [tuple((name,) for name in _sets(problem))], "standalone")


def split(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Two parts: the first set that is trained with every set of that size that is not, such as its reference; and all
    others, such as critic and reward. Without a second trained set, the sets never trained are the second part. The
    sizes are those that give the shortest iteration.

    Raises:
        PlanError: There are no two parts, or they do not fit.
    """
    del seed, seconds
    return best_mapping(problem, [_split_parts(problem)], "split")


def best_mapping(
    problem: Problem,
    among: Sequence[Colocation],
    method: str,
    *,
    always: Sequence[Colocation] = (),
    seconds: float | None = None,
) -> SearchResult:
    """The best mapping of some colocations.

    For each of them, all numbers of devices are tried that its groups can have side by side: those for which there are
    choices, where no group could have the next larger number. The seconds of a group on its devices are those of the
    fastest choices, whether or not they fit together. The calls of a stage are equally far from the beginning of the
    step. A stage takes as long as its slowest group.

    Args:
        method: The method that asks, for errors.
        always: Colocations of which as many mappings are simulated as if there were no others.
        seconds: After this time no further mapping is simulated.

    Raises:
        PlanError: No mapping fits the devices.
    """
    begun, groups, looked = time.monotonic(), _Groups(problem), 0
    ranked: list[tuple[float, int, Colocation, tuple[range, ...]]] = []
    for colocation in among:
        for sizes in _allocations([groups.sizes(group) for group in colocation], problem.num_devices):
            looked += 1
            devices = groups.place(colocation, sizes)
            if devices is not None and (latency := groups.latency(colocation, devices)) < math.inf:
                ranked.append((latency, looked, colocation, devices))
    found: dict[int, SearchResult | None] = {}
    for some in (None, *map(_as_set, always)):
        fitting = 0
        for _, number, colocation, devices in heapq.nsmallest(
            _TRIED, (mapping for mapping in ranked if some is None or _as_set(mapping[2]) == some)
        ):
            late = found and seconds is not None and time.monotonic() - begun > seconds
            if fitting == SIMULATED or late:
                break
            if number not in found:
                placed = {name: each for group, each in zip(colocation, devices, strict=True) for name in group}
                found[number] = None
                with contextlib.suppress(PlanError):
                    plan = fastest_that_fits(problem, options_on(problem, placed), method)
                    found[number] = result_of(problem, plan, evaluated=looked)
            fitting += found[number] is not None
    best = min(filter(None, found.values()), key=lambda result: result.seconds, default=None)
    if best is None:
        described = f"of {len(among)} ways to group them" if len(among) > 1 else f"in groups {_in_words(among[0])}"
        raise PlanError(
            f"{method}: sets of weights must fit on devices of their own, {described}. Got "
            f"{problem.num_devices} devices, on which they do not. Use search, more devices or larger ones."
        )
    return best


def _split_parts(problem: Problem) -> Colocation:
    """The two parts of `split`.

    Raises:
        PlanError: There are none.
    """
    trained = [call.weights for call in problem.calls if call.trains]
    names = _sets(problem)
    if not trained or len(names) < 2:
        raise PlanError(f"split: must have two sets of weights, one of them trained. Got {', '.join(names)}.")
    actor = next((call.weights for call in problem.calls if call.kind == "generate"), trained[0])
    second = [name for name in dict.fromkeys(trained) if name != actor]
    likes = _like(problem, actor)
    first = [actor, *[name for name in names if name not in trained and name in likes]] if second else [actor]
    return tuple(first), tuple(name for name in names if name not in first)


def _sets(problem: Problem) -> list[str]:
    """The sets of weights, in the order of the step."""
    return list(dict.fromkeys(call.weights for call in problem.calls))


def _like(problem: Problem, name: str) -> set[str]:
    """Sets that could be of the same model, head included: their sizes differ by at most a fiftieth."""

    def size(weights: str) -> int:
        readers = [call for call in problem.calls if call.weights == weights and not call.trains]
        one_device = [c for call in readers for c in call.choices if not c.offloaded]
        return min((((c.resting or c.copy) * len(c.devices) // c.strategy.data) for c in one_device), default=0)

    own = size(name)
    return {other for other in _sets(problem) if abs(size(other) - own) <= own / 50}


def _as_set(colocation: Colocation) -> frozenset[frozenset[str]]:
    return frozenset(map(frozenset, colocation))


def _in_words(colocation: Colocation) -> str:
    return " | ".join(" + ".join(group) for group in colocation)


def _allocations(sizes: Sequence[Sequence[int]], num_devices: int) -> Iterator[tuple[int, ...]]:
    """Numbers of devices for each group, which fit together, and of which none can be the next larger one."""

    def extend(chosen: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        if len(chosen) == len(sizes):
            pairs = zip(sizes, chosen, strict=True)
            if all(n - size > left for each, size in pairs for n in each if n > size):
                yield chosen
            return
        for size in sizes[len(chosen)]:
            if size <= left:
                yield from extend((*chosen, size), left - size)

    yield from extend((), num_devices)


class _Groups:
    """Placements of groups of sets on devices and their seconds. Each is found once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._places: list[dict[range, list[Choice]]] = []
        """Call -> devices -> its choices there."""
        self._stages: list[int] = []
        positions = {call.name: j for j, call in enumerate(problem.calls)}
        for call in problem.calls:
            places: dict[range, list[Choice]] = {}
            for choice in call.choices:
                places.setdefault(choice.devices, []).append(choice)
            self._places.append(places)
            self._stages.append(1 + max((self._stages[positions[need]] for need in call.needs), default=-1))
        self._where: dict[Group, list[range]] = {}
        self._seconds: dict[tuple[Group, range], list[float]] = {}

    def where(self, group: Group) -> list[range]:
        """Devices on which all calls of a group can run, in their order."""
        if group not in self._where:
            places = [set(self._places[j]) for j in self._calls(group)]
            self._where[group] = sorted(set.intersection(*places), key=lambda devices: (devices.start, devices.stop))
        return self._where[group]

    def sizes(self, group: Group) -> list[int]:
        """Numbers of devices that a group can have."""
        return sorted({len(devices) for devices in self.where(group)})

    def place(self, colocation: Colocation, sizes: Sequence[int]) -> tuple[range, ...] | None:
        """Devices for each group, side by side: the largest number first, each the first that are free. None if there
        are none."""
        placed: dict[Group, range] = {}
        for size, group in sorted(zip(sizes, colocation, strict=True), key=lambda each: -each[0]):
            for devices in self.where(group):
                if len(devices) == size and not any(_overlap(devices, other) for other in placed.values()):
                    placed[group] = devices
                    break
            else:
                return None
        return tuple(placed[group] for group in colocation)

    def latency(self, colocation: Colocation, devices: Sequence[range]) -> float:
        """HybridFlow's latency; infinite if a call does not fit on its devices."""
        of_groups = [self._stage_seconds(group, each) for group, each in zip(colocation, devices, strict=True)]
        return sum(max(seconds) for seconds in zip(*of_groups, strict=True))

    def _calls(self, group: Group) -> list[int]:
        return [j for j, call in enumerate(self._problem.calls) if call.weights in group]

    def _stage_seconds(self, group: Group, devices: range) -> list[float]:
        """Stage -> seconds of all its calls, one after another, each with the fastest choice for which there is room
        beside the trained weights of the other sets. Infinite where a call has none."""
        if (group, devices) not in self._seconds:
            there = {j: self._places[j][devices] for j in self._calls(group)}
            names = {j: self._problem.calls[j].weights for j in there}
            trained = [j for j in there if self._problem.calls[j].trains]
            rests = {names[j]: min(choice.resting for choice in there[j]) for j in trained}
            room = min(self._problem.capacity[memory] for memory in self._problem.memories(devices))
            seconds = self._seconds[group, devices] = [0.0] * (max(self._stages) + 1)
            for j, choices in there.items():
                own = room - sum(size for name, size in rests.items() if name != names[j])
                taken = ((x, x.resting + x.base + x.working + x.copy - x.shared_with_training) for x in choices)
                seconds[self._stages[j]] += min((x.busy for x, size in taken if size <= own), default=math.inf)
        return self._seconds[group, devices]


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop
